"""Experts over two GPUs, by NCCL's uneven all-to-all and without: a small Mixtral trains as one device does."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.distributed.experts_worker import STEPS
from tests.distributed.test_experts import eager
from tests.gpu.experts_worker import CASES
from tests.gpu.launched import run

WORKER = Path(__file__).parent / "experts_worker.py"
LAYERS = 2

pytest.importorskip("transformers", minversion="5.24")  # before, experts are traced as they are written


@cache
def losses_of_one_device() -> list[float]:
    return eager(LAYERS)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_device(case: str, tmp_path: Path) -> None:
    found = run(WORKER, 2, tmp_path, case)
    tolerance = 2e-2 if "bf16" in case else 1e-4  # GPUs' products are rounded otherwise, over 20 steps
    for result in found:
        assert result["device"].startswith("cuda")
        assert result["losses"] == pytest.approx(losses_of_one_device(), rel=tolerance)
        if case in ("together", "all-to-all"):
            assert result["reads"] == (0 if case == "together" else STEPS * LAYERS)


@pytest.mark.gpu(2)
def test_what_a_batch_answers_is_checked_on_the_device(tmp_path: Path) -> None:
    for result in run(WORKER, 2, tmp_path, "answers"):
        first, refused, again = result["found"]
        assert refused == "SC512"
        assert isinstance(first, float)
        assert isinstance(again, float)  # the device has not failed: no assertion of a kernel is left behind
        assert again < first
