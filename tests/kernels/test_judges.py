"""The judges of kernels refuse what is a little wrong: each of these would pass if an error were measured against the
largest number of a tensor. What is right, the float64 result rounded once, passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import judges
import pytest
import torch
from closeness import wide
from torch import Tensor

from kernels_triton.library import reference

ROWS, COLS, EPS = 24, 200, 1e-5
Wrong = Callable[[Tensor], Tensor]


def operands(magnitude: float, mean: float, dtype: torch.dtype) -> list[Tensor]:
    """x with a constant row, dy, weight, bias, residual's gradient."""
    generator = torch.Generator().manual_seed(int(magnitude * 7 + mean))
    x = torch.randn(ROWS, COLS, generator=generator) * magnitude + mean
    x[ROWS // 2] = 142.857
    others = [torch.randn(*shape, generator=generator) for shape in ((ROWS, COLS), (COLS,), (COLS,), (ROWS, COLS))]
    return [t.to(dtype) for t in (x, *others)]


def no_row(y: Tensor) -> Tensor:
    """One row's is 0: of ordinary numbers, however small beside the others'."""
    rows = y.abs().amax(-1)
    y[int(rows.masked_fill(rows == 0, torch.inf).argmin())] = 0.0
    return y


def no_last_column(y: Tensor) -> Tensor:
    y[..., -1] = 0.0
    return y


def one_row_off(y: Tensor) -> Tensor:
    y[3] *= 1.01
    return y


WRONG: dict[str, Wrong] = {"a row is 0": no_row, "the last column is 0": no_last_column, "1 % off": one_row_off}
OPERANDS = [
    (magnitude, mean, dtype)
    for magnitude in (1e-3, 1.0, 30.0)
    for mean in (0.0, 5.0, 1e4)
    for dtype in (torch.bfloat16, torch.float32)
    # Of 16 bits these are all one number; of float32 the smallest so far from zero are a unit or two.
    if magnitude * (1e3 if dtype == torch.bfloat16 else 1e6) > mean
]


def rounded(exact: Any, dtype: torch.dtype) -> list[Any]:
    """As a kernel leaves them: `exact[0]` in x's dtype, statistics in float32."""
    exact = list(exact) if isinstance(exact, (tuple, list)) else [exact]
    return [None if t is None else t.to(dtype if n == 0 else torch.float32) for n, t in enumerate(exact)]


def refused(judge: Callable[[list[Any]], float], right: list[Any], wrongs: dict[str, Wrong], at: int = 0) -> None:
    assert judge(right) <= 1.0
    for name, wrong in wrongs.items():
        made = list(right)
        made[at] = wrong(right[at].clone())
        assert judge(made) > 1.0, name


@pytest.mark.parametrize(("magnitude", "mean", "dtype"), OPERANDS, ids=str)
def test_norms(magnitude: float, mean: float, dtype: torch.dtype) -> None:
    x, dy, w, b, beside = operands(magnitude, mean, dtype)
    wx, wdy, ww, wb = map(wide, (x, dy, w, b))
    right = rounded(reference.layer_norm(wx, ww, wb, EPS), dtype)
    refused(lambda found: judges.layer_norm(found, x, w, b, EPS), right, WRONG)
    for wrong in (reference.layer_norm(wx, ww, wb, EPS / 2), lost(reference.layer_norm, wx, ww, wb, EPS)):
        assert judges.layer_norm(rounded(wrong, dtype), x, w, b, EPS) > 1.0
    _, mean_, rstd = right
    off = (wx - mean_[:, None]) * rstd[:, None] * 1.01 * ww + wb
    assert judges.layer_norm([off.to(dtype), mean_, rstd], x, w, b, EPS) > 1.0
    right = rounded(reference.rms_norm(wx, ww, EPS), dtype)
    refused(lambda found: judges.rms_norm(found, x, w, EPS), right, WRONG)
    assert judges.rms_norm(rounded(lost(reference.rms_norm, wx, ww, EPS), dtype), x, w, EPS) > 1.0
    stats = (mean_, rstd)
    for residual in (None, beside):
        given = (wdy, wx, ww, *map(wide, stats), None if residual is None else wide(residual))
        right = rounded(reference.layer_norm_backward(*given), dtype)

        def judge(found: list[Any], residual: Tensor | None = residual) -> float:
            return judges.norm_backward(found, dy, x, w, *stats, residual)

        refused(judge, right, WRONG)
        less = reference.layer_norm_backward(given[0][:-1], wx[:-1], ww, *(s[:-1] for s in map(wide, stats)))
        for at in (1, 2):  # a sum without the last row, and one that was taken in bfloat16
            assert judge([*right[:at], less[at].float(), *right[at + 1 :]]) > 1.0
            assert judge([*right[:at], right[at].bfloat16().float(), *right[at + 1 :]]) > 1.0


def lost(forward: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """Statistics of one thread's 8 numbers less."""
    less = x.clone()
    less[:, 8:16] = 0.0
    _, *stats = forward(less, *others)
    rstd = stats[-1][:, None]
    centred = x - stats[0][:, None] if len(stats) == 2 else x
    w, b = others[0], others[1] if len(stats) == 2 else 0.0
    return (centred * rstd * w + b, *forward(x, *others)[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("magnitude", "scale"), [(1.0, 1.0), (30.0, 1.0), (30.0, 0.125), (1e-3, 40.0)])
def test_softmax(magnitude: float, scale: float, dtype: torch.dtype) -> None:
    x, dy, *_ = operands(magnitude, 0.0, dtype)
    mask = torch.arange(COLS) % 5 > 0
    for kept in (None, mask):
        right = rounded(reference.softmax(wide(x), scale, kept), dtype)
        wrongs = {"a row is 0": no_row, "1 % off": lambda y: y * 1.02}
        refused(lambda found, kept=kept: judges.softmax(found[0], x, scale, kept, False), right, wrongs)
    z = (wide(x) * scale).softmax(-1)
    if dtype == torch.float32:  # of 16 bits some are as much by rounding
        less = z / (1.0 - z[:, 8:16].sum(-1, keepdim=True).clamp(max=0.9))
        assert judges.softmax(less.to(dtype), x, scale, None, False) > 1.0
    y = z.to(dtype)
    right = rounded(reference.softmax_backward(wide(dy), wide(y), scale), dtype)
    refused(lambda found: judges.softmax_backward(found[0], dy, y, scale, False), right, WRONG)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_activations(magnitude: float, act: str, dtype: torch.dtype) -> None:
    x, dy, _, b, up = operands(magnitude, 0.0, dtype)
    wx, wdy, wb, wup = map(wide, (x, dy, b, up))
    right = rounded(reference.bias_gelu(wx, wb, act), dtype)
    wrongs = {**WRONG, "2 % off": lambda y: y * 1.02}
    refused(lambda found: judges.bias_gelu(found[0], x, b, act), right, wrongs)
    right = rounded(reference.bias_gelu_backward(wdy, wx, wb, act), dtype)
    refused(lambda found: judges.bias_gelu_backward(found, dy, x, b, act), right, wrongs)
    less = reference.bias_gelu_backward(wdy[:-1], wx[:-1], wb, act)[1]
    assert less is not None
    assert judges.bias_gelu_backward([right[0], less.float()], dy, x, b, act) > 1.0
    right = rounded(reference.gated(wx, wup, act), dtype)
    refused(lambda found: judges.gated(found[0], x, up, act), right, wrongs)
    exact = reference.gated_backward(wdy, wx, wup, act)
    right = [t.to(dtype) for t in exact if t is not None]
    for at in (0, 1):
        refused(lambda found: judges.gated_backward(found, dy, x, up, act), right, wrongs, at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tails(dtype: torch.dtype) -> None:
    """What a logistic below 2^-126 is multiplied by may be 0, and nothing before; of a normal distribution in 16 bits
    no more may be lost than its polynomial loses."""
    dy, half = torch.ones(1, 1, dtype=dtype), dtype == torch.bfloat16
    gone, there = {"silu": -88.0, "gelu_tanh": -10.125}, {"silu": -87.0, "gelu_tanh": -9.875, "gelu": -5.5}
    for act, at in [*gone.items(), *there.items()]:
        x = torch.full((1, 1), at, dtype=dtype)
        lost, few = at == gone.get(act), act == "gelu" and not half  # of float32, 1 + erf has a few units of 1
        made = torch.zeros_like(x)
        assert (judges.bias_gelu(made, x, None, act) <= 1.0) == (lost or few), act
        assert (judges.gated(made, x, dy, act) <= 1.0) == (lost or few), act
        if lost:
            assert judges.bias_gelu_backward((made, None), dy, x, None, act) <= 1.0
    for act, at in (("silu", -86.0), ("gelu_tanh", -9.5), *([("gelu", -5.5)] if half else [])):
        x = torch.full((1, 1), at, dtype=dtype)
        assert judges.bias_gelu_backward((torch.zeros_like(x), None), dy, x, None, act) > 1.0, act
    x = torch.full((1, 8), 1e-36, dtype=dtype)  # nothing is gone of a product
    assert judges.rope(torch.zeros(1, 1, 1, 8, dtype=dtype), x.view(1, 1, 1, 8), dy, 0 * dy, False, False) > 1.0


@pytest.mark.parametrize("mean", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_group_norm(mean: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 6, 35, generator=generator).mul(3).add(mean).to(dtype) for _ in range(2))
    w, b = (torch.randn(6, generator=generator).to(dtype) for _ in range(2))
    right = rounded(reference.group_norm(wide(x), 3, wide(w), wide(b), EPS), dtype)
    wrongs = {"the last column is 0": no_last_column, "2 % off": lambda y: y * 1.02}
    refused(lambda found: judges.group_norm(found, x, 3, w, b, EPS), right, wrongs)
    _, mean_, rstd = right
    exact = reference.group_norm_backward(wide(dy), wide(x), 3, wide(w), wide(mean_), wide(rstd))
    right = rounded(exact, dtype)
    refused(lambda found: judges.group_norm_backward(found, dy, x, 3, w, mean_, rstd), right, wrongs)
    for at in (1, 2):
        coarse = [*right[:at], right[at].bfloat16().float(), *right[at + 1 :]]
        assert judges.group_norm_backward(coarse, dy, x, 3, w, mean_, rstd) > 1.0


def test_turned_heads() -> None:
    x = torch.randn(1, 5, 2, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = angles.cos(), angles.sin()
    right = rounded(reference.rope(wide(x), wide(cos), wide(sin)), torch.bfloat16)
    wrongs = {"the last column is 0": no_last_column, "2 % off": lambda y: y * 1.02}
    refused(lambda found: judges.rope(found[0], x, cos, sin, False, False), right, wrongs)
    assert judges.rope(right[0], x, cos, sin, True, False) > 1.0
