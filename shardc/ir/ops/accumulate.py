"""`accumulate(x)`: the sum of x over the microbatches of a step.

Where a graph has several microbatches (`Graph.microbatches`), what leads to an `accumulate` runs once a microbatch and
what follows it runs once a step. Run alone, as a call on one microbatch, it is that microbatch's term: a copy of x,
which the runtime adds the others' to. It is linear, so the sum over microbatches of what is pending over an axis is
pending over it: one reduction a step, whatever the number of microbatches.

`accumulate_wgrad(g, x, dtype)` is `accumulate(linear_wgrad(g, x).to(dtype))`, of a product that is not rounded to the
dtype of its operands. The first microbatch's product is the sum, and each other's is added to it by the product
itself, which reads and writes the sum once: no term is ever in memory.

`accumulate_rows(g, indices, classes, padding, dtype)` is the same of an embedding's gradient, in place of
`accumulate(embedding_dense_backward(g, indices, classes, padding, False).to(dtype))`. The first microbatch writes all
rows, and each other adds to those that its tokens have, equal ones in the order of tokens.

`accumulate_more_rows(total, g, indices, padding)` is such a sum, `total`, with the rows of an embedding. Nothing else
reads `total`, and who runs a graph adds to its memory (`ir.sums`). Run alone it is a call of a new result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define

aten = torch.ops.aten
FEW = 1 << 15  # numbers, of which one call makes a term sooner than several calls add them


def multiplies_wide(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Can a product of such operands have results of a wider dtype? On CUDA, of 16-bit operands, in float32. Elsewhere
    the operands are cast before the product."""
    return (
        narrow != wide and device.type == "cuda" and narrow in (torch.bfloat16, torch.float16) and wide == torch.float32
    )


def _term(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if multiplies_wide(g.device, g.dtype, dtype):
        return aten.mm.dtype(*_matrices(g, x), dtype)
    return torch.mm(*_matrices(g, x, dtype))


def write_wgrad(g: Tensor, x: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """The same product, written to `out`, which is of its dtype."""
    if multiplies_wide(g.device, g.dtype, dtype):
        return aten.mm.dtype_out(*_matrices(g, x), dtype, out=out)
    return torch.mm(*_matrices(g, x, dtype), out=out)


def add_wgrad(total: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Add the product, in the dtype of the sum, to the sum."""
    if multiplies_wide(g.device, g.dtype, total.dtype):
        return aten.addmm.dtype_out(total, *_matrices(g, x), total.dtype, out=total)
    return total.addmm_(*_matrices(g, x, total.dtype))


def _matrices(g: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The operands as matrices, cast if a dtype is given."""
    left, right = torch.reshape(g, (-1, g.shape[-1])).t(), torch.reshape(x, (-1, x.shape[-1]))
    if dtype is None or left.dtype == right.dtype == dtype:
        return left, right
    return left.to(dtype), right.to(dtype)


def _fake(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if g.shape[:-1] != x.shape[:-1]:
        raise RuntimeError(f"accumulate_wgrad: shapes {tuple(g.shape)} and {tuple(x.shape)} do not fit")
    return g.new_empty((g.shape[-1], x.shape[-1]), dtype=dtype)


def _row_sums(g: Tensor, index: Tensor, classes: int, padding: int, dtype: torch.dtype) -> Tensor:
    return add_row_sums(g.new_zeros((classes, g.shape[-1]), dtype=dtype), g, index, padding)


def write_row_sums(g: Tensor, index: Tensor, classes: int, padding: int, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """The same rows, written to `out`, which is of their dtype."""
    return add_row_sums(out.zero_(), g, index, padding)


def add_row_sums(total: Tensor, g: Tensor, index: Tensor, padding: int) -> Tensor:
    """Add the rows of an embedding's gradient to the sum. Those of `padding`, and of none of its rows, are left out."""
    few = max(g.numel(), total.numel()) < FEW
    if few or total.device.type != "cpu":  # elsewhere `index_add_` adds in any order
        rows = aten.embedding_dense_backward.default(g.to(total.dtype), index, total.shape[0], padding, False)
        return total.add_(rows)
    rows, index = torch.reshape(g, (-1, g.shape[-1])), torch.reshape(index, (-1,))
    counts = (index >= 0) & (index < total.shape[0]) & (index != padding)
    rows = torch.where(counts[:, None], rows, 0).to(total.dtype)
    return total.index_add_(0, torch.where(counts, index, 0), rows)


def _more_rows(total: Tensor, g: Tensor, index: Tensor, padding: int) -> Tensor:
    return add_row_sums(total.clone(), g, index, padding)


def _fake_more_rows(total: Tensor, g: Tensor, index: Tensor, padding: int) -> Tensor:
    if g.shape[:-1] != index.shape or g.shape[-1:] != total.shape[1:]:
        shapes = f"{tuple(total.shape)}, {tuple(g.shape)} and {tuple(index.shape)}"
        raise RuntimeError(f"accumulate_more_rows: shapes {shapes} do not fit")
    return torch.empty_like(total)


def _fake_rows(g: Tensor, index: Tensor, classes: int, padding: int, dtype: torch.dtype) -> Tensor:
    if g.shape[:-1] != index.shape:
        raise RuntimeError(f"accumulate_rows: shapes {tuple(g.shape)} and {tuple(index.shape)} do not fit")
    return g.new_empty((classes, g.shape[-1]), dtype=dtype)


ACCUMULATE = define("accumulate(Tensor x) -> Tensor", torch.clone, torch.clone)
ACCUMULATE_WGRAD = define("accumulate_wgrad(Tensor g, Tensor x, ScalarType dtype) -> Tensor", _term, _fake)
ACCUMULATE_ROWS = define(
    "accumulate_rows(Tensor grad_output, Tensor indices, SymInt num_weights, int padding_idx, ScalarType dtype)"
    " -> Tensor",
    _row_sums,
    _fake_rows,
)
ACCUMULATE_MORE_ROWS = define(
    "accumulate_more_rows(Tensor total, Tensor grad_output, Tensor indices, int padding_idx) -> Tensor",
    _more_rows,
    _fake_more_rows,
)
# What adds its term to its sum itself, so that no term is in memory; and what of its arguments it adds with.
ADDS: Mapping[Any, Callable[..., Tensor]] = {ACCUMULATE_WGRAD: add_wgrad, ACCUMULATE_ROWS: add_row_sums}
ADDED_WITH: Mapping[Any, tuple[int, ...]] = {ACCUMULATE_WGRAD: (0, 1), ACCUMULATE_ROWS: (0, 1, 3)}
SUMS = (ACCUMULATE, *ADDS, ACCUMULATE_MORE_ROWS)
