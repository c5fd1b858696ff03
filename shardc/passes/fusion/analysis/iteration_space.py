"""The iteration space of a kernel, and the place of each value in it.

Views change shapes from call to call; the order of elements stays. A call therefore runs over a number of elements in
order. It reads an operand by *strided runs* of that order, (size, stride) pairs from major to minor:

    x f32[8, 16, 64]               (8192, 1)               all of it, in order
    x * w    w f32[64]             (128, 0) (64, 1)        the same for each of 128 rows
    x * r    r f32[8, 16, 1]       (128, 1) (64, 0)        one element for each row
    x + p    p f32[16, 64]         (8, 0) (1024, 1)
    q.transpose(1, 2)              (8, 1024) (4, 16) (16, 64) (16, 1)

Where a run ends, a dim of the space must end. A reduction fixes the columns, which are the last dim. Calls share a
space if all their dim boundaries divide one another. A value computed in the kernel has one access map, its strides
along the dims of the space, and every call in the kernel must read it by that map. A sum over some of the dims says,
by strided runs too, to which element of the result each element goes:

    sum(x, (0, 2, 3))   x f32[8, 64, 32, 32]      (8, 0) (64, 1) (1024, 0)       64 is the kernel's batch dim
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
Value = Hashable  # a value of the graph, or a temporary of a kernel
StridedRuns = tuple[tuple[int, int], ...]
Strides = tuple[int, ...]
Over = Literal["point", "row", "col", "all"]
MAX_DIMS = 6
MAX_SPLIT_COLUMNS = 4096  # a sum over all elements is split into rows of at most so many columns
NO_BOUNDARIES = frozenset[int]()
NOT_IN_REGISTERS = (-1,)  # the access map of a concatenation: it is stored part by part, and no call reads it


class Read(NamedTuple):
    """An operand: the elements of a value's memory that a call reads, in the order of the call's own elements."""

    value: Value
    runs: StridedRuns
    offset: int = 0


@dataclass(slots=True, eq=False)
class Prim:
    """One operation of a kernel on `size` elements. `over` says what it reduces: a row's columns, the rows of a column,
    or all elements that have one index in the result. It never changes; a frozen class takes three times as long to
    make, and a graph has tens of thousands."""

    out: Value
    op: str
    args: tuple[object, ...]  # Reads, and constants
    size: int
    dtype: torch.dtype
    over: Over = "point"
    cols: int = 0  # of a reduction over rows or columns
    seed: int = 0  # of `uniform`: the id of its op; of `cat`: the distance between its parts
    index: StridedRuns = ()  # per element: the value of `iota`, the global index of `uniform`, the index in a result

    reads: tuple[Read, ...] = field(init=False, repr=False)
    _kind: object = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.reads = tuple([arg for arg in self.args if type(arg) is Read])
        self._kind = None

    @property
    def kind(self) -> object:
        """The same object for operations that differ in their values only."""
        if self._kind is None:
            args = tuple([arg[1:] if type(arg) is Read else repr(arg) for arg in self.args])
            self._kind = interned(self.op, args, self.size, self.dtype, self.over, self.cols, self.seed, self.index)
        return self._kind

    def renamed(self, names: Mapping[Value, Value]) -> Prim:
        """The operation on other values; those that `names` lacks stay."""
        prim = object.__new__(Prim)
        reads = [_read(Read, (names.get(value, value), runs, offset)) for value, runs, offset in self.reads]
        prim.reads = tuple(reads)
        if len(reads) == len(self.args):
            prim.args = prim.reads
        else:
            reads.reverse()
            prim.args = tuple([reads.pop() if type(arg) is Read else arg for arg in self.args])
        prim.out, prim.op, prim.size, prim.dtype = names.get(self.out, self.out), self.op, self.size, self.dtype
        prim.over, prim.cols, prim.seed, prim.index = self.over, self.cols, self.seed, self.index
        prim._kind = self._kind or self.kind
        return prim


_read = tuple.__new__  # of `Read`, in half the time


@lru_cache(maxsize=65536)
def interned(*_about: Hashable) -> object:
    """The same object for equal arguments."""
    return object()


def structure(prims: Iterable[Prim], numbers: dict[Value, int]) -> tuple[object, ...]:
    """A key that is equal for operations that differ in the names of their values only. `numbers` has the values
    already numbered, and then all of them, in the order of their first use."""
    key: list[object] = []
    for prim in prims:
        values = [prim.out]
        values += [read[0] for read in prim.reads]
        for value in values:
            if value not in numbers:
                numbers[value] = len(numbers)
        key += [prim._kind or prim.kind, *[numbers[value] for value in values]]  # pyright: ignore[reportPrivateUsage]
    return tuple(key)


class IterationSpace(NamedTuple):
    """The dims: `batch` of them come first, the last one is the columns. `access_maps` holds the strides along the dims
    of each value computed in the kernel; `call_maps` those of the element number of the call that computes it."""

    dims: Shape
    access_maps: Mapping[Value, Strides]
    call_maps: Mapping[Value, Strides]
    batch: int = 0


class SpaceConstraint(NamedTuple):
    """What calls require of a space: its number of elements, its dim boundaries (counted from the minor side), and its
    columns (0: any)."""

    size: int
    boundaries: frozenset[int] = frozenset()
    cols: int = 0

    @property
    def dims(self) -> Shape:
        boundaries = sorted({*self.boundaries, self.cols or 1} - {1, self.size})
        bounds = [1, *(boundaries if boundaries else ()), self.size]
        sizes = [large // small for small, large in pairwise(bounds)]
        if self.cols == self.size > 1 or not sizes:
            return (1, self.size)
        if self.cols == 1:
            return (*reversed(sizes), 1)
        return tuple(reversed(sizes))


@lru_cache(maxsize=65536)
def merged_constraint(a: SpaceConstraint, b: SpaceConstraint) -> SpaceConstraint | None:
    """Both constraints; None if no space satisfies them. The smaller one runs over a part of the dims: `find_space`
    checks that."""
    if a.size != b.size:
        large, small = (a, b) if a.size > b.size else (b, a)
        return large if not small.cols else None
    if a.cols == b.cols and a.boundaries == b.boundaries:
        return a
    if a.cols and b.cols and a.cols != b.cols:
        return None
    merged = SpaceConstraint(a.size, a.boundaries | b.boundaries, a.cols or b.cols)
    return merged if is_satisfiable(merged) else None


@lru_cache(maxsize=65536)
def is_satisfiable(constraint: SpaceConstraint) -> bool:
    bounds = sorted({1, *constraint.boundaries, constraint.cols or 1, constraint.size})
    if constraint.cols and any(boundary < constraint.cols for boundary in constraint.boundaries):
        return False
    return len(bounds) <= MAX_DIMS + 1 and all(large % small == 0 for small, large in pairwise(bounds))


@lru_cache(maxsize=65536)
def strided_runs(shape: Shape, strides: Strides) -> StridedRuns:
    """The elements of a strided tensor in order; adjacent dims are joined where their strides allow it."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return tuple(runs) or ((1, 0),)


