"""Which values two kernels may each compute, and how exactly the two results must agree.

Two kernels may round one value differently. `1 + tanh(u)` is `2 * sigmoid(2u)` where nothing else reads the tanh
(kernels_triton.transform.strength_reduce), and a*b+c is rounded once or twice as the compiler decides
(launch.options) by the operations around it. Arithmetic sees a rounding error; a discontinuous operation may see
another result:

    h = 1 + tanh(u);  top = amax(h)        one kernel stores top, another recomputes h: eq(h, top) holds nowhere,
    backward          eq(h, top)           and the gradient of top, which no element shares, is lost

So a value that reaches a discontinuous operation is recomputed only if it comes out the same. Otherwise the first
kernel that computes it stores it:

    BITWISE        the value reaches a comparison of two computed values, or a rounding (floor, round, a remainder).
                   Only moves, selections, casts, signs and extremes are recomputed, which round nothing. On the way
                   there, 16-bit values of the graph are rounded in registers too, so that a kernel that computes a
                   value and one that reads it see the same bits.
    SAME_FORMULA   the value is compared with a number, as by ReLU. Sums and products are recomputed as well. They may
                   differ in the last bit: two kernels disagree about the comparison only where the value is that near
                   to the number. What kernels approximate (tanh, exp, quotients, roots) or rewrite is computed once.
    ANY            everything may be recomputed.

An extreme is one of the values that it is taken of, and its difference from that value is 0. So a value that depends on
an extreme, or on another selection of elements, requires BITWISE where it is compared with a number. A product (mm,
attention) ends the requirement: it runs once, and no element of its result ties with an element of another. Infinities
end it too: no rounding makes or removes one.

What recomputation repeats in backward is two values of the graph, but one to a discontinuous operation that sees both,
as where an extreme is kept because it crossed ranks. Where those are not reproducible, both stay calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import cached_property
from typing import Any, cast

from torch import fx

from shardc.ir.graph import op_name, operands, producer, results, type_of
from shardc.passes.fusion.analysis.iteration_space import (
    Prim,
    Read,
    Value,
    contiguous_runs,
    find_space,
    space_constraint,
)
from shardc.passes.fusion.analysis.traffic import PRODUCTS
from shardc.passes.fusion.analysis.view_analysis import ViewAnalysis
from shardc.passes.fusion.lowering.lowered_op import LoweredOp, Temporary

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
ROUNDINGS = {"floor", "ceil", "trunc", "round", "fmod", "remainder", "floordiv", "div_rn"}
INTEGER_ROUNDINGS = {"floor", "ceil", "trunc", "round"}  # of bitwise equal operands, bitwise equal results
EXACT = {"same", "cast", "where", "neg", "abs", "maximum", "minimum", "sign", "uniform", "iota", *INTEGER_ROUNDINGS}
FORMULA_STABLE = {*EXACT, "add", "sub", "mul", "square", "fma"}
DISCONTINUOUS = {*COMPARISONS, *ROUNDINGS, "sign", "cast"}
EXTREMES = {"max", "min", "rmax", "rmin", "cmax", "cmin"}
# Calls whose results are elements of their operands.
SELECTIONS = {
    *("kthvalue", "median", "nanmedian", "mode", "sort", "topk", "cummax", "cummin", "gather", "index", "take"),
    *("amax", "amin", "aminmax", "max", "min", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"),
}


class Reproducibility(IntEnum):
    """How exactly two computations of a value must agree."""

    ANY = 0
    SAME_FORMULA = 1
    BITWISE = 2


class NumericSensitivity:
    """The reproducibility that is required of every value of a body, and of the temporaries of its kernels."""

    def __init__(self, views: ViewAnalysis, calls: Sequence[fx.Node], lowered: Mapping[int, LoweredOp]) -> None:
        self.views, self.calls, self.lowered = views, calls, lowered
        self.required: dict[Value, Reproducibility] = {}
        required = self.required
        for i in reversed(range(len(calls))):
            if i in lowered:
                for prim in reversed(lowered[i].prims):
                    if prim.op in DISCONTINUOUS or prim.out in required:
                        self._propagate(prim)
            elif (
                required
                and _is_transparent(calls[i])
                and any(self.required.get(base) == Reproducibility.BITWISE for base in self._bases_written(calls[i]))
            ):
                self._require((views.of[value].base for value in operands(calls[i])), Reproducibility.BITWISE)

    # These are first read in `__init__`, or never: later the caller changes `lowered`.
    @cached_property
    def floats(self) -> set[Value]:
        """The results that are floats."""
        return {p.out for op in self.lowered.values() for p in op.prims if p.dtype.is_floating_point}

    def repeatable(self, prims: Iterable[Prim]) -> bool:
        """May another kernel compute these operations too?"""
        required = self.required
        if required:
            for prim in prims:
                if prim.out in required and not self._is_reproducible(prim):
                    return False
        return True

    @cached_property
    def bitwise_calls(self) -> set[fx.Node]:
        """The calls with results, or temporaries, that must be bitwise equal; and such inputs."""
        bitwise = [value for value, required in self.required.items() if required == Reproducibility.BITWISE]
        return {v.node if isinstance(v, Temporary) else producer(cast("fx.Node", v))[0] for v in bitwise}

    def with_eager_rounding(self, op: LoweredOp) -> LoweredOp | None:
        """The call, with 16-bit values of the graph rounded on their way to a discontinuous operation. None where the
        result has no iteration space."""
        if op.node not in self.bitwise_calls:
            return op
        prims: list[Prim] = []
        number = 1 + max((p.out.number for p in op.prims if isinstance(p.out, Temporary)), default=-1)
        for prim in op.prims:
            args = list(prim.args)
            if self.required.get(prim.out) == Reproducibility.BITWISE and prim.op != "cat":
                for k, arg in enumerate(args):
                    if isinstance(arg, Read) and _is_rounded_value(arg.value):
                        rounded = Temporary(op.node, number)
                        number += 1
                        prims.append(Prim(rounded, "cast", (arg,), prim.size, type_of(arg.value).dtype))  # type: ignore[arg-type]
                        args[k] = Read(rounded, contiguous_runs(prim.size))
            prims.append(prim if args == list(prim.args) else replace(prim, args=tuple(args)))
        if len(prims) == len(op.prims):
            return op
        constraint = space_constraint(prims)
        if constraint is None or find_space(prims, constraint) is None:
            return None
        return LoweredOp(op.node, tuple(prims), constraint)

    def computed_twice(self) -> set[int]:
        """Calls that stand in the graph twice, by recomputation or as written, and whose results must be bitwise equal.
        Two kernels would compute them differently, so they stay calls."""
        if Reproducibility.BITWISE not in self.required.values():
            return set()
        sensitive = {i for i, op in self.lowered.items() if not self.repeatable(op.prims)}
        if not sensitive:
            return set()
        first: dict[fx.Node, fx.Node] = {}

        def key(arg: Any) -> Hashable:
            if type(arg) is fx.Node:
                return first.get(arg, arg)
            if isinstance(arg, (list, tuple)):
                return tuple([key(item) for item in cast("Sequence[Any]", arg)])
            return repr(arg)

        candidates: dict[Hashable, list[int]] = {}  # calls of one op on the same values: few are equal in all else
        calls_by_key: dict[Hashable, list[int]] = {}

        def add(i: int) -> list[int]:
            node = self.calls[i]
            duplicates = calls_by_key.setdefault((node.target, key(node.args), key([*node.kwargs.items()])), [])
            duplicates.append(i)
            return duplicates

        for i, node in enumerate(self.calls):
            read = node.all_input_nodes
            candidate = (id(node.target), *([first.get(value, value) for value in read] if first else read))
            others = candidates.setdefault(candidate, [])
            others.append(i)
            if len(others) == 1:
                continue
            if len(others) == 2:
                add(others[0])
            duplicates = add(i)
            if len(duplicates) == 1:
                continue
            for value, original in zip(results(node), results(self.calls[duplicates[0]]), strict=False):
                if value is not None and original is not None:
                    first[value] = original
        repeated = {i for duplicates in calls_by_key.values() if len(duplicates) > 1 for i in duplicates}
        return repeated & sensitive

    def _is_reproducible(self, prim: Prim) -> bool:
        required = self.required.get(prim.out)
        if not required or not prim.dtype.is_floating_point:
            return True
        return prim.op in (EXACT if required == Reproducibility.BITWISE else FORMULA_STABLE)

    @cached_property
    def selected(self) -> set[Value]:
        """The values that depend on a selection of elements."""
        selected: set[Value] = set()
        for i, node in enumerate(self.calls):
            if i in self.lowered:
                for prim in self.lowered[i].prims:
                    if prim.op in EXTREMES:
                        selected.add(prim.out)
                    elif selected:
                        for read in prim.reads:
                            if read.value in selected:
                                selected.add(prim.out)
                                break
            elif _is_transparent(node):
                bases = (self.views.of[value].base for value in operands(node))
                if op_name(node.target).partition(".")[0] in SELECTIONS or any(base in selected for base in bases):
                    selected.update(self._bases_written(node))
        return selected

    def _bases_written(self, node: fx.Node) -> set[fx.Node]:
        return {self.views.of[value].base for value in results(node) if value is not None}

    def _propagate(self, prim: Prim) -> None:
        """Add what an operation requires of its operands: because it is discontinuous, or because its result reaches an
        operation that is. A reduction is computed once, so that only BITWISE passes through it: its result may be
        compared with another computation of its operand."""
        if prim.op in DISCONTINUOUS:
            observed = [read.value for read in prim.reads if self._is_float(read.value)]
            observation = self._observation(prim, observed) if observed else None
            if observation is not None:
                self._require(observed, observation)
        if prim.op in COMPARISONS:
            return
        required = self.required.get(prim.out)
        if required is not None and (required == Reproducibility.BITWISE or prim.over == "point"):
            self._require((read.value for read in prim.reads), required)

    def _observation(self, prim: Prim, observed: Collection[Value]) -> Reproducibility | None:
        """What a discontinuous operation requires of its float operands."""
        to_bool = prim.op == "cast" and not prim.dtype.is_floating_point
        if prim.op in ROUNDINGS:
            return Reproducibility.BITWISE
        if prim.op not in COMPARISONS and prim.op != "sign" and not to_bool:
            return None
        numbers = [arg for arg in prim.args if not isinstance(arg, Read)]
        if any(isinstance(n, float) and math.isinf(n) for n in numbers):
            return None
        if len(prim.reads) > 1 or (observed and not self.selected.isdisjoint(observed)):
            return Reproducibility.BITWISE
        return Reproducibility.SAME_FORMULA

    def _is_float(self, value: Value) -> bool:
        return value in self.floats or (isinstance(value, fx.Node) and type_of(value).dtype.is_floating_point)

    def _require(self, values: Iterable[Value], required: Reproducibility) -> None:
        for value in values:
            self.required[value] = max(self.required.get(value, Reproducibility.ANY), required)


def _is_transparent(node: fx.Node) -> bool:
    """Does a requirement on its results pass to its operands?"""
    return op_name(node.target) not in PRODUCTS


def _is_rounded_value(value: Value) -> bool:
    """A 16-bit value of the graph that a kernel may hold in registers without having rounded it."""
    if not isinstance(value, fx.Node) or value.op == "placeholder":
        return False
    dtype = type_of(value).dtype
    return dtype.is_floating_point and dtype.itemsize == 2
