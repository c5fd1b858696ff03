"""Bodies whose experts have a capacity that nothing keeps to are refused, and a plan's words on experts without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import shardc
from shardc.ir.graph import Graph, info, operands, type_of, update
from shardc.ir.ops.exchange import COMBINE_ROWS, DISPATCH_ROWS
from shardc.ir.ops.expert_capacity import LIMIT_ROWS
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.ir.types import TensorType
from shardc.passes.type_check import type_faults
from shardc.passes.verify_groups import groups_agree
from tests.passes.test_dispatch import mean_of_squares
from tests.passes.test_expert_capacity import program


def changed(edit: Callable[[Graph], None]) -> list[str]:
    graph = program("dp2 x ep2", 1.25, 8).body.copy()
    edit(graph)
    return [*groups_agree(graph), *(fault.message for fault in type_faults(graph))]


def first(graph: Graph, target: object) -> fx.Node:
    return next(node for node in graph.calls() if node.target is target)


def test_the_body_itself_has_no_fault() -> None:
    assert changed(lambda graph: None) == []


def test_rows_that_nothing_limits_are_refused() -> None:
    def drop(graph: Graph) -> None:
        limit = first(graph, LIMIT_ROWS)
        limit.replace_all_uses_with(operands(limit)[0])
        graph.fx.erase_node(limit)

    assert any("nothing keeps to that" in fault for fault in changed(drop))


@pytest.mark.parametrize("target", [DISPATCH_ROWS, COMBINE_ROWS])
@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_another_capacity_is_refused(target: object, capacity: int) -> None:
    def change(graph: Graph) -> None:
        node = first(graph, target)
        assert node.args[5] != capacity
        node.args = (*node.args[:5], capacity)

    assert changed(change)


def test_another_factor_is_refused() -> None:
    def change(graph: Graph) -> None:
        limit = first(graph, LIMIT_ROWS)
        limit.args = (limit.args[0], limit.args[1], 2.0, limit.args[3])

    assert any("nothing keeps to that" in fault for fault in changed(change))


def test_limits_for_other_experts_are_refused() -> None:
    def change(graph: Graph) -> None:
        limit = first(graph, LIMIT_ROWS)
        limit.args = (limit.args[0], 2, *limit.args[2:])

    assert changed(change)


def test_a_rank_that_limits_in_groups_is_refused() -> None:
    def change(graph: Graph) -> None:
        limit = first(graph, LIMIT_ROWS)
        limit.args = (*limit.args[:3], [8, 1, 2, 3, 0, 2, 0])

    assert any("in groups" in fault for fault in changed(change))


def test_less_room_is_refused() -> None:
    def change(graph: Graph) -> None:
        dispatch = first(graph, DISPATCH_ROWS)
        type = type_of(dispatch)
        update(dispatch, type=TensorType(type.dtype, type.dims, type.partial, type.ragged, type.room - 1))

    assert changed(change)


def test_a_grouping_of_unlimited_rows_is_refused() -> None:
    def change(graph: Graph) -> None:
        grouping, limit = first(graph, GROUP_ROWS), first(graph, LIMIT_ROWS)
        grouping.args = (operands(limit)[0], *grouping.args[1:])

    assert any("nothing keeps to that" in fault for fault in changed(change))
    assert info(first(program("dp2 x ep2", 1.25, 8).body, LIMIT_ROWS)).name == "experts.group_rows.limit"


@pytest.mark.parametrize("said", [{"capacity": 1.25}, {"load": True}])
def test_a_model_without_experts_is_told_so(said: dict[str, Any]) -> None:
    plan = {"mesh": "ep=2", "inputs": {"input": "ep"}, "experts": said}
    compiled = shardc.compile(torch.nn.Linear(4, 4), {"input": torch.ones(4, 4)}, plan=plan, loss=mean_of_squares)
    (told,) = [d for d in compiled.diagnostics if d.code == "SC230"]
    assert "no rows are grouped by expert" in told.message
    assert told.hint
    assert compiled.verify().ok
