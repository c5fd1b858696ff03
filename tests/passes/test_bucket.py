"""Buckets: the same values and bytes in fewer collectives, none of which waits for what something waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from kernels_triton.base.buckets import ALIGNMENT
from shardc.cost.memory import memory
from shardc.explain.collective import explain
from shardc.ir.collectives import bucket_of, collectives, member, members
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.hardware import DEFAULT
from shardc.ir.layers import layer_or_module
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.overlap_schedule import AHEAD, IN_FLIGHT
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.ir.text import print_graph
from shardc.ir.verify import violations
from shardc.partition.rank_costs import graphs_by_name
from shardc.passes.communication.bucket import bucket
from shardc.passes.verify import ENSURES
from tests.replanned import replanned

SIZE = DEFAULT.bucket_bytes
SMALL = 60_000  # bytes: a layer of the model below takes about two
TP = {"**.wte.weight": "tp, -", "**.c_attn.weight": "-, 3*tp", "**.c_fc.weight": "-, tp"}
LABELS = {"tokens": "labels", "shift": 1}
DP = {"mesh": "dp=2"}
# plan, collectives without buckets, with one of 25 MiB for all that fits, and with small ones
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "dp": (DP, 30, 4, 5),
    "zero-1": (DP | {"storage": {"zero": 1, "axes": ["dp"]}}, 58, 5, 8),
    "zero-2 bf16": (DP | {"storage": {"zero": 2, "axes": ["dp"]}, "precision": "bf16"}, 58, 8, 10),
    "zero-3": (DP | {"storage": {"zero": 3, "axes": ["dp"]}}, 77, 13, 25),
    "tp": ({"mesh": "dp=2,tp=2", "params": TP}, 41, 15, 15),
    "accumulate tokens": (DP | {"accumulate": 2, "loss": LABELS}, 30, 3, 5),
    "recompute clip": (DP | {"recompute": "full", "clip_grad_norm": 0.1}, 30, 4, 5),
    "fuse bf16 zero-3": (
        DP | {"storage": {"zero": 3, "axes": ["dp"]}, "precision": "bf16", "fuse": True, "clip_grad_norm": 0.1},
        73,
        13,
        15,
    ),
}


def compiled(plan: dict[str, Any], bucket: object = False, layers: int = 2, train: bool = True) -> shardc.Program:
    torch.manual_seed(0)
    model, batch = gpt2(batch=4, seq=8, layers=layers, vocab=64, heads=4, width=32)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3) if train else None
    wanted = {"inputs": dict.fromkeys(batch, "dp, -"), "bucket": bucket, **plan}
    return shardc.compile(model, batch, plan=wanted, optimizer=mine)


@pytest.mark.long  # `test_a_pipelines_parts_have_buckets_of_their_own` has storage in shards
def test_storage_over_an_axis_of_one_rank() -> None:
    program = compiled({"mesh": "dp=2,tp=1", "storage": {"zero": 1, "axes": ["tp"]}}, True)
    assert any(node.target is PACK for node in program.body.calls())
    assert program.verify().ok, str(program.verify())


def sent(graph: Graph) -> int:
    """Bytes of a step, without what aligns the members of buckets."""
    found = 0
    for one in collectives(graph):
        inside = members(graph.by_name(one.value)).values()
        own = sum(member(graph, value).bytes_per_rank for value in inside)
        assert own <= one.bytes_per_rank <= own + 2 * ALIGNMENT * len(inside) or not inside
        found += (own or one.bytes_per_rank) * one.times
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(8)
def test_fewer_collectives_of_the_same_bytes(case: str) -> None:
    plan, before, large, small = CASES[case]
    plain = compiled(plan)
    # Kernels may hold as much as the body that they are made of, buckets and all.
    allowed = memory((replanned(plain, fuse=False) if "fuse" in plan else plain).body, arena=True).peak
    counts: list[int] = []
    for size in (SIZE, SMALL):
        program = replanned(plain, bucket=size)
        counts.append(len(program.collectives()))
        assert sent(program.body) == sent(plain.body)
        assert memory(program.body, arena=True).peak <= allowed + size
        assert all(one.payload_bytes <= size for one in program.collectives() if one.value.endswith(".bucket"))
    report = program.verify()
    assert report.ok, str(report)
    assert [len(plain.collectives()), *counts] == [before, large, small]
    body = bucket(plain.body, SMALL)
    assert not violations(body)
    again = parse(print_graph(body))
    assert print_graph(again, comments=False) == print_graph(body, comments=False)
    assert graph_to_plain(graph_from_plain(graph_to_plain(body))) == graph_to_plain(body)
    assert print_graph(bucket(plain.body, SMALL)) == print_graph(body), "two runs differ"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(8)
def test_what_is_in_flight_has_a_bound(case: str) -> None:
    """Passes bound the peak in the program's order; a rank holds at most so many collectives' values beside that."""
    plan, *_ = CASES[case]
    plain = compiled(plan).body
    beside: list[int] = []
    for body in (plain, bucket(plain, SIZE), bucket(plain, SMALL)):
        largest = max(
            sum(type_of(value).local_bytes(body.mesh) for value in (*operands(node), node))
            for node in body.calls()
            if node.target in COLLECTIVES
        )
        beside.append(memory(body, overlap=True).peak - memory(body).peak)
        assert 0 <= beside[-1] <= IN_FLIGHT * 2 * largest
    assert any(beside) or "zero-3" not in case


# ---------------------------------------------------------------------- which, and where
def step(*backward: str, opt: tuple[str, ...] = (), returns: tuple[str, ...] = ()) -> Graph:
    """A graph of calls in backward and in the optimizer's phase, written as it prints."""
    lines = ['%x = input "x" : f32[16@dp]', "bwd:", *backward, "opt:", *opt]
    outputs = ",\n".join(f'    output "{name}" = %{name}' for name in returns)
    return parse(
        "graph @step mesh(dp=2, tp=2) {\n" + "\n".join(f"  {line}" for line in lines) + f"\n  return\n{outputs}\n}}\n"
    )


