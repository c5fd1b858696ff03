"""Special functions for generated kernels: error functions, gamma functions, Bessel functions, exact remainders.

libdevice's functions are used where they need no local memory; the interpreter's shim (tests/kernels/shim.py) replaces
them with torch's. The derivatives of log-gamma are sums: the recurrence is applied until the asymptotic series has
float32's accuracy.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

PI = tl.constexpr(3.141592653589793)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def erfcx(x):
    """exp(x^2) * erfc(x)"""
    return libdevice.erfcx(x)


@triton.jit
def erfinv(x):
    return libdevice.erfinv(x)


@triton.jit
def ndtri(x):
    """The normal distribution's quantile."""
    return libdevice.normcdfinv(x)


@triton.jit
def lgamma(x):
    return libdevice.lgamma(x)


@triton.jit
def bessel_i0(x):
    return libdevice.cyl_bessel_i0(x)


@triton.jit
def bessel_i1(x):
    return libdevice.cyl_bessel_i1(x)


@triton.jit
def log_half(x):
    """log(x / 2), of denormal numbers too, whose half may be 0."""
    small = x < 1.0
    return tl.log(tl.where(small, x, 0.5 * x)) - tl.where(small, 0.6931471805599453, 0.0)


@triton.jit
def bessel_k0(x):
    """Up to 2 a polynomial and log(x / 2) I0(x) (Abramowitz and Stegun, 9.8.5); NaN left of 0."""
    t = 0.25 * (x * x)
    p = (((7.40e-6 * t + 1.0750e-4) * t + 2.62698e-3) * t + 3.488590e-2) * t
    near = ((p + 2.3069756e-1) * t + 4.2278420e-1) * t - 5.7721566e-1 - log_half(x) * bessel_i0(x)
    return tl.where(x > 2.0, tl.exp(-x) * k0_beyond_2(x), near)


@triton.jit
def scaled_bessel_k0(x):
    """exp(x) K0(x)"""
    return tl.where(x > 2.0, k0_beyond_2(x), tl.exp(x) * bessel_k0(x))


@triton.jit
def k0_beyond_2(x):
    """exp(x) K0(x), a polynomial in 2 / x over the root of x (9.8.6)."""
    s = 2.0 / x
    p = (((5.3208e-4 * s - 2.51540e-3) * s + 5.87872e-3) * s - 1.062446e-2) * s
    return (((p + 2.189568e-2) * s - 7.832358e-2) * s + 1.25331414) * tl.rsqrt(x)


@triton.jit
def bessel_k1(x):
    """As K0 (9.8.7); infinite at 0."""
    t = 0.25 * (x * x)
    p = (((-4.686e-5 * t - 1.10404e-3) * t - 1.919402e-2) * t - 1.8156897e-1) * t
    near = (((p - 6.7278579e-1) * t + 1.5443144e-1) * t + 1.0) / x + log_half(x) * bessel_i1(x)
    near = tl.where(x == 0.0, float("inf"), near)
    return tl.where(x > 2.0, tl.exp(-x) * k1_beyond_2(x), near)


@triton.jit
def scaled_bessel_k1(x):
    """exp(x) K1(x)"""
    return tl.where(x > 2.0, k1_beyond_2(x), tl.exp(x) * bessel_k1(x))


@triton.jit
def k1_beyond_2(x):
    """exp(x) K1(x) (9.8.8)."""
    s = 2.0 / x
    p = (((-6.8245e-4 * s + 3.25614e-3) * s - 7.80353e-3) * s + 1.504268e-2) * s
    return (((p - 3.655620e-2) * s + 2.3498619e-1) * s + 1.25331414) * tl.rsqrt(x)


@triton.jit
def next_after(x, y):
    return libdevice.nextafter(x, y)


@triton.jit
def truncated(x):
    return libdevice.trunc(x)


@triton.jit
def nearest(x):
    """The nearest integer; ties go to the even one."""
    return libdevice.rint(x)


@triton.jit
def nearest_quotient(a, b):
    """a / b as IEEE 754 rounds it."""
    return libdevice.div_rn(a, b)


@triton.jit
def float_rest(a, b):
    """The exact remainder of a divided by b, with a's sign."""
    return libdevice.fmod(a, b)


@triton.jit
def digamma(x):
    """Left of 0 by reflection: psi(x) = psi(1 - x) - pi / tan(pi x)."""
    left = x < 0.0
    z = tl.where(left, 1.0 - x, x)
    total = tl.zeros_like(z)
    for _ in tl.static_range(6):
        small = z < 6.0
        total -= tl.where(small, 1.0 / z, 0.0)
        z += tl.where(small, 1.0, 0.0)
    s = 1.0 / (z * z)
    series = ((s * -0.004166666666666667 + 0.003968253968253968) * s - 0.008333333333333333) * s
    series = (series + 0.08333333333333333) * s
    y = total + (tl.log(z) - 0.5 / z - series)
    y = tl.where(left, y - PI * (libdevice.cospi(x) / libdevice.sinpi(x)), y)
    y = tl.where(left & (x == tl.floor(x)), float("nan"), y)
    return tl.where(x == 0.0, -1.0 / x, y)


@triton.jit
def trigamma(x):
    """Left of 1/2 by reflection: psi'(x) = (pi / sin(pi x))^2 - psi'(1 - x)."""
    left = x < 0.5
    z = tl.where(left, 1.0 - x, x)
    total = tl.zeros_like(z)
    for _ in tl.static_range(6):
        total += 1.0 / (z * z)
        z += 1.0
    s = 1.0 / (z * z)
    series = ((s * 0.023809523809523808 - 0.03333333333333333) * s + 0.16666666666666666) * s
    y = total + (1.0 + 0.5 / z + series) / z
    root = PI / libdevice.sinpi(x)
    return tl.where(left, root * root - y, y)
