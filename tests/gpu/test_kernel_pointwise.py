"""Pointwise templates on a GPU at drawn shapes, forward and backward, against float64, twice; dropout bit for bit.

Forward results in 16 bits are within 2 units of the last place of the float64 result, where it is not the small
difference of large terms; biases' gradients are at float32 accuracy.
"""

import pytest
import torch
from closeness import relative, ulps, wide
from drawn import DEVICE, DTYPES, LOOSE, SOME, ULPS, Drawn, shapes, summed, twice
from hypothesis import given
from hypothesis import strategies as st

from kernels_triton import ops, reference

pytestmark = pytest.mark.gpu
ACTS = ("gelu_tanh", "gelu", "silu", "relu2")
SLOPES = 1e-5  # of float32: 1 less a logistic, times up to 42
FEWER = 1 << 24  # elements
SHAPES = shapes(cols=20_000, most=FEWER)


@DTYPES
@SOME
@given(shape=SHAPES, act=st.sampled_from(ACTS), biased=st.booleans())
def test_bias_activation(dtype: torch.dtype, shape: Drawn, act: str, biased: bool) -> None:
    x, b, dy = shape.x(dtype), shape.weight(1, dtype) if biased else None, shape.like(2, dtype)
    wide_b = None if b is None else wide(b)
    y = twice(ops.bias_gelu, x, b, act)
    exact = reference.bias_gelu(wide(x), wide_b, act)
    # x + bias cancels, and in the left tail 1 + erf does, in torch too.
    floor = float(exact.abs().max().clamp(min=1e-5)) * (1e-3 if dtype != torch.float32 else 1e-1)
    assert ulps(y, exact, floor) <= ULPS[dtype]
    dx, db = twice(ops.bias_gelu_backward, dy, x, b, act)
    exact_dx, exact_db = reference.bias_gelu_backward(wide(dy), wide(x), wide_b, act)
    assert relative(dx, exact_dx) < max(SLOPES, LOOSE[dtype])
    if b is None:
        assert db is None
    else:
        # Each term is as exact as the slope: for results of 16 bits to 4.4e-4 of 1, about a slope's size.
        sizes = (exact_dx.abs() + wide(dy).abs()).sum(0)
        coarse = 1e-3 if dtype != torch.float32 else SLOPES
        assert exact_db is not None
        error = (db.double() - exact_db).abs()
        assert (error <= 2 * torch.finfo(dtype).eps * exact_db.abs() + coarse * sizes).all()


@DTYPES
@SOME
@given(shape=SHAPES)
def test_squared_relu(dtype: torch.dtype, shape: Drawn) -> None:
    x, dy = shape.x(dtype), shape.like(1, dtype)
    assert ulps(twice(ops.squared_relu, x), reference.squared_relu(wide(x))) <= 1.0
    dx = twice(ops.squared_relu_backward, dy, x)
    assert ulps(dx, reference.squared_relu_backward(wide(dy), wide(x))) <= 1.0


@DTYPES
@SOME
@given(shape=SHAPES, act=st.sampled_from(ACTS[:3]), packed=st.booleans())
def test_gated(dtype: torch.dtype, shape: Drawn, act: str, packed: bool) -> None:
    gate, up, dy = shape.x(dtype), shape.like(1, dtype), shape.like(2, dtype)
    given_ = (torch.cat((gate, up), -1), None) if packed else (gate, up)
    y = twice(ops.gated, *given_, act)
    exact = reference.gated(wide(gate), wide(up), act)
    floor = float(exact.abs().max().clamp(min=1e-5)) * (1e-4 if dtype != torch.float32 else 1e-1)
    assert ulps(y, exact, floor) <= ULPS[dtype]
    found = twice(ops.gated_backward, dy, *given_, act)
    exact = reference.gated_backward(wide(dy), wide(gate), wide(up), act)
    halves = found[0].chunk(2, -1) if packed else found
    for mine, theirs in zip(halves, exact, strict=True):
        assert theirs is not None
        assert relative(mine, theirs) < max(SLOPES, LOOSE[dtype])


