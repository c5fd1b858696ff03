"""Activations, dropout, rotary embedding, AdamW and GroupNorm under the interpreter, against float64."""

import judges
import pytest
import torch
from closeness import relative, ulps, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Interpreter
from test_row_schedule import DTYPES, FEW, like, rows
from torch import Tensor

from kernels_triton.base.random import RANDOM_UNIFORM
from kernels_triton.library import reference

# Relative error of a gradient, whose terms cancel.
LOOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@FEW
@given(x=rows(1100), act=st.sampled_from(["gelu_tanh", "gelu", "silu", "relu2"]), biased=st.booleans())
def test_bias_gelu(interpreted: Interpreter, x: Tensor, act: str, biased: bool) -> None:
    b, dy = like(x, 1, x.shape[1]) if biased else None, like(x, 2)
    assert judges.bias_gelu(interpreted("bias_gelu", x, b, act), x, b, act) <= 1.0
    assert judges.bias_gelu_backward(interpreted("bias_gelu_backward", dy, x, b, act), dy, x, b, act) <= 1.0


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_far_out(interpreted: Interpreter, act: str, dtype: torch.dtype) -> None:
    """x^3 overflows and sigmoids saturate; values and slopes are 0 or x, 0 or 1."""
    x = torch.tensor([[-3e4, -300.0, -30.0, 0.0, 30.0, 300.0, 3e4]]).to(dtype)
    tiny = 1e-10  # silu(-30)
    assert torch.allclose(interpreted("bias_gelu", x, None, act), torch.relu(x), rtol=0, atol=tiny)
    slope, _ = interpreted("bias_gelu_backward", torch.ones_like(x), x, None, act)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]]).to(dtype)
    assert torch.allclose(slope, expected, rtol=0, atol=tiny)


@FEW
@given(x=rows(1100), act=st.sampled_from(["silu", "gelu", "gelu_tanh"]), packed=st.booleans())
def test_gated(interpreted: Interpreter, x: Tensor, act: str, packed: bool) -> None:
    up, dy = like(x, 1), like(x, 2)
    given_ = (torch.cat((x, up), -1), None) if packed else (x, up)
    assert judges.gated(interpreted("gated", *given_, act), x, up, act) <= 1.0
    dgate, dup = interpreted("gated_backward", dy, *given_, act)
    assert (dup is None) == packed
    found = dgate.chunk(2, -1) if packed else (dgate, dup)
    assert judges.gated_backward(found, dy, x, up, act) <= 1.0


@FEW
@given(x=rows(1100))
def test_squared_relu(interpreted: Interpreter, x: Tensor) -> None:
    dy = like(x, 1)
    assert ulps(interpreted("squared_relu", x), reference.squared_relu(wide(x))) <= 1.0
    assert (
        relative(interpreted("squared_relu_backward", dy, x), reference.squared_relu_backward(*map(wide, (dy, x))))
        < (LOOSE[x.dtype])
    )


