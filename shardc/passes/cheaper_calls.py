"""cheaper_calls: the same values by calls that go through less memory.

    %e = expand(%s, [4, 128, 256])           %s.div = div(%s, 256)                   [4, 128, 1]
    %d = div(%e, 256)                  ->    %d = expand(%s.div, [4, 128, 256])      a view

    %p = pow(%x, 1.0)                  ->    %x

    %a = slice_backward(%g, 0, 32)
    %b = slice_backward(%h, 32, 64)
    %c = add(%a, %b)                   ->    %c = cat([%g, %h])

The backward passes that autograd writes have such calls: of means, of squares, and of slices that are swapped, as in
rotary positions. A kernel computes them on its way, so that this is for programs without them. What reads an expanded
value must be elementwise: another op might copy it.

Needs a localized body, or a part of one. Ensures the same values under the same names, bit by bit but for the sign of
zeros that slices are added to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, type_of, update
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Pass

aten = torch.ops.aten

BY_A_NUMBER = tuple(
    getattr(getattr(aten, name), overload) for name in ("add", "sub", "mul", "div") for overload in ("Tensor", "Scalar")
)
EXPAND, POWER, SLICE_BACKWARD = aten.expand.default, aten.pow.Tensor_Scalar, aten.slice_backward.default


@dataclass(frozen=True)
class CheaperCalls(Pass):
    """Replace such calls, if `enabled`."""

    enabled: bool = True

    def run(self, graph: Graph) -> Graph:
        if not self.enabled or not any(_is_dear(call) for call in graph.calls()):
            return graph
        graph = graph.copy()
        for call in list(graph.calls()):
            if _is_first_power(call):
                graph.replace_value(call, call.args[0])  # type: ignore[arg-type]
            elif _is_of_expanded(call):
                _expand_later(graph, call)
            elif (parts := _slices(call)) is not None:
                _join(graph, call, *parts)
        graph.erase_dead()
        return graph


def _is_dear(call: fx.Node) -> bool:
    return _is_first_power(call) or _is_of_expanded(call) or _slices(call) is not None


def _is_plain(value: fx.Node) -> bool:
    """Is a value neither pending nor ragged?"""
    type = type_of(value)
    return type == TensorType(type.dtype, type.dims)


def _is_first_power(call: fx.Node) -> bool:
    if call.target is not POWER or call.args[1] != 1 or not isinstance(call.args[0], fx.Node):
        return False
    returned = any(user.op == "output" for user in call.users)
    return not returned and type_of(call.args[0]) == type_of(call)


def _is_of_expanded(call: fx.Node) -> bool:
    """Does a call compute each element of an expanded value, with a number or alone?"""
    if call.kwargs or not call.users or not all(_is_elementwise(user) for user in call.users):
        return False
    by_number = call.target in BY_A_NUMBER and not isinstance(call.args[1], fx.Node)
    if not (by_number or call.target is aten.neg.default):
        return False
    expanded = call.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not EXPAND or expanded.kwargs:
        return False
    source = expanded.args[0]
    assert isinstance(source, fx.Node)
    if not all(map(_is_plain, (source, expanded, call))) or type_of(expanded).shape != type_of(call).shape:
        return False
    few, many = type_of(source).dims, type_of(expanded).dims
    new = len(many) - len(few)  # dims
    grown = [dim for k, dim in enumerate(many) if k < new or few[k - new] != dim]
    return bool(grown) and not any(atom.axes for dim in grown for atom in dim)


def _is_elementwise(call: fx.Node) -> bool:
    return call.target in BY_A_NUMBER or call.target is aten.neg.default


def _expand_later(graph: Graph, call: fx.Node) -> None:
    expanded, *rest = call.args
    assert isinstance(expanded, fx.Node)
    source, sizes = expanded.args
    assert isinstance(source, fx.Node)
    about, type = info(call), type_of(call)
    narrow = TensorType(type.dtype, type_of(source).dims)
    with graph.fx.inserting_before(call):
        small = graph.call(
            call.target,
            (source, *rest),
            like=call,
            type=narrow,
            name=f"{about.name}.narrow",
            assignment=about.assignment,
        )
        wide = graph.call(EXPAND, (small, sizes), like=call, type=type, assignment=about.assignment)
    _take_name(graph, call, wide)


def _slices(call: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two `slice_backward`s that a sum is of, in order, if each element is of one of them."""
    if call.target is not aten.add.Tensor or call.kwargs or len(call.args) != 2:
        return None
    parts = [part for part in call.args if isinstance(part, fx.Node) and part.target is SLICE_BACKWARD]
    if len(parts) != 2 or parts[0] is parts[1] or any(len(part.users) != 1 for part in parts):
        return None
    type, (first, second) = type_of(call), sorted(parts, key=_start)
    if not all(_is_plain(value) and type_of(value) == type for value in (call, first, second)):
        return None
    a, b = given(first), given(second)
    dims = len(type.shape)
    dim, size = a["dim"] % dims, a["input_sizes"][a["dim"]]
    if dim != b["dim"] % dims or a["step"] != 1 or b["step"] != 1 or any(atom.axes for atom in type.dims[dim]):
        return None
    covers = a["start"] == 0 and 0 < a["end"] == b["start"] < size <= b["end"]
    gradients = (a["grad_output"], b["grad_output"])
    same = all(_is_plain(gradient) and type_of(gradient).dtype == type.dtype for gradient in gradients)
    return (first, second) if covers and same else None


def _start(part: fx.Node) -> Any:
    return given(part)["start"]


def _join(graph: Graph, call: fx.Node, first: fx.Node, second: fx.Node) -> None:
    a, b = given(first), given(second)
    split = tuple((name.replace("grad_output", "tensors0_", 1), axes) for name, axes in info(first).assignment)
    args = [a["grad_output"], b["grad_output"]], a["dim"]
    with graph.fx.inserting_before(call):
        joined = graph.call(aten.cat.default, args, like=call, type=type_of(call), assignment=split)
    _take_name(graph, call, joined)


def _take_name(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    name = info(old).name
    graph.replace_value(old, new)
    update(old, name=graph.unique(f"{name}.before"))
    update(new, name=name)