def pending(name: str, dtype: str = "f32") -> str:
    return f"%{name} = {'relu(%x)' if dtype == 'f32' else '_to_copy(%x, dtype=f64)'} : {dtype}[16] |sum dp"


def reduced(name: str, dtype: str = "f32", op: str = "sum") -> str:
    return f'%{name}.r = shardc.all_reduce(%{name}, op="{op}", axes=["dp"]) : {dtype}[16]'


def names(body: Graph) -> list[str]:
    return [info(node).name for node in body.calls() if info(node).type is not None]


def test_a_bucket_is_sent_when_its_last_member_is_ready_and_unpacked_when_one_is_read() -> None:
    both = [line for name in "abc" for line in (pending(name), reduced(name))]
    body = step(
        *both, "%later = relu(%x) : f32[16@dp]", opt=("%new = neg(%b.r) : f32[16]",), returns=("new", "a.r", "c.r")
    )
    found = bucket(body, 128)  # two of 64 bytes
    bucketed = [info(node).name for node in found.calls()]
    assert bucketed == ["a", "b", "b.r.bucket.pack", "b.r.bucket", "c", "c.r", "later", "b.r.bucket.unpack", "new"]
    assert not violations(found)
    assert not [line for check in ENSURES["bucket"] for line in check(found)]
    assert [info(value).name for value in members(found.by_name("b.r.bucket")).values()] == ["a.r", "b.r"]
    assert names(body) == ["a", "a.r", "b", "b.r", "c", "c.r", "later", "new"], "the graph that was given is as it was"


def test_what_backward_reads_is_not_kept_waiting() -> None:
    lines = [pending("a"), reduced("a"), pending("x1"), reduced("x1"), "%y = neg(%x1.r) : f32[16]"]
    body = step(*lines, pending("b"), reduced("b"), returns=("a.r", "b.r", "y"))
    found = bucket(body, SIZE)
    assert names(found)[:4] == ["a", "x1", "x1.r", "y"]
    assert bucket_of(found.by_name("a.r")) is bucket_of(found.by_name("b.r")) is found.by_name("b.r.bucket")
    assert bucket_of(found.by_name("x1.r")) is None


