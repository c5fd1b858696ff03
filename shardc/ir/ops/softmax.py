"""Softmax with its statistics: what a backward that keeps no probabilities makes them from again.

    y, top, total = softmax_parts(x, dim)          y = exp(x - top) / total

Half precision is computed in float32, which is also what the statistics then are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define


def _parts(x: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    top = wide.amax(dim, keepdim=True)
    exp = (wide - top).exp()
    total = exp.sum(dim, keepdim=True)
    return (exp / total).to(dtype), top, total


def _fake(x: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shape = list(x.shape)
    shape[dim] = 1
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=wide), x.new_empty(shape, dtype=wide)


SOFTMAX_PARTS = define("softmax_parts(Tensor x, int dim, ScalarType dtype) -> (Tensor, Tensor, Tensor)", _parts, _fake)
