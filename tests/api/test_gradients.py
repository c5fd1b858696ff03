"""Gradients on their way to the user: clipped without an optimizer too, and never quietly absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import shardc
from shardc import Plan, ShardcError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean() * 50


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("dp=2", {"inputs": {"x": "dp"}}),
    "tensor": ("tp=2", {"params": {"up.weight": "tp, -"}}),
    "zero": ("dp=2", {"inputs": {"x": "dp"}, "storage": {"params": {"**.*": "dp"}}}),
    "pipeline": ("pp=2", {"pipeline": {"stages": 2, "microbatches": 2}}),
    "checked": ("dp=2", {"inputs": {"x": "dp"}, "nonfinite": "skip"}),
}


RETURNED = {"norm": 0.5, "returned": True}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_clipped_without_an_optimizer(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 8)
    mesh, plan = PLANS[name]
    program = shardc.compile(model, x, mesh=mesh, plan={"clip_grad_norm": RETURNED, **plan})
    report = program.verify()
    assert report.ok, str(report)
    trainer = program.launch()
    result = trainer.step(x)
    model(x).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 5
    assert result.grad_norm is not None
    torch.testing.assert_close(result.grad_norm, norm)
    for key, gradient in trainer.gather_grads().items():
        torch.testing.assert_close(gradient, model.get_parameter(key).grad)


@pytest.mark.parametrize("clip", [0.5, {"norm": 0.5}, {"norm": 0.5, "returned": False}], ids=str)
def test_returned_gradients_are_clipped_only_where_the_plan_says_so(clip: object, tmp_path: Path) -> None:
    """The caller may take them for the loss's own, or clip them once more."""
    model, x = Model(), torch.randn(8, 8)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"mesh": "dp=2", "clip_grad_norm": clip}, sort_keys=False))
    with pytest.raises(ShardcError) as raised:
        shardc.compile(model, x, plan=str(path))
    (wrong,) = raised.value.diagnostics
    assert wrong.code == "SC228"
    assert wrong.location == f"{path}:2"
    assert wrong.hint is not None
    assert "clip_grad_norm: {norm: 0.5, returned: true}" in wrong.hint
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert shardc.compile(model, x, plan=str(path), optimizer=sgd).verify().ok
    evaluation = shardc.compile(model, x, plan=str(path), mode="eval")
    assert any("'clip_grad_norm' of the plan is without effect" in d.message for d in evaluation.diagnostics)


def test_a_clipping_is_written_as_it_was_read() -> None:
    for text in ("clip_grad_norm: 0.5\n", "clip_grad_norm:\n  norm: 0.5\n  returned: true\n"):
        assert Plan.parse(text).dump() == text
    assert (
        Plan.of(clip_grad_norm=RETURNED).clip_grad_norm
        == Plan.parse("clip_grad_norm: {norm: 0.5, returned: true}").clip_grad_norm
    )


def test_gradients_of_a_program_with_an_optimizer_are_refused() -> None:
    model, x = Model(), torch.randn(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = shardc.compile(model, x, mesh="dp=2", optimizer=optimizer).launch()
    trainer.step(x)
    with pytest.raises(ShardcError, match="compile without optimizer= to have gradients") as raised:
        trainer.gather_grads()
    assert raised.value.code == "SC544"


LARGE = {**PLANS, "bf16": ("dp=2", {"inputs": {"x": "dp"}, "precision": "bf16"})}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("size", [1e21, 1e36])
def test_large_gradients_are_finite_and_clipped_right(name: str, size: float) -> None:
    """Their squares are not float32: a step was skipped, or its gradients became 0."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 8)
    mesh, plan = LARGE[name]
    plan = {"nonfinite": "skip", "clip_grad_norm": RETURNED, **plan}
    program = shardc.compile(model, x, mesh=mesh, plan=plan, loss=lambda y, _: y * size)
    trainer = program.launch()
    result = trainer.step(x)
    model.double()(x.double()).mul(size).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    rtol, atol = (5e-2, 5e-3) if name == "bf16" else (1e-4, 1e-6)
    assert result.finite is not None
    assert bool(result.finite)
    assert result.grad_norm is not None
    torch.testing.assert_close(result.grad_norm.double(), norm, rtol=rtol, atol=atol)
    for key, gradient in trainer.gather_grads().items():
        torch.testing.assert_close(gradient.double(), model.get_parameter(key).grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_element_that_is_not_finite_is_found(value: float) -> None:
    model, x = Model(), torch.randn(8, 8)
    plan = {"nonfinite": "raise", "inputs": {"x": "dp"}, "storage": {"params": {"**.*": "dp"}}}
    trainer = shardc.compile(model, x, mesh="dp=2", plan=plan).launch()
    trainer.step(x)
    bad = x.clone()
    bad[7, 7] = value
    with pytest.raises(ShardcError, match=r"the gradients of up\.weight") as raised:
        trainer.step(bad)
    assert raised.value.code == "SC509"
