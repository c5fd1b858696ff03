"""The graphs of a rank's list share one arena, several microbatches under way: the numbers are those without it."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from shardc.ir.arena import SPARE, Plan, planned
from shardc.ir.graph import type_of
from shardc.partition import memory_walk
from shardc.partition.cut import cut
from shardc.partition.memory import memory
from shardc.partition.stage_arena import arena_plans
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.passes.communication.bucket import bucket
from shardc.passes.fusion.fuse import fuse
from shardc.runtime.execute import executor
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.layout import shard
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.execute.peer_groups import PeerGroups
from shardc.runtime.execute.stage_code import GraphCode
from tests.models.zoo import make
from tests.partition.whole import step
from tests.runtime.poison import Late, poisoned

COUNT = 3
OVER = {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}, "clip_grad_norm": 0.1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("", {"clip_grad_norm": 0.1}),
    "zero-3 bucket": ("dp=2", {**OVER, "storage": {"zero": 3, "axes": ["dp"]}}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def ready(request: pytest.FixtureRequest) -> tuple[shardc.Program, StagedProgram]:
    """Two stages of one rank."""
    mesh, plan = VARIANTS[request.param]
    torch.manual_seed(0)
    model, batch, loss = make("gpt2", batch=2 * COUNT, seq=8, layers=2, vocab=32, width=32)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = step(model, batch, COUNT, mesh, loss, mine, **plan)
    staged = scheduled(cut(program.body, 2), "bfs", 2)
    packed = staged.transformed(partial(bucket, size=20_000)) if mesh else staged
    return program, packed.transformed(fuse)


def executor_of(program: StagedProgram) -> Executor:
    mesh = program.body.mesh
    links = PeerGroups((0,), lambda _: None, torch.device("cpu"), timedelta(seconds=1))
    return Executor(program, 0, rank_context(mesh, 0, Late(mesh)), 0, links)  # type: ignore[arg-type]


def steps(found: Executor, program: shardc.Program) -> list[Tensor]:
    types = {name: type_of(node) for name, node in program.body.input_nodes().items()}
    whole = program.inputs()
    fed = [{n: shard(x, types[n], program.mesh, 0) for n, x in one.items()} for one in feeds(program.body, whole)]
    held = {n: shard(x, types[n], program.mesh, 0) for n, x in whole.items() if n not in fed[0]}
    made: list[Tensor] = []
    for _ in range(2):
        for port, value in found.run(held, fed).items():
            made.append(value.clone())
            assert not found.arena.holds(value)
            if port.role in ("param", "state", "buffer"):
                held[port.name] = value
    return made


def codes(found: Executor) -> list[GraphCode]:
    parts = [part._code for part in found._parts.values()]
    ends = [found.epilogue._norm, found.epilogue._update]
    return [*parts, *found._gathers.values(), *(one for some in found._reduces.values() for one in some), *ends]


@pytest.mark.sampled(2)
def test_nothing_that_lives_is_written_over(
    ready: tuple[shardc.Program, StagedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is dead is filled with NaNs before each call of each graph, of every microbatch."""
    program, lists = ready
    monkeypatch.setattr(executor, "arena_plans", lambda *where: dict.fromkeys(arena_plans(*where), Plan(())))
    expected = steps(executor_of(lists), program)
    monkeypatch.setattr(
        executor,
        "arena_plans",
        lambda *where: {graph: planned(graph, 1 << 40) for graph in arena_plans(*where)},
    )
    found = executor_of(lists)
    assert sum(len(plan.slots) for plan in found.arena.plans.values()) > 40
    assert found.arena.buffer.numel() == max(plan.bytes for plan in found.arena.plans.values())
    for code in codes(found):
        code.code = poisoned(code.code, found.arena.plans[code.graph], found.arena)
    assert all(torch.equal(x, y) for x, y in zip(steps(found, program), expected, strict=True))


@pytest.mark.sampled(2)
def test_the_report_counts_it(ready: tuple[shardc.Program, StagedProgram], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all graphs of a rank, and not in what a simulation holds."""
    _, lists = ready
    size = max(plan.bytes for plan in arena_plans(lists, 0).values())
    found, simulated = memory(lists), memory(lists, early=False)
    assert found.row("arena").most == size > 0
    assert simulated.row("arena").most == 0
    monkeypatch.setattr(memory_walk, "arena_plans", lambda *_: {})
    plain = memory(lists)
    assert SPARE * found.peak <= (SPARE + 1) * plain.peak
    assert found.peak != plain.peak
