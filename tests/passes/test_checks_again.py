"""What checks and passes keep of equal or unchanged parts is what they would find anew."""

from __future__ import annotations

import random
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import shardc
from shardc.ir.graph import Graph, info, type_of, update
from shardc.passes.sharding.settle_partials import SINK, SOURCE, _Network
from shardc.passes.verify import operands_match, results_follow_rules

PLAN: Any = {"inputs": {"*": "dp, -"}, "params": {"0.weight": "tp, -", "2.weight": "-, tp"}}


def test_a_call_that_has_changed_is_checked_again() -> None:
    seen: list[str] = []

    def watch(pass_: Any, graph: Graph, _seconds: float) -> None:
        if pass_.name != "insert_reshards":
            return
        assert not operands_match(graph)
        assert not results_follow_rules(graph)
        for node in [node for node in graph.calls() if info(node).assignment and info(node).type is not None]:
            before = info(node)
            update(node, type=type_of(node).place([() for _ in type_of(node).atoms]))
            changed = info(node).type != before.type
            if changed:
                seen.append(before.name)
                assert any(before.name in fault for fault in results_follow_rules(graph))
                readers = [user for user in node.users if user.op != "output" and info(user).assignment]
                assert bool(operands_match(graph)) == bool(readers)
            update(node, type=before.type)
            update(node, assignment=())
            if changed and not before.passes:
                assert any(before.name in fault for fault in results_follow_rules(graph))
            update(node, assignment=before.assignment)
            assert not operands_match(graph)
            assert not results_follow_rules(graph)

    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))
    loss = lambda output, _batch: output.square().mean()  # noqa: E731
    shardc.compile(model, torch.randn(4, 8), mesh="dp=2,tp=2", plan=PLAN, loss=loss, watch=watch)
    assert len(seen) > 3


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_that_of_any_flow(seed: int) -> None:
    drawn, network, plain = random.Random(seed), _Network(), nx.DiGraph()
    vertices: list[object] = [SOURCE, *range(drawn.randint(3, 12)), SINK]
    for _ in range(drawn.randint(6, 40)):
        tail, head = drawn.choice(vertices[:-1]), drawn.choice(vertices[1:])
        capacity = drawn.choice([None, 1, 1, 2, 5]) if (tail, head) != (SOURCE, SINK) else 3
        if tail == head or (capacity is None and tail == SOURCE and drawn.random() < 0.7):
            continue
        network.add(tail, head, capacity)
        plain.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
    if SOURCE not in plain or SINK not in plain:
        assert network.near() <= {SOURCE, SINK}
        return
    try:
        _, (near, _) = nx.minimum_cut(plain, SOURCE, SINK)
    except nx.NetworkXUnbounded:
        with pytest.raises(nx.NetworkXUnbounded):
            network.near()
        return
    assert network.near() == near
