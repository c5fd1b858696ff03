"""What stages of a pipeline hold for their backward lies on the host meanwhile: no bit changes, and each rank holds so
much less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cli.summary import offloaded
from shardc.ir.collectives import human_bytes
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.ops.host_copies import BEGIN_FETCH, BEGIN_OFFLOAD, END_FETCH, HOST_COPIES, on_host
from shardc.ir.storages import storages
from shardc.partition.stage_offload import held_values, under_way, within
from shardc.partition.staged_check import stage_faults
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import Backward, Dgrad, Forward
from shardc.schedule.schedules.judge import peak_activations
from tests.passes.test_late_gradients import BATCH

ALL = {"activations": "all", "least": 1}
PIPELINE: dict[str, Any] = {"microbatches": 4}
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"mesh": "pp=2, dp=2", **BATCH, "pipeline": PIPELINE},
    "gpipe, tp": {"mesh": "pp=2, tp=2", "pipeline": {**PIPELINE, "schedule": "gpipe"}},
    "interleaved": {"mesh": "pp=2", "pipeline": {**PIPELINE, "schedule": "interleaved", "virtual": 2}},
    "zb-h1": {"mesh": "pp=2", "pipeline": {**PIPELINE, "schedule": "zb-h1"}},
    "zb-v, fuse": {"mesh": "pp=2", "fuse": True, "pipeline": {**PIPELINE, "schedule": "zb-v"}},
    "auto": {"mesh": "pp=2", "pipeline": {**PIPELINE, "schedule": "auto"}},
    "fuse, bucket, zero-3": {
        "mesh": "pp=2, dp=2",
        **BATCH,
        "fuse": True,
        "bucket": True,
        "storage": {"zero": 3, "axes": "dp"},
        "pipeline": PIPELINE,
        "clip_grad_norm": 0.1,
    },
    "selective": {"mesh": "pp=2", "recompute": "selective", "pipeline": {**PIPELINE, "schedule": "zb-h1"}},
    "full": {"mesh": "pp=2", "recompute": "full", "pipeline": PIPELINE},
    "master": {
        "mesh": "pp=2",
        "precision": {"compute": "bf16", "master": "fp32"},
        "fuse": True,
        "pipeline": {**PIPELINE, "schedule": "zb-h1"},
    },
    "three microbatches": {"mesh": "pp=3", "pipeline": {"microbatches": 3}},
}


class Block(nn.Module):
    """Backward reads views: thirds of one product by one half of backward, and a tanh as it is by one half, flattened
    by the other."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        a, b = self.up(nn.functional.dropout(x, 0.1, self.training)).chunk(2, -1)
        return x + self.down(torch.tanh((torch.sigmoid(a) * b).unflatten(-1, (2, -1))).flatten(-2))


