"""group_sums: add up what is pending over the same axes first, so that it is resolved once.

Needs: assignments. Ensures: within a chain of additions, the terms that are pending over the same axes meet before
they meet any other term.

    ((dx + dq) + dk) + dv  with dq, dk, dv pending over tp        dx + ((dq + dk) + dv)
    ((y + b) + (z + c)) + x  with y, z pending, b, c biases       (((y + z) + x) + b) + c

Autograd adds gradients in the order in which they arrive. Where the residual branch arrives first, as in a
post-norm transformer, a sum that is pending would meet one that is not at every addition, and be all-reduced three
times; and where attention and an MLP are added up (GPT-NeoX, Phi), each of them has met its bias. Only additions whose
result nothing else reads are moved, and values change by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import fx

from shardc.ir.graph import Graph, info, type_of
from shardc.ir.types import Axes, Partial
from shardc.ir.units import refuse_several
from shardc.passes.base import Pass

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class GroupSums(Pass):
    """Reassociate additions by what is pending."""

    def run(self, graph: Graph) -> Graph:
        pinned = {*graph.seeds, *graph.output_values}
        chains = _Chains(pinned)
        for node in [n for n in graph.calls() if _plain(n)]:
            if not chains.inner(node):
                _regroup(graph, chains, node)
        graph.erase_dead()
        alive = set(graph.fx.nodes)
        graph.activations = {name: value for name, value in graph.activations.items() if value in alive}
        return graph


def _plain(node: fx.Node) -> bool:
    """An addition of two tensors of one dtype, of the result's dims or, if nothing is pending of them, broadcast."""
    if node.target is not ADD or len(node.args) != 2 or node.kwargs:
        return False
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or info(node).constant:
        return False
    full = [n for n in (a, b) if not _broadcast(n, node)]
    return bool(full) and all(
        type_of(n).dtype == type_of(node).dtype and (n in full or not type_of(n).partial) for n in (a, b)
    )


def _broadcast(term: fx.Node, result: fx.Node) -> bool:
    """Whether an addition repeats the term, as it does a bias."""
    sizes = [
        type.dims and tuple(tuple(atom.size for atom in dim) for dim in type.dims)
        for type in map(type_of, (term, result))
    ]
    return sizes[0] != sizes[1]


@dataclass
class _Chains:
    kept: set[fx.Node]  # values that are annotated or returned
    memo: dict[fx.Node, bool] = field(default_factory=dict[fx.Node, bool])

    def inner(self, node: fx.Node) -> bool:
        """An addition that only another addition of its phase reads."""
        if node not in self.memo:
            users = list(node.users)
            alone = len(users) == 1 and node not in self.kept and _plain(node) and users[0].op == "call_function"
            alone = alone and _plain(users[0]) and not _broadcast(node, users[0])
            self.memo[node] = alone and info(users[0]).phase == info(node).phase
        return self.memo[node]

    def terms(self, node: fx.Node) -> Iterator[fx.Node]:
        for operand in node.args:
            assert isinstance(operand, fx.Node)
            if self.inner(operand):
                yield from self.terms(operand)
            else:
                yield operand

    def runs(self, node: fx.Node) -> list[Partial]:
        """What is pending in each of the largest subtrees that are pending alike throughout."""
        below: list[Partial] = []
        for operand in node.args:
            assert isinstance(operand, fx.Node)
            below += self.runs(operand) if self.inner(operand) else [type_of(operand).partial]
        return below[:1] if len(set(below)) == 1 else below


def _regroup(graph: Graph, chains: _Chains, root: fx.Node) -> None:
    runs = [partial for partial in chains.runs(root) if partial]
    if len(runs) == len(set(runs)):
        return
    terms = list(chains.terms(root))
    refuse_several(graph.units, (info(term).fqn for term in (root, *terms)))
    groups: dict[Partial, list[fx.Node]] = {}
    repeated: list[fx.Node] = []  # last, to what has the dims of the result
    for term in terms:
        if _broadcast(term, root):
            repeated.append(term)
        else:
            groups.setdefault(type_of(term).partial, []).append(term)
    # The sums pending over most axes first: one that is resolved over tp:1 joins those that still wait for tp:0.
    ordered = sorted(groups.items(), key=lambda item: -len(item[0]))
    total: fx.Node | None = None
    pending: Partial = ordered[0][0]
    with graph.fx.inserting_before(root):
        for partial, terms in ordered:
            pending = tuple(p for p in partial if p in pending)
            group_sum = reduce(lambda a, b: _add(graph, root, a, b, partial), terms)
            total = group_sum if total is None else _add(graph, root, total, group_sum, pending)
        for term in repeated:
            assert total is not None
            total = _add(graph, root, total, term, ())
    # The last addition is the root, which keeps its name and its readers.
    assert total is not None
    root.args = total.args


def _add(graph: Graph, root: fx.Node, a: fx.Node, b: fx.Node, partial: Partial) -> fx.Node:
    """An addition as `assign` would annotate it: over the axes on which both terms are pending, its sum is delayed."""
    about = info(root)
    axes = {axis for axis, _ in partial}
    split = tuple((name, _without(shard_axes, axes)) for name, shard_axes in about.assignment)
    waiting = tuple((axis, name) for name, shard_axes in about.assignment for axis in shard_axes if axis in axes)
    type = type_of(root)
    placement = [_without(shard_axes, axes) for shard_axes in type.placement]
    delayed = [(axis, "sum") for axis, _ in (*about.fallback, *waiting) if axis in axes]
    return graph.call(
        ADD,
        (a, b),
        like=root,
        type=type.place(placement, delayed),
        assignment=tuple((name, shard_axes) for name, shard_axes in split if shard_axes),
        fallback=(*(f for f in about.fallback if f[0] in axes), *waiting),
    )


def _without(axes: Axes, removed: set[str]) -> Axes:
    return tuple(a for a in axes if a not in removed)
