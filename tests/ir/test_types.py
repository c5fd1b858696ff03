"""Types of values as keys: equal ones have one hash, which no process takes from another."""

from __future__ import annotations

import copy
import pickle

import torch

from shardc.ir.types import Atom, TensorType


def sharded() -> TensorType:
    return TensorType(torch.float32, ((Atom(4, ("dp",)), Atom(3)), (Atom(5),)), (("tp", "sum"),))


def test_equal_types_are_one_key() -> None:
    first, second = sharded(), sharded()
    assert first is not second
    assert {first: "known"}[second] == "known"
    others = [
        first.replicated(),
        TensorType(torch.float64, first.dims, first.partial),
        TensorType.plain(first.dtype, (12, 5)),
    ]
    assert len({first, second, *others}) == 4


def test_a_type_is_hashed_where_it_is_unpickled() -> None:
    """The hash of an axis's name is another in each process."""
    foreign = sharded()
    object.__setattr__(foreign, "_hash", 1)
    for received in (pickle.loads(pickle.dumps(foreign)), copy.deepcopy(foreign)):
        assert received == sharded()
        assert hash(received) == hash(sharded()) != 1
        assert received.placement == foreign.placement
        assert received.shape == (12, 5)
