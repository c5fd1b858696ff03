"""Muon beside AdamW, unfreezing, a moving average and a checkpoint, in real processes over gloo: as eager PyTorch."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.distributed.optimizer_worker import CASES, built
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "optimizer_worker.py"
RANKS = {"zero3": 2, "pp2": 2, "dp2tp2": 4}


@cache
def eager(clip: float | None, microbatches: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model, optimizers, batches = built()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    losses: list[float] = []
    for step, batch in enumerate(batches):
        if step == 1:
            model.layers[0].requires_grad_(True)
        model.zero_grad()
        parts = [model(part) / microbatches for part in batch.chunk(microbatches)]
        for part in parts:
            part.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        averaged.update_parameters(model)
        losses.append(float(torch.stack(parts).sum().detach()))
    return losses, dict(model.state_dict()), dict(averaged.module.state_dict())


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "zero3" else pytest.mark.long) for c in RANKS])
def test_ranks_train_as_eager(case: str, tmp_path: Path) -> None:
    _, plan = CASES[case]
    losses, weights, averages = eager(plan.get("clip_grad_norm"), plan.get("pipeline", {}).get("microbatches", 1))
    results = [result for result in start(case, RANKS[case], tmp_path, 240.0, WORKER) if result is not None]
    assert len(results) == RANKS[case]
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-4)
        for found, expected in (("weights", weights), ("averages", averages)):
            for name, value in expected.items():
                torch.testing.assert_close(torch.tensor(result[found][name]), value, rtol=1e-3, atol=1e-4, msg=name)
    # Momenta are shards: of four matrices a rank holds its part, or its stage's.
    assert {result["held"] for result in results} == {4 * 64 // RANKS[case]}
