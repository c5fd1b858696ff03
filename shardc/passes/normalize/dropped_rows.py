"""Rows of no expert: those whose id is none of 0 ... experts - 1, as libraries mark tokens over an expert's capacity.

A grouped product yields zeros for them, and `ungroup_rows` does too. What else is done with rows before they leave
may keep something there, as a residual stream does:

    y = grouped_mm(rows, w, offs) * scale    0 * scale is 0: nothing to do
    y = where(kept, y, rows)                 a dropped token is itself: `ungroup_rows` would lose it

So a grouping is understood if each id is of an expert, or what leaves is zero wherever products are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, producer, results, type_of
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
CHOICES: dict[object, int] = {  # calls that yield positions in one of their operand's dims: the result that holds them
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
}
BOTH = (aten.where.self, aten.maximum.default, aten.minimum.default)  # zero where both of their values are
ZERO_AT_ZERO = (
    *(aten.abs.default, aten.sign.default, aten.sin.default, aten.sqrt.default, aten.erf.default),
    *(aten.relu.default, aten.leaky_relu.default, aten.elu.default, aten.hardtanh.default, aten.tanh.default),
    *(aten.silu.default, aten.gelu.default, aten.mish.default, aten.hardswish.default),
)


def are_of_experts(ids: fx.Node, experts: int) -> bool:
    """Whether each id is a position in a dim of no more than this size, as those that a router chooses are."""
    call, result = producer(ids)
    while call.op == "call_function":
        if call.target in CHOICES and result == CHOICES[call.target]:
            chosen_from, dim = type_of(operands(call)[0]), _dim(call)
            return dim is not None and chosen_from.shape[dim] <= experts
        rule = find_rule(call.target)
        if call.target is not aten._to_copy.default and (rule is None or rule.kind != "view"):
            return False
        call, result = producer(operands(call)[0])
    return False


def _dim(call: fx.Node) -> int | None:
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    place = next(i for i, argument in enumerate(schema) if argument.name == "dim")
    if place < len(call.args):
        return call.args[place]  # type: ignore[return-value]
    return call.kwargs.get("dim", schema[place].default_value)  # type: ignore[return-value]


def zero_where_products_are(
    graph: Graph, products: Collection[fx.Node], between: Mapping[fx.Node, None]
) -> set[fx.Node]:
    """Of the values between, and the products themselves, those that are zero in each row of no expert."""
    zeros = set(products)
    for call in graph.calls():
        if call in between and _keeps_zeros(call, zeros):
            zeros |= {value for value in results(call) if value is not None}
    return zeros


def _keeps_zeros(call: fx.Node, zeros: set[fx.Node]) -> bool:
    values = operands(call)
    if call.target in BOTH:
        return zeros.issuperset(values[-2:])
    if call.target in ZERO_AT_ZERO:
        return values[0] in zeros
    if call.target is aten.pow.Tensor_Scalar:
        return values[0] in zeros and call.args[1] > 0  # type: ignore[operator]
    linear = rule_of(call).linear
    if linear == "joint":
        return zeros.issuperset(values)
    return any(values[i] in zeros for i in linear)
