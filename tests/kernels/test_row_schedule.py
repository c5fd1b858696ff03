"""Row kernels against float64: norms and softmax, forward and backward, every schedule they have.

Results are within 2 units of the last place of the correctly rounded ones, each element by what its own row lets it be;
gradients of weights are at float32 accuracy: `judges` says how that is measured.
"""

from typing import Any

import judges
import pytest
import torch
from closeness import relative, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Interpreter
from torch import Tensor

from kernels_triton.launch.row_schedule import Schedule
from kernels_triton.library import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW = settings(max_examples=max(5, settings().max_examples // 5))


@st.composite
def rows(draw: st.DrawFn, most: int = 2100) -> Tensor:
    """[rows, cols], sometimes with a stride between rows, of any magnitude, constant rows among them."""
    count = draw(st.integers(1, 9))
    cols = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 1023, 1024, 1025, 2048, most])))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(count, cols + draw(st.sampled_from([0, 0, 3, 16])), generator=generator)
    x = x * draw(st.sampled_from([1e-3, 1.0, 30.0])) + draw(st.sampled_from([0.0, 0.0, 5.0]))
    if draw(st.booleans()):
        x[0] = 2.5
    return x.to(dtype)[:, :cols]


def like(x: Tensor, seed: int, *shape: int) -> Tensor:
    drawn = torch.randn(shape or x.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(x.dtype)


@FEW
@given(x=rows(), affine=st.booleans())
def test_layer_norm(interpreted: Interpreter, x: Tensor, affine: bool) -> None:
    w, b = (like(x, seed, x.shape[1]) if affine else None for seed in (1, 2))
    assert judges.layer_norm(interpreted("layer_norm", x, w, b, 1e-5), x, w, b, 1e-5) <= 1.0


@FEW
@given(x=rows())
def test_rms_norm(interpreted: Interpreter, x: Tensor) -> None:
    w = like(x, 1, x.shape[1])
    assert judges.rms_norm(interpreted("rms_norm", x, w, 1e-6), x, w, 1e-6) <= 1.0


@FEW
@given(x=rows(), layer=st.booleans())
def test_the_sum_before_a_norm_is_given_back(interpreted: Interpreter, x: Tensor, layer: bool) -> None:
    residual, w = like(x, 3), like(x, 1, x.shape[1])
    extra: tuple[Any, ...] = (like(x, 2, x.shape[1]),) if layer else ()
    op = "add_layer_norm" if layer else "add_rms_norm"
    y, total, *_ = interpreted(op, x, residual, w, *extra, 1e-5)
    assert torch.equal(total, (x.float() + residual.float()).to(x.dtype))
    alone = interpreted(op.removeprefix("add_"), total, w, *extra, 1e-5)
    assert torch.equal(y, alone[0])


@FEW
@given(x=rows(), layer=st.booleans(), residual=st.booleans())
def test_norm_backward(interpreted: Interpreter, x: Tensor, layer: bool, residual: bool) -> None:
    dy, w = like(x, 4), like(x, 1, x.shape[1])
    beside = like(x, 5) if residual else None
    forward = reference.layer_norm(wide(x), None, None, 1e-3) if layer else reference.rms_norm(wide(x), None, 1e-3)
    stats = [s.float() for s in forward[1:]]
    op = "layer_norm_backward" if layer else "rms_norm_backward"
    found = interpreted(op, dy, x, w, *stats, beside)
    assert judges.norm_backward(found, dy, x, w, stats[0] if layer else None, stats[-1], beside) <= 1.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cols", [1500, 3000, 16385, 40000])
def test_long_rows(interpreted: Interpreter, cols: int) -> None:
    """Rows of several chunks, and rows that are looped over."""
    x, residual, dy = (torch.randn(3, cols, generator=torch.Generator().manual_seed(s)) + s for s in range(3))
    w, b = torch.randn(cols), torch.randn(cols)
    y, total, mean, rstd = interpreted("add_layer_norm", x, residual, w, b, 1e-5)
    assert torch.equal(total, x + residual)
    assert judges.layer_norm((y, mean, rstd), total, w, b, 1e-5) <= 1.0
    found = interpreted("layer_norm_backward", dy, total, w, mean, rstd, x)
    assert judges.norm_backward(found, dy, total, w, mean, rstd, x) <= 1.0
    y = interpreted("softmax", x, 2.0)
    assert judges.softmax(y, x, 2.0, None, False) <= 1.0
    assert judges.softmax_backward(interpreted("softmax_backward", dy, y, 2.0), dy, y, 2.0, False) <= 1.0


def test_a_long_causal_row_is_read_up_to_its_edge(interpreted: Interpreter) -> None:
    x = torch.randn(3, 20000)
    y = interpreted("softmax", x, 1.0, None, True)
    assert relative(y, reference.softmax(wide(x), causal=True)) < 2e-6
    dy = torch.randn(3, 20000)
    dy[:, -1] = torch.nan  # past every edge but the last
    dy[2, -1] = 1.0
    dx = interpreted("softmax_backward", dy, y, 1.0, True)
    assert relative(dx, reference.softmax_backward(wide(dy), wide(y), causal=True)) < 2e-6


def test_causal_rows_by_blocks(interpreted: Interpreter) -> None:
    """Edges before the first column and in every block; a mask beside them; what is past the edge is not read."""
    schedule, queries, cols = Schedule(16, 3, 1, 1), 50, 45
    x, dy = (torch.randn(1, queries, cols, generator=torch.Generator().manual_seed(s)) for s in range(2))
    past = torch.ones(queries, cols, dtype=torch.bool).triu(cols - queries + 16 + 1)  # loads end at a 16th column
    kept = torch.rand(1, 1, cols, generator=torch.Generator().manual_seed(2)) < 0.8
    hidden = x.masked_fill(past, torch.nan)
    y = interpreted("scheduled", "softmax", "causal_softmax", schedule, hidden, 2.0, kept, True)
    assert relative(y, reference.softmax(wide(x), 2.0, kept, True)) < 2e-6
    hidden = dy.masked_fill(past, torch.nan)
    args = ("scheduled", "softmax_backward", "causal_softmax_backward", schedule, hidden, y, 2.0, True)
    assert relative(interpreted(*args), reference.softmax_backward(wide(dy), wide(y), 2.0, True)) < 2e-6


@settings(max_examples=max(8, settings().max_examples // 3))
@given(x=rows(), scale=st.sampled_from([1.0, 0.125, 40.0]), data=st.data())
def test_softmax(interpreted: Interpreter, x: Tensor, scale: float, data: st.DataObject) -> None:
    """Scales that would overflow an exponential without the maximum; masks of every shape; causal edges."""
    heads = data.draw(st.sampled_from([1, 2]))
    queries = data.draw(st.sampled_from([q for q in range(1, x.shape[0] + 1) if x.shape[0] % (q * heads) == 0] or [0]))
    if not queries:
        heads, queries = 1, x.shape[0]
    x = x.unflatten(0, (-1, heads, queries))
    batch, cols = x.shape[0], x.shape[-1]
    mask: Tensor | None = None
    kind = data.draw(st.sampled_from(["none", "boolean", "added"]))
    if kind != "none":
        shape = [data.draw(st.sampled_from([1, n])) for n in (batch, heads, queries)]
        mask = torch.randn(*shape, cols, generator=torch.Generator().manual_seed(7))
        mask = mask > -0.3 if kind == "boolean" else mask.to(x.dtype)
    causal = data.draw(st.booleans())
    y = interpreted("softmax", x, scale, mask, causal)
    assert judges.softmax(y, x, scale, mask, causal) <= 1.0
    dy = like(x, 3)
    assert judges.softmax_backward(interpreted("softmax_backward", dy, y, scale, causal), dy, y, scale, causal) <= 1.0


def test_a_row_with_nothing_to_see_is_zeros(interpreted: Interpreter) -> None:
    x = torch.randn(2, 5, 3)  # causal, more queries than columns: the first see nothing
    y = interpreted("softmax", x, 1.0, None, True)
    assert not y[:, :2].any()
    assert torch.allclose(y[:, 2:].sum(-1), torch.ones(2, 3))


def test_huge_logits_do_not_overflow(interpreted: Interpreter) -> None:
    x = torch.tensor([[3e38, 3e38, -3e38], [-3e38, -3e38, -3e38]])
    assert torch.allclose(interpreted("softmax", x), torch.tensor([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_two_runs_are_bitwise_equal(interpreted: Interpreter) -> None:
    x, dy, w = torch.randn(300, 70), torch.randn(300, 70), torch.randn(70)
    _, mean, rstd = interpreted("layer_norm", x, w, None, 1e-5)
    first, second = (interpreted("layer_norm_backward", dy, x, w, mean, rstd) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
