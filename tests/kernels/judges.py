"""Whether a kernel's results are as exact as float32 inside and one rounding at the end can make them.

Every element has an allowance of its own: 2 units of the last place of the correctly rounded float64 result, and so
many roundings of float32 (2^-24 each) of the magnitudes that were added up to make it, taken from its own row. Nothing
is measured against another row or the whole tensor: a row of large numbers, or a constant one, whose `rstd` is 316,
hides nothing in the others. A judge returns the largest error over its allowance: at most 1 is right.

    assert judges.layer_norm((y, mean, rstd), x, w, b, 1e-5) <= 1.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from closeness import FORMATS, wide
from torch import Tensor

from kernels_triton.library import reference
from kernels_triton.library.reference.softmax import seen

UNITS = 2.0
ROUNDING = 2.0**-24
FEW = 16.0  # roundings of a sum over a row, or over rows, and what follows it
SMALLEST = 2.0**-126  # below, an exponential or a product inside may be rounded to a multiple of 2^-149, or be 0
# A logistic below 2^-126 is 0 (`quotient`), as roundings. Of x it was to be multiplied by, |x| <= 88: x = -87.3 for
# `silu`, -10 for `gelu_tanh`. The slope of `gelu_tanh` has 10 * (1.6 + 0.214 * 100) = 230 of it.
GONE = {"value": 88 * SMALLEST / ROUNDING, "slope": 232 * SMALLEST / ROUNDING}
# Of 16 bits: how exact the normal distribution function is, relatively, down to -5. Below it falls too fast: by 3.5e-10
# at most, at -5.3, where x times it is off by 1.9e-9, or 0.6 %, of what is less everywhere else.
NORMAL, TAIL = 4.4e-4, -5.0
BELOW_TAIL, TIMES_X = 4e-10 / ROUNDING, 2e-9 / ROUNDING


def error(found: Tensor, exact: Tensor, roundings: Tensor) -> float:
    """The largest error, by what is allowed: UNITS units of the result, and `roundings` of float32."""
    assert found.shape == exact.shape
    assert found.dtype in FORMATS
    bits, smallest = FORMATS[found.dtype]
    limit = torch.finfo(found.dtype).max
    rounded = exact.clamp(-limit, limit).to(found.dtype).double()
    unit = torch.exp2(torch.floor(torch.log2(rounded.abs().clamp(min=smallest))) - bits)
    distance = (found.double() - rounded).abs()
    distance = distance.masked_fill(found.double().abs().eq(torch.inf) & (exact.abs() >= limit), 0.0)
    assert not distance.isnan().any(), "NaN: an element was not written, or read from out of bounds"
    allowed = UNITS * unit + ROUNDING * roundings + SMALLEST
    return float((distance / allowed).max()) if distance.numel() else 0.0


def _or_one(weight: Tensor | None) -> Tensor | float:
    return 1.0 if weight is None else wide(weight).abs()


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else wide(x)


def layer_norm(found: Sequence[Tensor], x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> float:
    """(y, mean, rstd). x - mean cancels: the mean is known to what the magnitudes of its row say."""
    exact = reference.layer_norm(wide(x), _wide(w), _wide(b), eps)
    size, mean, rstd = wide(x).abs().mean(-1), exact[1][..., None], exact[2][..., None]
    terms = (size[..., None] + (wide(x) - mean).abs()) * rstd * _or_one(w) + (0.0 if b is None else wide(b).abs())
    of_stats = max(error(found[1], exact[1], FEW * size), error(found[2], exact[2], FEW * exact[2]))
    return max(error(found[0], exact[0], FEW * terms), of_stats)


def rms_norm(found: Sequence[Tensor], x: Tensor, w: Tensor | None, eps: float) -> float:
    """(y, rstd): nothing cancels."""
    exact = reference.rms_norm(wide(x), _wide(w), eps)
    return max(error(one, want, FEW * want.abs()) for one, want in zip(found, exact, strict=True))


def norm_backward(
    found: Sequence[Tensor | None],
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    beside: Tensor | None,
) -> float:
    """(dx, dw, db); of an RMS norm, without `mean`, (dx, dw)."""
    if mean is None:
        exact = reference.rms_norm_backward(wide(dy), wide(x), _wide(w), wide(rstd), _wide(beside))
    else:
        exact = reference.layer_norm_backward(wide(dy), wide(x), _wide(w), wide(mean), wide(rstd), _wide(beside))
    r = wide(rstd)[..., None]
    xhat = (wide(x) - (0.0 if mean is None else wide(mean)[..., None])) * r
    terms = _dx_terms((wide(dy) * _or_one(w)).abs(), xhat.abs(), r) + (0.0 if beside is None else wide(beside).abs())
    assert found[0] is not None
    worst = [error(found[0], exact[0], FEW * terms)]
    for mine, theirs, added in zip(found[1:], exact[1:], (wide(dy) * xhat, wide(dy)), strict=False):
        worst.append(summed(mine, theirs, added.abs().flatten(0, -2)))
    return max(worst)


def _dx_terms(g: Tensor, xhat: Tensor, rstd: Tensor) -> Tensor:
    return rstd * (g + g.mean(-1, keepdim=True) + xhat * (g * xhat).mean(-1, keepdim=True))


def summed(mine: Tensor | None, exact: Tensor | None, terms: Tensor, roundings: Tensor | float = 0.0) -> float:
    """A sum over rows, at float32 accuracy, and rounded once; `roundings` is what the terms lack, if anything."""
    if mine is None or exact is None:
        assert mine is exact
        return 0.0
    return error(mine, exact, FEW * terms.sum(0) + roundings)


def softmax(y: Tensor, x: Tensor, scale: float, mask: Tensor | None, causal: bool) -> float:
    """A logit and the largest of its row are rounded a few times each, and pass into the exponential as they are."""
    exact = reference.softmax(wide(x), scale, _wide(mask), causal)
    z = wide(x) * scale
    if mask is not None and mask.dtype != torch.bool:
        z = z + wide(mask)
    gone = torch.zeros_like(z, dtype=torch.bool) if mask is None or mask.dtype != torch.bool else ~mask.expand(z.shape)
    gone = gone | ~seen(z) if causal else gone
    top = z.masked_fill(gone, -torch.inf).amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0).abs()
    return error(y, exact, exact * (FEW + 4.0 * (z.abs() + top)))


def softmax_backward(dx: Tensor, dy: Tensor, y: Tensor, scale: float, causal: bool) -> float:
    exact = reference.softmax_backward(wide(dy), wide(y), scale, causal)
    g, p = (t.masked_fill(~seen(t), 0.0) if causal else t for t in (wide(dy).abs(), wide(y).abs()))
    return error(dx, exact, FEW * scale * p * (g + (g * p).sum(-1, keepdim=True)))


def _exponent(u: Tensor, act: str) -> Tensor:
    """How large what goes into the exponential is: as many roundings it has afterwards."""
    match act:
        case "silu":
            return u.abs()
        case "gelu_tanh":
            return (2.0 * math.sqrt(2.0 / math.pi) * (u + 0.044715 * u**3)).abs()
        case "gelu":
            return u.square() / 2
        case _:
            return torch.zeros_like(u)


def _value_roundings(u: Tensor, act: str, dtype: torch.dtype) -> Tensor:
    if act == "gelu":  # 1 + erf cancels in float32; of 16 bits, where the tail is, it is let go
        tail = 4.0 * u.abs() if dtype == torch.float32 else (u < TAIL) * TIMES_X
        return tail + 8.0 * reference.bias_gelu(u, None, act).abs()
    return 8.0 * reference.bias_gelu(u, None, act).abs() * (1.0 + _exponent(u, act)) + GONE["value"]


def _slope_roundings(u: Tensor, act: str, dtype: torch.dtype) -> Tensor:
    """The slope of an activation is a sum, which is 0 somewhere."""
    if act == "relu2":
        return 8.0 * u.abs()
    density = u.abs() * torch.exp(-u.square() / 2) / math.sqrt(2.0 * math.pi)
    if act == "gelu":
        below = 0.5 * torch.erfc(-u / math.sqrt(2.0))
        of_normal = 4.0 if dtype == torch.float32 else NORMAL / ROUNDING * below + (u < TAIL) * BELOW_TAIL
        return of_normal + 8.0 * (below + density * (1.0 + _exponent(u, act)))
    exponent = _exponent(u, act)
    inner = u if act == "silu" else 2.0 * math.sqrt(2.0 / math.pi) * (u + 0.044715 * u**3)
    s = torch.sigmoid(inner)
    steep = 1.0 if act == "silu" else 1.5957691216057308 + 0.2140644488 * u.square()
    return 8.0 * (1.0 + exponent) * (s + u.abs() * s * torch.sigmoid(-inner) * steep) + GONE["slope"]


def _curvature(u: Tensor, act: str) -> Tensor:
    """What the slope changes by, as x + bias does by its rounding."""
    with torch.enable_grad():
        at = u.detach().requires_grad_()
        slope, _ = reference.bias_gelu_backward(torch.ones_like(u), at, None, act)
        return torch.autograd.grad(slope.sum(), at)[0]


def bias_gelu(y: Tensor, x: Tensor, b: Tensor | None, act: str) -> float:
    u = wide(x) if b is None else wide(x) + wide(b)
    slope = reference.bias_gelu_backward(torch.ones_like(u), u, None, act)[0]
    roundings = _value_roundings(u, act, y.dtype) + 2.0 * (slope * u).abs()
    return error(y, reference.bias_gelu(u, None, act), roundings)


def bias_gelu_backward(found: Sequence[Tensor | None], dy: Tensor, x: Tensor, b: Tensor | None, act: str) -> float:
    u = wide(x) if b is None else wide(x) + wide(b)
    exact, total = reference.bias_gelu_backward(wide(dy), wide(x), _wide(b), act)
    roundings = wide(dy).abs() * (_slope_roundings(u, act, x.dtype) + 2.0 * (_curvature(u, act) * u).abs())
    assert found[0] is not None
    terms, more = exact.abs().flatten(0, -2), roundings.flatten(0, -2).sum(0)
    return max(error(found[0], exact, roundings), summed(found[1], total, terms, more))


def gated(y: Tensor, gate: Tensor, up: Tensor, act: str) -> float:
    exact = reference.gated(wide(gate), wide(up), act)
    return error(y, exact, wide(up).abs() * _value_roundings(wide(gate), act, y.dtype))


def gated_backward(found: Sequence[Tensor], dy: Tensor, gate: Tensor, up: Tensor, act: str) -> float:
    """(dgate, dup)."""
    exact, other = reference.gated_backward(wide(dy), wide(gate), wide(up), act)
    assert other is not None
    size = wide(dy).abs()
    slope = size * wide(up).abs() * _slope_roundings(wide(gate), act, gate.dtype)
    value = size * _value_roundings(wide(gate), act, gate.dtype)
    return max(error(found[0], exact, slope + 4.0 * exact.abs()), error(found[1], other, value + 4.0 * other.abs()))


def rope(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool) -> float:
    exact = reference.rope(wide(x), wide(cos), wide(sin), inverse, interleaved)
    sizes = [wide(t).abs() for t in (x, cos, sin)]
    both = [reference.rope(*sizes, turned, interleaved) for turned in (False, True)]
    return error(y, exact, 4.0 * torch.maximum(*both))


def group_norm(
    found: Sequence[Tensor], x: Tensor, groups: int, w: Tensor | None, b: Tensor | None, eps: float
) -> float:
    """(y, mean, rstd)."""
    exact = reference.group_norm(wide(x), groups, _wide(w), _wide(b), eps)
    grouped = wide(x).reshape(x.shape[0], groups, -1)
    size, mean, rstd = grouped.abs().mean(-1), exact[1][..., None], exact[2][..., None]
    terms = ((size[..., None] + (grouped - mean).abs()) * rstd).reshape(x.shape)
    terms = terms * _of_channels(_or_one(w), x) + _of_channels(0.0 if b is None else wide(b).abs(), x)
    of_stats = max(error(found[1], exact[1], FEW * size), error(found[2], exact[2], FEW * exact[2]))
    return max(error(found[0], exact[0], FEW * terms), of_stats)


def group_norm_backward(
    found: Sequence[Tensor | None], dy: Tensor, x: Tensor, groups: int, w: Tensor | None, mean: Tensor, rstd: Tensor
) -> float:
    """(dx, dw, db)."""
    exact = reference.group_norm_backward(wide(dy), wide(x), groups, _wide(w), wide(mean), wide(rstd))
    grouped, r = wide(x).reshape(x.shape[0], groups, -1), wide(rstd)[..., None]
    xhat = (grouped - wide(mean)[..., None]) * r
    g = (wide(dy) * _of_channels(_or_one(w), x)).reshape(grouped.shape)
    terms = _dx_terms(g.abs(), xhat.abs(), r).reshape(x.shape)
    assert found[0] is not None
    worst = [error(found[0], exact[0], FEW * terms)]
    for mine, theirs, added in zip(found[1:], exact[1:], (wide(dy) * xhat.reshape(x.shape), wide(dy)), strict=True):
        rows = added.abs().reshape(*x.shape[:2], -1).transpose(1, 2).flatten(0, 1)
        worst.append(summed(mine, theirs, rows))
    return max(worst)


def _of_channels(value: Tensor | float, x: Tensor) -> Tensor | float:
    return value.reshape(-1, *[1] * (x.dim() - 2)) if isinstance(value, Tensor) else value
