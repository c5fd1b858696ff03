"""Whether calls of a trace go row by row: a row of what they return depends on the same row of what they are given.

    linear(x, w), x[:, 1:], x.softmax(-1), embedding(ids, w)     do
    x.flip(0), x.cumsum(0), x - x.mean(0), x.transpose(0, 1)     do not

It follows from the rules of the ops: the factor of dim 0 is dim 0 of every result, or the major factor of it, and is
neither reduced nor whole. What is drawn, or filled with one value, may stand for any rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.frontend.memory_writes import writes_to
from shardc.rules.notation import Dims, FactorRule, RuleError, fit
from shardc.rules.registry import MASKS, bind_call, find_rule, notation_of
from shardc.torch_compat import is_mutable, mutates

aten = torch.ops.aten
_FILLS = "empty zeros ones full new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like"
# Ops that normalisation takes apart have no rules. Of these, some are elementwise, and some go along dims.
_ELEMENTWISE = """
    addcdiv addcmul alias clone copy detach lift_fresh lift_fresh_copy masked_fill rsub addcmul_ addcdiv_ fill
"""
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss soft_margin_loss
"""
_ALONG = "_log_softmax mean var var_mean std std_mean sum nansum linalg_vector_norm norm count_nonzero"


def follow(nodes: Iterable[fx.Node], rows: Mapping[fx.Node, int]) -> dict[fx.Node, int] | None:
    """Of which of these calls, in order, the results have rows, and how many of them for each given one: `rows` says it
    of what they are given. None if one of them does not go row by row."""
    known = dict(rows)
    count = next(_size(node) // times for node, times in rows.items())
    for node in nodes:
        if node.op != "call_function":
            continue
        given = [operand for operand in node.all_input_nodes if operand in known]
        name = _name(node)
        if not given:
            shape = _shape(node)
            if shape and shape[0] == count and (node.target is RANDOM_UNIFORM or name in _FILLS.split()):
                known[node] = 1
            continue
        if node.target is operator.getitem:
            known[node] = known[given[0]]
            continue
        times = _times(node, name, known, count)
        if times is None:
            return None
        known[node] = times
    return known


def _times(node: fx.Node, name: str, known: Mapping[fx.Node, int], count: int) -> int | None:
    """How many rows of the results come of one row that is given; None if that cannot be said."""
    each = {known[operand] for operand in node.all_input_nodes if operand in known}
    if len(each) != 1:
        return None
    before = each.pop()
    results = _values(node)
    if name.removesuffix("_") in _ELEMENTWISE.split() or (name in _LOSSES.split() and not _argument(node, "reduction")):
        shape = results[0].shape
        operands = [(_shape(one), one in known) for one in node.all_input_nodes]
        fits = all(
            len(of) == len(shape) if has_rows else len(of) < len(shape) or of[0] == 1 for of, has_rows in operands
        )
        return before if fits else None
    if name in _ALONG.split():
        dims = _argument(node, "dim")
        ndim = len(_shape(node.all_input_nodes[0]))
        dims = [dims] if isinstance(dims, int) else dims
        return before if dims and all(d % ndim for d in dims) else None
    if name in _FILLS.split():  # of the shape, or of the dtype alone, of what it is given
        shape = results[0].shape
        return before if len(shape) and shape[0] == count * before else None
    target = _functional(node.target)
    rule = None if target is None else find_rule(target)
    if rule is None or target is None:
        return None
    order: list[fx.Node] = []

    def dims_of(name: str, value: Any) -> Dims:
        order.append(value)
        shape, dtype = _shape(value), value.meta["val"].dtype
        return Dims(name, shape, boolean=dtype in MASKS)

    try:
        arguments = bind_call(target, node.args, dict(node.kwargs), dims_of)
        notation = notation_of(rule, arguments)
        fitted = fit(notation, [_shape(one) for one in order], [tuple(t.shape) for t in results])
    except (RuleError, AttributeError, KeyError):
        return None
    more = _through(fitted, [one in known for one in order])
    return None if more is None else before * more


def _through(rule: FactorRule, has_rows: list[bool]) -> int | None:
    """How many rows one row becomes."""
    factors = {labels[0] if labels else () for labels, has in zip(rule.operands, has_rows, strict=True) if has}
    if len(factors) != 1 or len(names := factors.pop()) != 1:
        return None
    (row,) = names
    others = (labels for labels, has in zip(rule.operands, has_rows, strict=True) if not has)
    if row in rule.whole or row in rule.reduces or any(row in dim for labels in others for dim in labels):
        return None
    if any(row in dim for labels in rule.operands for dim in labels[1:]):
        return None
    spreads: set[int] = set()
    for labels in rule.results:
        first = labels[0] if labels else ()
        if not first or first[0] != row or any(row in dim for dim in labels[1:]):
            return None
        times = 1
        for name in first[1:]:
            times *= rule.sizes[name]
        spreads.add(times)
    return spreads.pop() if len(spreads) == 1 else None


def _functional(target: Any) -> OpOverload | None:
    """The op that computes what this one writes in place."""
    if not isinstance(target, OpOverload) or not is_mutable(target):
        return target if isinstance(target, OpOverload) else None
    name, overload = _base(target), target.name().partition("::")[2].partition(".")[2] or "default"
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, overload, None) if packet is not None else None


