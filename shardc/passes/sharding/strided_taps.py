"""Windows that begin at every so many rows of a sequence: a tap reads one row of each chunk of as many.

    stride 2, taps 0 1 2     rows 0 1, 2 3, 4 5, 6 .     taps 0 and 1 read both rows of a chunk, 2 the first of the next

Rows are grouped in chunks (`ir.ops.shift.REGROUP`), so that ranks have whole ones, wherever they have the rows. Then
taps are moves of chunks, as those of a convolution of stride 1 are moves of rows. The gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.shift import REGROUP, SHIFT
from shardc.ir.schema import given
from shardc.passes.normalize.decompositions.table import Emit

aten = torch.ops.aten
MOST_TAPS = 32  # of windows that are a product or a move for each


class Phases:
    """The rows that windows read at every `stride`-th row, in chunks of as many: a tap reads one row of each chunk."""

    def __init__(
        self, e: Emit, x: Sequence[int], dim: int, taps: Sequence[int], stride: int, padding: int, length: int
    ) -> None:
        self.e, self.size, self.dim, self.stride, self.padding, self.length = e, x[dim], dim, stride, padding, length
        self.places = [divmod(tap, stride) for tap in taps]  # a chunk, a row of it
        self.chunks, self.moved = length + self.places[-1][0], padding if stride == 1 else 0
        self.outer, self.inner = [*x[:dim], self.chunks], list(x[dim + 1 :])

    def read(self, x: fx.Node) -> Iterator[fx.Node]:
        """What each tap reads."""
        e, rows = self.e, self.chunks * self.stride
        if self.stride > 1:
            x = e(REGROUP, x, self.dim, rows, self.stride, False, -self.padding)
            x = e.view(x, [*self.outer, self.stride, *self.inner])
        for chunk, row in self.places:
            of_tap = e(aten.select.int, x, self.dim + 1, row) if self.stride > 1 else x
            yield self._moved(of_tap, chunk - self.moved, self.length)

    def _moved(self, rows: fx.Node, offset: int, length: int) -> fx.Node:
        if self.chunks == self.length and self.stride > 1:
            return rows
        return self.e(SHIFT, rows, self.dim, offset, length, 0.0, False)

    def joined(self, parts: Sequence[fx.Node]) -> fx.Node:
        """From what each tap gives back, the gradient of all rows."""
        e, of_row = self.e, dict[int, fx.Node]()
        for (chunk, row), part in zip(self.places, parts, strict=True):
            term = e.wide(self._moved(part, self.moved - chunk, self.chunks if self.stride > 1 else self.size))
            of_row[row] = e.add(of_row[row], term) if row in of_row else term
        if self.stride == 1:
            return of_row[0]
        dtype, shape = type_of(next(iter(of_row.values()))).dtype, [*self.outer, *self.inner]
        of_rows = [of_row[i] if i in of_row else e.full(shape, 0, dtype) for i in range(self.stride)]
        total = e(aten.cat.default, [e.view(g, [*self.outer, 1, *self.inner]) for g in of_rows], self.dim + 1)
        total = e.view(total, [*self.outer[:-1], self.chunks * self.stride, *self.inner])
        return e(REGROUP, total, self.dim, self.size, self.stride, True, self.padding)


def unfold(graph: Graph, node: fx.Node, lengths: Collection[int]) -> None:
    """Windows as moves: the j-th element of each is a row of a chunk. So is the gradient of windows."""
    args, e, back = given(node), Emit(graph, node), node.target is aten.unfold_backward.default
    shape = list(args["input_sizes"]) if back else list(type_of(args["self"]).shape)
    dim, size, step = (args["dim"] if back else args["dimension"]) % len(shape), args["size"], args["step"]
    length = (shape[dim] - size) // step + 1
    if shape[dim] not in lengths or not 0 < size <= MOST_TAPS or type_of(node).ragged or length < 1:
        return
    with graph.fx.inserting_before(node):
        phases = Phases(e, shape, dim, range(size), step, 0, length)
        if back:
            parts = [e(aten.select.int, args["grad_in"], len(shape), j) for j in range(size)]
            y = e.cast(phases.joined(parts), type_of(node).dtype)
        else:
            rows = [e.view(r, [*type_of(r).shape, 1]) for r in phases.read(args["self"])]
            y = rows[0] if len(rows) == 1 else e(aten.cat.default, rows, len(shape))
        graph.replace_value(node, y)
