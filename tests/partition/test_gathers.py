"""Stored parameters are gathered for a stage's visits, and not for its microbatches: compiled programs under ZeRO-3."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.collectives import collectives
from shardc.ir.graph import info
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.partition import rank_costs
from shardc.partition.cut import GRAPHS, CutStep, cut
from shardc.partition.memory import memory
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.passes.communication.bucket import bucket
from shardc.passes.fusion.fuse import fuse
from shardc.runtime.oracle.simulate import run_reference
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import COMPUTE, Forward, Free, Gather, Instruction
from shardc.schedule.lists import RankLists
from shardc.schedule.prove import prove
from shardc.schedule.replay import replay
from tests.models.zoo import make
from tests.partition.whole import SCHEDULES, SIZES, agree, compiled, staged, step

ZERO3 = {"storage": {"zero": 3, "axes": ["dp"]}}
SEVERAL = [(ranks, name) for ranks in (2, 4) for name in ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1")]


class Unlayered(nn.Module):
    """No list of layers, sizes that do not divide, a skip connection, and a weight that is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.squash = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5)
        self.middle, self.widen, self.gate = nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 7)
        self.back, self.leave = nn.Linear(7, 5), nn.Linear(5, 3)
        self.back.weight = self.squash.weight

    def forward(self, x: Tensor) -> Tensor:
        early = self.norm(self.enter(x).tanh())
        x = self.middle(self.squash(early).tanh()).tanh()
        x = self.gate(self.widen(x).tanh()).sigmoid() * early
        return self.leave(self.back(x).tanh())


