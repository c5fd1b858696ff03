"""Pointwise ops: every dim of every operand is a dim of the result, right-aligned and broadcast.

One rule covers them all, whatever mix of tensors and numbers a call has: `..., ... -> ...`. What differs
is linearity, that is, which operands may be pending sums:

    add(a, b) of two tensors     jointly: the sum of the shards' sums is the sum
    add(a, 1)                    not at all: every shard would add the 1
    mul(a, b), div(a, b)         one factor at a time; only the dividend
    tanh_backward(g, y)          the gradient alone
    where(c, a, b)               not at all: with `a` pending, every shard would add `b`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.adamw import ADAMW
from shardc.ir.ops.assumed import after, assume
from shardc.ir.ops.check_index import check_index
from shardc.ir.ops.host_copies import BEGINS, ENDS
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import Example, example, rule

aten = torch.ops.aten

Tries = Sequence[tuple[Any, ...] | Example]

UNARY: Tries = [((4, 6),), ((3, 1, 5),)]
BINARY: Tries = [((4, 6), (4, 6)), ((3, 1, 6), (5, 1)), ((4, 6), ())]
WITH_NUMBER: Tries = [((4, 6), 3), ((3, 1, 5), 2)]
NUMBER_FIRST: Tries = [(2, (4, 6))]
TERNARY: Tries = [((4, 6), (4, 6), (4, 6)), ((3, 1, 6), (5, 1), (6,))]
INTS: Tries = [example((4, 6), (4, 6), ints={"self": 8, "other": 8}), example((4, 6), (6,), bools=("self", "other"))]
INT_NUMBER: Tries = [example((4, 6), 3, ints={"self": 8})]
NUMBER_OF_INTS: Tries = [example(3, (4, 6), ints={"other": 8})]


def aligned(*args: Any) -> str:
    """`..., ... -> ...` with as many operands as the call has tensors."""
    return ", ".join("..." for a in args if isinstance(a, Dims)) + " -> ..."


def pointwise(ops: Any, examples: Tries, linear: Literal["joint", "each"] | tuple[int, ...] = ()) -> None:
    """Register pointwise ops that share their linearity."""
    rule(ops, linear=linear, examples=examples, kind="pointwise")(aligned)


# ------------------------------------------------------------------------------------------------ one operand
SMOOTH_AND_STEPS = """
    abs acos acosh angle asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor
    frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isinf isnan isneginf isposinf leaky_relu lgamma log log10
    log1p log2 logical_not logit mish nan_to_num ones_like reciprocal relu relu6 round rsqrt selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx special_i0e special_i1 special_i1e
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_ndtri special_spherical_bessel_j0
    sqrt square tan tanh trunc empty_like