@lru_cache(maxsize=65536)
def run_boundaries(runs: StridedRuns) -> frozenset[int]:
    """Where runs end, counted from the minor side, without the outermost ends."""
    return frozenset([math.prod(size for size, _ in runs[start:]) for start in range(1, len(runs))])


def _propagated_boundaries(runs: StridedRuns, boundaries: frozenset[int]) -> frozenset[int]:
    """The boundaries of a value, as positions in the elements of a call that reads the value by `runs`."""
    propagated: set[int] = set()
    size = 1
    for count, stride in reversed(runs):
        propagated.update(
            size * (boundary // stride) for boundary in boundaries if stride and stride < boundary < stride * count
        )
        size *= count
    return frozenset(propagated)


@lru_cache(maxsize=65536)
def contiguous_runs(size: int) -> StridedRuns:
    return ((size, 1),) if size > 1 else ((1, 0),)


def space_constraint(prims: Iterable[Prim]) -> SpaceConstraint | None:
    """The constraint of several calls together; None where no space satisfies it."""
    total = SpaceConstraint(1)
    boundaries_of: dict[Value, frozenset[int]] = {}  # of values computed so far
    for prim in prims:
        boundaries = run_boundaries(prim.index) if len(prim.index) > 1 else NO_BOUNDARIES
        for read in prim.reads:
            if len(read.runs) > 1:
                boundaries |= run_boundaries(read.runs)
            if operand_boundaries := boundaries_of.get(read.value):
                boundaries |= _propagated_boundaries(read.runs, operand_boundaries)
        if prim.over == "point" and boundaries:
            boundaries_of[prim.out] = boundaries
        constraint = SpaceConstraint(prim.size, boundaries, prim.cols)
        if constraint == total:  # the common case
            continue
        merged = merged_constraint(total, constraint) if is_satisfiable(constraint) else None
        if merged is None:
            return None
        total = merged
    return total


def find_space(prims: Sequence[Prim], constraint: SpaceConstraint) -> IterationSpace | None:
    """The space with the access map of every value, if all readers of a value agree on its map. None if they do not,
    or if a call needs a sum over rows before all rows are done."""
    dims = _split_rows(prims, constraint).dims
    full_map = contiguous_strides(dims)
    contiguous = contiguous_runs(constraint.size)

    smaller = {prim.out for prim in prims if prim.size != constraint.size}
    required: dict[Value, Strides] = {}  # of the smaller values: the map by which their readers read them
    for prim in reversed(prims) if smaller else ():
        call_map = full_map if prim.size == constraint.size else required.get(prim.out)
        if call_map is None and prim.size == 1:
            call_map = (0,) * len(dims)
        if call_map is not None and prim.over != "all":
            for read in prim.reads:
                if read.value in smaller and (read_map := strides_along(read.runs, dims, call_map)) is not None:
                    required.setdefault(read.value, read_map)
    access_maps: dict[Value, Strides] = {}
    call_maps: dict[Value, Strides] = {}
    after_sums: set[Value] = set()  # results of sums over rows or over all, and what is computed of them
    summed: set[Value] = set()  # of those, what depends on a sum over rows
    reduced: set[Value] = set()  # what depends on a reduction of a row, and on no sum over rows
    batch: frozenset[int] | None = None  # the row dims that sums over rows keep: the same ones for all of them
    for prim in prims:
        call_map = (
            full_map if prim.size == constraint.size else _call_map(prim, constraint, dims, access_maps, required)
        )
        if call_map is None:
            return None
        reads_sums = reads_summed = reads_reduced = False
        for read in prim.reads:
            is_whole = call_map is full_map and read.runs == contiguous  # the common case
            read_map = call_map if is_whole else strides_along(read.runs, dims, call_map)
            if read_map is None or (read.offset and read.value in access_maps):
                return None
            if read.value in access_maps and access_maps[read.value] != read_map:
                return None
            reads_sums |= read.value in after_sums
            reads_summed |= read.value in summed
            reads_reduced |= read.value in reduced
        result_map = _result_map(prim, dims, call_map)
        if result_map is None or (prim.index and strides_along(prim.index, dims, call_map) is None):
            return None
        if reads_sums:
            maps = [result_map, *(strides_along(r.runs, dims, call_map) or () for r in prim.reads)]
            if prim.over != "point" or any(_row_dims(each) - (batch or frozenset()) for each in maps):
                return None
            after_sums.add(prim.out)
        over_rows = prim.over in ("col", "all") and bool(_row_dims(call_map))
        if over_rows or reads_summed:
            if not over_rows and reads_reduced:
                return None  # the sum is complete only after the last row, when no row is in registers
            summed.add(prim.out)
        elif prim.over != "point" or reads_reduced:
            reduced.add(prim.out)
        if over_rows:
            kept_dims = _row_dims(result_map)
            if not kept_dims <= _row_dims(call_map) or batch not in (None, kept_dims):
                return None
            if _row_dims(call_map) != _row_dims(full_map):  # no kernel sums over only some of the row dims
                return None
            batch = kept_dims
        if prim.over in ("col", "all"):
            after_sums.add(prim.out)
        access_maps[prim.out], call_maps[prim.out] = result_map, call_map
    return _batch_first(IterationSpace(dims, access_maps, call_maps), sorted(batch or ()))


def _row_dims(strides: Strides) -> frozenset[int]:
    """The row dims along which an access map moves."""
    return frozenset(d for d, step in enumerate(strides[:-1]) if step)


def _batch_first(space: IterationSpace, batch: Sequence[int]) -> IterationSpace:
    """The space with its batch dims in front."""
    if not batch:
        return space
    order = [*batch, *(d for d in range(len(space.dims)) if d not in batch)]

    def permuted(maps: Mapping[Value, Strides]) -> dict[Value, Strides]:
        return {
            value: strides if strides is NOT_IN_REGISTERS else tuple(strides[d] for d in order)
            for value, strides in maps.items()
        }

    dims = tuple(space.dims[d] for d in order)
    return IterationSpace(dims, permuted(space.access_maps), permuted(space.call_maps), len(batch))


def _split_rows(prims: Sequence[Prim], constraint: SpaceConstraint) -> SpaceConstraint:
    """A sum over all elements, read in order, needs rows that are summed independently: the largest divisor that fits
    is the number of columns."""
    if constraint.cols or constraint.size <= MAX_SPLIT_COLUMNS or all(prim.over != "all" for prim in prims):
        return constraint
    size, boundaries = constraint.size, constraint.boundaries
    most = min([MAX_SPLIT_COLUMNS, *boundaries])
    cols = next(c for c in range(most, 0, -1) if size % c == 0 and all(boundary % c == 0 for boundary in boundaries))
    return SpaceConstraint(size, boundaries, cols) if cols > 1 else constraint


@lru_cache(maxsize=4096)
def contiguous_strides(dims: Shape) -> Strides:
    return tuple(math.prod(dims[d + 1 :]) if size > 1 else 0 for d, size in enumerate(dims))


@lru_cache(maxsize=65536)
def strides_along(runs: StridedRuns, dims: Shape, call_map: Strides) -> Strides | None:
    """The strides of a read along the dims, by a call whose element number has the strides `call_map` along them; None
    if no strides describe the read."""
    strides: list[int] = []
    for size, step in zip(dims, call_map, strict=True):
        if size == 1 or not step:
            strides.append(0)
            continue
        inner = 1
        for count, stride in reversed(runs):
            if step < inner * count:
                if step % inner or inner * count % (step * size):
                    return None
                strides.append(stride * (step // inner))
                break
            inner *= count
        else:
            return None
    return tuple(strides)


def _call_map(
    prim: Prim,
    constraint: SpaceConstraint,
    dims: Shape,
    access_maps: Mapping[Value, Strides],
    required: Mapping[Value, Strides],
) -> Strides | None:
    """The strides of a call's element number."""
    if prim.size == constraint.size:
        return contiguous_strides(dims)
    if prim.size == 1:
        return (0,) * len(dims)
    if prim.out in required and prim.over == "point":
        read_map = required[prim.out]  # it may be the map of a part of the value
        covered = math.prod([n for n, step in zip(dims, read_map, strict=True) if step])
        return read_map if covered == prim.size else None
    # The map of an operand that the call reads whole and that the kernel computes.
    operand_maps = (access_maps.get(r.value) for r in prim.reads if r.runs == contiguous_runs(prim.size))
    return next((each for each in operand_maps if each is not None and each is not NOT_IN_REGISTERS), None)


def _result_map(prim: Prim, dims: Shape, call_map: Strides) -> Strides | None:
    if prim.op == "cat":
        return NOT_IN_REGISTERS
    if prim.over == "point":
        return call_map
    if prim.over == "row":
        return (*contiguous_strides(dims[:-1]), 0) if call_map == contiguous_strides(dims) else None
    if prim.over == "col":
        return (*(0 for _ in dims[:-1]), call_map[-1]) if call_map == contiguous_strides(dims) else None
    return strides_along(prim.index, dims, call_map) if prim.index else (0,) * len(dims)
