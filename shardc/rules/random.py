"""Random numbers are a function of the global element index, so every dim of a draw may be split.

A shard draws with the strides of the whole tensor and an offset of its own: one size and one stride for
each atom, and `offset` of this rank's coordinates. Masks are bit for bit the same for every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.ir.blocks import blocks_of
from shardc.ir.types import Atom, TensorType
from shardc.rules.local import LocalCall, block_strides
from shardc.rules.notation import Dims
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten


@by_block
def _draw_shard(call: LocalCall) -> Any:
    type = call.results[0]
    strides: list[int] = []
    for dim, stride in zip(type.dims, call.args["strides"], strict=True):
        inner = stride * math.prod(int(atom.size) for atom in dim)
        for atom in dim:
            inner //= int(atom.size)
            strides.append(inner)
    return aten.view.default, (_drawn(call, type, strides, [], {}, 0), list(call.result_shape())), {}


def _drawn(
    call: LocalCall, type: TensorType, strides: list[int], sizes: list[int], steps: dict[str, int], base: int
) -> fx.Node:
    """The draw of the atoms behind those that have `sizes`, a dim for each atom: of one of blocks, the draws of each
    side by side."""
    mesh, axes = call.graph.mesh, type.placement
    known = (
        Atom(size) if len(blocks_of(atom.size)) > 1 else atom for size, atom in zip(sizes, type.atoms, strict=False)
    )
    atoms = (*known, *type.atoms[len(sizes) :])
    flat = replace(type, dims=tuple((atom,) if int(atom.size) > 1 else () for atom in atoms))
    if len(sizes) == len(strides):
        offset = call.emit(aten.add.Tensor, call.args["offset"], call.offset(steps), type=call.operands[1])
        if base:
            offset = call.emit(aten.add.Tensor, offset, base, type=call.operands[1])
        return call.emit(RANDOM_UNIFORM, call.args["seed"], call.args["op_id"], sizes, strides, offset, type=flat)
    pos, parts = len(sizes), list[fx.Node]()
    stride, start = strides[pos], 0
    for block in blocks_of(type.atoms[pos].size):
        first, moves = block_strides(block, axes[pos], stride, call)
        held = block.local(axes[pos], mesh).size
        parts.append(_drawn(call, type, strides, [*sizes, held], steps | moves, base + start * stride + first))
        start += block.size
    return parts[0] if len(parts) == 1 else call.emit(aten.cat.default, parts, pos, type=flat)


@rule(
    RANDOM_UNIFORM,
    localize=_draw_shard,
    kind="create",
    examples=[
        example((), 3, (4, 6), (6, 1), (), ints={"seed": 1000, "offset": 1}),
        example((), 5, (2, 3, 4), (12, 4, 1), (), ints={"seed": 1000, "offset": 1}),
    ],
)
def random_uniform(seed: Dims, op_id: int, shape: Sequence[int], strides: Sequence[int], offset: Dims) -> str:
    return f"(), () -> {' '.join(f'd{i}' for i in range(len(shape))) or '()'}"
