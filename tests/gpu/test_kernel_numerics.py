"""Row kernels on a GPU at drawn shapes: rows 1 to 70,000, columns 1 to 131,072, odd ones, any magnitude, twice.

Forward results in 16 bits are within 2 units of the last place of the float64 result; sums over rows are at float32
accuracy, their error measured against the sum of the magnitudes of what they add up.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from closeness import relative, ulps, wide

from kernels_triton import ops, reference

pytestmark = pytest.mark.gpu
MOST = 1 << 26  # elements: what float64 references of a few tensors have room for
ULPS = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 64.0}
SOME = settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@st.composite
def shapes(draw: st.DrawFn, most: int = 131072) -> tuple[int, int, float, float, int]:
    """(rows, columns, magnitude, mean, seed)."""
    usual = st.sampled_from([1024, 4096, 8192, 12288, 16384, 50304, 131072])
    cols = draw(st.one_of(st.integers(1, 300), st.integers(1, most), usual).filter(lambda n: n <= most))
    rows = draw(st.one_of(st.integers(1, 40), st.integers(1, 70_000), st.just(70_000)))
    magnitude, mean = draw(st.sampled_from([1e-3, 1.0, 30.0])), draw(st.sampled_from([0.0, 0.0, 5.0]))
    return max(1, min(rows, MOST // cols)), cols, magnitude, mean, draw(st.integers(0, 1 << 20))


def drawn(shape: tuple[int, int, float, float, int], dtype: torch.dtype) -> Tensor:
    """Numbers, with a constant row among them."""
    rows, cols, magnitude, mean, seed = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, cols, device="cuda", generator=generator) * magnitude + mean
    x[rows // 2] = 2.5
    return x.to(dtype)


def twice(op: Callable[..., Any], *args: Any) -> Any:
    """Two runs are bitwise equal."""
    first, second = op(*args), op(*args)
    pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    for one, other in pairs:
        assert one is None or torch.equal(one, other)
    return first


@DTYPES
@SOME
@given(shape=shapes())
def test_norms(dtype: torch.dtype, shape: tuple[int, int, float, float, int]) -> None:
    x = drawn(shape, dtype)
    generator = torch.Generator("cuda").manual_seed(shape[-1] + 1)
    w, b = (torch.randn(shape[1], device="cuda", generator=generator).to(dtype) for _ in range(2))
    y, mean, rstd = twice(ops.layer_norm, x, w, b, 1e-5)
    exact = reference.layer_norm(wide(x), wide(w), wide(b), 1e-5)
    # (x - mean) * rstd * w + b cancels, and of x - mean float32 has what x leaves it: the mean is known to 2^-21 of x.
    size = float(x.abs().max().float() * exact[2].max() * w.abs().max())
    near_zero = 1e-2 + size * 2.0**-11 if dtype != torch.float32 else 1.0 + size * 2.0**-3
    assert ulps(y, exact[0], near_zero) <= ULPS[dtype]
    assert relative(mean, exact[1], wide(x).abs().amax(-1)) < 1e-6
    assert relative(rstd, exact[2], exact[2]) < 1e-4
    y, rstd = twice(ops.rms_norm, x, w, 1e-6)
    exact = reference.rms_norm(wide(x), wide(w), 1e-6)
    assert ulps(y, exact[0]) <= ULPS[dtype]
    assert relative(rstd, exact[1], exact[1]) < 1e-5


@DTYPES
@SOME
@given(shape=shapes())
def test_norm_gradients(dtype: torch.dtype, shape: tuple[int, int, float, float, int]) -> None:
    x, dy = drawn(shape, dtype), torch.randn(*shape[:2], device="cuda").to(dtype)
    w = torch.randn(shape[1], device="cuda").to(dtype)
    _, mean, rstd = reference.layer_norm(wide(x), None, None, 1e-3)
    found = twice(ops.layer_norm_backward, dy, x, w, mean.float(), rstd.float())
    exact = reference.layer_norm_backward(wide(dy), wide(x), wide(w), mean.float().double(), rstd.float().double())
    bits = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}[dtype]
    scale = exact[0].abs().amax(-1, keepdim=True) + (wide(dy) * wide(w)).abs().amax(-1, keepdim=True) * rstd[:, None]
    xhat = (wide(x) - mean[:, None]) * rstd[:, None]
    error = (found[0].double() - exact[0]).abs()
    assert (error <= bits * exact[0].abs() + 1e-4 * scale * (1.0 + xhat.abs().amax(-1, keepdim=True) ** 2)).all()
    for mine, theirs, added in zip(found[1:], exact[1:], (wide(dy) * xhat, wide(dy)), strict=True):
        terms = added.abs().sum(0)
        if dtype == torch.float32:
            assert relative(mine, theirs, terms) < 1e-5
        else:
            assert ulps(mine, theirs, float(terms.max()) * 1e-2) <= 2.0


@DTYPES
@SOME
@given(shape=shapes(), scale=st.sampled_from([1.0, 0.125, 40.0]))
def test_softmax(dtype: torch.dtype, shape: tuple[int, int, float, float, int], scale: float) -> None:
    x = drawn(shape, dtype)
    y = twice(ops.softmax, x, scale)
    # Rounding a logit of magnitude m in float32 moves its exponential by m * 2^-24.
    slack = float((wide(x) * scale).abs().max()) * 2.0**-22 * 2.0 ** (23 if dtype == torch.float32 else 8)
    assert ulps(y, reference.softmax(wide(x), scale), 1e-6) <= 1.0 + ULPS[dtype] + slack
    dy = torch.randn_like(x)
    dx = twice(ops.softmax_backward, dy, y, scale)
    assert relative(dx, reference.softmax_backward(wide(dy), wide(y), scale)) < (
        1e-5 if dtype == torch.float32 else 1e-2
    )


@DTYPES
@SOME
@given(shape=shapes(), in_place=st.booleans())
def test_cross_entropy(dtype: torch.dtype, shape: tuple[int, int, float, float, int], in_place: bool) -> None:
    x = drawn(shape, dtype)
    target = torch.randint(0, shape[1], (shape[0],), device="cuda")
    target[::3] = -100
    scale = torch.tensor(0.5, device="cuda")
    exact = reference.cross_entropy(wide(x), target, scale)
    size = wide(x).abs().max().clamp(min=1.0)
    loss, lse, grad = twice(ops.cross_entropy, x, target, scale)
    assert relative(loss, exact[0], size) < 1e-6
    assert relative(lse, exact[1], size) < 1e-6
    loose = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    assert relative(grad, exact[2], torch.tensor(0.5, device="cuda")) < loose + 2e-7 * float(size)
    if in_place:
        assert torch.equal(ops.cross_entropy(x, target, scale, -100, True)[2], grad)
        assert torch.equal(x, grad)


@DTYPES
@SOME
@given(shape=shapes(70_000), p=st.floats(0.0, 1.0), seed=st.integers(-(2**62), 2**62), high=st.booleans())
def test_dropout_masks(
    dtype: torch.dtype, shape: tuple[int, int, float, float, int], p: float, seed: int, high: bool
) -> None:
    """Bit for bit those of `shardc::random_uniform`, also where the indices pass 2^32."""
    rows, cols = min(shape[0], (1 << 22) // shape[1] + 1), shape[1]
    x = drawn((rows, cols, *shape[2:]), dtype)
    key, op = torch.tensor(seed, device="cuda"), 3 + seed % 1000
    offset = torch.tensor((1 << 32) - x.numel() // 2 if high else 0, device="cuda")
    y, keep = twice(ops.bias_dropout_residual, x, None, None, p, key, op, None, offset)
    expected, mask = reference.bias_dropout_residual(x, None, None, p, key, op, None, offset)
    assert torch.equal(keep, mask)
    assert relative(y, expected.double()) < (1e-6 if dtype == torch.float32 else 8e-3)
