"""The cheapest Python callable that does what an op of a graph does: the same ATen kernel on the same operands.

    aten.add.Tensor       torch.add: its arguments are parsed in C++
    an embedding's gradient, or a sum of such, on a GPU: our kernel (`ON_GPUS`)
    shardc.linear         its Python kernel for the device, without the dispatcher's way there and back
    any other             the op's own builtin

`DIRECT` lists ops whose function in `torch` has the op's arguments in the op's order, and takes no other overload for
them; `tests/runtime/test_direct_call.py` compares each with its op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from inspect import isbuiltin, signature
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from kernels_triton.base.library import kernel_for
from kernels_triton.launch import launch
from kernels_triton.ops.embedding import sum_rows
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS, add_row_sums, write_row_sums
from shardc.torch_compat import builtin_of

aten = torch.ops.aten
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add.out: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.sub.out: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.mul.out: torch.mul,
    aten.div.Tensor: torch.div,
    aten.div.out: torch.div,
    aten.eq.Scalar: torch.eq,
    aten.ne.Scalar: torch.ne,
    aten.lt.Scalar: torch.lt,
    aten.le.Scalar: torch.le,
    aten.gt.Scalar: torch.gt,
    aten.ge.Scalar: torch.ge,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.sqrt.default: torch.sqrt,
    aten.sqrt.out: torch.sqrt,
    aten.rsqrt.default: torch.rsqrt,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.log.default: torch.log,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.maximum.default: torch.maximum,
    aten.minimum.default: torch.minimum,
    aten.sum.dim_IntList: torch.sum,
    aten.amax.default: torch.amax,
    aten.where.self: torch.where,
    aten.lerp.Scalar: torch.lerp,
    aten.lerp.Scalar_out: torch.lerp,
    aten.reshape.default: torch.reshape,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.t.default: torch.t,
    aten.expand.default: torch.Tensor.expand,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.cat.default: torch.cat,
    aten.full.default: torch.full,
    aten.arange.default: torch.arange,
    aten.arange.start: torch.arange,
    aten.embedding.default: torch.embedding,
    aten.native_layer_norm.default: torch.native_layer_norm,
}


def embedding_gradient(g: Tensor, index: Tensor, classes: int, padding: int, by_frequency: bool) -> Tensor:
    """`embedding_dense_backward` by the kernel that writes each row once; torch's writes zeros first. Small ones, of
    which the GPU has done before Python has launched the next call, stay with torch."""
    if by_frequency or g.numel() < LARGE or not launch.runs_on_triton(g):
        return EMBEDDING_GRADIENT(g, index, classes, padding, by_frequency)
    return sum_rows(g, index.reshape(-1), classes, padding)


def _rows(g: Tensor, index: Tensor, classes: int, padding: int, dtype: torch.dtype) -> Tensor:
    if not _sums_rows(g, classes, dtype):
        return ACCUMULATE_ROWS(g, index, classes, padding, dtype)
    return sum_rows(g, index.reshape(-1), classes, padding, dtype)


def _write_rows(g: Tensor, index: Tensor, classes: int, padding: int, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    if not _sums_rows(g, classes, dtype):
        return write_row_sums(g, index, classes, padding, dtype, out=out)
    return sum_rows(g, index.reshape(-1), classes, padding, dtype, out=out)


def _add_rows(total: Tensor, g: Tensor, index: Tensor, padding: int) -> Tensor:
    if not _sums_rows(g, total.shape[0], total.dtype):
        return add_row_sums(total, g, index, padding)
    return sum_rows(g, index.reshape(-1), total.shape[0], padding, total=total)


def _sums_rows(g: Tensor, classes: int, dtype: torch.dtype) -> bool:
    """Does our kernel sum such rows? In float32, and not few rows of small tables: what torch moves takes less than
    launching, and it launches a fifth as much."""
    small = max(g.numel(), classes * g.shape[-1]) < SMALL
    return dtype == torch.float32 and not small and launch.runs_on_triton(g)


TO_COPY = aten._to_copy.default
CAST_OPTIONS = frozenset(("dtype", "device", "non_blocking", "memory_format"))
CAST = partial(Tensor.to, copy=True)  # also where the dtype stays
LARGE, SMALL = 1 << 23, 1 << 20  # numbers of a gradient, and of the rows that are summed too
EMBEDDING_GRADIENT = aten.embedding_dense_backward.default
ON_GPUS: dict[Any, Callable[..., Any]] = {
    EMBEDDING_GRADIENT: embedding_gradient,
    ACCUMULATE_ROWS: _rows,
    write_row_sums: _write_rows,
    add_row_sums: _add_rows,
}


def direct_call(
    target: Callable[..., Any], device: torch.device | None = None, named: Iterable[str] = ()
) -> Callable[..., Any]:
    """What to call in the place of an op, given the names of keyword arguments. Most functions that are no ops stay."""
    target = add_row_sums if target is ACCUMULATE_MORE_ROWS else target  # nothing else reads what it adds to
    if target in ON_GPUS and device is not None and device.type == "cuda":
        return ON_GPUS[target]
    if not isinstance(target, OpOverload):
        return target
    if target in DIRECT:
        return DIRECT[target]
    if target is TO_COPY and "dtype" in named and CAST_OPTIONS.issuperset(named):
        return CAST
    kernel = None if device is None else kernel_for(target, device)
    names = {*named}
    if kernel is None or (names and (isbuiltin(kernel) or not names <= signature(kernel).parameters.keys())):
        return builtin_of(target)
    return kernel
