"""A loop over time that stays a loop is noted: where it is, and what keeps it from being one op (SC113)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend import rolled_loops
from shardc.ir.diagnostic import Diagnostic

STEPS, WIDTH = 12, 4


def scale(h: Tensor, factor: float) -> Tensor:
    return torch.cumsum(h * factor, -1)


class Loops(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STEPS))

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.stack([p.sum() for p in self.layers.parameters()]).sum()
        return (self.lin(getattr(self, self.form)(x)) * scales).square().mean()

    def scan(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = torch.tanh(self.lin(h) + x[:, t])
        return h

    def unknown(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            u = h + x[:, t]
            h = torch.cumsum(u, -1)
        return h

    def in_a_function(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = scale(h + x[:, t], 0.5)
        return h

    def parity(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h + x[:, t] if t % 2 else h - x[:, t]
        return h

    def counted(self, x: Tensor) -> Any:
        h, count = x[:, 0], 0
        for t in range(x.size(1)):
            count = count + 1
            h = h + x[:, t] / count
        return h

    def raises(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(x.size(1)):
            h = h + x[:, t].new_zeros(WIDTH)
        return h

    def twice(self, x: Tensor) -> Any:
        return self.unknown(x) + self.unknown(x * 2)

    def over_layers(self, x: Tensor) -> Any:
        h = x[:, 0]
        for i in range(STEPS):
            h = self.layers[i](h)
        return h

    def short(self, x: Tensor) -> Any:
        h = x[:, 0]
        for t in range(3):
            h = torch.cumsum(h + x[:, t], -1)
        return h


def notes(form: str) -> list[Diagnostic]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, STEPS, WIDTH)}
    program = shardc.compile(Loops(form), batch, mesh="dp=2", plan={"inputs": {"x": "dp, -, -"}})
    return [found for found in program.diagnostics if found.code == "SC113"]


REASONS = {
    "unknown": "`h = torch.cumsum(u, -1)` is no step of a scan",
    "in_a_function": "`return torch.cumsum(h * factor, -1)` is no step of a scan",
    "parity": "`h = h + x[:, t] if t % 2 else h - x[:, t]` is no step of a scan",
    "counted": "count is carried from step to step, and is no tensor of floats",
    "raises": "`h = h + x[:, t].new_zeros(WIDTH)` is no step of a scan",
}


@pytest.mark.parametrize("form", REASONS)
def test_the_note_names_the_loop_and_the_reason(form: str) -> None:
    (note,) = notes(form)
    lines, first = inspect.getsourcelines(getattr(Loops, form))
    loop = first + next(i for i, line in enumerate(lines) if "for t in" in line)
    assert note.severity == "note"
    assert note.location is not None
    assert note.location.endswith(f"test_loop_notes.py:{loop}")
    assert note.source_text == "for t in range(x.size(1)):"
    assert note.message == f"the loop over {STEPS} steps is traced step by step: {REASONS[form]}"


def test_a_loop_is_noted_once() -> None:
    assert len(notes("twice")) == 1


@pytest.mark.parametrize("form", ["scan", "over_layers", "short"])
def test_other_loops_are_not_noted(form: str) -> None:
    assert not notes(form)


def test_an_error_on_stand_ins_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("no such scan\nand more")

    monkeypatch.setattr(rolled_loops, "scan", failing)
    (note,) = notes("scan")
    assert note.message.endswith("fails on a stand-in for a tensor: ValueError: no such scan")
