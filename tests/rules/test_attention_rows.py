"""Attention of a rank's rows against attention of all: layouts, rings, padding that is NaN, and what is computed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardc.ir.blocks import Blocks, zigzag
from shardc.ir.mesh import Mesh
from shardc.ir.ops import attention, attention_rows
from shardc.ir.ops.attention_rows import (
    ALL_KEYS,
    SDPA_ROWS,
    SDPA_ROWS_BWD,
    forms_of_tiles,
    layout,
    tiles_at,
    tiles_of_ranks,
)
from shardc.ir.ops.attention_tiles import Kernels, Tile, square, tiles
from shardc.ir.ops.context import Communicator, RankContext, running
from shardc.ir.ops.local import Run

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """Operands of a call, and how its rows lie over the ranks of a mesh, along all its axes."""

    mesh: Mesh
    rows: str
    causal: bool
    mask: str  # "", "rows", "one row", "no keys"
    heads: tuple[int, int] = (4, 2)

    @property
    def length(self) -> int:
        return int(Blocks.parse(self.rows))

    @property
    def axes(self) -> list[str]:
        return list(self.mesh.names)

    def operands(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        (many, few), n = self.heads, self.length
        shapes = [(2, many, n, 5), (2, many, n, 3), (2, few, n, 3), (2, few, n, 5)]
        g, q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return g, q, k, v

    def masked(self) -> Tensor | None:
        if not self.mask:
            return None
        generator, n = torch.Generator().manual_seed(1), self.length
        mask = torch.rand((2, 1, 1 if self.mask == "one row" else n, n), generator=generator) < 0.6
        if self.mask == "no keys":
            mask[:, :, : n // 2] = False
        return mask

    def at(self, rank: int) -> RankContext:
        return RankContext(self.mesh, self.mesh.coordinate(rank), cast(Communicator, None))

    def take(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part of a dim of rows; its padding is NaN, or true."""
        blocks, there = Blocks.parse(self.rows), self.mesh.coordinate(rank)
        shape = list(x.shape)
        shape[dim] = int(blocks.local(self.axes, self.mesh))
        part = torch.ones(shape, dtype=torch.bool) if x.dtype == torch.bool else x.new_full(shape, float("nan"))
        for run in layout(self.rows, self.axes, self.mesh, there):
            part.narrow(dim, run.local, run.extent).copy_(x.narrow(dim, run.start, run.extent))
        return part

    def padding(self, rank: int) -> Tensor:
        """Where a rank stores no row."""
        where = torch.ones(int(Blocks.parse(self.rows).local(self.axes, self.mesh)), dtype=torch.bool)
        for run in layout(self.rows, self.axes, self.mesh, self.mesh.coordinate(rank)):
            where[run.local : run.local + run.extent] = False
        return where

    def assembled(self, parts: list[Tensor], dim: int) -> Tensor:
        """The whole of what ranks have; AssertionError if padding is not 0."""
        shape = list(parts[0].shape)
        shape[dim] = self.length
        whole = parts[0].new_full(shape, float("nan"))
        for rank, part in enumerate(parts):
            for run in layout(self.rows, self.axes, self.mesh, self.mesh.coordinate(rank)):
                whole.narrow(dim, run.start, run.extent).copy_(part.narrow(dim, run.local, run.extent))
            padding = self.padding(rank).nonzero()[:, 0]
            assert not part.index_select(dim, padding).count_nonzero(), f"padding of rank {rank}"
        return whole


def all_keys(case: Case) -> tuple[list[Any], list[Any]]:
    """Forward and backward of each rank, with all keys."""
    g, q, k, v = case.operands()
    mask = case.masked()
    told = (case.rows, case.axes, ALL_KEYS, True)
    forward: list[Any] = []
    backward: list[Any] = []
    for rank in range(case.mesh.world_size):
        own = mask if mask is None or mask.shape[-2] == 1 else case.take(mask, rank, -2)
        queries, gradient = case.take(q, rank, -2), case.take(g, rank, -2)
        with running(case.at(rank)):
            o, lse = SDPA_ROWS(queries, k, v, own, None, None, case.causal, None, True, *told)
            poisoned = o.clone()
            poisoned[:, :, case.padding(rank)] = float("nan")
            forward.append((o, lse))
            grads = SDPA_ROWS_BWD(
                gradient,
                queries,
                k,
                v,
                own,
                poisoned,
                lse,
                None,
                None,
                None,
                None,
                case.causal,
                None,
                True,
                False,
                *told,
            )
            backward.append(grads)
    return forward, backward


