"""Where a value of one stage comes from is known in another: what compiles into stages loads, and what was changed in
the middle of a ring, a convolution or a grouping that two graphs share is refused.

Each mutant changes one graph: the whole backward of a stage, or its dgrad or wgrad, of which either may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from shardc import Program, ShardcError
from shardc.ir.graph import Graph, Port, info, type_of
from shardc.ir.ops.attention_rows import NEXT_KEYS, REACH_ROWS, SDPA_ROWS_BWD
from shardc.ir.ops.experts import UNGROUP_ROWS
from shardc.ir.ops.halo import HALO, NEIGHBOUR_ROWS
from shardc.ir.ops.host_copies import HOST_COPIES
from shardc.partition.joined_stages import joined_faults
from shardc.partition.staged_check import stage_faults
from shardc.partition.staged_program import StagedProgram
from shardc.partition.step_analysis import StepAnalysis
from shardc.passes.type_check import type_faults
from shardc.schedule.instructions import Backward, Dgrad, Wgrad
from tests.experts import Experts


class Keys(nn.Module):
    """Keys and values that something behind attention reads too: backward sends them in the stage of that."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        seen = (j <= i) & (i - j < self.window) if self.window else None
        o = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
        return self.o(o.transpose(1, 2).flatten(2)).square().mean() + (F.gelu(k) * F.gelu(v)).square().mean()


