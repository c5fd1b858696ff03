"""cheaper_calls: the same values by calls that go through less memory.

    %e = expand(%s, [4, 128, 256])           %d.narrow = div(%s, 256)                [4, 128, 1]
    %d = div(%e, 256)                  ->    %d = expand(%d.narrow, [4, 128, 256])   a view

    %p = pow(%x, 1.0)                  ->    %x

    %a = slice_backward(%g, 0, 32)
    %b = slice_backward(%h, 32, 64)
    %c = add(%a, %b)                   ->    %c = cat([%g, %h])

The backward passes that autograd writes have such calls: of means, of squares, and of slices that are swapped, as in
rotary positions. A kernel computes them on its way, so that this is for programs without them.

No rank holds more at any time. A call is replaced only where what then lives longer (%x as long as %p did, %g and %h as
long as %a and %b) has no more bytes than what goes, its storage counted whole: a slice of a larger value stays, if it
would keep that. What a collective brings is awaited where it was; what a step writes over is read when it was. And
nothing is made twice: where the graph has the number of the narrow value already, the wide one stays as it is.

Each reader gives its result in the layout that it had before, so that sums behind it add in the same order, and only
elementwise calls and cuts of shards read an expanded value: others might copy it.

Needs a localized body, or a part of one. Ensures the same values under the same names, bit by bit but for the sign of
zeros that slices are added to. So sums of slices are joined in backward alone, where no copy of one is recomputed (in
another stage's graph it might be joined otherwise), and those of both halves of a batch are, or none is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, op_name, producer, type_of, update
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.local import shard_slice, slice_blocks
from shardc.ir.schema import given
from shardc.ir.storages import Storage, layouts, lie_alike, note_layout
from shardc.ir.types import TensorType
from shardc.passes.base import Pass, firsts

aten = torch.ops.aten

ELEMENTWISE = {
    aten.neg.default,
    *(
        getattr(getattr(aten, name), overload)
        for name in ("add", "sub", "mul", "div")
        for overload in ("Tensor", "Scalar")
    ),
}
CAT, EXPAND = aten.cat.default, aten.expand.default
POWER, SLICE_BACKWARD = aten.pow.Tensor_Scalar, aten.slice_backward.default
READERS = ELEMENTWISE | {shard_slice, slice_blocks}


@dataclass(frozen=True)
class CheaperCalls(Pass):
    """Replace such calls, if `enabled`."""

    enabled: bool = True

    def run(self, graph: Graph) -> Graph:
        if not self.enabled or not any(map(_is_dear, graph.calls())):
            return graph
        rewriting = _Rewriting(graph.copy())
        return rewriting.graph if rewriting.run() else graph


def _is_dear(call: fx.Node) -> bool:
    return _is_first_power(call) or _is_of_expanded(call) or _slices(call) is not None


# ---------------------------------------------------------------------- what may be replaced
def _is_plain(value: fx.Node) -> bool:
    """Is a value neither pending nor ragged?"""
    type = type_of(value)
    return type == TensorType(type.dtype, type.dims)


def _is_read_by_element(value: fx.Node) -> bool:
    return bool(value.users) and all(user.target in READERS for user in value.users)


def _is_first_power(call: fx.Node) -> bool:
    if call.target is not POWER or call.kwargs or call.args[1] != 1 or not _is_read_by_element(call):
        return False
    return isinstance(call.args[0], fx.Node) and type_of(call.args[0]) == type_of(call)


def _is_of_expanded(call: fx.Node) -> bool:
    """Does a call compute each element of an expanded value, with a number or alone?"""
    if call.target not in ELEMENTWISE or call.kwargs or any(isinstance(arg, fx.Node) for arg in call.args[1:]):
        return False
    expanded = call.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not EXPAND or expanded.kwargs:
        return False
    if not _is_read_by_element(call):
        return False
    source = expanded.args[0]
    assert isinstance(source, fx.Node)
    if not all(map(_is_plain, (source, expanded, call))) or type_of(expanded).shape != type_of(call).shape:
        return False
    few, many = type_of(source).dims, type_of(expanded).dims
    new = len(many) - len(few)  # dims
    grown = [dim for k, dim in enumerate(many) if k < new or few[k - new] != dim]
    return bool(grown) and not any(atom.axes for dim in grown for atom in dim)


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


# ---------------------------------------------------------------------- replacing it
class _Rewriting:
    """A graph that is changed; how its values lie in memory; and the inputs that a step may write over."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storage_of, self.operand_of, _ = layouts(graph)
        roles = {node: port.role for port, node in zip(graph.inputs, graph.placeholders, strict=True)}
        self.written = {node for node, role in roles.items() if role in ("param", "state", "buffer", "sum")}

    def run(self) -> bool:
        """Replace the calls that may be. Returns whether there were any."""
        replaced = self._join_slices()
        for call in list(self.graph.calls()):
            if _is_first_power(call):
                replaced |= self._take_base(call)
            elif _is_of_expanded(call):
                replaced |= self._expand_later(call)
        self.graph.erase_dead()
        return replaced

    def _may_live_longer(self, value: fx.Node, bytes: int) -> bool:
        """May a value be read later, while so many bytes fewer are held?"""
        storage = self.storage_of[value]
        if producer(value)[0].target in COLLECTIVES or storage.value in self.written:
            return False
        return storage.value.op == "placeholder" or storage.bytes <= bytes

    def _take_base(self, power: fx.Node) -> bool:
        base, operand_of = power.args[0], self.operand_of
        assert isinstance(base, fx.Node)
        if operand_of[base] is not operand_of[power] or not self._may_live_longer(base, operand_of[power].bytes):
            return False
        self.graph.replace_value(power, base)
        return True

    def _expand_later(self, call: fx.Node) -> bool:
        graph, about, (expanded, *rest) = self.graph, info(call), call.args
        assert isinstance(expanded, fx.Node)
        source, sizes = expanded.args
        assert isinstance(source, fx.Node)
        is_awaited_later = producer(source)[0].target in COLLECTIVES and expanded.next is not call
        if is_awaited_later or any(_is_alike(user, call) for user in source.users):
            return False
        type, split = TensorType(type_of(call).dtype, type_of(source).dims), about.assignment
        with graph.fx.inserting_before(call):
            name = f"{about.name}.narrow"
            small = graph.call(call.target, (source, *rest), like=call, type=type, name=name, assignment=split)
            args = (small, sizes)
            wide = graph.call(EXPAND, args, like=call, type=type_of(call), assignment=split, origin=about.origin)
        for value in (small, wide):
            note_layout(value, self.operand_of, graph.mesh)
        if not all(lie_alike(user, call, self.operand_of[wide], self.operand_of) for user in call.users):
            for value in (wide, small):
                graph.fx.erase_node(value)
            return False
        self._take_name(call, wide)
        return True

    def _join_slices(self) -> bool:
        sums = self.graph.calls_of(aten.add.Tensor)
        first, joined = firsts(sums), {call: self._joined(call) for call in sums}
        refused = {first[call] for call, cat in joined.items() if cat is None}
        for call, cat in joined.items():
            if cat is not None and first[call] in refused:
                self.graph.fx.erase_node(cat)
            elif cat is not None:
                self._take_name(call, cat)
        return any(first[call] not in refused for call in sums)

    def _joined(self, call: fx.Node) -> fx.Node | None:
        """What a sum of slices is, joined; None where it may not be, for all that it does itself."""
        parts, about, operand = _slices(call), info(call), self.operand_of[call]
        if parts is None or about.phase != "bwd" or about.is_recomputed:
            return None
        if any(user.op == "output" or user.target is PACK for user in call.users):
            return None  # where it is to lie, a sum is written at once; this would be copied there
        gradients, dim = [given(part)["grad_output"] for part in parts], given(parts[0])["dim"]
        if not all(self._may_live_longer(gradient, operand.bytes) for gradient in gradients):
            return None
        split = tuple((name.replace("grad_output", "tensors0_", 1), axes) for name, axes in info(parts[0]).assignment)
        with self.graph.fx.inserting_before(call):
            args, type = (gradients, dim), type_of(call)
            cat = self.graph.call(CAT, args, like=call, type=type, assignment=split, origin=about.origin)
        note_layout(cat, self.operand_of, self.graph.mesh)
        self.storage_of[cat] = Storage(cat, operand.bytes)
        if self.operand_of[cat] is not operand:
            self.graph.fx.erase_node(cat)
            return None
        return cat

    def _take_name(self, old: fx.Node, new: fx.Node) -> None:
        name = info(old).name
        self.graph.replace_value(old, new)
        update(old, name=self.graph.unique(f"{name}.before"))
        update(new, name=name)


def _is_alike(user: fx.Node, call: fx.Node) -> bool:
    """Does a call compute of the narrow value what another one computes of the expanded one?"""
    same_op = op_name(user.target).partition(".")[0] == op_name(call.target).partition(".")[0]
    return same_op and user.args[1:] == call.args[1:] and user.kwargs == call.kwargs
