"""Tolerances: how far a result may differ from the float64 result."""

import torch
from torch import Tensor

# Mantissa bits behind the point, and the smallest normal number.
FORMATS = {torch.bfloat16: (7, 2.0**-126), torch.float16: (10, 2.0**-14), torch.float32: (23, 2.0**-126)}


def ulps(found: Tensor, exact: Tensor, floor: float = 0.0) -> float:
    """The largest distance of `found` from `exact` (float64), as rounded to found's format, in units of its last place.

    Below `floor` the unit is that of the floor: there float32 intermediates, not the rounding, decide.
    """
    bits, smallest = FORMATS[found.dtype]
    limit = torch.finfo(found.dtype).max
    rounded = exact.clamp(-limit, limit).to(found.dtype).double()
    both_infinite = found.double().abs().eq(torch.inf) & (exact.abs() >= limit)
    scale = rounded.abs().clamp(min=max(smallest, floor))
    unit = torch.exp2(torch.floor(torch.log2(scale)) - bits)
    distance = ((found.double() - rounded).abs() / unit).masked_fill(both_infinite, 0.0)
    assert not distance.isnan().any(), "NaN: an element was not written, or read from out of bounds"
    return float(distance.max()) if distance.numel() else 0.0


def relative(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> float:
    """Error relative to the largest entry, or to `terms`: what was added up to make each."""
    error = (found.double() - exact).abs()
    assert not error.isnan().any(), "NaN: an element was not written, or read from out of bounds"
    scale = exact.abs().amax() if terms is None else terms
    return float((error / scale.clamp(min=1e-30)).max()) if error.numel() else 0.0


def by_rows(found: Tensor, exact: Tensor) -> float:
    """The largest error of an element, relative to the largest element of its row, or to the smallest normal number:
    no row hides another's error, and no number of right elements a wrong one."""
    largest = exact.abs().amax(-1, keepdim=True) if exact.dim() else exact.abs()
    return relative(found, exact, largest.clamp(min=FORMATS[found.dtype][1] if found.dtype in FORMATS else 1))


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
