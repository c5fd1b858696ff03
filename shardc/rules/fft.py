"""Fourier transforms: the dims that are transformed are whole, all others are free.

_fft_r2c(x, [2], ...)     a b n -> a b m       n real numbers give n // 2 + 1 complex ones
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import rule

aten = torch.ops.aten


def _transformed(x: Dims, dim: Sequence[int], resized: bool) -> Notation:
    """The last of `dim` may have another size in the result."""
    dims, labels = [d % x.ndim for d in dim], list(x.labels)
    whole = [labels[d] for d in dims]
    if resized:
        labels[dims[-1]] = "resized"
        whole.append("resized")
    return Notation(f"{x} -> {' '.join(labels)}", whole=" ".join(whole))


@rule(aten._fft_c2c.default, examples=[((4, 3, 6), (2,), 0, True), ((4, 6, 3), (0, 2), 2, False)])
def complex_to_complex(self: Dims, dim: Sequence[int], normalization: int, forward: bool) -> Notation:
    return _transformed(self, dim, False)


@rule(
    aten._fft_r2c.default, examples=[((4, 3, 6), (2,), 0, True), ((4, 6, 3), (0, 1), 1, True), ((4, 6), (1,), 0, False)]
)
def real_to_complex(self: Dims, dim: Sequence[int], normalization: int, onesided: bool) -> Notation:
    return _transformed(self, dim, onesided)


@rule(aten._fft_c2r.default, examples=[((4, 3, 4), (2,), 2, 6), ((4, 4, 3), (2, 1), 0, 7)])
def complex_to_real(self: Dims, dim: Sequence[int], normalization: int, last_dim_size: int) -> Notation:
    return _transformed(self, dim, True)
