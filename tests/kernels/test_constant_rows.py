"""Norms of rows and groups that are one number: exactly the bias, whatever the number, as torch has it. A mean that is
one unit of 12345.678 off leaves 0.3 of it, which `rstd`, 316 here, makes of the rounding.

Kernels of each kind, by schedule: what is held, looped over, read twice, shared by programs that meet. Numbers are such
that sums of a few hundred are inexact, or overflow; beside them are rows far from zero, whose variance cancels in
float32 if a mean's rounding is left in it.
"""

from __future__ import annotations

import judges
import pytest
import torch
from interpreter import Interpreter

from kernels_triton.codegen.codegen import generate
from kernels_triton.codegen.schedules import PlanStyle, choose_plan
from kernels_triton.gate.corpus import Draft
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import text
from kernels_triton.launch.launch import H200
from kernels_triton.launch.row_schedule import Schedule

NUMBERS = {
    torch.float32: (142.857, 12345.678, 1e6 + 0.1, -3e38),
    torch.float16: (65504.0, -1999.0, 142.857),
    torch.bfloat16: (142.857, 1e6, -3e4),
}
FLOATS, HALF, BRAIN = NUMBERS
# Kernels of rows: what they are called, (dtype, columns, schedule).
ROWS = {
    "held": (FLOATS, 331, None),
    "held, in blocks": (FLOATS, 777, Schedule(256, 4, 2)),
    "read again": (FLOATS, 331, Schedule(512, 1, 1, again=True)),
    "looped": (FLOATS, 1111, Schedule(512, 0)),
    "looped, half": (HALF, 1111, Schedule(512, 0)),
    "looped, brain": (BRAIN, 1111, Schedule(512, 0)),
    "held, half": (HALF, 9001, None),
    "held, brain": (BRAIN, 331, None),
}
# Of groups: (dtype, channels of two groups, positions, schedule).
GROUPS = {
    "held": (FLOATS, 10, 49, None),
    "held, several tiles": (FLOATS, 64, 49, Schedule(64, 1, 8)),
    "held, half": (HALF, 64, 300, Schedule(512, 1, 32)),
    "held, brain": (BRAIN, 10, 49, None),
    "twice": (FLOATS, 6, 77, Schedule(64, 0, 2)),
    "twice, tail": (FLOATS, 6, 101, Schedule(128, 0, 4)),
    "twice, less than a tile": (FLOATS, 2, 103, Schedule(128, 0, 4)),
    "twice, half": (HALF, 6, 101, Schedule(128, 0, 4)),
    "twice, brain": (BRAIN, 6, 101, Schedule(128, 0, 4)),
    "meeting": (FLOATS, 14, 49, Schedule(64, 3, 4)),
    "meeting, half": (HALF, 14, 49, Schedule(64, 3, 4)),
    "meeting, brain": (BRAIN, 14, 49, Schedule(64, 3, 4)),
}


def rows_of(dtype: torch.dtype, cols: int) -> torch.Tensor:
    """A constant row each, and of float32 some far from zero."""
    generator = torch.Generator().manual_seed(cols)
    rows = [torch.full((cols,), number) for number in NUMBERS[dtype]]
    if dtype == torch.float32:
        rows += [torch.randn(cols, generator=generator) * size + 1e4 for size in (1e-3, 0.03, 30.0)]
        rows += [torch.cat([torch.tensor([1e4]), torch.randn(cols - 1, generator=generator)])]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("kind", ROWS)
