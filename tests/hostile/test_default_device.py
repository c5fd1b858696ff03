"""A default device that is not the CPU: what a model or the compiler makes without a device lies on the CPU all the
same, and training is plain eager training's. The meta device stands for any other: this needs no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc

STEPS, LR = 3, 0.05


class Positions(nn.Module):
    """It makes tensors in forward, and names no device."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.register_buffer("mask", torch.ones(32))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.up(x)) * self.mask) + torch.full((32,), 0.5)
        logits = self.down(functional.gelu(hidden)) + 0.1 * torch.arange(4)
        return functional.cross_entropy(logits, labels) + torch.tensor(0.25)


@contextlib.contextmanager
def set_globally() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


WAYS: dict[str, Callable[[], Any]] = {"context": lambda: torch.device("meta"), "default": set_globally}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "kernels": ("dp=2, tp=2", {"fuse": True}),
    "buckets": ("dp=2, tp=2", {"fuse": True, "bucket": 1000}),
    "pipeline": ("pp=2, dp=2", {"pipeline": {"microbatches": 2, "stages": 2}, "fuse": True}),
    "zero": ("dp=2, tp=2", {"storage": {"zero": 3, "axes": ["dp"]}, "accumulate": 2}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_training_is_eager_training(way: str, plan: str) -> None:
    torch.manual_seed(0)
    model, eager = Positions().double(), Positions().double()
    eager.load_state_dict(model.state_dict())
    batches = [{"x": torch.randn(8, 16).double(), "labels": torch.randint(4, (8,))} for _ in range(STEPS)]
    plain = torch.optim.SGD(eager.parameters(), lr=LR, momentum=0.9)
    want: list[float] = []
    for batch in batches:
        plain.zero_grad()
        loss = eager(**batch)
        loss.backward()
        plain.step()
        want.append(float(loss.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    mesh, said = PLANS[plan]
    with WAYS[way]():
        program = shardc.compile(
            model, batches[0], mesh=mesh, plan={"inputs": {"*": "dp"}, **said}, optimizer=optimizer
        )
        assert program.verify().ok
        with program.launch() as trainer:
            losses = [float(trainer.step(batch).loss) for batch in batches]
            state = trainer.state_dict()
    assert losses == pytest.approx(want, rel=1e-11)
    for name, value in eager.state_dict().items():
        assert state[name].device.type == "cpu"
        torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-11)
