"""What runs in place of a few ATen ops, because a graph knows neither strides nor devices.

`normalize` drops `clone`s that only change the layout in memory, and shards have strides of their own. Nearly all
of ATen takes any strides. These do not: `view` refuses, and the others read raw memory as if it were contiguous,
and silently compute something else (their callers in torch make their operands contiguous first).

A layer norm's statistics are float32 in a graph, as GPUs give them: rounded to bfloat16, `rstd` alone puts the weight's
gradient 0.2 % off, and a mean of five deviations 1 %. On a CPU torch gives, and takes, statistics of the operand's
dtype; so there 16-bit norms are computed in float32, as they are within torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

LAYER_NORM, LAYER_NORM_BACKWARD = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
NARROW = (torch.bfloat16, torch.float16)


def _contiguous_first(op: Any) -> Callable[..., Any]:
    def make(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*map(make, args), **{name: make(value) for name, value in kwargs.items()})

    return run


def _statistics_exact(op: Any) -> Callable[..., Any]:
    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    def run(*args: Any, **kwargs: Any) -> Any:
        like = args[0]  # the operand, or the gradient of its norm
        if like.dtype not in NARROW or like.device.type != "cpu":
            return op(*args, **kwargs)
        outputs = op(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})
        cast_back = slice(1) if op is LAYER_NORM else slice(None)
        return *(output if output is None else output.to(like.dtype) for output in outputs[cast_back]), *outputs[
            len(outputs[cast_back]) :
        ]

    return run


# Ops that read the memory of their operands as if it were contiguous.
IN_ORDER = frozenset(
    (
        LAYER_NORM_BACKWARD,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.mkldnn_rnn_layer.default,
        aten.mkldnn_rnn_layer_backward.default,
        aten.view_as_complex.default,
    )
)
KERNELS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    LAYER_NORM: _statistics_exact(LAYER_NORM),
    LAYER_NORM_BACKWARD: _statistics_exact(_contiguous_first(LAYER_NORM_BACKWARD)),
    **{op: _contiguous_first(op) for op in IN_ORDER - {LAYER_NORM_BACKWARD}},
}


def is_plain(op: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Does ATen itself run a call of `KERNELS`, given its first operand's dtype and its device, once the operands of
    those of `IN_ORDER` are contiguous?"""
    if op in (LAYER_NORM, LAYER_NORM_BACKWARD):
        return dtype not in NARROW or device.type != "cpu"
    return op in IN_ORDER
