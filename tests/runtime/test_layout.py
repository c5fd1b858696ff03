"""Cutting a tensor into shards loses nothing, whatever the atoms, the axes and the sizes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.ir.blocks import Block, Blocks, aligned, truncated, zigzag
from shardc.ir.mesh import Mesh
from shardc.ir.types import Atom, TensorType
from shardc.runtime.execute.layout import assemble, load_shard, replica_spread, shard, shard_slices

MESHES = [Mesh(a=2), Mesh(a=2, b=3), Mesh(a=3, b=2), Mesh(a=2, b=2, c=2), Mesh(a=1, b=4)]


BLOCK = st.builds(Block, st.integers(1, 5), st.integers(1, 2), st.booleans())
WITH_ROOM = st.builds(
    lambda n, room, axis: Block(n, 1, True, axis, n + room), *[st.integers(1, 6)] * 2, st.sampled_from(["", "a"])
)
REVERSED = st.builds(Block, st.integers(1, 9), st.integers(1, 2), reverse=st.sampled_from("abc"))
BLOCKS = st.lists(st.one_of(BLOCK, REVERSED, WITH_ROOM), min_size=1, max_size=3).map(Blocks)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorType, Mesh]:
    """Any mesh, up to three dims of up to three atoms each, some of blocks, every axis put on some atom or on none."""
    mesh = draw(st.sampled_from(MESHES))
    dims = draw(st.lists(st.lists(st.one_of(st.integers(2, 7), BLOCKS), max_size=3), max_size=3))
    count = sum(len(dim) for dim in dims)
    axes: list[list[str]] = [[] for _ in range(count)]
    for axis in draw(st.permutations(mesh.names)):
        at = draw(st.integers(-1, count - 1))
        if at >= 0:
            axes[at].append(axis)
    it = iter(axes)
    placed = tuple(tuple(Atom(size, tuple(next(it))) for size in dim) for dim in dims)
    return TensorType(torch.float64, placed), mesh


def numbered(type: TensorType) -> torch.Tensor:
    return torch.arange(1, math.prod(type.shape) + 1, dtype=type.dtype).reshape(type.shape)


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_assemble_undoes_shard(layout: tuple[TensorType, Mesh]) -> None:
    type, mesh = layout
    whole = numbered(type)
    shards = {rank: shard(whole, type, mesh, rank) for rank in range(mesh.world_size)}
    assert {tuple(x.shape) for x in shards.values()} == {type.local_shape(mesh)}
    assert torch.equal(assemble(shards, type, mesh), whole)
    assert replica_spread(shards, type, mesh) == 0


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_a_shard_loads_block_by_block(layout: tuple[TensorType, Mesh]) -> None:
    type, mesh = layout
    whole = numbered(type)
    for rank in range(mesh.world_size):
        assert torch.equal(load_shard(lambda at: whole[at], type, mesh, rank), shard(whole, type, mesh, rank))


def test_shards_of_a_fused_weight() -> None:
    type = TensorType.parse("f32[2, (3 8@tp 4)]")
    rows, columns = shard_slices(type, Mesh(tp=2), 1)
    assert [run.whole for run in rows] == [slice(0, 2)]
    assert [run.whole for run in columns] == [slice(16, 32), slice(48, 64), slice(80, 96)]
    assert [run.local for run in columns] == [slice(0, 16), slice(16, 32), slice(32, 48)]


def test_shards_of_unequal_blocks() -> None:
    """Heads of queries, keys and values, of which each rank has its share; and the one head that both have."""
    mesh, type = Mesh(tp=2), TensorType.parse("f32[(4|2|-1@tp 4), 2]")
    rows, _ = shard_slices(type, mesh, 1)
    assert [run.whole for run in rows] == [slice(8, 16), slice(20, 24), slice(24, 28)]
    assert [run.local for run in rows] == [slice(0, 8), slice(8, 12), slice(12, 16)]
    shards = {rank: shard(numbered(type), type, mesh, rank) for rank in range(2)}
    assert torch.equal(shards[0][12:], shards[1][12:])
    shards[1][-1] += 1
    assert replica_spread(shards, type, mesh) == 1


@pytest.mark.parametrize(
    ("size", "ranks", "held"),
    [
        (8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (17, 2, [[0, 1, 2, 3, 4, 14, 15, 16, -1], [5, 6, 7, 8, 9, 10, 11, 12, 13]]),
        (9, 4, [[0, 1, -1], [2, 3, -1], [4, 5, -1], [6, 7, 8]]),
    ],
)
def test_a_zigzag_has_chunks_from_both_ends(size: int, ranks: int, held: list[list[int]]) -> None:
    blocks, mesh = zigzag(size, "cp", ranks), Mesh(cp=ranks)
    assert blocks is not None
    type = TensorType(torch.int64, ((Atom(blocks, ("cp",)),),))
    assert TensorType.parse(str(type)) == type
    shards = [shard(torch.arange(1, size + 1), type, mesh, rank) - 1 for rank in range(ranks)]
    assert [x.tolist() for x in shards] == held
    assert type.local_shape(mesh) == (-(-size // ranks),), "no more than without blocks"


def test_of_two_axes_one_reverses() -> None:
    """A sequence in zigzag over cp, each rank's rows of which tp cuts in order."""
    type, mesh = TensorType.parse("i64[8|8~cp@cp.tp]"), Mesh(cp=2, tp=2)
    shards = [shard(torch.arange(16), type, mesh, rank).tolist() for rank in range(4)]
    assert shards == [[0, 1, 12, 13], [2, 3, 14, 15], [4, 5, 8, 9], [6, 7, 10, 11]]


