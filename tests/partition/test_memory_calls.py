"""The memory report of a pipeline against what a rank's own code holds during each instruction of its list.

A rank is alone in its process, over torch's fake process groups: it begins collectives and transfers as in a job, and
allocates what it allocates there. Its sends are waited for as late as a rank may.
"""

from __future__ import annotations

import itertools
import operator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.ir.graph import type_of
from shardc.ir.group_axes import axes_used
from shardc.partition.cut import cut
from shardc.partition.memory import memory
from shardc.partition.stage_offload import offload_stages
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.passes.communication.bucket import bucket
from shardc.passes.fusion.fuse import fuse
from shardc.passes.memory.offload import Offload
from shardc.runtime.execute import prepared_code
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.microbatches import Feed, feeds
from shardc.runtime.execute.peer_groups import PeerGroups, ranks_of_position
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from shardc.runtime.oracle.simulate import sharded
from shardc.schedule.lists import split_batches
from tests.cost.rank_meter import Allocated, Key, fake_job, metered
from tests.models.zoo import make
from tests.partition.test_arena import codes
from tests.partition.whole import SIZES, step

LABELS = dict.fromkeys(("input_ids", "labels"), "dp, -")
ZERO_3: dict[str, Any] = {"storage": {"zero": 3, "axes": ["dp"]}, "inputs": LABELS}
LATER = ("fuse", "offload")  # which passes over stages do
CASES: dict[str, tuple[str, int, int, str, str, dict[str, Any]]] = {
    "zero-3": ("gpt2", 4, 2, "bfs", "dp=2", ZERO_3),
    "alone": ("gpt2", 4, 3, "1f1b", "", {}),
    "all sends": ("gpt2", 12, 3, "gpipe", "", {}),
    "recompute": ("llama", 3, 2, "zb-v", "", {"recompute": "full"}),
    "tp": ("gpt2", 4, 2, "zb-v", "tp=2", {"params": {"**.c_fc.weight": "-, tp", "**.mlp.c_proj.weight": "tp, -"}}),
    "fuse bucket": ("gpt2", 4, 2, "1f1b", "dp=2", {**ZERO_3, "fuse": True}),
    "host": ("gpt2", 4, 2, "1f1b", "dp=2", {**ZERO_3, "fuse": True, "offload": "all"}),
    "host, split": ("llama", 3, 2, "zb-v", "", {"recompute": "full", "offload": "all"}),
    "some on the host": ("gpt2", 4, 2, "interleaved", "", {"offload": 60_000}),
}


def staged(case: str) -> tuple[StagedProgram, dict[str, Tensor], list[Feed]]:
    """A pipeline, what its ranks hold, and what each microbatch gets: of their shards, the first."""
    name, microbatches, stages, schedule, mesh, extra = CASES[case]
    torch.manual_seed(0)
    model, batch, _ = make(name, **SIZES[name])
    mine = torch.optim.AdamW(model.parameters())
    plan = {"clip_grad_norm": 1.0, **{key: value for key, value in extra.items() if key not in LATER}}
    compiled = step(model, batch, microbatches, mesh, None, mine, **plan)
    virtual = 2 if schedule in ("bfs", "interleaved", "zb-v") else 1
    program, inputs = scheduled(cut(compiled.body, stages * virtual), schedule, virtual), compiled.inputs()
    if "fuse" in extra:
        program = program.transformed(partial(bucket, size=20_000)).transformed(fuse)
    program = offload_stages(program, Offload(extra.get("offload", 0), 1))
    types = {name: type_of(node) for name, node in program.body.input_nodes().items()}

    def local(name: str, value: Tensor) -> Tensor:
        return sharded(value.detach(), types[name], program.body.mesh)[0].clone()

    kept = {"param", "buffer", "state", "hyper"}
    held = {p.name: local(p.name, inputs[p.name]) for p in program.body.inputs if p.role in kept}
    return program, held, [{n: local(n, x) for n, x in feed.items()} for feed in feeds(program.body, inputs)]


def held_by_a_rank(program: StagedProgram, c: int, held: dict[str, Tensor], fed: list[Feed]) -> list[int]:
    """Bytes beside what is stored: the most during each instruction, or each batch of transfers."""
    listed, mesh = program.lists.ranks[c], program.body.mesh
    steps = split_batches(listed)
    most, now = [0] * len(steps), -1
    meter = Allocated()
    meter.given = {
        x.untyped_storage().data_ptr() for x in (*held.values(), *(x for feed in fed for x in feed.values()))
    }

    def note(_: Key, size: int) -> None:
        most[now] = max(most[now], size)

    rank, size = program.rank_of(c, 0), mesh.world_size * len(program.lists.ranks)
    graphs = [graph for stage in program.stages for graph in (stage.forward, stage.dgrad, stage.wgrad)]
    graphs += [graph for epilogue in program.epilogues for graph in (epilogue.norm, epilogue.update)]
    graphs += [program.body]
    axes = {frozenset(one): one for graph in graphs for one in axes_used(graph)}
    with fake_job(rank, size), meter:
        copies = [[program.rank_of(k, i) for i in range(mesh.world_size)] for k in range(len(program.lists.ranks))]
        peers = [[program.rank_of(k, 0) for k in group] for group in groups(program)]
        comm = ProcessGroupCommunicator(mesh, 0, axes.values(), timedelta(seconds=9), copies, c, peers)
        links = PeerGroups(ranks_of_position(program, 0), comm.group, torch.device("cpu"), timedelta(seconds=9))
        executor = Executor(program, c, rank_context(mesh, 0, comm), rank, links)
        for code in codes(executor):
            code.code = metered(code.code, meter, note)
        acts = executor._acts
        assert len(acts) == len(steps)

        def during(at: int, act: Any, state: Any) -> None:
            nonlocal now
            now = at
            act(state)
            note(("run", at), meter.bytes)

        executor._acts = [partial(during, at, act) for at, act in enumerate(acts)]
        executor.run(held, fed)
    return most


def groups(program: StagedProgram) -> list[tuple[int, ...]]:
    everyone = tuple(range(len(program.lists.ranks)))
    found = {i.group for listed in program.lists.ranks for i in listed if hasattr(i, "group")}
    return [everyone, *(tuple(group) for group in found)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_during_each_instruction_what_the_report_says(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And less, where results on CPUs lie where dead operands lay."""
    program, held, fed = staged(case)
    report = memory(program)
    for one in report.coordinates:
        said = list(one.report.timeline)
        batches = split_batches(program.lists.ranks[one.number])
        ends = list(itertools.accumulate(map(len, batches)))
        bounds = [max(said[end - len(batch) : end]) for end, batch in zip(ends, batches, strict=True)]
        assert all(map(operator.le, held_by_a_rank(program, one.number, held, fed), bounds))
    monkeypatch.setattr(prepared_code, "over_operands", lambda *_: {})
    for one in report.coordinates:
        listed, said = program.lists.ranks[one.number], list(one.report.timeline)
        real = held_by_a_rank(program, one.number, held, fed)
        at, differ = 0, list[str]()
        for size, batch in zip(real, split_batches(listed), strict=True):
            most = max(said[at : at + len(batch)])
            if most != size:
                differ.append(f"{at} {batch[0]}: {most - size:+}")
            at += len(batch)
        assert not differ, f"coordinate {one.number}: {len(differ)} of {len(real)}: {differ}"
        assert one.report.peak - one.report.stored == max(real)
