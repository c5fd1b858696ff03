"""Rows put where a mask is true: which row goes where is the count of the mask's true places before.

    masked_scatter(x, mask, source)     where(mask, source[count - 1], x)

        mask   0 1 1 0 | 1 0      count   0 1 2 2 | 3 3      rows of the source   - 0 1 - | 2 -

A mask that is the same along trailing dims, as that of image tokens is along the width, chooses rows, and is counted
once a row. The count is one along the last dim of the mask and one of the lines before, so that ranks that have whole
lines exchange a number for each, and the source is all that they may have to gather. The width is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardc.passes.normalize.decompositions.table import Emit, Node, Result, aten, decompose, dtype_of, shape_of


def _base(mask: Node) -> Node:
    """The mask before it was expanded."""
    while mask.target is aten.expand.default:
        mask = mask.args[0]  # type: ignore[assignment]
    return mask


def _rows(e: Emit, mask: Node, shape: Sequence[int], elements: int) -> tuple[Node, Node, int]:
    """Of a mask over `shape`: which rows it chooses, the number of each among those chosen (0 for the others), and how
    many elements a row has, a divisor of `elements`."""
    base = _base(mask)
    own = (*(1,) * (len(shape) - len(shape_of(base))), *shape_of(base))
    trailing = len(shape)
    while trailing and own[trailing - 1] == 1:
        trailing -= 1
    width = math.prod(shape[trailing:])
    if not width or elements % width:
        trailing, width = len(shape), 1
    lines = [*shape[:trailing]] or [1]
    chosen = e.expand(e.view(base, own[:trailing] or [1]), lines)
    ones = e.cast(chosen, torch.int64)
    count = e(aten.cumsum.default, ones, len(lines) - 1)
    if len(lines) > 1:
        each = e.view(e.sum(ones, [-1]), [math.prod(lines[:-1])])
        before = e.sub(e(aten.cumsum.default, each, 0), each)
        count = e.add(count, e.view(before, [*lines[:-1], 1]))
    return chosen, e.where(chosen, e.sub(count, 1), 0), width


@decompose(aten.masked_scatter.default)
def masked_scatter(e: Emit, x: Node, mask: Node, source: Node) -> Result:
    shape = torch.broadcast_shapes(shape_of(x), shape_of(mask))
    elements = math.prod(shape_of(source))
    if not elements or not math.prod(shape):
        return e.expand(x, shape)
    chosen, number, width = _rows(e, mask, shape, elements)
    picked = e(aten.embedding.default, e.view(source, [elements // width, width]), number)
    lines = shape_of(chosen)
    where = e.view(chosen, [*lines, *(1,) * (len(shape) - len(lines))][: len(shape)])
    return e.where(where, e.view(picked, shape), e.expand(x, shape))


@decompose(aten.masked_scatter_backward.default)
def masked_scatter_backward(e: Emit, grad_output: Node, mask: Node, sizes: Sequence[int]) -> Result:
    shape, elements = shape_of(grad_output), math.prod(sizes)
    if not elements or not math.prod(shape):
        return e.full(sizes, 0.0, dtype_of(grad_output))
    chosen, number, width = _rows(e, mask, shape, elements)
    lines = shape_of(chosen)
    rows = e.where(e.view(chosen, [*lines, 1]), e.view(grad_output, [*lines, width]), 0)
    sums = e(aten.embedding_dense_backward.default, rows, number, elements // width, -1, False)
    return e.view(sums, sizes)
