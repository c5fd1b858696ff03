"""Sections, paddings and circles along a dim as moves of its rows (`shardc.ir.ops.shift`), one after the other as one.

labels[:, 1:]                      y[i] = x[i + 1], 15 rows of 16
F.pad(labels, (0, 1))[..., 1:]     y[i] = x[i + 1], 16 rows, the last of which is a fill
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.pick import PICK_ROWS, PLACE_ROWS
from shardc.ir.ops.shift import SHIFT
from shardc.ir.schema import given

aten = torch.ops.aten


@dataclass(frozen=True)
class Move:
    """`y[i] = x[i + offset]` for i below `length`, along a dim; elsewhere `fill`, or the other end of x."""

    x: fx.Node
    dim: int
    offset: int
    length: int
    fill: float = 0.0
    wrap: bool = False

    @property
    def args(self) -> tuple[Any, ...]:
        return self.x, self.dim, self.offset, self.length, float(self.fill), self.wrap

    def after(self, first: Move) -> Move | None:
        """This one on the result of another, as one of that one's operand; None where it is more than one."""
        if self.dim != first.dim or self.wrap or first.wrap:
            return None
        joined = replace(first, offset=first.offset + self.offset, length=self.length)
        own, rows = self.read(first.length), joined.read(type_of(first.x).shape[first.dim])
        if not rows or not set(rows) <= set(own):  # it would read a row that this one does not
            return None
        filled_here, filled_before = len(own) < self.length, len(rows) < len(own)
        if filled_here and filled_before and self.fill != first.fill:
            return None
        return replace(joined, fill=self.fill if filled_here else first.fill)

    def read(self, size: int) -> range:
        """The rows of the result that are rows of an operand of so many."""
        return range(max(0, -self.offset), max(0, -self.offset, min(self.length, size - self.offset)))


def _slice(node: fx.Node) -> Move | None:
    args = given(node)
    x, step = args["self"], args.get("step", 1)
    dim = args.get("dim", 0) % type_of(x).ndim
    start, end, _ = slice(args.get("start"), args.get("end"), 1).indices(type_of(x).shape[dim])
    return Move(x, dim, start, max(end - start, 0)) if step == 1 else None


def _slice_backward(node: fx.Node) -> Move | None:
    args = given(node)
    dim = args["dim"] % len(args["input_sizes"])
    size = args["input_sizes"][dim]
    start, _, _ = slice(args["start"], args["end"], 1).indices(size)
    return Move(args["grad_output"], dim, -start, size) if args["step"] == 1 else None


def _pad(node: fx.Node) -> Move | None:
    args = given(node)
    x, pad = args["self"], args["pad"]
    padded = [i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    if len(padded) != 1:
        return None
    (i,) = padded
    dim = type_of(x).ndim - 1 - i
    length = type_of(x).shape[dim] + pad[2 * i] + pad[2 * i + 1]
    return Move(x, dim, -pad[2 * i], length, args.get("value", 0.0))


def _roll(node: fx.Node) -> Move | None:
    args = given(node)
    x, shifts, dims = args["self"], args["shifts"], args.get("dims") or []
    if len(dims) != 1:
        return None
    dim = dims[0] % type_of(x).ndim
    return Move(x, dim, -int(shifts[0]), type_of(x).shape[dim], wrap=True)


def shifted(node: fx.Node) -> Move | None:
    return Move(*node.args)  # type: ignore[arg-type]


MOVES: dict[Any, Callable[[fx.Node], Move | None]] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    SHIFT: shifted,
}


# ---------------------------------------------------------------------- a few rows
GRADIENTS_OF_PICKS = (aten.select_backward.default, aten.slice_backward.default)


class Picked(NamedTuple):
    """Rows [start, start + length) of a dim; `alone`: the dim is gone."""

    dim: int
    start: int
    length: int
    alone: bool


def picked_rows(node: fx.Node) -> Picked | None:
    """What a call picks of a dim, or what it is the gradient of; None if it picks no run of rows."""
    if node.target not in (aten.select.int, aten.slice.Tensor, *GRADIENTS_OF_PICKS) or type_of(node).ragged:
        return None
    args = given(node)
    whole = type_of(node if node.target in GRADIENTS_OF_PICKS else args["self"])
    dim = args.get("dim", 0) % max(1, whole.ndim)
    if node.target in (aten.select.int, aten.select_backward.default):
        return Picked(dim, args["index"] % whole.shape[dim], 1, True)
    start, end, step = slice(args.get("start"), args.get("end"), args.get("step", 1)).indices(whole.shape[dim])
    return Picked(dim, start, end - start, False) if step == 1 and end > start else None


def write_pick(graph: Graph, node: fx.Node, picked: Picked) -> None:
    """The same as `pick_rows`, or as `place_rows`."""
    dim, start, length, alone = picked
    backward = node.target in GRADIENTS_OF_PICKS
    if not alone:
        value = given(node)["grad_output" if backward else "self"]
        if backward:
            node.target, node.args = PLACE_ROWS, (value, dim, start, type_of(node).shape[dim])
        else:
            node.target, node.args = PICK_ROWS, (value, dim, start, length)
        node.kwargs = {}
        return
    with graph.fx.inserting_before(node):
        value = given(node)["grad_output" if backward else "self"]
        type = type_of(value)
        dims = (*type.dims[:dim], (), *type.dims[dim + (not backward) :])
        if backward:
            part = graph.call(aten.unsqueeze.default, (value, dim), like=node, type=replace(type, dims=dims))
            node.target, node.args = PLACE_ROWS, (part, dim, start, type_of(node).shape[dim])
        else:
            args = (value, dim, start, 1)
            part = graph.call(PICK_ROWS, args, like=node, type=replace(type, dims=dims))
            node.target, node.args = aten.select.int, (part, dim, 0)
        node.kwargs = {}


def of_whole(node: fx.Node, is_whole: Callable[[int], bool]) -> Move | None:
    """What a call does to a whole sequence, of which its operand may be a few rows; None if it moves no rows of one."""
    move = MOVES[node.target](node) if node.target in MOVES else None
    while move is not None and not is_whole(type_of(move.x).shape[move.dim]):
        first = MOVES[move.x.target](move.x) if move.x.target in MOVES else None
        move = move.after(first) if first is not None else None
    return move
