"""Parts of a pipeline's stages add the terms of small sums by one call: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.account import with_additions
from shardc.ir.call_slots import slotted_calls
from shardc.ir.ops.accumulate import ACCUMULATE_ROWS
from shardc.ir.overlap_schedule import schedule_of
from shardc.ir.small_sums import SMALL
from shardc.partition.cut import cut
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.runtime.execute.executor import Executor
from shardc.runtime.oracle.simulate_stages import simulate_stages
from tests.api.test_weight_casts import piped
from tests.partition.whole import step
from tests.runtime.test_executor import executor_of, given
from tests.sums import sums_apart

SCHEDULES = ["1f1b", "zb-h1", "interleaved"]


def additions(program: StagedProgram) -> dict[str, list[str]]:
    """The calls that add terms, by the graph of each part of one rank's stages."""
    executor = executor_of(program)
    lines = {part._code.graph.name: part._code.code for part in executor._parts.values()}
    functions = {name: [getattr(line[1], "func", None) for line in code] for name, code in lines.items()}
    return {
        name: [str(getattr(found, "__name__", "")) for found in code if getattr(found, "__self__", None) is executor]
        for name, code in functions.items()
    }


def one_rank(model: nn.Module, batch: Any, split: list[str], schedule: str, **plan: Any) -> tuple[Any, StagedProgram]:
    """A pipeline of which one rank has all stages."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = step(model, batch, 4, "", lambda out, _: out.square().mean(), optimizer, **plan)
    return program, scheduled(cut(program.body, split=split), schedule, len(split) + 1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("schedule", ["bfs", "zb-v"])
def test_parts_add_by_one_call(schedule: str) -> None:
    """The products of weights add their own; biases and norms of two layers are added together."""
    torch.manual_seed(0)
    _, lists = one_rank(Stack(), (torch.randn(8, 8),), ["layers.2"], schedule)
    with sums_apart():
        before = additions(lists)
    found = additions(lists)
    assert max(calls.count("add") for calls in before.values()) >= 2 + 2
    assert all(calls.count("add_small") <= 1 for calls in found.values())
    small_before = sum(calls.count("add") for calls in before.values())
    assert sum(map(len, found.values())) < small_before
    for name, calls in found.items():
        assert len(calls) - calls.count("add_small") <= 2, name  # products of two layers, or the loss


@pytest.mark.parametrize("schedule", ["bfs", "zb-v"])
@pytest.mark.parametrize("more", [{}, {"precision": "bf16"}, {"clip_grad_norm": 0.1}], ids=str)
def test_a_rank_adds_what_is_simulated_and_the_same_bits(schedule: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    program, lists = one_rank(Stack(), (torch.randn(8, 8),), ["layers.2"], schedule, **more)
    held, fed = given(program)
    with sums_apart():
        before = executor_of(lists).run({name: x.clone() for name, x in held.items()}, fed)
    expected = simulate_stages(lists, held, fed=fed)
    executor = executor_of(lists)
    executor.run({name: x.clone() for name, x in held.items()}, fed)  # nothing of a step is left in the next
    found = executor.run({name: x.clone() for name, x in held.items()}, fed)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[port], value) for port, value in before.items())
    for port, value in expected.items():
        torch.testing.assert_close(found[port], value, rtol=1e-2 if "precision" in more else 1e-5, atol=1e-5)


def test_the_first_terms_become_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the loss is copied, which is alone in its part; products make sums of their own."""
    copied: set[str] = set()
    add = Executor.add

    def noted(self: Executor, name: str, *term: Any, **by: Any) -> None:
        if not by:
            copied.add(name)
        add(self, name, *term, **by)

    monkeypatch.setattr(Executor, "add", noted)
    torch.manual_seed(0)
    program, lists = one_rank(Stack(), (torch.randn(8, 8),), ["layers.2"], "bfs")
    executor_of(lists).run(*given(program))
    assert len(copied) == 1


class ReadAgain(nn.Module):
    """Gradients that others are made of, of small and of large parameters; and one that two stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.u, self.v = nn.Parameter(torch.randn(600, 600) / 99), nn.Parameter(torch.randn(600, 600) / 99)
        assert self.u.nbytes > SMALL

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + (self.a + 2 * self.b) + (self.u + 3 * self.v).exp().mean()
        return self.second(y.tanh()) + self.a


def test_a_term_that_is_read_once_more() -> None:
    torch.manual_seed(0)
    program, lists = one_rank(ReadAgain(), (torch.randn(8, 6),), ["second"], "bfs")
    held, fed = given(program)
    expected = simulate_stages(lists, held, fed=fed)
    found = executor_of(lists).run({name: x.clone() for name, x in held.items()}, fed)
    for port, value in expected.items():
        torch.testing.assert_close(found[port], value, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("more", [{"precision": "bf16"}, {"precision": None}, {"fuse": True}], ids=str)
def test_pipelines_and_their_prediction(schedule: str, more: dict[str, Any]) -> None:
    with sums_apart():
        before = piped(schedule, **more)
        took = before.predict("h200-nvlink")
    program = piped(schedule, **more)
    assert program.predict("h200-nvlink").step_ms < took.step_ms
    report = program.verify()
    assert report, str(report)
    assert program.memory().peak <= before.memory().peak + 4 * 13 * 32 * 4


class Words(nn.Module):
    """A table of few bytes, whose rows are added to their sum, beside biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.table(ids))))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_rows_add_their_own(schedule: str) -> None:
    """They wait for no other term, and no other waits for them."""
    torch.manual_seed(0)
    model, plan = Words(), {"pipeline": {"axis": "pp", "schedule": schedule, "microbatches": 4}}
    adam, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randint(16, (8, 4))
    program = shardc.compile(
        model, (ids,), mesh="pp=2", plan=plan, optimizer=adam, loss=lambda out, _: out.square().mean()
    )
    graphs = [graph for graph in program.staged.graphs() if graph.calls_of(ACCUMULATE_ROWS)]
    assert graphs
    for graph in graphs:
        (rows,) = graph.calls_of(ACCUMULATE_ROWS)
        listed = slotted_calls(graph)
        actions, added = with_additions(graph, listed, schedule_of(listed))
        sums = [v for port, v in zip(graph.outputs, graph.output_values, strict=True) if port.role == "sum"]
        assert actions[added[rows]].kind == "run"
        assert added.keys() == {*sums}
        assert rows not in {value for action in actions for value in action.terms}
    assert program.verify().ok
