"""Functions for generated kernels that Triton lacks, or defines otherwise than torch."""

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels_triton.library.kernels.arithmetic import LOG2E, logistic, normal, quotient  # noqa: F401
from kernels_triton.library.kernels.philox import at_least, philox_word  # noqa: F401
from kernels_triton.library.kernels.special import (  # noqa: F401
    bessel_i0,
    bessel_i1,
    bessel_k0,
    bessel_k1,
    digamma,
    erfc,
    erfcx,
    erfinv,
    float_rest,
    lgamma,
    ndtri,
    nearest,
    nearest_quotient,
    next_after,
    scaled_bessel_k0,
    scaled_bessel_k1,
    trigamma,
    truncated,
)


@triton.jit
def exp(x):
    """Within 2 units in the last place for |x| <= 16, as `tl.exp`; results below 2^-126 are 0."""
    return tl.exp2(x * LOG2E)


@triton.jit
def tanh(x):
    """A polynomial (Cephes') near 0, where 1 - 2 / (exp(2x) + 1) would cancel."""
    s = x * x
    p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s
    near = (p - 3.33332819422e-1) * s * x + x
    far = 1.0 - quotient(2.0, tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    near = tl.where(s == 0.0, x, near)  # a sum would turn -0 into 0
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def expm1(x):
    """Kahan's method: the logarithm of the rounded exp cancels its rounding."""
    u = tl.exp(x)
    y = u - 1.0
    return tl.where(u == 1.0, x, tl.where((tl.abs(x) > 1.0), y, y * x / tl.log(u)))


@triton.jit
def log1p(x):
    u = x + 1.0
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / (u - 1.0))))


SMALL = tl.constexpr(2.0**25)  # the largest angle whose subtrahend float64 represents


@triton.jit
def _quadrant(x):
    """x minus k * pi / 2, and k modulo 4, in float64. pi / 2 is in two parts, and k times the first is exact.

    A tile with angles of 2^25 or more, which positions do not reach, takes another path. (libdevice's path uses local
    memory.)
    """
    wide = x.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    rest = ((wide - turns * 1.570796325802803) - turns * 9.920935796805404e-10).to(tl.float32)
    k = turns.to(tl.int32) & 3
    size = tl.abs(x) + tl.zeros((1,), tl.float32)  # tl.max does not take a scalar
    if tl.max(size) >= SMALL:
        far, quarter = _quadrant_far_out(wide)
        near = tl.abs(x) < SMALL
        rest, k = tl.where(near, rest, far), tl.where(near, k, quarter)
    return rest, k


@triton.jit
def _by_size(size, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """One of four float64 constants: for sizes below 2^51, below 2^77, below 2^103, and above."""
    high = tl.where(size < 2.0**103, tl.full((), c, tl.float64), tl.full((), d, tl.float64))
    return tl.where(
        size < 2.0**51, tl.full((), a, tl.float64), tl.where(size < 2.0**77, tl.full((), b, tl.float64), high)
    )


@triton.jit
def _quadrant_far_out(x):
    """Payne and Hanek's method: of 2 / pi only those bits count whose product with x is below 4, and as many below.

    x = y * 2^(26 n), with y below 2^51, of 24 bits and a multiple of 4. The integer part of `2^(26 n) * 2 / pi` makes
    whole turns. Its fraction is in two parts of 29 bits, whose products with y are exact, and a rest.
    """
    size = tl.abs(x)
    y = x * _by_size(size, 1.0, 2.0**-26, 2.0**-52, 2.0**-78)
    first = y * _by_size(size, 0.636619770899415, 0.7235269732773304, 0.322750236839056, 0.8357618618756533)
    second = y * _by_size(
        size, 1.4681663246252086e-09, 1.0840630233766024e-09, 1.277951345440842e-09, 1.2145740906077673e-09
    )
    third = y * _by_size(
        size, 2.276010073078396e-18, 1.6957242477360877e-18, 7.513295661581536e-19, 1.3360673439552855e-18
    )
    first -= 4.0 * tl.floor(first * 0.25)
    second -= 4.0 * tl.floor(second * 0.25)
    turns = tl.floor(first + second + third + 0.5)
    rest = ((first - turns) + second) + third
    return (rest * 1.5707963267948966).to(tl.float32), turns.to(tl.int32) & 3


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
    return tl.where(x == 0.0, x, tl.where(k < 2, y, -y))


@triton.jit
def cosine(x):
    rest, k = _quadrant(x)
    y = tl.where((k & 1) == 0, _cosine_near_0(rest), _sine_near_0(rest))
    return tl.where((k == 0) | (k == 3), y, -y)


@triton.jit
def arctan(x):
    """A polynomial (Cephes') on [0, tan(pi / 8)], to which other arguments are reduced."""
    a = tl.abs(x)
    high, middle = a > 2.414213562373095, a > 0.4142135623730950
    z = tl.where(high, -1.0, tl.where(middle, a - 1.0, a)) / tl.where(high, a, tl.where(middle, a + 1.0, 1.0))
    s = z * z
    p = (((8.05374449538e-2 * s - 1.38776856032e-1) * s + 1.99777106478e-1) * s - 3.33329491539e-1) * s * z + z
    y = p + tl.where(high, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return tl.where(x == 0.0, x, tl.where(x < 0.0, -y, y))


@triton.jit
def power(x, y):
    return libdevice.pow(x, y)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, 0.0) - tl.where(x < 0.0, 1.0, 0.0)


@triton.jit
def floor_remainder(a, b):
    """The remainder with the divisor's sign, as in torch and Python."""
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


@triton.jit
def _times(a, b):
    return a * b


if os.environ.get("TRITON_INTERPRET") == "1":  # its tl.max skips NaN, as numpy's nanmax; its tl.reduce takes seconds

    @triton.jit
    def _top(x, axis: tl.constexpr):
        nans = tl.sum((x != x).to(tl.int32), axis, keep_dims=True)
        return tl.where(nans > 0, float("nan"), tl.max(x, axis, keep_dims=True))

    @triton.jit
    def row_max(x):
        return _top(x, 1)

    @triton.jit
    def col_max(x):
        return _top(x, 0)

    @triton.jit
    def row_sums(a, b):
        """The row sums of two tiles, in one exchange between threads."""
        return tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)

else:

    @triton.jit
    def row_max(x):
        return tl.reduce(x, 1, larger, keep_dims=True)

    @triton.jit
    def col_max(x):
        return tl.reduce(x, 0, larger, keep_dims=True)

    @triton.jit
    def row_sums(a, b):
        """The sums of two tiles' rows, in one exchange between threads."""
        first, second = tl.reduce((a, b), 1, _add)
        return first[:, None], second[:, None]


@triton.jit
def row_product(x):
    return tl.reduce(x, 1, _times, keep_dims=True)


@triton.jit
def col_product(x):
    return tl.reduce(x, 0, _times, keep_dims=True)
