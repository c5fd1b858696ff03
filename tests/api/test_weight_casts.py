"""Casts of master weights, and gathers that ZeRO-1 and 2 keep, run once a step, not once a microbatch: the same
numbers, fewer bytes, memory as reported."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardc
from benchmarks.gpt import GPT
from shardc.cost.memory import memory
from shardc.ir import microbatch
from shardc.ir.collectives import Collective
from shardc.ir.graph import Graph, info, op_name, operands
from shardc.ir.microbatch import before_microbatches, calls_as_run, crossing, in_first_microbatch, in_microbatch
from shardc.ir.ops.buckets import PACK
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.partition import gather_hoisting
from shardc.passes.fusion.analysis.traffic import bytes_by_call
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.schedule.instructions import Gather
from tests.cost.test_memory import measured
from tests.cost.test_memory_calls import check

MODEL = {"vocab": 64, "width": 32, "heads": 4, "layers": 2, "seq": 8}
TP = {"params": {"wte.weight": "tp, -", "**.qkv.weight": "3*tp, -", "**.up.weight": "tp, -"}}
SP = {**TP, "activations": {"blocks.0": "-, tp, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "dp": ("dp=2", {"inputs": {"*": "dp, -"}}),
    "tp": ("tp=2", TP),
    "sp": ("tp=2", SP),
    "zero1": ("dp=2", {"inputs": {"*": "dp, -"}, "storage": {"zero": 1, "axes": ["dp"]}}),
    "zero3": ("dp=2", {"inputs": {"*": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}}),
    "zero2": ("dp=2", {"inputs": {"*": "dp, -"}, "storage": {"zero": 2, "axes": ["dp"]}, "clip_grad_norm": 0.5}),
    "fp16": ("dp=2", {"inputs": {"*": "dp, -"}, "precision": "fp16", "storage": {"zero": 3, "axes": ["dp"]}}),
    "selective": ("dp=1", {"recompute": "selective"}),
    "fused-buckets": (
        "dp=2",
        {"inputs": {"*": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}, "bucket": "20KiB", "fuse": True},
    ),
    "full": ("dp=1", {"recompute": "full"}),
    "fused": ("dp=1", {"fuse": True}),
    "fused-zero3": ("dp=2", {"inputs": {"*": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}, "fuse": True}),
    "buckets": ("dp=2", {"inputs": {"*": "dp, -"}, "storage": {"zero": 3, "axes": ["dp"]}, "bucket": "1MiB"}),
}


def compiled(layout: str, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    mesh, plan = LAYOUTS[layout]
    model = GPT(**MODEL)
    batch = {name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    plan = {"precision": "bf16", "accumulate": 4, **plan, **more}
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer)


def piped(schedule: str, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = GPT(**{**MODEL, "layers": 4})
    batch = {name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    pipeline = {"axis": "pp", "schedule": schedule, "microbatches": 4}
    return shardc.compile(
        model, batch, mesh="pp=2", plan={"precision": "bf16", "pipeline": pipeline, **more}, optimizer=optimizer
    )


def casts_of_weights(graph: Graph) -> list[fx.Node]:
    """The calls that move bytes of parameters alone."""
    params = {node for port, node in zip(graph.inputs, graph.placeholders, strict=True) if port.role == "param"}
    sizes = bytes_by_call(graph)
    return [call for call in sizes if operands(call) and params.issuperset(operands(call))]


def trained(program: shardc.Program, steps: int = 2) -> dict[str, torch.Tensor]:
    trainer = program.launch()
    for _ in range(steps):
        trainer.step(program.sample)
    return {name: value.clone() for name, value in trainer.state_dict(("param", "state")).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def each_microbatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of weights alone is made before the microbatches."""
    for module in (microbatch, gather_hoisting):
        monkeypatch.setattr(module, "narrowed_weights", lambda *_: set[fx.Node]())
    return monkeypatch


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_once_a_step_and_the_same_to_the_bit(layout: str, each_microbatch: pytest.MonkeyPatch) -> None:
    before = compiled(layout)
    assert len(casts_of_weights(before.body)) >= 8
    assert set(casts_of_weights(before.body)) <= in_microbatch(before.body)
    numbers = {} if "fuse" in layout else trained(before)  # merged kernels round less
    each_microbatch.undo()
    program = compiled(layout)
    body = program.body
    early = before_microbatches(body)
    assert early >= {call for call in casts_of_weights(body) if info(call).phase != "opt"}
    assert not early & in_microbatch(body)
    assert crossing(body) == []
    assert set(calls_as_run(body)[: len(early)]) == early
    same = Counter((call.target, repr(call.args), repr(call.kwargs)) for call in early if call.target is not PACK)
    assert set(same.values()) == {1}  # recomputing casts nothing again
    if numbers:
        assert_same(trained(program), numbers)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_single_device_and_eager(layout: str) -> None:
    report = compiled(layout).verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["alone", "tp", "sp", "full", "selective", "fp16", "zero1", "zero2", "zero3"])
