"""A Llama whose sequence lies over processes reads real text: the losses of plain PyTorch, step by step."""

from pathlib import Path

import pytest
import torch

from tests.distributed import context_worker
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "context_worker.py"


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", context_worker.PLANS)
def test_training_equals_eager(case: str, tmp_path: Path) -> None:
    model = context_worker.model()
    optimizer = torch.optim.AdamW(model.parameters(), context_worker.RATE)
    losses: list[float] = []
    for batch in context_worker.batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for reached in start(case, 4, tmp_path, worker=WORKER):
        assert reached == pytest.approx(losses, rel=1e-5)
