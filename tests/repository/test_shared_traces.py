"""Tests share a trace only of what is the same in all that a trace may depend on, and each gets a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests import shared_traces
from tests.shared_traces import shared


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))
        self.power = 2

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.scale).pow(self.power).sum()


def sample() -> Tensor:
    return torch.ones(2, 4)


def test_what_is_alike_is_traced_once_and_copied() -> None:
    first, second = (shared(Scaled(), sample()) for _ in range(2))
    assert shared_traces._key(Scaled(), sample(), None, {}) in shared_traces._traces
    assert [node.name for node in first.graph.nodes] == [node.name for node in second.graph.nodes]
    assert not set(first.graph.nodes) & set(second.graph.nodes)
    assert {i.node for i in second.inputs} <= set(second.graph.nodes)
    assert {o.node for o in second.outputs} <= set(second.graph.nodes)
    assert [node.meta.keys() for node in first.graph.nodes] == [node.meta.keys() for node in second.graph.nodes]


def test_a_program_of_a_shared_trace_is_right() -> None:
    texts = []
    for _ in range(2):
        program = shardc.compile(Scaled(), sample(), mesh="dp=2", plan={"inputs": {"x": "dp"}})
        assert program.verify().ok
        texts.append(program.text())
    assert texts[0] == texts[1]


def _hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "a buffer's value": lambda model: model.scale.mul_(2),
    "a buffer's memory": lambda model: setattr(model, "scale", model.fc.weight.detach()[0]),
    "an attribute": lambda model: setattr(model, "power", 3),
    "a mode": lambda model: model.eval(),
    "what is trained": lambda model: model.fc.weight.requires_grad_(False),
    "a dtype": lambda model: model.double(),
    "a hook": lambda model: model.fc.register_forward_hook(_hook),
    "a function": lambda model: setattr(model.fc, "forward", lambda x: x),
    "a module": lambda model: setattr(model, "fc", nn.Sequential(nn.Linear(4, 4, bias=False))),
    "a tied parameter": lambda model: setattr(model, "other", model.fc.weight),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_differs_is_not_shared(change: Callable[[Scaled], Any]) -> None:
    model = Scaled()
    change(model)
    alike = shared_traces._key(Scaled(), sample(), None, {})
    assert alike is not None
    assert shared_traces._key(model, sample(), None, {}) != alike


def test_batches_losses_and_options_are_told_apart() -> None:
    keys = [
        shared_traces._key(Scaled(), *rest)
        for rest in (
            (sample(), None, {}),
            (sample() * 2, None, {}),
            (sample().double(), None, {}),
            (sample(), nn.functional.mse_loss, {}),
            (sample(), None, {"microbatches": 2}),
        )
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert shared_traces._key(Scaled(), sample(), lambda output, batch: output, {}) is None, "it may read anything"


def test_nothing_is_shared_once_code_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_traces._active
    monkeypatch.setattr(Scaled, "forward", lambda self, x: self.fc(x).sum())
    assert not shared_traces._active
    assert not any(node.target is torch.ops.aten.pow.Tensor_Scalar for node in shared(Scaled(), sample()).graph.nodes)
