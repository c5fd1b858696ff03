"""Cross-entropy on CPUs: labels' columns are picked, with the same numbers bit by bit as the graph's masks give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.picked_columns import picked, subtracted

aten = torch.ops.aten
LABELS = [3, -100, 0, 6, 6, -100, 1, 2]


class Model(nn.Module):
    """Logits that also others read, where `watched`."""

    def __init__(self, watched: str = "", **options: Any) -> None:
        super().__init__()
        self.linear, self.watched, self.options = nn.Linear(5, 7), watched, options

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.linear(x)
        loss = F.cross_entropy(logits, labels, **self.options)
        match self.watched:
            case "log probabilities":
                return loss, logits.log_softmax(-1)
            case "logits":
                return loss, logits
            case "shared":
                shifted = logits - logits.amax(-1, keepdim=True)
                return F.nll_loss(shifted - shifted.exp().sum(-1, keepdim=True).log(), labels) + shifted.sin().mean()
            case "more loss":
                return loss + logits.exp().mean() + logits.softmax(-1).square().sum()
            case _:
                return loss


def compiled(model: Model, dtype: torch.dtype, **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    labels = [label if label >= 0 else model.options.get("ignore_index", label) for label in LABELS]
    batch = {"x": torch.randn(8, 5, dtype=dtype) * 3, "labels": torch.tensor(labels)}
    loss = (lambda out, _: out[0]) if model.watched in ("log probabilities", "logits") else None
    optimizer = torch.optim.SGD(model.to(dtype).parameters(), lr=0.1)
    return shardc.compile(model, batch, mesh="dp=1", plan=plan, optimizer=optimizer, loss=loss)


CASES: list[tuple[Model, dict[str, Any]]] = [
    (Model(), {}),
    (Model(), {"accumulate": 2}),
    (Model(reduction="sum"), {}),
    (Model(ignore_index=6), {}),
    (Model(label_smoothing=0.1), {}),
    (Model(weight=torch.arange(7) + 1.0), {}),
    (Model("log probabilities"), {}),
    (Model("logits"), {}),
    (Model("more loss"), {}),
    (Model("shared"), {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("model", "plan"), CASES, ids=lambda x: str(x) if isinstance(x, dict) else f"{x.watched}{x.options}"
)
def test_the_numbers_are_those_of_the_graph(model: Model, plan: dict[str, Any], dtype: torch.dtype) -> None:
    if "weight" in model.options:
        model.options["weight"] = model.options["weight"].to(dtype)
    program = compiled(model, dtype, **plan)
    trainer = program.launch()
    code = BodyCode(program.body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    for _ in range(2):
        fed = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
        rates = trainer.rates()
        result = trainer.step(program.sample)
        found = code.run(held | rates, fed)
        assert torch.equal(next(v for p, v in found.items() if p.role == "loss"), result.loss)
        for port, value in found.items():
            if port.role == "param":
                held[port.name] = value
                assert torch.equal(value, trainer.state[port.name]), port.name


def called(model: Model) -> Iterator[Any]:
    program = compiled(model, torch.float32)
    code = BodyCode(program.body, rank_context(program.mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    lines = code._first_microbatch  # pyright: ignore[reportPrivateUsage]
    for _, call, arguments, _, _ in lines:
        if call in (torch.exp, torch.mul) and "out" in arguments.kwargs:
            yield "over"
        yield call


def test_no_mask_of_columns_is_left() -> None:
    calls = list(called(Model()))
    assert calls.count(picked) == calls.count(subtracted) == 1
    assert calls.count("over") == 2, "the exponential and the product need no memory of their own"


def test_what_others_read_is_not_overwritten() -> None:
    assert list(called(Model("shared"))).count("over") < 2


def test_rows_without_a_column() -> None:
    values, columns = torch.arange(12.0).view(3, 4), torch.tensor([[3], [-100], [0]])
    assert picked(values, columns).tolist() == [[3.0], [0.0], [8.0]]
    assert picked(values, columns, torch.ones(3, 1)).tolist() == [[2.0], [0.0], [7.0]]
    less = subtracted(values.clone(), columns, torch.full((3, 1), 0.5))
    assert (values - less).tolist() == [[0, 0, 0, 0.5], [0, 0, 0, 0], [0.5, 0, 0, 0]]
