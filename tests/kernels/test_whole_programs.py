"""Whole fused programs, every kernel interpreted and its results given to the next: what one kernel stores and another
makes again must be one value where anything jumps. A kernel by itself, and the reference, cannot show that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import Interpreter
from torch import Tensor, nn

import shardc
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import text
from kernels_triton.match.op import OPS, kernel_of

Forward = Callable[["Model", Tensor], Tensor]
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
CLOSE = {FLOAT: 1e-4, BFLOAT: 6e-2, HALF: 1e-2}


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Parameter(torch.randn(8) / 2), nn.Parameter(torch.randn(8, 8) / 2)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x @ self.b + self.a)


def scaled(m: Model, u: Tensor) -> Tensor:
    """By the largest: 1 + tanh is a sigmoid where nothing else reads the tanh."""
    t = torch.tanh(u)
    h = 1 + t
    return (h / h.amax(0, keepdim=True)).mean() + t.sin().mean()


def between(m: Model, u: Tensor) -> Tensor:
    t = torch.tanh(u)
    h = 1 + t
    low, high = h.amin(0, keepdim=True), h.amax(0, keepdim=True)
    return ((h - low) / (high - low)).square().mean() + t.mean()


def below_the_largest(m: Model, u: Tensor) -> Tensor:
    """Compared with a number, but a difference from what was chosen: no element is above the largest."""
    t = torch.tanh(u)
    h = 1 + t
    return F.relu(h - h.amax(0, keepdim=True)).sum() + h.square().mean() + t.sin().mean()


def over_a_row(m: Model, u: Tensor) -> Tensor:
    """The normal distribution to 16 bits in one kernel, erf in another, which has float32 beside it."""
    h = F.gelu(u)
    return (h / h.amax(-1, keepdim=True)).float().mean() + h.float().square().mean()


def largest_of_each(m: Model, u: Tensor) -> Tensor:
    h = F.gelu(u)
    k = h.float().kthvalue(3, 1).values.to(h.dtype).unsqueeze(1)
    return torch.where(h >= k, h, 0.0).float().square().mean() + (h >= k).float().mean() * m.a.float().sum()


def wider(m: Model, u: Tensor) -> Tensor:
    """The extreme of what is float32 in the graph, and 16 bits where it is stored."""
    h = torch.tanh(u)
    wide = h.float()
    return (wide / (2 + wide.amax(0, keepdim=True))).mean() + h.float().sin().mean()


def in_steps(m: Model, u: Tensor) -> Tensor:
    """Cut off where the largest lies on a step by construction."""
    t = torch.tanh(u)
    h = 1 + t
    low, high = h.amin(0, keepdim=True), h.amax(0, keepdim=True)
    steps = torch.floor((h - low) / (high - low))
    return (h * steps.detach()).mean() + t.sin().mean()


CASES = [
    (scaled, FLOAT), (between, FLOAT), (below_the_largest, FLOAT), (in_steps, FLOAT), (largest_of_each, FLOAT),
    (over_a_row, BFLOAT), (largest_of_each, BFLOAT), (wider, BFLOAT), (over_a_row, HALF), (scaled, BFLOAT),
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("forward", "dtype"), CASES, ids=[f"{f.__name__}-{str(d)[6:]}" for f, d in CASES])
def test_what_jumps_sees_one_value(
    forward: Forward, dtype: torch.dtype, interpreted: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_against_calls(forward, dtype, interpreted, monkeypatch)


def test_what_is_recomputed_is_the_value_that_crossed_ranks(
    interpreted: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extreme is kept, for a collective does not run again; what it is compared with runs again."""

    def across(m: Model, u: Tensor) -> Tensor:
        h = 1 + torch.tanh(u)
        return (h / h.amax(0, keepdim=True)).mean() + (h @ m.b).square().mean()

    plan = {"inputs": {"x": "dp"}, "recompute": "full"}
    held_against_calls(across, FLOAT, interpreted, monkeypatch, "dp=2", plan)


def held_against_calls(
    forward: Forward,
    dtype: torch.dtype,
    interpreted: Interpreter,
    monkeypatch: pytest.MonkeyPatch,
    mesh: str = "dp=1",
    plan: dict[str, Any] | None = None,
) -> None:
    """Loss and gradients of the fused program, in Triton's interpreter, beside those of the calls."""
    torch.manual_seed(1)
    shape = (24, 5, 8) if forward is largest_of_each else (128, 8)
    model, batch = Model(forward).to(dtype), {"x": torch.randn(shape).to(dtype)}
    plain = shardc.compile(model, batch, mesh=mesh, plan=plan or {}).launch().step(batch)
    fused = shardc.compile(model, batch, mesh=mesh, plan={**(plan or {}), "fuse": True})
    assert sum(kernel_of(node.target, node.args) is not None for node in fused.body.calls()) > 1
    ran: list[str] = []

    def run(kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
        line, given = text(kernel), [x.detach().contiguous() for x in inputs]
        ran.append(line)
        if kernel.name in OPS:
            results = interpreted("template", line, *given)
        else:
            results = interpreted("fused", line, None, None, *given)
        return [y.reshape(made.shape) for y, made in zip(results, kernel.outputs, strict=True)]

    monkeypatch.setattr(reference, "run", run)
    found = fused.launch().step(batch)
    assert len(ran) > 1
    pairs = {"loss": (plain.loss, found.loss)} | {n: (g, found.grads[n]) for n, g in plain.grads.items()}
    for name, (want, got) in pairs.items():
        far = float((got - want).abs().max() / want.abs().max())
        assert far <= CLOSE[dtype], f"{name}: {far:.1e} from {want.flatten()[:4]}: {got.flatten()[:4]}"
