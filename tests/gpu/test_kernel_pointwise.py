"""Pointwise templates on a GPU at drawn shapes, forward and backward, against float64, twice; dropout bit for bit.

Results are within 2 units of the last place of the correctly rounded ones, each element by the magnitudes it is made
of; biases' gradients are at float32 accuracy: `tests/kernels/judges.py` says how that is measured.
"""

import judges
import pytest
import torch
from closeness import ulps, wide
from drawn import CONSTANTS, DEVICE, DTYPES, SOME, Drawn, shapes, twice
from hypothesis import given
from hypothesis import strategies as st

from kernels_triton import ops
from kernels_triton.launch import launch
from kernels_triton.library import reference

pytestmark = pytest.mark.gpu
ACTS = ("gelu_tanh", "gelu", "silu", "relu2")
FEWER = 1 << 24  # elements
SHAPES = shapes(cols=20_000, most=FEWER)


@DTYPES
@SOME
@given(shape=SHAPES, act=st.sampled_from(ACTS), biased=st.booleans())
def test_bias_activation(dtype: torch.dtype, shape: Drawn, act: str, biased: bool) -> None:
    x, b, dy = shape.x(dtype), shape.weight(1, dtype) if biased else None, shape.like(2, dtype)
    assert judges.bias_gelu(twice(ops.bias_gelu, x, b, act), x, b, act) <= 1.0
    assert judges.bias_gelu_backward(twice(ops.bias_gelu_backward, dy, x, b, act), dy, x, b, act) <= 1.0


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
    assert judges.gated(twice(ops.gated, *given_, act), gate, up, act) <= 1.0
    found = twice(ops.gated_backward, dy, *given_, act)
    assert judges.gated_backward(found[0].chunk(2, -1) if packed else found, dy, gate, up, act) <= 1.0


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
    beside = wide(residual).abs()
    assert judges.error(y, exact, 4.0 * ((exact - wide(residual)).abs() + beside)) <= 1.0
    dx, db = twice(ops.bias_dropout_residual_backward, dy, keep, p, b)
    exact_dx, exact_db = reference.bias_dropout_residual_backward(wide(dy), keep, p, wide(b))
    assert judges.error(dx, exact_dx, 2.0 * exact_dx.abs()) <= 1.0
    assert judges.summed(db, exact_db, exact_dx.abs()) <= 1.0


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
    low=st.booleans(),
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
    low: bool,
) -> None:
    """Some heads of a packed tensor, which alone are turned in place."""
    torch.manual_seed(half)
    packed = torch.randn(*tokens, sum(heads), 2 * half + rest, device=DEVICE).to(dtype)
    x = packed[:, :, : heads[0]]
    angles = torch.rand(*tokens[:1] * each, tokens[1], half, device=DEVICE) * 6
    cos, sin = (t.to(dtype if low else torch.float32) for t in (angles.cos(), angles.sin()))
    arguments = (cos, sin, inverse, interleaved)
    y = twice(ops.rope, x, *arguments)
    assert judges.rope(y, x, *arguments) <= 1.0
    others = packed[:, :, heads[0] :].clone()
    ops.rope(x, *arguments, True)
    assert torch.equal(x, y)
    assert torch.equal(packed[:, :, heads[0] :], others)


@DTYPES
@SOME
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 20), st.sampled_from([1, 77, 900, 4096, 5000, 20_000])),
    groups=st.sampled_from([1, 3, 32]),
    mean=st.sampled_from([0.0, 5.0, 100.0, 1e4]),
    affine=st.booleans(),
    constant=st.integers(0, 3),
)
def test_group_norm(
    dtype: torch.dtype, shape: tuple[int, int, int], groups: int, mean: float, affine: bool, constant: int
) -> None:
    """Its last group is one number."""
    batch, of_group, space = shape
    channels = of_group * groups
    torch.manual_seed(space)
    mean = mean if dtype == torch.float32 else min(mean, 100.0)
    x = (torch.randn(batch, channels, space, device=DEVICE) * 3 + mean).to(dtype)
    x[-1, -of_group:] = CONSTANTS[dtype][constant]
    dy = torch.randn(batch, channels, space, device=DEVICE).to(dtype)
    w, b = (torch.randn(channels, device=DEVICE).to(dtype) if affine else None for _ in range(2))
    y, found_mean, rstd = twice(ops.group_norm, x, groups, w, b, 1e-3)
    assert torch.equal(found_mean[-1, -1], x[-1, -1, -1].float())
    assert judges.group_norm((y, found_mean, rstd), x, groups, w, b, 1e-3) <= 1.0
    found = twice(ops.group_norm_backward, dy, x, groups, w, found_mean, rstd)
    assert judges.group_norm_backward(found, dy, x, groups, w, found_mean, rstd) <= 1.0


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
    # What is added up: the same of magnitudes, where the step is all that makes a parameter smaller.
    sizes = [wide(t).abs() for t in (param, first, second)]
    reference.adamw(sizes[0], wide(grad).abs(), sizes[1], sizes[2], wide(scalars[0]), scalars[1], **options)
    sizes[0] = 2.0 * wide(param).abs() - sizes[0]
    for mine, theirs, terms in zip(runs[0], exact, sizes, strict=False):
        assert judges.error(mine, theirs, 8.0 * terms) <= 1.0
    assert torch.equal(runs[0][3], runs[0][0].to(dtype))


def test_programs_that_share_a_group_meet_again() -> None:
    """What they meet by is as good as new after each launch of a prepared op."""
    torch.manual_seed(0)
    x, dy = (torch.randn(3, 640, 32, 32, device=DEVICE).bfloat16() for _ in range(2))
    w, b = (torch.randn(640, device=DEVICE).bfloat16() for _ in range(2))
    forward = launch.prepare(ops.group_norm, x, 32, w, b)
    assert any(one.constants.get("PARTS", 0) > 1 for one in forward.launches if isinstance(one, launch.Launch))
    _, mean, rstd = forward.outputs
    backward = launch.prepare(ops.group_norm_backward, dy, x, 32, w, mean, rstd)
    first = [one.clone() for one in (*forward.outputs, *backward.outputs)]
    for _ in range(20):
        for one in (*forward.outputs, *backward.outputs):
            one.fill_(float("nan"))
        found = (*forward(), *backward())
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))
