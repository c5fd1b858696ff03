"""Integers that wrap, bools that are added, float16 that overflows: fused as eager torch computes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from kernels_triton.generated.op import FUSED
from shardc.ir.program import Program

Case = Callable[..., Tensor]
INTEGERS: tuple[Case, ...] = (
    lambda i8, u8, i32, i64: i8 * i8,
    lambda i8, u8, i32, i64: u8 + u8 > 300,
    lambda i8, u8, i32, i64: -u8,
    lambda i8, u8, i32, i64: u8 - 201 < u8,
    lambda i8, u8, i32, i64: torch.rsub(u8, 1) > 3,
    lambda i8, u8, i32, i64: i32 * 4 > 0,
    lambda i8, u8, i32, i64: i32 * i32 > i32,
    lambda i8, u8, i32, i64: (i64 * i64 * 4 > 0) | (i64 * 3 < i64),
    lambda i8, u8, i32, i64: i8.abs() + 1,
    lambda i8, u8, i32, i64: i8.square() + i8,
    lambda i8, u8, i32, i64: torch.add(i8, i8, alpha=3),
    lambda i8, u8, i32, i64: torch.addcmul(i8, i8, i8),
    lambda i8, u8, i32, i64: (u8 < i8) | (u8 < -1),
    lambda i8, u8, i32, i64: torch.maximum(u8 + u8, u8),
    lambda i8, u8, i32, i64: u8.clamp(min=-1) + 1,
    lambda i8, u8, i32, i64: torch.where(u8 > 7, u8 + 1, -1) > 200,
    lambda i8, u8, i32, i64: (i8 * i8).to(torch.uint8),
    lambda i8, u8, i32, i64: (torch.arange(64, dtype=torch.int32) * 1103515245 + 12345).expand(4, 64) > 0,
    lambda i8, u8, i32, i64: i8 < torch.tensor(300),
)
BOOLS: tuple[Case, ...] = (
    lambda a, b: a + b,
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: (a + b) & b,
    lambda a, b: a * b,
    lambda a, b: torch.maximum(a, b) & b,
    lambda a, b: torch.minimum(a, b) | b,
    lambda a, b: torch.where(a, a * b, b),
    lambda a, b: a + 1,
    lambda a, b: a.square(),
)
HALVES: tuple[Case, ...] = (
    lambda h: h * h > 60000.0,
    lambda h: h * h == float("inf"),
    lambda h: torch.isfinite(h * h),
    lambda h: torch.isinf(h * h),
    lambda h: (h * 1e-5 * 1e-5).bool(),
    lambda h: torch.sign(h * 1e-5 * 1e-5),
    lambda h: (h * 0.1).floor(),
)


class Cases(nn.Module):
    """Each case has a parameter, whose gradient is what the case computes, summed over rows."""

    def __init__(self, cases: tuple[Case, ...]) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in cases)
        self.cases = cases

    def forward(self, **given: Tensor) -> Tensor:
        found = zip(self.cases, self.w, strict=True)
        return sum(((case(**given).float() * w).sum() for case, w in found), torch.zeros(()))


def fused(cases: tuple[Case, ...], given: dict[str, Tensor]) -> Program:
    return shardc.compile(Cases(cases), given, mesh="dp=1", plan={"fuse": {"enabled": True}})


def texts(program: Program) -> str:
    return " ".join(str(node.args[1]) for node in program.body.calls() if node.target is FUSED)


def random_integers(dtype: torch.dtype) -> Tensor:
    least, most = torch.iinfo(dtype).min // 2, torch.iinfo(dtype).max // 2
    return torch.randint(least, most, (4, 64), dtype=torch.int64).mul(2).to(dtype)


DRAWN = {
    "integers": (INTEGERS, ("mul", "add", "sub", "cast.i8", "cast.u8", "cast.i32")),
    "bools": (BOOLS, ("or(", "and(")),
    "halves": (HALVES, ("cast.f16",)),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_as_eager_torch_computes(kind: str) -> None:
    torch.manual_seed(0)
    every = {
        "integers": {
            "i8": random_integers(torch.int8), "u8": random_integers(torch.uint8),
            "i32": random_integers(torch.int32), "i64": random_integers(torch.int64),
        },
        "bools": {"a": torch.rand(4, 64) > 0.5, "b": torch.rand(4, 64) > 0.5},
        "halves": {"h": (torch.randn(4, 64) * 300).half()},
    }  # fmt: skip
    (cases, steps), given = DRAWN[kind], every[kind]
    program = fused(cases, given)
    assert all(step in texts(program) for step in steps), "the cases are computed in kernels"
    grads = program.simulate().grads
    assert len(grads) == len(cases)
    for at, case in enumerate(cases):
        assert torch.equal(grads[f"w.{at}"], case(**given).float().sum(0)), at


def test_what_is_loaded_is_not_rounded_again_and_int64_needs_no_cast() -> None:
    given = {"h": (torch.randn(4, 64) * 300).half()}
    assert "cast.f16" not in texts(fused((lambda h: (h > 1.0) & (h < 2.0),), given))
    given = {"i": torch.arange(256).view(4, 64)}
    line = texts(fused((lambda i: i * 3 + i > 7,), given))
    assert "mul(" in line
    assert "cast.i64" not in line


def test_integers_that_torch_would_narrow_are_compared_by_torch() -> None:
    """A number with no dims gives way to the dtype of a tensor that has some; one that is known wraps here."""
    given = {"u8": torch.arange(256).to(torch.uint8).view(4, 64), "n": torch.tensor(300)}
    cases = (lambda u8, n: u8 + 1 < n, lambda u8, n: u8 * 2 == torch.tensor(456), lambda u8, n: u8 * 2 > n.float())
    program = fused(cases, given)
    assert any("lt" in str(node.target) for node in program.body.calls())
    assert "gt(" in texts(program)
    grads = program.simulate().grads
    u8 = given["u8"]
    assert torch.equal(grads["w.0"], (u8 + 1 < given["n"]).float().sum(0))
    assert torch.equal(grads["w.1"], (u8 * 2 == torch.tensor(456)).float().sum(0))
    assert torch.equal(grads["w.2"], (u8 * 2 > given["n"].float()).float().sum(0))
