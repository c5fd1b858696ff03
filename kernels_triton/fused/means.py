"""Means of rows, exact where a row is one number: `x - m` is then 0, not a rounding, which a norm's `rstd` would make
316 times as large.

Of such a row a sum of floats is inexact, once it needs more than float32's 24 bits, and so is its quotient. But what
`x - m` leaves is exact, m and x being neighbours, and its own mean tells by how much m is off, to well below a unit:

    m = rsum(x) / cols;   y = x - m          ->      m += rsum(x - m) / cols

That is done for a mean that a variance is taken from, by whichever schedule; templates do it as
`kernels_triton.kernels.moments` does. Numbers of 16 bits leave some for the count (`kernels.moments.EXACT`): sums of
equal ones are exact, and only the quotient has to be the nearest one.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels_triton.fused.expressions import converted
from kernels_triton.fused.kernel import Kernel, Ref, reads
from kernels_triton.fused.table import OPS
from kernels_triton.fused.writer import Writer

BITS = {torch.bfloat16: 8, torch.float16: 11}  # of a number
SQUARES = {"square": 1, "mul": 2}  # by which an operand is squared: so often it is read
WIDEST = {dtype: 1 << 24 - bits for dtype, bits in BITS.items()}  # columns whose equal numbers have an exact sum


@cache
def means(kernel: Kernel) -> dict[int, int]:
    """The means of a variance, and what they are the means of: m -> x, where x - m is squared."""
    if kernel.double:
        return {}
    first = len(kernel.inputs)
    found = {value: _mean_of(kernel, value) for value in range(first, first + len(kernel.steps))}
    squared = {o[0] for s in kernel.steps if len(o := reads(s)) and o == (o[0],) * SQUARES.get(s.op, 0)}
    steps = enumerate(kernel.steps, first)
    apart = {o for at, s in steps if at in squared and s.op == "sub" for o in (reads(s), reads(s)[::-1])}
    return {value: of for value, of in found.items() if of is not None and (of, value) in apart}


def _mean_of(kernel: Kernel, value: int) -> int | None:
    """x, if the value is the sum of its rows divided by the columns."""
    step = kernel.step(value)
    if step is None or step.op not in ("div", "mul") or not isinstance(step.operands[0], Ref):
        return None
    number = kernel.cols if step.op == "div" else 1 / kernel.cols
    total = kernel.step(step.operands[0].index)
    if total is None or total.op != "rsum" or step.operands[1] != number:
        return None
    (of,) = reads(total)
    return of if kernel.classes[of] == "f" and kernel.varies[of][-1] and not kernel.late[of] else None


def sums_exactly(kernel: Kernel, value: int) -> bool:
    """Are sums of equal ones exact?"""
    step = kernel.step(value)
    dtype = kernel.inputs[value].dtype if step is None else step.dtype
    return dtype in WIDEST and kernel.cols <= WIDEST[dtype]


def nearest(w: Writer, value: int) -> bool:
    """Compute a mean as the nearest quotient, if that is enough."""
    step = w.kernel.step(value)
    of = means(w.kernel).get(value)
    if of is None or step is None or step.op != "div" or not sums_exactly(w.kernel, of):
        return False
    total = w.find(reads(step)[0], 0)
    w.called.add("nearest_quotient")
    w.name(value, 0, OPS["div_rn"].triton.format(converted(total, "f32"), f"{w.kernel.cols}.0"), "f32")
    return True


def distance(w: Writer, value: int, chunk: int) -> str:
    """How far a chunk of what a mean is of is from it; nothing past a row's end."""
    x = converted(w.find(means(w.kernel)[value], chunk), "f32")
    apart = f"{x} - {w.find(value, 0).name}"
    return f"tl.where({w.column_names(chunk)[1]}, {apart}, 0.0)" if w.columns_masked(chunk) else apart


def put_exact(w: Writer, value: int, apart: str) -> None:
    """The mean, by what it is off, unless that is no number: an infinite mean stays so."""
    mean = w.find(value, 0).name
    w.put(f"off_{value} = tl.sum({apart}, 1, keep_dims=True) / {float(w.kernel.cols)}")
    w.put(f"{mean} = tl.where(tl.abs(off_{value}) < float('inf'), {mean} + off_{value}, {mean})")
