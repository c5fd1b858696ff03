"""Lowerings of ops that tell places apart: parts of a dim that are joined, gated or filled, triangles, repetitions.

For each element a kernel counts where it is, and chooses: half of `cat(a, b)` is a's, the other b's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardc.passes.fuse.spaces import Shape, blocks
from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten


def _part(m: Make, shape: Shape, dim: int, parts: int) -> Inner:
    """For each element of a tensor, in which of the equal parts of a dim it lies."""
    inner = shape[dim] // parts * math.prod(shape[dim + 1 :])
    number = blocks((math.prod(shape[:dim]), parts, inner), (0, 1, 0))
    return m.numbered(shape, number)


@lower(aten.cat.default)
def cat(m: Make, tensors: Sequence[Operand], dim: int = 0) -> Operand:
    """Halves are chosen between, as rotary embeddings do; more parts are stored one by one."""
    shape, dim = m.shape, dim % len(m.shape)
    if len({m.shape_of(x) for x in tensors}) != 1 or len(tensors) < 2 or shape[dim] % len(tensors):
        raise Unfit
    if len(tensors) > 2:
        return m.side_by_side(tensors, dim)
    first = m("eq", _part(m, shape, dim, 2), 0, dtype=torch.bool)
    return m("where", first, *[m.spread(x, dim, 2) for x in tensors])


@lower(aten.slice_backward.default)
def slice_backward(m: Make, g: Operand, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Operand:
    """The gradient in its part of the dim, zero in the others."""
    shape = m.shape
    dim %= len(shape)
    part = m.shape_of(g)[dim]
    start = start + shape[dim] if start < 0 else start
    if step != 1 or not part or shape[dim] % part or start % part:
        raise Unfit
    mine = m("eq", _part(m, shape, dim, shape[dim] // part), start // part, dtype=torch.bool)
    return m("where", mine, m.spread(g, dim, shape[dim] // part), 0.0)


@lower(aten.glu.default)
def glu(m: Make, x: Operand, dim: int = -1) -> Operand:
    first, second = m.halves(x, dim)
    return m("mul", first, m("sigmoid", second))


@lower(aten.glu_backward.default)
def glu_backward(m: Make, g: Operand, x: Operand, dim: int) -> Operand:
    """The gradient of what is gated, then that of the gate."""
    shape = m.shape
    dim %= len(shape)
    first, second = m.halves(x, dim, times=2)
    gate = m("sigmoid", second)
    slope = m("mul", m.mul(gate, m.sub(1.0, gate)), first)
    mine = m("where", m("eq", _part(m, shape, dim, 2), 0, dtype=torch.bool), gate, slope)
    return m("mul", m.spread(g, dim, 2), mine)


def _triangle(m: Make, x: Operand, op: str, diagonal: int) -> Operand:
    """The elements whose column is that of the row's diagonal one, or on one side of it; elsewhere 0."""
    rows, cols = m.shape[-2], m.shape[-1]
    batch = math.prod(m.shape[:-2])
    place = (batch, rows, cols)

    def at(strides: Shape) -> Operand:
        return m.numbered(m.shape, blocks(place, strides)) if place[strides.index(1)] > 1 else 0

    column, row = at((0, 0, 1)), at((0, 1, 0))
    if isinstance(row, int):
        if isinstance(column, int):
            raise Unfit
        row = diagonal
    else:
        row = m("add", row, diagonal, dtype=torch.int64) if diagonal else row
    zero = False if m.dtype == torch.bool else 0.0 if m.dtype.is_floating_point else 0
    return m("where", m(op, column, row, dtype=torch.bool), x, zero)


@lower(aten.triu.default)
def triu(m: Make, x: Operand, diagonal: int = 0) -> Operand:
    return _triangle(m, x, "ge", diagonal)


@lower(aten.tril.default)
def tril(m: Make, x: Operand, diagonal: int = 0) -> Operand:
    return _triangle(m, x, "le", diagonal)


@lower(aten.repeat.default)
def repeat(m: Make, x: Operand, repeats: Sequence[int]) -> Operand:
    return m("same", m.repeated(x, repeats))
