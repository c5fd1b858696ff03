"""Features of training, several at a time, as a seed draws them: the steps are those of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile.combined import Combination, compared

ORDINARY, ALL = 5, 300  # a seed compiles some six programs
PLAIN = Combination(
    seed=2, tokens=True, layout="dp2", then="dp2", microbatches=1, optimizer="sgd", clip=False, per_rank=False,
    pad=False, rows=(8, 8, 8), lengths=(5, 5, 5), loader="list", epochs=1, averages=False, scheduler=None,
    evaluate_every=0, stop=0, every=0, event="", at=1, between="", drop=0.0, infinite=-1, shift=0,
)  # fmt: skip
REGRESSION = replace(PLAIN, tokens=False, lengths=(0, 0, 0))
DIRECTED: dict[str, Combination] = {
    "averages, skipped first step, resumed": replace(REGRESSION, averages=True, infinite=0, stop=1),
    "averages of what was frozen before the checkpoint": replace(
        PLAIN, averages=True, event="freeze", at=1, stop=2, then="zero1"
    ),
    "each part is padded by itself": replace(
        PLAIN, per_rank=True, pad=True, microbatches=2, drop=0.3, rows=(8, 6, 2), lengths=(5, 5, 3)
    ),
}
LONG: dict[str, Combination] = {
    "averages, skipped steps, microbatches, statistics": replace(REGRESSION, averages=True, infinite=1, microbatches=2),
    "plateau of evaluations, resumed": replace(
        REGRESSION, scheduler="plateau of evaluations", evaluate_every=1, epochs=2, stop=4, then="zero3",
        optimizer="two",
    ),
    "norm of what no optimizer has": replace(PLAIN, optimizer="partial", clip=True),
    "fewer rows than ranks": replace(REGRESSION, layout="dp3", microbatches=2, rows=(8, 1, 2)),
    "recompiled, padded, averaged": replace(
        PLAIN, pad=True, rows=(8, 3, 5), averages=True, optimizer="two", event="both", microbatches=2
    ),
    "another loader's state after a load": replace(
        PLAIN, loader="stateful", between="reload", epochs=2, stop=4, rows=(8, 8, 3), evaluate_every=1
    ),
    "torch's generator, evaluations, frozen": replace(
        PLAIN, loader="global", epochs=2, stop=4, rows=(8, 8, 3), evaluate_every=1, averages=True, event="freeze", at=2
    ),
    "recompiled stages on another mesh": replace(
        PLAIN, layout="interleaved", then="1f1b zero3", microbatches=4, event="both", at=2, averages=True, stop=4,
        epochs=2, optimizer="adamw",
    ),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [s if s < ORDINARY else pytest.param(s, marks=pytest.mark.long) for s in range(ALL)])
def test_what_is_drawn_trains_as_eager(seed: int, tmp_path: Path) -> None:
    drawn = Combination.drawn(seed)
    if drawn.loader == "stateful":
        pytest.importorskip("torchdata")
    assert compared(drawn, tmp_path) == [], drawn


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*DIRECTED, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_what_went_wrong_once_trains_as_eager(name: str, tmp_path: Path) -> None:
    drawn = {**DIRECTED, **LONG}[name]
    if drawn.loader == "stateful":
        pytest.importorskip("torchdata")
    assert compared(drawn, tmp_path) == []
