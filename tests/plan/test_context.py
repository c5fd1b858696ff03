"""The plan's `context`: what it reads, what it dumps, and what it refuses."""

from __future__ import annotations

import pytest

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.plan.schema import Plan


@pytest.mark.parametrize(
    ("said", "dumped"),
    [
        ("auto", ""),
        ({}, ""),
        ("ring", "context: ring\n"),
        ({"attention": "all_gather", "balance": "auto"}, "context: all_gather\n"),
        ({"axis": "cp", "attention": "ring"}, "context:\n  axis: cp\n  attention: ring\n"),
        (
            {"axis": ["out", "in"], "attention": "hierarchical", "balance": "zigzag"},
            "context:\n  axis: out.in\n  attention: hierarchical\n  balance: zigzag\n",
        ),
        ("hierarchical", "context: hierarchical\n"),
        ({"keys": "merge"}, "context:\n  keys: merge\n"),
    ],
)
def test_round_trip(said: str | dict[str, object], dumped: str) -> None:
    plan = Plan.of(context=said)
    assert plan.dump() == dumped
    assert Plan.parse(dumped).context == plan.context
    assert Plan.of(context="all_to_all").merge(plan).context == plan.context


def test_a_wrong_key_is_hinted_at() -> None:
    with pytest.raises(ShardcError) as refused:
        Plan.parse("context: {atention: ring}", "plan.yaml")
    assert refused.value.diagnostics[0].hint == "did you mean 'attention'?"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("context: rign", r"'context.attention' should be one of auto, ring, .*, not 'rign'"),
        ("context: true", r"'context' should be a mapping, not True"),
        ("context: {attention: [ring]}", r"'context.attention' should be one of .*, not \['ring'\]"),
        ("context: {balance: zagzig}", r"'context.balance' should be one of auto, zigzag, none, not 'zagzig'"),
        ("context: {keys: gather}", r"'context.keys' should be one of auto, all_gather, merge, not 'gather'"),
        ("context: {axis: 3}", r"'context.axis' should be an axis, or several, major first, not 3"),
        ("context: {axis: cp.cp}", r"'context.axis' should be an axis, or several"),
        ("context: {axis: ''}", r"'context.axis' should be an axis, or several"),
        ("context: {axis: []}", r"'context.axis' should be an axis, or several"),
        ("context: {axis: cp, attention: hierarchical}", r"hierarchical, which needs two axes"),
        ("context: {ring: true}", r"context has no key 'ring'"),
    ],
)
def test_what_is_wrong_is_refused(said: str, message: str) -> None:
    with pytest.raises(ShardcError, match=message) as refused:
        Plan.parse(said, "plan.yaml")
    (wrong,) = refused.value.diagnostics
    assert wrong.code == "SC208"
    assert wrong.location == "plan.yaml:1"
    assert wrong.hint


def test_axes_are_those_of_the_mesh() -> None:
    context = Plan.of(context={"axis": "cp", "attention": "ring"}).context
    assert context.on(Mesh(dp=2, cp=2)) == context
    with pytest.raises(ShardcError, match="has no axis 'cp'"):
        context.on(Mesh(dp=2, sp=2))