"""
LINEAR = (
    "neg positive conj_physical clone alias detach contiguous lift_fresh lift_fresh_copy deg2rad rad2deg zeros_like"
)
pointwise([getattr(aten, name).default for name in SMOOTH_AND_STEPS.split()], UNARY)
pointwise([getattr(aten, name).default for name in LINEAR.split()], UNARY, linear="joint")
pointwise([ACCUMULATE, *BEGINS], UNARY, linear="joint")
pointwise(ENDS, [((4, 6), (4, 6))], linear="joint")
pointwise(check_index, [example((4, 6), 8, ints={"index": 8})])
pointwise(assume, [example((), ints={"holds": lambda shape: torch.ones(list(shape), dtype=torch.bool)})])
pointwise(after, [example((), (), bools=("checked",)), example((4, 6), (), bools=("checked",))], linear=(0,))
pointwise(aten.threshold.default, [((4, 6), 0.3, -1.0)])
pointwise([aten.bitwise_not.default], [example((4, 6), ints={"self": 8}), example((4, 6), bools=("self",))])
pointwise(aten.round.decimals, [example((4, 6), decimals=1)])
pointwise(aten.full_like.default, [((4, 6), 2.5)])
pointwise(aten.fill.Scalar, [((4, 6), 2.5)])
pointwise(aten.clamp.default, [((4, 6), -0.5, 0.5), ((4, 6), None, 0.1), ((4, 6), 0.1)])
pointwise([aten.clamp_min.default, aten.clamp_max.default], [((4, 6), 0.1)])


@rule(
    aten._to_copy.default,
    kind="pointwise",
    examples=[((4, 6),), example((4, 6), dtype=torch.float32), example((4, 6), dtype=torch.int64)],
)
def to_copy(self: Dims, dtype: torch.dtype | None = None, *options: Any) -> Notation:
    # The source's dtype is not known here, but pending sums are floating: what must not be lost is a fraction.
    floating = dtype is None or dtype.is_floating_point
    return Notation(aligned(self), linear="joint" if floating else ())


# ------------------------------------------------------------------------------------------------ two operands
@rule(
    [aten.add.Tensor, aten.sub.Tensor],
    kind="pointwise",
    examples=[*BINARY, ((4, 6), 2.0), (2.0, (4, 6)), example((4, 6), (6,), alpha=2)],
)
def add(self: Dims | float, other: Dims | float, alpha: float = 1) -> Notation:
    two_tensors = isinstance(self, Dims) and isinstance(other, Dims)  # a number may stand first, as in 1 - x
    return Notation(aligned(self, other), linear="joint" if two_tensors else ())


pointwise(aten.rsub.Tensor, BINARY, linear="joint")
pointwise(aten.mul.Tensor, [*BINARY, ((4, 6), 2.0)], linear="each")


@rule(aten.div.Tensor, kind="pointwise", examples=[*BINARY, ((4, 6), 2.0), (2.0, (4, 6))])
def div(self: Dims | float, other: Dims | float) -> Notation:
    return Notation(aligned(self, other), linear=(0,) if isinstance(self, Dims) else ())


@rule(
    [aten.div.Tensor_mode, aten.div.Scalar_mode],
    kind="pointwise",
    examples=[example((4, 6), 2.0, rounding_mode="floor"), example((4, 6), 2.0, rounding_mode=None)],
)
def div_mode(self: Dims, other: Dims | float, rounding_mode: str | None) -> Notation:
    return Notation(aligned(self, other), linear=(0,) if rounding_mode is None else ())


pointwise([aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.pow.Tensor_Scalar], WITH_NUMBER)
pointwise([aten.mul.Scalar, aten.div.Scalar], WITH_NUMBER, linear="joint")
pointwise([aten.remainder.Scalar, aten.fmod.Scalar, aten.floor_divide.Scalar, aten.copysign.Scalar], WITH_NUMBER)
pointwise([aten.pow.Scalar, aten.remainder.Scalar_Tensor, aten.xlogy.Scalar_Self], NUMBER_FIRST)
pointwise([aten.xlogy.Scalar_Other, aten.special_xlog1py.other_scalar], WITH_NUMBER)
pointwise([aten.special_xlog1py.self_scalar, aten.polygamma.default], NUMBER_FIRST)
pointwise([aten.special_xlog1py.default, aten.ldexp.Tensor], BINARY)
pointwise(
    [aten.pow.Tensor_Tensor, aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default, aten.maximum.default]
    + [aten.minimum.default, aten.fmax.default, aten.fmin.default, aten.max.other, aten.min.other, aten.atan2.default]
    + [aten.hypot.default, aten.logaddexp.default, aten.logaddexp2.default, aten.copysign.Tensor, aten.xlogy.Tensor]
    + [aten.heaviside.default, aten.nextafter.default, aten._prelu_kernel.default],
    BINARY,
)
pointwise([aten.clamp_min.Tensor, aten.clamp_max.Tensor], BINARY)
pointwise(aten.clamp.Tensor, [((4, 6), (6,), (4, 1)), ((4, 6), None, (6,)), ((4, 6), (6,))])
pointwise([getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")], [*BINARY, *INTS[:1]])
pointwise([getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")], [*WITH_NUMBER, *INT_NUMBER])
pointwise([getattr(aten, f"logical_{name}").default for name in ("and", "or", "xor")], [*BINARY, *INTS])
pointwise([getattr(aten, f"bitwise_{name}").Tensor for name in ("and", "or", "xor")], INTS)
pointwise([getattr(aten, f"bitwise_{name}").Scalar for name in ("and", "or", "xor")], INT_NUMBER)
pointwise([getattr(aten, f"__{name}__").Scalar for name in ("and", "or", "xor", "lshift", "rshift")], INT_NUMBER)
pointwise([getattr(aten, f"__{name}__").Tensor for name in ("and", "or", "xor")], INTS)
pointwise([aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor], INTS[:1])
pointwise([aten.__lshift__.Tensor, aten.__rshift__.Tensor], INTS[:1])
pointwise([aten.bitwise_left_shift.Scalar_Tensor, aten.bitwise_right_shift.Scalar_Tensor], NUMBER_OF_INTS)
pointwise([getattr(aten, f"bitwise_{name}").Scalar_Tensor for name in ("and", "or", "xor")], NUMBER_OF_INTS)
pointwise([aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar], INT_NUMBER)
pointwise(aten.fill.Tensor, [((4, 6), ())])
# Not linear: `copy` casts to the dtype of its first operand, which may be an integer.
pointwise(aten.copy.default, [((4, 6), (4, 6)), ((4, 6), (6,))])
pointwise(aten.lerp.Scalar, [((4, 6), (4, 6), 0.3), ((4, 6), (6,), 0.3)], linear="joint")
rule(aten.frexp.Tensor, "... -> ..., ...", examples=UNARY, kind="pointwise")
rule(
    ADAMW,
    "..., ..., ..., ..., ..., ... -> ..., ..., ...",
    examples=[((4, 6), (4, 6), (4, 6), (4, 6), (), (), 0.9, 0.99, 0.1, 1e-3)],
    kind="pointwise",
)
rule([aten.complex.default, aten.polar.default], "..., ... -> ...", examples=[((4, 6), (4, 6)), ((3, 1, 6), (5, 1))])

# ------------------------------------------------------------------------------------------- of special functions
POLYNOMIALS = [
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
]
BESSEL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
    scaled_modified_bessel_k1
"""
pointwise([getattr(aten, f"special_{name}").default for name in BESSEL.split()], UNARY)
pointwise(aten.mvlgamma.default, [((4, 6), 1), ((3, 1, 5), 3)])
pointwise([aten.gcd.default, aten.lcm.default], INTS[:1])
pointwise([aten.igamma.default, aten.igammac.default, aten.special_zeta.default], BINARY)
pointwise([getattr(aten, f"special_{name}").default for name in POLYNOMIALS], BINARY)
pointwise([aten.special_zeta.other_scalar], WITH_NUMBER)
pointwise([getattr(aten, f"special_{name}").n_scalar for name in POLYNOMIALS], WITH_NUMBER)
pointwise([aten.special_zeta.self_scalar], NUMBER_FIRST)
pointwise([getattr(aten, f"special_{name}").x_scalar for name in POLYNOMIALS], NUMBER_FIRST)

