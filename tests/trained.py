"""A model trained by plain PyTorch, and another of the same values by its program: what each has after some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh

MESH = Mesh(dp=2)
PLAN = {"inputs": {"x": "dp"}}


def batches(*shape: int, count: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for _ in range(count)]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """The model, in float64 from the start: `.double()` would make other tensors of those that it holds by the way."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def trained_by_eager(model: nn.Module, data: Sequence[Tensor], lr: float = 0.05) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for x in data:
        optimizer.zero_grad()
        model(x.clone()).backward()
        optimizer.step()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def trained_by_program(model: nn.Module, data: Sequence[Tensor], lr: float = 0.05, **options: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    options = {"mesh": MESH, "plan": PLAN} | options
    trainer = shardc.compile(model, data[0].clone(), optimizer=optimizer, **options).launch()
    for x in data:
        trainer.step(x.clone())
    return trainer.state_dict()


def assert_trains_as_eager(
    build: Callable[[], nn.Module], data: Sequence[Tensor], tolerance: float = 1e-11, **options: Any
) -> None:
    """Three steps of different batches leave the same parameters and buffers."""
    expected = trained_by_eager(made(build), data)
    start = {name: t.clone() for name, t in made(build).state_dict().items()}
    assert any(not torch.equal(t, start[name]) for name, t in expected.items()), "the model does not train"
    found = trained_by_program(made(build), data, **options)
    for name, want in expected.items():
        torch.testing.assert_close(
            found[name], want, rtol=tolerance, atol=tolerance / 10, msg=lambda m, n=name: f"{n}: {m}"
        )
