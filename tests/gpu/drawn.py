"""Operands for kernels on a GPU, of drawn shapes: any number of rows and columns, odd ones, rows with a stride, numbers
of any magnitude, constant rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda"
MOST = 1 << 26  # elements: what float64 references of a few tensors have room for
# Relative error of a gradient's element, whose terms cancel.
LOOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
SOME = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


# Of which sums are inexact in float32, but for the first, or of float16 in its last bit; the last overflow in a sum.
CONSTANTS = {
    torch.float32: (2.5, 142.857, 12345.678, 1e6 + 0.1),
    torch.float16: (2.5, 142.857, -1999.0, 65504.0),
    torch.bfloat16: (2.5, 142.857, 12345.678, -1e6),
}
OVERFLOWING = {torch.float32: (-3e38,)}


@dataclass(frozen=True)
class Drawn:
    """`apart`: columns between the end of a row and the next. `constant`: which number a constant row has."""

    rows: int
    cols: int
    apart: int
    magnitude: float
    mean: float
    seed: int
    constant: int = 0

    def normal(self, number: int, *shape: int) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(self.seed + number)
        return torch.randn(shape, device=DEVICE, generator=generator)

    def x(self, dtype: torch.dtype, largest: bool = False) -> Tensor:
        """Rows, a constant one among them; of `largest`, perhaps one of which a sum would overflow."""
        # Of 16 bits numbers so far from zero are a few, or one.
        mean = self.mean if dtype == torch.float32 else min(self.mean, 100.0)
        x = self.normal(0, self.rows, self.cols + self.apart) * self.magnitude + mean
        numbers = CONSTANTS[dtype] + (OVERFLOWING.get(dtype, ()) if largest else ())
        x[self.rows // 2] = numbers[self.constant % len(numbers)]
        return x.to(dtype)[:, : self.cols]

    def like(self, number: int, dtype: torch.dtype) -> Tensor:
        """Rows of ordinary numbers, apart otherwise than those of x."""
        return self.normal(number, self.rows, self.cols + (0 if self.apart else 8)).to(dtype)[:, : self.cols]

    def weight(self, number: int, dtype: torch.dtype) -> Tensor:
        return self.normal(number, self.cols).to(dtype)


@st.composite
def shapes(draw: st.DrawFn, cols: int = 131072, rows: int = 70_000, most: int = MOST, centred: bool = False) -> Drawn:
    """`centred`: of what is measured from a row's mean, wherever that is, and from a constant row's."""
    usual = [n for n in (1024, 4096, 8192, 12288, 16384, 50304, 131072) if n <= cols]
    wide = draw(st.one_of(st.integers(1, 300), st.integers(1, cols), st.sampled_from(usual)))
    high = draw(st.one_of(st.integers(1, 40), st.integers(1, rows), st.just(rows)))
    apart = draw(st.sampled_from([0, 0, 1, 8]))
    magnitude, mean = draw(st.sampled_from([1e-3, 1.0, 30.0])), draw(st.sampled_from([0.0, 0.0, 5.0]))
    constant = 0
    if centred:
        mean, constant = draw(st.sampled_from([0.0, 5.0, 100.0, 1e4])), draw(st.integers(0, 19))
    high = max(1, min(high, most // wide))
    return Drawn(high, wide, apart, magnitude, mean, draw(st.integers(0, 1 << 20)), constant)


def twice(op: Callable[..., Any], *args: Any) -> Any:
    """Two runs are bitwise equal."""
    first, second = op(*args), op(*args)
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    for one, other in pairs:
        assert one is None or torch.equal(one, other)
    return first