def test_a_member_that_needs_another_travels_after_it() -> None:
    norm = ("%n = neg(%a.r) : f32[16] |sum dp", reduced("n"), pending("b"), reduced("b"))
    body = step(pending("a"), opt=(reduced("a"), *norm), returns=("a.r", "n.r", "b.r"))
    found = bucket(body, SIZE)
    assert bucket_of(found.by_name("a.r")) is None
    assert bucket_of(found.by_name("n.r")) is bucket_of(found.by_name("b.r")) is not None
    assert not violations(found)


def test_only_what_is_alike_shares_a_bucket() -> None:
    other = '%d.r = shardc.all_reduce(%d, op="sum", axes=["tp"]) : f32[16]'
    made = [pending("a"), pending("b", "f64"), pending("c"), pending("d").replace("dp", "tp")]
    body = step(
        *made, reduced("a"), reduced("b", "f64"), reduced("c", op="max"), other, returns=("a.r", "b.r", "c.r", "d.r")
    )
    assert print_graph(bucket(body, SIZE)) == print_graph(body)


def test_views_and_casts_of_a_result_are_made_when_it_is_there() -> None:
    """And so are gradients that are cast down after they were summed."""
    views = (
        "%a.v = view(%a.r, [4, 4]) : f32[(4 4)]".replace("(4 4)", "4, 4"),
        "%a.c = _to_copy(%a.v, dtype=f64) : f64[4, 4]",
    )
    body = step(
        pending("a"),
        reduced("a"),
        *views,
        pending("b"),
        reduced("b"),
        opt=("%new = neg(%a.c) : f64[4, 4]",),
        returns=("new", "b.r"),
    )
    found = bucket(body, SIZE)
    assert [info(node).name for node in found.calls()][2:] == [
        "b.r.bucket.pack",
        "b.r.bucket",
        "b.r.bucket.unpack",
        "a.v",
        "a.c",
        "new",
    ]
    assert not violations(found)


def test_gathers_are_of_one_layer_and_packed_some_gathers_before() -> None:
    program = compiled({**DP, "storage": {"zero": 3, "axes": ["dp"]}}, True)
    gathers = [one for one in program.collectives() if one.kind == "all_gather" and one.phase == "fwd"]
    body, at = program.body, {node: i for i, node in enumerate(program.body.calls())}
    seen = []
    for one in gathers:
        node = body.by_name(one.value)
        inside = members(node).values()
        readers = [user for value in inside for user in value.users if info(user).phase == "fwd"]
        assert len({layer_or_module(info(user).fqn) for user in readers}) <= 1
        if inside:
            (pack,) = operands(node)
            assert pack.target is PACK
            before = seen[-AHEAD] if len(seen) >= AHEAD else node
            assert at[pack] < at[before] <= at[node]
        seen.append(node)
    assert [one.value for one in gathers if one.value.endswith(".bucket")] == [
        "transformer.h.0.ln_1.weight.all_gather.bucket",
        "transformer.h.1.ln_1.weight.all_gather.bucket",
        "transformer.ln_f.weight.all_gather.bucket",
    ]


@pytest.mark.parametrize("change", ["rows", "leads", "shapes", "sizes", "twice"])
def test_a_bucket_that_is_not_unpacked_as_it_was_packed_is_found(change: str) -> None:
    body = bucket(step(pending("a"), reduced("a"), pending("b"), reduced("b"), returns=("a.r", "b.r")), SIZE)
    assert not [line for check in ENSURES["bucket"] for line in check(body)]
    (back,) = (node for node in body.calls() if node.target is UNPACK)
    at = {"leads": 1, "rows": 3, "sizes": 5, "shapes": 6}.get(change)
    if at is None:
        with body.fx.inserting_after(back.args[0]):  # type: ignore[arg-type]
            body.call(torch.ops.aten.neg.default, (back.args[0],), like=back, type=info(back.args[0]).type)  # type: ignore[arg-type]
    else:
        args = list(back.args)
        args[at] = 2 if change == "rows" else [2, *args[at][1:]]  # type: ignore[index,misc]
        back.args = tuple(args)
    assert [line for check in ENSURES["bucket"] for line in check(body)]


