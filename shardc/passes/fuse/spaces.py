"""The space that a kernel runs over, and where in it each value lies.

Shapes change by views from call to call, and what stays is the order of elements. So a call runs over so many elements
in order, and reads an operand by *blocks* of that order, (size, stride) from major to minor:

    x f32[8, 16, 64]               (8192, 1)               all of it, in order
    x * w    w f32[64]             (128, 0) (64, 1)        the same for each of 128 rows
    x * r    r f32[8, 16, 1]       (128, 1) (64, 0)        one for each row
    x + p    p f32[16, 64]         (8, 0) (1024, 1)
    q.transpose(1, 2)              (8, 1024) (4, 16) (16, 64) (16, 1)

Where blocks end, a dim of the space must end, and a reduction says what the columns are: the last dim. Calls agree on a
space if all their edges divide one another. A value made in the kernel has one walk through the space, and every call
there must read it so. A sum over some of the dims says where in the result each element goes, by blocks too:

    sum(x, (0, 2, 3))   x f32[8, 64, 32, 32]      (8, 0) (64, 1) (1024, 0)       64 are the batch dims of the kernel
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

Shape = tuple[int, ...]
Value = Hashable  # a value of the graph, or one that only a kernel knows
Blocks = tuple[tuple[int, int], ...]
Strides = tuple[int, ...]
Over = Literal["point", "row", "col", "all"]
MOST_DIMS = 6
WIDEST = 4096  # columns that a sum over all elements is cut into
NO_EDGES = frozenset[int]()
NOWHERE = (-1,)  # of what is stored in parts: nothing in the kernel reads it


class Read(NamedTuple):
    """An operand: elements of a value's memory, for the elements of the call in order."""

    value: Value
    blocks: Blocks
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Prim:
    """One operation of a kernel on `size` elements. `over` says what it reduces: its columns, its rows, or all, which
    is all that comes to one place of the result."""

    out: Value
    op: str
    args: tuple[object, ...]  # Reads, and constants
    size: int
    dtype: torch.dtype
    over: Over = "point"
    cols: int = 0  # of a reduction over rows or columns
    seed: int = 0  # of `uniform`: the id of its op; of `cat`: how far its parts are apart
    index: Blocks = ()  # of each element: the number that `iota` is, the global one of `uniform`, its place in a result

    reads: tuple[Read, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple([arg for arg in self.args if isinstance(arg, Read)]))


class Space(NamedTuple):
    """The dims, `batch` of them first, the last one the columns; and the strides along them of each value made there,
    and of its call."""

    dims: Shape
    walks: Mapping[Value, Strides]
    runs: Mapping[Value, Strides]
    batch: int = 0


