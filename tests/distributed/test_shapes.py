"""Steps of real processes over gloo on batches of several shapes; ranks that are given different ones are named."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "shapes_worker.py"


@cache
def eager() -> tuple[list[float], float, dict[str, float]]:
    """Losses, an evaluation and the weights of plain torch."""
    from examples.gpt2 import gpt2

    model, _ = gpt2(layers=2, batch=8, vocab=64, seq=12, width=32)
    generator = torch.Generator().manual_seed(1)
    shapes = [(8, 8), (5, 12), (8, 8), (5, 12)]
    batches = [torch.randint(64, shape, generator=generator) for shape in shapes]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    losses: list[float] = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        evaluated = float(model.eval()(input_ids=batches[1], labels=batches[1]).loss)
    return losses, evaluated, {name: float(value.double().norm()) for name, value in model.state_dict().items()}


@pytest.mark.long  # `test_combined.py` trains ranks on batches of several shapes
@pytest.mark.parametrize("case", ["dp2", "dp2tp2", "pp2tp2"])
def test_ranks_train_on_several_shapes_as_one_device_does(case: str, tmp_path: Path) -> None:
    ranks = 2 if case == "dp2" else 4
    results = [result for result in start(case, ranks, tmp_path, worker=WORKER) if result is not None]
    assert len(results) == ranks
    losses, evaluated, norms = eager()
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["evaluated"] == pytest.approx(evaluated, rel=1e-5)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)


def test_ranks_that_are_given_different_shapes_are_named_before_they_wait(tmp_path: Path) -> None:
    first, second = start("differs", 2, tmp_path, worker=WORKER)
    assert first is not None
    assert second is not None
    for result in (first, second):
        for what in ("first", "known"):
            code, message, cause, seconds = result[what]
            assert (code, message) == ("SC542", f"before step {0 if what == 'first' else 2}: {SAID}")
            assert cause == "rank 0: input_ids [8, 8], labels [8, 8]\nrank 1: input_ids [4, 8], labels [4, 8]"
            assert seconds < 20
    # Rank 0 has such a program, and goes on; rank 1 sees that it does.
    code, message, cause, seconds = second["new"]
    assert (code, message) == ("SC542", "before step 1: rank 1 was given a batch of another form than rank 0")
    assert cause == "rank 1: input_ids [4, 8], labels [4, 8]"
    assert seconds < 20
    code, message, _, seconds = first["new"]
    assert code == "SC502"
    assert "SC542" in message
    assert seconds < 30


SAID = "rank 1 was given a batch of another form than the other ranks"
