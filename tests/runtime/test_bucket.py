"""A bucket's flat tensor: members are made in it, what is copied is known, and the memory report says what is there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardc
from benchmarks.gpt import Shape
from examples.gpt2 import gpt2
from shardc.cost.memory import memory
from shardc.ir.buckets import is_summed, layout_of, pieces
from shardc.ir.graph import Graph, info, op_name, operands, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS, ACCUMULATE_WGRAD
from shardc.ir.ops.buckets import PACK, UNPACK, unpack
from shardc.ir.ops.collectives import Exchange, all_gather
from shardc.ir.ops.context import running
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.ir.overlap_schedule import schedule_overlap
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.prepared_code import Routine
from tests.replanned import replanned

KERNELS = {"mm", "shardc.fused", "shardc.layer_norm_backward"}


class Alone:
    """A communicator of one rank that gets what it gives, in tensors of the size that the others would send."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def begin(self, exchange: Exchange) -> Any:
        x, count = exchange.x, self.mesh.size(exchange.axes)
        match exchange.kind:
            case "all_reduce":
                result = x if exchange.spent else x.clone()
            case "all_gather":
                result = torch.stack([x] * count)
            case _:
                result = x[0].clone()
        return lambda: result


BODIES: dict[str, Graph] = {}
PROGRAMS: dict[str, shardc.Program] = {}


def body_of(bucket: object = True, fuse: object = False, storage: object = None, **plan: Any) -> Graph:
    """Compiled once for all tests, none of which changes it; traced once for all buckets, with `fuse` or without."""
    plan |= {"storage": storage} if storage else {}
    traced, said = str(sorted(plan.items())), {"bucket": bucket, "fuse": fuse}
    key = f"{said} {traced}"
    if key not in BODIES:
        known = PROGRAMS.get(traced)
        program = replanned(known, **said) if known else compiled({**plan, **said})
        PROGRAMS.setdefault(traced, program)
        BODIES[key] = program.body
    return BODIES[key]


def compiled(plan: dict[str, Any]) -> shardc.Program:
    torch.manual_seed(0)
    model, batch = gpt2(batch=4, seq=8, layers=2, vocab=64, heads=4, width=32)
    wanted = {"inputs": dict.fromkeys(batch, "dp, -"), **plan}
    if wanted.pop("linears", False):
        model = Shape("linears", layers=2, width=32, heads=4, seq=8, vocab=64, batch=4).model(torch.float32)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return shardc.compile(model, batch, mesh="dp=2", plan=wanted, optimizer=mine)


def routine(body: Graph) -> Routine:
    return Routine(body, rank_context(body.mesh, 0, Alone(body.mesh)), 0, torch.device("cpu"))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- pack and unpack
