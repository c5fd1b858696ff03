"""Numbers in the text of kernels, and what tells values apart: as eager torch has them, not as Python or float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from tests.kernels.traced import fused_results

aten = torch.ops.aten
INF = float("inf")
F16, BF16, F32, F64, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64
X = torch.linspace(-2.0, 2.0, 16)
TENTH = torch.full((16,), 0.1)
NEAR_1 = torch.full((16,), 1 + 1e-12, dtype=F64)
SMALL = torch.full((16,), 1e-4, dtype=F16)  # whose square is 0 in float16
BIG = torch.full((16,), 2**24 + 1)  # an integer that float32 has not
Function = Callable[..., Any]


def full(like: Tensor, number: float, dtype: torch.dtype) -> Tensor:
    return aten.full.default([16], number, dtype=dtype, device=like.device)


CASES: dict[str, tuple[Function, Sequence[Tensor]]] = {
    # To Python 1, 1.0 and True are equal, and 0.0 and -0.0 are.
    "1.0 and 1": (lambda i: ((i + 1.0) - 2.0**24, (i + 1) - 2**24), (BIG,)),
    "1 and True": (lambda c, i: (torch.where(c, 1, 0) + i, torch.where(c, True, False) & c), (X > 0, BIG)),
    "0.0 and -0.0": (lambda x: (1 / (x * 0.0), 1 / (x * -0.0)), (X,)),
    # What yields bools of float64 numbers sees all of their bits.
    "float64 compared": (lambda d, x: torch.where(d > 1.0, x, 0.0) * 2, (NEAR_1, X)),
    "float64 numbers that are equal": (lambda d, e, x: torch.where(d == e, x, 0.0) * 2, (NEAR_1, NEAR_1 + 1e-12, X)),
    "float64 to bool": (lambda d, x: torch.where(d.bool(), x, 0.0) * 2, (NEAR_1 * 1e-300, X)),
    "not of float64": (lambda d, x: torch.where(torch.logical_not(d), x, 0.0) * 2, (NEAR_1 * 1e-300, X)),
    "infinite float64": (lambda d, x: torch.where(torch.isinf(d), x, 0.0) * 2, (NEAR_1 * 1e300, X)),
    "float64 times float32": (lambda d, x: (d * x - x, x * 2 + 1), (NEAR_1, X)),
    "float32 to float64": (lambda d, x: ((d - x.double()) * 2, x * 2 + 1), (NEAR_1, X * 0 + 1)),
    "float64 to float32": (lambda d, x: ((d - 1).float() * x, d * 2 - 1), (NEAR_1, X)),
    # A number that a dtype does not hold is none of it.
    "a fraction to integers": (lambda i: full(i, 2.7, F32).to(I64) * i + 1, (BIG,)),
    "a number to bool": (lambda x: torch.where(full(x, 1e-3, F32).bool(), x, 0.0) * 2, (X,)),
    "a number to bytes": (lambda i: full(i, 300, I64).to(torch.uint8) + i + 1, (BIG,)),
    "a number of 16 bits": (lambda x: full(x, 0.1, BF16) * x + 1e-9, (X,)),
    "a number that overflows": (lambda x: full(x, 7e4, F32).half().float() * x, (X.abs() + 1,)),
    "a number in float64": (lambda d: full(d, 0.1, F32).double() * d + 1, (NEAR_1,)),
    "numbers that are held": (lambda x, c: torch.where(c, x, full(x, -INF, BF16)) * 2.0, (X.bfloat16(), X > 0)),
    # Floats are compared in the dtype that they have in common.
    "float16 and a number of float32": (lambda h, s: torch.where(h == s, 1.0, 2.0) * 3, (TENTH.half(), TENTH[0])),
    "float16 and integers": (lambda h, i: torch.where(h == i, 1.0, 2.0) * 3, (X.half() * 0 + 2048, BIG * 0 + 2049)),
    "integers divided by float16": (lambda i, h: (torch.remainder(i, h) * 2, torch.fmod(i, h) * 2),
                                    (BIG * 0 + 32767, X.half() * 0 + 2.5)),
    "float32 and a number of float64": (lambda x, s: torch.where(x == s, 1.0, 2.0) * 3, (TENTH, NEAR_1[0] * 0 + 0.1)),
    "float16 and float32": (lambda h, x: torch.where(h == x, 1.0, 2.0) * 3, (TENTH.half(), TENTH)),
    # What jumps does so where 16 bits do: 0.3 of float16 is a little more, and ten times that is 3.
    "float16 rounded up and down": (lambda h: (torch.ceil(h * 30), torch.floor(h * -30)), (TENTH.half() * 3 / 3.0,)),
    "3 of float16 rounded up": (lambda h: torch.ceil(h * 10) + 1, ((TENTH * 3).half(),)),
    # The sign of what becomes -0 where it is rounded.
    "the sign of a rounded 0": (lambda h: torch.where(torch.signbit(-h * h), 1.0, 2.0) * 3, (SMALL,)),
    "the sign of a rounded 0, copied": (lambda h: torch.copysign(h, -h * h) * 3, (SMALL,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    function, given = CASES[name]
    found, kernels = fused_results(function, given)
    expected = function(*given)
    assert kernels
    for mine, theirs in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), (mine, theirs)


def test_a_sum_of_nothing_is_no_kernel() -> None:
    found, kernels = fused_results(lambda x: x[:0].sum(0) * 2 + 1, (X.view(4, 4),))
    assert torch.equal(found[0], torch.ones(4))
    assert len(kernels) == 1


def test_kernels_of_other_literals_are_other_kernels() -> None:
    """They are the keys of what is compiled."""
    lines = [f"a[|8](i64[8]){{%1=mul(%0, {number})}}->f32[8]=%1" for number in ("1", "1.0", "true", "0.0", "-0.0")]
    made: set[Kernel] = {parse(line) for line in lines}
    assert len(made) == len(lines)
    assert {parse(line) for line in lines} == made


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        up, down = torch.where(x > 0, x, 0.0), torch.where(x > 0, x, -0.0)
        return (self.w * (torch.copysign(self.w, up) + 3 * torch.copysign(self.w, down))).sum()


def test_calls_of_other_literals_are_other_calls() -> None:
    model = Signs()
    trainer = shardc.compile(model, {"x": X}, mesh="dp=1").launch()
    assert float(trainer.step({"x": X}).loss) == float(model(X).detach())
