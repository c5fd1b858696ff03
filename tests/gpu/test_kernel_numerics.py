"""Row kernels on a GPU at drawn shapes: rows 1 to 70,000, columns 1 to 131,072, odd ones, any magnitude, twice.

Forward results in 16 bits are within 2 units of the last place of the float64 result; sums over rows are at float32
accuracy, their error measured against the sum of the magnitudes of what they add up.
"""

import pytest
import torch
from closeness import relative, ulps, wide
from drawn import DEVICE, DTYPES, LOOSE, SOME, ULPS, Drawn, shapes, summed, twice
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton import ops, reference

pytestmark = pytest.mark.gpu


@DTYPES
@SOME
@given(shape=shapes(), added=st.booleans())
def test_layer_norm(dtype: torch.dtype, shape: Drawn, added: bool) -> None:
    x, w, b = shape.x(dtype), shape.weight(1, dtype), shape.weight(2, dtype)
    if added:
        given_x, residual = x, shape.like(3, dtype)
        y, x, mean, rstd = twice(ops.add_layer_norm, given_x, residual, w, b, 1e-5)
        assert torch.equal(x, (given_x.float() + residual.float()).to(dtype))
    else:
        y, mean, rstd = twice(ops.layer_norm, x, w, b, 1e-5)
    exact = reference.layer_norm(wide(x), wide(w), wide(b), 1e-5)
    # (x - mean) * rstd * w + b cancels, and of x - mean float32 has what x leaves it: the mean is known to 2^-21 of x.
    size = float(x.abs().max().float() * exact[2].max() * w.abs().max())
    near_zero = 1e-2 + size * 2.0**-11 if dtype != torch.float32 else 1.0 + size * 2.0**-3
    assert ulps(y, exact[0], near_zero) <= ULPS[dtype]
    assert relative(mean, exact[1], wide(x).abs().amax(-1)) < 1e-6
    assert relative(rstd, exact[2], exact[2]) < 1e-4


@DTYPES
@SOME
@given(shape=shapes(), added=st.booleans())
def test_rms_norm(dtype: torch.dtype, shape: Drawn, added: bool) -> None:
    x, w = shape.x(dtype), shape.weight(1, dtype)
    if added:
        given_x, residual = x, shape.like(3, dtype)
        y, x, rstd = twice(ops.add_rms_norm, given_x, residual, w, 1e-6)
        assert torch.equal(x, (given_x.float() + residual.float()).to(dtype))
    else:
        y, rstd = twice(ops.rms_norm, x, w, 1e-6)
    exact = reference.rms_norm(wide(x), wide(w), 1e-6)
    assert ulps(y, exact[0]) <= ULPS[dtype]
    assert relative(rstd, exact[1], exact[1]) < 1e-5


@DTYPES
@SOME
@given(shape=shapes(), layer=st.booleans(), master=st.booleans(), added=st.booleans())
def test_norm_gradients(dtype: torch.dtype, shape: Drawn, layer: bool, master: bool, added: bool) -> None:
    """`master`: weights, and so their gradients, in float32, whatever x is in."""
    x, dy, w = shape.x(dtype), shape.like(1, dtype), shape.weight(2, torch.float32 if master else dtype)
    beside = shape.like(3, dtype) if added else None
    _, *stats = reference.layer_norm(wide(x), None, None, 1e-3) if layer else reference.rms_norm(wide(x), None, 1e-3)
    stats = [s.float() for s in stats]
    op = "layer_norm_backward" if layer else "rms_norm_backward"
    found = twice(getattr(ops, op), dy, x, w, *stats, beside)
    wide_beside = None if beside is None else wide(beside)
    exact = getattr(reference, op)(wide(dy), wide(x), wide(w), *map(wide, stats), wide_beside)
    mean, rstd = stats[0][:, None].double() if layer else 0.0, stats[-1][:, None].double()
    bits = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}[dtype]
    scale = exact[0].abs().amax(-1, keepdim=True) + (wide(dy) * wide(w)).abs().amax(-1, keepdim=True) * rstd
    xhat = (wide(x) - mean) * rstd
    error = (found[0].double() - exact[0]).abs()
    assert (error <= bits * exact[0].abs() + 1e-4 * scale * (1.0 + xhat.abs().amax(-1, keepdim=True) ** 2)).all()
    for mine, theirs, terms in zip(found[1:], exact[1:], (wide(dy) * xhat, wide(dy)), strict=False):
        summed(mine, theirs, terms)


