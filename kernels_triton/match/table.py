"""The templates that a graph may hold: the formulas of each, and which results are optional.

A generated kernel matches a template if each of its outputs is one of the template's results, under one binding of its
inputs. `results` that end in `?` are optional.

These have no template here, because the generated kernel fuses more and moves fewer bytes (times are on an H200 at 8192
rows of 1024 in bfloat16, against the template and a kernel for the remaining ops):

    a norm with dropout before it          4 tensors instead of 5, 34 us instead of 47
    its backward, through the mask         5 + 1 sums instead of 6 + 1, 56 us instead of 71
    dropout's backward with a bias's sum   the mask is rematerialised: no bytes; 35 us, 19 from a kept mask
    a norm's backward for a sum of three   no sum is written and read before
    logits with a bias, up to 16384        the sum of the bias's gradient in the same pass: 15 us instead of 29 at 1000
    GroupNorm                              its statistics where x is made, its value where it is read, with SiLU: 24 us
                                           instead of 34 at [16, 640, 1024] of bfloat16, its backward 38 instead of 55;
                                           alone it would take 24 instead of the template's 19, and 36 instead of 34
    AdamW                                  parameters and moments are tensors of their own, many a launch: GPT-2's 148
                                           in float32 take 865 us, torch's fused AdamW 1014; one flat tensor would 823

Others have none because the generated kernel moves as many bytes and takes no more time, within the noise of 1 %
(`benchmarks/kernels_generated.py` on an H100, 8192 rows, 256 to 12,288 columns): RMSNorm and its backward, gated
activations and theirs, activations with a bias and theirs, dropout with a residual, rotary embeddings, and softmax over
512 to 4096 keys with torch's masks. At two shapes the template was faster, and at others of the same op slower: a bias
and the exact GeLU's backward takes 1.04 of the template's time at 1024 columns, and 0.88, 0.86 and 1.00 from 4096 on;
softmax with a mask that is added takes 1.02 at 2048 keys and 0.98 at 4096.

The templates that are left are faster: the generated layer norm takes up to 1.24 of the template's time (8192 columns),
its backward up to 1.25 (256 columns), cross-entropy up to 1.95 (50,304 words).

Cross-entropy with label smoothing or class weights has other formulas, and no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kernels_triton.match.pattern import Pattern, formulas


@dataclass(frozen=True)
class TemplatePattern:
    """`needs` are ops that the formulas contain."""

    name: str
    operands: Mapping[str, str]
    text: str
    results: Mapping[str, str]  # result -> its formula
    needs: frozenset[str]

    @cached_property
    def formulas(self) -> dict[str, Pattern]:
        return formulas(self.operands, self.text)

    @property
    def required(self) -> frozenset[str]:
        return frozenset(name for name in self.results if not name.endswith("?"))


def template_pattern(name: str, operands: str, text: str, results: str, needs: str) -> TemplatePattern:
    """`operands`: `x: full, bias: col?`. `results`: `y, sum?=h`: the result `sum` is the formula `h`."""
    read = dict(part.strip().split(": ") for part in operands.split(","))
    formula_of_result: dict[str, str] = {}
    for part in results.split(","):
        key, _, formula = part.strip().partition("=")
        formula_of_result[key] = formula or key.removesuffix("?")
    return TemplatePattern(name, read, text, formula_of_result, frozenset(needs.split()))


NORM = "x: full, before: col?, weight: col?, bias: col?, eps: number"
LAYER_NORM = """
    h = {h}
    mean = rsum(h) / cols
    d = h - mean
    rstd = rsqrt(rsum(d * d) / cols + eps)
    y = d * rstd * weight + bias
"""
BACKWARD = "dy: full, more: full?, x: full, weight: col?, residual: full?, mean: row, rstd: row"
LAYER_NORM_BACKWARD = """
    g = dy + more
    hat = (x - mean) * rstd
    gw = g * weight
    dx = (gw - rsum(gw) / cols - hat * rsum(gw * hat) / cols) * rstd + residual
    dweight = csum(g * hat)
    dbias = csum(g)
    dbefore = csum(dx)
"""

CROSS_ENTROPY = """
    u = logits + bias
    z = u - rmax(u)
    e = exp(z)
    total = rsum(e)
    hot = eq(column, target)
    picked = rsum(where(hot, z, 0))
    factor = where(ne(target, ignore), scale | 1 / count, 0)
    dlogits = e * factor / total - where(hot, factor, 0)
"""

LOSS = "logits: full, bias: col?, target: row, scale: scalar, count: scalar, ignore: number"
STATISTICS = "y, sum?=h, mean?, rstd?"
ADDED = f"{NORM}, residual: full"

TEMPLATES = (
    template_pattern("layer_norm_backward", BACKWARD, LAYER_NORM_BACKWARD, "dx, dweight?, dbefore?, dbias?", "rsum"),
    template_pattern("layer_norm", NORM, LAYER_NORM.format(h="x + before"), STATISTICS, "rsum rsqrt"),
    template_pattern("add_layer_norm", ADDED, LAYER_NORM.format(h="x + before + residual"), STATISTICS, "rsum rsqrt"),
    template_pattern("cross_entropy", LOSS, CROSS_ENTROPY, "dlogits, total?, picked?", "rmax exp eq where"),
)
NAMES = tuple(sorted({pattern.name for pattern in TEMPLATES}))