class Twice(nn.Module):
    """Two layers of attention to the same keys, of which the second is in the second stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o, self.second = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        q = self.second(y).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


class Rows(nn.Module):
    """A convolution whose input is read behind it as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 1)
        self.between = nn.Parameter(torch.randn(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(F.conv1d(h, self.between, padding=1)).square().mean() + F.gelu(h).square().mean()


class Routed(nn.Module):
    """Two layers of experts in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routers = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.experts = nn.ModuleList(Experts(hidden=8, width=8) for _ in range(2))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            scale, ids = router(x).softmax(-1).topk(2)
            x = x + experts(x, ids, scale)
        return self.last(x).square().mean()


RING = {"inputs": {"x": "-, cp, -"}, "context": {"attention": "ring", "balance": "none"}}
ALL = {"offload": {"activations": "all", "least": 1}}
EXPERTS = {"inputs": {"x": "cp"}, "params": {"experts.*.*": "cp"}}
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, str, dict[str, Any]]] = {
    "ring": (Keys, (4, 8, 8), 4, "o", RING),
    "ring of two": (Keys, (4, 8, 8), 2, "o", RING),
    "window": (lambda: Keys(3), (4, 12, 8), 4, "o", RING),
    "on the host": (Keys, (4, 8, 8), 4, "o", {**RING, **ALL}),
    "kernels": (Keys, (4, 8, 8), 2, "o", {**RING, "fuse": True}),
    "recomputed": (Keys, (4, 8, 8), 2, "o", {**RING, "recompute": "full"}),
    "two layers": (Twice, (4, 8, 8), 2, "second", RING),
    "rows": (Rows, (4, 4, 8), 2, "last", {"inputs": {"x": "-, -, cp"}}),
    "rows, kernels": (Rows, (4, 4, 7), 2, "last", {"inputs": {"x": "-, -, cp"}, "fuse": True}),
    "experts": (Routed, (8, 4, 8), 2, "last", EXPERTS),
    "experts on the host": (Routed, (8, 4, 8), 2, "last", {**EXPERTS, **ALL, "experts": {"dispatch": "all_to_all"}}),
}


def made(name: str) -> Program:
    make, shape, ranks, split, plan = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stages = {"pipeline": {"microbatches": 2, "split": [split], "schedule": "1f1b"}}
    return shardc.compile(make(), {"x": x}, mesh=f"pp=2, cp={ranks}", plan={**plan, **stages})


@cache
def compiled(name: str) -> Program:
    """Cut so that a later stage moves what it reads too, and sends it to an earlier one: through rings and rows."""
    with patch.object(StepAnalysis, "_move_to_kept_values", lambda *_: None):
        return made(name)


@cache
def saved(name: str) -> str:
    return compiled(name).to_json()


@pytest.mark.parametrize("name", CASES)
def test_what_was_compiled_is_loaded(name: str) -> None:
    program = compiled(name)
    assert Program.from_json(saved(name)).text() == program.text()
    assert program.verify().ok
    if "offload" in CASES[name][-1]:
        assert any(call.target in HOST_COPIES for graph in program.staged.graphs() for call in graph.calls())


@pytest.mark.parametrize("name", ["ring", "window", "two layers", "rows"])
def test_backward_moves_keys_and_rows_in_the_stage_that_reads_them(name: str) -> None:
    """It keeps what they are moved from, so that nobody has to send them. Another stage may have that as well."""
    sent, program = {item.value for item in compiled(name).transfers()}, made(name)
    moved = {value for value in sent if ".next_keys" in value or ".halo" in value}
    assert moved
    assert {item.value for item in program.transfers()} == sent - moved
    assert program.verify().ok
    assert Program.from_json(program.to_json()).text() == program.text()


@pytest.mark.parametrize("name", ["ring", "window", "two layers", "rows"])
def test_some_graph_does_not_know_alone_where_its_values_come_from(name: str) -> None:
    """Without that, the tests here would not test what they are for."""
    staged = compiled(name).staged
    assert any(type_faults(graph) for graph in staged.graphs())


# ---------------------------------------------------------------------- mutants
Mutation = Callable[[Graph], bool]  # whether it has changed something in the graph


def _calls(graph: Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.calls() if node.target is target]


def _sent_keys(graph: Graph) -> list[fx.Node]:
    """The keys that are moved here, and that steps of another stage read."""
    return [node for node in _calls(graph, NEXT_KEYS) if graph.output_node in node.users]


def _too_far(graph: Graph) -> bool:
    """Keys come two places, where a step reads those of the rank before."""
    for moved in _sent_keys(graph)[:1]:
        moved.args = (*moved.args[:2], 2)
        return True
    return False


def _not_moved(graph: Graph) -> bool:
    """What another stage takes for keys that were moved are own ones."""
    for moved in _sent_keys(graph)[:1]:
        moved.replace_all_uses_with(cast(fx.Node, moved.args[0]))
        graph.fx.erase_node(moved)
        return True
    return False


def _another_step(graph: Graph) -> bool:
    """Two steps of a ring take each other's keys, which another stage has moved."""
    first, second, *_ = _calls(graph, SDPA_ROWS_BWD) + [None, None]
    if first is None or second is None or NEXT_KEYS in {cast(fx.Node, s.args[2]).target for s in (first, second)}:
        return False
    first.args, second.args = (
        (*one.args[:2], *other.args[2:4], *one.args[4:]) for one, other in ((first, second), (second, first))
    )
    return True


def _others_values(graph: Graph) -> bool:
    """Steps take the keys of other values: both are moved as far."""
    steps = _calls(graph, SDPA_ROWS_BWD)
    for step in steps[:1]:
        step.args = (*step.args[:2], step.args[3], step.args[2], *step.args[4:])
    return bool(steps)


def _read_by_others(graph: Graph) -> bool:
    """What is no step reads keys of another rank."""
    moved = [n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if ".next_keys" in p.name]
    for call in graph.calls() if moved else ():
        for arg in call.args if call.target not in (NEXT_KEYS, SDPA_ROWS_BWD) else ():
            if isinstance(arg, fx.Node) and type_of(arg) == type_of(moved[0]):
                call.replace_input_with(arg, moved[0])
                return True
    return False


def _less_reached(graph: Graph) -> bool:
    """Of what a window reaches, the rank after the next sends it."""
    for moved in _sent_keys(graph):
        if cast(fx.Node, moved.args[0]).target is REACH_ROWS:
            moved.args = (*moved.args[:2], 2 if len(moved.args) < 3 else 1)
            return True
    return False


def _other_side(graph: Graph) -> bool:
    """The rows before a rank's own are put behind them, in a graph that does not read them."""
    for halo in _calls(graph, HALO):
        x, before, behind, *rest = halo.args
        halo.args = (x, behind, before, *rest)
        return True
    return False


def _without_halo(graph: Graph) -> bool:
    """Neighbours send other rows than those at a rank's ends."""
    for halo in _calls(graph, HALO):
        rows = cast(fx.Node, halo.args[1])
        if rows.target is NEIGHBOUR_ROWS:
            rows.args = (*rows.args[:3], 1, *rows.args[4:])
            return True
    return False


def _another_grouping(graph: Graph) -> bool:
    """Rows of one layer's experts go back by the order of the other's."""
    calls = _calls(graph, UNGROUP_ROWS)
    orders = list(dict.fromkeys(call.args[1] for call in calls))
    if len(orders) < 2 or any(order.op != "placeholder" for order in orders):  # type: ignore[union-attr]
        return False
    calls[0].args = (calls[0].args[0], orders[1 - orders.index(calls[0].args[1])], *calls[0].args[2:])
    return True


MUTANTS: list[tuple[str, Mutation, str]] = [
    ("ring", _too_far, "has come [2345] places"),
    ("ring", _not_moved, "has come [012] places"),
    ("ring", _another_step, "has come"),
    ("ring", _others_values, "of other keys"),
    ("ring of two", _read_by_others, "is of another rank, and read by"),
    ("window", _less_reached, "has come -1 places"),
    ("on the host", _not_moved, "has come [012] places"),
    ("kernels", _not_moved, "has come 0 places"),
    ("two layers", _too_far, "has come 2 places"),
    ("two layers", _not_moved, "has come 0 places"),
    ("rows", _other_side, "other rows about"),
    ("rows", _without_halo, "other rows about"),
    ("experts", _another_grouping, "reads rows of"),
]


@pytest.mark.parametrize(("name", "mutate", "said"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_mutant_of_one_graph_is_refused(name: str, mutate: Mutation, said: str) -> None:
    changed: list[str] = []
    for stage in range(2):
        for part in ("backward", "dgrad", "wgrad"):
            program = Program.from_json(saved(name))
            graph = program.staged.stages[stage].parts[part]
            if mutate(graph):
                changed.append(graph.name)
                assert not stage_faults(program.staged)
                with pytest.raises(ShardcError, match=said) as caught:
                    program.refuse_false()
                assert caught.value.code == "SC410"
    assert any(graph.startswith("backward") for graph in changed), changed
    assert any(graph.startswith(("dgrad", "wgrad")) for graph in changed), changed


def _renamed(graph: Graph, names: Sequence[str]) -> None:
    """Two values that pass a graph's ports go by each other's names."""
    other = dict(zip(names, reversed(names), strict=True))
    graph.inputs = tuple(replace(port, name=other.get(port.name, port.name)) for port in graph.inputs)
    graph.outputs = tuple(replace(port, name=other.get(port.name, port.name)) for port in graph.outputs)


def test_a_whole_backward_and_halves_of_another_stage_are_of_one_ring() -> None:
    """Keys go by other names between halves than between whole backwards: each is right, and what mixes them is not."""
    program = Program.from_json(saved("ring"))
    staged = program.staged
    sent = [info(moved).name for moved in _sent_keys(staged.stages[1].dgrad)]
    names = [name for name in sent if name.startswith("transpose_1")][:2]
    assert len(names) == 2
    for stage in staged.stages:
        for part in ("dgrad", "wgrad"):
            _renamed(stage.parts[part], names)
    assert not joined_faults(staged)
    first, last = staged.lists.ranks
    halves = [kind(i.stage, i.microbatch) for i in first if isinstance(i, Backward) for kind in (Dgrad, Wgrad)]
    lists = replace(staged.lists, ranks=((*(i for i in first if not isinstance(i, Backward)), *halves), last))
    found = joined_faults(replace(staged, lists=lists))
    assert any("has come" in fault.message for fault in found)


# ---------------------------------------------------------------------- which graph makes what another reads
def _with(staged: StagedProgram, stage: int, part: str, graph: Graph) -> StagedProgram:
    stages = list(staged.stages)
    stages[stage] = replace(stages[stage], parts={**stages[stage].parts, part: graph})
    return replace(staged, stages=tuple(stages))


def test_a_value_that_nothing_makes_is_refused() -> None:
    staged = compiled("ring").staged
    pipeline = staged.lists.pipeline
    first = pipeline.stages[1].forward
    changed = replace(pipeline.stages[1], forward=replace(first, reads=(*first.reads, "nobody's")))
    lists = replace(staged.lists, pipeline=replace(pipeline, stages=(pipeline.stages[0], changed)))
    graph = staged.stages[1].forward.copy()
    graph.inputs = tuple(
        Port("value", "nobody's") if port.name == "transpose_1" else port for port in staged.stages[1].forward.inputs
    )
    found = joined_faults(replace(_with(staged, 1, "forward", graph), lists=lists))
    assert [fault.message for fault in found] == ["it reads value 'nobody's', which nothing makes"]


def test_a_value_that_two_graphs_make_is_refused() -> None:
    """Each stage would take its own, and one of them may be another value."""
    staged = compiled("ring").staged
    pipeline = staged.lists.pipeline
    last = pipeline.stages[1].forward
    changed = replace(pipeline.stages[1], forward=replace(last, makes=(*last.makes, "transpose_1")))
    lists = replace(staged.lists, pipeline=replace(pipeline, stages=(pipeline.stages[0], changed)))
    found = joined_faults(replace(staged, lists=lists))
    assert "it makes transpose_1, which @forward0 makes" in {fault.message for fault in found}


def test_graphs_that_wait_for_each_other_are_refused() -> None:
    staged = compiled("ring").staged
    pipeline = staged.lists.pipeline
    first, last = (stage.forward for stage in pipeline.stages)
    made = next(name for name in last.makes if name in staged.bundles)
    changed = replace(pipeline.stages[0], forward=replace(first, reads=(*first.reads, made)))
    lists = replace(staged.lists, pipeline=replace(pipeline, stages=(changed, pipeline.stages[1])))
    graph = staged.stages[0].forward.copy()
    graph.inputs = (replace(graph.inputs[0], role="value", name=staged.bundles[made][0]), *graph.inputs[1:])
    found = joined_faults(replace(_with(staged, 0, "forward", graph), lists=lists))
    assert any("wait for each other's values" in fault.message for fault in found)
