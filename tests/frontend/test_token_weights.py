"""Losses weighted by tokens: a step of uneven microbatches is the step of the same batch in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.compiler import driver
from shardc.ir.graph import Port
from shardc.ir.microbatch import SHARE
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.partition.cut import cut
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.passes.accumulate import Accumulate
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.oracle.simulate import run_reference, simulate
from shardc.runtime.oracle.simulate_stages import simulate_stages
from tests.models.zoo import make

TOKENS = {"tokens": "labels", "shift": 1}
Found = dict[Port, Tensor]


def uneven(batch: int = 12) -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2, whose last samples have few labels that count; position 0, which it never predicts, says nothing."""
    torch.manual_seed(0)
    model, made, _ = make("gpt2", batch=batch, seq=6, layers=2, vocab=32, width=16)
    labels = made["input_ids"].clone()
    for row in range(batch):
        labels[row, 1 + row % 6 :] = -100
    labels[batch // 2 :, 2:] = -100
    return model, {**made, "labels": labels}


def program(batch: Any, microbatches: int, mesh: str = "", model: nn.Module | None = None, **plan: Any) -> Any:
    model = model or uneven()[0]
    if "dp" in mesh:
        plan["inputs"] = {"input_ids": "dp, -", "labels": "dp, -"}
    with pytest.MonkeyPatch.context() as patch:  # sums are explicit, also of one microbatch, for a cut into stages
        patch.setattr(driver, "Accumulate", lambda count, **_: Accumulate(count, always=True))
        plan = {"bucket": False, "accumulate": microbatches, **plan}
        return shardc.compile(model, batch, mesh=mesh or shardc.Mesh(), plan=plan)


def agree(found: Found, wanted: Found) -> None:
    assert found.keys() == wanted.keys()
    for port, value in wanted.items():
        torch.testing.assert_close(found[port].double(), value.double(), rtol=1e-12, atol=1e-12, msg=str(port))


def whole(batch: Any, model: nn.Module) -> Found:
    """The batch in one piece, without weights."""
    one = program(batch, 1, model=model)
    return run_reference(one.reference, one.inputs(batch), dtype=torch.float64)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 12])
@pytest.mark.parametrize("mesh", ["", "dp=2"])
@pytest.mark.sampled(8)
def test_a_step_in_pieces_is_the_step_in_one(microbatches: int, mesh: str) -> None:
    """Also of microbatches that do not divide among the ranks, and of samples without a label."""
    model, batch = uneven()
    counts = [(part[:, 1:] != -100).sum() for part in batch["labels"].chunk(microbatches)]
    assert microbatches == 1 or len({int(n) for n in counts}) > 1
    compiled = program(batch, microbatches, mesh, model, loss=TOKENS)
    inputs = compiled.inputs()
    wanted = whole(batch, model)
    agree(simulate(compiled.body, inputs, dtype=torch.float64), wanted)
    if microbatches > 1:
        plain = program(batch, microbatches, mesh, model)
        mean = simulate(plain.body, inputs, dtype=torch.float64)
        assert any((mean[port] - value).abs().max() > 1e-4 for port, value in wanted.items() if port in mean)


@pytest.mark.long  # a plan with a pipeline is ordinary
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("stages", "schedule", "virtual", "mesh"),
    [(2, "1f1b", 1, "dp=2"), (4, "zb-v", 2, ""), (3, "zb-h1", 1, "dp=2"), (2, "gpipe", 1, "")],
)
def test_pipelined(stages: int, schedule: str, virtual: int, mesh: str) -> None:
    model, batch = uneven()
    compiled = program(batch, 3, mesh, model, loss=TOKENS)
    cutup = scheduled(cut(compiled.body, stages), schedule, virtual)
    agree(simulate_stages(cutup, compiled.inputs(), dtype=torch.float64), whole(batch, model))
    read = StagedProgram.from_plain(cutup.to_plain())
    agree(simulate_stages(read, compiled.inputs(), dtype=torch.float64), whole(batch, model))


def test_a_plan_with_a_pipeline() -> None:
    """Verified against the single device and eager PyTorch; one step of the trainer has the whole batch's loss."""
    model, batch = uneven(8)
    plan = {"pipeline": {"schedule": "1f1b", "microbatches": 4}, "loss": TOKENS}
    plan |= {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}}
    compiled = shardc.compile(model, batch, mesh="pp=2,dp=2", plan=plan)
    report = compiled.verify()
    assert report, str(report)
    assert report.eager_error is not None
    with torch.no_grad():
        wanted = float(model(**batch).loss)
    with compiled.launch() as trainer:
        assert float(trainer.step(batch).loss) == pytest.approx(wanted, rel=1e-5)


