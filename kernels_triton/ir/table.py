"""The op table: one line for each op of the kernel language, with its Triton expression and its torch equivalent.

A value has one of three classes: `f` is a float, computed in float32; `i` is an integer; `b` is a bool. `operands` has
one letter for each operand. `n` is any number: the call's class is the highest class of its operands and literals (b <
i < f, and b counts as i). `a` is anything. Operands of a lower class are converted. Integers are added and multiplied
as int64, and compared in the dtype they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels_triton.base.random import RANDOM_UNIFORM

Class = Literal["f", "i", "b"]


@dataclass(frozen=True)
class Op:
    """`triton` is a format string over the operands' names. `reduces` says whether the op reduces a row ("row") or all
    rows ("col"). For a reduction, `triton` reduces one tile, and `combine` merges two partial results."""

    operands: str
    result: str  # f, i, b, or n and a: the call's class
    triton: str
    torch: Callable[..., Tensor]
    reduces: Literal["", "row", "col"] = ""
    neutral: float = 0.0
    function: str = ""  # of kernels_triton.library.kernels.functions, that `triton` calls
    combine: str = "{0} + {1}"


def _float(triton: str, twin: Callable[..., Tensor], count: int = 1, function: str = "") -> Op:
    return Op("f" * count, "f", triton, twin, function=function)


def _compare(sign: str, twin: Callable[..., Tensor]) -> Op:
    return Op("nn", "b", f"{{0}} {sign} {{1}}", twin)


def _bits(triton: str, twin: Callable[..., Tensor]) -> Op:
    return Op("ii", "i", triton, twin)


def _handled_by_name(operands: str, result: str) -> Op:
    """An op that `reference` and `codegen` handle by name."""
    return Op(operands, result, "", _no_expression)


def _no_expression(*_: Any) -> Tensor:
    raise AssertionError("this op has a case of its own")


# Library functions that are exact in float64 too ("": no function). The others have float32 accuracy.
WIDE = {"", "power", "truncated", "nearest", "nearest_quotient", "float_rest", "next_after"}


def _product(x: Tensor, dims: int | list[int], keepdim: bool) -> Tensor:
    for dim in [dims] if isinstance(dims, int) else dims:
        x = torch.prod(x, dim, keepdim=keepdim)
    return x


NAN = "propagate_nan=tl.PropagateNan.ALL"
LARGER, SMALLER, INF = f"tl.maximum({{0}}, {{1}}, {NAN})", f"tl.minimum({{0}}, {{1}}, {NAN})", float("inf")

OPS: dict[str, Op] = {
    "add": Op("nn", "n", "{0} + {1}", torch.add),
    "sub": Op("nn", "n", "{0} - {1}", torch.sub),
    "mul": Op("nn", "n", "{0} * {1}", torch.mul),
    "neg": Op("n", "n", "{0} * -1", torch.neg),  # Triton compiles -x to 0 - x, which is +0 for x = 0
    "abs": Op("n", "n", "tl.abs({0})", torch.abs),
    "square": Op("n", "n", "{0} * {0}", torch.square),
    "maximum": Op("nn", "n", LARGER, torch.maximum),
    "minimum": Op("nn", "n", SMALLER, torch.minimum),
    "fma": _float("{0} * {1} + {2}", lambda a, b, c: a * b + c, 3),
    "div": _float("{0} / {1}", torch.div, 2),
    "reciprocal": _float("1.0 / {0}", torch.reciprocal),
    "sqrt": _float("tl.sqrt({0})", torch.sqrt),
    "rsqrt": _float("tl.rsqrt({0})", torch.rsqrt),
    "exp": _float("exp({0})", torch.exp, function="exp"),
    "exp2": _float("tl.exp2({0})", torch.exp2),
    "expm1": _float("expm1({0})", torch.expm1, function="expm1"),
    "log": _float("tl.log({0})", torch.log),
    "log2": _float("tl.log2({0})", torch.log2),
    "log1p": _float("log1p({0})", torch.log1p, function="log1p"),
    "sin": _float("sine({0})", torch.sin, function="sine"),
    "cos": _float("cosine({0})", torch.cos, function="cosine"),
    "tanh": _float("tanh({0})", torch.tanh, function="tanh"),
    "sigmoid": _float("logistic({0})", torch.sigmoid, function="logistic"),
    "atan": _float("arctan({0})", torch.atan, function="arctan"),
    "erf": _float("tl.erf({0})", torch.erf),
    # The normal distribution function, accurate to 16 bits: `strength_reduce` emits it where that is enough.
    "normal": _float("normal({0})", torch.special.ndtr, function="normal"),
    "floor": _float("tl.floor({0})", torch.floor),
    "ceil": _float("tl.ceil({0})", torch.ceil),
    "trunc": _float("truncated({0})", torch.trunc, function="truncated"),
    "round": _float("nearest({0})", torch.round, function="nearest"),
    "pow": _float("power({0}, {1})", torch.pow, 2, function="power"),
    "sign": _float("sign({0})", torch.sign, function="sign"),
    "erfc": _float("erfc({0})", torch.erfc, function="erfc"),
    "erfcx": _float("erfcx({0})", torch.special.erfcx, function="erfcx"),
    "erfinv": _float("erfinv({0})", torch.erfinv, function="erfinv"),
    "ndtri": _float("ndtri({0})", torch.special.ndtri, function="ndtri"),
    "lgamma": _float("lgamma({0})", torch.lgamma, function="lgamma"),
    "digamma": _float("digamma({0})", torch.digamma, function="digamma"),
    "trigamma": _float("trigamma({0})", lambda x: torch.polygamma(1, x), function="trigamma"),
    "i0": _float("bessel_i0({0})", torch.i0, function="bessel_i0"),
    "i1": _float("bessel_i1({0})", torch.special.i1, function="bessel_i1"),
    "k0": _float("bessel_k0({0})", torch.special.modified_bessel_k0, function="bessel_k0"),
    "k1": _float("bessel_k1({0})", torch.special.modified_bessel_k1, function="bessel_k1"),
    "scaled_k0": _float("scaled_bessel_k0({0})", torch.special.scaled_modified_bessel_k0, function="scaled_bessel_k0"),
    "scaled_k1": _float("scaled_bessel_k1({0})", torch.special.scaled_modified_bessel_k1, function="scaled_bessel_k1"),
    "nextafter": _float("next_after({0}, {1})", torch.nextafter, 2, function="next_after"),
    "fmod": _float("float_rest({0}, {1})", torch.fmod, 2, function="float_rest"),
    # `div` rounded to the nearest float: for a quotient that is truncated next.
    "div_rn": _float("nearest_quotient({0}, {1})", torch.div, 2, function="nearest_quotient"),
    "eq": _compare("==", torch.eq),
    "ne": _compare("!=", torch.ne),
    "lt": _compare("<", torch.lt),
    "le": _compare("<=", torch.le),
    "gt": _compare(">", torch.gt),
    "ge": _compare(">=", torch.ge),
    "isnan": Op("f", "b", "{0} != {0}", torch.isnan),
    "and": Op("bb", "b", "{0} & {1}", torch.logical_and),
    "or": Op("bb", "b", "{0} | {1}", torch.logical_or),
    "xor": Op("bb", "b", "{0} ^ {1}", torch.logical_xor),
    "not": Op("b", "b", "~{0}", torch.logical_not),
    "bitand": _bits("{0} & {1}", torch.bitwise_and),
    "bitor": _bits("{0} | {1}", torch.bitwise_or),
    "bitxor": _bits("{0} ^ {1}", torch.bitwise_xor),
    "bitnot": Op("i", "i", "~{0}", torch.bitwise_not),
    "shl": _bits("{0} << {1}", torch.bitwise_left_shift),
    "shr": _bits("{0} >> {1}", torch.bitwise_right_shift),
    "floordiv": Op("ii", "i", "floor_divide({0}, {1})", torch.floor_divide, function="floor_divide"),
    "remainder": Op("ii", "i", "floor_remainder({0}, {1})", torch.remainder, function="floor_remainder"),
    "where": Op("baa", "a", "tl.where({0}, {1}, {2})", torch.where),
    # The value rounded to the step's dtype, then widened again for further computation.
    "cast": _handled_by_name("a", ""),
    # The unchanged value. It counts as varying along the dims whose stride in `attributes` (one a dim) is not 0.
    "spread": Op("a", "a", "{0}", lambda x: x),
    # The index along dim `attributes[0]` of the space.
    "iota": _handled_by_name("", "i"),
    # The number that `shardc::random_uniform` has for global element `offset + sum(strides * indices)`. Operands: seed
    # (a value) and offset. Attributes: the op's id, then one stride for each dim of the space.
    "uniform": Op("ii", "f", "", _no_expression, function="philox_word"),
    "rsum": Op("n", "n", "tl.sum({0}, 1, keep_dims=True)", torch.sum, "row"),
    "rmax": Op("f", "f", "row_max({0})", torch.amax, "row", -INF, "row_max", LARGER),
    "rmin": Op("f", "f", "-row_max(-{0})", torch.amin, "row", INF, "row_max", SMALLER),
    "rprod": Op("f", "f", "row_product({0})", _product, "row", 1.0, "row_product", "{0} * {1}"),
    "csum": Op("f", "f", "tl.sum({0}, 0, keep_dims=True)", torch.sum, "col"),
    "cmax": Op("f", "f", "col_max({0})", torch.amax, "col", -INF, "col_max", LARGER),
    "cmin": Op("f", "f", "-col_max(-{0})", torch.amin, "col", INF, "col_max", SMALLER),
    "cprod": Op("f", "f", "col_product({0})", _product, "col", 1.0, "col_product", "{0} * {1}"),
}

RANK: dict[Class, int] = {"b": 0, "i": 1, "f": 2}
UNIFORM = RANDOM_UNIFORM


def neutral_literal(op: Op) -> str:
    """The neutral element of a float reduction, as Triton source."""
    return repr(op.neutral) if math.isfinite(op.neutral) else f'float("{op.neutral}")'


def class_of(dtype: torch.dtype) -> Class:
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


def literal_class(value: float | int | bool) -> Class:
    return "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"


def common_class(op: Op, classes: list[Class]) -> Class:
    """The class that the `n` and `a` operands of a call are converted to."""
    candidates: list[Class] = [c for c, letter in zip(classes, op.operands, strict=True) if letter in "na"]
    highest: Class = "f" if not candidates else max(candidates, key=lambda c: RANK[c])
    return "i" if highest == "b" and "n" in op.operands else highest
