"""Products of 8-bit floats: numbers that are divided by a scale before they are rounded, and multiplied by it after.

    amax = amax(abs(x))                     of the whole tensor, or of each row along the dim that a product sums
    s    = scale(amax, f8e4m3)              the least power of two with amax / s <= 448
    q    = quantize(x, s, f8e4m3)           x / s, rounded to the nearest 8-bit number
    y    = scaled_linear(q, p, s, t, bf16)  (q p^T) s t, summed in float32

The scale is a power of two, so that neither the division nor the product with it rounds: all loss is of 8-bit numbers.
A NaN, and an infinity of amax, make the scale NaN and with it all numbers: a step that overflows is seen as such.
In a run that computes in wide dtypes instead, the scale is 1 and nothing is rounded.

Delayed scaling takes amax from the steps before. What is larger than s allows is cut, but for what is not finite:

    s       = scale(amax(history), f8e4m3)         q = quantize(x, s, f8e4m3, True)
    counts  = count_amax(amax(abs(x)), f8e4m3)     1 in the interval of this microbatch's amax: sums over microbatches
    history = push_amax(history, counts)           the largest interval's last bfloat16, and all but the last before

An interval has one scale for either format: their largest numbers are 0.875 of a power of two.

Micikevicius et al. 2022, "FP8 formats for deep learning", has the two formats: e4m3 for weights and activations, e5m2
for gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from kernels_triton.base.library import define
from shardc.torch_compat import multiplies_fp8, scaled_mm

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HISTORY = "fp8:"  # prefix of the state that has the largest elements of a value in the steps before
COUNTS = "fp8_counts:"  # prefix of the output of a microbatch that becomes part of it
GRADIENT = "gradient:"  # what follows either prefix, of a value that is a gradient
INTERVALS = 512  # of amax: two for each exponent of float32
LEAST = -126  # the exponent of the smallest scale, which is a normal float32, and so is its reciprocal


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in FP8:
        return torch.ones_like(amax, dtype=dtype)
    mantissa, exponent = torch.frexp(amax.float() / torch.finfo(dtype).max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(LEAST, -LEAST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    scale = torch.where(mantissa == 0, 1.0, scale)
    return torch.where(torch.isfinite(mantissa), scale, torch.nan)


def _scale_fake(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return amax.new_empty(amax.shape, dtype=torch.float32 if dtype in FP8 else dtype)


def _quantize(x: Tensor, scale: Tensor, dtype: torch.dtype, delayed: bool = False) -> Tensor:
    if dtype not in FP8:
        return (x / scale).to(dtype).contiguous()
    most = torch.finfo(dtype).max
    wide = x if x.dtype == torch.bfloat16 else x.float()  # bfloat16 has float32's exponents: dividing is as exact
    cut = (wide / scale.to(wide.dtype)).clamp_(-most, most)
    if delayed:  # an infinity makes this scale no NaN
        cut.masked_fill_(x.isinf(), torch.nan)
    return cut.to(dtype).contiguous()


def _quantize_fake(x: Tensor, scale: Tensor, dtype: torch.dtype, delayed: bool = False) -> Tensor:
    return torch.empty(torch.broadcast_shapes(x.shape, scale.shape), dtype=dtype, device=x.device)


def _count_amax(amax: Tensor, dtype: torch.dtype) -> Tensor:
    index = torch.arange(INTERVALS, device=amax.device)
    if dtype not in FP8:
        return torch.zeros(INTERVALS, dtype=torch.float32, device=amax.device)
    mantissa, exponent = torch.frexp(amax.float())
    interval = 2 * (exponent.clamp(min=LEAST) - LEAST) + (mantissa > 0.875)
    return ((index == interval) & torch.isfinite(mantissa) & (mantissa > 0)).float()


def _push_amax(history: Tensor, counts: Tensor) -> Tensor:
    index = torch.arange(INTERVALS, device=counts.device)
    interval = torch.where(counts > 0, index, -1).amax()
    ends = torch.where(interval % 2 == 1, 1 - 2.0**-8, 0.875).to(history.dtype)
    largest = torch.ldexp(ends, interval.clamp(min=0) // 2 + LEAST)
    return torch.where(interval < 0, history, torch.cat([largest.reshape(1), history[:-1]]))


SCALE = define("scale(Tensor amax, ScalarType dtype) -> Tensor", _scale, _scale_fake)
QUANTIZE = define(
    "quantize(Tensor x, Tensor scale, ScalarType dtype, bool delayed=False) -> Tensor", _quantize, _quantize_fake
)
COUNT_AMAX = define(
    "count_amax(Tensor amax, ScalarType dtype) -> Tensor",
    _count_amax,
    lambda amax, dtype: amax.new_empty((INTERVALS,), dtype=torch.float32),
)
PUSH_AMAX = define(
    "push_amax(Tensor history, Tensor counts) -> Tensor", _push_amax, lambda history, counts: torch.empty_like(history)
)


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`(a b^T) a_scale b_scale` of matrices [M, K] and [N, K], and scales of one element, or [M, 1] and [1, N]."""
    if a.dtype not in FP8:
        return ((a @ b.t()) * a_scale * b_scale).to(dtype)
    if multiplies_fp8(a.device):
        return scaled_mm(a, b, a_scale, b_scale, dtype)
    return ((a.float() @ b.float().t()) * a_scale * b_scale).to(dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = _product(_rows(x), w, _column(x_scale), _row(w_scale), dtype)
    return y.reshape(*x.shape[:-1], w.shape[0])


def _dgrad(g: Tensor, w: Tensor, g_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    d = _product(_rows(g), w.t().contiguous(), _column(g_scale), _row(w_scale), dtype)
    return d.reshape(*g.shape[:-1], w.shape[1])


def _wgrad(g: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    transposed = _rows(g).t().contiguous(), _rows(x).t().contiguous()
    return _product(*transposed, _column(g_scale), _row(x_scale), dtype).contiguous()


def _mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _product(a.contiguous(), b.t().contiguous(), _column(a_scale), _row(b_scale), dtype).contiguous()


def _column(scale: Tensor) -> Tensor:
    return scale.reshape(-1, 1)


def _row(scale: Tensor) -> Tensor:
    return scale.reshape(1, -1)


def _define(
    name: str,
    first: str,
    second: str,
    kernel: Callable[..., Tensor],
    shape: Callable[[Tensor, Tensor], tuple[int, ...]],
) -> OpOverload:
    def fake(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return a.new_empty(shape(a, b), dtype=dtype)

    schema = f"{name}(Tensor {first}, Tensor {second}, Tensor {first}_scale, Tensor {second}_scale, ScalarType dtype)"
    return define(f"{schema} -> Tensor", kernel, fake)


SCALED_LINEAR = _define("scaled_linear", "x", "w", _linear, lambda x, w: (*x.shape[:-1], w.shape[0]))
SCALED_DGRAD = _define("scaled_linear_dgrad", "g", "w", _dgrad, lambda g, w: (*g.shape[:-1], w.shape[1]))
SCALED_WGRAD = _define("scaled_linear_wgrad", "g", "x", _wgrad, lambda g, x: (g.shape[-1], x.shape[-1]))
SCALED_MM = _define("scaled_mm", "a", "b", _mm, lambda a, b: (a.shape[0], b.shape[1]))
PRODUCTS = (SCALED_LINEAR, SCALED_DGRAD, SCALED_WGRAD, SCALED_MM)


def turned(node: fx.Node) -> list[fx.Node]:
    """The operands that a product copies: both have to lie along the dim that is summed."""
    a, b = node.args[:2] if node.target in (SCALED_DGRAD, SCALED_WGRAD, SCALED_MM) else (None, None)
    copied = [a, b] if node.target is SCALED_WGRAD else [b]
    return [value for value in copied if isinstance(value, fx.Node)]