@DTYPES
@SOME
@given(shape=SHAPES, p=st.floats(0.0, 0.99) | st.just(1.0), seed=st.integers(-(2**62), 2**62), high=st.booleans())
def test_dropout(dtype: torch.dtype, shape: Drawn, p: float, seed: int, high: bool) -> None:
    """Its mask is `shardc::random_uniform`'s, bit for bit, also where the indices pass 2^32; backward reads it."""
    x, b, residual, dy = shape.x(dtype), shape.weight(1, dtype), shape.like(2, dtype), shape.like(3, dtype)
    key, op = torch.tensor(seed, device=DEVICE), 3 + seed % 1000
    offset = torch.tensor((1 << 32) - x.numel() // 2 if high else 0, device=DEVICE)
    y, keep = twice(ops.bias_dropout_residual, x, b, residual, p, key, op, None, offset)
    _, mask = reference.bias_dropout_residual(x, b, residual, p, key, op, None, offset)
    assert torch.equal(keep, mask)
    exact, _ = reference.bias_dropout_residual(wide(x), wide(b), wide(residual), p, key, op, None, offset)
    scale = 1.0 if p == 1.0 else 1.0 / (1.0 - p)
    terms = ((wide(x) + wide(b)).abs().max() * scale + wide(residual).abs().max()) if p < 1.0 else wide(residual).max()
    assert ulps(y, exact, float(terms) * (1e-3 if dtype != torch.float32 else 1.0)) <= ULPS[dtype]
    dx, db = twice(ops.bias_dropout_residual_backward, dy, keep, p, b)
    exact_dx, exact_db = reference.bias_dropout_residual_backward(wide(dy), keep, p, wide(b))
    assert relative(dx, exact_dx) < LOOSE[dtype]
    assert exact_db is not None
    summed(db, exact_db, exact_dx)


@DTYPES
@SOME
@given(
    tokens=st.tuples(st.integers(1, 3), st.integers(1, 2000)),
    heads=st.tuples(st.integers(1, 40), st.integers(0, 9)),
    half=st.integers(1, 128),
    rest=st.sampled_from([0, 0, 6, 32]),
    inverse=st.booleans(),
    interleaved=st.booleans(),
    each=st.booleans(),
)
def test_rope(
    dtype: torch.dtype,
    tokens: tuple[int, int],
    heads: tuple[int, int],
    half: int,
    rest: int,
    inverse: bool,
    interleaved: bool,
    each: bool,
) -> None:
    """Some heads of a packed tensor, which alone are turned in place."""
    torch.manual_seed(half)
    packed = torch.randn(*tokens, sum(heads), 2 * half + rest, device=DEVICE).to(dtype)
    x = packed[:, :, : heads[0]]
    angles = torch.rand(*tokens[:1] * each, tokens[1], half, device=DEVICE) * 6
    arguments = (angles.cos(), angles.sin(), inverse, interleaved)
    y = twice(ops.rope, x, *arguments)
    exact = reference.rope(wide(x), wide(arguments[0]), wide(arguments[1]), inverse, interleaved)
    floor = float(wide(x).abs().max()) * (1e-3 if dtype != torch.float32 else 1.0)
    assert ulps(y, exact, floor) <= ULPS[dtype]
    others = packed[:, :, heads[0] :].clone()
    ops.rope(x, *arguments, True)
    assert torch.equal(x, y)
    assert torch.equal(packed[:, :, heads[0] :], others)


@DTYPES
@SOME
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 77, 900, 4096, 5000, 20_000])),
    groups=st.sampled_from([1, 3, 32]),
    mean=st.sampled_from([0.0, 5.0]),
    affine=st.booleans(),
)
def test_group_norm(dtype: torch.dtype, shape: tuple[int, int, int], groups: int, mean: float, affine: bool) -> None:
    batch, of_group, space = shape
    channels = of_group * groups
    torch.manual_seed(space)
    x = (torch.randn(batch, channels, space, device=DEVICE) * 3 + mean).to(dtype)
    dy = torch.randn(batch, channels, space, device=DEVICE).to(dtype)
    w, b = (torch.randn(channels, device=DEVICE).to(dtype) if affine else None for _ in range(2))
    wide_w, wide_b = (None if t is None else wide(t) for t in (w, b))
    y, found_mean, rstd = twice(ops.group_norm, x, groups, w, b, 1e-3)
    exact = reference.group_norm(wide(x), groups, wide_w, wide_b, 1e-3)
    size = float(wide(x).abs().max() * exact[2].max()) * (1.0 if w is None else float(w.abs().max()))
    near_zero = 1e-2 + size * 2.0**-11 if dtype != torch.float32 else 1.0 + size * 2.0**-3
    assert ulps(y, exact[0], near_zero) <= ULPS[dtype]
    found = twice(ops.group_norm_backward, dy, x, groups, w, found_mean, rstd)
    exact = reference.group_norm_backward(wide(dy), wide(x), groups, wide_w, wide(found_mean), wide(rstd))
    scale = exact[0].abs().amax() + wide(rstd).amax() * (1.0 if w is None else float(w.abs().max())) * 5.0
    assert relative(found[0], exact[0], scale) < LOOSE[dtype]
    grouped = wide(x).reshape(batch, groups, -1)
    xhat = ((grouped - wide(found_mean)[..., None]) * wide(rstd)[..., None]).reshape(batch, channels, space)
    for mine, theirs, terms in zip(found[1:], exact[1:], (wide(dy) * xhat, wide(dy)), strict=True):
        if theirs is None:
            assert mine is None
        else:
            summed(mine, theirs, terms.transpose(1, 2).flatten(0, 1))


@DTYPES
@SOME
@given(count=st.integers(1, 1 << 22), step=st.integers(1, 100_000), skip=st.booleans(), scaled=st.booleans())
def test_adamw(dtype: torch.dtype, count: int, step: int, skip: bool, scaled: bool) -> None:
    """`dtype`: of the gradient and of the copy; the rest is float32."""
    torch.manual_seed(step)
    param, first = torch.randn(count, device=DEVICE), torch.randn(count, device=DEVICE)
    second, grad = torch.rand(count, device=DEVICE), torch.randn(count, device=DEVICE).to(dtype)
    scalars = (torch.tensor(1e-2, device=DEVICE), torch.tensor(step, device=DEVICE))
    scale, runs = torch.tensor(0.25, device=DEVICE) if scaled else None, []
    options = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "grad_scale": scale}
    options |= {"skip": torch.tensor(float(skip), device=DEVICE)}
    for _ in range(2):
        state, copy = [t.clone() for t in (param, first, second)], torch.full_like(grad, float("nan"))
        ops.adamw(state[0], grad, state[1], state[2], *scalars, **options, copy=copy)
        runs.append((*state, copy))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    exact = [wide(t) for t in (param, first, second)]
    reference.adamw(exact[0], wide(grad), exact[1], exact[2], wide(scalars[0]), scalars[1], **options)
    for mine, theirs in zip(runs[0], exact, strict=False):
        assert relative(mine, theirs) < 1e-6
    assert torch.equal(runs[0][3], runs[0][0].to(dtype))