def ring(case: Case) -> tuple[list[Any], list[Any]]:
    """The same, where keys and their gradients travel."""
    g, q, k, v = case.operands()
    mask, size = case.masked(), case.mesh.world_size
    parts = [[case.take(t, rank, -2) for t in (q, k, v, g)] for rank in range(size)]
    masks = [mask if mask is None or mask.shape[-2] == 1 else case.take(mask, rank, -2) for rank in range(size)]
    forward: list[Any] = [(None, None)] * size
    for step in range(size):
        for rank in range(size):
            _, keys, values, _ = parts[(rank - step) % size]
            with running(case.at(rank)):
                forward[rank] = SDPA_ROWS(
                    parts[rank][0], keys, values, masks[rank], *forward[rank],
                    case.causal, None, True, case.rows, case.axes, step, step == size - 1,
                )  # fmt: skip
    backward: list[Any] = [(None, None, None)] * size
    for step in (*range(1, size), 0):
        came = [(backward[r][0], *backward[(r - 1) % size][1:3]) for r in range(size)] if step != 1 else backward
        backward = list(backward)
        for rank in range(size):
            _, keys, values, _ = parts[(rank - step) % size]
            with running(case.at(rank)):
                backward[rank] = SDPA_ROWS_BWD(
                    parts[rank][3], parts[rank][0], keys, values, masks[rank], *forward[rank], *came[rank], None,
                    case.causal, None, True, False, case.rows, case.axes, step, step == 0,
                )  # fmt: skip
    return forward, backward


def agree(case: Case) -> None:
    """Both ways give what the whole call gives, and keep padding out of it."""
    g, q, k, v = case.operands()
    mask = case.masked()
    o, lse = attention.reference(q, k, v, mask, case.causal, None, True)
    dq, dk, dv, _ = attention.reference_backward(g, q, k, v, mask, o, lse, case.causal, None, True, False)
    for way, keys_whole in ((all_keys, True), (ring, False)):
        forward, backward = way(case)
        torch.testing.assert_close(case.assembled([part[0] for part in forward], -2), o, rtol=0, atol=TOLERANCE)
        for got, want, whole in zip(
            zip(*backward, strict=True), (dq, dk, dv), (False, *[keys_whole] * 2), strict=False
        ):
            total = sum(got[1:], got[0]) if whole else case.assembled(list(got), -2)
            torch.testing.assert_close(total, want, rtol=0, atol=TOLERANCE)


MESHES = (Mesh(cp=2), Mesh(cp=4), Mesh(a=2, b=2), Mesh(cp=3))


@given(st.data())
def test_ranks_together_compute_all_of_it(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    n = data.draw(st.integers(mesh.world_size + 1, 21))
    balanced = zigzag(n, "cp", mesh.world_size) if mesh.names == ("cp",) and data.draw(st.booleans()) else None
    case = Case(
        mesh,
        str(n if balanced is None else balanced),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(("", "rows", "one row", "no keys"))),
        data.draw(st.sampled_from(((4, 2), (2, 2), (3, 1)))),
    )
    agree(case)


@pytest.mark.parametrize(("n", "ranks"), [(17, 2), (50, 4), (5, 4), (8, 4)])
@pytest.mark.parametrize("balance", [False, True])
def test_lengths_that_do_not_divide(n: int, ranks: int, balance: bool) -> None:
    rows = zigzag(n, "cp", ranks) if balance else n
    agree(Case(Mesh(cp=ranks), str(n if rows is None else rows), True, ""))


def computed(rows: str, mesh: Mesh, rank: int, step: int) -> float:
    todo, _ = tiles_at(rows, mesh.names, step, True, mesh, mesh.coordinate(rank))
    return sum(t.rows * t.keys - (t.rows * t.rows / 2 if t.diagonal else 0) for t in todo)


def test_what_is_in_the_future_is_not_computed() -> None:
    """Ranks together do half of the square, by gathering and by a ring; a zigzag gives each the same in every step."""
    n, mesh = 256, Mesh(cp=4)
    for rows in (str(n), str(zigzag(n, "cp", 4))):
        gathered = [computed(rows, mesh, rank, ALL_KEYS) for rank in range(4)]
        steps = [[computed(rows, mesh, rank, step) for rank in range(4)] for step in range(4)]
        assert sum(gathered) == n * n / 2
        assert [sum(of_rank) for of_rank in zip(*steps, strict=True)] == gathered
        if rows != str(n):
            assert all(len({*step}) == 1 for step in steps)


@pytest.mark.parametrize("window", [(), (-20, 0)])
@pytest.mark.parametrize("axes", [("cp",), ("cp", "tp"), ("tp", "cp")])
@pytest.mark.parametrize(("rows", "keys"), [("250", ""), (str(zigzag(256, "cp", 4)), ""), ("256", "128")])
def test_tiles_of_all_ranks(rows: str, keys: str, axes: tuple[str, ...], window: tuple[int, ...]) -> None:
    """Each rank's are those that it computes; their forms are the same ones, each once, wherever they lie."""
    mesh = Mesh(dp=2, cp=4, tp=2)
    many = 0
    for step in (ALL_KEYS, *range(mesh.size(axes))):
        places = [mesh.coordinate(rank) for rank in mesh.group_of(0, axes)]
        expected = [tiles_at(rows, axes, step, True, mesh, place, window, keys)[0] for place in places]
        told = (rows, axes, step, True, mesh, window, keys)
        assert list(tiles_of_ranks(*told)) == expected
        forms = forms_of_tiles(*told)
        moved = [[tile._replace(row=0, key=0) for tile in of_rank] for of_rank in expected]
        assert [*dict.fromkeys(map(tuple, moved))] == list(forms)
        many += len(expected) - len(forms)
    assert many > 0


