"""Each hostile module trains on a short batch between two whole ones as eager PyTorch does, or is refused."""

from __future__ import annotations

from dataclasses import fields
from zlib import crc32

import pytest
from torch import Tensor

from shardc.ir.diagnostic import ShardcError
from tests.hostile import test_hostile  # noqa: F401  (which enters the cases)
from tests.hostile.harness import CASES, OPTIMIZERS, Case, outcome

LAYOUTS = ("dp2", "tp2", "dp2 tp2", "dp3", "zero1", "zero2", "zero3", "recompute", "fuse")  # one microbatch
SHAPES = {"SC104", "SC125", "SC547"}  # what only a shape may be refused for: forward raises, or state lies otherwise


class Short(Case):
    """The same case with rows missing from the second batch."""

    def batches(self) -> list[Tensor]:
        first, second, third = super().batches()
        return [first, second[: max(1, len(second) - 1)].clone(), third]


def raises(case: Case) -> bool:
    """Eager PyTorch does, of the short batch."""
    try:
        case.loss_of(case.model(), case.batches()[1])
    except Exception:
        return True
    return False


@pytest.mark.sampled(240)
@pytest.mark.parametrize("name", CASES)
def test_a_short_batch_trains_as_eager(name: str) -> None:
    case = CASES[name]
    short = Short(**{field.name: getattr(case, field.name) for field in fields(case)})
    layout = LAYOUTS[crc32(name.encode()) % len(LAYOUTS)]
    optimizer = sorted(OPTIMIZERS)[crc32(name[::-1].encode()) % len(OPTIMIZERS)]
    if optimizer == "none" and layout == "zero1":
        layout = "dp2"
    try:
        came = outcome(short, layout, optimizer)
    except ShardcError as refusal:  # of eager's side
        came = refusal.code
    if case.code(layout) is None and case.warned is None and came in SHAPES:
        assert came == "SC547" or raises(short), came
    else:
        assert came == (case.code(layout) or case.warned or "right")
