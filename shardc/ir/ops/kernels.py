"""What runs in place of a few ATen ops, because strides are not part of a graph's meaning here.

`normalize` drops `clone`s that only change the layout in memory, and shards have strides of their own. Nearly all
of ATen takes any strides. These do not: `view` refuses, and the others read raw memory as if it were contiguous,
and silently compute something else (their callers in torch make their operands contiguous first).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _contiguous_first(op: Any) -> Callable[..., Any]:
    def make(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*map(make, args), **{name: make(value) for name, value in kwargs.items()})

    return run


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    **{
        op: _contiguous_first(op)
        for op in (
            aten.native_group_norm.default,
            aten.native_group_norm_backward.default,
            aten.native_layer_norm_backward.default,
            aten.mkldnn_rnn_layer.default,
            aten.mkldnn_rnn_layer_backward.default,
            aten.view_as_complex.default,
        )
    },
}