class Demand(NamedTuple):
    """What calls ask of a space: its elements, where dims end (counted from the minor side), its columns or any."""

    size: int
    edges: frozenset[int] = frozenset()
    cols: int = 0

    def with_(self, other: Demand) -> Demand | None:
        """What both ask; None if no space has it. A smaller one runs over a part of the dims: see `space`."""
        if self.size != other.size:
            large, small = (self, other) if self.size > other.size else (other, self)
            return large if not small.cols else None
        if self.cols == other.cols and self.edges == other.edges:
            return self
        if self.cols and other.cols and self.cols != other.cols:
            return None
        found = Demand(self.size, self.edges | other.edges, self.cols or other.cols)
        return found if found.possible else None

    @property
    def possible(self) -> bool:
        return _possible(self)

    @property
    def dims(self) -> Shape:
        edges = sorted({*self.edges, self.cols or 1} - {1, self.size})
        inner = [1, *(edges if edges else ()), self.size]
        sizes = [large // small for small, large in pairwise(inner)]
        if self.cols == self.size > 1 or not sizes:
            return (1, self.size)
        if self.cols == 1:
            return (*reversed(sizes), 1)
        return tuple(reversed(sizes))


@lru_cache(maxsize=65536)
def _possible(wanted: Demand) -> bool:
    edges = sorted({1, *wanted.edges, wanted.cols or 1, wanted.size})
    if wanted.cols and any(edge < wanted.cols for edge in wanted.edges):
        return False
    return len(edges) <= MOST_DIMS + 1 and all(large % small == 0 for small, large in pairwise(edges))


@lru_cache(maxsize=65536)
def blocks(shape: Shape, strides: Strides) -> Blocks:
    """The elements of a strided tensor in order, neighbours joined where they can be."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found) or ((1, 0),)


@lru_cache(maxsize=65536)
def edges(read: Blocks) -> frozenset[int]:
    """Where blocks end, counted from the minor side; not those at the ends."""
    ends = [math.prod(size for size, _ in read[at:]) for at in range(1, len(read))]
    return frozenset(ends)


def _carried(read: Blocks, inner: frozenset[int]) -> frozenset[int]:
    """Edges of a value, where a read of it has them."""
    found: set[int] = set()
    size = 1
    for count, stride in reversed(read):
        found.update(size * (edge // stride) for edge in inner if stride and stride < edge < stride * count)
        size *= count
    return frozenset(found)


@lru_cache(maxsize=65536)
def whole(size: int) -> Blocks:
    return ((size, 1),) if size > 1 else ((1, 0),)


def demand(prims: Iterable[Prim]) -> Demand | None:
    """Of several calls together; None where no space suits them."""
    found = Demand(1)
    inside: dict[Value, frozenset[int]] = {}  # the edges of what a larger call reads
    for prim in prims:
        at = edges(prim.index) if len(prim.index) > 1 else NO_EDGES
        for read in prim.reads:
            if len(read.blocks) > 1:
                at |= edges(read.blocks)
            if inner := inside.get(read.value):
                at |= _carried(read.blocks, inner)
        if prim.over == "point" and at:
            inside[prim.out] = at
        own = Demand(prim.size, at, prim.cols)
        if own == found:  # as most are
            continue
        joined = found.with_(own) if own.possible else None
        if joined is None:
            return None
        found = joined
    return found


def space(prims: Sequence[Prim], wanted: Demand) -> Space | None:
    """Where every value lies, if all who read one agree; None if they do not, or sums over rows come too late."""
    dims = _cut(prims, wanted).dims
    all_of_it = contiguous(dims)
    every = whole(wanted.size)

    smaller = {prim.out for prim in prims if prim.size != wanted.size}
    needs: dict[Value, Strides] = {}  # of those, how their readers read them
    for prim in reversed(prims) if smaller else ():
        own = all_of_it if prim.size == wanted.size else needs.get(prim.out)
        if own is None and prim.size == 1:
            own = (0,) * len(dims)
        if own is not None and prim.over != "all":
            for read in prim.reads:
                if read.value in smaller and (walk := along(read.blocks, dims, own)) is not None:
                    needs.setdefault(read.value, walk)
    walks: dict[Value, Strides] = {}
    runs: dict[Value, Strides] = {}
    late: set[Value] = set()
    summed: set[Value] = set()  # of those, what comes of a sum over rows
    reduced: set[Value] = set()  # what comes of a reduction of a row, and of no sum over rows
    batch: frozenset[int] | None = None  # the row dims that sums over rows leave, all of them the same ones
    for prim in prims:
        own = all_of_it if prim.size == wanted.size else _iteration(prim, wanted, dims, walks, needs)
        if own is None:
            return None
        from_sums = False
        for read in prim.reads:
            inorder = own is all_of_it and read.blocks == every  # as most are
            walk = own if inorder else along(read.blocks, dims, own)
            if walk is None or (read.offset and read.value in walks):
                return None
            if read.value in walks and walks[read.value] != walk:
                return None
            from_sums |= read.value in late
        made = _result(prim, dims, own)
        if made is None or (prim.index and along(prim.index, dims, own) is None):
            return None
        if from_sums:
            touched = [made, *(along(r.blocks, dims, own) or () for r in prim.reads)]
            if prim.over != "point" or any(_rows_of(walk) - (batch or frozenset()) for walk in touched):
                return None
            late.add(prim.out)
        over_rows = prim.over in ("col", "all") and bool(_rows_of(own))
        if over_rows or (summed and any(read.value in summed for read in prim.reads)):
            if not over_rows and any(read.value in reduced for read in prim.reads):
                return None  # the one is there when the rows are gone
            summed.add(prim.out)
        elif prim.over != "point" or (reduced and any(read.value in reduced for read in prim.reads)):
            reduced.add(prim.out)
        if over_rows:
            left = _rows_of(made)
            if not left <= _rows_of(own) or batch not in (None, left):
                return None
            if _rows_of(own) != _rows_of(all_of_it):  # a sum over some of the rows' dims is none that a kernel has
                return None
            batch = left
        if prim.over in ("col", "all"):
            late.add(prim.out)
        walks[prim.out], runs[prim.out] = made, own
    return _first(Space(dims, walks, runs), sorted(batch or ()))


def _rows_of(walk: Strides) -> frozenset[int]:
    """The row dims that a walk moves along."""
    return frozenset(d for d, step in enumerate(walk[:-1]) if step)


def _first(found: Space, batch: Sequence[int]) -> Space:
    """The space with its batch dims in front."""
    if not batch:
        return found
    order = [*batch, *(d for d in range(len(found.dims)) if d not in batch)]

    def arranged(walks: Mapping[Value, Strides]) -> dict[Value, Strides]:
        return {value: walk if walk is NOWHERE else tuple(walk[d] for d in order) for value, walk in walks.items()}

    dims = tuple(found.dims[d] for d in order)
    return Space(dims, arranged(found.walks), arranged(found.runs), len(batch))


def _cut(prims: Sequence[Prim], wanted: Demand) -> Demand:
    """A sum over all of what is walked in order wants rows, which are summed apart: of any divisor, the largest."""
    if wanted.cols or wanted.size <= WIDEST or all(prim.over != "all" for prim in prims):
        return wanted
    most = min([WIDEST, *wanted.edges])
    cols = next(c for c in range(most, 0, -1) if wanted.size % c == 0 and all(edge % c == 0 for edge in wanted.edges))
    return Demand(wanted.size, wanted.edges, cols) if cols > 1 else wanted


@lru_cache(maxsize=4096)
def contiguous(dims: Shape) -> Strides:
    return tuple(math.prod(dims[at + 1 :]) if size > 1 else 0 for at, size in enumerate(dims))


@lru_cache(maxsize=65536)
def along(read: Blocks, dims: Shape, own: Strides) -> Strides | None:
    """The strides of a read along the dims, by a call whose own element number has the strides `own` along them."""
    found: list[int] = []
    for size, step in zip(dims, own, strict=True):
        if size == 1 or not step:
            found.append(0)
            continue
        inner = 1
        for count, stride in reversed(read):
            if step < inner * count:
                if step % inner or inner * count % (step * size):
                    return None
                found.append(stride * (step // inner))
                break
            inner *= count
        else:
            return None
    return tuple(found)


def _iteration(
    prim: Prim, wanted: Demand, dims: Shape, walks: Mapping[Value, Strides], needs: Mapping[Value, Strides]
) -> Strides | None:
    """The strides of a call's own element number."""
    if prim.size == wanted.size:
        return contiguous(dims)
    if prim.size == 1:
        return (0,) * len(dims)
    if prim.out in needs and prim.over == "point":
        walk = needs[prim.out]  # which may be that of a part
        return walk if math.prod([n for n, step in zip(dims, walk, strict=True) if step]) == prim.size else None
    # As an operand of the kernel that it reads whole.
    known = (walks.get(r.value) for r in prim.reads if r.blocks == whole(prim.size))
    return next((walk for walk in known if walk is not None and walk is not NOWHERE), None)


def _result(prim: Prim, dims: Shape, own: Strides) -> Strides | None:
    if prim.op == "cat":
        return NOWHERE
    if prim.over == "point":
        return own
    if prim.over == "row":
        return (*contiguous(dims[:-1]), 0) if own == contiguous(dims) else None
    if prim.over == "col":
        return (*(0 for _ in dims[:-1]), own[-1]) if own == contiguous(dims) else None
    return along(prim.index, dims, own) if prim.index else (0,) * len(dims)
