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

from kernels_triton.rows import Schedule

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