@settings(max_examples=max(5, settings().max_examples // 6))
@given(
    x=rows(1100),
    p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(-(2**62), 2**62),
    op_id=st.sampled_from([0, 1, 17, 2**32 - 1]),
    # Columns between neighbours, columns that a shard leaves out of each row, and the first element.
    place=st.sampled_from([(1, 0), (1, 4), (1, 5), (3, 0), (3, 5), (2, 1)]),
    first=st.sampled_from([0, 1, 2, 3, 2**32 - 50, 2**34 - 1030, 2**34 - 1020, 2**40 + 1]),
    aligned=st.booleans(),
)
def test_dropout(
    interpreted: Interpreter,
    x: Tensor,
    p: float,
    seed: int,
    op_id: int,
    place: tuple[int, int],
    first: int,
    aligned: bool,
) -> None:
    """The mask is `shardc::random_uniform`'s, at any place of any tensor, and backward's is forward's."""
    bias, residual, dy = like(x, 1, x.shape[1]), like(x, 2), like(x, 3)
    step, more = place
    strides, offset = (step * x.shape[1] + more, step), torch.tensor(first)
    if aligned:  # rows that begin at multiples of 4: neighbours share a counter
        strides, offset = (-(-strides[0] // 4) * 4, 1), torch.tensor(first // 4 * 4)
    y, keep = interpreted("bias_dropout_residual", x, bias, residual, p, torch.tensor(seed), op_id, strides, offset)
    mask = RANDOM_UNIFORM(torch.tensor(seed), op_id, list(x.shape), list(strides), offset) >= p
    assert torch.equal(
        keep, reference.bias_dropout_residual(x, bias, residual, p, torch.tensor(seed), op_id, strides, offset)[1]
    )
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    kept = torch.where(mask, (wide(x) + wide(bias)) * scale, 0.0)
    assert judges.error(y, kept + wide(residual), 4.0 * (kept.abs() + wide(residual).abs())) <= 1.0
    dx, db = interpreted("bias_dropout_residual_backward", dy, keep, p, bias)
    added = torch.where(mask, wide(dy) * scale, 0.0)
    assert judges.error(dx, added, 2.0 * added.abs()) <= 1.0
    assert judges.summed(db, added.sum(0), added.abs()) <= 1.0


def test_a_shard_draws_what_the_whole_tensor_draws(interpreted: Interpreter) -> None:
    x = torch.ones(2, 6, 40)
    seed = torch.tensor(99)
    whole, _ = interpreted("bias_dropout_residual", x, None, None, 0.4, seed, 3)
    strides = (240, 40, 1)
    for first, last in ((8, 24), (4, 40), (5, 23), (39, 40)):  # even, and uneven as they come
        offset = torch.tensor(2 * 40 + first)
        part = x[:, 2:5, first:last]
        mine, _ = interpreted("bias_dropout_residual", part, None, None, 0.4, seed, 3, strides, offset)
        assert torch.equal(mine, whole[:, 2:5, first:last])


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)),
    half=st.integers(1, 20),
    rest=st.sampled_from([0, 0, 5]),
    inverse=st.booleans(),
    interleaved=st.booleans(),
    each=st.booleans(),
    low=st.booleans(),
)
def test_rope(
    interpreted: Interpreter,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    half: int,
    rest: int,
    inverse: bool,
    interleaved: bool,
    each: bool,
    low: bool,
) -> None:
    """Tiles that end within a token, and within the last one; angles in either precision."""
    batch, sequence, heads = shape
    packed = torch.randn(batch, sequence, heads + 2, 2 * half + rest).to(dtype)
    x = packed[:, :, 1 : heads + 1]
    angles = torch.rand(*([batch] if each else []), sequence, half) * 6
    cos, sin = (t.to(dtype if low else torch.float32) for t in (angles.cos(), angles.sin()))
    arguments = (x, cos, sin, inverse, interleaved)
    y = interpreted("rope", *arguments)
    assert judges.rope(y, *arguments) <= 1.0
    _, after = interpreted("rope", *arguments, True, changed=True)
    assert torch.equal(after[0], y)


@FEW
@given(count=st.integers(1, 2100), step=st.integers(1, 1000), low=st.sampled_from(DTYPES), skip=st.booleans())
def test_adamw(interpreted: Interpreter, count: int, step: int, low: torch.dtype, skip: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    param, first = (torch.randn(count, generator=generator) for _ in range(2))
    second = torch.rand(count, generator=generator)
    grad = torch.randn(count, generator=generator).to(low)
    lr, when, scale = torch.tensor(1e-2), torch.tensor(step), torch.tensor(0.25)
    flag = torch.tensor(float(skip))
    copy = torch.zeros(count, dtype=low)
    options = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    arguments = (param, grad, first, second, lr, when)
    _, after = interpreted("adamw", *arguments, **options, grad_scale=scale, skip=flag, copy=copy, changed=True)
    mine = torch.nn.Parameter(param.double().clone())
    optimizer = torch.optim.AdamW([mine], lr=1e-2, **options)
    optimizer.state[mine] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": first.double().clone(),
        "exp_avg_sq": second.double().clone(),
    }
    mine.grad = grad.double() * 0.25
    if not skip:
        optimizer.step()
    state = optimizer.state[mine]
    for found, exact in zip(
        (after[0], after[2], after[3]), (mine.detach(), *(state[k] for k in ("exp_avg", "exp_avg_sq"))), strict=True
    ):
        assert relative(found, exact) < 1e-6
    assert torch.equal(after[-1], after[0].to(low))
    assert torch.equal(after[1], grad)


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    groups=st.sampled_from([1, 3]),
    of_group=st.sampled_from([1, 2, 5]),
    space=st.sampled_from([(), (1,), (7, 9), (70, 70)]),
    affine=st.booleans(),
)
def test_group_norm(
    interpreted: Interpreter, dtype: torch.dtype, groups: int, of_group: int, space: tuple[int, ...], affine: bool
) -> None:
    channels = groups * of_group
    x, dy = (torch.randn(2, channels, *space).to(dtype) for _ in range(2))
    w, b = (torch.randn(channels).to(dtype) if affine else None for _ in range(2))
    y, mean, rstd = interpreted("group_norm", x, groups, w, b, 1e-3)
    assert judges.group_norm((y, mean, rstd), x, groups, w, b, 1e-3) <= 1.0
    found = interpreted("group_norm_backward", dy, x, groups, w, mean, rstd)
    assert judges.group_norm_backward(found, dy, x, groups, w, mean, rstd) <= 1.0
