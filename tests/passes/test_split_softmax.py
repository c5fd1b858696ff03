"""Softmax over a sharded dim, forward and backward: statistics travel, values do not, and every value is the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.ir.collectives import Collective, collectives
from shardc.ir.graph import op_name
from shardc.passes.fusion.fuse import fuse
from tests.passes.test_online_softmax import EXTREMES, Logits, kinds, same

Loss = Callable[[Tensor, Tensor], Tensor]
UNUSED = torch.zeros(1, dtype=torch.int64)


def weighed(y: Tensor) -> Tensor:
    """A loss to which every element matters differently."""
    return (y.square() * torch.arange(1.0, y.shape[-1] + 1)).sum()


def probabilities(x: Tensor, _: Tensor) -> Tensor:
    return weighed(x.softmax(-1))


def compiled(x: Tensor, loss: Loss = probabilities, mesh: str = "tp=2", split: str = "-, tp") -> shardc.Program:
    return shardc.compile(Logits(x, loss), UNUSED, mesh=mesh, plan={"params": {"x": split}})


def of_axis(program: shardc.Program, phase: str) -> list[Collective]:
    """Without those of one number, the loss's own."""
    return [c for c in collectives(program.body) if c.phase == phase and c.payload_bytes > 8]


def calls(program: shardc.Program) -> set[str]:
    return {op_name(node.target) for node in program.body.calls()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "split", "shape"),
    [
        ("tp=2", "-, tp", (6, 10)),
        ("tp=3", "-, tp", (5, 16)),  # 6 6 4
        ("tp=4", "-, tp", (3, 33)),  # 9 9 9 6
        ("a=2,b=3", "-, a.b", (4, 40)),  # 20 20, cut into 7 7 6
        ("dp=2,tp=2", "dp, tp", (6, 11)),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True], ids=["calls", "fused"])
def test_one_gather_of_statistics_and_one_sum(mesh: str, split: str, shape: tuple[int, ...], fused: bool) -> None:
    torch.manual_seed(0)
    program = compiled(torch.randn(shape) * 3, mesh=mesh, split=split)
    ranks, rows = program.mesh.size(of_axis(program, "fwd")[0].axes), math.ceil(shape[0] / (2 if "dp" in mesh else 1))
    (gather,), (total,) = of_axis(program, "fwd"), of_axis(program, "bwd")
    assert (gather.kind, gather.payload_bytes) == ("all_gather", ranks * rows * 8)
    assert (total.kind, total.op, total.payload_bytes) == ("all_reduce", "sum", rows * 4)
    columns = (ranks - 1) * rows * (shape[1] // ranks) * 4  # of x alone, at the least
    assert gather.bytes_per_rank + total.bytes_per_rank < columns
    assert not calls(program) & {"_softmax", "_softmax_backward_data"}
    assert not [d for d in program.diagnostics if d.severity == "warning"]
    same(replace(program, body=fuse(program.body)) if fused else program)


def test_the_dim_that_is_not_sharded_stays_one_call() -> None:
    program = compiled(torch.randn(6, 10), lambda x, _: weighed(x.softmax(0)))
    assert {"_softmax", "_softmax_backward_data"} <= calls(program)
    assert not of_axis(program, "fwd")
    same(program)


def test_two_columns_a_rank_are_gathered() -> None:
    """Statistics are two numbers a row and rank: not fewer than the columns."""
    program = compiled(torch.randn(6, 4), lambda x, _: weighed((x * 2.0).softmax(-1)))
    assert [(c.kind, c.payload_bytes) for c in of_axis(program, "fwd")] == [("all_gather", 6 * 4 * 4)]
    assert "_softmax" in calls(program)
    same(program)


def test_who_needs_every_column_is_given_the_softmax_whole() -> None:
    """A router picks among all experts: statistics, and then the probabilities, would be more to send."""
    program = compiled(torch.randn(6, 16), lambda x, _: ((x * 2).softmax(-1) * 2).topk(2, -1).values.square().sum())
    assert [(c.kind, c.payload_bytes) for c in of_axis(program, "fwd")] == [("all_gather", 6 * 16 * 4)]
    assert "_softmax" in calls(program)
    same(program)


def test_a_softmax_and_a_log_softmax_of_the_same_meet_once() -> None:
    program = compiled(torch.randn(6, 10), lambda x, _: -(x.softmax(-1) * x.log_softmax(-1)).sum())
    assert [c.kind for c in of_axis(program, "fwd")] == ["all_gather"]
    same(program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_statistics_of_halves_are_in_float32(dtype: torch.dtype) -> None:
    program = compiled(torch.randn(6, 24).to(dtype), lambda x, _: weighed(x.softmax(-1).float()))
    (gather,), (total,) = of_axis(program, "fwd"), of_axis(program, "bwd")
    row = 8 if dtype == torch.float64 else 4
    assert (gather.bytes_per_rank, total.bytes_per_rank) == (6 * 2 * row, 6 * row)
    report = program.verify()
    assert report.ok, str(report)


class Attention(nn.Module):
    """Attention written out, its keys and values in shards; a mask that is added, or fills."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.k, self.v = (nn.Parameter(torch.randn(2, 11, 8)) for _ in range(2))
        self.causal, self.drop = causal, nn.Dropout(dropout)

    def forward(self, q: Tensor) -> Tensor:
        scores = q @ self.k.transpose(1, 2) * 0.35
        hidden = torch.ones(q.shape[1], 11, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf) if self.causal else scores + hidden * -1e4
        return (self.drop(scores.softmax(-1)) @ self.v).square().sum()


@pytest.mark.parametrize("causal", [False, True], ids=["added", "filled"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_with_keys_in_shards(causal: bool, dropout: float) -> None:
    """Ranks past the causal edge see -inf alone, and add nothing."""
    torch.manual_seed(0)
    plan = {"params": {"k": "-, cp, -", "v": "-, cp, -"}}
    program = shardc.compile(Attention(causal, dropout).train(), torch.randn(2, 7, 8), mesh="cp=3", plan=plan)
    assert "_softmax" not in calls(program)
    gathered = [c.payload_bytes for c in collectives(program.body) if c.kind == "all_gather"]
    assert gathered == [2 * 7 * 2 * 4 * 3]
    same(program)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_numbers_in_any_shards(data: st.DataObject) -> None:
    """What is NaN on the single device is NaN here: rows of -inf alone, and those that hold +inf."""
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(9, 14))
    numbers = st.sampled_from(EXTREMES[: data.draw(st.sampled_from([3, 8, 12, 14]))]) | st.floats(-20, 20, width=32)
    x = torch.tensor([[data.draw(numbers) for _ in range(columns)] for _ in range(rows)])
    ranks = data.draw(st.integers(2, 3))
    program = compiled(x, mesh=f"tp={ranks}")
    assert kinds(program.body)[0] == "all_gather"
    assert "_softmax" not in calls(program)
    same(program)
