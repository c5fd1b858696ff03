"""Which values two kernels may each make: those that no jump tells apart, and those that come out equal to the bit.

Made in two kernels, a value need not be one. `1 + tanh(u)` is `2 * sigmoid(2u)` where nothing else reads the tanh
(kernels_triton.fused.shorter), and a*b+c is rounded once or twice as the compiler sees fit (launch.options), by what
stands around it. To arithmetic that is a rounding; to what jumps it is another result:

    h = 1 + tanh(u);  top = amax(h)        one kernel stores top, another makes h again: eq(h, top) holds nowhere,
    backward          eq(h, top)           and the gradient of top, shared by none, is lost

So of what reaches a jump, made again is only what comes out as it did; the rest is stored by who makes it first:

    SAME      it reaches a comparison of two computed values, or what cuts off (floor, round, a remainder): moves,
              choices, casts, signs and extremes, which round nothing. On that way 16-bit values of the graph are
              rounded in registers too, so that who computes one and who reads it see the same.
    FORMULA   it is compared with a number, as by ReLU: sums and products as well. They may differ in the last bit, by
              which two kernels may see a value on two sides of that number only where it is as near to it; what
              kernels approximate (tanh, exp, quotients, roots), or write in another way, is made once.
    FREE      anything.

An extreme is one of its values, and its difference from that is 0: what is compared with a number, and comes of an
extreme or another choice of elements, is SAME. A product (mm, attention) ends this: it is run once, and no element of
its result ties with one of another. So do infinities: no rounding makes or mends one.

What recomputation runs again in backward are two values of the graph, and one to a jump that sees both, as where an
extreme is kept because it crossed ranks: of those that are not repeatable in this sense, both stay calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import cached_property

from torch import fx

from shardc.ir.graph import op_name, operands, results, type_of
from shardc.passes.fuse.memory_of import Memories
from shardc.passes.fuse.spaces import Prim, Read, Value, demand, space, whole
from shardc.passes.fuse.traffic import PRODUCTS
from shardc.passes.fuse.units import Inner, Unit

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
CUTS = {"floor", "ceil", "trunc", "round", "fmod", "remainder", "floordiv", "div_rn"}
WHOLE = {"floor", "ceil", "trunc", "round"}  # of equal bits, equal bits
EXACT = {"same", "cast", "where", "neg", "abs", "maximum", "minimum", "sign", "uniform", "iota", *WHOLE}
PLAIN = {*EXACT, "add", "sub", "mul", "square", "fma"}
MAY_JUMP = {*COMPARISONS, *CUTS, "sign", "cast"}
EXTREMES = {"max", "min", "rmax", "rmin", "cmax", "cmin"}
# Calls whose results are elements of what they read.
PICKS = {
    *("kthvalue", "median", "nanmedian", "mode", "sort", "topk", "cummax", "cummin", "gather", "index", "take"),
    *("amax", "amin", "aminmax", "max", "min", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"),
}


class Bits(IntEnum):
    """How alike two makings of a value must be."""

    FREE = 0
    FORMULA = 1
    SAME = 2


class Jumps:
    """Of every value of a body, and of those that only its kernels know, how alike two makings of it must be."""

    def __init__(self, memories: Memories, calls: Sequence[fx.Node], units: Mapping[int, Unit]) -> None:
        self.memories, self.calls, self.units = memories, calls, units
        self.bits: dict[Value, Bits] = {}
        self.picked = self._picked()
        for at in reversed(range(len(calls))):
            if at in units:
                for prim in reversed(units[at].prims):
                    self._seen_by(prim)
            elif _moves(calls[at]) and any(self.bits.get(base) == Bits.SAME for base in self._made(calls[at])):
                self._raise((memories.of[value].base for value in operands(calls[at])), Bits.SAME)

    @cached_property
    def floats(self) -> set[Value]:
        """As long as the units are those that it was made of: it is asked for then, or never."""
        return {p.out for one in self.units.values() for p in one.prims if p.dtype.is_floating_point}

    def repeatable(self, prims: Iterable[Prim]) -> bool:
        """May another kernel do these operations too?"""
        return all(self._allows(prim) for prim in prims)

    def rounded(self, one: Unit) -> Unit | None:
        """The unit, 16-bit values of the graph rounded on their way to a jump; None where no space has that."""
        if all(self.bits.get(prim.out) != Bits.SAME for prim in one.prims):
            return one
        prims: list[Prim] = []
        at = 1 + max((p.out.at for p in one.prims if isinstance(p.out, Inner)), default=-1)
        for prim in one.prims:
            args = list(prim.args)
            if self.bits.get(prim.out) == Bits.SAME and prim.op != "cat":
                for k, arg in enumerate(args):
                    if isinstance(arg, Read) and _narrow(arg.value):
                        made = Inner(one.node, at)
                        at += 1
                        prims.append(Prim(made, "cast", (arg,), prim.size, type_of(arg.value).dtype))  # type: ignore[arg-type]
                        args[k] = Read(made, whole(prim.size))
            prims.append(prim if args == list(prim.args) else replace(prim, args=tuple(args)))
        if len(prims) == len(one.prims):
            return one
        wanted = demand(prims)
        return None if wanted is None or space(prims, wanted) is None else Unit(one.node, tuple(prims), wanted)

    def run_twice(self) -> set[int]:
        """Calls that recomputation has run again, or that are written twice, and whose results may differ in no bit:
        where each time is another kernel's, they would. They stay calls."""
        told = {at for at, one in self.units.items() if not self.repeatable(one.prims)}
        if not told or Bits.SAME not in self.bits.values():
            return set()
        first: dict[fx.Node, fx.Node] = {}
        same: dict[str, list[int]] = {}
        for at, node in enumerate(self.calls):
            given = (node.args, node.kwargs)
            given = fx.map_arg(given, lambda n: first.get(n, n)) if first else given
            twins = same.setdefault(f"{node.target} {given}", [])
            twins.append(at)
            if len(twins) == 1:
                continue
            for value, before in zip(results(node), results(self.calls[twins[0]]), strict=False):
                if value is not None and before is not None:
                    first[value] = before
        several = {at for twins in same.values() if len(twins) > 1 for at in twins}
        return several & told

    def _allows(self, prim: Prim) -> bool:
        bits = self.bits.get(prim.out)
        if not bits or not prim.dtype.is_floating_point:
            return True
        return prim.op in (EXACT if bits == Bits.SAME else PLAIN)

    def _picked(self) -> set[Value]:
        """What comes of a choice of elements."""
        found: set[Value] = set()
        for at, node in enumerate(self.calls):
            if at in self.units:
                for prim in self.units[at].prims:
                    if prim.op in EXTREMES or (found and not found.isdisjoint([r.value for r in prim.reads])):
                        found.add(prim.out)
            elif _moves(node):
                bases = (self.memories.of[value].base for value in operands(node))
                if op_name(node.target).partition(".")[0] in PICKS or any(base in found for base in bases):
                    found.update(self._made(node))
        return found

    def _made(self, node: fx.Node) -> set[fx.Node]:
        return {self.memories.of[value].base for value in results(node) if value is not None}

    def _seen_by(self, prim: Prim) -> None:
        """What an operation asks of what it reads: as a jump, and as what reaches one. Through a reduction, which is
        made once, only what is compared with another making of its operand is reached."""
        jump = self._jump(prim)
        if jump is not None:
            self._raise((read.value for read in prim.reads if self._float(read.value)), jump)
        if prim.op in COMPARISONS:
            return
        bits = self.bits.get(prim.out)
        if bits is not None and (bits == Bits.SAME or prim.over == "point"):
            self._raise((read.value for read in prim.reads), bits)

    def _jump(self, prim: Prim) -> Bits | None:
        """What it asks of floats, if it jumps."""
        if prim.op not in MAY_JUMP:
            return None
        to_bool = prim.op == "cast" and not prim.dtype.is_floating_point
        if prim.op in CUTS:
            return Bits.SAME
        if prim.op not in COMPARISONS and prim.op != "sign" and not to_bool:
            return None
        numbers = [arg for arg in prim.args if not isinstance(arg, Read)]
        if any(isinstance(n, float) and math.isinf(n) for n in numbers):
            return None
        picked = any(read.value in self.picked for read in prim.reads)
        return Bits.SAME if picked or len(prim.reads) > 1 else Bits.FORMULA

    def _float(self, value: Value) -> bool:
        return value in self.floats or (isinstance(value, fx.Node) and type_of(value).dtype.is_floating_point)

    def _raise(self, values: Iterable[Value], bits: Bits) -> None:
        for value in values:
            self.bits[value] = max(self.bits.get(value, Bits.FREE), bits)


def _moves(node: fx.Node) -> bool:
    return op_name(node.target) not in PRODUCTS


def _narrow(value: Value) -> bool:
    """A 16-bit value of the graph, which may be in registers."""
    if not isinstance(value, fx.Node) or value.op == "placeholder":
        return False
    dtype = type_of(value).dtype
    return dtype.is_floating_point and dtype.itemsize == 2
