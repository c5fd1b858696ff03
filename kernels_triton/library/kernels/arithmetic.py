"""Arithmetic that a GPU does in one or two instructions, where Triton's own functions take many.

Kernels that move 4 bytes an element can spend some 30 instructions on it before they are bound by arithmetic instead of
memory. Triton's division covers every range, in nine instructions. `quotient` is a reciprocal and a product. The
interpreter has no libdevice and divides.
"""

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def quotient(a, b):
    """a / b within 2 units in the last place, for a magnitude of b from 2^-126 to 2^126; beyond that, 0.

    So a logistic below 2^-126 is 0: silu(x) is 0 from x = -87.34 down, where it is -1.03e-36. One more product, for a
    scaled divisor, would extend this to -91.8.
    """
    return a / b if INTERPRETED else libdevice.fast_dividef(a, b)


@triton.jit
def logistic(x):
    return quotient(1.0, 1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def normal(x):
    """The normal distribution function at x, for results of 16 bits.

    1 / (1 + 2^-(x * q(|x|))), with q fitted to the distribution's logit over |x| <= 5. The relative error is below
    4.4e-4, also in the left tail: a tenth of bfloat16's unit, half of float16's. Past 5 the result tends to 0 and 1.
    """
    a = tl.abs(x)
    q = 2.252249e-4 * a - 2.711494e-3
    q = q * a + 2.198082e-3
    q = q * a + 0.1131058
    q = q * a - 0.01448397
    q = q * a + 2.307843
    return quotient(1.0, 1.0 + tl.exp2(-(x * q)))
