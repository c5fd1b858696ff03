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


@dataclass(frozen=True)
class Drawn:
    """`apart`: columns between the end of a row and the next."""

    rows: int
    cols: int
    apart: int
    magnitude: float
    mean: float
    seed: int

    def normal(self, number: int, *shape: int) -> Tensor:
        generator = torch.Generator(DEVICE).manual_seed(self.seed + number)
        return torch.randn(shape, device=DEVICE, generator=generator)

    def x(self, dtype: torch.dtype) -> Tensor:
        """Rows, a constant one among them."""
        x = self.normal(0, self.rows, self.cols + self.apart) * self.magnitude + self.mean
        x[self.rows // 2] = 2.5
        return x.to(dtype)[:, : self.cols]

    def like(self, number: int, dtype: torch.dtype) -> Tensor:
        """Rows of ordinary numbers, apart otherwise than those of x."""
        return self.normal(number, self.rows, self.cols + (0 if self.apart else 8)).to(dtype)[:, : self.cols]

    def weight(self, number: int, dtype: torch.dtype) -> Tensor:
        return self.normal(number, self.cols).to(dtype)


@st.composite
def shapes(draw: st.DrawFn, cols: int = 131072, rows: int = 70_000, most: int = MOST) -> Drawn:
    usual = [n for n in (1024, 4096, 8192, 12288, 16384, 50304, 131072) if n <= cols]
    wide = draw(st.one_of(st.integers(1, 300), st.integers(1, cols), st.sampled_from(usual)))
    high = draw(st.one_of(st.integers(1, 40), st.integers(1, rows), st.just(rows)))
    apart = draw(st.sampled_from([0, 0, 1, 8]))
    magnitude, mean = draw(st.sampled_from([1e-3, 1.0, 30.0])), draw(st.sampled_from([0.0, 0.0, 5.0]))
    return Drawn(max(1, min(high, most // wide)), wide, apart, magnitude, mean, draw(st.integers(0, 1 << 20)))


def twice(op: Callable[..., Any], *args: Any) -> Any:
    """Two runs are bitwise equal."""
    first, second = op(*args), op(*args)
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    for one, other in pairs:
        assert one is None or torch.equal(one, other)
    return first
