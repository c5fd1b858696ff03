"""Which operands of a call hold positions in a dim of another one, and which positions there are.

embedding(weight[96, 32], indices)      indices: 0 to 95
index(x[6, 5], [None, rows])            rows: -5 to 4, those below 0 counted from the end
check_index(targets, 96, -100)          targets: 0 to 95, or -100
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.ir.ops.check_index import allowed, check_index
from shardc.ir.schema import given

aten = torch.ops.aten

# The arguments that hold the positions and the tensor that they count in; without a dim of its own, in its first.
_ALONG: dict[Any, tuple[str, str]] = {
    aten.embedding.default: ("indices", "weight"),
    aten.gather.default: ("index", "self"),
    aten.index_select.default: ("index", "self"),
    aten.scatter.src: ("index", "self"),
    aten.scatter.value: ("index", "self"),
    aten.scatter.reduce: ("index", "self"),
    aten.scatter_add.default: ("index", "self"),
    aten.scatter_reduce.two: ("index", "self"),
    aten.index_add.default: ("index", "self"),
    aten.index_copy.default: ("index", "self"),
    aten.index_reduce.default: ("index", "self"),
}
_FILLS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)  # these count from either end, too
_FROM_EITHER_END = (aten.index.Tensor, aten.index_put.default)


@dataclass(frozen=True, slots=True)
class Positions:
    """An operand of a call whose elements must lie in [low, size), or be `ignored`."""

    value: fx.Node
    low: int
    size: int
    ignored: int | None = None

    def first_outside(self, indices: torch.Tensor) -> tuple[int, list[int]] | None:
        """The first element that is not a valid position, and its index; None if all are valid."""
        if indices.numel():
            least, most = indices.aminmax()
            if self.low <= int(least) and int(most) < self.size:
                return None  # a batch of a million tokens is looked at every step
        good = allowed(indices, self.low, self.size, self.ignored)
        if good.all():
            return None
        position: list[int] = (~good).nonzero()[0].tolist()
        return int(indices[tuple(position)]), position

    def __str__(self) -> str:
        span = f"{self.low} to {self.size - 1}" if self.size else "nothing"
        return span if self.ignored is None else f"{span}, and {self.ignored}, which is ignored"


def declared_shape(value: fx.Node) -> Sequence[int]:
    return type_of(value).shape


def positions(node: fx.Node, shape_of: Callable[[fx.Node], Sequence[int]] = declared_shape) -> Iterator[Positions]:
    """The operands of a call that hold positions, in tensors of the shapes that `shape_of` gives."""
    target = node.target
    if target in _ALONG:
        args = given(node)
        index, table = (args[name] for name in _ALONG[target])
        shape = shape_of(table)
        if shape:
            yield Positions(index, 0, shape[args.get("dim", 0)])
    elif target in _FILLS:
        args = given(node)
        shape = shape_of(args["self"])
        if shape:
            yield Positions(args["index"], -shape[args["dim"]], shape[args["dim"]])
    elif target in _FROM_EITHER_END:
        args = given(node)
        shape = shape_of(args["self"])
        for d, index in enumerate(args["indices"]):
            if index is not None and type_of(index).dtype not in (torch.bool, torch.uint8):  # those are masks
                yield Positions(index, -shape[d], shape[d])
    elif target is check_index:
        args = given(node)
        yield Positions(args["index"], 0, args["size"], args.get("ignored"))
