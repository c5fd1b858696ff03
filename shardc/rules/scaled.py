"""Products of 8-bit floats: as those of wide ones, with a scale for each operand.

A scale is of a whole tensor, and has no dims; or of its rows along the summed dim, and then has its operand's dims,
that one of size 1. What is pending is the product's result alone: an operand that is rounded is no part of a sum.
"""

from __future__ import annotations

import torch

from shardc.ir.ops.scaled import (
    COUNT_AMAX,
    INTERVALS,
    PUSH_AMAX,
    QUANTIZE,
    SCALE,
    SCALED_DGRAD,
    SCALED_LINEAR,
    SCALED_MM,
    SCALED_WGRAD,
)  # fmt: skip
from shardc.rules.notation import Dims
from shardc.rules.pointwise import aligned
from shardc.rules.registry import rule

WIDE = torch.float64  # of examples: nothing is rounded

rule(SCALE, examples=[((4, 6), WIDE), ((), WIDE), ((3, 1), WIDE)], kind="pointwise")(aligned)
rule(
    QUANTIZE,
    examples=[((4, 6), (), WIDE), ((3, 4, 6), (3, 4, 1), WIDE), ((3, 4, 6), (1, 1, 6), WIDE)],
    kind="pointwise",
)(aligned)
rule(COUNT_AMAX, "() -> n", whole="n", examples=[((), torch.float8_e4m3fn)])
rule(PUSH_AMAX, "h, n -> h", whole="h n", examples=[((16,), (INTERVALS,)), ((1,), (INTERVALS,))])


def _scales(first: Dims, second: Dims, *rows: str) -> str:
    """Of each of two scales its dims: `rows` where it is one of rows."""
    return ", ".join(text if scale.ndim else "()" for scale, text in zip((first, second), rows, strict=True))


@rule(
    SCALED_LINEAR,
    sum="k",
    examples=[
        ((2, 4, 6), (5, 6), (), (), WIDE),
        ((4, 6), (5, 6), (4, 1), (5, 1), WIDE),
        ((6,), (5, 6), (1,), (), WIDE),
    ],
)
def scaled_linear(x: Dims, w: Dims, x_scale: Dims, w_scale: Dims, dtype: torch.dtype) -> str:
    return f"... k, n k, {_scales(x_scale, w_scale, '... 1', 'n 1')} -> ... n"


@rule(
    SCALED_DGRAD,
    sum="n",
    examples=[((2, 4, 5), (5, 6), (), (), WIDE), ((2, 4, 5), (5, 6), (2, 4, 1), (1, 6), WIDE)],
)
def scaled_dgrad(g: Dims, w: Dims, g_scale: Dims, w_scale: Dims, dtype: torch.dtype) -> str:
    return f"... n, n k, {_scales(g_scale, w_scale, '... 1', '1 k')} -> ... k"


@rule(
    SCALED_WGRAD,
    sum="...",
    examples=[((2, 4, 5), (2, 4, 6), (), (), WIDE), ((2, 4, 5), (2, 4, 6), (1, 1, 5), (1, 1, 6), WIDE)],
)
def scaled_wgrad(g: Dims, x: Dims, g_scale: Dims, x_scale: Dims, dtype: torch.dtype) -> str:
    ones = "1 " * (g.ndim - 1)
    return f"... n, ... k, {_scales(g_scale, x_scale, f'{ones}n', f'{ones}k')} -> n k"


@rule(SCALED_MM, sum="k", examples=[((4, 6), (6, 3), (), (), WIDE), ((4, 6), (6, 3), (4, 1), (1, 3), WIDE)])
def scaled_mm(a: Dims, b: Dims, a_scale: Dims, b_scale: Dims, dtype: torch.dtype) -> str:
    return f"m k, k n, {_scales(a_scale, b_scale, 'm 1', '1 n')} -> m n"
