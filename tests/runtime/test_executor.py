"""A rank's list as prepared code, on a pipeline of one rank and two stages: no process is needed to run it."""

import weakref
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.partition.cut import cut
from shardc.partition.program_counter import STRIDE, ListCounterNames
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.measured_timeline import CpuClock
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.execute.peer_groups import PeerGroups
from shardc.runtime.oracle.simulate_stages import simulate_stages
from shardc.schedule.instructions import COMPUTE, Backward, instruction_text
from tests.partition.whole import step

COUNT = 3


class Model(nn.Module):
    """A weight that two stages share, and batch norms, whose buffers go from microbatch to microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.first = nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
        self.second, self.late = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.second(self.first(self.early(x)).tanh()))


Ready = tuple[shardc.Program, StagedProgram]


@pytest.fixture(scope="module")
def ready() -> Ready:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = step(
        model,
        (torch.randn(COUNT * 4, 6),),
        COUNT,
        "",
        lambda out, _: out.square().mean(),
        optimizer,
        clip_grad_norm=0.1,
    )
    return program, scheduled(cut(program.body, split=["second"]), "bfs", 2)


def executor_of(program: StagedProgram) -> Executor:
    links = PeerGroups((0,), lambda _: None, torch.device("cpu"), timedelta(seconds=1))
    context = rank_context(program.body.mesh, 0, None)  # type: ignore[arg-type]
    return Executor(program, 0, context, 0, links)


def given(program: shardc.Program) -> tuple[dict[str, torch.Tensor], list[Any]]:
    inputs = program.inputs()
    return {name: x.clone() for name, x in inputs.items()}, feeds(program.body, inputs)


def test_it_computes_what_the_simulation_does(ready: Ready) -> None:
    program, lists = ready
    executor = executor_of(lists)
    held, fed = given(program)
    homes = {name: x.data_ptr() for name, x in held.items()}
    for _ in range(2):
        expected = simulate_stages(lists, held, fed=fed)
        found = executor.run(held, fed)
        assert found.keys() == expected.keys()
        for port, value in expected.items():
            torch.testing.assert_close(found[port], value, rtol=1e-6, atol=1e-7)
        for port, value in found.items():
            if port.role in ("param", "state"):
                assert value.data_ptr() == homes[port.name], "written over what is held"
            if port.role == "buffer":
                held[port.name] = value


def test_gradients_are_added_in_place(
    ready: tuple[shardc.Program, StagedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, lists = ready
    homes: dict[str, list[int]] = {}
    add, add_small = Executor.add, Executor.add_small

    def noted(self: Executor, name: str, term: torch.Tensor) -> None:
        add(self, name, term)
        homes.setdefault(name, []).append(self._sums[name].data_ptr())

    def several_noted(self: Executor, sums: list[tuple[str, bool]], *terms: torch.Tensor) -> None:
        add_small(self, sums, *terms)
        for name, _ in sums:
            homes.setdefault(name, []).append(self._sums[name].data_ptr())

    monkeypatch.setattr(Executor, "add", noted)
    monkeypatch.setattr(Executor, "add_small", several_noted)
    executor_of(lists).run(*given(program))
    assert all(len(found) in (COUNT, 2 * COUNT) for found in homes.values())
    assert any(len(found) == 2 * COUNT for found in homes.values()), "the tied weight's, of two stages"
    assert all(len(set(found)) == 1 for found in homes.values())


def test_what_is_read_last_goes_while_the_work_runs(ready: Ready) -> None:
    """Once a backward has read a tensor for the last time nothing holds it, though its Free comes after the work."""
    program, lists = ready
    executor = executor_of(lists)
    alive: list[list[bool]] = []
    for stage in range(2):
        part = executor._parts[id(lists.stages[stage].backward)]
        watched: list[weakref.ref[torch.Tensor]] = []
        last = part._code.code[-1]

        def ending(*args: Any, watched: Any = watched, call: Any = last[1], **kwargs: Any) -> Any:
            alive.append([ref() is not None for ref in watched])
            return call(*args, **kwargs)

        made, reads = part._code.environment, part._reads

        def filled(now: Any, microbatch: int, watched: Any = watched, made: Any = made, reads: Any = reads) -> Any:
            watched[:] = [weakref.ref(now.value((name, microbatch))[k]) for _, name, k in reads]
            return made(now, microbatch)

        part._code.environment = filled  # type: ignore[method-assign]
        part._code.code[-1] = (last[0], ending, *last[2:])  # type: ignore[assignment]
    executor.run(*given(program))
    assert len(alive) == 2 * COUNT
    assert all(refs.count(True) <= 1 for refs in alive), "what the last call itself reads may be there"
    assert all(len(refs) > 2 for refs in alive)


def test_places_say_where_a_rank_is(ready: Ready) -> None:
    _, lists = ready
    places, listed = ListCounterNames(lists), lists.lists.ranks[0]
    for at, instruction in enumerate(listed):
        assert places.name(0, at * STRIDE) == instruction_text(instruction)
    at = next(k for k, i in enumerate(listed) if isinstance(i, Backward))
    assert places.name(0, at * STRIDE + 1).startswith("%d.")
    assert places.name(0, at * STRIDE + 1).endswith(f" of {instruction_text(listed[at])}")
    assert not places.waits(0, at * STRIDE)
    assert places.waits(0, len(listed) * STRIDE)


def test_a_call_that_fails_is_named(ready: Ready) -> None:
    program, lists = ready
    executor = executor_of(lists)
    part = executor._parts[id(lists.stages[1].forward)]
    place, _, *rest = part._code.code[2]

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    part._code.code[2] = (place, fails, *rest)  # type: ignore[assignment]
    with pytest.raises(MemoryError) as raised:
        executor.run(*given(program))
    (note,) = raised.value.__notes__
    assert note.endswith(" of Forward 1 #0, on rank 0")
    assert "(" in note, "the user's line"


def test_every_instruction_is_timed(
    ready: tuple[shardc.Program, StagedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, lists = ready
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    clock = CpuClock()
    executor_of(lists).run(*given(program), clock=clock)
    spans = clock.spans()
    assert sorted(spans) == [at * STRIDE for at in range(len(lists.lists.ranks[0]))]
    ordered = [spans[place] for place in sorted(spans)]
    assert all(begun <= ended for begun, ended in ordered)
    works = [clock for clock, i in zip(ordered, lists.lists.ranks[0], strict=True) if isinstance(i, COMPUTE)]
    assert all(one[1] <= other[0] for one, other in pairwise(works))
