"""Compensated means of rows: exact if all elements of a row are equal. Then `x - m` is 0 and not a rounding error,
which a norm's `rstd` would scale by 316.

A float sum of such a row is inexact once it needs more than float32's 24 bits, and so is its quotient. But the
difference `x - m` is exact, since m and x are neighbours, and its mean is the error of m to well below a unit:

    m = rsum(x) / cols;   y = x - m          ->      m += rsum(x - m) / cols

This is done, in every schedule, for a mean from which a variance is computed. Templates do it as
`kernels_triton.library.kernels.moments`. 16-bit numbers leave bits for the count (`library.kernels.moments.EXACT`):
sums of equal 16-bit numbers are exact, and only the quotient must be rounded to nearest.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels_triton.codegen.expressions import converted
from kernels_triton.codegen.writer import FunctionWriter
from kernels_triton.ir.kernel import Kernel, Ref, value_operands
from kernels_triton.ir.table import OPS

BITS = {torch.bfloat16: 8, torch.float16: 11}  # of the significand
SQUARES = {"square": 1, "mul": 2}  # the ops that square an operand, and how often they read it
WIDEST = {
    dtype: 1 << 24 - bits for dtype, bits in BITS.items()
}  # the most columns for which equal numbers have an exact sum


@cache
def compensated_means(kernel: Kernel) -> dict[int, int]:
    """The means that variances are computed from, with the averaged value: m -> x, where x - m is squared."""
    if kernel.is_float64:
        return {}
    first = len(kernel.inputs)
    averaged = {value: _averaged_value(kernel, value) for value in range(first, first + len(kernel.steps))}
    squared = {o[0] for s in kernel.steps if len(o := value_operands(s)) and o == (o[0],) * SQUARES.get(s.op, 0)}
    steps = enumerate(kernel.steps, first)
    differences = {
        o
        for number, s in steps
        if number in squared and s.op == "sub"
        for o in (value_operands(s), value_operands(s)[::-1])
    }
    return {value: of for value, of in averaged.items() if of is not None and (of, value) in differences}


def _averaged_value(kernel: Kernel, value: int) -> int | None:
    """x, if the value is the sum of x over a row divided by the columns."""
    step = kernel.step(value)
    if step is None or step.op not in ("div", "mul") or not isinstance(step.operands[0], Ref):
        return None
    number = kernel.cols if step.op == "div" else 1 / kernel.cols
    total = kernel.step(step.operands[0].index)
    if total is None or total.op != "rsum" or step.operands[1] != number:
        return None
    (of,) = value_operands(total)
    return of if kernel.classes[of] == "f" and kernel.varies[of][-1] and not kernel.in_epilogue[of] else None


def sums_exactly(kernel: Kernel, value: int) -> bool:
    """Whether sums of equal elements of a value are exact."""
    step = kernel.step(value)
    dtype = kernel.inputs[value].dtype if step is None else step.dtype
    return dtype in WIDEST and kernel.cols <= WIDEST[dtype]


def put_nearest_mean(w: FunctionWriter, value: int) -> bool:
    """Computes a mean as the quotient rounded to nearest, if that is exact enough; says whether it did."""
    step = w.kernel.step(value)
    averaged = compensated_means(w.kernel).get(value)
    if averaged is None or step is None or step.op != "div" or not sums_exactly(w.kernel, averaged):
        return False
    total = w.variable(value_operands(step)[0], 0)
    w.functions_called.add("nearest_quotient")
    w.define(value, 0, OPS["div_rn"].triton.format(converted(total, "f32"), f"{w.kernel.cols}.0"), "f32")
    return True


def distance_from_mean(w: FunctionWriter, value: int, chunk: int) -> str:
    """The difference of a chunk from its mean; 0 after a row's end."""
    x = converted(w.variable(compensated_means(w.kernel)[value], chunk), "f32")
    difference = f"{x} - {w.variable(value, 0).name}"
    return f"tl.where({w.column_names(chunk)[1]}, {difference}, 0.0)" if w.columns_masked(chunk) else difference


def put_correction(w: FunctionWriter, value: int, differences: str) -> None:
    """Adds the mean's error to it, unless the error is not finite: an infinite mean stays infinite."""
    mean = w.variable(value, 0).name
    w.put(f"off_{value} = tl.sum({differences}, 1, keep_dims=True) / {float(w.kernel.cols)}")
    w.put(f"{mean} = tl.where(tl.abs(off_{value}) < float('inf'), {mean} + off_{value}, {mean})")
