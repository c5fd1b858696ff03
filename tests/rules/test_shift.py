"""Rows moved along a dim that ranks have parts of: exact for every layout, and checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from shardc.ir.blocks import truncated, zigzag
from shardc.ir.graph import Graph, Port, ValueInfo, set_info, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.ops.mirror import MIRROR
from shardc.ir.ops.shift import SHIFT, SHIFT_JOIN, SHIFT_ROWS
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.ir.types import Atom, TensorType
from shardc.passes.sharding.localize import Localize
from shardc.passes.type_check import type_faults
from shardc.rules.projection import project
from shardc.runtime.oracle.simulate import simulate
from tests.models.test_long_sequences import Causal, Decoder, compiled

Layout = tuple[int, tuple[str, ...], Mesh]
MESHES = [Mesh(cp=2), Mesh(cp=4), Mesh(cp=3, tp=2), Mesh(tp=2, cp=2)]
AXES = [("cp",), ("cp", "tp"), ("tp", "cp"), ("tp",)]


@st.composite
def atoms(draw: st.DrawFn) -> tuple[int, tuple[str, ...], Mesh]:
    """The size of a dim, plain or in zigzag, the axes that shard it, and their mesh."""
    mesh = draw(st.sampled_from(MESHES))
    axes = draw(st.sampled_from([axes for axes in AXES if set(axes) <= set(mesh.names)]))
    size = draw(st.integers(2, 20))
    balanced = zigzag(size, axes[0], mesh.size(axes[0])) if draw(st.booleans()) else None
    return size if balanced is None else balanced, axes, mesh


def moved(target: Any, args: tuple[Any, ...], before: TensorType, after: TensorType, mesh: Mesh) -> Tensor:
    """A call on a sharded value, made local; and what all ranks compute together of numbered rows."""
    made = fx.Graph()
    x = made.placeholder("x")
    set_info(x, ValueInfo("x", before))
    node = made.call_function(target, (x, *args))
    set_info(node, ValueInfo("y", after))
    made.output((node,))
    graph = Graph(made, mesh, [Port("input", "x")], [Port("output", "y")])
    projection = project(node)
    assert not projection.blocked & projection.operand_pieces
    split = dict(zip(projection.operands[0], before.placement, strict=True))
    update(node, assignment=tuple((projection.names[p], axes) for p, axes in split.items() if axes))
    local = Localize().run(graph)
    assert not type_faults(local)
    (found,) = simulate(local, {"x": numbered(before)}).values()
    return found


def numbered(type: TensorType) -> Tensor:
    return torch.arange(1, math.prod(type.shape) + 1, dtype=type.dtype).reshape(type.shape)


def rows(size: int, axes: tuple[str, ...] = ()) -> TensorType:
    return TensorType(torch.float64, ((Atom(2),), (Atom(size, axes),), (Atom(3),)))


@given(atoms(), st.integers(-22, 22), st.integers(0, 3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_rows_move_over_any_layout(layout: Layout, offset: int, less: int, wrap: bool) -> None:
    size, axes, mesh = layout
    shorter = None if wrap or not less or size - less < 2 else truncated(size, int(size) - less)
    after = size if shorter is None else shorter
    args = (1, offset, int(after), 0.5, wrap)
    found = moved(SHIFT, args, rows(size, axes), rows(after, axes), mesh)
    x = numbered(rows(int(size)))
    expected = x.roll(-offset, 1) if wrap else torch.full((2, int(after), 3), 0.5, dtype=torch.float64)
    for i in range(int(after)) if not wrap else ():
        if 0 <= i + offset < int(size):
            expected[:, i] = x[:, i + offset]
    assert torch.equal(found, expected)


@given(atoms(), st.integers(-3, 3), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_rows_move_back_from_fewer(layout: Layout, offset: int, less: int) -> None:
    """As gradients do: from the first rows of a sequence to all of it."""
    size, axes, mesh = layout
    part = truncated(size, int(size) - less) if int(size) - less > 1 else None
    if part is not None:
        found = moved(SHIFT, (1, offset, int(size), 0.0, False), rows(part, axes), rows(size, axes), mesh)
        expected = torch.zeros(2, int(size), 3, dtype=torch.float64)
        x = numbered(rows(int(part)))
        for i in range(int(size)):
            if 0 <= i + offset < int(part):
                expected[:, i] = x[:, i + offset]
        assert torch.equal(found, expected)


@given(atoms(), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_rows_in_the_other_order_over_any_layout(layout: Layout, less: int) -> None:
    size, axes, mesh = layout
    part = truncated(size, int(size) - less) if less and int(size) - less > 1 else None
    type = rows(size if part is None else part, axes)
    if len(axes) == 1 or not type.dims[1][0].uneven(mesh):
        assert torch.equal(moved(MIRROR, (1,), type, type, mesh), numbered(type).flip(1))


# ------------------------------------------------------------------------------------------------ models
class Convolved(nn.Module):
    """Mamba's causal convolution, and one with as many rows on both sides."""

    def __init__(self, width: int = 6, taps: int = 4) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(24, width), nn.Linear(width, 24)
        self.causal = nn.Conv1d(width, width, taps, padding=taps - 1, groups=width)
        self.around = nn.Conv1d(width, width, 3, padding=2, dilation=2, groups=width, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.silu(self.causal(self.tokens(ids).transpose(1, 2))[..., : ids.shape[1]])
        logits = self.head((x + torch.tanh(self.around(x))).transpose(1, 2))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=3)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("balance", ["zigzag", "none"])
