"""PReLU, LogSigmoid, GLU and mvlgamma train sharded, no call of theirs runs whole, and no gradient's part is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.ir.graph import Graph, info, op_name, operands, type_of


class MultivariateGamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mvlgamma(x.exp() + 4.0, 3)


class Block(nn.Module):
    """An activation between two layers. A GLU halves a dim, which the second layer then reads."""

    def __init__(self, width: int, hidden: int, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(width, hidden), act
        self.down = nn.Linear(hidden // 2 if isinstance(act, nn.GLU) and act.dim == -1 else hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))).square().mean()


class Image(nn.Module):
    """Channels in dim 1, as PReLU takes them, and one weight for all of them after it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, channels, 3), nn.PReLU(channels)
        self.last, self.one = nn.Conv2d(channels, 4, 1), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.last(self.act(self.conv(x)))).square().mean()


ACTS = {
    "prelu of one": lambda hidden: nn.PReLU(),
    "log_sigmoid": lambda hidden: nn.LogSigmoid(),
    "glu": lambda hidden: nn.GLU(),
    "glu of the sequence": lambda hidden: nn.GLU(1),
    "mvlgamma": lambda hidden: MultivariateGamma(),
}
DP, TP = {"inputs": {"x": "dp"}}, {"params": {"up.weight": "tp, -"}}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("dp=2", DP),
    "tp": ("tp=2", TP),
    "sequence": ("tp=2", {"inputs": {"x": "-, tp, -"}}),
    "both": ("dp=2, tp=2", DP | TP),
    "zero-3": ("dp=2", DP | {"storage": {"zero": 3, "axes": ["dp"]}}),
    "recompute": ("dp=2, tp=2", DP | TP | {"recompute": "full"}),
}


def exact(model: nn.Module, x: Tensor, mesh: str, plan: dict[str, Any]) -> shardc.Program:
    """Compiled, equal to the single device, with a rule for every op."""
    program = shardc.compile(model, (x,), mesh=mesh, plan=plan)
    assert not [d for d in program.diagnostics if d.code == "SC301"]
    report = program.verify()
    assert report.ok, str(report)
    return program


def split(graph: Graph, name: str) -> set[str]:
    """The axes that split the operands of each call of an op."""
    calls = [node for node in graph.calls() if op_name(node.target) == name]
    assert calls, f"no {name}"
    return {axis for node in calls for value in operands(node) for axis in type_of(value).axes}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ACTS)
def test_trains_as_on_the_single_device(name: str, plan: str) -> None:
    exact(Block(8, 16, ACTS[name](16)), torch.randn(4, 6, 8), *PLANS[plan])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fused", [False, True], ids=["calls", "fused"])
@pytest.mark.parametrize("params", [{}, {"conv.weight": "tp"}, {"act.weight": "tp"}], ids=str)
def test_a_weight_for_each_channel(params: dict[str, str], fused: bool) -> None:
    exact(Image(6), torch.randn(4, 3, 8, 8), "dp=2, tp=2", DP | {"params": params, "fuse": fused})


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(sorted(ACTS)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["dp=2, tp=3", "dp=3, tp=2", "tp=4, dp=1"]),
    st.booleans(),
)
def test_any_sizes(name: str, batch: int, sequence: int, hidden: int, mesh: str, fused: bool) -> None:
    """Uneven shards, whose padding holds anything, as well."""
    exact(
        Block(5, 2 * hidden, ACTS[name](2 * hidden)),
        torch.randn(batch, 2 * sequence, 5),
        mesh,
        DP | TP | {"fuse": fused},
    )


# ---------------------------------------------------------------------- what is sent
FORWARD = {("fwd", "all_reduce"): 1}  # of the second layer's result: Megatron-LM's
SENT = {
    "log_sigmoid": ("log_sigmoid_backward", FORWARD),
    "mvlgamma": ("mvlgamma", FORWARD),
    "glu": ("glu glu_backward", FORWARD),
    # The gradient of the one weight is a sum over all that is sharded.
    "prelu of one": ("_prelu_kernel _prelu_kernel_backward", FORWARD | {("bwd", "all_reduce"): 1}),
}


@pytest.mark.parametrize("name", SENT)
def test_nothing_is_gathered_for_it(name: str) -> None:
    ops, collectives = SENT[name]
    program = exact(Block(8, 16, ACTS[name](16)), torch.randn(4, 6, 8), "tp=2", TP)
    for op in ops.split():
        assert split(program.body, op) == {"tp"}
    assert Counter((c.phase, c.kind) for c in program.collectives()) == collectives


def test_halves_are_sharded_each() -> None:
    """As those of a gated MLP's packed weight are: `tp` of it is `2*tp`, and a plan that says so gets no note."""
    for written, noted in (("tp, -", True), ("2*tp, -", False)):
        program = exact(Block(8, 16, nn.GLU()), torch.randn(4, 6, 8), "tp=2", {"params": {"up.weight": written}})
        assert str(type_of(program.body.input_nodes()["up.weight"])) == "f32[(2 8@tp), 8]"
        assert [d.code for d in program.diagnostics] == (["SC203"] if noted else [])


def test_a_part_of_a_gradient_that_is_lost_is_caught() -> None:
    """Were the weight's gradient of each shard taken for the whole, this comparison would see it."""
    program = exact(Block(8, 16, nn.PReLU()), torch.randn(4, 6, 8), "tp=2", TP)
    (lost,) = [
        node
        for node in program.body.calls()
        if op_name(node.target) == "shardc.all_reduce" and info(node).phase == "bwd"
    ]
    lost.replace_all_uses_with(operands(lost)[0])
    program.body.fx.erase_node(lost)
    report = program.verify()
    assert not report.ok
    assert "act.weight" in str(report)
