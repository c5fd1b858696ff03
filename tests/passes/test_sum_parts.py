"""A bias of query, key and value at once: its gradient is summed by the kernel that joins their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from kernels_triton.generated.op import FUSED
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import Graph, operands
from shardc.passes.normalize.sum_parts import SumParts
from tests.models.test_context import exact
from tests.models.zoo import make

aten = torch.ops.aten


class Attention(nn.Module):
    """Query, key and value of one product, side by side."""

    def __init__(self, width: int = 8, heads: int = 2, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.heads = nn.Linear(width, 3 * width, bias), heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).square().sum()


def joins(graph: Graph) -> list[fx.Node]:
    """The kernels that store a concatenation and sums over rows."""
    found: list[fx.Node] = []
    for call in graph.calls():
        kernel = kernel_of(call.target, call.args)
        if call.target is FUSED and kernel is not None:
            summed = any(step.op == "csum" for step in kernel.steps)
            found += [call] if summed and any(len(out.stores) == 3 for out in kernel.outputs) else []
    return found


def compiled(mesh: str = "dp=1", model: nn.Module | None = None, rows: int = 4, **plan: Any) -> shardc.Program:
    return shardc.compile(
        model or Attention(),
        torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(0)),
        mesh=mesh,
        plan={"fuse": True, **plan},
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp": {"mesh": "dp=2", "inputs": {"x": "dp, -, -"}},
    "tp": {"mesh": "tp=2", "params": {"qkv.weight": "3*tp, -"}},
    "cp": {"mesh": "cp=2", "inputs": {"x": "-, cp, -"}},
    "zero-3": {"mesh": "dp=2", "inputs": {"x": "dp, -, -"}, "storage": {"zero": 3, "axes": ["dp"]}},
    "accumulate": {"mesh": "dp=2", "inputs": {"x": "dp, -, -"}, "accumulate": 2},
    "recompute": {"recompute": "full"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_kernel_joins_and_sums(layout: str) -> None:
    """It reads each part once and writes both; of the join, products alone read."""
    program = compiled(**LAYOUTS[layout])
    (kernel,) = joins(program.body)
    assert len(operands(kernel)) == 3
    exact(program)


def test_padding_is_of_no_sum() -> None:
    """Three ranks share four sequences: rows of padding are zeros in each part's sum."""
    exact(compiled("dp=3", inputs={"x": "dp, -, -"}))


def test_without_kernels_the_sum_is_of_the_join() -> None:
    program = compiled(fuse=False)
    (joined,) = program.body.calls_of(aten.cat.default)
    assert any(user.target is aten.sum.dim_IntList for view in joined.users for user in [view, *view.users])
    exact(program)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_models(name: str) -> None:
    model, batch, loss = make(name)
    config: Any = model.config
    program = shardc.compile(model, batch, mesh="dp=2", plan={"fuse": True, "inputs": {"*": "dp"}}, loss=loss)
    if name == "gpt2":
        assert len(joins(program.body)) == config.n_layer
    exact(program)


class Joined(nn.Module):
    """A concatenation whose rows are summed, in some way or other."""

    def __init__(self, dim: int, summed: tuple[int, ...], *, alone: bool = False, wide: bool = False) -> None:
        super().__init__()
        self.dim, self.summed, self.alone, self.wide = dim, summed, alone, wide
        self.a = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([x * self.a, x + self.a, x.sin()], self.dim)
        total = joined.sum(self.summed, dtype=torch.float64 if self.wide else None).square().sum().float()
        return total if self.alone else total + joined.exp().mean()


@pytest.mark.parametrize(
    ("model", "apart"),
    [
        (Joined(2, (0, 1)), True),
        (Joined(-1, (-2, -3)), True),
        (Joined(2, (0,)), False),  # one row of sums for each of four
        (Joined(2, (0, 1, 2)), False),  # of columns, too
        (Joined(1, (0, 1)), False),  # parts above each other
        (Joined(0, (0, 1)), False),
        (Joined(2, (0, 1), wide=True), False),  # added up in another dtype than the parts have
    ],
)
def test_what_is_taken_apart(model: Joined, apart: bool) -> None:
    x = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    graph = shardc.compile(model, x, mesh="dp=1", plan={"fuse": False}).reference.copy()
    before = len(list(graph.calls_of(aten.sum.dim_IntList)))
    graph = SumParts().run(graph)
    assert len(list(graph.calls_of(aten.sum.dim_IntList))) - before == (2 if apart else 0)
    exact(shardc.compile(model, x, mesh="dp=1", plan={"fuse": True}))


def test_a_join_that_only_its_sum_reads_is_not_made() -> None:
    program = shardc.compile(Joined(2, (0, 1), alone=True), torch.randn(3, 4, 4), mesh="dp=1", plan={"fuse": False})
    forward = SumParts().run(program.reference.copy())
    joined = [len(operands(call)) for call in forward.calls_of(aten.cat.default)]
    assert len(joined) == 1, "of the three sums alone"
    assert len(list(program.reference.calls_of(aten.cat.default))) == 1
