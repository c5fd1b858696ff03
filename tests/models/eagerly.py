"""What eager PyTorch computes of a model in float64, and how far a program is from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardc.api import Program
from shardc.runtime.oracle.simulate import simulate
from tests.in_double import InDouble


def eager(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its loss and gradients in float64, as its forward is written; the model is in float32 afterwards."""
    model.zero_grad()
    model.double()
    with InDouble():
        loss = model(**batch).loss
    loss.backward()
    found = {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.float()
    return found


def gap(program: Program, wanted: dict[str, Tensor]) -> float:
    """The greatest error of the simulated ranks, of a loss or gradient, relative to its greatest element."""
    found = {port.name: value for port, value in simulate(program.body, program.inputs(), dtype=torch.float64).items()}
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).abs().max() / w.abs().max().clamp(min=1e-3)) for n, w in wanted.items())
