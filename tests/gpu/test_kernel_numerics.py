"""Row kernels on a GPU at drawn shapes: rows 1 to 70,000, columns 1 to 131,072, odd ones, any magnitude, twice.

Results are within 2 units of the last place of the correctly rounded ones, each element by what its own row lets it be;
sums over rows are at float32 accuracy: `tests/kernels/judges.py` says how that is measured.
"""

import judges
import pytest
import torch
from closeness import relative, wide
from drawn import DEVICE, DTYPES, LOOSE, SOME, Drawn, shapes, twice
from far_logits import SCALE, far_out, held, in_graphs
from far_logits import given as operands
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton import ops
from kernels_triton.ir.text import parse
from kernels_triton.library import reference
from kernels_triton.match.launcher import launcher

pytestmark = pytest.mark.gpu
OFFSETS = st.sampled_from([0.0, 0.0, 1e2, 1e4])  # of logits


@DTYPES
@SOME
@given(shape=shapes(centred=True), added=st.booleans())
def test_layer_norm(dtype: torch.dtype, shape: Drawn, added: bool) -> None:
    x, w, b = shape.x(dtype, largest=not added), shape.weight(1, dtype), shape.weight(2, dtype)
    if added:
        given_x, residual = x, shape.like(3, dtype)
        y, x, mean, rstd = twice(ops.add_layer_norm, given_x, residual, w, b, 1e-5)
        assert torch.equal(x, (given_x.float() + residual.float()).to(dtype))
    else:
        y, mean, rstd = twice(ops.layer_norm, x, w, b, 1e-5)
    assert judges.layer_norm((y, mean, rstd), x, w, b, 1e-5) <= 1.0
    if not added:
        assert torch.equal(y[shape.rows // 2], b)


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
    assert judges.rms_norm((y, rstd), x, w, 1e-6) <= 1.0


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
    assert judges.norm_backward(found, dy, x, w, stats[0] if layer else None, stats[-1], beside) <= 1.0


@DTYPES
@SOME
@given(shape=shapes(), scale=st.sampled_from([1.0, 0.125, 40.0]), masked=st.booleans(), causal=st.booleans())
def test_softmax(dtype: torch.dtype, shape: Drawn, scale: float, masked: bool, causal: bool) -> None:
    """Scales that would overflow an exponential without the maximum."""
    x = shape.x(dtype)
    mask = shape.weight(1, torch.float32) > -0.5 if masked else None
    y = twice(ops.softmax, x, scale, mask, causal)
    assert judges.softmax(y, x, scale, mask, causal) <= 1.0
    dy = shape.like(2, dtype)
    assert judges.softmax_backward(twice(ops.softmax_backward, dy, y, scale, causal), dy, y, scale, causal) <= 1.0


@DTYPES
@SOME
@given(shape=shapes(), in_place=st.booleans(), padded=st.booleans(), offset=OFFSETS)
def test_cross_entropy(dtype: torch.dtype, shape: Drawn, in_place: bool, padded: bool, offset: float) -> None:
    x = shape.x(dtype).add_(offset)
    x = in_wide_rows(x) if padded else x
    target, scale = targets(shape), torch.tensor(0.5, device=DEVICE)
    half, exact = torch.tensor(0.5, device=DEVICE), reference.cross_entropy(wide(x), target, scale)
    loss, lse, grad = twice(ops.cross_entropy, x, target, scale)
    assert relative(loss, exact[0], exact[0].clamp(min=1.0)) < 1e-6
    assert relative(lse, exact[1], exact[1].abs().clamp(min=1.0)) < 1e-6
    assert relative(grad, exact[2], half) < LOOSE[dtype]
    if padded:
        whole_rows(ops.cross_entropy(x, target, scale, padded=True)[2], grad)
    if in_place:
        there = ops.cross_entropy(x, target, scale, -100, True)[2]
        assert torch.equal(x, there)
        # Rows that lie apart may be written in another layout, whose sums are rounded otherwise.
        same = torch.equal(there, grad) if x.is_contiguous() else relative(there, exact[2], half) < LOOSE[dtype]
        assert same


@DTYPES
@SOME
@given(shape=shapes(), cut=st.floats(0.0, 1.0), offset=OFFSETS)
def test_shards_of_a_vocabulary(dtype: torch.dtype, shape: Drawn, cut: float, offset: float) -> None:
    """Each shard's statistics, gathered; each shard then has its part of the gradient, and the whole loss."""
    x, target = shape.x(dtype).add_(offset), targets(shape)
    edge = int(cut * shape.cols)
    parts = [(start, part) for start, part in ((0, x[:, :edge]), (edge, x[:, edge:])) if part.shape[1]]
    stats = torch.stack([twice(ops.cross_entropy_stats, part, target, start) for start, part in parts])
    exact = reference.cross_entropy(wide(x), target, None)
    for start, part in parts:
        loss, lse, grad = twice(ops.cross_entropy_finish, part, target, stats, shape.cols, start)
        assert relative(loss, exact[0], exact[0].clamp(min=1.0)) < 1e-6
        assert relative(lse, exact[1], exact[1].abs().clamp(min=1.0)) < 1e-6
        mine = exact[2][:, start : start + part.shape[1]]
        assert relative(grad, mine, torch.ones((), device=DEVICE)) < LOOSE[dtype]
        whole_rows(ops.cross_entropy_finish(part, target, stats, shape.cols, start, padded=True)[2], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cols", [300, 50304, 128256])
def test_logits_far_from_zero(dtype: torch.dtype, cols: int) -> None:
    """The op, shards, and what graphs launch, with a bias too."""
    x, target = far_out(dtype, cols, DEVICE)
    loss, lse, grad = ops.cross_entropy(x, target, torch.tensor(SCALE, device=DEVICE))
    held(x, target, loss, grad)
    torch.testing.assert_close(lse.double(), x.double().logsumexp(-1), rtol=2e-7, atol=1e-6)
    parts = [(0, x[:, : cols // 3]), (cols // 3, x[:, cols // 3 :])]
    stats = torch.stack([ops.cross_entropy_stats(part, target, start) for start, part in parts])
    made = [
        ops.cross_entropy_finish(part, target, stats, cols, start, torch.tensor(SCALE, device=DEVICE))
        for start, part in parts
    ]
    held(x, target, made[0][0], torch.cat([grad for *_, grad in made], 1))
    for biased in (False, True):
        total, picked, grad = launcher(parse(in_graphs(dtype, *x.shape, biased)))(operands(x, target, biased))
        held(x, target, (total.log() - picked).squeeze(1), grad)


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
