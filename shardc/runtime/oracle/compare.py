"""How far two values of one tensor lie apart, as `verify` measures it.

    max|a - b| / max(max|b|, 1e-4 * largest gradient)

so that what cancels does not divide rounding by rounding. A gradient that is zero in exact arithmetic (a key bias's,
which softmax does not see, or that of a bias before a batch norm) is nothing but rounding: it is measured against a
hundredth of the largest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch

from shardc.ir.graph import Port

SMALL_GRADIENT = 1e-4  # of the largest: below this a gradient is measured against the others,
ZERO_GRADIENT = 1e-2  # and one that is nothing but rounding against this
LEAST_GRADIENT = 1e-6  # of the loss


def largest_gradient(outputs: Mapping[Port, torch.Tensor]) -> float:
    """Of a step's outputs; at least a millionth of the loss, lest rounding be measured against rounding alone."""
    sizes = {role: [magnitude(x) for port, x in outputs.items() if port.role == role] for role in ("grad", "loss")}
    return max([*sizes["grad"], *(LEAST_GRADIENT * size for size in sizes["loss"])], default=0.0)


def floor_of(expected: torch.Tensor, largest: float, dtype: torch.dtype) -> float:
    """What an error is measured against at the least, by the largest gradient of a step in `dtype`."""
    rounding = torch.finfo(dtype).eps ** 0.6  # 4e-10 in float64: far above what cancels, far below what is meant
    return (ZERO_GRADIENT if magnitude(expected) < rounding * largest else SMALL_GRADIENT) * largest


def magnitude(x: torch.Tensor) -> float:
    """The largest finite magnitude; masks are full of infinities, which scale nothing."""
    if not x.numel():
        return 0.0
    size = x.abs() if x.is_complex() else x.double().abs()
    return float(size.masked_fill(~size.isfinite(), 0.0).max())


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """max|a - b| / max(max|b|, floor); infinite where one has an infinity or a NaN that the other has not."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
    if not expected.numel() or torch.equal(actual, expected):
        return 0.0
    a, b = (x if x.is_complex() else x.double() for x in (actual, expected))
    gap = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    largest_gap = float(gap.nan_to_num(nan=math.inf).max())
    return largest_gap / max(magnitude(expected), floor, sys.float_info.min)
