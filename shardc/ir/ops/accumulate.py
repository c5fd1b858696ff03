"""`accumulate(x)`: the sum of x over the microbatches of a step.

Where a graph has several microbatches (`Graph.microbatches`), what leads to an `accumulate` runs once a microbatch and
what follows it runs once a step. Run alone, as a call on one microbatch, it is that microbatch's term: a copy of x,
which the runtime adds the others' to. It is linear, so the sum over microbatches of what is pending over an axis is
pending over it: one reduction a step, whatever the number of microbatches.

`accumulate_wgrad(g, x, dtype)` is `accumulate(linear_wgrad(g, x).to(dtype))`, of a product that is not rounded to the
dtype of its operands. The first microbatch's product is the sum, and each other's is added to it by the product
itself, which reads and writes the sum once: no term is ever in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define

aten = torch.ops.aten


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


ACCUMULATE = define("accumulate(Tensor x) -> Tensor", torch.clone, torch.clone)
ACCUMULATE_WGRAD = define("accumulate_wgrad(Tensor g, Tensor x, ScalarType dtype) -> Tensor", _term, _fake)
SUMS = (ACCUMULATE, ACCUMULATE_WGRAD)
