"""Every pointwise op and every reduction that torch has is lowered to kernels, or taken apart before, or in one table
with the reason why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._ops import OpOverload

import shardc.passes.fuse  # noqa: F401  (fills the lowerings)
from shardc.passes.decompositions import DECOMPOSITIONS
from shardc.passes.fuse.unfused import UNFUSED
from shardc.passes.fuse.units import LOWERINGS

aten = torch.ops.aten
TAGS = [torch.Tag.pointwise, *([torch.Tag.reduction] if hasattr(torch.Tag, "reduction") else [])]


def tagged(tag: torch.Tag) -> Iterator[OpOverload]:
    """Those that a graph may have: functions of tensors, no versions in place or of Python numbers."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list[str])():
            op = getattr(packet, overload)
            if tag in op.tags and not op._schema.is_mutable:
                yield op


def composite(op: OpOverload) -> bool:
    """Does torch itself make a trace of it in other ops?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@pytest.mark.parametrize("tag", TAGS, ids=str)
def test_each_is_lowered_or_taken_apart_or_told(tag: torch.Tag) -> None:
    ops = list(tagged(tag))
    assert len(ops) > 20
    for op in ops:
        name = op._schema.name.removeprefix("aten::")
        known = op in LOWERINGS or op in DECOMPOSITIONS or composite(op)
        assert known or name in UNFUSED, f"{op}: no lowering, and no reason why not"
        assert not (op in LOWERINGS and name in UNFUSED), f"{op} is lowered, and said not to be"


def test_each_reason_is_of_an_op() -> None:
    names = {op._schema.name.removeprefix("aten::") for tag in TAGS for op in tagged(tag)}
    assert UNFUSED.keys() - names <= {"linalg__powsum"}  # that older versions of torch have not
