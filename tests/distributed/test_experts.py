"""A small Mixtral on a text, in four processes over gloo: experts over ep, tokens over dp or over both, the losses of
one device."""

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.experts_worker import CASES, STEPS, batches, mixtral, optimizer_of
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "experts_worker.py"
LAYERS, ELEMENTS = 2, 4 * 32 * 48  # of the experts' down projections, of a layer
LONG = ("zero3", "all-to-all zero3", "all-to-all ep4", "all-to-all, turned", "all-to-all pipeline")
PARTS: dict[str, int] = dict.fromkeys(LONG, 4)  # of which a rank has one


@cache
def eager() -> list[float]:
    model = mixtral()
    optimizer, losses = optimizer_of(model), list[float]()
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.long] if c in LONG else []) for c in CASES])
def test_ranks_train_as_one_device(case: str, tmp_path: Path) -> None:
    if case.startswith("all-to-all"):
        pytest.importorskip("transformers", minversion="5.24")  # before, experts are traced as they are written
    results = [result for result in start(case, 4, tmp_path, 240.0, WORKER) if result is not None]
    assert len(results) == 4
    losses = eager()
    assert losses[-1] < 0.8 * losses[0]
    for result in results:
        assert len(result["losses"]) == STEPS
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert {result["held"] for result in results} == {LAYERS * ELEMENTS // PARTS.get(case, 2)}
    if case != "all-to-all pipeline":
        reads = STEPS * LAYERS if case.startswith("all-to-all") else 0
        assert {result["reads"] for result in results} == {reads}  # of the host: once a layer and step, forward's alone
