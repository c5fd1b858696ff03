"""Additions are regrouped by what is pending; indices that are known while compiling need no communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.ir.graph import op_name


class Step(nn.Module):
    """A function of x and two weights."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(6, 8))
        self.b = nn.Parameter(torch.randn(8, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.a, self.b)


def compiled(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], mesh: str = "dp=2, tp=2", shape: tuple[int, ...] = (4, 6)
) -> Program:
    plan = {"params": {"a": "-, tp"}, "inputs": {"x": "dp"}}
    program = shardc.compile(Step(function), torch.randn(shape), mesh=mesh, plan=plan)
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-12
    return program


def over_tp(program: Program, phase: str) -> Counter[str]:
    return Counter(c.kind for c in program.collectives() if "tp" in c.axes and c.phase == phase)


@pytest.mark.parametrize("order", ["first", "middle", "last"])
def test_pending_terms_meet_first(order: str) -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        one, two = x @ a @ b, (x + 1) @ a @ b
        y = {"first": (x + one) + two, "middle": (one + x) + two, "last": (one + two) + x}[order]
        return y.tanh().sum()

    assert over_tp(compiled(step), "fwd") == {"all_reduce": 1}


def test_a_sum_that_something_else_reads_stays() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        part = x + x @ a @ b
        return (part + (x + 1) @ a @ b).tanh().sum() + part.sin().sum()

    assert over_tp(compiled(step), "fwd") == {"all_reduce": 2}


def test_equal_terms() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = x @ a @ b
        return ((x + y) + y).tanh().sum()

    assert over_tp(compiled(step), "fwd") == {"all_reduce": 1}


# ---------------------------------------------------------------------------------------------- known indices
def ops(program: Program) -> Counter[str]:
    return Counter(op_name(n.target) for n in program.reference.calls())


def test_counting_indices_are_no_indexing() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        rows, columns = torch.arange(4)[:, None, None], torch.arange(6)[None, None, :]
        return (x[rows, columns].squeeze(1) @ a @ b).tanh().sum()

    program = compiled(step)
    assert "index.Tensor" not in ops(program)
    assert all(c.kind == "all_reduce" for c in program.collectives())


@pytest.mark.parametrize(
    "index",
    [
        torch.arange(6).flip(0),
        torch.tensor([0, 1, 2, 3, 4, 4]),
        torch.arange(3),
        torch.arange(6) - 6,
    ],
    ids=["backwards", "twice", "in part", "from the back"],
)
def test_other_indices_are(index: Tensor) -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x[:, : len(index)] @ a[index] @ b).tanh().sum()

    assert "index.Tensor" in ops(compiled(step))


@pytest.mark.parametrize("index", [torch.tensor([[0, 5], [2, 2]]), torch.tensor([[-1, 5], [2, -4]])])
def test_rows_that_are_picked_by_every_rank_add_up(index: Tensor) -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        picked = a[index.repeat(2, 1)]  # 4, 2, 8: a row of x each
        return (x[:, :2, None] * picked).tanh().sum()

    program = compiled(step)
    assert "index_put" not in ops(program)
    assert all(c.kind == "all_reduce" for c in program.collectives())


def test_the_gradient_of_a_grid() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x @ a[torch.arange(6)[:, None], torch.arange(8)] @ b).tanh().sum()

    assert "index_put" not in ops(compiled(step))


# ------------------------------------------------------------------------------------------------ axes of one
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("position", [[0, 3, 2, 3], [-1, 1, -4, 0]])
def test_a_position_of_each_sample_stays_with_its_sample(position: list[int], dtype: torch.dtype) -> None:
    """`x[arange(n), last]` picks the last token of each sample: no rank needs another's samples."""

    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        last = torch.tensor(position, dtype=dtype) + (x[:, 0, 0] > 9).to(dtype)  # not known while compiling
        picked = (x @ a)[torch.arange(x.shape[0]), last]  # [4, 8]
        return (picked @ b).square().mean(-1).sum()

    program = compiled(step, shape=(4, 5, 6))
    counts = Counter(c.kind for c in program.collectives())
    assert set(counts) == {"all_reduce"}, counts
    names = ops(program)
    assert names["gather"] == names["scatter_add"] == 1
    assert not names["index.Tensor"] + names["index_put"]


def test_a_position_of_each_sample_and_head() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = (x @ a).view(4, 5, 2, 4).transpose(1, 2)  # samples, heads, positions
        best = y.detach().sum(-1).argmax(-1)  # of each sample and head
        picked = y[torch.arange(4)[:, None], torch.arange(2), best]
        return (picked.flatten(1) @ b).square().sum()

    program = compiled(step, shape=(4, 5, 6))
    assert all(c.kind == "all_reduce" for c in program.collectives())


def test_other_positions_keep_their_indexing() -> None:
    """Samples out of order, and one position for all."""

    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        last = (x[:, 0, 0] > 0).long()
        y = x @ a
        return (y[torch.tensor([1, 0, 3, 2]), last] @ b).square().sum() + y[torch.arange(4), last[:1]].sum()

    assert not ops(compiled(step, shape=(4, 5, 6)))["gather"]


def test_a_position_out_of_range_is_refused_where_its_dim_is_sharded() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        last = (x[:, 0, 0] > 0).long() * 9
        return (x @ a)[torch.arange(4), last].sum() + b.sum()

    plan = {"inputs": {"x": "dp, tp"}}
    program = shardc.compile(Step(step), torch.full((4, 6, 6), -1.0), mesh="dp=2, tp=2", plan=plan)
    assert program.verify().ok
    with pytest.raises((shardc.ShardcError, IndexError), match=r"SC507|not in \[0, 6\)"):
        program.launch().step(torch.ones(4, 6, 6))


def test_an_axis_of_one_rank_communicates_nothing() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x @ a @ b).tanh().sum()

    assert {c.axes for c in compiled(step, "dp=1, tp=2").collectives()} == {("tp",)}
    assert compiled(step, "dp=1, tp=1").collectives() == []
