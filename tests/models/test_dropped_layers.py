"""BART with layer drop: each step is eager PyTorch's with some layers dropped, another time others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests.models.test_values_of_batches import bart


def of_bart(output: Any, _: Any) -> Tensor:
    return output.loss


def test_a_step_is_eagers_with_some_layers_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    (model, batch), loss = bart(), of_bart
    model.train().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.5
    batch = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}

    def eager(drops: tuple[bool, ...]) -> Tensor:
        numbers: Iterator[float] = iter([0.0 if drop else 0.9 for drop in drops])
        with monkeypatch.context() as patched:
            patched.setattr(torch, "rand", lambda *_: torch.tensor(next(numbers)))
            return loss(model(**batch), batch)

    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan={"inputs": {"*": "dp"}}, loss=loss)
    assert program.verify().ok
    trainer = program.launch()
    losses = {drops: eager(drops).item() for drops in product((False, True), repeat=2)}
    taken: set[tuple[bool, ...]] = set()
    for _ in range(5):
        result = trainer.step(batch)
        drops = min(losses, key=lambda one: abs(losses[one] - float(result.loss)))
        model.zero_grad()
        expected = eager(drops)
        expected.backward()
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            if name in result.grads:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(result.grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
        taken.add(drops)
    assert len(taken) > 1, "each step decides anew"
