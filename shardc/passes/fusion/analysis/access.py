"""How a call reads and writes memory: what clustering asks when it merges calls without a look at their operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from shardc.passes.fusion.analysis.iteration_space import Over, Prim, Value, contiguous_runs


class Access(NamedTuple):
    """How a call reads its operands, and what it computes of them."""

    strided_reads: frozenset[fx.Node]  # operands that it reads in part, out of order, or repeatedly
    partial_results: frozenset[fx.Node]  # results without exactly one element for each element of the space
    is_elementwise: bool  # every operation maps element i of its operands to element i of its result
    reductions: frozenset[Over]  # what its operations reduce over

    def renamed(self, names: Mapping[Value, Value]) -> Access:
        """The same of another call."""
        if not self.strided_reads and not self.partial_results:
            return self
        strided, partial = (frozenset([names[value] for value in values]) for values in self[:2])
        return Access(strided, partial, *self[2:])  # type: ignore[arg-type]


def access_of(prims: Sequence[Prim], size: int) -> Access:
    """The access of a call with these operations, in a space of `size` elements."""
    contiguous = contiguous_runs(size)
    computed = {prim.out for prim in prims}
    strided_reads: set[fx.Node] = set()
    partial_results: set[fx.Node] = set()
    is_elementwise = True
    for prim in prims:
        is_full = prim.over == "point" and prim.size == size and prim.op != "cat"
        is_elementwise &= is_full and not prim.index
        if not is_full and isinstance(prim.out, fx.Node):
            partial_results.add(prim.out)
        for read in prim.reads:
            if prim.size == size and read.runs == contiguous and not read.offset:
                continue
            if read.value in computed:
                is_elementwise = False
            elif isinstance(read.value, fx.Node):
                strided_reads.add(read.value)
    reductions: frozenset[Over] = frozenset([prim.over for prim in prims])
    return Access(frozenset(strided_reads), frozenset(partial_results), is_elementwise, reductions)
