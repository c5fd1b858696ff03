"""Lowerings of reductions over any dims: sums, extremes, products, `any` and `all`, and the index of a row's extreme.

The dims of x are ordered as they lie in memory. A reduction over the last dims is a row reduction, one over the first
dims a column reduction; one over other dims, or over all, takes two steps. `any` and `all` count the elements that are
zero or nonzero: `any` is `csum(rsum(x != 0)) != 0`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardc.passes.fusion.analysis.iteration_space import strided_runs
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten
Dims = int | Sequence[int] | None
MAX_FLOAT_INDEX = 2**24  # column numbers up to this one are exact in float32


@lower(aten.sum.dim_IntList)
def sum_(m: LoweringBuilder, x: Operand, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None) -> Operand:
    if not (m.dtype_of(x).is_floating_point and m.dtype.is_floating_point):
        raise NotLowerable
    return _reduce_dims(m, "sum", x, dim)


@lower(aten.sum.default)
def sum_all(m: LoweringBuilder, x: Operand, dtype: torch.dtype | None = None) -> Operand:
    m.require_floats(x)
    return _reduce_dims(m, "sum", x, None) if m.dtype.is_floating_point else x


def _extreme_reduction(op: str, *ops: Any) -> None:
    @lower(*ops)
    def extreme(m: LoweringBuilder, x: Operand, dim: Dims = (), keepdim: bool = False) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return _extreme_of(m, op, x, dim)


_extreme_reduction("max", aten.amax.default, aten.max.default)
_extreme_reduction("min", aten.amin.default, aten.min.default)


def _extreme_of(m: LoweringBuilder, op: str, x: Operand, dim: Dims) -> Operand:
    """Floats are reduced as they are, narrow integers as float32, which holds each exactly, wide integers in pieces."""
    dtype, shape = m.dtype_of(x), m.shape_of(x)
    if dtype.is_floating_point:
        return _reduce_dims(m, op, x, dim)
    if dtype.itemsize > 2:
        return _extreme_by_pieces(m, op, x, dim)
    best = _reduce_dims(m, op, m("cast", x, shape=shape, dtype=torch.float32), dim)
    return m("ne", best, 0.0) if dtype == torch.bool else m("cast", best)


# From the highest bits down: the shift of a piece and its mask. The first piece is not masked: it keeps the sign.
PIECES = {4: ((16, 0), (0, 0xFFFF)), 8: ((42, 0), (21, 0x1FFFFF), (0, 0x1FFFFF))}
MAX_PIECEWISE_COLUMNS = 8192  # the row stays in registers, and is compared once a piece


def _extreme_by_pieces(m: LoweringBuilder, op: str, x: Operand, dim: Dims) -> Operand:
    """Kernels reduce floats, which hold 24 bits. The highest bits are reduced first. Among the elements whose bits
    equal the extreme, the next bits are reduced, and so on: the result is exact for every integer."""
    shape, dtype = m.shape_of(x), m.dtype_of(x)
    reduced_dims = _reduced_dims(shape, dim)
    nontrivial_dims = [d for d, n in enumerate(shape) if n > 1]
    over = [d for d in nontrivial_dims if d in reduced_dims]
    cols = math.prod(shape[d] for d in over)
    if not over:
        return m("same", x, shape=shape)
    if (
        m.dim_order(x) != list(range(len(shape)))
        or over != nontrivial_dims[len(nontrivial_dims) - len(over) :]
        or cols > MAX_PIECEWISE_COLUMNS
    ):
        raise NotLowerable
    row_shape = tuple(1 if d in reduced_dims else n for d, n in enumerate(shape))
    float32, none = torch.float32, -1.0 if op == "max" else float(1 << 24)
    is_extreme, total = None, None
    for shift, mask in PIECES[dtype.itemsize]:
        part = m("shr", x, shift, shape=shape, dtype=dtype) if shift else x
        part = m("bitand", part, mask, shape=shape, dtype=dtype) if mask else part
        part = m("cast", part, shape=shape, dtype=float32)
        part = m("where", is_extreme, part, none, shape=shape, dtype=float32) if is_extreme is not None else part
        best = m.reduce(f"r{op}", part, "row", row_shape, cols, dtype=float32)
        is_extreme = m("eq", part, best, shape=shape, dtype=torch.bool)
        bits = m("cast", best, shape=row_shape, dtype=torch.int64)
        bits = m("shl", bits, shift, shape=row_shape, dtype=torch.int64) if shift else bits
        total = bits if total is None else m("bitor", total, bits, shape=row_shape, dtype=torch.int64)
    assert total is not None
    return m("cast", total, shape=row_shape, dtype=dtype) if dtype != torch.int64 else total


@lower(aten.prod.dim_int, aten.prod.default)
def prod(
    m: LoweringBuilder, x: Operand, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Operand:
    m.require_floats(x)
    if not m.dtype.is_floating_point:
        raise NotLowerable
    return _reduce_dims(m, "prod", x, dim)


def _truth_reduction(zeros: bool, *ops: Any) -> None:
    @lower(*ops)
    def truth(m: LoweringBuilder, x: Operand, dim: Dims = None, keepdim: bool = False) -> Operand:  # pyright: ignore[reportUnusedFunction]
        shape, zero = m.shape_of(x), 0.0 if m.dtype_of(x).is_floating_point else 0
        if m.dtype_of(x) != torch.bool:
            counts: Operand = m("eq" if zeros else "ne", x, zero, shape=shape, dtype=torch.bool)
        else:
            counts = m("not", x, shape=shape) if zeros else x
        counted = m("where", counts, 1.0, 0.0, shape=shape, dtype=torch.float32)
        number = _reduce_dims(m, "sum", counted, dim)
        return m("eq" if zeros else "ne", number, 0.0)


_truth_reduction(False, aten.any.default, aten.any.dim, aten.any.dims)
_truth_reduction(True, aten.all.default, aten.all.dim, aten.all.dims)


@lower(aten.aminmax.default)
def aminmax(m: LoweringBuilder, x: Operand, *, dim: int | None = None, keepdim: bool = False) -> tuple[Operand, ...]:
    return _extreme_of(m, "min", x, dim), _extreme_of(m, "max", x, dim)


def _reduced_dims(shape: Sequence[int], dims: Dims) -> set[int]:
    """The dims that are reduced: all, if none are given."""
    dim_list = [dims] if isinstance(dims, int) else dims
    return {d % len(shape) for d in dim_list or range(len(shape))} if shape else set()


def _reduce_dims(m: LoweringBuilder, op: str, x: Operand, dims: Dims) -> Operand:
    shape = m.shape_of(x)
    reduced_dims = _reduced_dims(shape, dims)
    order = m.dim_order(x)
    nontrivial_dims = [d for d in order if shape[d] > 1]
    over, rest = (
        [d for d in nontrivial_dims if d in reduced_dims],
        [d for d in nontrivial_dims if d not in reduced_dims],
    )
    if not over:
        return m("same", x, shape=shape)
    size = math.prod(shape[d] for d in over)
    if over == nontrivial_dims:
        return m.reduce(op, x, "all", m.shape, order=order)
    if over == nontrivial_dims[len(rest) :] and rest == sorted(rest) and (rest or len(nontrivial_dims) == 1):
        return m.reduce(f"r{op}", x, "row", m.shape, size, order)
    if over == nontrivial_dims[: len(over)] and rest == sorted(rest):
        return m.reduce(f"c{op}", x, "col", m.shape, math.prod(shape) // size, order)
    places = {d: math.prod(shape[e] for e in rest if e > d) for d in rest}
    index = strided_runs(tuple(shape[d] for d in order), tuple(places.get(d, 0) for d in order))
    return m.reduce(op, x, "all", m.shape, order=order, index=index)


# ---------------------------------------------------------------------- the index of an extreme
def _extreme_and_index(m: LoweringBuilder, op: str, x: Operand, dim: int | None) -> tuple[Temporary, Temporary]:
    """The extreme of each row, and the first column that has it. A NaN is the extreme of its row.

    Only along the last dim. Over rows, programs that share them know the extreme only after all have read theirs. A row
    that lies across memory would load a whole cache line for each number, and gain nothing from fusion.
    """
    m.require_floats(x)
    shape = m.shape_of(x)
    nontrivial_dims = [d for d, n in enumerate(shape) if n > 1]
    if (
        m.dim_order(x) != list(range(len(shape)))
        or not nontrivial_dims
        or (dim is not None and dim % len(shape) != nontrivial_dims[-1])
    ):
        raise NotLowerable
    cols = shape[nontrivial_dims[-1]] if dim is not None else math.prod(shape)
    if cols > MAX_FLOAT_INDEX:
        raise NotLowerable
    x, wide, truth = m.as_stored(x), torch.float32, torch.bool
    row_shape = tuple(1 if dim is None or d == nontrivial_dims[-1] else n for d, n in enumerate(shape))
    best = m.reduce(f"r{op}", x, "row", row_shape, cols, dtype=wide)
    column = m(
        "cast", m.indices(shape, strided_runs((math.prod(shape) // cols, cols), (0, 1))), shape=shape, dtype=wide
    )
    same, nan = m("eq", x, best, shape=shape, dtype=truth), m("isnan", x, shape=shape, dtype=truth)
    is_extreme = m("or", same, nan, shape=shape, dtype=truth)
    place = m("where", is_extreme, column, float(cols), shape=shape, dtype=wide)
    first = m.reduce("rmin", place, "row", row_shape, cols, dtype=wide)
    return best, m("cast", first, shape=row_shape, dtype=torch.int64)


def _extreme_with_index(op: str, values: Any, places: Any) -> None:
    @lower(values)
    def both(m: LoweringBuilder, x: Operand, dim: int, keepdim: bool = False) -> tuple[Operand, ...]:  # pyright: ignore[reportUnusedFunction]
        return _extreme_and_index(m, op, x, dim)

    @lower(places)
    def place(m: LoweringBuilder, x: Operand, dim: int | None = None, keepdim: bool = False) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return _extreme_and_index(m, op, x, dim)[1]


_extreme_with_index("max", aten.max.dim, aten.argmax.default)
_extreme_with_index("min", aten.min.dim, aten.argmin.default)
