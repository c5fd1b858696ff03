"""An evaluation sees what the trainer holds now: buffers that no file holds, parameters of any name, and its own
constants; a batch without labels; results without a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import type_of
from shardc.ir.types import TensorType


def trained(model: nn.Module, batch: object, steps: int = 3, **plan: object) -> shardc.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, optimizer=optimizer).launch()
    for _ in range(steps):
        trainer.step(batch)
    return trainer


def eager(model: nn.Module, batch: Tensor, steps: int = 3) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    with torch.no_grad():
        return float(model.eval()(batch))


class Averages(nn.Module):
    """Keeps an average of its input that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("ema", torch.zeros(4, dtype=torch.float64), persistent=False)
        self.ema: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.5 * self.ema + 0.5 * x.detach().mean(0)
        return (self.fc(x) - self.ema).square().mean()


class OneLetter(nn.Module):
    """A parameter whose name is part of the prefix of a program's own tensors. Only training reads what places it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.t = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.constant = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.t
        return (y @ self.constant if self.training else y).square().mean()


class OtherConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.kept = [torch.ones(8, 1, 4, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return ((y[:, None] * self.kept[0]) if self.training else y * self.kept[1]).square().mean()


X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_buffer_that_no_file_holds_is_the_trainers() -> None:
    evaluated = trained(Averages(), X, inputs={"x": "dp"}).evaluate([X])
    assert evaluated.loss is not None
    assert abs(evaluated.loss - eager(Averages(), X)) < 1e-12


def test_a_parameter_lies_as_in_training_whatever_its_name() -> None:
    program = shardc.compile(
        OneLetter(), X, mesh="dp=2, tp=2", plan={"inputs": {"x": "dp, -"}, "params": {"constant": "tp, -"}}
    )
    evaluation = program.evaluation(X, "scalars")
    assert lies(program)["t"].is_sharded, "training places it by what it is multiplied with"
    assert lies(evaluation)["t"] == lies(program)["t"]
    evaluated = trained(OneLetter(), X, inputs={"x": "dp, -"}, params={"constant": "tp, -"}).evaluate([X])
    assert evaluated.loss is not None
    assert abs(evaluated.loss - eager(OneLetter(), X)) < 1e-12


def lies(program: shardc.Program) -> dict[str, TensorType]:
    """The type of each parameter as a rank stores it."""
    body = program.body
    pairs = zip(body.inputs, body.placeholders, strict=True)
    return {port.name: type_of(node) for port, node in pairs if port.role == "param"}


def test_a_program_for_evaluation_has_constants_of_its_own() -> None:
    evaluated = trained(OtherConstants(), X, inputs={"x": "dp"}).evaluate([X])
    assert abs(evaluated.loss - eager(OtherConstants(), X)) < 1e-12  # type: ignore[operator]


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.fc(x)
        twice = torch.cat([logits, logits + 100])
        found = {"logits": logits, "twice": twice}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


def test_a_prediction_needs_no_labels_and_has_no_loss() -> None:
    batch = {"x": X, "labels": torch.zeros(8, dtype=torch.int64)}
    trainer = trained(Labelled(), batch, inputs={"x": "dp", "labels": "dp"}, accumulate=2)
    predicted = trainer.predict({"x": X})
    assert "loss" not in repr(predicted)
    whole = Labelled()
    whole.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        expected = whole(X)
    torch.testing.assert_close(predicted.outputs["logits"].full(), expected["logits"], rtol=0, atol=1e-12)
    # Twice the rows of a microbatch are in no order of the batch: an entry a microbatch.
    twice = predicted.outputs["twice"].full()
    assert twice.shape == (2, 8, 3)
    for part, rows in zip(twice, (X[:4], X[4:]), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(part, whole(rows)["twice"], rtol=0, atol=1e-12)
