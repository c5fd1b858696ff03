"""Each data coordinate of real processes brings its own part of a batch: one device's losses, or an error."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "data_worker.py"
STEPS_OF_EPOCH = 3


@cache
def worker() -> ModuleType:
    """The worker's model and rows, in this process."""
    import importlib

    before, os.environ["RANK"], argv = os.environ.get("RANK"), "0", sys.argv
    sys.argv = ["data_worker.py", "", "."]
    try:
        return importlib.import_module("tests.distributed.data_worker")
    finally:
        sys.argv = argv
        del os.environ["RANK"]
        if before is not None:
            os.environ["RANK"] = before


@cache
def eager() -> list[float]:
    """One device that sees the same rows: those of both samplers, at each step, as one batch."""
    w = worker()
    texts, model = w.Texts(), w.Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses: list[float] = []
    for epoch in range(w.EPOCHS):
        order = torch.randperm(w.ROWS, generator=torch.Generator().manual_seed(7 + epoch))  # of DistributedSampler
        for step in range(STEPS_OF_EPOCH):
            rows = order[step * w.BATCH : (step + 1) * w.BATCH]
            optimizer.zero_grad()
            loss = model(texts.ids[rows], texts.labels[rows])["loss"]
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def run(case: str, folder: Path, ranks: int = 4) -> list[dict[str, Any]]:
    results = [r for r in start(case, ranks, folder, limit=240.0, worker=WORKER) if r is not None]
    assert len(results) == ranks
    return results


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("dp2 tp2, sampler", marks=pytest.mark.long),
        "dp2 tp2, stateful",
        pytest.param("pp2 dp2, sampler", marks=pytest.mark.long),
    ],
)
def test_three_epochs_of_parts_are_one_device_s_and_go_on_within_an_epoch(case: str, tmp_path: Path) -> None:
    if "stateful" in case:
        pytest.importorskip("torchdata")
    results = run(case, tmp_path)
    assert len(eager()) == 9
    for result in results:
        assert result["whole"] == pytest.approx(eager(), rel=1e-12)
        assert len(result["first"]) == 4
        assert result["first"] + result["rest"] == result["whole"]  # to the bit
    assert all(result == results[0] for result in results)


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_data_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    for result in run("other mesh", tmp_path):
        assert result["first"] + result["rest"] == pytest.approx(eager(), rel=1e-12)
        assert "SC557" in result["said"]
        assert "the checkpoint's loaders brought 2 parts of a batch, these bring 4" in result["said"]


@pytest.fixture(scope="module", params=[pytest.param("dp2 tp2", marks=pytest.mark.long), "pp2 dp2"])
def faults(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    return request.param, run(f"{request.param}, faults", tmp_path_factory.mktemp("faults"))


def test_ranks_given_different_data_are_named_in_the_first_step(faults: tuple[str, list[dict[str, Any]]]) -> None:
    _, results = faults
    # Rank 3 shares its coordinate with rank 2 or, in a pipeline, with rank 1. It was given coordinate 0's rows.
    odd = "rank 3 was given other rows than the ranks of the same data coordinate"
    for result in results:
        for name, when in (
            ("other_rows", "before step 0"),
            ("other_rows_by_step", "before step 0"),
            ("evaluated_other_rows", "in an evaluation after step 0"),
        ):
            assert f"SC542 replicas-differ]: {when}: {odd}" in result[name]["error"], name
            assert "input ids" in result[name]["error"]
        for name in ("other_shape", "other_shape_by_step", "evaluated_other_shape"):
            assert "SC542" in result[name]["error"], name
            assert "rank 2 was given other leaves, shapes or dtypes than the other ranks" in result[name]["error"]
        assert {k: v.get("error") for k, v in result.items()} == {k: v.get("error") for k, v in results[0].items()}


def test_ranks_that_bring_the_same_part_twice_are_warned_of(faults: tuple[str, list[dict[str, Any]]]) -> None:
    layout, results = faults
    pair = "ranks 0, 2" if layout == "dp2 tp2" else "ranks 0, 1"
    for result in results:
        (said,) = result["same_rows"]["warnings"]
        assert f"{pair} were given the same rows, though each has a part of its own" in said
        assert result["in_parts"]["warnings"] == []
        assert result["in_parts"]["result"] == pytest.approx(eager()[:3], rel=1e-12)


def test_data_that_ends_on_some_ranks_ends_for_all(faults: tuple[str, list[dict[str, Any]]]) -> None:
    for result in faults[1]:
        assert result["ends_early"]["result"] == [1, 2, 3, 4]
        (said,) = result["ends_early"]["warnings"]  # once
        assert said.startswith("warning[SC556 part-ended]: ranks 2, 3 have no batch left, and the other ranks have")
        assert "error[SC556 part-ended]: ranks 2, 3 have no batch left" in result["evaluated_early"]["error"]


def test_an_evaluation_in_parts_is_the_mean_over_all(faults: tuple[str, list[dict[str, Any]]]) -> None:
    w = worker()
    texts, model = w.Texts(), w.Model()
    order = torch.randperm(w.ROWS, generator=torch.Generator().manual_seed(7))[: 3 * w.BATCH].view(3, w.BATCH)
    expected: list[list[float]] = []
    for rows in (order, order[:, 4:]):  # of each part of 4 rows, dealt in turn, those from the third on
        total, right, count = 0.0, 0.0, 0
        for step in rows:
            output, tokens = model(texts.ids[step], texts.labels[step]), int((texts.labels[step] != -100).sum())
            total, right, count = total + output["loss"].item() * tokens, right + output["right"].item(), count + tokens
        expected.append([total / count, right / 3, rows.numel() * 6])
    for result in faults[1]:
        for mine, theirs in zip(result["mean"]["result"], expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)


def test_a_bad_token_in_one_part_ends_all_ranks(tmp_path: Path) -> None:
    results = run("bad token", tmp_path)
    assert [result["code"] for result in results[2:]] == ["SC507", "SC507"]
    assert "'ids' holds 16 at [1, 3]" in results[2]["error"]  # of this rank's rows
    for result in results[:2]:
        assert result["code"] == "SC502"