# ---------------------------------------------------------------------- what users write and read
@pytest.mark.parametrize(
    ("said", "size", "dumped"),
    [
        (True, SIZE, None),
        (False, 0, "false"),
        ("1 MiB", 2**20, "1 MiB"),
        (4096, 4096, "4 KiB"),
        ({"size": "25MiB"}, SIZE, "25 MiB"),
    ],
)
def test_the_plan_says_how_large(said: object, size: int, dumped: object) -> None:
    plan = shardc.Plan.from_dict({"bucket": said})
    assert plan.bucket_bytes == size
    assert shardc.Plan.parse(plan.dump()).bucket_bytes == size
    assert plan.dump() == ("" if dumped is None else f"bucket: {dumped}\n")


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("much", "'much' is not a number of bytes"),
        ({"megabytes": 3}, "'bucket' has no key 'megabytes'"),
        ([], "should be bytes"),
    ],
)
def test_a_bucket_without_a_size_is_refused(said: object, found: str) -> None:
    with pytest.raises(ShardcError, match=found) as refused:
        shardc.Plan.from_dict({"bucket": said})
    assert refused.value.diagnostics[0].code == "SC208"


def test_a_member_is_explained_by_its_own_line_and_cause() -> None:
    program = compiled(DP, True, layers=1, train=False)
    name = "d.transformer.h.0.mlp.c_fc.mm_1.all_reduce"
    found, alone = explain(program, name), explain(compiled(DP, layers=1, train=False), name)
    assert found.collective == alone.collective
    assert (found.fqn, found.source_text) == (alone.fqn, alone.source_text)
    assert [(t.why, t.needed, t.cause) for t in found.trails] == [(t.why, t.needed, t.cause) for t in alone.trails]
    whole = next(one for one in program.collectives() if one.value.endswith(".bucket"))
    count = len(members(program.body.by_name(whole.value)))
    assert f"bucket:   %{whole.value}, with {count - 1} others: %" in str(found)
    assert whole.cause == alone.collective.cause
    of_all = explain(program, whole.value)
    assert of_all.collective.payload_bytes == found.collective.payload_bytes
    assert alone.bucket == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [3, 1, 0])
def test_members_add_up_to_their_bucket(zero: int) -> None:
    """A budget of bytes, and `explain`, count the same bytes."""
    storage = {"zero": zero, "axes": ["dp"]} if zero else {}
    body = compiled({**DP, "storage": storage}, True, layers=1).body
    buckets = 0
    for one in collectives(body):
        inside = members(body.by_name(one.value)).values()
        if inside:
            buckets += 1
            assert sum(member(body, value).bytes_per_rank for value in inside) == one.bytes_per_rank
    assert buckets


def test_a_pipelines_parts_have_buckets_of_their_own() -> None:
    plan = {"mesh": "pp=2,dp=2", "pipeline": {"microbatches": 2}, "storage": {"zero": 1, "axes": ["dp"]}}
    program = compiled(plan, True)
    assert program.pipelined is not None
    assert program.prove().ok
    packs = [[n for n in finish.update.calls() if n.target is PACK] for finish in program.pipelined.epilogues]
    assert all(packs)
    assert not any(n.target is PACK for n in program.body.calls())
    report = program.verify()
    assert report.ok, str(report)


@pytest.mark.long  # `properties/test_random_training.py` draws buckets under storage of any sizes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [3_000, 20_000])
def test_shards_that_do_not_divide(size: int) -> None:
    """Padded chunks, members cut along other dims than the first, and parameters that travel alone between buckets."""
    torch.manual_seed(0)
    model, batch = gpt2(batch=7, seq=5, layers=2, vocab=61, heads=3, width=33)
    plan = {"inputs": dict.fromkeys(batch, "dp, -"), "storage": {"zero": 3, "axes": ["dp"]}, "bucket": size}
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = shardc.compile(model, batch, mesh="dp=2", plan=plan, optimizer=mine)
    leads = [lead for node in program.body.calls() if node.target is PACK for lead in node.args[1]]  # type: ignore[union-attr]
    assert max(leads) > 1  # type: ignore[type-var]
    report = program.verify()
    assert report.ok, str(report)