# ---------------------------------------------------------------------------------------------- three operands
pointwise([aten.lerp.Tensor, aten.addcmul.default, aten.addcdiv.default], TERNARY)
pointwise(
    aten.where.self,
    [example((4, 6), (4, 6), (4, 6), bools=("condition",)), example((4, 1), (6,), (), bools=("condition",))],
)
pointwise(aten.where.Scalar, [example((4, 6), 1.0, 2.0, bools=("condition",))])
pointwise(aten.masked_fill.Tensor, [example((4, 6), (4, 1), (), bools=("mask",))])


@rule(
    aten.where.ScalarOther,
    kind="pointwise",
    examples=[example((4, 6), (4, 6), v, bools=("condition",)) for v in (0.0, 1.0)],
)
def where_other(condition: Dims, self: Dims, other: float) -> Notation:
    return Notation(aligned(condition, self), linear=(1,) if other == 0 else ())


@rule(
    aten.where.ScalarSelf,
    kind="pointwise",
    examples=[example((4, 6), v, (4, 6), bools=("condition",)) for v in (0.0, 1.0)],
)
def where_self(condition: Dims, self: float, other: Dims) -> Notation:
    return Notation(aligned(condition, other), linear=(1,) if self == 0 else ())


@rule(
    aten.masked_fill.Scalar,
    kind="pointwise",
    examples=[example((4, 6), mask, v, bools=("mask",)) for v in (0.0, 1.0) for mask in ((4, 6), (6,))],
)
def masked_fill(self: Dims, mask: Dims, value: float) -> Notation:
    return Notation(aligned(self, mask), linear=(0,) if value == 0 else ())


