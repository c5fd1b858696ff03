"""The rarer pointwise ops in kernels: as eager torch in float64, special values included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton.fused import reference, text
from kernels_triton.fused.op import FUSED
from shardc.ir.graph import info, operands
from shardc.ir.mesh import Mesh
from shardc.ir.types import DTYPE_NAMES
from shardc.passes.fuse import fuse
from shardc.passes.fuse.units import LOWERINGS
from tests.handmade import Builder
from tests.kernels.interpreter import Interpreter
from tests.kernels.traced import kernel_of

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
EDGES = (
    0.0,
    -0.0,
    INF,
    -INF,
    NAN,
    0.5,
    -0.5,
    1.0,
    -1.0,
    3.0,
    -3.0,
    6.0,
    20.0,
    25.0,
    -25.0,
    2.5,
    -7.25,
    1e-3,
    -1e-3,
    60.0,
)
X = torch.tensor([a for a in EDGES for _ in EDGES])
Y = torch.tensor([b for _ in EDGES for b in EDGES])
WHOLE = torch.tensor([a for a in (-7, -1, 0, 3, 2**40) for _ in (-3, 1, 5)])
PARTS = torch.tensor([b for _ in (-7, -1, 0, 3, 2**40) for b in (-3, 1, 5)])
INTEGERS: dict[Any, tuple[Any, ...]] = {
    aten.remainder.Tensor: (),
    aten.fmod.Tensor: (),
    aten.floor_divide.default: (),
    aten.bitwise_and.Tensor: (),
    aten.bitwise_or.Tensor: (),
    aten.bitwise_xor.Tensor: (),
    aten.bitwise_not.default: (),
    aten.bitwise_and.Scalar: (6,),
    aten.remainder.Scalar: (-3,),
    aten.fmod.Scalar: (-3,),
    aten.__lshift__.Scalar: (3,),
    aten.__rshift__.Scalar: (2,),
}

ONE: dict[Any, tuple[Any, ...]] = {
    aten.isinf.default: (),
    aten.isposinf.default: (),
    aten.isneginf.default: (),
    aten.nan_to_num.default: (0.25, 9.0, -9.0),
    aten.sgn.default: (),
    aten.trunc.default: (),
    aten.round.default: (),
    aten.signbit.default: (),
    aten.tan.default: (),
    aten.atan.default: (),
    aten.asin.default: (),
    aten.acos.default: (),
    aten.sinh.default: (),
    aten.cosh.default: (),
    aten.asinh.default: (),
    aten.acosh.default: (),
    aten.atanh.default: (),
    aten.logit.default: (0.1,),
    aten.celu.default: (1.5,),
    aten.remainder.Scalar: (-2.0,),
    aten.logical_not.default: (),
    aten.frac.default: (),
    aten.log10.default: (),
    aten.deg2rad.default: (),
    aten.rad2deg.default: (),
    aten.positive.default: (),
    aten.hardtanh.default: (-0.5, 2.5),
    aten.relu6.default: (),
    aten.hardsigmoid.default: (),
    aten.hardswish.default: (),
    aten.leaky_relu.default: (0.2,),
    aten.threshold.default: (0.5, 7.0),
    aten.elu.default: (1.5, 1.25, 0.5),
    aten.softplus.default: (2.0, 10.0),
    aten.mish.default: (),
    aten.xlogy.Scalar_Other: (2.0,),
}
TWO: dict[Any, tuple[Any, ...]] = {
    aten.max.other: (),
    aten.min.other: (),
    aten.clamp_min.Tensor: (),
    aten.clamp_max.Tensor: (),
    aten.clamp.Tensor: (),
    aten.logical_and.default: (),
    aten.copysign.Tensor: (),
    aten.heaviside.default: (),
    aten.hypot.default: (),
    aten.logaddexp2.default: (),
    aten.hardswish_backward.default: (),
    aten.logit_backward.default: (),
    aten.fmax.default: (),
    aten.fmin.default: (),
    aten.xlogy.Tensor: (),
    aten.logaddexp.default: (),
    aten._prelu_kernel.default: (),
    aten.hardtanh_backward.default: (-0.5, 2.5),
    aten.hardsigmoid_backward.default: (),
    aten.leaky_relu_backward.default: (0.2, False),
    aten.softplus_backward.default: (2.0, 10.0),
    aten.mish_backward.default: (),
}


def check(interpreted: Interpreter, op: Any, args: tuple[Any, ...], *given: Tensor) -> None:
    """`op` and what makes a kernel of it, by the reference and in the interpreter, against eager torch."""
    want = op(*[x.double() if x.is_floating_point() else x for x in given], *args)
    b = Builder(Mesh())
    size = given[0].numel()
    kind = DTYPE_NAMES[given[0].dtype]
    result = kind if want.is_floating_point() else DTYPE_NAMES[want.dtype]
    inputs = [b.input(f"x{i}", f"{kind}[{size}]", "input") for i in range(len(given))]
    y = b.call("y", f"{result}[{size}]", op, *inputs, *args)
    z = b.call("z", f"{result}[{size}]", aten.where.self, b.call("m", f"bool[{size}]", aten.eq.Tensor, y, y), y, y)
    b.output("output", "z", z)
    (call,) = (node for node in fuse(b.graph()).calls() if node.target is FUSED)
    line = str(call.args[1])
    given = tuple(given[int(info(x).name[1:])] for x in operands(call))
    (found,) = reference.run(text.parse(line), list(given))
    (seen,) = interpreted("fused", line, None, None, *given)
    for one in (found, seen):
        # exp's error grows with what it is of.
        torch.testing.assert_close(
            one.to(want.dtype), want, rtol=5e-6 if "h.default" in str(op) else 2e-6, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("op", ONE, ids=str)
def test_of_one_tensor(op: Any, interpreted: Interpreter) -> None:
    check(interpreted, op, ONE[op], torch.tensor(EDGES))


@pytest.mark.parametrize("op", TWO, ids=str)
def test_of_two_tensors(op: Any, interpreted: Interpreter) -> None:
    # Where an activation was no number, CPUs and GPUs differ in what its gradient is.
    second = Y.nan_to_num(0.75, INF, -INF) if "backward" in str(op) else Y
    check(interpreted, op, TWO[op], X, second)


def test_lerp(interpreted: Interpreter) -> None:
    a, b = X.nan_to_num(1.0, 9.0, -9.0), Y.nan_to_num(1.0, 9.0, -9.0)
    check(interpreted, aten.lerp.Tensor, (), a, b, b.flip(0).clamp(0, 1))


@pytest.mark.parametrize("result", [False, True])
def test_elu_backward(result: bool) -> None:
    op = aten.elu_backward.default
    x = X.nan_to_num(0.75, INF, -INF)
    x = aten.elu(x, 1.5, 1.25, 0.5) if result else x
    want = op(Y.double(), 1.5, 1.25, 0.5, result, x.double())
    b = Builder(Mesh())
    g, at = b.input("g", f"f32[{len(Y)}]", "input"), b.input("x", f"f32[{len(Y)}]", "input")
    y = b.call("y", f"f32[{len(Y)}]", op, g, 1.5, 1.25, 0.5, result, at)
    b.output("output", "z", b.call("z", f"f32[{len(Y)}]", aten.mul.Tensor, y, 1.0))
    (call,) = (node for node in fuse(b.graph()).calls() if node.target is FUSED)
    named = {"g": Y, "x": x}
    (found,) = reference.run(text.parse(str(call.args[1])), [named[info(one).name] for one in operands(call)])
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", INTEGERS, ids=str)
def test_of_integers(op: Any, interpreted: Interpreter) -> None:
    """Those of 64 bits, and every pair of 8 bits that does not overflow on the way."""
    one = INTEGERS[op] or "not" in str(op)
    check(interpreted, op, INTEGERS[op], *((WHOLE,) if one else (WHOLE, PARTS)))
    for dtype in (torch.int8, torch.uint8):
        limits = torch.iinfo(dtype)
        a, b = torch.cartesian_prod(torch.arange(limits.min, limits.max + 1, 5), torch.tensor([-3, -1, 2, 100])).unbind(
            1
        )
        keep = (b >= limits.min) & ~((a == -128) & (b == -1))
        a, b = a[keep].to(dtype), b[keep].to(dtype)
        args = tuple(3 if n == -3 and dtype == torch.uint8 else n for n in INTEGERS[op])
        check(interpreted, op, args, *((a,) if one else (a, b)))


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_quotient_that_is_rounded(mode: str) -> None:
    """Of integers; one of floats, which a GPU divides otherwise, stays torch's."""
    a, b = WHOLE.int(), PARTS.int()
    kernel, reads = kernel_of(lambda a, b: torch.div(a, b, rounding_mode=mode) + b, (a, b))
    assert torch.equal(reference.run(kernel, reads)[0], torch.div(a, b, rounding_mode=mode) + b)
    with pytest.raises(ValueError, match="unpack"):
        kernel_of(lambda a, b: torch.div(a, b, rounding_mode=mode) + b, (X, Y))