def _base(target: OpOverload) -> str:
    return target.name().partition("::")[2].partition(".")[0]


def _name(node: fx.Node) -> str:
    target = node.target
    return _base(target) if isinstance(target, OpOverload) and target.namespace == "aten" else ""


def _argument(node: fx.Node, name: str) -> Any:
    target: Any = node.target
    return bind_call(target, node.args, dict(node.kwargs), lambda _, value: value).get(name)


def _values(node: fx.Node) -> list[Tensor]:
    value = node.meta["val"]
    return [t for t in value if isinstance(t, Tensor)] if isinstance(value, (list, tuple)) else [value]


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _size(node: fx.Node) -> int:
    return _shape(node)[0]


def same_choice(a: fx.Node, b: fx.Node) -> bool:
    """Whether two masks choose the same, apart from how often each of their elements is repeated.

    They are so if they are computed by the same ops, of the same values, none drawn or written to between.
    """
    apart: set[fx.Node] = set()
    a, b = _spread_from(a, apart), _spread_from(b, apart)
    todo, seen = [(a, b)], set[tuple[fx.Node, fx.Node]]()
    while todo:
        one, other = todo.pop()
        if (one, other) in seen:
            continue
        seen.add((one, other))
        if one is other:
            continue
        if one.op != "call_function" or other.op != "call_function" or one.target is not other.target:
            return False
        mine, theirs = one.all_input_nodes, other.all_input_nodes
        if one.target is RANDOM_UNIFORM or len(mine) != len(theirs) or _blank(one) != _blank(other):
            return False
        apart |= {one, other}
        todo += zip(mine, theirs, strict=True)
    between = dropwhile(lambda node: node not in apart, a.graph.nodes)
    return not writes_to({node: False for pair in seen for node in pair}, [n for n in between if mutates(n)])


def _spread_from(mask: fx.Node, through: set[fx.Node]) -> fx.Node:
    """The mask of which this one is a copy of another shape, each element repeated equally often in a row."""
    while (name := _name(mask)) in ("clone", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand"):
        source = mask.all_input_nodes[0]
        if name == "expand":
            before, after = _shape(source), _shape(mask)
            last = max((d for d, size in enumerate(before) if size > 1), default=-1)
            if len(before) != len(after) or any(before[d] != after[d] for d in range(last)):
                return mask
        through.add(mask)
        mask = source
    return mask


def are_row_sums(sums: fx.Node, mask: fx.Node) -> bool:
    """Whether these count what a mask of two dims chooses of each row."""
    while _name(sums) in ("_to_copy", "clone", "view", "reshape"):
        sums = sums.all_input_nodes[0]
    if sums.target is not aten.sum.dim_IntList or (sums.args[2:3] == (True,)):
        return False
    args: tuple[Any, ...] = sums.args
    source, dims = sums.all_input_nodes[0], args[1]
    rows = len(_shape(source)) == 2 and dims in ([1], [-1]) and _shape(source) == _shape(mask)
    return rows and same_choice(source, mask)


def _blank(node: fx.Node) -> str:
    """The arguments, but for which values they are."""
    names = {operand: f"%{i}" for i, operand in enumerate(node.all_input_nodes)}
    return repr(fx.map_arg((node.args, node.kwargs), names.__getitem__))
