"""What a user changes in sight, of a model, its batch or its plan, is compiled so, whatever lies on the disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.compiler.request import Request
from tests.program_cache.models import outcome


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(8, 16), nn.Linear(16, 8), 0.5
        self.act: Callable[[Tensor], Tensor] = torch.relu
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor, factor: int = 1) -> Tensor:
        return (self.down(self.act(self.up(x))) + self.offset).square().mean() * self.rate * factor


PLAN = {"params": {"up.weight": "tp, -"}}


def two() -> Request:
    torch.manual_seed(0)
    return Request(Two(), torch.ones(4, 8), "dp=2, tp=2", dict(PLAN))


def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def set_attribute(name: str, value: Any) -> Callable[[Request], Request]:
    def change(request: Request) -> Request:
        setattr(request.model, name, value)
        return request

    return change


def with_model(change: Callable[[Any], object]) -> Callable[[Request], Request]:
    def changed(request: Request) -> Request:
        change(request.model)
        return request

    return changed


def _tie(model: Any) -> None:
    model.again = model.up


def _freeze(model: Any) -> None:
    model.up.weight.requires_grad_(False)


def _fill(model: Any) -> None:
    model.offset[3] = 1e-9


def _instance_forward(model: Any) -> None:
    model.up.forward = lambda x: nn.functional.linear(x, model.up.weight) + 1


CHANGES: dict[str, Callable[[Request], Request]] = {
    "a number of a module": set_attribute("rate", 0.25),
    "its type": set_attribute("rate", 1),
    "a new attribute": set_attribute("more", {"a": [1, {2, 3}]}),
    "the mode": with_model(lambda model: model.eval()),
    "the mode of one module": with_model(lambda model: model.up.eval()),
    "a frozen parameter": with_model(_freeze),
    "a parameter's dtype": with_model(lambda model: model.up.double()),
    "a tied module": with_model(_tie),
    "a buffer's value": with_model(_fill),
    "a buffer that is not saved": with_model(lambda model: model.register_buffer("offset", model.offset, False)),
    "a forward of an instance": with_model(_instance_forward),
    "a hook": with_model(lambda model: model.up.register_forward_hook(hook)),
    "a hook before": with_model(lambda model: model.up.register_forward_pre_hook(lambda m, x: None)),
    "a hook of a parameter": with_model(lambda model: model.up.weight.register_hook(lambda g: g * 2)),
    "another module": set_attribute("down", nn.Linear(16, 8, bias=False)),
    "a function on the module": set_attribute("act", torch.tanh),
    "another one": set_attribute("act", torch.sin),
    "the batch's shape": lambda r: replace(r, batch=torch.ones(8, 8)),
    "the batch's dtype": lambda r: replace(r, batch=torch.ones(4, 8, dtype=torch.float64)),
    "the batch's layout": lambda r: replace(r, batch=torch.ones(8, 4).t()),
    "the batch's values": lambda r: replace(r, batch=torch.zeros(4, 8)),
    "the batch's structure": lambda r: replace(r, batch={"x": torch.ones(4, 8)}),
    "the batch on the meta device": lambda r: replace(r, batch=torch.ones(4, 8, device="meta")),
    "a number in the batch": lambda r: replace(r, batch=(torch.ones(4, 8), 3)),
    "another number in the batch": lambda r: replace(r, batch=(torch.ones(4, 8), 4)),
    "a loss": lambda r: replace(r, loss=scaled_loss(2.0)),
    "a variable of the loss": lambda r: replace(r, loss=scaled_loss(3.0)),
    "a default of the loss": lambda r: replace(r, loss=weighted_loss),
    "an optimizer": lambda r: replace(r, optimizer=torch.optim.SGD(r.model.parameters(), lr=0.1)),
    "its rate": lambda r: replace(r, optimizer=torch.optim.SGD(r.model.parameters(), lr=0.2)),
    "its momentum": lambda r: replace(r, optimizer=torch.optim.SGD(r.model.parameters(), lr=0.1, momentum=0.9)),
    "its parameters": lambda r: replace(r, optimizer=torch.optim.SGD([*r.model.parameters()][:2], lr=0.1)),
    "a placement": lambda r: replace(r, plan={"params": {"up.weight": "-, tp"}}),
    "an option of the plan": lambda r: replace(r, plan={**PLAN, "seed": 3}),
    "the plan's hardware": lambda r: replace(r, plan={**PLAN, "hardware": {"bucket_bytes": 4096}}),
    "strict": lambda r: replace(r, strict=True),
    "the mesh": lambda r: replace(r, mesh="dp=4, tp=2"),
    "the order of the mesh": lambda r: replace(r, mesh="tp=2, dp=2"),
    "the mode of the program": lambda r: replace(r, mode="eval"),
    "a plan on the model": with_model(lambda model: shardc.annotate(model, {"params": {"down.weight": "-, tp"}})),
}


def scaled_loss(factor: float) -> Callable[[Any, Any], Any]:
    return lambda output, batch: output * factor


def weighted_loss(output: Any, batch: Any) -> Any:
    return output * 3.0


@pytest.mark.sampled(12)
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_changed_in_sight_is_compiled_so(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert outcome(two(), cached=True)[0] == "stored"
    assert outcome(two(), cached=True)[0] == "hit"
    change = CHANGES[what]
    said, found = outcome(change(two()), cached=True)
    assert found == outcome(change(two()), cached=False)[1], said
