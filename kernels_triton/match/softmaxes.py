"""What the softmax templates compute: softmax of scaled scores, with a mask that is added or that selects filled
scores.

Formulas hold for all numbers: a row of only -inf gives NaN, as in torch, and finfo.min is an ordinary number. A
computed causal edge is left to the generator: what lies past it would have to be read to be masked.
"""

from __future__ import annotations

ROWS = """
    e = exp(z - rmax(z))
    y = e / rsum(e)
"""


def _forward_pattern(operands: str, scores: str, filled: str = "") -> dict[str, str]:
    text = f"    z = {scores}\n{ROWS}"
    common = {"name": "softmax", "operands": f"x: full, {operands}, scale: number", "text": text, "results": "y"}
    return {**common, "needs": "rmax exp rsum", "filled": filled}


SOFTMAXES: tuple[dict[str, str], ...] = (  # arguments of `table.template_pattern`
    _forward_pattern("mask: mask?", "scale * x + mask"),
    _forward_pattern(
        "mask: flag, fill: number", "where(mask, scale * x, fill) | where(~mask, fill, scale * x)", "where not"
    ),
    _forward_pattern(
        "mask: flag, fill: number", "where(mask, fill, scale * x) | where(~mask, scale * x, fill)", "where"
    ),
    {
        "name": "softmax_backward",
        "operands": "dy: full, y: full, scale: number",
        "text": "    dx = scale * y * (dy - rsum(dy * y))\n",
        "results": "dx",
        "needs": "rsum",
    },
)
