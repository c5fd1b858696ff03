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
from shardc.passes.fuse import fuse
from shardc.passes.fuse.units import LOWERINGS
from tests.handmade import Builder
from tests.kernels.interpreter import Interpreter

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

ONE: dict[Any, tuple[Any, ...]] = {
    aten.isinf.default: (),
    aten.isposinf.default: (),
    aten.isneginf.default: (),
    aten.nan_to_num.default: (0.25, 9.0, -9.0),
    aten.sgn.default: (),
    aten.trunc.default: (),
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


def check(interpreted: Interpreter, op: Any, args: tuple[Any, ...], *given: Tensor, result: str = "f32") -> None:
    """`op` and what makes a kernel of it, by the reference and in the interpreter, against eager torch."""
    want = op(*[x.double() if x.is_floating_point() else x for x in given], *args)
    b = Builder(Mesh())
    size = given[0].numel()
    kind = "f32" if given[0].is_floating_point() else "i64"
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
        torch.testing.assert_close(one.to(want.dtype), want, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", ONE, ids=str)
def test_of_one_tensor(op: Any, interpreted: Interpreter) -> None:
    check(interpreted, op, ONE[op], torch.tensor(EDGES), result="bool" if "inf" in str(op) else "f32")


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


@pytest.mark.parametrize("op", [aten.remainder.Tensor, aten.floor_divide.default], ids=str)
def test_of_integers(op: Any, interpreted: Interpreter) -> None:
    check(interpreted, op, (), WHOLE, PARTS, result="i64")


def test_a_quotient_rounded_down() -> None:
    for kind in ("f32", "i32"):
        b = Builder(Mesh())
        x, y = b.input("x", f"{kind}[8]", "input"), b.input("y", f"{kind}[8]", "input")
        made = b.call("q", f"{kind}[8]", aten.div.Tensor_mode, x, y, rounding_mode="floor")
        b.output("output", "z", b.call("z", f"{kind}[8]", aten.add.Tensor, made, y))
        assert not any(node.target is FUSED for node in fuse(b.graph()).calls()), "floats and short integers round"


def test_all_are_there() -> None:
    assert LOWERINGS.keys() >= ONE.keys() | TWO.keys()
