"""A small Mixtral on a text, in four processes over gloo: experts over ep, tokens over dp or over both, the losses of
one device."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.experts_worker import CASES, STEPS, batches, compiled, layers_of, mixtral, optimizer_of, train
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "experts_worker.py"
ELEMENTS = 4 * 32 * 48  # of the experts' down projections, of a layer
SENT = ("all-to-all zero3", "all-to-all ep4", "all-to-all, turned", "all-to-all pipeline")
DROPS = ("capacity", "capacity pipeline", "capacity zero3")
OVERFLOWS = ("overflow", "overflow dp2ep2", "overflow pipeline")
LONG = ("dp2ep2", "zero3", *SENT, "capacity of all", *DROPS[1:], *OVERFLOWS[1:])
PARTS: dict[str, int] = dict.fromkeys(("zero3", *SENT), 4)  # of which a rank has one


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in names]


@cache
def eager(layers: int) -> list[float]:
    model = mixtral(layers)
    optimizer, losses = optimizer_of(model), list[float]()
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", cases(name for name in CASES if name not in (*DROPS, *OVERFLOWS)))
def test_ranks_train_as_one_device(case: str, tmp_path: Path) -> None:
    if case != "dp2ep2" and case != "zero3":
        pytest.importorskip("transformers", minversion="5.24")  # before, experts are traced as they are written
    results = [result for result in start(case, 4, tmp_path, 240.0, WORKER) if result is not None]
    assert len(results) == 4
    layers = layers_of(case)
    losses = eager(layers)
    assert losses[-1] < 0.8 * losses[0]
    for result in results:
        assert len(result["losses"]) == STEPS
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert {result["held"] for result in results} == {layers * ELEMENTS // PARTS.get(case, 2)}
    if case != "all-to-all pipeline":
        reads = STEPS * layers if case.startswith("all-to-all") else 0
        assert {result["reads"] for result in results} == {reads}  # of the host: once a layer and step, forward's alone


@pytest.mark.parametrize("case", cases(DROPS))
def test_ranks_that_drop_train_as_they_are_simulated(case: str, tmp_path: Path) -> None:
    """The same losses, and the same rows dropped in every step; the host reads nothing."""
    pytest.importorskip("transformers", minversion="5.24")
    results = [result for result in start(case, 4, tmp_path, 240.0, WORKER) if result is not None]
    simulated = train(compiled(case).launch())
    assert len(results) == 4
    assert any(line[-1] for load in simulated["loads"] for line in load)
    for result in results:
        assert result["losses"] == pytest.approx(simulated["losses"], rel=1e-5)
        assert result["loads"][0] == simulated["loads"][0]  # of later ones rounding decides
        assert all(sum(line[:-1]) == 2 * 8 * 32 for load in result["loads"] for line in load)
        assert result["reads"] == 0


@pytest.mark.parametrize("case", cases(OVERFLOWS))
def test_all_ranks_fail_a_step_that_overflows(case: str, tmp_path: Path) -> None:
    """Each with the same code, none waits for another, and nothing is changed."""
    pytest.importorskip("transformers", minversion="5.24")
    ranks = 2 if case == "overflow" else 4
    results = [result for result in start(case, ranks, tmp_path, 240.0, WORKER) if result is not None]
    assert [(result["losses"], result["changed"]) for result in results] == [(["SC513"] * STEPS, 0)] * ranks
