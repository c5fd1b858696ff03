"""Layers repeat: calls that differ in names alone are lowered once.

    %a.0 = gelu(%x.0)
    %a.7 = gelu(%x.7)          x.0 and x.7 have one dtype, and lie alike: what the first is made of, with other names

Alike is what agrees in all that decides: ops, arguments, and of each value its dtype, how it lies, and which of those
met before it is. Arguments are told apart by their words: to Python 1, 1.0 and True are equal, and so are two zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from shardc.ir.graph import results, type_of
from shardc.passes.fuse.literals import constant
from shardc.passes.fuse.memory_of import Memories
from shardc.passes.fuse.spaces import Prim, Read, Value
from shardc.passes.fuse.unit_of import unit
from shardc.passes.fuse.units import LOWERINGS, Inner, Unit

WORDS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Lowered:
    """Calls as parts of kernels."""

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.known: dict[Hashable, tuple[Unit | None, list[fx.Node], list[fx.Node | None]]] = {}

    def of(self, node: fx.Node) -> Unit | None:
        """As `unit` has it."""
        if node.target not in LOWERINGS and node not in self.memories.copies:
            return None
        bases: dict[fx.Node, int] = {}
        made = results(node)
        key = (
            node.target,
            node in self.memories.copies,
            tuple([self._result(value) for value in made]),
            self._argument(node.args, bases),
            tuple([(name, self._argument(arg, bases)) for name, arg in node.kwargs.items()]),
        )
        known = self.known.get(key)
        if known is None:
            first = unit(self.memories, node)
            self.known[key] = first, list(bases), made
            return first
        first, theirs, yielded = known
        if first is None:
            return None
        names: dict[Value, Value] = {**dict(zip(theirs, bases, strict=True)), **dict(zip(yielded, made, strict=True))}
        return Unit(node, tuple([_renamed(prim, node, names) for prim in first.prims]), first.demand)

    def _result(self, value: fx.Node | None) -> Hashable:
        return None if value is None else (type_of(value).dtype, self.memories.of[value].shape)

    def _argument(self, arg: Any, bases: dict[fx.Node, int]) -> Hashable:
        if isinstance(arg, fx.Node):
            base, *lies = self.memories.of[arg]
            at = bases.setdefault(base, len(bases))
            number = repr(constant(arg))
            return (at, *lies, self.memories.readable(arg), type_of(arg).dtype, type_of(base).dtype, number)
        if isinstance(arg, (list, tuple)):
            return tuple([self._argument(item, bases) for item in cast("Sequence[Any]", arg)])
        return repr(arg) if isinstance(arg, WORDS) else object()  # alike to nothing


def _renamed(prim: Prim, node: fx.Node, names: Mapping[Value, Value]) -> Prim:
    def called(value: Value) -> Value:
        return Inner(node, value.at) if isinstance(value, Inner) else names[value]

    args = tuple([Read(called(a.value), a.blocks, a.offset) if isinstance(a, Read) else a for a in prim.args])
    about = (prim.size, prim.dtype, prim.over, prim.cols, prim.seed, prim.index)
    return Prim(called(prim.out), prim.op, args, *about)
