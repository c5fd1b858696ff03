"""A vocabulary shard's statistics from `online_softmax`: for rows held at once, and for looped rows."""

from __future__ import annotations

import math

import pytest
import torch
from interpreter import Interpreter

from kernels_triton.codegen.schedules import PlanStyle
from kernels_triton.ir import reference, text
from kernels_triton.launch.row_schedule import Schedule

KERNEL = (
    "fused_statistics[6|40](f32[6,40], i64[6]@0:1,0, i64[]@0:0,0){%3=iota{1}(); %4=sub(37, %2); %5=lt(%3, %4); "
    "%6=where(%5, %0, -inf); %7=rmax(%6); %8=maximum(%7, -3.4028234663852886e+38); %9=sub(%6, %8); %10=exp(%9); "
    "%11=rsum(%10); %12=sub(%1, %2); %13=eq(%3, %12); %14=where(%13, %0, 0.0); %15=rsum(%14)}"
    "->f32[1,3,6,1]=%7@0:1,0+%11@6:1,0+%15@12:1,0"
)


@pytest.mark.parametrize("style", ["rows", "loops"])
def test_statistics_of_a_shard(interpreted: Interpreter, style: PlanStyle) -> None:
    """A shard of minus infinity alone has the sum 0; blocks of it, and the padding, add nothing."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 100
    x[0], x[1, :33], x[2, 5], x[3, 36:], x[4] = -math.inf, -math.inf, math.nan, -math.inf, 1e38
    x[:, 37:] = 3e38  # padding
    inputs = [x, torch.tensor([3, 35, -100, 1000, 0, 36]), torch.tensor(0)]
    schedule = Schedule(64, 1, 4, 4) if style == "rows" else Schedule(16, 0, 4, 4)
    (mine,) = interpreted("fused", KERNEL, style, schedule, *inputs)
    (exact,) = reference.run(text.parse(KERNEL), inputs)
    torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert mine[0, :, 0, 0].tolist() == [-math.inf, 0.0, -math.inf]
    assert mine[0, 1, 4, 0] == 37


def test_a_shard_of_minus_infinity_leaves_the_others_alone(interpreted: Interpreter) -> None:
    """cross_entropy_stats, the gather, cross_entropy_finish: where one shard, and where every shard, has no number."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    x[0, :4], x[1] = -math.inf, -math.inf
    target = torch.tensor([6, 2, 1])
    parts = [(0, x[:, :4]), (4, x[:, 4:])]
    stats = torch.stack([interpreted("cross_entropy_stats", part, target, start) for start, part in parts])
    leaf = x.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(exact.sum(), leaf)
    for start, part in parts:
        loss, lse, mine = interpreted("cross_entropy_finish", part, target, stats, 8, start)
        torch.testing.assert_close(lse.double(), x.double().logsumexp(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss.double(), exact.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(mine.double(), grad[:, start : start + 4], rtol=1e-5, atol=1e-6, equal_nan=True)