# ---------------------------------------------------------------------------------------------- backward formulas
PAIR: Tries = [((4, 6), (4, 6)), ((3, 5, 2), (3, 5, 2))]
pointwise(
    [
        getattr(aten, f"{name}_backward").default
        for name in ("gelu", "silu", "mish", "tanh", "sigmoid", "hardswish", "hardsigmoid", "logit")
    ],
    PAIR,
    linear=(0,),
)
pointwise(aten.threshold_backward.default, [((4, 6), (4, 6), 0.1)], linear=(0,))
pointwise(aten.leaky_relu_backward.default, [((4, 6), (4, 6), 0.1, False)], linear=(0,))
pointwise([aten.hardshrink_backward.default, aten.softshrink_backward.default], [((4, 6), (4, 6), 0.5)], linear=(0,))
pointwise(aten.native_dropout_backward.default, [example((4, 6), (4, 6), 1.25, bools=("mask",))], linear=(0,))
pointwise(aten.hardtanh_backward.default, [((4, 6), (4, 6), -0.5, 0.5)], linear=(0,))
pointwise(aten.softplus_backward.default, [((4, 6), (4, 6), 1.5, 20.0)], linear=(0,))
pointwise(aten.elu_backward.default, [((4, 6), 1.0, 1.0, 1.0, False, (4, 6))], linear=(0,))
pointwise(aten.log_sigmoid_backward.default, [((4, 6), (4, 6), (4, 6))], linear=(0,))
# The second result is what each element adds to the gradient of the weight, which the trace sums.
rule(
    aten._prelu_kernel_backward.default,
    "..., ..., ... -> ..., ...",
    linear=(0,),
    kind="pointwise",
    examples=[((4, 6), (4, 6), (4, 6)), ((3, 5, 2), (3, 5, 2), (1, 5, 1)), ((4, 6), (4, 6), (1, 1))],
)


# -------------------------------------------------------------------------------------------- elementwise losses
def _reduced(reduction: int, *tensors: Any) -> Notation:
    """0 keeps the elements, 2 sums them; a mean (1) divides by a global count, so it stays whole."""
    if reduction == 0:
        return Notation(aligned(*tensors))
    scalar = aligned(*tensors).replace("-> ...", "-> ()")
    return Notation(scalar, sum="..." if reduction == 2 else "", whole="..." if reduction == 1 else "")


@rule(
    [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default],
    examples=[((4, 6), (4, 6), reduction) for reduction in (0, 1, 2)],
)
def elementwise_loss(self: Dims, target: Dims, reduction: int = 1, *options: float) -> Notation:
    # f(0, 0) = 0, so padding that is masked with 0 adds nothing to the sum.
    return _reduced(reduction, self, target)


def _loss_backward(reduction: int, *tensors: Any) -> Notation:
    """The gradient is elementwise; only a mean's carries the global count."""
    return Notation(aligned(*tensors), whole="..." if reduction == 1 else "", linear=(0,))


@rule(
    aten.mse_loss_backward.default,
    examples=[((4, 6), (4, 6), (4, 6), 0), ((), (4, 6), (4, 6), 1), ((), (4, 6), (4, 6), 2)],
)
def mse_loss_backward(grad_output: Dims, self: Dims, target: Dims, reduction: int) -> Notation:
    return _loss_backward(reduction, grad_output, self, target)


@rule(
    [aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default],
    examples=[((4, 6), (4, 6), (4, 6), 0, 0.7), ((), (4, 6), (4, 6), 1, 0.7), ((), (4, 6), (4, 6), 2, 0.7)],
)
def smooth_loss_backward(grad_output: Dims, self: Dims, target: Dims, reduction: int, width: float) -> Notation:
    return _loss_backward(reduction, grad_output, self, target)
