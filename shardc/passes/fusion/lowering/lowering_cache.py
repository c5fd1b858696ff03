"""A cache of lowered calls. Layers repeat: calls that differ only in the names of their values are lowered once.

    %a.0 = gelu(%x.0)
    %a.7 = gelu(%x.7)          x.0 and x.7 have one dtype and one layout: the first call's operations, renamed

The key holds everything that a lowering may depend on: the op, the arguments, and of each value its dtype, its layout,
and which of the values before it has the same memory. Literals are compared by their text: to Python 1, 1.0 and True
are equal, and so are the two zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from shardc.ir.graph import results, type_of
from shardc.passes.fusion.analysis.constant_values import constant_value
from shardc.passes.fusion.analysis.iteration_space import Prim, Read, Value
from shardc.passes.fusion.analysis.view_analysis import ViewAnalysis
from shardc.passes.fusion.lowering.lower_op import lower_op
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS, LoweredOp, Temporary

KEYED_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class LoweringCache:
    """Lowers calls, each kind once."""

    def __init__(self, views: ViewAnalysis) -> None:
        self.views = views
        self.known: dict[Hashable, tuple[LoweredOp | None, list[fx.Node], list[fx.Node | None]]] = {}

    def lower(self, node: fx.Node) -> LoweredOp | None:
        """The result of `lower_op`."""
        if node.target not in LOWERINGS and node not in self.views.copying_views:
            return None
        bases: dict[fx.Node, int] = {}
        results_of_call = results(node)
        key = (
            node.target,
            node in self.views.copying_views,
            tuple([self._result_key(value) for value in results_of_call]),
            self._argument_key(node.args, bases),
            tuple([(name, self._argument_key(arg, bases)) for name, arg in node.kwargs.items()]),
        )
        known = self.known.get(key)
        if known is None:
            first = lower_op(self.views, node)
            self.known[key] = first, list(bases), results_of_call
            return first
        first, first_bases, first_results = known
        if first is None:
            return None
        names: dict[Value, Value] = {
            **dict(zip(first_bases, bases, strict=True)),
            **dict(zip(first_results, results_of_call, strict=True)),
        }
        return LoweredOp(node, tuple([_renamed(prim, node, names) for prim in first.prims]), first.constraint)

    def _result_key(self, value: fx.Node | None) -> Hashable:
        return None if value is None else (type_of(value).dtype, self.views.of[value].shape)

    def _argument_key(self, arg: Any, bases: dict[fx.Node, int]) -> Hashable:
        if isinstance(arg, fx.Node):
            base, *layout = self.views.of[arg]
            position = bases.setdefault(base, len(bases))
            number = repr(constant_value(arg))
            return (position, *layout, self.views.readable(arg), type_of(arg).dtype, type_of(base).dtype, number)
        if isinstance(arg, (list, tuple)):
            return tuple([self._argument_key(item, bases) for item in cast("Sequence[Any]", arg)])
        return repr(arg) if isinstance(arg, KEYED_TYPES) else object()  # equal to nothing


def _renamed(prim: Prim, node: fx.Node, names: Mapping[Value, Value]) -> Prim:
    def renamed(value: Value) -> Value:
        return Temporary(node, value.number) if isinstance(value, Temporary) else names[value]

    args = tuple([Read(renamed(a.value), a.runs, a.offset) if isinstance(a, Read) else a for a in prim.args])
    about = (prim.size, prim.dtype, prim.over, prim.cols, prim.seed, prim.index)
    return Prim(renamed(prim.out), prim.op, args, *about)
