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
from shardc.ir.parse import parse
from shardc.passes.sharding.settle_partials import SINK, SOURCE, _Network
from shardc.passes.verify import operands_match, results_follow_rules, same_calls

PLAN: Any = {"inputs": {"*": "dp, -"}, "params": {"**.0.weight": "tp, -", "**.2.weight": "-, tp"}}


def _blocks(count: int) -> nn.Module:
    """Layers of which each calls the same as the next."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False)) for _ in range(count))
    )


@pytest.mark.parametrize("layers", [1, 3])
def test_a_call_that_has_changed_is_checked_again(layers: int) -> None:
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

    loss = lambda output, _batch: output.square().mean()  # noqa: E731
    shardc.compile(_blocks(layers), torch.randn(4, 8), mesh="dp=2,tp=2", plan=PLAN, loss=loss, watch=watch)
    assert len(seen) > 3 * layers


def test_arguments_count_among_equal_calls() -> None:
    """Of equal layers one takes a softmax over the dim that ranks share."""
    seen: list[str] = []

    def watch(pass_: Any, graph: Graph, _seconds: float) -> None:
        if pass_.name == "combine":
            for call in [call for call in graph.calls() if call.target is torch.ops.aten._softmax.default]:
                before = call.args
                assert before[1] == 1
                call.args = (before[0], 0, *before[2:])
                faults = [*results_follow_rules(graph), *operands_match(graph)]
                assert any(info(call).name in fault for fault in faults), info(call).name
                call.args = before
                assert not results_follow_rules(graph)
                seen.append(info(call).name)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)) for _ in range(3)))
    loss = lambda output, _batch: output.square().mean()  # noqa: E731
    shardc.compile(model, torch.randn(4, 8), mesh="dp=2", plan={"inputs": {"*": "dp, -"}}, loss=loss, watch=watch)
    assert len(seen) == 3


def test_a_contradiction_in_one_of_many_equal_calls_is_found() -> None:
    """A check that starts anew looks at a call which is not as those before it, whatever differs."""
    changes: list[dict[str, Any]] = []

    def watch(pass_: Any, graph: Graph, _seconds: float) -> None:
        if pass_.name != "combine":
            return
        for node in [node for node in graph.calls() if info(node).fqn.startswith("2.") and info(node).assignment]:
            about = info(node)
            for change in ({"assignment": ()}, {"passes": ("tp",)}, {"passes": ()}):
                update(node, **change)
                anew = graph.copy()
                if any(getattr(about, name) != value for name, value in change.items()):
                    changes.append(change)
                    assert results_follow_rules(anew) or operands_match(anew), (about.name, change)
                update(node, assignment=about.assignment, passes=about.passes)

    loss = lambda output, _batch: output.square().mean()  # noqa: E731
    shardc.compile(_blocks(3), torch.randn(4, 8), mesh="dp=2,tp=2", plan=PLAN, loss=loss, watch=watch)
    assert len({tuple(change) for change in changes}) == 2


def test_a_check_that_fails_fails_again() -> None:
    """What a check could not look at is not known to hold."""
    seen: list[str] = []

    def watch(pass_: Any, graph: Graph, _seconds: float) -> None:
        if pass_.name == "combine":
            call = next(call for call in graph.calls() if call.target is torch.ops.aten._softmax.default)
            before = info(call).assignment
            update(call, assignment=(("nonsense", ("dp",)),))
            for check in (results_follow_rules, operands_match):
                for _ in range(2):
                    with pytest.raises(ValueError, match="not in tuple"):
                        check(graph)
                seen.append(check.__name__)
            update(call, assignment=before)

    loss = lambda output, _batch: output.square().mean()  # noqa: E731
    model, plan = nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)), {"inputs": {"*": "dp, -"}}
    shardc.compile(model, torch.randn(4, 8), mesh="dp=2", plan=plan, loss=loss, watch=watch)
    assert len(seen) == 2


@pytest.mark.parametrize(("number", "other"), [(0.0, -0.0), (1, 1.0), (1.0, 2.0)])
def test_numbers_of_calls_that_are_moved_are_the_same(number: float, other: float) -> None:
    def of(factor: float) -> Graph:
        text = f"""graph @g mesh(tp=2) {{\n  %x = input "x" : f32[4]\n  %y = mul.Scalar(%x, {factor}) : f32[4]\n"""
        return parse(text + '  return output "y" = %y\n}\n')

    assert same_calls(of(number), of(number)) == []
    assert same_calls(of(number), of(other)) == ["not the same calls: y"]


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
