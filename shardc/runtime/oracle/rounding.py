"""How far rounding alone may move a program's outputs: the reference, run again with fewer bits.

Two right programs add in different orders, so they round differently, and what cancels magnifies it:

    loss = (F.rms_norm(x * w, [4]) * c).sum()     w scalar: its gradient is 0 but for the norm's epsilon, the difference
                                                  of numbers a million times its size, whoever computes it

Which outputs are such, and how much, is a property of the reference alone and is measured on it: keep k bits less of
every value, and see how far each output moves. That is 2^k times the effect of float64's own rounding, through the very
cancellations of this program; 2^-k of it estimates the one by the other. Over 10,000 random programs the estimate
is the same, to a small factor, for any k from 3 to 36. The errors of right programs are mostly less than 3 times it and
at most 20 times (what an op adds up inside itself it does not see), be they 1e-15 or as large as an output that is
rounding and nothing else: hence SLACK.

Why fewer bits, and not noise: rounding is idempotent and monotone. What an op only moves it leaves alone, equal numbers
stay equal, masks and counts exact; so the probe does not itself upset comparisons, and find everything unsure. Where
rounding upsets one all the same, the output moves as far for every k: with k of 16 and more, 2^-k of that does not
excuse a wrong program. And the probe sees neither body nor plan: no mistake of the compiler's can make a reference look
ill-conditioned. `tests/properties/test_check.py` breaks programs on purpose, and has every mistake found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.ir.graph import Graph, Port
from shardc.runtime.execute.instructions import Numerics
from shardc.runtime.oracle.compare import floor_of, largest_gradient, relative_error
from shardc.runtime.oracle.simulate import run_reference

PROBES = (16, 18, 20, 22, 24)  # bits left out
SLACK = 32.0


def rounding(reference: Graph, inputs: Mapping[str, Tensor]) -> dict[Port, float]:
    """The relative error, as `verify` measures it, that each output of a right program may have from rounding alone."""
    exact, *coarse = (run_reference(reference, inputs, numerics=Coarse(bits=bits)) for bits in (0, *PROBES))
    largest = largest_gradient(exact)
    allowed: dict[Port, float] = {}
    for port, value in exact.items():
        floor = floor_of(value, largest, torch.float64)
        errors = [relative_error(run[port], value, floor) / 2**k for k, run in zip(PROBES, coarse, strict=True)]
        # A probe that leaves the numbers, as over a logarithm of 0, has measured nothing.
        allowed[port] = SLACK * max((error for error in errors if math.isfinite(error)), default=0.0)
    return allowed


@dataclass(frozen=True)
class Coarse(Numerics):
    """Float64 without the last `bits` bits: every input and every result is rounded to the nearest such number."""

    dtype: torch.dtype | None = torch.float64
    bits: int = 0

    def cast(self, value: Tensor) -> Tensor:
        x = super().cast(value)
        if x.dtype != torch.float64 or not self.bits:
            return x
        half, mask = 1 << (self.bits - 1), -(1 << self.bits)
        rounded = ((x.contiguous().view(torch.int64) + half) & mask).view(torch.float64)
        return torch.where(rounded.isfinite(), rounded, x)  # the largest number of all stays what it is
