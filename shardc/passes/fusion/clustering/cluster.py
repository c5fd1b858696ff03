"""A cluster of calls, and what its legality and its profit are decided by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.passes.fusion.analysis.iteration_space import Over, Prim, SpaceConstraint, Value
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph

EXACT = {"same", "cast", "where", "sum", "rsum", "csum", "neg", "uniform"}  # of integers and bools, in float32
LONG_ROW = 16384  # the most columns of a row that a kernel holds; it loops over longer rows
# Operations of dozens of instructions.
EXPENSIVE = {
    *("sin", "cos", "pow", "erfc", "erfcx", "erfinv", "ndtri", "lgamma", "digamma", "trigamma", "i0", "i1", "fmod"),
    *("k0", "k1", "scaled_k0", "scaled_k1"),
}


@dataclass(slots=True, eq=False)
class Cluster:
    """Calls that may become one kernel: what they read and write, and the epoch in which they run."""

    calls: frozenset[int]
    first: int  # the first of the calls
    constraint: SpaceConstraint
    reads: frozenset[fx.Node]
    writes: frozenset[fx.Node]  # results that calls outside read, or that are outputs of the graph
    result_count: int  # all results, including those that nothing outside reads
    barrier_epoch: int
    prim_count: int
    reductions: frozenset[Over]  # what its operations reduce over
    is_float64: bool
    strided_reads: frozenset[fx.Node]  # as in `Access`
    partial_results: frozenset[fx.Node]
    is_elementwise: bool
    version: int = 0
    # Sums over long rows merge last: after the calls that reduce those rows, with which they may not merge.
    is_deferred: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_deferred = self.constraint.cols > LONG_ROW and "col" in self.reductions

    @property
    def sums_long_rows(self) -> bool:
        """Does it reduce rows, and also sum over them, with rows too long to hold? Such a kernel writes and reads its
        sums once a row. A kernel of their own takes a quarter of that time, and reads what it sums once more."""
        return self.constraint.cols > LONG_ROW and {"row", "col"} <= self.reductions


def cluster_of(graph: FusionGraph, i: int) -> Cluster:
    """The cluster of one call."""
    op, values = graph.lowered[i], graph.values[i]
    writes = frozenset([value for value in values if value in graph.readers])
    strided_reads, partial_results, is_elementwise, reductions = op.access
    about = (len(values), graph.barrier_epoch[i], len(op.prims), reductions, op.is_float64)
    parts = (strided_reads, partial_results, is_elementwise)
    return Cluster(frozenset((i,)), i, op.constraint, op.reads, writes, *about, *parts)


def bytes_saved(graph: FusionGraph, a: Cluster, b: Cluster) -> int:
    """How many fewer bytes one kernel of both moves than a kernel of each."""
    if len(a.reads) > len(b.reads):
        a, b = b, a
    total, bytes, reads, writes = 0, graph.bytes, b.reads, b.writes
    for value in a.reads:
        if value in reads:
            total += bytes[value]
        elif value in writes:
            total += bytes[value] if _is_read_outside(graph, value, a, b) else 2 * bytes[value]
    for value in a.writes:
        if value in reads:
            total += bytes[value] if _is_read_outside(graph, value, a, b) else 2 * bytes[value]
    return total


def _is_read_outside(graph: FusionGraph, value: fx.Node, a: Cluster, b: Cluster) -> bool:
    """Does a call read a value, which one of two clusters reads of the other, that is in neither?"""
    readers = graph.readers[value]
    return len(readers) > 1 and not (readers - a.calls) <= b.calls


def spaces_agree(a: Cluster, b: Cluster, constraint: SpaceConstraint) -> bool:
    """A sufficient test that two clusters, which have spaces, have a common one; it does not visit their operations.
    Each element that one cluster computes and the other reads is available where it is read. Elementwise clusters run
    along any dims, others only along the dims that they had. Sums over rows need more facts: about all that is computed
    before them."""
    if a.constraint.size != b.constraint.size:
        return False
    if not (a.is_elementwise or a.constraint == constraint) or not (b.is_elementwise or b.constraint == constraint):
        return False
    if "col" in a.reductions or "all" in a.reductions or "col" in b.reductions or "all" in b.reductions:
        return False
    return not (
        a.strided_reads & b.writes
        or b.strided_reads & a.writes
        or a.partial_results & b.reads
        or b.partial_results & a.reads
    )


def repeats_expensive(prims: Iterable[Prim], size: int) -> bool:
    """Would a kernel of so many elements repeat an expensive operation for each of many elements that share its result?
    The angles of a rotary embedding, computed for every head, take 2.4 times as long as reading them."""
    return any(prim.op in EXPENSIVE and 1 < prim.size < size for prim in prims)


def rounds_unnoticed(reads: Iterable[Value], prims: Callable[[], Iterable[Prim]]) -> bool:
    """Does a kernel make inexact floats from integers alone, or narrower floats from float64 alone? Its operands would
    not tell it to compute in float64, which is how a program is compared with the single device."""
    reads_float64 = False
    for value in reads:
        if isinstance(value, fx.Node) and (dtype := type_of(value).dtype).is_floating_point:
            if dtype is not torch.float64:
                return False
            reads_float64 = True
    if reads_float64:
        return any(prim.dtype.is_floating_point and prim.dtype != torch.float64 for prim in prims())
    floats = [prim for prim in prims() if prim.dtype.is_floating_point]
    return any(prim.op not in EXACT or prim.dtype.itemsize < 4 for prim in floats)