def test_a_split_axis_reverses_as_it_did() -> None:
    type, split = TensorType.parse("i64[8|8~cp@cp]"), Mesh(cp=4).split("cp", (2, 2))
    of_parts = TensorType.parse("i64[8|8~cp@cp:0.cp:1]")
    for rank in range(4):
        held = shard(torch.arange(16), type, Mesh(cp=4), rank)
        assert torch.equal(shard(torch.arange(16), type, split, rank), held)
        assert torch.equal(shard(torch.arange(16), of_parts, split, rank), held)


@pytest.mark.parametrize("of", ["17", "10|7~cp"])
def test_the_first_rows_of_a_sequence_lie_where_they_did(of: str) -> None:
    mesh, whole = Mesh(cp=2), TensorType.parse(f"i64[{of}@cp]")
    part = truncated(whole.atoms[0].size, 15)
    assert part is not None
    assert aligned(part, whole.atoms[0].size)
    type = TensorType(torch.int64, ((Atom(part, ("cp",)),),))
    assert TensorType.parse(str(type)) == type
    for rank in range(2):
        rows = shard(torch.arange(1, 18), whole, mesh, rank)
        assert torch.equal(shard(torch.arange(1, 16), type, mesh, rank), rows.where(rows <= 15, 0))


def test_a_dim_too_short_has_no_zigzag() -> None:
    assert zigzag(7, "cp", 4) is None


def test_nested_uneven_gathers_to_the_layout_of_the_major_axis() -> None:
    """5 over (a=2, b=2): a cuts 3 and 2, b cuts each in chunks of 2; the last rank holds padding alone."""
    mesh = Mesh(a=2, b=2)
    whole = torch.arange(1, 6)
    nested = [shard(whole, TensorType.parse("i64[5@a.b]"), mesh, rank).tolist() for rank in range(4)]
    assert nested == [[1, 2], [3, 0], [4, 5], [0, 0]]


def test_a_rank_of_padding_alone() -> None:
    mesh = Mesh(tp=4)
    type = TensorType.parse("i64[5@tp]")
    shards = {rank: shard(torch.arange(1, 6), type, mesh, rank) for rank in range(4)}
    assert [x.tolist() for x in shards.values()] == [[1, 2], [3, 4], [5, 0], [0, 0]]
    shards[3] += 7  # padding holds anything
    assert assemble(shards, type, mesh).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("kind", "expected"), [("sum", [4.0, 6.0]), ("max", [3.0, 4.0]), ("min", [1.0, 2.0])])
def test_pending_reductions_are_resolved(kind: str, expected: list[float]) -> None:
    mesh = Mesh(dp=2, tp=2)
    type = TensorType.parse(f"f64[2@dp] |{kind} tp")
    shards = {0: torch.tensor([1.0]), 1: torch.tensor([3.0]), 2: torch.tensor([2.0]), 3: torch.tensor([4.0])}
    assert assemble(shards, type, mesh).tolist() == expected
    assert replica_spread(shards, type, mesh) == 0


def test_replicas_that_disagree() -> None:
    type = TensorType.parse("f64[2@dp]")
    shards = {0: torch.tensor([1.0]), 1: torch.tensor([1.5]), 2: torch.tensor([2.0]), 3: torch.tensor([2.0])}
    assert replica_spread(shards, type, Mesh(dp=2, tp=2)) == 0.5
