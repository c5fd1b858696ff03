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
