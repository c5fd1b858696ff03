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

Two have none because the generated kernel moves as many bytes in no more time at any width: dropout with a bias and a
residual (53 us instead of 56 at 4096 columns, 146 instead of 158 at 12,288) and RMSNorm's backward (60.3 instead of
61.0, 157.5 instead of 158.9). A rotary embedding has none because there is nothing to gain: with
`transform/unroll_dim.py` each half is read and written once. It takes 38.9 us for 8192 positions of 32 heads of 128 and
38.2 in backward, the template 37.6 and 38.1, a copy 37.2.
Cross-entropy with label smoothing or class weights has other formulas, and no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kernels_triton.match.pattern import Pattern, formulas
from kernels_triton.match.softmaxes import SOFTMAXES


@dataclass(frozen=True)
class TemplatePattern:
    """`needs` are ops that the formulas contain; `options` are further arguments of the template's function."""

    name: str
    operands: Mapping[str, str]
    text: str
    results: Mapping[str, str]  # result -> its formula
    needs: frozenset[str]
    options: Mapping[str, str]

    @cached_property
    def formulas(self) -> dict[str, Pattern]:
        return formulas(self.operands, self.text)

    @property
    def required(self) -> frozenset[str]:
        return frozenset(name for name in self.results if not name.endswith("?"))


def template_pattern(name: str, operands: str, text: str, results: str, needs: str, **options: str) -> TemplatePattern:
    """`operands`: `x: full, bias: col?`. `results`: `y, sum?=h`: the result `sum` is the formula `h`."""
    read = dict(part.strip().split(": ") for part in operands.split(","))
    formula_of_result: dict[str, str] = {}
    for part in results.split(","):
        key, _, formula = part.strip().partition("=")
        formula_of_result[key] = formula or key.removesuffix("?")
    return TemplatePattern(name, read, text, formula_of_result, frozenset(needs.split()), options)


NORM = "x: full, before: col?, weight: col?, bias: col?, eps: number"
LAYER_NORM = """
    h = {h}
    mean = rsum(h) / cols
    d = h - mean
    rstd = rsqrt(rsum(d * d) / cols + eps)
    y = d * rstd * weight + bias
"""
RMS_NORM = """
    h = {h}
    squares = rsum(h * h)
    rstd = rsqrt(squares / cols + eps)
    y = h * rstd * weight
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

K, A = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and the cube's weight
TANH = f"tanh({K} * (u + {A} * u * u * u) | {K} * u * (1 + {A} * u * u))"
CDF = "(1 + erf(0.7071067811865476 * u))"
PDF = "exp(-0.5 * u * u) * 0.3989422804014327"
VALUES = {
    "gelu_tanh": f"0.5 * u * (1 + {TANH})",
    "gelu": f"0.5 * u * {CDF}",
    "silu": "u * sigmoid(u)",
}
TANH_PART = f"""
    u = {{u}}
    t = {TANH}
"""
SLOPES = {
    "gelu_tanh": f"(0.5 * (1 + t) + 0.5 * {K} * u * (1 - t * t) * (1 + {3 * A} * u * u))",
    "gelu": f"(0.5 * {CDF} + u * {PDF})",
    "silu": "sigmoid(u) * (1 + u * (1 - sigmoid(u)))",
}
NEEDS = {"gelu_tanh": "tanh", "gelu": "erf", "silu": "sigmoid"}
POSITIVE = """
    u = x + bias
    r = maximum(u, 0)
"""
SQUARED_RELU = POSITIVE + "    y = r * r\n"
SQUARED_RELU_BACKWARD = f"""{POSITIVE}
    dx = where(le(r, 0), 0, 2 * dy * r | dy * r + dy * r)
    dbias = csum(dx)
"""


def _expanded_gelu_gradient(gradient: str) -> str:
    """What autograd makes of a GeLU that is written out as its formula."""
    tanh = f"0.5 * {K} * {gradient} * u * (1 - t * t)"
    return f"0.5 * {gradient} * (1 + t) + {tanh} + {3 * A} * {tanh} * u * u"


def _slope(act: str, u: str) -> str:
    return TANH_PART.format(u=u) if act == "gelu_tanh" else f"\n    u = {u}\n"


def _gelu_backward(act: str) -> str:
    dx = f"dy * {SLOPES[act]}"
    if act == "gelu_tanh":
        dx += f" | {_expanded_gelu_gradient('dy')}"
    return _slope(act, "x + bias") + f"    dx = {dx}\n    dbias = csum(dx)\n"


def _gated_backward(act: str) -> str:
    dgate = f"dy * up * {SLOPES[act]}"
    if act == "gelu_tanh":
        dgate += f" | {_expanded_gelu_gradient('dy * up')}"
    return _slope(act, "gate") + f"    dgate = {dgate}\n    dup = dy * {VALUES[act]}\n"


def _norms() -> list[TemplatePattern]:
    stats, squares = "y, sum?=h, mean?, rstd?", "y, sum?=h, squares?, rstd?"
    rms = NORM.replace(", bias: col?", "")
    grads = "dx, dweight?, dbefore?, dbias?"
    patterns = [template_pattern("layer_norm_backward", BACKWARD, LAYER_NORM_BACKWARD, grads, "rsum")]
    for prefix, h, more in (("", "x + before", ""), ("add_", "x + before + residual", ", residual: full")):
        of_layer, of_rms = LAYER_NORM.format(h=h), RMS_NORM.format(h=h)
        patterns.append(template_pattern(f"{prefix}layer_norm", NORM + more, of_layer, stats, "rsum rsqrt"))
        patterns.append(template_pattern(f"{prefix}rms_norm", rms + more, of_rms, squares, "rsum rsqrt"))
    return patterns


def _activations() -> list[TemplatePattern]:
    patterns: list[TemplatePattern] = []
    for act, value in VALUES.items():
        needs = NEEDS[act]
        gate, biased = f"\n    u = gate\n    y = up * {value}\n", f"\n    u = x + bias\n    y = {value}\n"
        gated, backward = "gate: full, up: full", _gated_backward(act)
        patterns.append(template_pattern("gated", gated, gate, "y", needs, act=act))
        patterns.append(
            template_pattern("gated_backward", f"dy: full, {gated}", backward, "dgate, dup", needs, act=act)
        )
        if act != "silu":
            x, backward = "x: full, bias: col?", _gelu_backward(act)
            patterns.append(template_pattern("bias_gelu", x, biased, "y", needs, act=act))
            patterns.append(
                template_pattern("bias_gelu_backward", f"dy: full, {x}", backward, "dx, dbias?", needs, act=act)
            )
    x, needs = "x: full, bias: col?", "maximum le where"
    patterns.append(template_pattern("squared_relu", x, SQUARED_RELU, "y", "maximum", act="relu2"))
    grad = template_pattern(
        "squared_relu_backward", f"dy: full, {x}", SQUARED_RELU_BACKWARD, "dx, dbias?", needs, act="relu2"
    )
    return [*patterns, grad]


LOSS = "logits: full, bias: col?, target: row, scale: scalar, count: scalar, ignore: number"

LOSSES = [template_pattern("cross_entropy", LOSS, CROSS_ENTROPY, "dlogits, total?, picked?", "rmax exp eq where")]

TEMPLATES = (*_norms(), *_activations(), *LOSSES, *[template_pattern(**entry) for entry in SOFTMAXES])
NAMES = tuple(sorted({pattern.name for pattern in TEMPLATES}))
