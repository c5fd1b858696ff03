"""Evaluation between steps of real processes over gloo: the eager model's values; training goes on as without it."""

from functools import cache
from pathlib import Path

import pytest
import torch

from examples.gpt2 import gpt2
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "evaluation_worker.py"
RANKS = {"dp2tp2": 4, "zero3": 2, "pp2tp2": 4, "interleaved": 2}
SAMPLE = ("pp2tp2",)  # of `make test`; the others are long


@cache
def eager(layers: int) -> list[float]:
    """The losses of plain torch, which evaluates nothing in between."""
    model, batch = gpt2(layers=layers, batch=8, vocab=64, seq=8, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.long  # `test_data.py` evaluates in ranks, in parts; `runtime/test_evaluate.py` has the values
@pytest.mark.parametrize(
    "case", [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.long) for case in RANKS]
)
def test_ranks_evaluate_what_the_eager_model_does(case: str, tmp_path: Path) -> None:
    results = [result for result in start(case, RANKS[case], tmp_path, worker=WORKER) if result is not None]
    assert len(results) == RANKS[case]
    for result in results:
        assert result["losses"] == pytest.approx(eager(4 if case == "interleaved" else 2), rel=1e-5)
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)
        assert result["accuracy"][0] == pytest.approx(result["accuracy"][1], abs=1e-6)
        assert result["logits"] < 1e-5
        assert result["shape"] == [8, 8, 64]
    assert len({(r["loss"][0], r["accuracy"][0], r["again"]) for r in results}) == 1  # the same on every rank
    held = {"dp2tp2": 4 * [8 * 8 * 64 // 4], "zero3": 2 * [8 * 8 * 64 // 2], "interleaved": [0, 8 * 8 * 64]}
    assert [r["held"] for r in results] == held.get(case, [0, 0, 8 * 8 * 64 // 2, 8 * 8 * 64 // 2])


def test_ranks_that_evaluate_different_batches_are_named(tmp_path: Path) -> None:
    first, second = start("differs", 2, tmp_path, worker=WORKER)
    assert first == second
    assert first is not None
    assert [first["values"][0], first["shape"][0]] == ["SC542", "SC542"]
    assert "in an evaluation after step 0" in first["values"][1]
    assert "rank 1 was given a batch of another form" in first["shape"][1]