@pytest.mark.parametrize("length", [16, 17, 50])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "dp=2, cp=2"])
def test_convolutions_equal_eager(mesh: str, length: int, balance: str) -> None:
    torch.manual_seed(0)
    program = compiled(Convolved().double(), length, mesh, balance)
    assert program.verify().ok
    assert not [c for c in program.collectives() if c.kind == "all_gather"]
    assert not [d for d in program.diagnostics if d.severity == "warning"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "plan", [{"fuse": True, "accumulate": 2}, {"precision": "bf16"}, {"recompute": "full"}], ids=str
)
def test_convolutions_with_other_plans(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Convolved() if "precision" in plan else Convolved().double()
    assert compiled(model, 17, "dp=2, cp=2", "zigzag", **plan).verify().ok


# ------------------------------------------------------------------------------------------------ what is refused
def _local(balance: str) -> Graph:
    torch.manual_seed(0)
    return compiled(Decoder().double(), 16, "cp=4", balance).body


MUTATIONS: dict[str, tuple[Any, int, Any]] = {
    "another offset sent": (SHIFT_ROWS, 5, 2),
    "to another rank": (SHIFT_ROWS, 7, 2),
    "more rows": (SHIFT_ROWS, 8, 2),
    "the wrong way": (NEIGHBOUR_ROWS, 5, 2),
    "too far": (NEIGHBOUR_ROWS, 5, 5),
    "another offset joined": (SHIFT_JOIN, 6, 2),
    "a hop left out": (SHIFT_JOIN, 8, []),
    "in a circle": (SHIFT_JOIN, 7, True),
    "other rows of the sequence": (SHIFT_JOIN, 3, "8|8"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("balance", ["zigzag", "none"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_move_is_refused(name: str, balance: str) -> None:
    target, position, value = MUTATIONS[name]
    body = _local(balance).copy()
    assert not type_faults(body)
    node = next(n for n in body.calls() if n.target is target)
    assert node.args[position] != value
    node.args = (*node.args[:position], value, *node.args[position + 1 :])
    assert type_faults(body)


@pytest.mark.parametrize("balance", ["zigzag", "none"])
def test_received_rows_of_another_value_are_refused(balance: str) -> None:
    body = _local(balance).copy()
    joined = next(n for n in body.calls() if n.target is SHIFT_JOIN)
    received = joined.args[1]
    assert isinstance(received, (list, tuple))
    if len(received) > 1:
        joined.args = (joined.args[0], list(reversed(received)), *joined.args[2:])
    else:
        joined.args = (joined.args[0], [joined.args[0]], *joined.args[2:])
    assert type_faults(body)


@pytest.mark.parametrize("balance", ["zigzag", "none"])
def test_text_keeps_what_moves(balance: str) -> None:
    torch.manual_seed(0)
    body = compiled(Causal().double(), 17, "cp=2", balance).body
    lines = [line.partition("    #")[0] for line in print_graph(body).splitlines()]
    assert any("shardc.shift_join" in line for line in lines)
    assert [line.partition("    #")[0] for line in print_graph(parse("\n".join(lines))).splitlines()] == lines


def test_explain_tells_why_rows_move() -> None:
    torch.manual_seed(0)
    program = compiled(Decoder().double(), 16, "cp=2", "zigzag")
    (moved_rows,) = [c.value for c in program.collectives() if c.kind == "permute"]
    told = str(program.explain(moved_rows))
    assert "dim 1 of %labels is sharded over cp, and its rows move by 1" in told
    assert 'labels = "-, cp"' in told


def test_without_an_axis_a_move_is_local() -> None:
    batch = {name: torch.zeros(4, 8, dtype=torch.int64) for name in ("ids", "labels")}
    plan = {"inputs": {"ids": "dp, -", "labels": "dp, -"}}
    program = shardc.compile(Convolved().double(), batch, mesh="dp=2", plan=plan)
    assert not [n for n in program.body.calls() if n.target in (SHIFT_JOIN, SHIFT_ROWS)]
    assert all(type_of(n).axes <= {"dp"} for n in program.body.input_nodes().values())
