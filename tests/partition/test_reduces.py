"""A stage's gradients are reduced over the other axes when its last microbatch is in, not at the end of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardc.ir.collectives import collectives
from shardc.partition.cut import cut
from shardc.partition.memory import memory
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.runtime.oracle.simulate import run_reference
from shardc.schedule.instructions import COMPUTE, ReduceGrads
from tests.partition.test_gathers import sharded
from tests.partition.whole import agree, staged


def reducing(zero: int, schedule: str = "bfs", virtual: int = 2, **plan: Any) -> tuple[StagedProgram, Any]:
    program = sharded(3, storage={"zero": zero, "axes": ["dp"]}, **plan)
    return scheduled(cut(program.body, 2 * virtual), schedule, virtual), program


@pytest.mark.sampled(8)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [{}, {"clip_grad_norm": None}], ids=["clipped", "not clipped"])
def test_right_under_any_storage(zero: int, clip: dict[str, Any]) -> None:
    found, program = reducing(zero, **clip)
    assert all(stage.reduce is not None for stage in found.stages)
    inputs = program.inputs()
    agree(found, inputs, run_reference(program.reference, inputs, dtype=torch.float64), seed=zero)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("zero", "kind"), [(0, "all_reduce"), (2, "reduce_scatter"), (3, "reduce_scatter")])
def test_each_gradient_is_reduced_once(zero: int, kind: str) -> None:
    """By its stage; the end of the step reduces the tied weight's alone, on every rank that has it."""
    found, _ = reducing(zero)
    instructions = [(c, i) for c, listed in enumerate(found.lists.ranks) for i in listed if isinstance(i, ReduceGrads)]
    early = [graph for c, i in instructions for graph in graphs_of(found, c, i)]
    assert len(found.shared) == 1
    parameters = sum(port.role == "param" for port in found.body.inputs)
    assert [one.kind for graph in early for one in collectives(graph)] == [kind] * (parameters - 1)
    late = [one for finish in found.epilogues for g in (finish.norm, finish.update) for one in collectives(g)]
    holders = sum("squash.weight" in found.held(c) for c in range(2))
    assert sum(one.kind == "reduce_scatter" for one in late) == (0 if zero == 0 else holders)


def test_breadth_first_holds_whole_gradients_of_one_stage() -> None:
    """Of ZeRO-2's gradients a rank keeps shards, but for those of the stage that it is at work on."""
    most: dict[str, int] = {}
    for schedule in ("bfs", "interleaved"):
        found, _ = reducing(2, schedule)
        report = memory(found, early=False)  # of a job's rank, what is in flight at the end is more than either
        most[schedule] = max(report.row("gradients", rank).most for rank in (0, 2))
    assert most["bfs"] < most["interleaved"]


def test_the_list_says_when() -> None:
    """Right after the last work that adds to a stage's sums, however late the step's end is."""
    program = scheduled(staged("gpt2", "zero3", 3, 4), "bfs", 2)
    for listed in program.lists.ranks:
        for at, i in enumerate(listed):
            if isinstance(i, ReduceGrads) and i.value.startswith("grads"):
                stage = int(i.value.removeprefix("grads"))
                assert not any(isinstance(w, COMPUTE) and w.stage == stage for w in listed[at:])
        first = next(at for at, i in enumerate(listed) if isinstance(i, ReduceGrads))
        assert any(isinstance(i, COMPUTE) for i in listed[first:]), "other stages still run"
