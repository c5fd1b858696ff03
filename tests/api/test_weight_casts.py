"""Casts of master weights, and gathers that ZeRO-1 and 2 keep, run once a step, not once a microbatch: the same
numbers, fewer bytes, memory as reported."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardc
from benchmarks.gpt import GPT
from shardc.cost.memory import memory
from shardc.explain import what_if
from shardc.explain.collective import bound_of, options_of
from shardc.ir import microbatch
from shardc.ir.buckets import pieces
from shardc.ir.call_slots import slotted_calls
from shardc.ir.collectives import Collective, collectives
from shardc.ir.graph import Graph, info, op_name, operands, update
from shardc.ir.microbatch import before_microbatches, calls_as_run, crossing, in_first_microbatch, in_microbatch
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.collectives import all_gather
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.partition import gather_hoisting
from shardc.passes.fusion.analysis.traffic import bytes_by_call
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.schedule.instructions import Gather
from tests.cost.test_memory import measured
from tests.cost.test_memory_calls import check
from tests.handmade import Builder, aten
from tests.sums import sums_apart

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
    with sums_apart():  # simulations allocate no members in flat tensors
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


def test_advice_counts_what_is_gathered_once() -> None:
    program = compiled("zero1", bucket=False)
    found = what_if.compiled(program.reference, bound_of(program), options_of(program), collectives)
    assert {one.times for one in found if one.kind == "all_gather"} == {1}


def test_only_the_first_microbatch_gathers() -> None:
    """By a rank's code: begun once and waited for once, however many microbatches find the results."""
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
    assert "gathers(1)" not in compiled("zero1", precision=None).text(), "which gathers none"
    again = compiled("zero1", bucket=False, recompute={"mode": "full", "collectives": True})
    times = Counter(one.times for one in gathers(again))
    assert times[4] > 2, "forward's and backward's of the layers that are recomputed"
    check(again.body)


def held_at_the_end(body: Graph) -> int:
    """What a rank holds while it runs the last call of backward in a microbatch."""
    report, calls = memory(body, overlap=True), [call.node for call in slotted_calls(body).calls]
    inside = {call for call in in_microbatch(body) if call.op == "call_function" and info(call).phase == "bwd"}
    pairs = zip(report.actions, report.timeline, strict=True)
    return [size for action, size in pairs if action.kind == "run" and calls[action.at] in inside][-1]


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
    once = held_at_the_end(program.body)
    program.body.gathers_once = False
    check(program.body)
    each = held_at_the_end(program.body)
    embedding = 2 * model.embed.weight.numel()
    assert embedding / 2 < once - each <= embedding + 2 * sum(p.numel() for p in model.head.parameters())
    assert program.verify()


def test_an_evaluation_lets_go_of_weights() -> None:
    """Each of its microbatches gathers them: it never held more than some, and nothing is computed with them again."""
    torch.manual_seed(0)
    mesh, plan = LAYOUTS["zero1"]
    batch = {name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")}
    plan = {"precision": "bf16", "accumulate": 4, **plan}
    program = shardc.compile(GPT(**MODEL), batch, mesh=mesh, plan=plan, mode="eval")
    assert program.body.is_forward_only
    assert program.body.microbatches == 4
    assert not program.body.gathers_once
    assert program.verify()


def gathered_twice(returned: bool) -> Graph:
    """A weight whose cast is gathered along cp, and that along dp, for a product of each of four microbatches."""
    builder = Builder(shardc.Mesh(dp=2, cp=2))
    w, x = builder.input("w", "f32[8@dp.cp, 4]"), builder.input("x", "f32[4, 8]", "input")
    cast = builder.call("cast", "bf16[8@dp.cp, 4]", aten._to_copy.default, w, dtype=torch.bfloat16)
    part = builder.call("part", "bf16[8@dp, 4]", all_gather, cast, ["cp"], [2, 4], 0, 2, [4, 4])
    whole = builder.call("whole", "bf16[8, 4]", all_gather, part, ["dp"], [4, 4], 0, 2, [8, 4])
    wide = builder.call("wide", "f32[8, 4]", aten._to_copy.default, whole, dtype=torch.float32)
    y = builder.call("y", "f32[4, 4]", aten.mm.default, x, wide)
    builder.output("loss", "loss", builder.call("total", "f32[4, 4]", ACCUMULATE, y))
    if returned:
        builder.output("output", "w", whole)
    graph = builder.graph()
    graph.microbatches, graph.gathers_once = 4, True
    return graph


@pytest.mark.parametrize("returned", [False, True])
def test_what_is_gathered_along_two_axes_and_what_is_returned(returned: bool) -> None:
    """The second gather reads what the first has made. A gather whose result is an output is each microbatch's."""
    graph = gathered_twice(returned)
    once, each = ({info(call).name for call in calls} for calls in (in_first_microbatch(graph), in_microbatch(graph)))
    assert once == ({"part"} if returned else {"part", "whole"})
    assert each & {"part", "whole", "wide", "y"} == {"part", "whole", "wide", "y"} - once


def test_what_the_first_microbatch_unpacks_is_no_piece_of_a_later_one() -> None:
    """A bucket that each microbatch packs anew cannot have a member that one of them alone has made."""
    builder = Builder(shardc.Mesh(dp=2))
    w, x = builder.input("w", "f32[16@dp]"), builder.input("x", "f32[16]", "input")
    cast = builder.call("cast", "bf16[16@dp]", aten._to_copy.default, w, dtype=torch.bfloat16)
    flat = builder.call("flat", "bf16[(2@dp 8)]", PACK, [cast], [1], [8], 1, 8)
    whole = builder.call("whole", "bf16[(2 8)]", all_gather, flat, ["dp"], [8], 0, 16, [16])
    made = builder.call("member", None, UNPACK, whole, [1], [8], 2, 8, [16], [16], [1])
    update(made, results=(builder.type("bf16[16]"),))
    member = builder.call("member.0", "bf16[16]", operator.getitem, made, 0)
    again = builder.call("again", "bf16[16]", PACK, [member], [1], [16], 1, 8)
    y = builder.call("y", "bf16[16]", aten.mul.Tensor, again, x)
    builder.output("loss", "loss", builder.call("total", "bf16[16]", ACCUMULATE, y))
    graph = builder.graph()
    graph.microbatches = 4
    assert set(pieces(graph)) >= {cast, member}
    graph.gathers_once = True
    assert in_first_microbatch(graph) == {whole, made}
    assert set(pieces(graph)) == {cast}


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
