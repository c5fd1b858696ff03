"""Every pointwise op that kernels know, once with each kind of arguments, on values that are special to it; the kernels
that are made of all of them at once; and how near to eager torch in float64 their results are.

    FLOATS     of "a", "b" and "c", of one floating dtype: all pairs of the edges, and c another order of them
    WHOLE      of integers, WIDER of integers that are no bytes, TRUTHS of bools
    MIXED      of operands of several dtypes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from kernels_triton.ir.kernel import Kernel
from shardc.ir.graph import info
from shardc.ir.mesh import Mesh
from shardc.ir.types import DTYPE_NAMES
from shardc.passes.fusion.analysis.iteration_space import space_constraint
from shardc.passes.fusion.clustering.fusion_graph import build_fusion_graph
from shardc.passes.fusion.emit.kernel_builder import build_kernel
from tests.handmade import Builder

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
# Whose zeros have any sign: of two zeros either is the larger; a rest after a power of two is x - x.
UNSIGNED = {
    *(aten.relu.default, aten.relu6.default, aten.fmax.default, aten.fmin.default, aten.maximum.default),
    *(aten.minimum.default, aten.max.other, aten.min.other, aten.remainder.Scalar, aten.gelu_backward.default),
    *(aten.special_i1.default, aten.special_i1e.default, aten.special_modified_bessel_i1.default),
    *(aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.clamp.Tensor, aten.clamp.default),
}
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
EDGES = (
    *(0.0, -0.0, INF, -INF, NAN, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 20.0, 25.0, -25.0, 2.5, -7.25),
    *(1e-3, -1e-3, 60.0, 0.40625, -0.8125, 2.0**70, -(2.0**70), 2.0**-40),
)


def op(name: str) -> Any:
    """`add.Tensor`, or `abs` for its default."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def case(name: str, *args: Any, **options: Any) -> Case:
    return op(name), args, options


def cases(names: str, *args: Any) -> list[Case]:
    return [case(name, *args) for name in names.split()]


