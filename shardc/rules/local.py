"""From a call on global tensors to the same call on one rank's shards.

Most ops run on shards as they are; those that carry a shape name it in `shape_arg`; the few that
count in global indices (an embedding whose rows are sharded, a slice of a selected block) have a
`localize` function in their rule. It receives a `LocalCall` and returns the arguments, or another
op with its arguments, and may emit calls before itself. It never sees a rank: what differs between
ranks comes from `offset`, a value each rank computes from its own coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.blocks import Block, Blocks
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.ops.local import axis_offset, mask_blocks, mask_pad, told
from shardc.ir.types import Axes, TensorType, local_size
from shardc.rules.projection import Projection


@dataclass(frozen=True)
class LocalCall:
    """One call about to be made local. `args` holds its arguments by schema name, tensors as nodes."""

    graph: Graph
    node: fx.Node
    args: dict[str, Any]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    projection: Projection
    split: dict[int, Axes]  # piece -> axes

    def axes(self, operand: int, dim: int) -> Axes:
        """Axes that shard a dim of an operand, any of its atoms."""
        return tuple(axis for atom in self.operands[operand].dims[dim] for axis in atom.axes)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        return self.operands[operand].local_shape(self.graph.mesh)

    def result_shape(self, result: int = 0) -> tuple[int, ...]:
        """The local shape of a result."""
        return self.results[result].local_shape(self.graph.mesh)

    def with_args(self, /, **changes: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The same op, some arguments replaced: what most localize functions return."""
        args, kwargs = dict(self.args), dict[str, Any]()
        for argument in self.node.target._schema.arguments:  # type: ignore[union-attr]
            value = changes.get(argument.name, args[argument.name])
            if argument.kwarg_only:
                kwargs[argument.name] = value
                del args[argument.name]
            else:
                args[argument.name] = value
        return self.node.target, tuple(args.values()), kwargs

    def size(self, factor: str) -> int:
        """How much of one of the rule's factors this rank runs; 1 if the call has none of that name."""
        mesh, projection = self.graph.mesh, self.projection
        return math.prod(
            local_size(projection.sizes[piece], self.split.get(piece, ()), mesh)
            for piece, name in enumerate(projection.names)
            if name == factor or name.startswith(f"{factor}.")
        )

    def emit(self, target: Any, *args: Any, type: TensorType, **kwargs: Any) -> fx.Node:
        """A call placed before this one; `type` is its global type with its placement."""
        return self.graph.call(target, args, kwargs, like=self.node, type=type, fqn=info(self.node).fqn)

    def offset(self, strides: dict[str, int]) -> fx.Node:
        """An i64 scalar: the sum over axes of this rank's coordinate times the stride."""
        scalar = TensorType(torch.int64, ())
        return self.emit(axis_offset, list(strides), list(strides.values()), type=scalar)


def block_strides(block: Block, axes: Axes, scale: int, call: LocalCall) -> tuple[int, dict[str, int]]:
    """Where the rank at the origin begins in a block, times `scale`, and how far one step along each axis moves."""
    mesh, size, first = call.graph.mesh, block.divided, 0
    strides: dict[str, int] = {}
    for axis in mesh.resolve(axes) if block.cut else ():
        size = -(-size // mesh.size(axis))
        step = size * block.unit * scale
        strides[axis] = -step if block.reverses(axis) else step
        first += step * (mesh.size(axis) - 1) if block.reverses(axis) else 0
    return first, strides


def fill_padding(call: LocalCall, value: fx.Node, fill: float) -> fx.Node:
    """An operand of a kernel that fails on what padding may hold."""
    type, mesh = type_of(value), call.graph.mesh
    for atom in type.uneven_atoms(mesh):
        held, size, axes = list(type.local_atoms(mesh)), type.atoms[atom].size, list(type.atoms[atom].axes)
        if isinstance(size, Blocks):
            counts, units, reverse = told(size)
            value = call.emit(
                mask_blocks, value, held, atom, counts, units, axes, fill, False, reverse or None, type=type
            )
        else:
            value = call.emit(mask_pad, value, held, atom, size, axes, fill, type=type)
    return value
