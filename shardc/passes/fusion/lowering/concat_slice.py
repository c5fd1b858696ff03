"""Lowerings of ops that depend on an element's index: concatenations, gates, slices' gradients, triangles, repetitions.

A kernel computes the index of each element and selects by it: half of `cat(a, b)` is a's, the other b's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardc.passes.fusion.analysis.iteration_space import Shape, strided_runs
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten


def _part_number(m: LoweringBuilder, shape: Shape, dim: int, parts: int) -> Temporary:
    """For each element of a tensor, the number of its part, of the equal parts of a dim."""
    inner = shape[dim] // parts * math.prod(shape[dim + 1 :])
    number = strided_runs((math.prod(shape[:dim]), parts, inner), (0, 1, 0))
    return m.indices(shape, number)


@lower(aten.cat.default)
def cat(m: LoweringBuilder, tensors: Sequence[Operand], dim: int = 0) -> Operand:
    """Two halves are selected from, as in rotary embeddings; more parts are stored one by one."""
    shape, dim = m.shape, dim % len(m.shape)
    if len({m.shape_of(x) for x in tensors}) != 1 or len(tensors) < 2 or shape[dim] % len(tensors):
        raise NotLowerable
    if len(tensors) > 2:
        return m.concatenate(tensors, dim)
    first = m("eq", _part_number(m, shape, dim, 2), 0, dtype=torch.bool)
    return m("where", first, *[m.tiled(x, dim, 2) for x in tensors])


@lower(aten.slice_backward.default)
def slice_backward(
    m: LoweringBuilder, g: Operand, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Operand:
    """The gradient in its part of the dim, zeros in the others."""
    shape = m.shape
    dim %= len(shape)
    part = m.shape_of(g)[dim]
    start = start + shape[dim] if start < 0 else start
    if step != 1 or not part or shape[dim] % part or start % part:
        raise NotLowerable
    is_inside = m("eq", _part_number(m, shape, dim, shape[dim] // part), start // part, dtype=torch.bool)
    return m("where", is_inside, m.tiled(g, dim, shape[dim] // part), 0.0)


@lower(aten.glu.default)
def glu(m: LoweringBuilder, x: Operand, dim: int = -1) -> Operand:
    first, second = m.halves(x, dim)
    return m("mul", first, m("sigmoid", second))


@lower(aten.glu_backward.default)
def glu_backward(m: LoweringBuilder, g: Operand, x: Operand, dim: int) -> Operand:
    """The gradient of the gated half, then that of the gate."""
    shape = m.shape
    dim %= len(shape)
    first, second = m.halves(x, dim, times=2)
    gate = m("sigmoid", second)
    slope = m("mul", m.mul(gate, m.sub(1.0, gate)), first)
    factor = m("where", m("eq", _part_number(m, shape, dim, 2), 0, dtype=torch.bool), gate, slope)
    return m("mul", m.tiled(g, dim, 2), factor)


def _triangle(m: LoweringBuilder, x: Operand, op: str, diagonal: int) -> Operand:
    """The elements on the diagonal and on one side of it; elsewhere 0."""
    rows, cols = m.shape[-2], m.shape[-1]
    batch = math.prod(m.shape[:-2])
    place = (batch, rows, cols)

    def index(strides: Shape) -> Operand:
        return m.indices(m.shape, strided_runs(place, strides)) if place[strides.index(1)] > 1 else 0

    column, row = index((0, 0, 1)), index((0, 1, 0))
    if isinstance(row, int):
        if isinstance(column, int):
            raise NotLowerable
        row = diagonal
    else:
        row = m("add", row, diagonal, dtype=torch.int64) if diagonal else row
    zero = False if m.dtype == torch.bool else 0.0 if m.dtype.is_floating_point else 0
    return m("where", m(op, column, row, dtype=torch.bool), x, zero)


@lower(aten.triu.default)
def triu(m: LoweringBuilder, x: Operand, diagonal: int = 0) -> Operand:
    return _triangle(m, x, "ge", diagonal)


@lower(aten.tril.default)
def tril(m: LoweringBuilder, x: Operand, diagonal: int = 0) -> Operand:
    return _triangle(m, x, "le", diagonal)


@lower(aten.repeat.default)
def repeat(m: LoweringBuilder, x: Operand, repeats: Sequence[int]) -> Operand:
    return m("same", m.repeated(x, repeats))
