"""Sums of the squares of all elements, in float64, as which no float32 overflows when it is squared.

    x = [1e30, 1e30]      sum of x * x in float32: inf        sum_of_squares(x): 2e60

So a norm made of it is right, and not finite only where an element is not. There is never a wide copy of x: on CPUs a
piece is widened at a time, and on GPUs ATen's norms compute in float64.

    total_of_squares([a, b], ["a", "b"])      sum_of_squares(a) + sum_of_squares(b)

`of` are the parameters whose gradients they are; "" of others. On GPUs the norms of many tensors are few kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc import torch_compat

PIECE = 1 << 15  # elements: what stays in a cache when it is widened


def _sum_of_squares(x: Tensor) -> Tensor:
    flat = x.detach().reshape(-1)
    if x.is_cuda:
        norm = torch.linalg.vector_norm(flat, 2, dtype=torch.float64)
        return norm * norm
    if flat.numel() <= PIECE:
        wide = flat.double()
        return torch.dot(wide, wide)
    pieces = (piece.double() for piece in flat.split(PIECE))
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


def _total_of_squares(xs: Sequence[Tensor], of: Sequence[str]) -> Tensor:
    if xs[0].is_cuda:
        norms = torch.stack(list(torch_compat.wide_norms(xs)))
        return torch.dot(norms, norms)
    total = _sum_of_squares(xs[0])
    for x in xs[1:]:
        total = total + _sum_of_squares(x)
    return total


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)


SUM_OF_SQUARES = define("sum_of_squares(Tensor x) -> Tensor", _sum_of_squares, _fake)
TOTAL_OF_SQUARES = define(
    "total_of_squares(Tensor[] xs, str[] of) -> Tensor", _total_of_squares, lambda xs, of: _fake(xs[0])
)
