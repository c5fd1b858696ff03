"""Buffers are updated as eager PyTorch updates them, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from tests.trained import MESH, assert_trains_as_eager, batches, made

DATA = batches(4, 6)


class Buffers(nn.Module):
    """`step(self, h)` changes the buffers; the loss reads all of them."""

    def __init__(self, step: Callable[[Any, Tensor], object], late: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("current", torch.zeros(6))
        self.register_buffer("previous", torch.ones(6))
        self.register_buffer("oldest", torch.full((6,), 2.0))
        self.step, self.late = step, late

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.late:
            self.step(self, h)
        loss = (h + self.current - 0.5 * self.previous + 0.25 * self.oldest).square().mean()
        if self.late:
            self.step(self, h)
        return loss


def shifted(m: Any, h: Tensor) -> None:
    m.oldest = m.previous
    m.previous = m.current
    m.current = h.detach().mean(0)


def exchanged(m: Any, h: Tensor) -> None:
    m.current, m.previous = m.previous, m.current


def in_place(m: Any, h: Tensor) -> None:
    m.current.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    m.previous[:2] = m.current[:2]


def copied(m: Any, h: Tensor) -> None:
    m.current = m.a.bias.detach().clone()
    m.previous = m.current * 2


def of_the_batch(m: Any, h: Tensor) -> None:
    m.current = m.previous = h.detach()[0]


STEPS = {"shifted": shifted, "exchanged": exchanged, "in place": in_place, "copied": copied, "shared": of_the_batch}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_buffers_are_as_after_eager_steps(name: str, late: bool) -> None:
    assert_trains_as_eager(lambda: Buffers(STEPS[name], late), DATA)


def test_buffers_that_nothing_changes_may_share_memory() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("table", torch.arange(6.0))
            self.register_buffer("head", self.table[:3])

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) * self.table).square().mean() + self.head.sum() * self.a.bias.sum()

    assert_trains_as_eager(Shared, DATA)


# ------------------------------------------------------------------ refused
def of_a_parameter(m: Any, h: Tensor) -> None:
    m.current = m.a.bias.detach()


def the_parameter(m: Any, h: Tensor) -> None:
    m.current = m.a.bias


def second_name(m: Any, h: Tensor) -> None:
    m.current.add_(1)
    m.previous = m.current


def grows(m: Any, h: Tensor) -> None:
    m.current = torch.cat([m.current, h.detach()[0, :1]])


def other_dtype(m: Any, h: Tensor) -> None:
    m.current = m.current.float()


def removed(m: Any, h: Tensor) -> None:
    m.oldest = None


REFUSED = {
    "a view of a parameter": (of_a_parameter, "SC121", ".detach().clone()"),
    "a parameter": (the_parameter, "SC121", ".detach().clone()"),
    "a second name": (second_name, "SC121", "'current'"),
    "another shape": (grows, "SC123", "[7]"),
    "another dtype": (other_dtype, "SC123", "float32"),
    "no buffer": (removed, "SC123", "'oldest'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_keep_is_refused(name: str) -> None:
    step, code, said = REFUSED[name]
    model = made(lambda: Buffers(step, late=True))
    with pytest.raises(ShardcError) as failure:
        shardc.compile(model, DATA[0], mesh=MESH)
    (diagnostic,) = failure.value.diagnostics
    assert diagnostic.code == code
    assert said in str(failure.value)
    assert diagnostic.location is not None
    assert diagnostic.location.startswith("tests/frontend/test_buffers.py")


@pytest.mark.parametrize("of", ["buffer", "parameter"])
def test_views_of_what_changes_are_refused(of: str) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("total", torch.zeros(6))
            self.register_buffer("part", self.total[:3] if of == "buffer" else self.a.bias.data)

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x.mean(0))
            return self.a(x).sum() + self.part.sum()

    with pytest.raises(ShardcError, match="SC121"):
        shardc.compile(made(Views), DATA[0], mesh=MESH)
