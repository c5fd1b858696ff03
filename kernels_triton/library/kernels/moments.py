"""Mean and variance of rows, in float32, exact if all elements of a row are equal. Then x - mean is 0 and not a
rounding error, which `rstd` would scale by 316.

A float sum of such a row is inexact once it needs more than float32's 24 bits. 16-bit numbers leave bits for the count:
float32 sums 65536 equal bfloat16 numbers exactly, in any order, and 8192 equal float16 numbers (EXACT, minus the bits
of a number after its first). For other rows, differences from one number of the row are summed, which are then all 0.
"""

import triton
import triton.language as tl

EXACT = tl.constexpr(1 << 23)


@triton.jit
def add(a, b, c, d):
    return a + c, b + d


@triton.jit
def moments(xs, c, first, COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr):
    """(mean, variance) of rows; the variance is of differences from the mean, and 0 for a row of equal numbers. In a
    SHORT row the sum is exact, and so is the mean. Otherwise differences from the row's `first` number are summed,
    and the mean is corrected by the mean of the differences from it, which costs 3 % of a row's time."""
    for i in tl.static_range(CHUNKS):
        x = xs[i]
        if not SHORT:
            x -= first
            if i * BLOCK + BLOCK > COLS:
                x = tl.where(i * BLOCK + c < COLS, x, 0.0)
        if i == 0:
            total = x
        else:
            total += x
    total = tl.sum(total, 1, keep_dims=True)
    mean = tl.div_rn(total, tl.full((1, 1), COLS, tl.float32)) if SHORT else first + total / COLS
    for i in tl.static_range(CHUNKS):
        d = xs[i] - mean
        if i * BLOCK + BLOCK > COLS:
            d = tl.where(i * BLOCK + c < COLS, d, 0.0)
        if i == 0:
            apart = d
            squares = d * d
        else:
            apart += d
            squares += d * d
    if SHORT:
        variance = tl.sum(squares, 1, keep_dims=True) / COLS
    else:
        apart, squares = tl.reduce((apart, squares), 1, add)  # one exchange between threads for both
        apart = apart[:, None] / COLS
        mean += apart
        variance = squares[:, None] / COLS - apart * apart
        variance = tl.where(variance < 0.0, 0.0, variance)  # a maximum would lose NaN
    return mean, variance