class Net(nn.Module):
    """Its embedding is its head's weight, which the first and the last stage share."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(12, 8), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(rows: int = 12) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randint(12, (rows, 5), generator=draw) for name in ("tokens", "targets")}


def compiled(plan: dict[str, Any]) -> shardc.Program:
    torch.manual_seed(0)
    model = Net().float() if "precision" in plan else Net().double()
    rows = 4 * plan["pipeline"]["microbatches"]
    return shardc.compile(model, batch_of(rows), plan=plan, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


@cache
def pair(case: str) -> tuple[shardc.Program, shardc.Program]:
    """A program, and the same one with all that may lie on the host there."""
    return compiled(PLANS[case]), compiled({**PLANS[case], "offload": ALL})


def results(program: shardc.Program, steps: int = 2) -> dict[str, Tensor]:
    """Parameters, state and outputs after some steps of all ranks, simulated."""
    found: dict[str, Tensor] = {}
    with program.launch() as trainer:
        for step in range(steps):
            found[f"loss {step}"] = trainer.step(batch_of(4 * program.body.microbatches)).loss
        return found | trainer.state_dict(("param", "state"))


def copies(program: shardc.Program | StagedProgram) -> list[tuple[int, Graph, str, int]]:
    """Of each value that is moved: its stage, the forward that gives it, its name and its bytes."""
    staged = program if isinstance(program, StagedProgram) else program.staged
    return [
        (number, stage.forward, info(x).name, type_of(x).local_bytes(staged.body.mesh))
        for number, stage in enumerate(staged.stages)
        for x in (operands(call)[0] for call in stage.forward.calls_of(BEGIN_OFFLOAD))
    ]


def bytes_by_stage(program: shardc.Program) -> dict[int, int]:
    sizes = dict.fromkeys(range(len(program.staged.stages)), 0)
    for stage, _, _, size in copies(program):
        sizes[stage] += size
    return sizes


def most_on_host(program: shardc.Program) -> list[int]:
    """The most that each coordinate may have there: what its list has under way, of what its stages move."""
    sizes = bytes_by_stage(program)
    most: list[int] = []
    for c in program.staged.coordinate_range:
        moments = under_way([program.staged.lists.work(c)])
        most.append(max(sum(count * sizes[stage] for stage, count in moment.items()) for moment in moments))
    return most


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", PLANS)
def test_no_bit_changes_and_each_rank_holds_less(case: str) -> None:
    before, program = pair(case)
    assert copies(program)
    assert not copies(before)
    was, now = results(before), results(program)
    assert len(was) > 100
    assert was.keys() == now.keys()
    for name, value in was.items():
        assert torch.equal(value, now[name]), name
    assert program.verify().ok
    for row, had, bound in zip(
        program.memory().coordinates, before.memory().coordinates, most_on_host(program), strict=True
    ):
        assert row.report.host.most <= bound
        assert (row.report.host.most > 0) == (bound > 0)
        left, held = (each.report.row("activations", each.ranks[0]).most for each in (row, had))
        assert left < held or not bound
        assert row.report.peak <= had.report.peak
    assert program.memory().peak < before.memory().peak


@pytest.mark.parametrize("case", ["1f1b", "gpipe, tp", "interleaved"])
def test_between_two_pieces_of_work_a_rank_holds_less_by_what_lies_on_the_host(case: str) -> None:
    before, program = pair(case)
    sizes = bytes_by_stage(program)
    rows, was = program.memory().coordinates, before.memory().coordinates
    assert [row.report.host.most for row in rows] == most_on_host(program)
    for row, had in zip(rows, was, strict=True):
        listed = program.staged.lists.ranks[row.number]
        assert listed == before.staged.lists.ranks[row.number]
        there = seen = 0
        for i, now, then in zip(listed, row.report.timeline, had.report.timeline, strict=True):
            if isinstance(i, Forward | Backward):
                there += sizes[i.stage] if isinstance(i, Forward) else -sizes[i.stage]
            else:
                assert then - now == there, str(i)
                seen += there > 0
        assert seen > 0


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "zb-h1"])
def test_no_more_than_the_budget_lies_there(case: str) -> None:
    whole = pair(case)[1]
    most = whole.memory().host.most
    last = 0
    for budget in (most // 4, most // 2):
        some = compiled({**PLANS[case], "offload": {"activations": budget, "least": 1}})
        assert last < some.memory().host.most <= budget
        assert {name for _, _, name, _ in copies(some)} < {name for _, _, name, _ in copies(whole)}
        last = some.memory().host.most


def test_of_a_ranks_stages_the_first_goes_first_and_of_a_stage_what_is_read_last() -> None:
    staged = pair("interleaved")[0].staged
    held = held_values(staged, 1)
    assert [each.stage for each in held] == sorted(each.stage for each in held)
    for stage in range(4):
        reads = [each.saved.read for each in held if each.stage == stage]
        assert reads == sorted(reads, reverse=True)
    moments = under_way([staged.lists.work(0)])
    first = within([each for each in held if each.stage in (0, 2)], held[0].bytes * 4, moments)
    assert first
    assert {each.stage for each in first} == {0}


def test_what_the_last_stage_reads_at_once_stays() -> None:
    before, program = pair("1f1b")
    for stage, layers in ((0, {"", "blocks.0", "blocks.1"}), (1, {"blocks.2", "blocks.3"})):
        held = {info(value).layer for value in before.staged.stages[stage].forward.output_values}
        begun = program.staged.stages[stage].forward.calls_of(BEGIN_OFFLOAD)
        moved = {info(operands(call)[0]).layer for call in begun}
        assert layers <= held
        assert moved == layers - ({"blocks.3"} if stage else set())


def test_memory_moves_as_a_whole_and_backward_makes_its_views_anew() -> None:
    held = held_values(pair("zb-h1")[0].staged, 1)
    assert any(each.name not in each.ports for each in held), "only views of it were held"
    assert any(len(each.ports) > 1 for each in held)
    assert any(len(each.bundles) > 1 for each in held), "of several lifetimes"
    program = pair("zb-h1")[1]
    for stage in program.staged.stages:
        of = storages(stage.forward)
        moved = [of[operands(call)[0]] for call in stage.forward.calls_of(BEGIN_OFFLOAD)]
        assert len(set(moved)) == len(moved)
        assert not set(moved) & {of[value] for value in stage.forward.output_values}
        for graph in (stage.backward, stage.dgrad, stage.wgrad):
            there = [node for node in graph.placeholders if on_host(node)]
            assert len(there) == len(graph.calls_of(BEGIN_FETCH)) == len(graph.calls_of(END_FETCH))


def test_what_both_halves_of_backward_read_is_kept_for_the_second() -> None:
    for stage in pair("zb-h1")[1].staged.stages:
        fetched = {
            graph.name: {info(operands(end)[1]).name: True in end.args for end in graph.calls_of(END_FETCH)}
            for graph in (stage.backward, stage.dgrad, stage.wgrad)
        }
        whole, dgrad, wgrad = fetched.values()
        assert not any(whole.values())
        assert not any(wgrad.values())
        assert whole.keys() == dgrad.keys() | wgrad.keys()
        assert {name for name, kept in dgrad.items() if kept} == dgrad.keys() & wgrad.keys()
        assert dgrad.keys() & wgrad.keys() or not dgrad
    assert any(isinstance(i, Dgrad) for i in pair("zb-h1")[1].staged.lists.ranks[0])


def test_a_schedule_fits_where_the_host_holds_the_rest() -> None:
    before, program = pair("1f1b")
    held, left = (
        max(peak_activations(p.staged.lists.work(c), p.staged.costs) for c in p.staged.coordinate_range)
        for p in (before, program)
    )
    assert left < held
    one = max(cost.activation for cost in before.staged.costs.stages)  # of which any schedule holds one
    for schedule, limit in (("1f1b", held - 1), ("auto", one - 1)):
        plan = {**PLANS["1f1b"], "pipeline": {**PIPELINE, "schedule": schedule, "memory": str(round(limit))}}
        with pytest.raises(shardc.ShardcError):
            compiled(plan)
        assert copies(compiled({**plan, "offload": ALL}))
    budget = {"recompute": {"budget": round(held) // 2}}
    alone, beside = (compiled({**PLANS["1f1b"], **budget, **said}) for said in ({}, {"offload": ALL}))
    again, less = (sum(info(call).is_recomputed for call in p.body.calls()) for p in (alone, beside))
    assert less < again
    assert not any(d.code == "SC214" for d in beside.diagnostics)


def test_a_program_file_holds_its_copies_and_says_where_they_lie(tmp_path: Path) -> None:
    program = pair("zb-h1")[1]
    program.save(tmp_path / "program.shardc")
    loaded = shardc.Program.load(tmp_path / "program.shardc")
    assert loaded.text() == program.text()
    assert str(loaded.memory()) == str(program.memory())
    assert not stage_faults(program.staged)
    was = pair("zb-h1")[0].staged.stages
    for part in ("forward", "backward"):  # one graph of two that agree
        first = program.staged.stages[0]
        mixed = replace(first, parts={**first.parts, part: was[0].parts[part]})
        faults = stage_faults(replace(program.staged, stages=(mixed, *program.staged.stages[1:])))
        assert any("lies on the" in fault.message or "does not give" in fault.message for fault in faults)


def test_a_program_for_evaluation_is_cut_alike_and_moves_nothing() -> None:
    program = pair("1f1b")[1]
    evaluated = program.evaluation(batch_of(16), "scalars")
    assert not any(call.target in HOST_COPIES for graph in evaluated.staged.graphs() for call in graph.calls())
    for c in program.staged.coordinate_range:
        assert evaluated.staged.held(c) <= program.staged.held(c)


def test_a_plan_that_moves_nothing_is_told_so() -> None:
    for said in ({"activations": "all"}, {"activations": 10, "least": 1}):
        program = compiled({**PLANS["1f1b"], "offload": said})
        (note,) = (d for d in program.diagnostics if d.code == "SC234")
        assert note.hint is not None
        size = note.hint.partition("least: ")[2].partition("}")[0]
        assert copies(compiled({**PLANS["1f1b"], "offload": {"activations": "all", "least": size}}))


def test_the_summary_and_the_prediction_say_what_is_moved() -> None:
    before, program = pair("1f1b")
    (line,) = offloaded(program)
    assert f"{len(copies(program))} values of each microbatch under way" in line
    assert line.endswith(f"up to {human_bytes(program.memory().host.most)} a rank")
    assert str(program.memory()).endswith(
        f"on the host: {human_bytes(most_on_host(program)[program.memory().fullest.number])}"
    )
    assert not offloaded(before)
    rows = [row for row in program.predict().exposed_ms if row.kind.startswith("copy ")]
    assert {(row.kind, row.phase) for row in rows} == {("copy to host", "fwd"), ("copy from host", "bwd")}
    assert sum(row.bytes for row in rows) in {2 * 4 * size for size in bytes_by_stage(program).values()}