FLOATS: list[Case] = [
    *cases(
        "abs acos acosh angle asin asinh atan atanh ceil clone cos cosh deg2rad digamma erf erfc erfinv exp "
        "exp2 expm1 floor frac gelu hardsigmoid hardswish isinf isnan isneginf isposinf lgamma log log10 log1p log2 "
        "logical_not mish neg positive rad2deg reciprocal relu relu6 round rsqrt sgn sigmoid sign silu sin sinc "
        "sinh special_entr special_erfcx special_log_ndtr "
        "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 sqrt square tan tanh trunc",
        "a",
    ),
    *cases(
        "add.Tensor atan2 clamp_max.Tensor clamp_min.Tensor div.Tensor eq.Tensor floor_divide fmax fmin "
        "fmod.Tensor ge.Tensor gt.Tensor heaviside hypot ldexp.Tensor le.Tensor logaddexp logaddexp2 logical_and "
        "logical_or logical_xor lt.Tensor max.other maximum min.other minimum mul.Tensor ne.Tensor pow.Tensor_Tensor "
        "_prelu_kernel remainder.Tensor rsub.Tensor special_xlog1py sub.Tensor xlogy.Tensor",
        "a",
        "b",
    ),
    # Where an activation was no number, CPUs and GPUs differ in what its gradient is.
    *cases(
        "hardsigmoid_backward hardswish_backward logit_backward mish_backward silu_backward tanh_backward",
        "a",
        "n",
    ),
    *cases(
        "add.Scalar copysign.Scalar div.Scalar eq.Scalar floor_divide.Scalar fmod.Scalar ge.Scalar gt.Scalar le.Scalar "
        "lt.Scalar mul.Scalar ne.Scalar pow.Tensor_Scalar remainder.Scalar rsub.Scalar sub.Scalar clamp_max clamp_min "
        "leaky_relu hardshrink softshrink",
        "a",
        0.625,
    ),
    *[case("pow.Tensor_Scalar", "a", n) for n in (1, 2, 3, 0.5, -0.5, -1, -3, 2.5)],
    *cases("pow.Scalar remainder.Scalar_Tensor xlogy.Scalar_Self special_xlog1py.self_scalar", 1.7, "a"),
    *cases("xlogy.Scalar_Other special_xlog1py.other_scalar", "a", 2.0),
    *[
        case(f"div.{kind}_mode", "a", by, rounding_mode=m)
        for m in ("floor", "trunc", None)
        for kind, by in (("Tensor", "b"), ("Scalar", -0.75))
    ],
    case("remainder.Scalar", "a", -2.0),
    case("add.Tensor", "a", "b", alpha=0.3),
    case("rsub.Tensor", "a", "b", alpha=0.3),
    case("rsub.Scalar", "a", 0.625, alpha=-2),
    case("sub.Tensor", "a", "b", alpha=-2),
    case("clamp", "a", -0.5, 2.5),
    case("clamp.Tensor", "a", "b", "c"),
    case("clamp", "a", None, 0.25),
    case("clamp", "a", 0.0, 2.5),
    case("clamp", "a", -2.5, 0.0),
    case("nan_to_num", "a", 0.25, 9.0, -9.0),
    case("nan_to_num", "a"),
    case("nan_to_num", "a", 0.0, 0.0, 0.0),
    case("round.decimals", "a", decimals=1),
    case("round.decimals", "a", decimals=-1),
    case("polygamma", 0, "a"),
    case("polygamma", 1, "v"),
    case("mvlgamma", "p", 3),
    # Of infinities versions of torch say NaN, or what is right.
    *cases("i0 special_i0e special_i1 special_i1e special_modified_bessel_i0 special_modified_bessel_i1", "m"),
    case("signbit", "n"),
    case("nextafter", "m", "n"),
    case("sigmoid_backward", "a", "u"),
    case("copysign.Tensor", "a", "n"),
    *cases("copysign.Scalar", "n", -2.0),
    *cases("copysign.Scalar", "n", -0.0),
    *cases("floor_divide.Scalar fmod.Scalar remainder.Scalar", "a", 0.0),
    case("logit", "a", 0.1),
    case("logit", "a"),
    case("logit_backward", "a", "n", 0.1),
    case("logit_backward", "m", "u"),
    case("celu", "a", 1.5),
    case("elu", "a", 1.5, 1.25, 0.5),
    case("elu_backward", "a", 1.5, 1.25, 0.5, False, "n"),
    case("elu_backward", "m", 1.5, 1.25, 0.5, True, "n"),
    case("hardtanh", "a", -0.5, 2.5),
    case("hardtanh_backward", "a", "n", -0.5, 2.5),
    case("hardshrink_backward", "a", "n", 0.5),
    case("softshrink_backward", "a", "n", 0.5),
    case("leaky_relu_backward", "a", "n", 0.2, False),
    case("leaky_relu_backward", "a", "n", 0.2, True),
    case("softplus", "a", 2.0, 10.0),
    case("softplus_backward", "a", "n", 2.0, 10.0),
    case("threshold", "a", 0.5, 7.0),
    case("threshold_backward", "a", "n", 0.5),
    case("gelu", "a", approximate="tanh"),
    case("gelu_backward", "m", "n"),
    case("gelu_backward", "m", "n", approximate="tanh"),
    *cases("lerp.Scalar", "n", "m", 0.3),
    *cases("lerp.Scalar", "m", "c", 0.75),
    case("lerp.Tensor", "n", "m", "u"),
    case("addcmul", "a", "b", "c", value=0.5),
    case("addcdiv", "a", "b", "c", value=0.5),
    case("where.self", "t", "a", "b"),
    case("where.ScalarOther", "t", "a", 2.0),
    case("where.ScalarSelf", "t", 2, "a"),
    case("native_dropout_backward", "a", "t", 1.25),
    case("_to_copy", "a", dtype=torch.bool),
]

WHOLE: list[Case] = [
    *cases(
        "add.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor eq.Tensor ge.Tensor gt.Tensor le.Tensor "
        "lt.Tensor maximum minimum mul.Tensor ne.Tensor sub.Tensor rsub.Tensor floor_divide fmod.Tensor "
        "remainder.Tensor logical_and logical_or logical_xor clamp_max.Tensor clamp_min.Tensor max.other min.other",
        "a",
        "b",
    ),
    *cases("abs bitwise_not logical_not neg relu square clone", "a"),
    *cases(
        "add.Scalar bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar eq.Scalar floor_divide.Scalar fmod.Scalar "
        "ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar ne.Scalar remainder.Scalar rsub.Scalar sub.Scalar "
        "__lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar "
        "clamp_max clamp_min",
        "a",
        3,
    ),
    *cases(
        "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor remainder.Scalar_Tensor", 5, "b"
    ),
    *cases("bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor", 5, "s"),
    *cases("__lshift__.Tensor __rshift__.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor", "a", "s"),
    *[case("div.Tensor_mode", "a", "b", rounding_mode=m) for m in ("floor", "trunc")],
    case("div.Tensor", "a", "b"),
    case("div.Scalar", "a", 3),
    case("clamp", "a", -2, 5),
    case("add.Tensor", "a", "b", alpha=3),
    case("rsub.Tensor", "a", "b", alpha=3),
    case("rsub.Scalar", "a", 5, alpha=3),
    case("clamp", "a", 0, 5),
    case("where.self", "t", "a", "b"),
    case("where.Scalar", "t", 3, 4),
    case("_to_copy", "a", dtype=torch.float32),
    case("_to_copy", "a", dtype=torch.int8),
]
TRUTHS: list[Case] = [
    *cases(
        "add.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor eq.Tensor ge.Tensor logical_and logical_or "
        "logical_xor lt.Tensor maximum minimum mul.Tensor ne.Tensor",
        "a",
        "b",
    ),
    *cases("bitwise_not logical_not clone", "a"),
    case("add.Tensor", "a", "b", alpha=False),
    case("_to_copy", "a", dtype=torch.bfloat16),
    case("where.self", "a", "b", "t"),
]
MIXED: list[Case] = [
    case(name, first, second)
    for name in ("add.Tensor", "mul.Tensor", "maximum", "lt.Tensor", "eq.Tensor", "div.Tensor")
    for first, second in (
        ("h", "f"),
        ("f", "i"),
        ("i", "h"),
        ("i", "j"),
        ("t", "f"),
        ("j", "t"),
        ("h", "z"),
        ("i", "z"),
    )
]


