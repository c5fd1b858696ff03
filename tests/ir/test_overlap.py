"""Which tensors share elements: by address, through storages of their own, and exactly."""

from __future__ import annotations

import pytest
import torch

from shardc.ir.diagnostic import ShardcError
from shardc.ir.overlap import extent_of, overlapping, refuse_overlap

WHOLE = torch.arange(24.0).view(4, 6)


def test_pairs() -> None:
    named = {"whole": WHOLE, "row": WHOLE[1], "column": WHOLE[:, 2], "other": torch.zeros(4, 6)}
    assert sorted(map(sorted, overlapping(named))) == [["column", "row"], ["column", "whole"], ["row", "whole"]]


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        (WHOLE[:, :3], WHOLE[:, 3:], False),
        (WHOLE.flatten()[::2], WHOLE.flatten()[1::2], False),
        (WHOLE.flatten()[::2], WHOLE.flatten()[::3], True),
        (WHOLE[:2], WHOLE[2:], False),
        (WHOLE, torch.from_numpy(WHOLE.numpy())[3:], True),
        (WHOLE, WHOLE.view(torch.int32)[3:], True),
        (WHOLE, WHOLE[:0], False),
        (torch.empty(4, device="meta"), torch.empty(4, device="meta"), False),
    ],
)
def test_a_pair(a: torch.Tensor, b: torch.Tensor, meet: bool) -> None:
    assert bool(overlapping({"a": a, "b": b})) is meet
    assert bool(overlapping({"b": b, "a": a})) is meet


def test_meta_tensors_lie_in_their_storage() -> None:
    base = torch.empty(4, 6, device="meta")
    assert overlapping({"base": base, "row": base[1]}) == [("base", "row")]
    assert overlapping({"first": base[0], "row": base[1]}) == []


def test_sparse_tensors_lie_nowhere() -> None:
    assert extent_of(torch.eye(3).to_sparse()) is None


def test_only_what_is_written_must_lie_alone() -> None:
    batch = {"x": WHOLE, "y": WHOLE[1:], "z": torch.zeros(2)}
    refuse_overlap((), batch)
    refuse_overlap(("z",), batch)
    with pytest.raises(ShardcError, match="'y' and 'x'"):
        refuse_overlap(("y",), batch)
