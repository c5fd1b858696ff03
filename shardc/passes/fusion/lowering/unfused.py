"""Torch's pointwise ops and reductions without a lowering, each with the reason that `explain` shows:

    kernels do not know special_zeta: a series as long as its arguments say

tests/passes/test_fuse_coverage.py: every such op of torch either is in this table or has a lowering.
"""

from __future__ import annotations

LOOP = "a recurrence or a series, as long as its arguments say"
LOCAL = "libdevice's goes through local memory"
SERIES = "libdevice has none, and few models do: its series is not written"
POLYNOMIALS = "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w"
REASONS: dict[str, tuple[str, ...]] = {
    LOOP: (
        *("gcd", "lcm", "igamma", "igammac", "special_zeta"),
        *(f"special_{name}" for name in POLYNOMIALS.split()),
        *(f"special_shifted_{name}" for name in POLYNOMIALS.split()),
        *("special_hermite_polynomial_h", "special_hermite_polynomial_he", "special_laguerre_polynomial_l"),
        "special_legendre_polynomial_p",
    ),
    LOCAL: ("special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1"),
    SERIES: ("special_airy_ai",),
    "it is DTensor's, of a norm of shards": ("linalg__powsum",),
    "it takes the bits of a float apart": ("frexp",),
    "it yields a bool and no tensor": ("equal",),
    "it is of complex numbers": ("_conj_physical",),
}
UNFUSED = {name: reason for reason, names in REASONS.items() for name in names}