# ---------------------------------------------------------------------- nothing to count
def rows(counts: list[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A batch of a sample a count, that many of its labels counted."""
    model, batch = uneven(len(counts))
    labels = batch["input_ids"].clone()
    for row, count in enumerate(counts):
        labels[row, 1 + count :] = -100
    return model, {**batch, "labels": labels}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_a_microbatch_without_tokens_counts_nothing(mesh: str) -> None:
    """Its loss alone is 0 / 0, which is what PyTorch has of it."""
    model, batch = rows([3, 1, 0, 0, 5, 2])
    assert model(**{name: x[2:4] for name, x in batch.items()}).loss.isnan()
    compiled = program(batch, 3, mesh, model, loss=TOKENS)
    agree(simulate(compiled.body, compiled.inputs(), dtype=torch.float64), whole(batch, model))
    report = compiled.verify()
    assert report, str(report)
    assert report.eager_error is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_without_tokens_is_zero(microbatches: int) -> None:
    model, batch = rows([0, 0, 0, 0])
    compiled = program(batch, microbatches, "dp=2", model, loss=TOKENS)
    result = compiled.launch().step(batch)
    assert result.loss == 0
    assert all((grad == 0).all() for grad in result.grads.values())
    assert compiled.verify()


def test_what_is_fed() -> None:
    """Tokens counted by a mask of ones: where there is none, one; nothing else is touched."""
    model, batch = uneven(6)
    mask = torch.ones(6, 6, dtype=torch.int64)
    mask[0, 2:] = mask[2:4] = 0
    compiled = program({**batch, "attention_mask": mask}, 3, "", model, loss={"tokens": "attention_mask", "ignore": 0})
    fed = feeds(compiled.body, compiled.inputs())
    assert [float(feed[SHARE]) for feed in fed] == [8 / 20, 0, 12 / 20]
    assert [int(feed["attention_mask"].sum()) for feed in fed] == [8, 1, 12]
    assert torch.equal(torch.cat([feed["labels"] for feed in fed]), batch["labels"])


# ---------------------------------------------------------------------- every way in
class Classifier(nn.Module):
    """A model that leaves the loss to a function, and labels of [samples]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.fc(x)


def cross_entropy(y: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(y, batch[1], ignore_index=-1000)


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.sampled(6)
def test_loss_functions_tuples_precision_optimizers(microbatches: int, precision: str | None) -> None:
    torch.manual_seed(0)
    model, x, labels = Classifier(), torch.randn(12, 6), torch.randint(5, (12,))
    labels[[0, 1, 2, 4, 7]] = -1000
    plan = {"accumulate": microbatches, "loss": {"tokens": "labels", "ignore": -1000}}
    plan |= {"inputs": {"x": "dp, -", "labels": "dp"}} | ({"precision": precision} if precision else {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compiled = shardc.compile(model, (x, labels), mesh="dp=2", plan=plan, loss=cross_entropy, optimizer=optimizer)
    report = compiled.verify()
    assert report, str(report)
    start = model.fc.weight.detach().clone()
    trainer = compiled.launch()
    (metrics,) = trainer.train([(x, labels)], steps=1, progress=False)
    wanted = cross_entropy(model(x, labels), (x, labels))
    wanted.backward()
    close = 2e-2 if precision else 1e-6
    assert metrics.loss == pytest.approx(wanted.item(), rel=close)
    assert model.fc.weight.grad is not None
    updated = start - 0.5 * model.fc.weight.grad
    torch.testing.assert_close(trainer.state_dict()["fc.weight"], updated, rtol=close, atol=close)


def test_text_and_files_say_what_counts() -> None:
    model, batch = uneven(4)
    compiled = program(batch, 2, "dp=2", model, loss=TOKENS)
    text = print_graph(compiled.body, comments=False)
    assert text.startswith('graph @step mesh(dp=2) microbatches(2) tokens("labels", ignore=-100, shift=1) {')
    assert print_graph(parse(text), comments=False) == text
    read = shardc.Program.from_json(compiled.to_json())
    assert read.body.tokens == compiled.body.tokens
    agree(simulate(read.body, compiled.inputs(), dtype=torch.float64), whole(batch, model))
    assert "share" not in program(batch, 2, "dp=2", model).text()
