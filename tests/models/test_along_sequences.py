"""What is done along a sequence that ranks have parts of: convolutions, moves of rows, running products and maxima.

Loss and every gradient are those of eager PyTorch; few rows of other ranks come, and no gather, where `MOVES` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardc.ir.ops.mirror import MIRROR, MIRROR_ROWS
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from tests.models.test_sequence_scans import WIDTH, Recurrent, assert_equals_eager, compiled


class Along(Recurrent):
    """A function of a sequence, and a weight of three taps."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = (MOVED | GATHERED | COLLECTED)[name]
        self.taps = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / 3)

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        return self.function(torch.tanh(x) + a, self.taps)


class Turned(Recurrent):
    """A sequence, and itself from the end."""

    def recur(self, x: Tensor, a: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(x.flip(1)) * a


class Residual(nn.Module):
    """A causal TCN: dilated convolutions with a bias, one cut behind and one padded by hand, and a residual stream."""

    def __init__(self, width: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.cut = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=2 * 2**i, dilation=2**i) for i in range(layers))
        self.padded = nn.ModuleList(nn.Conv1d(2 * width, width, 2, dilation=2**i, groups=2) for i in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids).transpose(1, 2)
        for i, (cut, padded) in enumerate(zip(self.cut, self.padded, strict=True)):
            y = torch.relu(cut(x)[..., : ids.shape[1]])
            x = x + padded(F.pad(y, (2**i, 0)))
        return F.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), labels.flatten())


Function = Callable[[Tensor, Tensor], Tensor]
MOVED: dict[str, Function] = {  # rows of neighbours come, and nothing is gathered
    "dense": lambda x, w: F.conv1d(F.pad(x.mT, (2, 0)), w).mT,
    "dilated": lambda x, w: F.conv1d(F.pad(x.mT, (4, 0)), w, dilation=2).mT,
    "as long on both sides": lambda x, w: F.conv1d(x.mT, w, padding=1).mT,
    "in groups": lambda x, w: F.conv1d(F.pad(x.mT, (2, 0)), w[:, :2], groups=2).mT,
    "depthwise, padded by hand": lambda x, w: F.conv1d(F.pad(x.mT, (2, 0)), w[:, :1], groups=WIDTH).mT,
    "cut behind": lambda x, w: F.conv1d(x.mT, w, padding=2)[..., : x.shape[1]].mT,
    "ahead of time": lambda x, w: F.conv1d(F.pad(x.mT, (0, 2)), w).mT,
    "padded by hand and by the call": lambda x, w: F.conv1d(F.pad(x.mT, (1, 0)), w, padding=1)[..., : x.shape[1]].mT,
    "shorter": lambda x, w: F.pad(F.conv1d(x.mT, w), (1, 1)).mT,
    "rolled": lambda x, w: x.roll(2, 1) + x.roll(-5, 1),
    "differences": lambda x, w: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "zeros before": lambda x, w: torch.cat([torch.zeros_like(x[:, :2]), x[:, :-2]], 1),
    "ones behind": lambda x, w: torch.cat([x[:, 1:], torch.ones_like(x[:, :1])], 1),
    "cut and joined": lambda x, w: torch.cat([x[:, 5:], x[:, :5]], 1),
    "the last rows first": lambda x, w: torch.cat([x[:, -3:], x[:, :-3]], 1),
    "with a stride": lambda x, w: x + F.conv1d(F.pad(x.mT, (1, 0)), w, stride=2).mT.sum(1, keepdim=True),
    "moved by 3": lambda x, w: F.pad(x, (0, 0, 3, 0))[:, :-3],
}
GATHERED: dict[str, Function] = {
    "windows": lambda x, w: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "sorted": lambda x, w: x.sort(1).values,
    "most of the rows": lambda x, w: x + x[:, torch.arange(10) % 7].sum(1, keepdim=True),
}
COLLECTED: dict[str, Function] = {  # a few rows of each rank, of all ranks
    "maxima": lambda x, w: x.cummax(1).values,
    "minima": lambda x, w: x.cummin(1).values * x.cummin(1).indices,
    "products": lambda x, w: x.cumprod(1),
    "products with zeros": lambda x, w: torch.where(x.abs() < 0.2, 0.0, x).cumprod(1),
    "log-sum-exps": lambda x, w: x.logcumsumexp(1),
    "log-sum-exps from behind": lambda x, w: x.flip(1).logcumsumexp(1).flip(1),
    "sums of truth values": lambda x, w: x / (x > 0).cumsum(1).clamp(min=1),
    "sums in another dtype": lambda x, w: x * (x > 0).cumsum(1, dtype=x.dtype) / 9,
    "trapezoids": lambda x, w: F.pad(torch.cumulative_trapezoid(x, dim=1), (0, 0, 1, 0)),
    "the greatest": lambda x, w: x + x.max(1, keepdim=True).values + x.min(1).values[:, None],
    "where the greatest is": lambda x, w: x + x.argmax(1, keepdim=True) + x.argmin(1)[:, None] * 0.5,
    "named rows": lambda x, w: x + x[:, torch.tensor([3, 1, -1, 3])].sum(1, keepdim=True),
    "selected rows": lambda x, w: x + x.index_select(1, torch.tensor([3, 1, 2, 3])).prod(1, keepdim=True),
    "a row of each": lambda x, w: x + x[torch.arange(x.shape[0]), (x[..., 0] > 0.6).sum(1) - 1][:, None],
    "some of each": lambda x, w: x + x.gather(1, torch.cat([x.argmin(1, True), x.argmax(1, True)], 1)).sum(1, True),
    "other rows of each column": lambda x, w: x + x.gather(1, x.argmin(1, keepdim=True)),
}
LAYOUTS = [("cp=2", 16, "none"), ("cp=4", 17, "none"), ("cp=4", 18, "zigzag"), ("dp=2, cp=2", 17, "zigzag")]


