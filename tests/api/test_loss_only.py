"""A batch that holds more than forward takes: labels and weights that the loss function alone reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.diagnostic import ShardcError


class Words(nn.Module):
    """Returns logits; `mask` is an argument with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.relu(self.up(self.words(tokens)))
        return self.head(x if mask is None else x * mask.unsqueeze(-1))


class Logits(Words):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


def by_name(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (each * batch["weight"].flatten()).mean()


def by_place(logits: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def named() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(16, (8, 6))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "weight": torch.rand(8, 6)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": "dp=2, tp=2", "params": {"up.weight": "tp, -", "head.weight": "tp, -"}},
        {"mesh": "dp=2", "accumulate": 2, "storage": {"zero": 3, "axes": ["dp"]}, "precision": "bf16"},
        {"mesh": "pp=2, dp=2", "pipeline": {"microbatches": 2}},
    ],
    ids=["tensor", "zero", "pipeline"],
)
def test_named_tensors_reach_the_loss_alone(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = Logits(), named()
    inputs = {"tokens": "dp", "labels": "dp", "weight": "dp"}
    program = shardc.compile(model, batch, plan={**plan, "inputs": inputs}, loss=by_name)
    report = program.verify()
    assert report.ok
    assert report.eager_error is not None
    if "precision" not in plan:
        expected = by_name(model(batch["tokens"]), batch)
        torch.testing.assert_close(program.launch().step(batch).loss, expected.detach())


def test_a_tuple_goes_on_behind_forwards_arguments() -> None:
    torch.manual_seed(0)
    model = Logits()
    tokens = torch.randint(16, (8, 6))
    batch = (tokens, tokens.roll(-1, 1))
    plan = {"inputs": {"tokens": "dp", "batch.1": "dp"}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    program = shardc.compile(model, batch, mesh="dp=2", plan=plan, loss=by_place, optimizer=optimizer)
    assert program.verify().ok
    trainer = program.launch()
    expected = by_place(model(tokens), batch).detach()
    torch.testing.assert_close(trainer.step(batch).loss, expected)
    trained = trainer.evaluate([batch]).loss
    assert trained is not None
    assert trained < float(expected)


def test_evaluation_alone_has_the_loss() -> None:
    model, batch = Logits(), named()
    inputs = {"tokens": "dp", "labels": "dp", "weight": "dp"}
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": inputs}, loss=by_name, mode="eval")
    assert program.verify().ok


def test_forwards_own_default_is_kept() -> None:
    """A tensor of the batch is an argument of forward where forward takes it, whatever the loss reads."""
    model, batch = Words(), named()
    batch["mask"] = (torch.rand(8, 6) > 0.5).float()
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": {"tokens": "dp"}}, loss=by_name)
    expected = by_name(model(batch["tokens"], batch["mask"]), batch)
    torch.testing.assert_close(program.launch().step(batch).loss, expected.detach())


def test_a_name_that_nobody_reads_is_refused() -> None:
    """`masks` would leave forward's `mask` at its default, in silence."""
    batch = {**named(), "masks": torch.ones(8, 6)}
    with pytest.raises(ShardcError, match=r"SC103(.|\n)*neither forward nor the loss reads 'masks'(.|\n)*'mask'"):
        shardc.compile(Words(), batch, mesh="dp=2", loss=by_name)
    tokens = batch["tokens"]
    with pytest.raises(ShardcError, match=r"SC103(.|\n)*'batch.2'"):
        shardc.compile(Logits(), (tokens, tokens, tokens), mesh="dp=2", loss=by_place)


def test_counted_labels_are_read_by_the_plan() -> None:
    batch = {**named(), "counted": torch.ones(8, 6, dtype=torch.int64)}
    plan = {"inputs": {"tokens": "dp"}, "accumulate": 2, "loss": {"tokens": "counted"}}
    assert shardc.compile(Logits(), batch, mesh="dp=2", plan=plan, loss=by_name).verify().ok


def test_a_value_that_forward_does_not_take_is_refused() -> None:
    with pytest.raises(ShardcError, match=r"SC103(.|\n)*'use_mask' of the batch is no tensor"):
        shardc.compile(Words(), {**named(), "use_mask": True}, mesh="dp=2", loss=by_name)


@pytest.mark.parametrize("plan", [{"mesh": "dp=2"}, {"mesh": "dp=2", "accumulate": 2}], ids=["plain", "accumulate"])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_prediction_takes_what_a_step_takes(kind: str, plan: dict[str, Any]) -> None:
    """And what forward takes of it: the loss of a function is not computed."""
    torch.manual_seed(0)
    model, whole = Logits(), named()
    batch: Any = whole if kind == "dict" else (whole["tokens"], whole["labels"])
    loss: Any = by_name if kind == "dict" else by_place
    trainer = shardc.compile(model, batch, loss=loss, plan={**plan, "inputs": {"tokens": "dp"}}).launch()
    exact = model(whole["tokens"]).detach()
    for given in (batch, {"tokens": whole["tokens"]} if kind == "dict" else whole["tokens"]):
        (output,) = trainer.predict(given).outputs.values()
        torch.testing.assert_close(output.full(), exact, rtol=1e-5, atol=1e-6)


def test_a_batch_without_rows_is_refused() -> None:
    model, batch = Logits(), named()
    trainer = shardc.compile(model, batch, loss=by_name, mesh="dp=2").launch()
    empty = {name: value[:0] for name, value in batch.items()}
    for act in (trainer.step, trainer.predict, lambda given: trainer.evaluate([given])):
        with pytest.raises(ShardcError, match=r"SC501.*has no rows: 'tokens' has shape \[0, 6\]"):
            act(empty)