def test_a_zigzag_is_one_tile_a_run_or_one_for_both() -> None:
    """Of a rank's own keys, those before a run lie side by side with it, so one kernel computes both; and where runs
    see the same keys, or the second one sees those of the first and itself, one kernel computes both runs."""
    mesh, rows = Mesh(cp=4), str(zigzag(256, "cp", 4))
    for rank in range(4):
        gathered, *ring = (
            tiles_at(rows, ["cp"], step, True, mesh, mesh.coordinate(rank))[0] for step in (ALL_KEYS, 0, 1, 2, 3)
        )
        if rank < 3:
            assert gathered == [Tile(0, 32, 0, 32 * rank + 32, True), Tile(32, 32, 0, 256 - 32 * rank, True)]
        else:
            assert gathered == [Tile(0, 64, 0, 160, True)]
        own, *others = ring
        assert own == [Tile(0, 64, 0, 64, True)]
        for step, todo in enumerate(others, start=1):
            assert todo == ([Tile(0, 64, 0, 32, False)] if step <= rank else [Tile(32, 32, 0, 64, False)])


def test_rows_of_one_tile_each_are_joined_only_where_that_is_the_same() -> None:
    """Against the mask that says which key a row sees, for runs of rows and keys that lie anywhere."""
    pieces = [Run(0, 1, 0), Run(1, 3, 1), Run(4, 4, 4), Run(9, 2, 8)]
    layouts = [[*some] for count in (1, 2, 3) for some in itertools.combinations(pieces, count)]
    for rows, keys, causal in itertools.product(layouts, layouts, (False, True)):
        seen = torch.zeros(12, 12, dtype=torch.int64)
        for row, key in itertools.product(rows, keys):
            for i, j in itertools.product(range(row.extent), range(key.extent)):
                seen[row.local + i, key.local + j] += key.start + j <= row.start + i if causal else 1
        for todo in (tiles(rows, keys, causal), square(tiles(rows, keys, causal))):
            done = torch.zeros_like(seen)
            for tile in todo:
                part = torch.ones(tile.rows, tile.keys, dtype=torch.int64)
                part = part.tril(tile.keys - tile.rows) if tile.diagonal else part
                done[tile.row : tile.row + tile.rows, tile.key : tile.key + tile.keys] += part
            assert torch.equal(done, seen), (rows, keys, causal, todo)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_squares_give_what_tiles_give(balance: bool, masked: bool, dtype: torch.dtype) -> None:
    rows = str(zigzag(48, "cp", 4)) if balance else "48"
    case = Case(Mesh(cp=4), rows, True, "rows" if masked else "")
    cut = Kernels(attention.reference, attention.reference_backward, lambda q, k, mask, todo: square(todo))
    g, q, k, v = (t.to(dtype) for t in case.operands())
    mask = case.masked()
    tolerance = TOLERANCE if dtype == torch.float64 else 2e-2
    for rank in range(4):
        of_rank = [case.take(t, rank, -2) for t in (g, q)]
        its_mask = None if mask is None else case.take(mask, rank, -2)
        told = (rows, ["cp"], ALL_KEYS, True)
        found: list[tuple[Tensor, ...]] = []
        for kernels in (attention.REFERENCE, cut):
            with running(case.at(rank)):
                o, lse = attention_rows._sdpa_rows(
                    kernels, of_rank[1], k, v, its_mask, None, None, True, None, True, *told
                )
                grads = attention_rows._sdpa_rows_bwd(
                    kernels, *of_rank, k, v, its_mask, o, lse, *[None] * 4, True, None, True, False, *told
                )
            found.append((o, lse, *grads[:3]))
        for plain, in_squares in zip(*found, strict=True):
            assert plain.dtype == in_squares.dtype
            assert torch.allclose(plain, in_squares, atol=tolerance, rtol=tolerance)


def test_halves_of_a_result_merge_in_float32() -> None:
    """Of a ring in bfloat16 each part is rounded once and the result once: twice as much as one call."""
    case = Case(Mesh(cp=4), "64", True, "")
    _, q, k, v = (t.bfloat16() for t in case.operands())
    truth, _ = attention.reference(q.double(), k.double(), v.double(), None, True, None, True)
    whole, _ = attention.reference(q, k, v, None, True, None, True)
    results: list[Tensor] = []
    for rank in range(4):
        o: Tensor | None = None
        lse: Tensor | None = None
        for step in range(4):
            keys, values = (case.take(t, (rank - step) % 4, -2) for t in (k, v))
            with running(case.at(rank)):
                o, lse = SDPA_ROWS(
                    case.take(q, rank, -2), keys, values, None, o, lse, True, None, True, "64", ["cp"], step, step == 3
                )
        assert o is not None
        assert o.dtype == torch.bfloat16
        results.append(o)
    error = (case.assembled(results, -2).double() - truth).abs().max()
    assert error <= 2 * (whole.double() - truth).abs().max()
