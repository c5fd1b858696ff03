"""A cache of lowered calls. Layers repeat: calls that differ only in the names of their values are lowered once.

    %a.0 = gelu(%x.0)
    %a.7 = gelu(%x.7)          x.0 and x.7 have one dtype and one layout: the first call's operations, renamed

The key holds everything that a lowering may depend on: the op, the arguments, and of each value its dtype, its layout,
and which of the values before it has the same memory. Literals are compared by their text: to Python 1, 1.0 and True
are equal, and so are the two zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import fx

from shardc.ir.graph import results, type_of
from shardc.passes.fusion.analysis.constant_values import constant_value
from shardc.passes.fusion.analysis.iteration_space import Value
from shardc.passes.fusion.analysis.view_analysis import ViewAnalysis
from shardc.passes.fusion.lowering.lower_op import lower_op
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS, LoweredOp, Temporary

KEYED_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class LoweringCache:
    """Lowers calls, each kind once."""

    def __init__(self, views: ViewAnalysis) -> None:
        self.views = views
        self.entries: dict[Hashable, tuple[LoweredOp | None, list[fx.Node], list[fx.Node | None]]] = {}
        self.kinds: dict[fx.Node, int] = {}  # of values: equal where lowerings find them equal, but for their memory
        self.numbers: dict[Hashable, int] = {}
        self.ops: dict[int, bool] = {}  # by the id of an op, whose own hash is written in Python: has it a lowering?

    def lower(self, node: fx.Node) -> LoweredOp | None:
        """The result of `lower_op`."""
        is_copy, op = node in self.views.copying_views, id(node.target)
        if (has_lowering := self.ops.get(op)) is None:
            has_lowering = self.ops[op] = node.target in LOWERINGS
        if not is_copy and not has_lowering:
            return None
        bases: dict[fx.Node, int] = {}
        results_of_call, kwargs, kinds = results(node), node.kwargs, self.kinds
        key = (
            op,
            is_copy,
            tuple([None if value is None else kinds.get(value) or self.kind(value) for value in results_of_call]),
            tuple([self._argument_key(arg, bases) for arg in node.args]),
            tuple([(name, self._argument_key(arg, bases)) for name, arg in kwargs.items()]) if kwargs else (),
        )
        entry = self.entries.get(key)
        if entry is None:
            first = lower_op(self.views, node)
            self.entries[key] = first, list(bases), results_of_call
            return first
        first, first_bases, first_results = entry
        if first is None:
            return None
        names: dict[Value, Value] = dict(zip(first_bases, bases, strict=True))
        names.update(zip(first_results, results_of_call, strict=True))
        for prim in first.prims:
            if isinstance(prim.out, Temporary):
                names[prim.out] = Temporary(node, prim.out.number)
        return first.renamed(node, names)

    def kind(self, value: fx.Node) -> int:
        """A number that is positive, and the same for values of one dtype and layout."""
        if (kind_number := self.kinds.get(value)) is not None:
            return kind_number
        view, number = self.views.of[value], constant_value(value)
        base = view.base
        is_irregular = base in self.views.irregular
        if base is value and number is None:  # nearly all
            kind: Hashable = (self.views.layouts[value], view.strides, is_irregular)
        else:
            dtype, base_dtype = type_of(value).dtype, type_of(base).dtype
            kind = (view[1:], is_irregular, dtype, base_dtype, None if number is None else repr(number))
        self.kinds[value] = kind_number = self.numbers.setdefault(kind, 1 + len(self.numbers))
        return kind_number

    def _argument_key(self, arg: Any, bases: dict[fx.Node, int]) -> Hashable:
        if type(arg) is fx.Node:
            base, kinds = self.views.of[arg][0], self.kinds
            if base not in bases:
                bases[base] = len(bases)
            return bases[base], kinds.get(arg) or self.kind(arg)
        if isinstance(arg, (list, tuple)):
            return tuple([self._argument_key(item, bases) for item in cast("Sequence[Any]", arg)])
        return repr(arg) if isinstance(arg, KEYED_TYPES) else object()  # equal to nothing
