"""Convolutions over rows that processes share: the losses and parameters of plain PyTorch, step by step."""

from pathlib import Path

import pytest
import torch

from tests.distributed import halo_worker
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "halo_worker.py"


def test_training_equals_eager(tmp_path: Path) -> None:
    model, x = halo_worker.model(), halo_worker.batch()["x"]
    optimizer = torch.optim.SGD(model.parameters(), halo_worker.RATE)
    losses: list[float] = []
    for _ in range(halo_worker.STEPS):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    norms = {name: float(parameter.detach().norm()) for name, parameter in model.named_parameters()}
    for found in start("train", 4, tmp_path, worker=WORKER):
        assert found is not None
        assert found.keys() == halo_worker.PLANS.keys()
        for case in found.values():
            assert case["losses"] == pytest.approx(losses, rel=1e-12, abs=1e-14)
            assert case["norms"] == pytest.approx(norms, rel=1e-12)