@pytest.mark.long  # the case of `test_fewer_collectives_of_the_same_bytes` with kernels is so too
def test_a_pair_of_kernels_names_stay() -> None:
    """Buckets and kernels together: every op that communicates is still there for its members' readers."""
    plain, program = compiled(DP | {"fuse": True}), compiled(DP | {"fuse": True}, True)
    inside = [
        info(v).name for one in collectives(program.body) for v in members(program.body.by_name(one.value)).values()
    ]
    alone = [one.value for one in collectives(program.body) if not one.value.endswith(".bucket")]
    assert sorted([*inside, *alone]) == sorted(one.value for one in collectives(plain.body))
    assert {op_name(node.target) for node in program.body.calls()} >= {"shardc.pack", "shardc.unpack", "shardc.fused"}


# ---------------------------------------------------------------------- by default
def test_what_a_plan_does_not_say_is_true() -> None:
    batch = {"inputs": {"tokens": "dp, -"}}
    unsaid, true, false = (
        shardc.Plan.from_dict({**batch, **said}) for said in ({}, {"bucket": True}, {"bucket": False})
    )
    assert unsaid.bucket_bytes == true.bucket_bytes == SIZE
    assert unsaid.dump() == true.dump() != false.dump()
    assert shardc.Plan.parse("bucket: off\n").bucket_bytes == 0
    assert shardc.Plan.parse(false.dump()).bucket_bytes == false.merge(unsaid).bucket_bytes == 0
    assert false.merge(true).bucket_bytes == SIZE


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.one, self.other = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).relu()
        return self.one(hidden), self.other(hidden)


def loss_of_both(outputs: tuple[Tensor, Tensor], _: object) -> Tensor:
    return sum(x.square().mean() for x in outputs)  # type: ignore[return-value]


ALONE: dict[str, dict[str, Any]] = {
    "train, one rank": {"mesh": "dp=1"},
    "train, tp": {"mesh": "tp=2", "params": {"up.weight": "tp, -", "up.bias": "tp"}},
    "train, stages": {"mesh": "pp=2", "pipeline": {"microbatches": 2}},
    "eval, tp": {"mesh": "tp=2", "params": {"o*.weight": "tp, -", "o*.bias": "tp"}, "outputs": {"**": "-, -"}},
    "eval, dp": {"mesh": "dp=2", "inputs": {"x": "dp, -"}, "outputs": {"**": "-, -"}},
}


@pytest.mark.parametrize("case", ALONE)
def test_nothing_changes_where_no_gradient_is_reduced_and_no_shard_gathered(case: str) -> None:
    mode = case.partition(",")[0]
    by_default, alone = (
        shardc.compile(
            Two(),
            torch.ones(4, 8),
            plan={**ALONE[case], **said},
            mode=mode,
            loss=loss_of_both if mode == "train" else None,
        ).staged
        for said in ({}, {"bucket": False})
    )
    for coordinate in by_default.coordinate_range:
        assert by_default.text(coordinate) == alone.text(coordinate)


def test_activations_that_stages_and_callers_wait_for_travel_alone() -> None:
    """Sequence parallelism gathers, for weights' gradients of their own, what a stage's backward returns."""
    torch.manual_seed(0)
    model, batch = gpt2(batch=4, seq=8, layers=2, vocab=64, heads=4, width=32)
    plan = shardc.Plan.load("shardc:gpt2_sp").merge(shardc.Plan.of(pipeline={"microbatches": 2}))
    program = shardc.compile(model, batch, mesh="pp=2,dp=2,tp=2", plan=plan)
    packs = {name for name, graph in graphs_by_name(program.staged).items() if graph.calls_of(PACK)}
    assert packs == {"reduce0", "reduce1"}
    report = program.verify()
    assert report.ok, str(report)
