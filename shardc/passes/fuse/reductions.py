"""Lowerings of reductions, over any dims: sums, extremes, products, truth values, and where in a row an extreme is.

Of x as it lies in memory: over its last dims a row's, over its first ones a column's; over others, or over all, in two
steps. A truth value is a number of elements that are 0, or are not: `any` is `csum(rsum(x != 0)) != 0`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardc.passes.fuse.spaces import blocks
from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten
Dims = int | Sequence[int] | None
MOST = 2**24  # columns whose numbers are floats


@lower(aten.sum.dim_IntList)
def sum_(m: Make, x: Operand, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None) -> Operand:
    if not (m.dtype_of(x).is_floating_point and m.dtype.is_floating_point):
        raise Unfit
    return _reduced(m, "sum", x, dim)


@lower(aten.sum.default)
def sum_all(m: Make, x: Operand, dtype: torch.dtype | None = None) -> Operand:
    m.floating(x)
    return _reduced(m, "sum", x, None) if m.dtype.is_floating_point else x


def _extreme(op: str, *ops: Any) -> None:
    @lower(*ops)
    def extreme(m: Make, x: Operand, dim: Dims = (), keepdim: bool = False) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return _extreme_of(m, op, x, dim)


_extreme("max", aten.amax.default, aten.max.default)
_extreme("min", aten.amin.default, aten.min.default)


def _extreme_of(m: Make, op: str, x: Operand, dim: Dims) -> Operand:
    """Of floats as they are; of narrow integers as floats, which hold each; of others piece by piece."""
    dtype, shape = m.dtype_of(x), m.shape_of(x)
    if dtype.is_floating_point:
        return _reduced(m, op, x, dim)
    if dtype.itemsize > 2:
        return _piecewise(m, op, x, dim)
    best = _reduced(m, op, m("cast", x, shape=shape, dtype=torch.float32), dim)
    return m("ne", best, 0.0) if dtype == torch.bool else m("cast", best)


# From the highest bits on: by how many to shift, and what is left then; what is left of the first keeps the sign.
PIECES = {4: ((16, 0), (0, 0xFFFF)), 8: ((42, 0), (21, 0x1FFFFF), (0, 0x1FFFFF))}
KEPT = 8192  # columns that are in registers, to be looked through for each piece


def _piecewise(m: Make, op: str, x: Operand, dim: Dims) -> Operand:
    """Kernels reduce floats, which hold 24 bits. Of those of a row whose highest bits are the extreme ones, the next
    bits are compared, and so on: exact for every integer."""
    shape, dtype = m.shape_of(x), m.dtype_of(x)
    gone = _gone(shape, dim)
    real = [d for d, n in enumerate(shape) if n > 1]
    over = [d for d in real if d in gone]
    cols = math.prod(shape[d] for d in over)
    if not over:
        return m("same", x, shape=shape)
    if m.order(x) != list(range(len(shape))) or over != real[len(real) - len(over) :] or cols > KEPT:
        raise Unfit
    kept = tuple(1 if d in gone else n for d, n in enumerate(shape))
    float32, none = torch.float32, -1.0 if op == "max" else float(1 << 24)
    here, total = None, None
    for shift, mask in PIECES[dtype.itemsize]:
        part = m("shr", x, shift, shape=shape, dtype=dtype) if shift else x
        part = m("bitand", part, mask, shape=shape, dtype=dtype) if mask else part
        part = m("cast", part, shape=shape, dtype=float32)
        part = m("where", here, part, none, shape=shape, dtype=float32) if here is not None else part
        best = m.reduce(f"r{op}", part, "row", kept, cols, dtype=float32)
        here = m("eq", part, best, shape=shape, dtype=torch.bool)
        bits = m("cast", best, shape=kept, dtype=torch.int64)
        bits = m("shl", bits, shift, shape=kept, dtype=torch.int64) if shift else bits
        total = bits if total is None else m("bitor", total, bits, shape=kept, dtype=torch.int64)
    assert total is not None
    return m("cast", total, shape=kept, dtype=dtype) if dtype != torch.int64 else total


@lower(aten.prod.dim_int, aten.prod.default)
def prod(m: Make, x: Operand, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Operand:
    m.floating(x)
    if not m.dtype.is_floating_point:
        raise Unfit
    return _reduced(m, "prod", x, dim)


def _truth(zeros: bool, *ops: Any) -> None:
    @lower(*ops)
    def truth(m: Make, x: Operand, dim: Dims = None, keepdim: bool = False) -> Operand:  # pyright: ignore[reportUnusedFunction]
        shape, zero = m.shape_of(x), 0.0 if m.dtype_of(x).is_floating_point else 0
        if m.dtype_of(x) != torch.bool:
            found: Operand = m("eq" if zeros else "ne", x, zero, shape=shape, dtype=torch.bool)
        else:
            found = m("not", x, shape=shape) if zeros else x
        counted = m("where", found, 1.0, 0.0, shape=shape, dtype=torch.float32)
        number = _reduced(m, "sum", counted, dim)
        return m("eq" if zeros else "ne", number, 0.0)


_truth(False, aten.any.default, aten.any.dim, aten.any.dims)
_truth(True, aten.all.default, aten.all.dim, aten.all.dims)


@lower(aten.aminmax.default)
def aminmax(m: Make, x: Operand, *, dim: int | None = None, keepdim: bool = False) -> tuple[Operand, ...]:
    return _extreme_of(m, "min", x, dim), _extreme_of(m, "max", x, dim)


def _gone(shape: Sequence[int], dims: Dims) -> set[int]:
    """The dims that are reduced: all, where none are named."""
    asked = [dims] if isinstance(dims, int) else dims
    return {d % len(shape) for d in asked or range(len(shape))} if shape else set()


def _reduced(m: Make, op: str, x: Operand, dims: Dims) -> Operand:
    shape = m.shape_of(x)
    gone = _gone(shape, dims)
    order = m.order(x)
    real = [d for d in order if shape[d] > 1]
    over, kept = [d for d in real if d in gone], [d for d in real if d not in gone]
    if not over:
        return m("same", x, shape=shape)
    size = math.prod(shape[d] for d in over)
    if over == real:
        return m.reduce(op, x, "all", m.shape, order=order)
    if over == real[len(kept) :] and kept == sorted(kept) and (kept or len(real) == 1):
        return m.reduce(f"r{op}", x, "row", m.shape, size, order)
    if over == real[: len(over)] and kept == sorted(kept):
        return m.reduce(f"c{op}", x, "col", m.shape, math.prod(shape) // size, order)
    places = {d: math.prod(shape[e] for e in kept if e > d) for d in kept}
    index = blocks(tuple(shape[d] for d in order), tuple(places.get(d, 0) for d in order))
    return m.reduce(op, x, "all", m.shape, order=order, index=index)


# ---------------------------------------------------------------------- where an extreme is
def _first(m: Make, op: str, x: Operand, dim: int | None) -> tuple[Inner, Inner]:
    """The extreme of each row, and the number of the first column that has it; a NaN is the extreme of its row.

    Not along other dims: programs that share the rows know the extreme only when all have read theirs, and a row that
    is read across memory would take whole lines of the cache for one number, for nothing that it is fused with.
    """
    m.floating(x)
    shape = m.shape_of(x)
    real = [d for d, n in enumerate(shape) if n > 1]
    if m.order(x) != list(range(len(shape))) or not real or (dim is not None and dim % len(shape) != real[-1]):
        raise Unfit
    cols = shape[real[-1]] if dim is not None else math.prod(shape)
    if cols > MOST:
        raise Unfit
    x, wide, truth = m.seen(x), torch.float32, torch.bool
    kept = tuple(1 if dim is None or d == real[-1] else n for d, n in enumerate(shape))
    best = m.reduce(f"r{op}", x, "row", kept, cols, dtype=wide)
    column = m("cast", m.numbered(shape, blocks((math.prod(shape) // cols, cols), (0, 1))), shape=shape, dtype=wide)
    same, nan = m("eq", x, best, shape=shape, dtype=truth), m("isnan", x, shape=shape, dtype=truth)
    here = m("or", same, nan, shape=shape, dtype=truth)
    place = m("where", here, column, float(cols), shape=shape, dtype=wide)
    first = m.reduce("rmin", place, "row", kept, cols, dtype=wide)
    return best, m("cast", first, shape=kept, dtype=torch.int64)


def _placed(op: str, values: Any, places: Any) -> None:
    @lower(values)
    def both(m: Make, x: Operand, dim: int, keepdim: bool = False) -> tuple[Operand, ...]:  # pyright: ignore[reportUnusedFunction]
        return _first(m, op, x, dim)

    @lower(places)
    def place(m: Make, x: Operand, dim: int | None = None, keepdim: bool = False) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return _first(m, op, x, dim)[1]


_placed("max", aten.max.dim, aten.argmax.default)
_placed("min", aten.min.dim, aten.argmin.default)