def test_every_call_holds_what_the_report_says(layout: str) -> None:
    body = compiled(layout, bucket=False).body
    assert before_microbatches(body)
    assert list(memory(body).timeline) == measured(body)
    check(compiled(layout).body)


def test_a_rank_casts_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as a rank runs them; steps after steps, with weights that change, are the simulation's."""
    program = compiled("alone")
    body = program.body
    executor = BodyCode(body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    runs: Counter[str] = Counter()
    run = executor.routine.run

    def counted(code: Any, *arguments: Any) -> None:
        names = (executor.listing.instructions[line[0]].node for line in code)
        runs.update(info(node).name for node in names if op_name(node.target) == "_to_copy")
        run(code, *arguments)

    monkeypatch.setattr(executor.routine, "run", counted)
    trainer = program.launch()
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    for _ in range(3):
        runs.clear()
        fed = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
        rates = trainer.rates()
        trainer.step(program.sample)
        found = executor.run(held | rates, fed)
        for port, value in found.items():
            if port.role in ("param", "state"):
                held[port.name] = value
                assert torch.equal(value, trainer.state[port.name]), port.name
        early = {info(call).name for call in before_microbatches(body)}
        assert len(early) == 28
        assert {runs[name] for name in early} == {1}
        assert {count for name, count in runs.items() if name not in early} == {4}  # those of gradients


# ---------------------------------------------------------------------- gathers of ZeRO-1 and 2
def gathers(program: shardc.Program) -> list[Collective]:
    return [one for one in program.collectives() if one.kind == "all_gather"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("more", [{}, {"bucket": False}, {"fuse": True}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_kept_weights_are_gathered_once_a_step(layout: str, more: dict[str, Any]) -> None:
    """To the bit what gathers of each microbatch give, over steps that change the weights; and hidden all the same."""
    program, each = compiled(layout, **more), compiled(layout, **more)
    each.body.gathers_once = False
    once = gathers(program)
    assert once
    assert {one.times for one in once} == {1}
    assert [(one.value, 4, one.payload_bytes) for one in once] == [
        (one.value, one.times, one.payload_bytes) for one in gathers(each)
    ]
    assert_same(trained(program, 3), trained(each, 3))
    sent, longer = program.predict("h200-nvlink"), each.predict("h200-nvlink")
    for one, times in ((sent, 1), (longer, 4)):
        assert sum(row.times for row in one.exposed_ms if row.kind == "all_gather") == times * len(once)
    assert sent.step_ms < longer.step_ms
    if not more.get("recompute"):
        exposed, four = (
            sum(row.exposed_ms for row in one.exposed_ms if row.kind == "all_gather") for one in (sent, longer)
        )
        assert exposed < four
    assert crossing(program.body) == []
    check(program.body)


def test_only_the_first_microbatch_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as a rank runs them: begun once and waited for once, however many microbatches find the results."""
    program = compiled("zero1", bucket=False)
    body = program.body
    executor = BodyCode(body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    first, later = ([line[0] for line in code] for code in (executor._first_microbatch, executor._later_microbatches))  # pyright: ignore[reportPrivateUsage]
    once = executor.listing.first
    assert {executor.listing.instructions[i].node for i in once} == in_first_microbatch(body)
    assert all(first.count(at) >= 2 for at in once), "begin and wait"
    assert not once & {*later}
    assert [at for at in first if at not in once] == later
    assert len(once) == len(gathers(program))


def test_what_backward_gathers_again_is_gathered_by_each_microbatch() -> None:
    """ZeRO-3, and weights that a plan stores in shards: nothing is held for longer than before."""
    assert {one.times for one in gathers(compiled("zero3"))} == {4}
    storage = {"zero": 1, "axes": ["dp"], "params": {"wte.weight": "dp, -"}}
    program = compiled("zero1", storage=storage)
    assert {one.times for one in gathers(program)} == {4}
    assert "gathers(1)" not in program.text()
    again = compiled("zero1", bucket=False, recompute={"mode": "full", "collectives": True})
    times = Counter(one.times for one in gathers(again))
    assert times[4] > 2, "forward's and backward's of the layers that are recomputed"
    check(again.body)


def test_whole_weights_are_held_until_the_last_microbatch_ends() -> None:
    """Those too that only forward reads, as an embedding that is not tied: as much more at the peak at the most."""

    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(512, 32), nn.Linear(32, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids)).square().mean()

    torch.manual_seed(0)
    model = Untied()
    plan = {"inputs": {"ids": "dp, -"}, "storage": {"zero": 1, "axes": ["dp"]}, "precision": "bf16", "accumulate": 4}
    optimizer = torch.optim.AdamW(model.parameters())
    program = shardc.compile(model, torch.randint(512, (16, 8)), mesh="dp=2", plan=plan, optimizer=optimizer)
    check(program.body)
    once = memory(program.body, overlap=True).peak
    program.body.gathers_once = False
    check(program.body)
    each = memory(program.body, overlap=True).peak
    assert 0 <= once - each <= 2 * sum(p.numel() for p in model.parameters())
    assert program.verify()


def test_text_and_file_keep_that_weights_are_gathered_once() -> None:
    program = compiled("zero1")
    text = program.text()
    assert "mesh(dp=2) microbatches(4) gathers(1) {" in text
    assert parse(text).gathers_once
    assert not parse(text.replace(" gathers(1)", "")).gathers_once
    read = shardc.Program.from_json(program.to_json())
    assert read.body.gathers_once
    assert not read.reference.gathers_once
    assert gathers(read) == gathers(program)
    with pytest.raises(shardc.ShardcError):
        parse(text.replace("gathers(1)", "gathers(2)"))
    with pytest.raises(shardc.ShardcError, match="true or false"):
        graph_from_plain({**graph_to_plain(program.body), "gathers_once": 2})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "bfs", "zb-h1"])
@pytest.mark.parametrize("fuse", [False, True])
def test_stages_of_a_pipeline_cast_once_a_step(schedule: str, fuse: bool, each_microbatch: pytest.MonkeyPatch) -> None:
    before = piped(schedule, fuse=fuse)
    in_parts = [
        call for stage in before.staged.stages for graph in stage.parts.values() for call in casts_of_weights(graph)
    ]
    assert in_parts
    numbers = {} if fuse else trained(before)
    each_microbatch.undo()
    program = piped(schedule, fuse=fuse)
    for stage in program.staged.stages:
        assert not [call for graph in stage.parts.values() for call in casts_of_weights(graph)]
    for instructions in program.staged.lists.ranks:
        cast = [(i.stage, name) for i in instructions if isinstance(i, Gather) for name in i.values]
        assert cast
        assert len(cast) == len(set(cast))
    if numbers:
        assert_same(trained(program), numbers)
    report = program.verify()
    assert report, str(report)