def floats(dtype: torch.dtype) -> dict[str, Tensor]:
    """`a` and `b`: all pairs, `c` others; `n`: `b` without NaN, `m`: without infinities; `u` from 0 to 1, `p` 4 and
    more, `v` no integers; `t`: bools."""
    a = torch.tensor([x for x in EDGES for _ in EDGES]).to(dtype)
    b = torch.tensor([y for _ in EDGES for y in EDGES]).to(dtype)
    n = b.nan_to_num(0.75, INF, -INF)
    m = b.nan_to_num(1.0, 9.0, -9.0)
    c = b.flip(0) * 0.5
    return {
        "a": a,
        "b": b,
        "c": c,
        "n": n,
        "m": m,
        "u": m.flip(0).clamp(0, 1),
        "t": a > b,
        "p": m.abs() + 4,
        "v": m.clamp(-30, 30) * 0.34375 + 0.11,
    }


def whole(dtype: torch.dtype) -> dict[str, Tensor]:
    """`a` and `b`, none of which is 0: pairs whose quotients and products do not overflow past 64 bits; `s`: bits to
    shift by, and fewer and more than there are."""
    limits, bits = torch.iinfo(dtype), 8 * dtype.itemsize
    least, most = max(limits.min, -(2**40)), min(limits.max, 2**40)
    first = [n for n in (least, -100, -7, -1, 0, 1, 3, 6, 100, most) if n >= least]
    second = [n for n in (-100, -7, -3, -1, 1, 2, 5, 100) if n >= least]
    pairs = [(x, y) for x in first for y in second if not (x == limits.min and y == -1)]
    a, b = (torch.tensor(each, dtype=dtype) for each in zip(*pairs, strict=True))
    shifts = torch.tensor([n for n in (0, 1, 3, bits - 2, bits - 1, bits, bits + 1, 100, -1, -5) if n >= limits.min])
    s = shifts.repeat(-(-len(pairs) // len(shifts)))[: len(pairs)].to(dtype)
    return {"a": a, "b": b, "s": s, "t": a > b}


def truths() -> dict[str, Tensor]:
    a, b = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    return {"a": a, "b": b, "t": torch.tensor([True, False, False, True])}


def mixed() -> dict[str, Tensor]:
    """16 and 32 bits of floats, 64 and 8 of integers, bools, and a float of no dims."""
    f = torch.tensor([0.0, 1.0, 1.0009765625, -3.5, 7.0, 1e10, INF, NAN])
    i = torch.tensor([3, -2, 1, 100, 7, 2**24 + 1, 300, 0])
    return {
        "f": f, "h": f.flip(0).bfloat16(), "i": i, "j": i.flip(0).to(torch.int8), "t": i > 3, "z": torch.tensor(2.7),
    }  # fmt: skip


ELSEWHERE = {aten._prelu_kernel_backward.default, aten.log_sigmoid_backward.default}  # tests of their own
# What eager torch has on a CPU in 32 bits alone, and what kernels have.
NARROW = (
    *("round.decimals", "nextafter", "special_erfcx", "special_log_ndtr", "special_modified_bessel_i0"),
    *("special_modified_bessel_i1", "special_ndtri", "special_spherical_bessel_j0"),
    *("special_modified_bessel_k0", "special_modified_bessel_k1"),
    *("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"),
)


def cut_off(case: Case) -> bool:
    """A quotient of two tensors: of 16 bits eager torch rounds it before, and it stays a call."""
    target, args, options = case
    divides = target is aten.floor_divide.default or options.get("rounding_mode") is not None
    return divides and all(isinstance(arg, str) for arg in args)


GIVEN: dict[str, tuple[Callable[[], dict[str, Tensor]], list[Case]]] = {
    "f32": (partial(floats, torch.float32), FLOATS),
    "bf16": (
        partial(floats, torch.bfloat16),
        [one for one in FLOATS if one[0] not in {op(name) for name in NARROW} and not cut_off(one)],
    ),
    **{str(kind)[6:]: (partial(whole, kind), WHOLE) for kind in (torch.int64, torch.int32, torch.int8, torch.uint8)},
    "bool": (truths, TRUTHS),
    "mixed": (mixed, MIXED),
}


def kernels_of(
    cases: Sequence[Case], given: Mapping[str, Tensor], most: int = 48
) -> list[tuple[Kernel, tuple[str, ...], list[int]]]:
    """What the lowerings make of them, so many calls a kernel: each kernel, what it reads, which cases it computes."""
    b = Builder(Mesh())
    size = next(iter(given.values())).numel()
    inputs = {
        key: b.input(key, f"{DTYPE_NAMES[x.dtype]}[{size if x.dim() else ''}]", "input") for key, x in given.items()
    }
    made: dict[fx.Node, int] = {}
    for at, (target, args, options) in enumerate(cases):
        kind = target(*placed(args, given), **options).dtype
        called = [inputs.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        y = b.call(f"y{at}", f"{DTYPE_NAMES[kind]}[{size}]", target, *called, **options)
        made[y] = at
        b.output("output", f"y{at}", y)
    seen = build_fusion_graph(b.graph(), inline=False)
    units = {made[one.node]: one for one in seen.lowered.values()}
    missing = [cases[at] for at in range(len(cases)) if at not in units]
    assert not missing, missing
    found: list[tuple[Kernel, tuple[str, ...], list[int]]] = []
    for first in range(0, len(cases), most):
        some = range(first, min(first + most, len(cases)))
        prims = [prim for at in some for prim in units[at].prims]
        wanted = space_constraint(prims)
        assert wanted is not None
        one = build_kernel(seen.body, seen.views, prims, wanted, [units[at].node for at in some])
        found.append((one.kernel, tuple(info(node).name for node in one.inputs), list(some)))
    return found


def placed(args: Iterable[Any], given: Mapping[str, Tensor]) -> list[Any]:
    return [given[arg] if isinstance(arg, str) else arg for arg in args]


def wrong(one: Case, found: Tensor, given: Mapping[str, Tensor]) -> str:
    """What is wrong with a result, in a line; empty if it is as near as its dtype has room for.

    Integers and bools are eager torch's. Floats are within 2 units of the last place of 16 bits of the float64 result,
    or within 1e-5 of it in float32; what cancels, within 1e-6. NaN is NaN, what overflows does, zeros have their signs;
    where float64 does otherwise, as eager torch in the same dtype.
    """
    target, args, options = one
    eager = target(*placed(args, given), **options)
    if eager.dtype != found.dtype:
        return f"{target}: {found.dtype}, not {eager.dtype}"
    double = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    exact = target(*placed(args, double), **options) if found.is_floating_point() else eager
    bad = _far(found, exact, target) & _far(found, eager, target)
    if not bad.any():
        return ""
    at = int(bad.nonzero()[0])
    seen = [given[a].expand(found.shape)[at].item() if isinstance(a, str) else a for a in args]
    return f"{target}{seen} {options}: {found[at].item()}, not {exact[at].item()} ({int(bad.sum())} of {bad.numel()})"


def _far(found: Tensor, exact: Tensor, target: Any) -> Tensor:
    if not found.is_floating_point() or target is aten.nextafter.default:
        return found != exact
    rounded = exact.to(found.dtype)
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(found.dtype)
    scale = rounded.double().abs().clamp(min=torch.finfo(found.dtype).tiny)
    room = 2 * torch.exp2(torch.floor(torch.log2(scale)) - bits) if bits else 1e-5 * scale
    far = (found.double() - rounded.double()).abs() > room.clamp(min=1e-6)
    infinite = rounded.isinf() | found.isinf()
    bad = torch.where(infinite, rounded != found, far & ~rounded.isnan()) | (rounded.isnan() != found.isnan())
    zeros = (rounded == 0) & (found == 0) & (rounded.signbit() != found.signbit())
    return bad if target in UNSIGNED else bad | zeros
