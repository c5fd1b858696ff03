"""Every pointwise op and every reduction that torch has is lowered to kernels, or taken apart before, or in one table
with the reason why not."""

from __future__ import annotations

import pytest
import torch

import shardc.passes.fusion.fuse  # noqa: F401  (fills the lowerings)
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS
from shardc.passes.fusion.lowering.unfused import UNFUSED
from shardc.passes.normalize.decompositions import DECOMPOSITIONS
from tests.aten_ops import TAGS, composite, short, tagged


@pytest.mark.parametrize("tag", TAGS, ids=str)
def test_each_is_lowered_or_taken_apart_or_told(tag: torch.Tag) -> None:
    ops = list(tagged(tag))
    assert len(ops) > 20
    for op in ops:
        name = short(op)
        known = op in LOWERINGS or op in DECOMPOSITIONS or composite(op)
        assert known or name in UNFUSED, f"{op}: no lowering, and no reason why not"
        assert not (op in LOWERINGS and name in UNFUSED), f"{op} is lowered, and said not to be"


def test_each_reason_is_of_an_op() -> None:
    names = {short(op) for tag in TAGS for op in tagged(tag)}
    assert UNFUSED.keys() - names <= {"_conj_physical", "linalg__powsum"}  # that older versions of torch have not
