"""merge_updates: what AdamW or Adam does to a parameter is one call.

    %m.new = lerp(%m, %g, 0.1)
    %v.new = add(mul(%v, 0.999), ...)        ->    %w.new, %m.new, %v.new = adamw(%w, %g, %m, %v, %step, %lr, ...)
    %w.new = add(%w.decayed, ...)

The update's own graph has some twenty calls a parameter, with rules that say how each is split. What a rank runs of
them is elementwise on its own shards, whatever the plan, so they are found from the new parameter back to the gradient.
Gradients may be clipped, cast or negated before. An update stays as it is where something else reads what lies between,
where it may be skipped, and in dtypes shorter than float32, in which one call rounds otherwise.

Needs a localized body, or a part of one. Ensures the same values under the same names, up to rounding.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, set_info, type_of, update
from shardc.ir.ops.adamw import ADAMW, DTYPES
from shardc.ir.types import TensorType
from shardc.passes.base import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class MergeUpdates(Pass):
    """Make one call of each update, if `enabled`."""

    enabled: bool = True

    def run(self, graph: Graph) -> Graph:
        order = {node: number for number, node in enumerate(graph.fx.nodes)} if self.enabled else {}
        sums = [node for node in order if node.target is aten.add.Tensor and info(node).phase == "opt"]
        found = [made for node in sums if (made := _update(node, order)) is not None]
        if not found:
            return graph
        table: dict[fx.Node, fx.Node] = {}
        graph = graph.copy(table)
        for made in found:
            _merge(graph, made, table)
        graph.erase_dead()
        return graph


@dataclass(frozen=True)
class _Update:
    """An update: what the op reads, and the values that it makes."""

    args: tuple[Any, ...]
    new: tuple[fx.Node, ...]  # the parameter, and both averages


class _NoMatchError(Exception):
    pass


class _Matcher:
    """Takes a call's operands, and records the call."""

    def __init__(self) -> None:
        self.calls: set[fx.Node] = set()

    def of(self, value: Any, target: Any) -> tuple[Any, ...]:
        if not isinstance(value, fx.Node) or value.target is not target or value.kwargs:
            raise _NoMatchError
        self.calls.add(value)
        return value.args

    def number(self, value: Any) -> float:
        if not isinstance(value, (int, float)):
            raise _NoMatchError
        return value

    def one_minus(self, value: Any) -> Any:
        """x of add(neg(x), 1)."""
        negative, one = self.of(value, aten.add.Tensor)
        (x,) = self.of(negative, aten.neg.default)
        _same(one, 1)
        return x


def _same(a: Any, b: Any) -> None:
    if not (a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)):
        raise _NoMatchError


def _update(new: fx.Node, order: dict[fx.Node, int]) -> _Update | None:
    """The update whose new parameter is `new`, if one call may take its place."""
    match = _Matcher()
    try:
        made = _matched(match, new)
    except (_NoMatchError, ValueError):
        return None
    type = type_of(new)
    tensors = [type_of(value) for value in (*made.args[:4], *made.new)]
    scalars = [type_of(value) for value in made.args[4:6]]
    if any(t != type for t in tensors) or type.dtype not in DTYPES or type != TensorType(type.dtype, type.dims):
        return None
    if any(t.ndim or t != TensorType(t.dtype, ()) for t in scalars):
        return None
    for call in match.calls - {new}:
        others = set(call.users) - match.calls
        if call in made.new:
            if any(order[user] < order[new] for user in others):
                return None
        elif others and type_of(call).shape == type.shape:
            return None
    return made


def _matched(match: _Matcher, new: fx.Node) -> _Update:
    decayed, change = match.of(new, aten.add.Tensor)
    numerator, denominator = match.of(change, aten.div.Tensor)
    average, negative_size = match.of(numerator, aten.mul.Tensor)
    (size,) = match.of(negative_size, aten.neg.default)
    lr, correction1 = match.of(size, aten.div.Tensor)
    beta1, step = match.of(match.one_minus(correction1), aten.pow.Scalar)
    old_average, gradient, weight = match.of(average, aten.lerp.Scalar)
    _same(weight, 1 - match.number(beta1))
    quotient, eps = match.of(denominator, aten.add.Tensor)
    root, root_correction = match.of(quotient, aten.div.Tensor)
    correction2, half = match.of(root_correction, aten.pow.Tensor_Scalar)
    _same(half, 0.5)
    beta2, again = match.of(match.one_minus(correction2), aten.pow.Scalar)
    _same(again, step)
    (square,) = match.of(root, aten.sqrt.default)
    kept, added = match.of(square, aten.add.Tensor)
    old_square, factor = match.of(kept, aten.mul.Tensor)
    _same(factor, match.number(beta2))
    product, rest = match.of(added, aten.mul.Tensor)
    _same(rest, 1 - beta2)
    left, right = match.of(product, aten.mul.Tensor)
    _same(left, gradient)
    _same(right, gradient)
    parameter, decay = _undecayed(match, decayed, lr)
    read = (parameter, gradient, old_average, old_square, step, lr)
    if not all(isinstance(value, fx.Node) for value in read):
        raise _NoMatchError
    return _Update((*read, beta1, beta2, decay, match.number(eps)), (new, average, square))


def _undecayed(match: _Matcher, value: Any, lr: fx.Node) -> tuple[Any, float]:
    """The parameter of a decayed one, and how much it decays: by nothing, where the value is no such product."""
    if not isinstance(value, fx.Node) or value.target is not aten.mul.Tensor:
        return value, 0.0
    calls = set(match.calls)
    try:
        parameter, remaining = match.of(value, aten.mul.Tensor)
        rate, decay = match.of(match.one_minus(remaining), aten.mul.Tensor)
        _same(rate, lr)
        return parameter, match.number(decay)
    except (_NoMatchError, ValueError):
        match.calls = calls
        return value, 0.0


def _merge(graph: Graph, made: _Update, table: dict[fx.Node, fx.Node]) -> None:
    """The call where the new parameter was made; its results are the new values, as the graph names them."""
    new, *averages = (table[value] for value in made.new)
    args = tuple(table[value] if isinstance(value, fx.Node) else value for value in made.args)
    about = info(new)
    with graph.fx.inserting_before(new):
        types = tuple(type_of(value) for value in (new, *averages))
        name = f"{about.name}.update"
        merged = graph.call(ADAMW, args, like=new, type=None, name=name, results=types, assignment=about.assignment)
    for position, value in enumerate((new, *averages)):
        about = info(value)
        value.target, value.args, value.kwargs = operator.getitem, (merged, position), {}
        set_info(value, about)
        update(value, assignment=())
    for value in averages:
        new.prepend(value)