@st.composite
def members(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
    size = st.integers(1, 5)
    shapes = draw(st.lists(st.lists(size, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4))
    return draw(st.integers(1, 4)), [(shape, draw(st.integers(0, len(shape) - 1))) for shape in shapes]


def laid(shape: tuple[int, ...], pos: int) -> tuple[int, int]:
    return int(torch.Size(shape[:pos]).numel()), shape[pos]


def shaped(shapes: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    return [n for shape in shapes for n in shape], [len(shape) for shape in shapes]


@given(members())
@settings(max_examples=80, deadline=None)
def test_what_is_scattered_and_gathered_in_a_bucket_is_as_it_is_alone(
    case: tuple[int, list[tuple[tuple[int, ...], int]]],
) -> None:
    """Each tensor is cut along a dim of its own, into padded chunks, one a rank; then put together again."""
    group, wanted = case
    xs = [torch.randn(shape) for shape, _ in wanted]
    leads, mids = (list(column) for column in zip(*(laid(*one) for one in wanted), strict=True))
    rows = PACK(xs, leads, mids, group, 4).view(group, -1)
    chunks = [-(-mid // group) for mid in mids]
    parts = [tuple(c if i == pos else n for i, n in enumerate(s)) for (s, pos), c in zip(wanted, chunks, strict=True)]
    own: list[list[Tensor]] = []
    for rank in range(group):
        row = rows[rank].clone()
        got = UNPACK(row, leads, chunks, 1, 4, chunks, *shaped(parts))
        for x, (shape, pos), chunk, part, y in zip(xs, wanted, chunks, parts, got, strict=True):
            start = min(rank * chunk, shape[pos])
            there = x.narrow(pos, start, min(chunk, shape[pos] - start))
            assert y.shape == part
            assert torch.equal(y.narrow(pos, 0, there.shape[pos]), there)
            assert not y.narrow(pos, there.shape[pos], chunk - there.shape[pos]).any()
        assert all(
            (y.untyped_storage() is not row.untyped_storage()) <= (lead > 1) for y, lead in zip(got, leads, strict=True)
        )
        own.append(got)
    flat = torch.cat([PACK(mine, leads, chunks, 1, 4) for mine in own])
    whole = UNPACK(flat, leads, chunks, group, 4, mids, *shaped([shape for shape, _ in wanted]))
    assert all(torch.equal(x, y) for x, y in zip(xs, whole, strict=True))


# ---------------------------------------------------------------------- the flat tensor
def run(body: Graph) -> tuple[list[int], list[Any]]:
    """Bytes that a rank holds besides its inputs after each entry of the code, before it lets go of anything."""
    made = routine(body)
    env = made.empty.copy()
    inputs = [torch.ones(type_of(n).local_shape(body.mesh), dtype=type_of(n).dtype) for n in body.placeholders]
    for slot, value in zip(made.listing.inputs, inputs, strict=True):
        env[slot] = value
    made.held_views.fill(env)
    held = {value.untyped_storage().data_ptr() for value in inputs}
    found: list[int] = []
    with torch.no_grad(), running(rank_context(body.mesh, 0, Alone(body.mesh))):  # type: ignore[arg-type]
        for _, call, arguments, into, free in made.code():
            args, kwargs = arguments(env)
            result = call(*args, **kwargs)
            for position, slot in ((None, into),) if isinstance(into, int) else into:
                env[slot] = result if position is None else result[position]
            there = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in env if isinstance(x, Tensor)}
            found.append(sum(size for home, size in there.items() if home not in held))
            for slot in free:
                env[slot] = None
    return found, env


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fuse", [False, True])
def test_the_report_says_what_is_there(fuse: bool) -> None:
    """To the byte at the peak, which lies where one bucket holds all gradients."""
    body = body_of(fuse=fuse)
    report = memory(body)
    assert max(run(body)[0]) == report.peak - report.stored
    gc.collect()


@pytest.mark.parametrize("fuse", [False, True])
def test_members_are_made_in_their_places(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products' and sums' gradients, and all of kernels': with `fuse` nothing is copied into a bucket. Without it those
    are that torch's backward of a norm makes, which is not told where to write."""
    body = body_of(fuse=fuse)
    (pack,) = (node for node in body.calls() if node.target is PACK)
    made, layout = pieces(body), layout_of(body, pack)
    assert layout is not None
    copied = [x for x in operands(pack) if x not in made]
    assert {op_name(producer(x)[0].target) for x in copied} == (set() if fuse else {"native_layer_norm_backward"})
    assert len(copied) == (0 if fuse else 10)  # of 27: two of each of five norms
    assert {op_name(producer(x)[0].target) for x in made} >= (KERNELS if fuse else {"mm", "sum.dim_IntList"})
    seen: list[int] = []

    def copy_all(into: list[Tensor], given: list[Tensor]) -> None:
        if given and not given[0].is_meta:  # nor asked for its strides
            seen.append(len(given))

    monkeypatch.setattr("shardc.ir.ops.buckets.copy_all", copy_all)
    run(body)
    assert seen == ([len(copied)] if copied else [])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "plan",
    [{}, {"fuse": True}, {"storage": {"zero": 3, "axes": ["dp"]}}, {"linears": True, "precision": "bf16"}],
    ids=str,
)
def test_a_rank_alone_computes_what_it_does_without_buckets(plan: dict[str, Any]) -> None:
    """To the bit: every new parameter and all state."""
    found: list[dict[str, Tensor]] = []
    for bucket in (False, 40_000):
        body = body_of(bucket, **plan)
        _, env = run(body)
        slots = routine(body).listing.outputs
        found.append({f"{p.role} {p.name}": env[slot] for p, slot in zip(body.outputs, slots, strict=True)})
    plain, bucketed = found
    if plan.get("linears"):
        products = [x for x in pieces(body_of(40_000, **{**plan, "precision": None})) if x.target is LINEAR_WGRAD]
        assert len(products) == 8  # of each layer's four
    assert plain.keys() == bucketed.keys()
    assert [name for name, x in plain.items() if not torch.equal(x, bucketed[name])] == []


def test_sums_of_microbatches_are_kept_in_the_bucket() -> None:
    body = body_of(accumulate=2)
    (pack,) = (node for node in body.calls() if node.target is PACK and not is_summed(node))
    made = pieces(body)
    makers = {producer(x)[0] for x in operands(pack)}
    assert {node.target for node in makers} == {ACCUMULATE_WGRAD, ACCUMULATE_ROWS, ACCUMULATE_MORE_ROWS, UNPACK}
    assert sum(node.target is UNPACK for node in makers) == 1  # of small sums, which are copied there once a step
    assert [info(x).name for x in operands(pack) if x not in made] == []


def test_buckets_of_parameters_are_gathered_before_they_are_read() -> None:
    """Their shards are packed so early that other calls run beside them."""
    instructions = routine(body_of(storage={"zero": 3, "axes": ["dp"]})).listing.instructions
    actions = schedule_overlap(instructions, 0, len(instructions))
    begun = {action.at: i for i, action in enumerate(actions) if action.kind == "begin"}
    waited = {action.at: i for i, action in enumerate(actions) if action.kind == "wait"}
    gathers = [at for at, one in enumerate(instructions) if one.target is all_gather and bucketed(one.node)]
    assert len(gathers) >= 5
    beside = [sum(1 for a in actions[begun[at] : waited[at]] if a.kind == "run") for at in gathers]
    assert sorted(beside)[1] > 5  # all but one, at the beginning of backward


def bucketed(moved: Any) -> bool:
    return operands(moved)[0].target is PACK


@pytest.mark.sampled(2)
@pytest.mark.parametrize("storage", [{}, {"zero": 3, "axes": ["dp"]}], ids=["dp", "zero-3"])
def test_a_step_is_fewer_calls(storage: dict[str, Any]) -> None:
    """Python's part of a step: what it calls, begins and waits for."""
    before, after = (len(routine(body_of(bucket, storage=storage, fuse=True)).code()) for bucket in (False, True))
    assert after < 0.8 * before


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from((1, 4)),
)
def test_what_is_packed_is_unpacked(members: list[tuple[int, int, int, bool]], rows: int, unit: int) -> None:
    """Of any sizes, by the words of `ops.buckets`: in rows, with padding, and into memory that is given for a member.
    Members of several rows have memory of their own, without gaps."""
    xs = [torch.arange(1.0, lead * mid * tail + 1).view(lead, mid, tail) for lead, mid, tail, _ in members]
    xs = [
        x.transpose(0, 2).contiguous().transpose(0, 2) if turned else x
        for x, (*_, turned) in zip(xs, members, strict=True)
    ]
    leads, mids = [lead for lead, *_ in members], [mid for _, mid, *_ in members]
    chunks = [-(-mid // rows) for mid in mids]
    flat = PACK(xs, leads, mids, rows, unit)
    for row in range(rows):
        start = 0
        for x, chunk in zip(xs, chunks, strict=True):
            part = x[:, row * chunk : (row + 1) * chunk].movedim(1, 0)
            width = chunk * x.shape[0] * x.shape[2]
            member = flat.view(rows, -1)[row, start : start + width]
            whole = member.view(chunk, x.shape[0], x.shape[2])
            assert whole[: part.shape[0]].equal(part)
            assert not whole[part.shape[0] :].any()
            start += -(-width // unit) * unit
            assert not flat.view(rows, -1)[row, start - (-width % unit) : start].any()
        assert start == flat.numel() // rows
    shapes, ranks = [n for x in xs for n in x.shape], [3] * len(xs)
    over = {index: torch.zeros_like(x) for index, x in enumerate(xs) if members[index][3]}
    for given_places in ({}, over):
        results = unpack(flat, leads, chunks if rows > 1 else mids, rows, unit, mids, shapes, ranks, given_places)
        for index, (x, y) in enumerate(zip(xs, results, strict=True)):
            assert y.equal(x)
            assert y is given_places.get(index, y)
            if rows > 1 and index not in given_places:
                assert y.is_contiguous()
                assert y.untyped_storage().nbytes() == x.numel() * 4
                assert y.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