@DTYPES
@SOME
@given(shape=shapes(), scale=st.sampled_from([1.0, 0.125, 40.0]), masked=st.booleans(), causal=st.booleans())
def test_softmax(dtype: torch.dtype, shape: Drawn, scale: float, masked: bool, causal: bool) -> None:
    """Scales that would overflow an exponential without the maximum."""
    x = shape.x(dtype)
    mask = shape.weight(1, torch.float32) > -0.5 if masked else None
    y = twice(ops.softmax, x, scale, mask, causal)
    # Rounding a logit of magnitude m in float32 moves its exponential by m * 2^-24.
    slack = float((wide(x) * scale).abs().max()) * 2.0**-22 * 2.0 ** (23 if dtype == torch.float32 else 8)
    assert ulps(y, reference.softmax(wide(x), scale, mask, causal), 1e-6) <= 1.0 + ULPS[dtype] + slack
    dy = shape.like(2, dtype)
    dx = twice(ops.softmax_backward, dy, y, scale, causal)
    exact = reference.softmax_backward(wide(dy), wide(y), scale, causal)
    assert relative(dx, exact) < (1e-5 if dtype == torch.float32 else 1e-2)


@DTYPES
@SOME
@given(shape=shapes(), in_place=st.booleans(), padded=st.booleans())
def test_cross_entropy(dtype: torch.dtype, shape: Drawn, in_place: bool, padded: bool) -> None:
    x = in_wide_rows(shape.x(dtype)) if padded else shape.x(dtype)
    target, scale = targets(shape), torch.tensor(0.5, device=DEVICE)
    exact = reference.cross_entropy(wide(x), target, scale)
    size = wide(x).abs().max().clamp(min=1.0)
    loss, lse, grad = twice(ops.cross_entropy, x, target, scale)
    assert relative(loss, exact[0], size) < 1e-6
    assert relative(lse, exact[1], size) < 1e-6
    assert relative(grad, exact[2], torch.tensor(0.5, device=DEVICE)) < LOOSE[dtype] + 2e-7 * float(size)
    if padded:
        whole_rows(ops.cross_entropy(x, target, scale, padded=True)[2], grad)
    if in_place:
        assert torch.equal(ops.cross_entropy(x, target, scale, -100, True)[2], grad)
        assert torch.equal(x, grad)


@DTYPES
@SOME
@given(shape=shapes(), cut=st.floats(0.0, 1.0))
def test_shards_of_a_vocabulary(dtype: torch.dtype, shape: Drawn, cut: float) -> None:
    """Each shard's statistics, gathered; each shard then has its part of the gradient, and the whole loss."""
    x, target = shape.x(dtype), targets(shape)
    edge = int(cut * shape.cols)
    parts = [(start, part) for start, part in ((0, x[:, :edge]), (edge, x[:, edge:])) if part.shape[1]]
    stats = torch.stack([twice(ops.cross_entropy_stats, part, target, start) for start, part in parts])
    exact = reference.cross_entropy(wide(x), target, None)
    size = wide(x).abs().max().clamp(min=1.0)
    for start, part in parts:
        loss, lse, grad = twice(ops.cross_entropy_finish, part, target, stats, shape.cols, start)
        assert relative(loss, exact[0], size) < 2e-6
        assert relative(lse, exact[1], size) < 2e-6
        mine = exact[2][:, start : start + part.shape[1]]
        assert relative(grad, mine, torch.ones((), device=DEVICE)) < LOOSE[dtype] + 4e-7 * float(size)
        whole_rows(ops.cross_entropy_finish(part, target, stats, shape.cols, start, padded=True)[2], grad)


def in_wide_rows(x: Tensor) -> Tensor:
    """Rows that begin with 16 bytes; who reads what lies between them and uses it gets NaN."""
    wide = torch.full((x.shape[0], -(-x.shape[1] // 8) * 8), torch.nan, dtype=x.dtype, device=DEVICE)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def whole_rows(made: Tensor, expected: Tensor) -> None:
    """The same numbers, in rows that begin with 16 bytes, zeros between them."""
    assert made.stride(0) * made.element_size() % 16 == 0
    assert torch.equal(made, expected)
    whole = made.as_strided((made.shape[0], made.stride(0)), (made.stride(0), 1))
    assert not whole[:, made.shape[1] :].any()


def targets(shape: Drawn) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(shape.seed)
    target = torch.randint(0, shape.cols, (shape.rows,), device=DEVICE, generator=generator)
    target[::3] = -100
    return target
