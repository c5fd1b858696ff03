"""Sequences over an axis where not all is a decoder that attends to itself: other lengths, dims and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.ops.pick import PICK_ROWS
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from tests.models.test_context import Attention, exact


class Cross(nn.Module):
    """Causal attention of rows to fewer keys than rows, or to more."""

    def __init__(self, rows: int, keys: int) -> None:
        super().__init__()
        self.q, self.kv, self.rows, self.keys = nn.Linear(8, 8), nn.Linear(8, 16), rows, keys

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x[:, : self.rows]).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.kv(x[:, : self.keys]).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).pow(2).sum()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("context", ["auto", "ring", "all_to_all"])
@pytest.mark.parametrize(("rows", "keys"), [(16, 13), (13, 16)])
def test_causal_attention_to_another_number_of_keys(rows: int, keys: int, context: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    plan = {"mesh": "cp=2", "inputs": {"x": "-, cp, -"}, "context": context}
    program = shardc.compile(Cross(rows, keys).double(), {"x": x}, plan=plan)
    assert program.verify().ok
    assert program.prove().ok


class Divided(nn.Module):
    """Causal attention where what is sharded is the batch, which is not the first dim, or are the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.w(x).permute(self.order)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).pow(2).sum()

    order: tuple[int, ...] = (0, 1, 2, 3)


@pytest.mark.parametrize(("order", "placed"), [((0, 1, 2, 3), "-, cp, -, -"), ((1, 2, 0, 3), "-, cp, -, -")])
def test_a_batch_or_heads_are_not_in_zigzag(order: tuple[int, ...], placed: str) -> None:
    torch.manual_seed(0)
    model = Divided().double()
    model.order = order
    plan: dict[str, Any] = {"mesh": "cp=2", "inputs": {"x": placed}}
    program = shardc.compile(model, {"x": torch.randn(8, 8, 8, 4, dtype=torch.float64)}, plan=plan)
    assert "~cp" not in print_graph(program.body)
    assert not program.diagnostics
    assert program.verify().ok


def test_a_note_says_that_rows_are_in_zigzag() -> None:
    torch.manual_seed(0)
    plan: dict[str, Any] = {"mesh": "cp=2", "inputs": {"x": "-, -, cp, -"}}
    program = shardc.compile(Divided().double(), {"x": torch.randn(2, 2, 8, 4, dtype=torch.float64)}, plan=plan)
    (note,) = [d for d in program.diagnostics if d.severity == "note"]
    assert "dim 2 of x is in zigzag over cp" in note.message
    assert note.hint == "context: {balance: none} gives each rank one run"


class Channels(nn.Module):
    """Dropout of whole channels, whose draw has a dim of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (F.dropout1d(self.w(x), 0.25) * F.dropout(x, 0.25)).pow(2).sum()


@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("fuse", [False, True])
def test_draws_with_a_dim_of_one_element(fuse: bool, balance: str) -> None:
    torch.manual_seed(0)
    plan = {"mesh": "dp=2, cp=2", "inputs": {"x": "dp, cp, -"}, "context": {"balance": balance}, "fuse": fuse}
    x = torch.randn(4, 17, 4, dtype=torch.float64)
    assert shardc.compile(Channels().double(), {"x": x}, plan=plan).verify().ok


@pytest.mark.parametrize("strategy", ["ring", "all_to_all", "all_gather"])
def test_types_of_an_evaluation_are_true(strategy: str) -> None:
    """Nobody reads the log-sums of attention then."""
    plan = {"mesh": "cp=2", "inputs": {"x": "-, cp, -"}, "context": strategy}
    program = shardc.compile(Attention(4, 2, 4), torch.randn(2, 10, 16), plan=plan, mode="eval")
    assert program.verify().ok
    assert not type_faults(program.body)


@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_of_one_row(causal: bool) -> None:
    """As where a token is decoded."""
    plan = {"mesh": "dp=2", "inputs": {"x": "dp"}}
    exact(shardc.compile(Attention(4, 2, 4, causal=causal), torch.randn(2, 1, 16), plan=plan))


# ---------------------------------------------------------------------- a few rows
class LastRows(nn.Module):
    """Causal attention, of which the last rows are read alone, as a section or one row by its number."""

    def __init__(self, count: int, alone: bool) -> None:
        super().__init__()
        self.attend, self.head, self.count, self.alone = nn.Linear(8, 24), nn.Linear(8, 5), count, alone

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.attend(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x[:, -self.count] if self.alone else x[:, -self.count :]).square().mean()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize(("count", "alone"), [(1, True), (1, False), (3, False), (4, True)])
@pytest.mark.parametrize("length", [16, 17])
def test_rows_that_are_picked_are_all_that_is_sent(length: int, count: int, alone: bool, balance: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, length, 8, dtype=torch.float64)
    plan = {"mesh": "cp=4", "inputs": {"x": "-, cp, -"}, "context": {"attention": "ring", "balance": balance}}
    program = shardc.compile(LastRows(count, alone).double(), {"x": x}, plan=plan)
    exact(program)
    moved = [c for c in program.collectives() if c.kind != "permute" and not c.value.startswith(("attend", "head"))]
    rows = 1 if alone else count
    assert [(c.kind, c.phase, c.bytes_per_rank) for c in moved if c.phase == "fwd"] == [
        ("all_reduce", "fwd", 2 * 3 * 2 * rows * 8 * 8 // 4)
    ]
    assert not [c for c in moved if c.phase == "bwd" and c.kind != "all_reduce"], moved
    assert not [d for d in program.diagnostics if d.code == "SC203" and "in zigzag" not in d.message]


def test_a_rank_that_takes_other_rows_is_refused() -> None:
    plan = {"mesh": "cp=4", "inputs": {"x": "-, cp, -"}, "context": "ring"}
    for name, at, value in (("rows", 4, "15"), ("axes", 5, []), ("start", 2, 16)):
        program = shardc.compile(LastRows(1, True), {"x": torch.randn(2, 16, 8)}, plan=plan)
        (pick,) = [node for node in program.body.calls() if node.target is PICK_ROWS]
        assert not type_faults(program.body)
        pick.args = (*pick.args[:at], value, *pick.args[at + 1 :])
        assert type_faults(program.body), name