def sharded(microbatches: int, mesh: str = "dp=2", **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Unlayered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    plan = {**ZERO3, "inputs": {"x": "dp, -"}, "clip_grad_norm": 0.1, **plan}
    return step(model, (torch.randn(24, 6),), microbatches, mesh, lambda y, _: y.square().mean(), optimizer, **plan)


@cache
def unlayered(microbatches: int) -> tuple[shardc.Program, dict[str, Tensor], Any]:
    program = sharded(microbatches)
    inputs = program.inputs()
    return program, inputs, run_reference(program.reference, inputs, dtype=torch.float64)


@cache
def gpt2(microbatches: int, stages: int, schedule: str) -> StagedProgram:
    return scheduled(staged("gpt2", "zero3", microbatches, stages), schedule, SCHEDULES[schedule])


def gathers(program: StagedProgram) -> Counter[int]:
    """By stage, how often a step gathers it."""
    return Counter(i.stage for listed in program.lists.ranks for i in listed if isinstance(i, Gather))


def gathered(program: StagedProgram) -> list[int]:
    """By coordinate, the bytes that a rank sends in a step to gather parameters."""
    found = [rank_costs.rank_collectives(program, c) for c in range(len(program.lists.ranks))]
    return [sum(one.bytes_per_step for one in some if one.kind == "all_gather") for some in found]


# ---------------------------------------------------------------------- right
@pytest.mark.long  # compiled with a plan, and with buckets and kernels, values are compared too
@pytest.mark.sampled(10)
@pytest.mark.parametrize(("ranks", "schedule"), SEVERAL)
def test_equals_the_single_device(ranks: int, schedule: str) -> None:
    program, inputs, expected = unlayered(3)
    virtual = SCHEDULES[schedule]
    agree(scheduled(cut(program.body, ranks * virtual), schedule, virtual), inputs, expected, seed=ranks)
    _, inputs, expected = compiled("gpt2", "zero3", 3)
    agree(gpt2(3, ranks * virtual, schedule), inputs, expected, seed=ranks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [{"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_recomputation(plan: dict[str, Any]) -> None:
    program = sharded(3, **plan)
    inputs = program.inputs()
    expected = run_reference(program.reference, inputs, dtype=torch.float64)
    found = scheduled(cut(program.body, 4), "bfs", 2)
    agree(found, inputs, expected)
    assert max(gathers(found).values()) == 2


def test_buckets_and_kernels() -> None:
    """What is gathered together travels together; values, lists and bytes are the same."""
    program, inputs, expected = unlayered(3)
    plain = scheduled(cut(program.body, 4), "bfs", 2)
    packed = plain.transformed(partial(bucket, size=2**20))
    assert count(packed) < count(plain)
    for found in (packed, plain.transformed(fuse), packed.transformed(fuse)):
        assert found.lists == plain.lists
        agree(found, inputs, expected)


def count(program: StagedProgram) -> int:
    """The all-gathers that stages' gathers are."""
    graphs = [graph for stage in program.stages for graph in stage.gathers.values()]
    return sum(one.kind == "all_gather" for graph in graphs for one in collectives(graph))


def test_a_tied_weight_on_one_coordinate_is_gathered_by_both_stages() -> None:
    """Under zb-v the first and the last stage live together, and each has its own."""
    program = gpt2(3, 4, "zb-v")
    _, inputs, expected = compiled("gpt2", "zero3", 3)
    agree(program, inputs, expected)
    names = [
        {info(call).name for g in stage.gathers.values() for call in g.calls() if "wte" in info(call).name}
        for stage in program.stages
    ]
    assert names[0] == names[3] != set()


# ---------------------------------------------------------------------- how often
def test_nothing_is_gathered_for_one_microbatch() -> None:
    """All that is left of communication in the parts is of the batch."""
    program = gpt2(3, 4, "bfs")
    for stage in program.stages:
        assert not [one for name in GRAPHS for one in collectives(stage[name]) if one.kind == "all_gather"]
        assert all(one.kind == "all_gather" for graph in stage.gathers.values() for one in collectives(graph))


@pytest.mark.long  # `schedule` has the lists, `test_reduces.py` a program of that schedule
@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_breadth_first_gathers_a_stage_twice_a_step(ranks: int) -> None:
    """Once forward and once backward, however many microbatches there are. The last stage of a rank goes from one to
    the other with nothing in between: it stays."""
    bytes_sent: dict[int, list[int]] = {}
    for microbatches in (3, 8):
        program = gpt2(microbatches, 2 * ranks, "bfs")
        both = {s for s, stage in enumerate(program.stages) if f"params{s}" in stage.gathers}
        stays = {program.lists.stages_of(c)[-1] for c in range(ranks)}
        some = {s for s, stage in enumerate(program.stages) if stage.gathers}
        assert gathers(program) == {stage: 2 if stage in both - stays else 1 for stage in some}
        assert len(both - stays) >= ranks // 2
        bytes_sent[microbatches] = gathered(program)
    assert bytes_sent[3] == bytes_sent[8]
    assert all(bytes_sent[3])


def test_each_parameter_is_sent_once_a_visit() -> None:
    """Bytes as counted by hand: half of a parameter for each rank of two, for each time that its stage is gathered."""
    program = gpt2(3, 4, "bfs")
    types = {port.name: node for port, node in zip(program.body.inputs, program.body.placeholders, strict=True)}
    for c in range(2):
        expected = 0
        for i in program.lists.ranks[c]:
            if isinstance(i, Gather):
                graphs = [program.stages[i.stage].gathers[name] for name in i.values]
                read = {port.name for graph in graphs for port in graph.inputs if port.role == "param"}
                expected += sum(_local_bytes(program, types[one]) for one in read)
        assert gathered(program)[c] == expected


def _local_bytes(program: StagedProgram, node: Any) -> int:
    type = info(node).type
    assert type is not None
    return type.local_bytes(program.body.mesh)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("microbatches", [3, pytest.param(8, marks=pytest.mark.long)])
def test_the_only_stage_of_a_rank_is_gathered_once(microbatches: int, schedule: str) -> None:
    assert gathers(gpt2(microbatches, 4, schedule)) == dict.fromkeys(range(4), 1)


def test_depth_first_gathers_more_and_holds_less_of_the_batch() -> None:
    deep, broad = (gpt2(8, 4, schedule) for schedule in ("interleaved", "bfs"))
    assert sum(gathers(deep).values()) > sum(gathers(broad).values())
    assert sum(gathered(deep)) > sum(gathered(broad))
    assert memory(deep).row("activations").most < memory(broad).row("activations").most


def test_forward_alone_is_freed_before_backward() -> None:
    """An embedding's gradient does not read the embedding: it is gathered for forward, and not again."""
    program = gpt2(3, 4, "bfs")
    (embedding,) = (n for n in program.stages[0].gathers if n.endswith(".f"))
    assert any(".wte." in port.name for port in program.stages[0].gathers[embedding].inputs)
    times = [i for i in program.lists.ranks[0] if isinstance(i, Gather) and embedding in i.values]
    assert len(times) == 1


@pytest.mark.parametrize("zero", [1, 3])
def test_forward_alone_stays_gathered_where_backward_gathers_none(zero: int) -> None:
    """Under ZeRO-1, a rank of several stages gathers an embedding once a step, as it does all other weights."""
    program = embedded(zero)
    deep = scheduled(cut(program.body, 4), "interleaved", 2)
    (name,) = (n for n, g in deep.stages[0].gathers.items() if any("enter" in port.name for port in g.inputs))
    assert name.endswith(".kept" if zero == 1 else ".f")
    times = sum(name in i.values for i in deep.lists.ranks[0] if isinstance(i, Gather))
    assert times == 1 if zero == 1 else times > 1


def embedded(zero: int) -> shardc.Program:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(enter=nn.Embedding(8, 6), **{f"layer{i}": nn.Linear(6, 6) for i in range(6)}))
    return shardc.compile(
        model,
        torch.zeros(16, 3, dtype=torch.long),
        plan={
            "mesh": "dp=2",
            "inputs": {"input": "dp, -"},
            "bucket": False,
            "accumulate": 8,
            "precision": "bf16",
            "storage": {"zero": zero, "axes": ["dp"]},
        },
        loss=lambda y, _: y.float().square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )


def test_kept_for_backward() -> None:
    """`regather: false` keeps what forward gathered while other stages run: traffic for memory."""
    several = {value: scheduled(cut(sharded(4, **_regather(value)).body, 4), "bfs", 2) for value in (True, False)}
    assert max(gathers(several[True]).values()) == 2
    assert max(gathers(several[False]).values()) == 1
    assert sum(gathered(several[False])) < sum(gathered(several[True]))
    most = {value: memory(found).row("communication", 0).most for value, found in several.items()}
    assert most[False] > most[True]
    inputs = unlayered(4)[1]
    agree(several[False], inputs, unlayered(4)[2])


def _regather(value: bool) -> dict[str, Any]:
    return {"storage": {"zero": 3, "axes": ["dp"], "regather": value}}


@pytest.mark.long  # `api/test_precision.py` gathers casts
@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [1, 3])
def test_master_copies(zero: int) -> None:
    """Casts of sharded master copies are made before they are gathered, and gathered once a step."""
    program = sharded(3, precision="bf16", storage={"zero": zero, "axes": ["dp"]})
    found = scheduled(cut(program.body, 4), "bfs", 2)
    kinds = {info(v).type.dtype for s in found.stages for g in s.gathers.values() for v in g.output_values}  # pyright: ignore[reportOptionalMemberAccess]
    assert kinds == {torch.bfloat16}
    assert max(gathers(found).values()) == (1 if zero == 1 else 2)
    names = {name for stage in found.lists.pipeline.stages for name in stage.kept}
    assert bool(names) == (zero == 1)


@pytest.mark.long  # `test_nothing_is_gathered_for_one_microbatch` is ordinary
def test_without_storage_nothing_is_gathered() -> None:
    for variant in ("alone", "tp2", "zero1"):
        program = scheduled(staged("gpt2", variant, 1 if variant == "tp2" else 3, 4), "1f1b")
        assert not gathers(program)
        assert not any(stage.gathers for stage in program.stages)


# ---------------------------------------------------------------------- proved, said, timed, saved
def changed(lists: RankLists, change: Callable[[list[Instruction]], None]) -> set[str]:
    """The codes of what the proof finds once a rank's list is changed."""
    listed = list(lists.ranks[0])
    change(listed)
    return {found.code for found in prove(replace(lists, ranks=(tuple(listed), *lists.ranks[1:]))).errors}


@pytest.mark.parametrize("schedule", ["bfs", "interleaved", "1f1b"])
def test_the_proof_refuses_gathers_that_are_wrong(schedule: str) -> None:
    lists = gpt2(3, 2 * SCHEDULES[schedule], schedule).lists
    at = [k for k, i in enumerate(lists.ranks[0]) if isinstance(i, Gather)]
    for k in at:
        i = lists.ranks[0][k]
        assert isinstance(i, Gather)
        other = replace(i, stage=(i.stage + 1) % len(lists.pipeline.stages))
        assert changed(lists, lambda x, k=k: x.pop(k) and None) == {"SC524"}, "dropped"
        assert changed(lists, lambda x, k=k, i=i: x.insert(k, i)) == {"SC524"}, "doubled"
        assert changed(lists, lambda x, k=k: x.insert(k + 1, x.pop(k))) == {"SC524"}, "late"
        assert changed(lists, lambda x, k=k, o=other: x.__setitem__(k, o)) == {"SC525"}, "of another stage"
        assert changed(lists, lambda x, k=k, i=i: x.__setitem__(k, replace(i, values=("params",)))) == {"SC525"}
    frees = [k for k, i in enumerate(lists.ranks[0]) if isinstance(i, Free) and i.microbatch is None]
    for k in frees:
        assert changed(lists, lambda x, k=k: x.pop(k) and None) == {"SC524"}, "never freed"
        assert changed(lists, lambda x, k=k: x.insert(k - 1, x.pop(k))) == {"SC524"}, "freed early"


def test_the_timeline_waits_for_gathers() -> None:
    """A gather takes its turn before the work that reads it, and what is gathered counts as held until it is freed."""
    program = gpt2(3, 4, "bfs")
    lists = program.lists
    unit = Costs.unit(4)
    drawn = replay(lists, replace(unit, gather=2.0))
    for c, listed in enumerate(lists.ranks):
        events = [event for event in drawn.events if event.rank == c and isinstance(event.instruction, Gather)]
        assert [event.end - event.start for event in events] == [2.0] * len(events)
        for event in events:
            work = next(i for i in listed[listed.index(event.instruction) :] if isinstance(i, COMPUTE))
            begun = next(e.start for e in drawn.events if e.instruction == work)
            assert begun >= event.end
    assert drawn.makespan > replay(lists, unit).makespan
    priced = replay(lists, program.costs)
    assert all(e.end > e.start for e in priced.events if isinstance(e.instruction, Gather))
    held = replay(lists, unit).peak_bytes
    without = {name: 0 if name in lists.pipeline.gather_stages else size for name, size in lists.pipeline.bytes.items()}
    lighter = replace(lists, pipeline=replace(lists.pipeline, bytes=without))
    assert all(a > b for a, b in zip(held, replay(lighter, unit).peak_bytes, strict=True))


def test_files_and_text() -> None:
    program = gpt2(3, 4, "bfs")
    read = StagedProgram.from_plain(json.loads(json.dumps(program.to_plain())))
    assert read.lists == program.lists
    assert read.costs == program.costs
    for c in range(2):
        text = program.text(c)
        assert read.text(c) == text
        for stage in program.lists.stages_of(c):
            for name, graph in program.stages[stage].gathers.items():
                assert f"graph @{name} " in text
                alone = print_graph(graph, comments=False)
                assert print_graph(parse(alone), comments=False) == alone
    _, inputs, expected = compiled("gpt2", "zero3", 3)
    agree(read, inputs, expected)


def test_a_stage_holds_what_it_gathers() -> None:
    """Parameters that only gathers read are the stage's all the same."""
    program = gpt2(3, 4, "bfs")
    assert "transformer.wte.weight" in program.stages[0].held
    assert not any(port.role == "param" for name in GRAPHS for port in program.stages[1][name].inputs)
    names = {port.name for port in program.body.inputs if port.role == "param"}
    assert set().union(*(stage.held for stage in program.stages)) >= names


def test_compiled_with_a_plan(tmp_path: Any) -> None:
    """The whole way: plan, compile, verify, report, save, load, run."""
    model, batch, _ = make("gpt2", **SIZES["gpt2"])
    plan = {
        **ZERO3,
        "inputs": dict.fromkeys(("input_ids", "labels"), "dp, -"),
        "pipeline": {"schedule": "bfs", "microbatches": 3, "virtual": 2},
    }
    program = shardc.compile(model, batch, mesh="pp=2,dp=2", plan=plan)
    assert program.verify().ok
    assert program.prove().ok
    program.save(tmp_path / "step.json")
    loaded = shardc.Program.load(tmp_path / "step.json")
    assert loaded.text() == program.text()
    assert "Gather" in program.text()
    merged = program.body.by_name("transformer.h.0.mlp.c_fc.weight.all_gather_1")
    assert info(merged).phase == "bwd"
    assert "end of the step" not in str(program.explain(info(merged).name))
    pipelined = program.pipelined
    assert pipelined is not None
    held = program.memory().row("communication")
    assert held.most >= max(pipelined.lists.pipeline.bytes[name] for name in pipelined.lists.pipeline.gather_stages)
    first = next(i for i in pipelined.lists.ranks[0] if isinstance(i, Forward | Gather))
    assert isinstance(first, Gather)


def test_costs_move_with_the_gathers() -> None:
    """What is hoisted no longer counts as a microbatch's, but once a gather."""
    found: CutStep = staged("gpt2", "zero3", 3, 4)
    plain = staged("gpt2", "dp2", 3, 4)
    assert found.costs.gathers.keys() == found.pipeline.gather_stages.keys()
    assert all(cost > 0 for cost in found.costs.gathers.values())
    for a, b in zip(found.costs.stages, plain.costs.stages, strict=True):
        assert a.forward == pytest.approx(b.forward, rel=0.02)
