"""Several optimizers of one program: the steps that eager PyTorch makes with them one after the other."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.mlp import mlp
from shardc.ir.diagnostic import ShardcError

STEPS = 3
DP: dict[str, Any] = {"inputs": {"x": "dp, -"}}
TP: dict[str, Any] = {"params": {"up.weight": "tp, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("dp=1", {}),
    "dp2 tp2": ("dp=2, tp=2", DP | TP),
    "zero1": ("dp=2, tp=2", DP | TP | {"storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 0.1}),
    "zero2": ("dp=2", DP | {"storage": {"zero": 2, "axes": ["dp"]}, "accumulate": 2}),
    "zero3": ("dp=2", DP | {"storage": {"zero": 3, "axes": ["dp"]}, "clip_grad_norm": 0.1}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 2, "split": ["down"]}, "clip_grad_norm": 0.1}),
}


class Built:
    """A small model in float64, with an optimizer for its matrices and another for all biases but one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model, batch, self.loss = mlp(width=6, hidden=10)
        self.model: nn.Module = model.double()
        self.batch = {name: value.double() for name, value in batch.items()}
        params = dict(self.model.named_parameters())
        self.adamw = torch.optim.AdamW([params["up.weight"], params["down.weight"]], lr=1e-2, weight_decay=0.1)
        self.sgd = torch.optim.SGD([params["up.bias"]], lr=0.1, momentum=0.9)
        self.optimizers = [self.adamw, self.sgd]

    def program(self, layout: str = "zero1", **more: Any) -> shardc.Program:
        mesh, plan = LAYOUTS[layout]
        optimizer: Any = self.optimizers
        return shardc.compile(self.model, self.batch, mesh=mesh, plan=plan | more, loss=self.loss, optimizer=optimizer)

    def schedulers(self) -> list[Any]:
        lr = torch.optim.lr_scheduler
        return [lr.StepLR(self.sgd, 1, gamma=0.5), lr.LambdaLR(self.adamw, lambda step: 1 / (1 + step))]

    def eager(self, steps: int, clip: float | None, schedulers: list[Any] | None = None) -> dict[str, Tensor]:
        """Parameters after so many steps of plain PyTorch."""
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model.zero_grad()
            self.loss(self.model(**self.batch), self.batch).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in schedulers or []:
                scheduler.step()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_eagers(layout: str) -> None:
    built = Built()
    program = built.program(layout)
    report = program.verify()
    assert report.ok, report
    trainer = program.launch()
    start = trainer.state_dict()
    for _ in range(STEPS):
        trainer.step(built.batch)
    close(trainer.state_dict(), Built().eager(STEPS, LAYOUTS[layout][1].get("clip_grad_norm")))
    assert torch.equal(start["down.bias"], trainer.state_dict()["down.bias"])  # it is in none
    state = trainer.state_dict(roles=("state",))
    assert set(state) == {
        *(f"{name}.weight:{key}" for name in ("up", "down") for key in ("step", "exp_avg", "exp_avg_sq")),
        "up.bias:momentum_buffer",
    }
    assert trainer.optimizers == tuple(built.optimizers)
    assert program.plan.get("optimizer") == "AdamW, SGD"


def test_every_optimizer_has_its_schedule(tmp_path: Path) -> None:
    """Half of the steps, then another job on another mesh: rates, schedules and moments go on."""
    built, after = Built(), Built()
    expected = Built()
    wanted = expected.eager(4, None, expected.schedulers())
    plan = {"clip_grad_norm": None}
    seen = []
    for one, layout, steps in ((built, "zero1", 2), (after, "zero3", 4)):
        trainer = one.program(layout, **plan).launch()
        for metrics in trainer.train(
            [one.batch] * 4, steps, checkpoint=tmp_path / "run", scheduler=one.schedulers(), progress=False
        ):
            seen.append(metrics.learning_rates)
    assert seen == [pytest.approx((0.1 * 0.5**step, 1e-2 / (1 + step)), rel=1e-15) for step in range(4)]
    close(trainer.state_dict(), wanted)


def test_schedulers_that_do_not_fit(tmp_path: Path) -> None:
    built = Built()
    trainer = built.program("one").launch()
    first, second = built.schedulers()
    for metrics in trainer.train([built.batch], 1, scheduler=second, checkpoint=tmp_path / "run", progress=False):
        assert metrics.learning_rates == (1e-2,)
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(built.model.parameters(), lr=1.0), 1)
    again = Built()
    for given, trained, why in (
        ([first, first], trainer, "given twice"),
        ([first, foreign], trainer, "not that of the program"),
        (again.schedulers(), again.program("one").launch(), "holds 1 schedulers"),
    ):
        with pytest.raises(ShardcError, match=f"SC553(.|\n)*{why}"):
            next(iter(trained.train([built.batch] * 2, 2, scheduler=given, checkpoint=tmp_path / "run")))


def test_a_step_with_an_overflow_moves_nothing() -> None:
    built = Built()
    trainer = built.program("zero1", nonfinite="skip").launch()
    trainer.step(built.batch)
    before = trainer.state_dict(roles=("param", "state"))
    huge = {name: value * 1e300 for name, value in built.batch.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not trainer.step(huge).finite
    for name, value in trainer.state_dict(roles=("param", "state")).items():
        assert torch.equal(value, before[name]), name


def test_hyperparameters_of_any_are_fixed() -> None:
    built = Built()
    trainer = built.program("one").launch()
    built.sgd.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ShardcError, match=r"SC107(.|\n)*hyperparameters changed"):
        trainer.step(built.batch)
