"""A model with recurrences and a convolution with a stride, whose sequence lies over two processes: eager's losses."""

from pathlib import Path

import pytest
import torch

from tests.distributed import scans_worker
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "scans_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("case", scans_worker.CASES)
def test_training_equals_eager(case: str, tmp_path: Path) -> None:
    model = scans_worker.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for batch in scans_worker.batches():
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    for reached in start(case, 2, tmp_path, worker=WORKER):
        assert reached == pytest.approx(losses, rel=1e-12)