def along(name: str) -> Along:
    torch.manual_seed(0)
    return Along(name).double()


@pytest.mark.sampled(32)
@pytest.mark.parametrize(("mesh", "length", "balance"), LAYOUTS)
@pytest.mark.parametrize("name", MOVED)
def test_rows_of_neighbours_come(name: str, mesh: str, length: int, balance: str) -> None:
    model = along(name)
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert {c.kind for c in program.collectives()} == {"permute", "all_reduce"}
    assert ("~cp" in print_graph(program.body)) == (balance == "zigzag")


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("mesh", "length", "balance"), LAYOUTS)
@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_is_right(name: str, mesh: str, length: int, balance: str) -> None:
    model = along(name)
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    gathers = [c for c in program.collectives() if c.kind == "all_gather"]
    assert not gathers or any(d.code in ("SC203", "SC209") for d in program.diagnostics)


@pytest.mark.sampled(32)
@pytest.mark.parametrize(("mesh", "length", "balance"), [*LAYOUTS, ("cp=2, tp=2", 50, "none")])
@pytest.mark.parametrize("name", COLLECTED)
def test_a_few_rows_of_each_rank_come(name: str, mesh: str, length: int, balance: str) -> None:
    model = along(name)
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert not [d for d in program.diagnostics if d.code == "SC203" and d.severity == "warning"]
    ranks, runs = program.mesh.size("cp"), 2 if balance == "zigzag" else 1
    for c in program.collectives():
        if c.kind == "all_gather":  # two rows of each run of the others
            assert c.bytes_per_rank <= 4 * WIDTH * 8 * 2 * runs * (ranks - 1), c.value
        elif c.phase == "fwd":  # four rows, as a sum
            assert c.bytes_per_rank <= 4 * WIDTH * 8 * 2 * 4 * (ranks - 1) / ranks or c.kind == "permute", c.value
    assert ("~cp" in print_graph(program.body)) == (balance == "zigzag")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("length", [16, 50])
