"""What several kernels may each make: where a jump sees the value, only what comes out the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from kernels_triton.ir.kernel import Kernel
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import info, results
from shardc.passes.fusion.clustering.fusion_graph import build_fusion_graph
from shardc.passes.fusion.clustering.numeric_sensitivity import Reproducibility

Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, forward: Forward, a: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(8) if a is None else a)
        self.b, self.c = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def program(forward: Forward, x: Tensor | None = None, fuse: bool = True, mesh: str = "dp=1") -> shardc.Program:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) if x is None else x
    plan = {"fuse": fuse, **({"inputs": {"x": "dp"}} if mesh != "dp=1" else {})}
    return shardc.compile(Model(forward), {"x": x}, mesh=mesh, plan=plan)


def kernels(made: shardc.Program) -> list[Kernel]:
    return [k for node in made.body.calls() if (k := kernel_of(node.target, node.args)) is not None]


def makers(made: shardc.Program, op: str) -> int:
    return sum(any(step.op == op for step in kernel.steps) for kernel in kernels(made))


def leaky(m: Model, x: Tensor) -> Tensor:
    return (F.leaky_relu(x @ m.b + m.a, 0.1) @ m.b).square().mean()


def test_masks_of_sums_stay_cheap() -> None:
    """Backward's mask is that of the product and the bias, which it reads; nothing is stored for it."""
    made = program(leaky)
    stored = {info(v).name for node in made.body.calls() for v in results(node) if v is not None}
    assert "leaky_relu" in stored
    assert "add" not in stored
    assert makers(made, "add") == 2


def threshold(m: Model, x: Tensor) -> Tensor:
    h = 1 + torch.tanh(x @ m.b + m.a)
    return (torch.where(h > 1.5, h, 0.0) @ m.b).square().mean() + (h @ m.b).mean()


def extreme(m: Model, x: Tensor) -> Tensor:
    t = torch.tanh(x @ m.b + m.a)
    h = 1 + t
    return (h / h.amax(0, keepdim=True)).mean() + t.sin().mean()


@pytest.mark.parametrize("forward", [threshold, extreme])
def test_what_is_approximated_is_made_once(forward: Forward) -> None:
    made = program(forward)
    assert makers(made, "tanh") == 1
    assert made.verify().ok, str(made.verify())


def required(forward: Forward, dtype: torch.dtype = torch.float32) -> dict[str, Reproducibility]:
    x = torch.randn(64, 8).to(dtype)
    body = shardc.compile(Model(forward).to(dtype), {"x": x}, mesh="dp=1").body
    found = build_fusion_graph(body).sensitivity.required
    return {info(v).name: found.get(v, Reproducibility.ANY) for v in body.values()}


def test_how_alike_two_makings_must_be() -> None:
    assert required(lambda m, x: F.gelu(x @ m.b + m.a).square().mean())["add"] == Reproducibility.ANY
    assert required(leaky)["add"] == Reproducibility.SAME_FORMULA
    assert required(extreme)["tanh"] == Reproducibility.BITWISE
    assert required(lambda m, x: torch.where(x + m.a > x * m.c, x, m.a).mean())["add"] == Reproducibility.BITWISE
    assert required(lambda m, x: (torch.floor(x + m.a) * m.c).mean())["add"] == Reproducibility.BITWISE
    # Compared with a number, but 0 by construction where an element is the largest one.
    hinge = required(lambda m, x: F.relu((h := x * m.a) - h.amax(0, keepdim=True)).mean())
    assert hinge["mul"] == hinge["sub"] == Reproducibility.BITWISE
    # A product ends it; an infinity is no number that rounding comes near to.
    assert required(lambda m, x: F.relu((x + m.a) @ m.b).mean())["add"] == Reproducibility.ANY
    assert (
        required(lambda m, x: torch.where((x + m.a) == float("-inf"), 0.0, x * m.c).mean())["add"]
        == Reproducibility.ANY
    )


def test_sixteen_bits_are_rounded_on_the_way_to_a_jump() -> None:
    def wide(m: Model, x: Tensor) -> Tensor:
        h = torch.tanh(x @ m.b + m.a).float()
        return (h / h.amax(0, keepdim=True)).mean()

    half = torch.bfloat16
    body = shardc.compile(Model(wide).to(half), {"x": torch.randn(64, 8).to(half)}, mesh="dp=1").body
    sensitivity = build_fusion_graph(body).sensitivity
    wider = [prim for one in sensitivity.lowered.values() for prim in one.prims if prim.op == "same"]
    assert wider
    made = {prim.out for one in sensitivity.lowered.values() for prim in one.prims if isinstance(prim.out, fx.Node)}
    assert not any(read.value in made for prim in wider for read in prim.reads)


# ---------------------------------------------------------------------- float64 beside float32, and integers
def quotient(m: Model, x: Tensor) -> Tensor:
    return (x / 7 * m.a).mean()


def widened(m: Model, x: Tensor) -> Tensor:
    h = x.double() * m.a + m.c
    k = h.float() * m.a
    sums = h.square().mean() + k.mean().double() + (h > k).double().mean() * m.c.sum()
    return (sums + (m.a.double() - m.c).exp().mean()).float()


@pytest.mark.parametrize("fuse", [False, True])
def test_floats_of_integers_are_verified_in_float64(fuse: bool) -> None:
    ids = torch.randint(100, (64, 8), generator=torch.Generator().manual_seed(0))
    made = program(quotient, ids, fuse)
    report = made.verify()
    assert report.ok, str(report)
    assert report.max_rel_error < 1e-12


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_float32_of_float64_is_verified_in_float64(mesh: str) -> None:
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
    model = Model(widened)
    del model.b
    plan = {"fuse": True, **({"inputs": {"x": "dp"}} if mesh != "dp=1" else {})}
    made = shardc.compile(model, {"x": x}, mesh=mesh, plan=plan)
    assert kernels(made)
    assert made.verify().ok, str(made.verify())
