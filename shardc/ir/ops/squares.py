"""`sum_of_squares`: of all elements of a tensor, in float64, as which no float32 overflows when it is squared.

    x = [1e30, 1e30]      sum of x * x in float32: inf        sum_of_squares(x): 2e60

So a norm made of it is right, and not finite only where an element is not. A piece of x is widened at a time, so that
there is never a copy of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define

_PIECES = {"cpu": 1 << 15, "cuda": 1 << 20}  # elements: what stays in a cache when it is widened


def _sum_of_squares(x: Tensor) -> Tensor:
    size = _PIECES.get(x.device.type, 1 << 20)
    flat = x.detach().reshape(-1)
    if flat.numel() <= size:
        wide = flat.double()
        return torch.dot(wide, wide)
    pieces = (piece.double() for piece in flat.split(size))
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


SUM_OF_SQUARES = define(
    "sum_of_squares(Tensor x) -> Tensor", _sum_of_squares, lambda x: x.new_empty((), dtype=torch.float64)
)