@pytest.mark.parametrize(
    ("mesh", "balance"), [("cp=2", "none"), ("cp=4", "zigzag"), ("dp=2, cp=2", "none"), ("cp=2, tp=2", "zigzag")]
)
def test_a_causal_tcn(mesh: str, balance: str, length: int) -> None:
    torch.manual_seed(0)
    model = Residual().double()
    params = {"cut.*.weight": "tp, -, -", "cut.*.bias": "tp"} if "tp" in mesh else {}
    program = compiled(model, length, mesh, context={"balance": balance}, params=params)
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    if "tp" not in mesh:
        assert {c.kind for c in program.collectives()} == {"permute", "all_reduce"}
        assert not [d for d in program.diagnostics if d.severity == "warning"]


def test_a_convolution_fetches_its_reach() -> None:
    """Forward two taps look back, by 1 and 2 rows; backward as many of the gradient, and the same rows once more."""
    torch.manual_seed(0)
    for length in (32, 128):
        program = compiled(Along("dense"), length, "cp=4", context={"balance": "none"})
        row = 4 * WIDTH * 4
        sent: dict[str, int] = {"fwd": 0, "bwd": 0}
        for c in program.collectives():
            if c.kind == "permute":
                sent[c.phase] += c.bytes_per_rank
        assert sent == {"fwd": 3 * row, "bwd": 6 * row}


PLANS: dict[str, dict[str, Any]] = {
    "fuse": {"fuse": True},
    "recompute": {"recompute": "full"},
    "all of them": {"fuse": True, "accumulate": 2, "recompute": "full", "bucket": True, "precision": "bf16"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_convolutions_with_other_plans(plan: str) -> None:
    torch.manual_seed(0)
    model = Residual() if "precision" in PLANS[plan] else Residual().double()
    assert compiled(model, 18, "dp=2, cp=2", context={"balance": "zigzag"}, **PLANS[plan]).verify().ok


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh", "length", "balance", "kinds"),
    [("cp=4", 16, "none", {"permute"}), ("cp=3", 12, "none", {"permute"}), ("dp=2, cp=2", 16, "zigzag", set[str]()),
     ("cp=2, tp=2", 16, "none", {"permute"}), ("cp=4", 17, "none", {"permute"}),
     ("cp=2", 17, "none", {"permute"}), ("cp=2", 18, "zigzag", {"permute"}), ("cp=4", 50, "zigzag", {"permute"})],
)  # fmt: skip
def test_rows_turned_round(mesh: str, length: int, balance: str, kinds: set[str]) -> None:
    """They go to one rank, and a few to the next where parts are unequal; of a zigzag all stay, or all but a few."""
    torch.manual_seed(0)
    model = Turned().double()
    program = compiled(model, length, mesh, context={"balance": balance})
    assert_equals_eager(model, program)
    assert not type_faults(program.body)
    assert {c.kind for c in program.collectives() if c.kind != "all_reduce"} == kinds
    if kinds == {"permute"}:
        told = str(program.explain(next(c.value for c in program.collectives() if c.kind == "permute")))
        assert "its rows are turned round" in told
        assert 'ids = "-, cp"' in told or 'labels = "-, cp"' in told
    if length > 16:  # forward: its own rows, unless it has both ends, and as many as it has fewer than others
        own, less = -(-length // program.mesh.size("cp")), -length % program.mesh.size("cp")
        sent = sum(c.bytes_per_rank for c in program.collectives() if c.kind == "permute" and c.phase == "fwd")
        own, less = (0, 10) if balance == "zigzag" and length == 50 else (0, 1) if balance == "zigzag" else (own, less)
        assert sent == (own + less) * 4 * WIDTH * 8


def test_rows_that_are_not_sent_are_refused() -> None:
    torch.manual_seed(0)
    body = compiled(Turned().double(), 16, "cp=4", context={"balance": "none"}).body.copy()
    node = next(n for n in body.calls() if n.target is MIRROR_ROWS)
    node.target, node.args = MIRROR, (node.args[0], node.args[2])
    assert type_faults(body)
