"""casts: the two kinds of cast that mixed precision puts into a graph, told by their form.

    %w.cast = _to_copy(%w, bf16)         narrows a stored parameter: done where it is stored, so that less is gathered
    %d.w = _to_copy(%d.w.cast, f32)      widens its gradient: before the sum over ranks or after, as the plan says

Those of an unmodified model's own count alike. For products of 8-bit floats, the cast is rounded where it lies, too:

    %w.cast.fp8 = quantize(%w.cast, %w.cast.scale)      is gathered, and nothing but it and its scale reads the cast
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, producer, type_of
from shardc.ir.ops.scaled import QUANTIZE
from shardc.passes.normalize.decompositions.table import HALF
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
CAST = aten._to_copy.default
ROUNDING = (aten.abs.default, aten.amax.default, QUANTIZE)


def narrows(node: fx.Node) -> bool:
    """A cast of an input to a dtype of fewer bytes."""
    if node.op != "call_function" or node.target is not CAST:
        return False
    (source,) = operands(node)
    source_dtype, cast_dtype = type_of(source).dtype, type_of(node).dtype
    fewer = (
        source_dtype.is_floating_point and cast_dtype.is_floating_point and cast_dtype.itemsize < source_dtype.itemsize
    )
    return fewer and source.op == "placeholder"


def rounds_stored(node: fx.Node) -> bool:
    """A call that rounds the cast of an input to 8 bits, or finds its largest element, where nothing else reads it."""
    if node.op != "call_function" or node.target not in ROUNDING:
        return False
    source = operands(node)[0]
    while source.target in ROUNDING:
        source = operands(source)[0]
    return narrows(source) and all(user.target in ROUNDING for user in source.users)


def narrow_copies(node: fx.Node) -> list[fx.Node]:
    """The casts through which a parameter is computed with, and what these are rounded to."""
    copies = [user for user in node.users if narrows(user)]
    return [
        *copies,
        *(user for copy in copies for user in copy.users if user.target is QUANTIZE and rounds_stored(user)),
    ]


def gradients(graph: Graph) -> dict[str, fx.Node]:
    """The gradient of each parameter, as the optimizer or the user gets it."""
    returned = zip(graph.outputs, graph.output_values, strict=True)
    return {**{port.name: v for port, v in returned if port.role == "grad"}, **graph.gradients}


def carriers(gradient: fx.Node) -> list[fx.Node]:
    """The calls that carry a gradient from its producer to its reader, last first.

    Each only sums terms, views them or casts them. Without a cast the list is empty.
    """
    calls: list[fx.Node] = []
    todo = [gradient]
    while todo:
        call = producer(todo.pop())[0]
        rule = find_rule(call.target) if call.op == "call_function" else None
        if rule is not None and rule.kind in ("view", "pointwise") and rule_of(call).linear == "joint":
            calls.append(call)
            # What something else reads too is an activation's gradient as well.
            todo += [v for v in operands(call) if all(user is call for user in v.users)]
    return calls if any(call.target is CAST for call in calls) else []


def narrow_gradients(graph: Graph) -> set[fx.Node]:
    """The low-precision values that are only gradients of parameters, or terms of such gradients."""
    narrow_values: set[fx.Node] = set()
    for gradient in gradients(graph).values():
        # Rounded for parameters that are stored in fewer digits.
        narrow_values |= {user for user in gradient.users if user.target is CAST and type_of(user).dtype in HALF}
        for call in carriers(gradient):
            terms = [v for v in operands(call) if all(user is call for user in v.users)]
            narrow_values |= {v for term in terms for v in (term, *_looked_up(term)) if type_of(v).dtype in HALF}
    return narrow_values


def _looked_up(term: fx.Node) -> list[fx.Node]:
    """Of an embedding's gradient, the sum over the batch that it is made of, where positions are the same for all."""
    if term.target is not aten.embedding_dense_backward.default:
        return []
    return [v for v in operands(term)[:1] if v.target is aten.sum.dim_IntList and len(v.users) == 1]