def test_16_bit_values_are_rounded_as_eager_torch_sees_them() -> None:
    a, b = (torch.linspace(0.1, 9.0, 400).to(torch.bfloat16) for _ in range(2))
    b = b.flip(0)

    def all_three(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch.round(a * b), torch.frac(a * b), torch.remainder(a * b, 2.0)

    kernel, reads = kernel_of(all_three, (a, b))
    for mine, theirs in zip(reference.run(kernel, reads), all_three(a, b), strict=True):
        assert torch.equal(mine, theirs)


def test_log_sigmoid_backward() -> None:
    g, x = X.nan_to_num(1.0, 2.0, -2.0), Y.nan_to_num(0.5)
    _, buffer = aten.log_sigmoid_forward(x)
    kernel, reads = kernel_of(aten.log_sigmoid_backward.default, (g, x, buffer))
    assert len(reads) == 2, "what forward left is made again"
    torch.testing.assert_close(reference.run(kernel, reads)[0], aten.log_sigmoid_backward(g, x, buffer))


def test_prelu_backward(interpreted: Interpreter) -> None:
    kernel, reads = kernel_of(aten._prelu_kernel_backward.default, (X, Y, X.flip(0)))
    want = aten._prelu_kernel_backward(X, Y, X.flip(0))
    for found in (reference.run(kernel, reads), interpreted("fused", text.text(kernel), None, None, *reads)):
        for mine, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_all_are_there() -> None:
    assert LOWERINGS.keys() >= ONE.keys() | TWO.keys() | INTEGERS.keys()
