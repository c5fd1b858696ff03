"""Random numbers are a function of the global element index, so every dim of a draw may be split.

A shard draws with the strides of the whole tensor and an offset of its own: one size and one stride for
each atom, and `offset` of this rank's coordinates. Masks are bit for bit the same for every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.rules.local import LocalCall, axis_strides
from shardc.rules.notation import Dims
from shardc.rules.registry import example, rule

aten = torch.ops.aten


def _draw_shard(call: LocalCall) -> Any:
    type = call.results[0]
    sizes: list[int] = []
    strides: list[int] = []
    steps: dict[str, int] = {}
    for dim, stride in zip(type.dims, call.args["strides"], strict=True):
        inner = stride * math.prod(atom.size for atom in dim)
        for atom in dim:
            inner //= atom.size
            sizes.append(atom.local(call.graph.mesh))
            strides.append(inner)
    for index, stride in enumerate(strides):
        steps |= axis_strides(type, index, stride, call)
    scalar = call.operands[1]
    offset = call.emit(aten.add.Tensor, call.args["offset"], call.offset(steps), type=scalar)
    draw = call.emit(RANDOM_UNIFORM, call.args["seed"], call.args["op_id"], sizes, strides, offset, type=type)
    return aten.view.default, (draw, list(call.result_shape())), {}


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
