"""A merge of parts of attention that is altered is refused, by the proof of a program and by its types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardc
from shardc import Program
from shardc.ir.ops.attention_keys import (
    MERGE_LSE,
    MERGE_PARTS,
    PACK_PART,
    SDPA_PART,
    SDPA_PART_BWD,
    SPLIT_PARTS,
    WEIGH_PART,
)
from shardc.ir.ops.collectives import all_reduce
from shardc.passes.type_check import type_faults
from tests.models.test_context_keys import QUICK, Learned


def call(program: Program, target: Any) -> Any:
    return next(node for node in program.body.calls() if node.target is target)


def _drop_merge(program: Program) -> None:
    weighed = call(program, WEIGH_PART)
    weighed.args = (*weighed.args[:2], weighed.args[1])


def _wrong_axis(program: Program) -> None:
    node = call(program, MERGE_LSE)
    node.args = (node.args[0], ["dp"])


def _unweighed(program: Program) -> None:
    weighed = call(program, WEIGH_PART)
    part = next(value for value in weighed.users if value.args[1] == 0)
    part.replace_all_uses_with(weighed.args[0])


def _keys_of_another_axis(program: Program) -> None:
    node = call(program, SDPA_PART)
    node.args = (*node.args[:-1], ["dp"])


def _others_sums(program: Program) -> None:
    first, second = [node for node in program.body.calls() if node.target is WEIGH_PART]
    second.args = (second.args[0], first.args[1], first.args[2])


def _summed_parts(program: Program) -> None:
    node = call(program, MERGE_LSE)
    node.target, node.args = all_reduce, (node.args[0], "softmax", ["cp"])


def _own_sums_in_backward(program: Program) -> None:
    node, own = call(program, SDPA_PART_BWD), call(program, WEIGH_PART).args[1]
    node.args = (*node.args[:6], own, *node.args[7:])


def _drop_packed(program: Program) -> None:
    split = call(program, SPLIT_PARTS)
    split.args = (split.args[0].args[0],)


def _unpacked(program: Program) -> None:
    split = call(program, SPLIT_PARTS)
    part = next(value for value in split.users if value.args[1] == 0)
    part.replace_all_uses_with(call(program, PACK_PART).args[0])


def _packed_wrong_axis(program: Program) -> None:
    node = call(program, MERGE_PARTS)
    node.args = (node.args[0], ["dp"])


def _packed_with_others(program: Program) -> None:
    first, second = [node for node in program.body.calls() if node.target is PACK_PART]
    second.args = (second.args[0], first.args[1])


APART = [
    _drop_merge,
    _wrong_axis,
    _unweighed,
    _keys_of_another_axis,
    _others_sums,
    _summed_parts,
    _own_sums_in_backward,
]
PACKED = [_drop_packed, _unpacked, _packed_wrong_axis, _packed_with_others, _keys_of_another_axis]
MUTATIONS = [*((mutate, QUICK) for mutate in APART), *((mutate, {}) for mutate in PACKED)]


@pytest.mark.parametrize(("mutate", "hardware"), MUTATIONS)
def test_a_broken_merge_is_refused(mutate: Callable[[Program], None], hardware: Any) -> None:
    plan = {"mesh": "dp=2, cp=4", "inputs": {"memory": "dp, cp, -"}, "context": {"keys": "merge"}}
    program = shardc.compile(Learned(), torch.randn(4, 8, 16), plan=plan | {"hardware": hardware})
    assert program.prove().ok
    assert not type_faults(program.body)
    mutate(program)
    assert not program.prove().ok
    assert type_faults(program.body)
