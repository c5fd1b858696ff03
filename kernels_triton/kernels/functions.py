"""What generated kernels call: functions that Triton lacks, or has in a form that is not what torch means."""

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels_triton.kernels.arithmetic import LOG2E, logistic, normal, quotient  # noqa: F401
from kernels_triton.kernels.philox import at_least, philox_word  # noqa: F401


@triton.jit
def exp(x):
    """Within 2 units of the last place for |x| <= 16, as `tl.exp`; results below 2^-126 are 0."""
    return tl.exp2(x * LOG2E)


@triton.jit
def tanh(x):
    """A polynomial (Cephes') near 0, where 1 - 2 / (exp(2x) + 1) would cancel."""
    s = x * x
    p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
    near = (p - 3.33332819422e-1) * s * x + x
    far = 1.0 - quotient(2.0, tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def expm1(x):
    """Kahan's: what exp rounds, log of it undoes."""
    u = tl.exp(x)
    y = u - 1.0
    return tl.where(u == 1.0, x, tl.where((tl.abs(x) > 1.0), y, y * x / tl.log(u)))


@triton.jit
def log1p(x):
    u = x + 1.0
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, tl.log(u) * x / (u - 1.0)))


@triton.jit
def _quadrant(x):
    """x less k * pi / 2, and k modulo 4: in float64, where it is exact for angles of any size that positions have.

    libdevice's reduction of large angles goes through local memory.
    """
    wide = x.to(tl.float64)
    k = tl.floor(wide * 0.6366197723675814 + 0.5)
    rest = (wide - k * 1.5707963267948966) - k * 6.123233995736766e-17
    return rest.to(tl.float32), k.to(tl.int64).to(tl.int32) & 3


@triton.jit
def _sine_near_0(x):
    s = x * x
    return ((-1.9515295891e-4 * s + 8.3321608736e-3) * s - 1.6666654611e-1) * s * x + x


@triton.jit
def _cosine_near_0(x):
    s = x * x
    return ((2.443315711809948e-5 * s - 1.388731625493765e-3) * s + 4.166664568298827e-2) * s * s - 0.5 * s + 1.0


@triton.jit
def sine(x):
    rest, k = _quadrant(x)
    y = tl.where((k & 1) == 0, _sine_near_0(rest), _cosine_near_0(rest))
    return tl.where(k < 2, y, -y)


@triton.jit
def cosine(x):
    rest, k = _quadrant(x)
    y = tl.where((k & 1) == 0, _cosine_near_0(rest), _sine_near_0(rest))
    return tl.where((k == 0) | (k == 3), y, -y)


@triton.jit
def power(x, y):
    return libdevice.pow(x, y)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, 0.0) - tl.where(x < 0.0, 1.0, 0.0)


@triton.jit
def floor_remainder(a, b):
    """Of the divisor's sign, as in torch and Python."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide(a, b):
    return (a - floor_remainder(a, b)) // b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


if os.environ.get("TRITON_INTERPRET") == "1":  # its tl.max skips NaN, as numpy's nanmax; its tl.reduce takes seconds

    @triton.jit
    def row_max(x):
        nans = tl.sum((x != x).to(tl.int32), 1, keep_dims=True)
        return tl.where(nans > 0, float("nan"), tl.max(x, 1, keep_dims=True))

    @triton.jit
    def row_sums(a, b):
        return tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)

else:

    @triton.jit
    def row_max(x):
        return tl.reduce(x, 1, larger, keep_dims=True)

    @triton.jit
    def row_sums(a, b):
        """The sums of two tiles' rows, in one exchange between threads."""
        first, second = tl.reduce((a, b), 1, _add)
        return first[:, None], second[:, None]
