"""What the softmax templates compute: softmax of scores, scaled, with a mask that is added or says which are filled.

Only what is the same for all numbers: a row of -inf alone is NaN, as in torch, and finfo.min is a number like others.
A causal edge that is computed is the generator's: what is added past it must be read.
"""

from __future__ import annotations

ROWS = """
    e = exp(z - rmax(z))
    y = e / rsum(e)
"""


def _forward(operands: str, scores: str, filled: str = "") -> dict[str, str]:
    text = f"    z = {scores}\n{ROWS}"
    of = {"name": "softmax", "operands": f"x: full, {operands}, scale: number", "text": text, "results": "y"}
    return {**of, "needs": "rmax exp rsum", "filled": filled}


SOFTMAXES: tuple[dict[str, str], ...] = (  # by the names of `table.template`'s parameters
    _forward("mask: mask?", "scale * x + mask"),
    _forward("mask: flag, fill: number", "where(mask, scale * x, fill) | where(~mask, fill, scale * x)", "where not"),
    _forward("mask: flag, fill: number", "where(mask, fill, scale * x) | where(~mask, scale * x, fill)", "where"),
    {
        "name": "softmax_backward",
        "operands": "dy: full, y: full, scale: number",
        "text": "    dx = scale * y * (dy - rsum(dy * y))\n",
        "results": "dx",
        "needs": "rsum",
    },
)