def test_rows(interpreted: Interpreter, kind: str) -> None:
    dtype, cols, schedule = ROWS[kind]
    x, count = rows_of(dtype, cols), len(NUMBERS[dtype])
    w, b = (torch.randn(cols, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    trial = None if schedule is None else ("layer_norm", schedule)
    y, mean, rstd = interpreted("layer_norm", x, w, b, 1e-5, schedule=trial)
    assert torch.equal(y[:count], b.expand(count, cols))
    assert torch.equal(mean[:count], x[:count, 0].float())
    assert judges.layer_norm((y, mean, rstd), x, w, b, 1e-5) <= 1.0


@pytest.mark.parametrize("schedule", [None, Schedule(128, 0)], ids=["held", "looped"])
def test_rows_of_a_sum(interpreted: Interpreter, schedule: Schedule | None) -> None:
    """Of what is added and rounded to 16 bits, sums are exact as its own bits let them be."""
    x = torch.full((3, 333), 65504.0 / 3).half()
    trial = None if schedule is None else ("add_layer_norm", schedule)
    y, total, mean, _ = interpreted("add_layer_norm", x, x, None, None, 1e-5, schedule=trial)
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(mean, total[:, 0].float())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", GROUPS)
def test_groups(interpreted: Interpreter, kind: str) -> None:
    dtype, channels, space, schedule = GROUPS[kind]
    x, count = rows_of(dtype, channels * space // 2), len(NUMBERS[dtype])
    x = torch.stack([x, x.flip(0)], 1).reshape(-1, channels, space)  # two groups a sample
    w, b = (torch.randn(channels, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    trial = None if schedule is None else ("group_norm", schedule)
    y, mean, rstd = interpreted("group_norm", x, 2, w, b, 1e-5, schedule=trial)
    half = channels // 2
    assert torch.equal(y[:count, :half], b[:half, None].expand(count, half, space))
    assert torch.equal(mean[:count, 0], x[:count, 0, 0].float())
    assert judges.group_norm((y, mean, rstd), x, 2, w, b, 1e-5) <= 1.0


def generated(cols: int, dtype: torch.dtype, rows: int, summed: bool, mean: str) -> Kernel:
    """A norm of `x`, or of `x + y`, and its mean, with what no template has."""
    k = Draft((rows, cols))
    x, y = k.full(dtype), k.full(dtype)
    h = k("add", x, y) if summed else x
    total = k("rsum", h)
    average = k("div", total, float(cols)) if mean == "div" else k("mul", total, 1 / cols)
    apart = k("sub", h, average)
    variance = k.mean(k("square", apart) if mean == "div" else k("mul", apart, apart))
    normed = k("mul", apart, k("rsqrt", k("add", variance, 1e-5)))
    k.out(k("tanh", k("mul", normed, 3.0)), torch.float32)
    k.out_row(average)
    return k.kernel("fused_norm_tanh")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mean", ["div", "mul"])
@pytest.mark.parametrize("summed", [False, True], ids=["x", "x + y"])
@pytest.mark.parametrize(
    "schedule", [None, Schedule(256, 2, 4), Schedule(512, 1, 4, waves=1), Schedule(64, 0, 4)], ids=str
)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_generated_norms(
    interpreted: Interpreter, dtype: torch.dtype, schedule: Schedule | None, summed: bool, mean: str
) -> None:
    x = rows_of(dtype, 331)
    x = x[x.abs().amax(1) < 1e38]  # whose sum is finite
    count = sum(abs(number) < 1e38 for number in NUMBERS[dtype])
    y = torch.zeros_like(x)
    y[:count] = x[:count] / 4 if dtype == torch.float32 else 0
    kernel = generated(331, dtype, len(x), summed, mean)
    out, average = interpreted("fused", text(kernel), _style(schedule), schedule, x, y)
    exact = (x.float() + y.float() if summed else x.float())[:, 0]
    assert torch.equal(out[:count], torch.zeros_like(out[:count]))
    assert torch.equal(average[:count], exact[:count])
    expected, centre = reference.run(kernel, [x.double(), y.double()])
    h = x.double() + y.double() * summed
    rounding = 2.0**-24 * centre.abs() / (h.var(-1, correction=0) + 1e-5).sqrt()  # of the mean, normed
    assert ((out - expected).abs().amax(-1) <= 3e-6 + 6 * rounding).all()


def _style(schedule: Schedule | None) -> PlanStyle | None:
    return None if schedule is None else "rows" if schedule.chunks else "loops"


@pytest.mark.parametrize("cols", [41, 83])
@pytest.mark.parametrize("schedule", [None, Schedule(16, 0, 4)], ids=["held", "looped"])
@pytest.mark.parametrize("kind", ["m - x", "exp"])
def test_other_generated_norms(interpreted: Interpreter, kind: str, schedule: Schedule | None, cols: int) -> None:
    """Of distances the other way round; of what is summed while its maximum is looked for."""
    k = Draft((4, cols))
    x = k.full(torch.float32)
    h = k("exp", k("sub", x, k("rmax", x))) if kind == "exp" else x
    average = k.mean(h)
    apart = k("sub", average, h) if kind == "m - x" else k("sub", h, average)
    k.out(k("mul", apart, k("rsqrt", k("add", k.mean(k("square", apart)), 1e-12))), torch.float32)
    (y,) = interpreted("fused", text(k.kernel("fused_other")), _style(schedule), schedule, torch.ones(4, cols))
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("schedule", [None, Schedule(64, 0, 4)], ids=["held", "looped"])
def test_a_generated_mean_that_is_infinite_stays_so(interpreted: Interpreter, schedule: Schedule | None) -> None:
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    x[0, 7], x[1, 7] = float("inf"), float("nan")
    x[3], x[4] = -3e38, torch.tensor([3.3e38, -2.4e38, *[0.0] * 98])
    kernel = generated(100, torch.float32, 5, False, "div")
    _, average = interpreted("fused", text(kernel), _style(schedule), schedule, x, x)
    assert average[0] == float("inf")
    assert average[1].isnan()
    torch.testing.assert_close(average[2], x[2].mean())
    assert average[3] == -float("inf")
    torch.testing.assert_close(average[4], x[4].double().mean().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "cols", "again"),
    [
        (torch.float32, 331, True),
        (torch.bfloat16, 331, False),
        (torch.bfloat16, 65536, False),
        (torch.bfloat16, 65537, True),
        (torch.float16, 8192, False),
        (torch.float16, 8193, True),
    ],
)
def test_a_mean_is_summed_again_only_where_it_has_to_be(dtype: torch.dtype, cols: int, again: bool) -> None:
    kernel = generated(cols, dtype, 64, False, "div")
    lines = generate(kernel, choose_plan(kernel, H200)).text
    assert ("off_" in lines) == again
    assert ("nearest_quotient" in lines) != again
    assert f" / {cols}.0\n" not in lines.replace("off_3 = tl.sum(apart_3, 1, keep_dims=True) / ", ""), (
        "a row's quotient"
    )


def test_gradients_and_other_differences_are_as_they_were() -> None:
    """Only of a mean whose distances are squared much is made."""
    k = Draft((64, 331))
    x, g = k.full(torch.float32), k.full(torch.float32)
    apart = k("sub", x, k.mean(x))
    k.out(k("tanh", apart), torch.float32)
    k.out(k("mul", apart, 2.0), torch.float32)
    k.out(k("mul", apart, g), torch.float32)
    kernel = k.kernel("fused_apart")
    assert "off_" not in generate(kernel, choose_plan(kernel, H200)).text


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", [None, Schedule(64, 0)], ids=["held", "looped"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_no_number(interpreted: Interpreter, dtype: torch.dtype, schedule: Schedule | None, bad: float) -> None:
    """NaN or infinity in a row is NaN in its results, `rstd` among them, and in no other row's."""
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 70] = bad
    y, _, rstd = interpreted("layer_norm", x, None, None, schedule=schedule and ("layer_norm", schedule))
    assert y.isnan().all(-1).tolist() == rstd.isnan().tolist() == [False, True, False]
    assert not y[::2].isnan().any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["held", "twice", "meeting", "twice, tail", "meeting, brain"])
def test_no_number_in_a_group(interpreted: Interpreter, kind: str, bad: float) -> None:
    dtype, channels, space, schedule = GROUPS[kind]
    x = torch.randn(2, channels, space, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, channels - 1, space - 1] = bad
    trial = None if schedule is None else ("group_norm", schedule)
    y, _, rstd = interpreted("group_norm", x, 2, None, None, 1e-5, schedule=trial)
    assert rstd.isnan().tolist() == [[False, False], [False, True]]
    assert y.reshape(4, -1).isnan().all(-1).tolist() == [False, False, False, True]
