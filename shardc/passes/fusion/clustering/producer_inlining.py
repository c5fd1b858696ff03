"""Inlines producers: a value that is read only in parts, or in another order, is computed by its readers.

Within a kernel a value has one access map, so that a kernel cannot read its own result in another order.

    m = mul(g, sin)                                    n = neg of the product of g[..., 32:] and sin[..., 32:]
    n = neg(m[..., 32:])               ->              m is stored nowhere
    c = view(transpose(add(a, b)))     ->              c adds a and b, read as transposed, and is no copy

The strided runs of a read are composed with those of the producer's reads. A value is inlined into all its readers or
into none, only where no more bytes move. It is inlined into several readers only where no discontinuous operation
observes that they compute it differently (`numeric_sensitivity`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from shardc.ir.graph import Graph, info, operands, results
from shardc.passes.fusion.analysis.iteration_space import (
    Prim,
    Read,
    StridedRuns,
    Value,
    contiguous_runs,
    find_space,
    space_constraint,
    strided_runs,
)
from shardc.passes.fusion.analysis.view_analysis import VIEWS, ViewAnalysis
from shardc.passes.fusion.clustering.numeric_sensitivity import NumericSensitivity
from shardc.passes.fusion.lowering.lowered_op import LoweredOp, Temporary

MAX_INLINED_PRIMS = 24  # operations that one value takes


def inline_producers(
    graph: Graph,
    views: ViewAnalysis,
    calls: Sequence[fx.Node],
    lowered: Mapping[int, LoweredOp],
    per_microbatch: Collection[fx.Node],
    sensitivity: NumericSensitivity,
    sizes: Mapping[Value, int],
) -> dict[int, LoweredOp]:
    """The lowered calls, with producers inlined. A value that was inlined has no reader any more."""
    inlined = dict(lowered)
    readers = _readers(graph, views, calls, inlined)
    for i in sorted(inlined, reverse=True):
        producer = inlined[i]
        value = producer.node
        if value not in readers or len(producer.prims) > MAX_INLINED_PRIMS:
            continue
        numbers = readers[value]
        if not numbers or not inlined.keys() >= numbers:
            continue
        if value not in producer.access.partial_results and any(
            _reads_in_order(inlined[j], value, producer.constraint.size) for j in numbers
        ):  # as `_reads_contiguously`, without a look at the operations
            continue
        users = {j: inlined[j] for j in numbers}
        if _reads_contiguously(producer, users.values()) or not _is_pointwise(producer):
            continue
        frequency = _run_frequency(value, per_microbatch)
        if any(_run_frequency(user.node, per_microbatch) != frequency for user in users.values()):
            continue
        changed = _inline_into_readers(sizes, producer, users, sensitivity)
        if changed is None:
            continue
        inlined.update(changed)
        for base in producer.reads:
            readers[base] = readers.get(base, set()) - {i} | numbers
        del readers[value]
    return inlined


def _run_frequency(node: fx.Node, per_microbatch: Collection[fx.Node]) -> tuple[bool, bool]:
    """Calls of a microbatch and calls of the optimizer's update run a different number of times than others."""
    return node in per_microbatch, info(node).phase == "opt"


def compose_runs(inner: StridedRuns, start: int, outer: StridedRuns, offset: int) -> tuple[StridedRuns, int] | None:
    """The elements `offset + outer` of a value, where the value's elements are `start + inner` of a memory: as runs and
    an offset of that memory. None if no strides describe them.

    >>> compose_runs(((4, 100), (64, 1)), 0, ((4, 64), (32, 1)), 32)  # the second half of each row
    (((4, 100), (32, 1)), 32)
    """
    # For each inner run: the elements below it, its size, its stride, and its index at the offset.
    digits: list[tuple[int, int, int, int]] = []
    total = 1
    for size, stride in reversed(inner):
        digits.append((total, size, stride, offset // total % size))
        total *= size
    reach = [index for *_, index in digits]
    shape: list[int] = []
    strides: list[int] = []
    for size, stride in reversed(outer):
        rest = size
        while rest > 1 and stride:
            k = next((k for k, (below, count, _, _) in enumerate(digits) if below <= stride < below * count), None)
            if k is None or stride % digits[k][0]:
                return None
            below, count, step, _ = digits[k]
            increment = stride // below
            taken = rest
            if increment * rest > count:
                taken = count // increment
                if count % increment or rest % taken:
                    return None
            reach[k] += increment * (taken - 1)
            shape.append(taken)
            strides.append(increment * step)
            rest, stride = rest // taken, below * count
        if rest > 1:
            shape.append(rest)
            strides.append(0)
    if offset >= total or any(index >= size for index, (_, size, _, _) in zip(reach, digits, strict=True)):
        return None
    first = start + sum(stride * index for _, _, stride, index in digits)
    return strided_runs(tuple(reversed(shape)), tuple(reversed(strides))), first


def _readers(
    graph: Graph, views: ViewAnalysis, calls: Sequence[fx.Node], lowered: Mapping[int, LoweredOp]
) -> dict[fx.Node, set[int]]:
    """The calls that read a value's memory, through any views, and whose results are read; -1 stands for an output."""
    readers: dict[fx.Node, set[int]] = {}
    for value in graph.output_values:
        readers.setdefault(views.of[value].base, set()).add(-1)
    for i in range(len(calls) - 1, -1, -1):
        if i in lowered:
            op = lowered[i]
            if op.node in readers or (info(op.node).type is None and any(v in readers for v in results(op.node))):
                for value in op.reads:
                    if value in readers:
                        readers[value].add(i)
                    else:
                        readers[value] = {i}
        elif calls[i].target not in VIEWS:
            for value in operands(calls[i]):
                readers.setdefault(views.of[value].base, set()).add(i)
    return readers


def _is_pointwise(producer: LoweredOp) -> bool:
    return all(prim.over == "point" and prim.op != "cat" for prim in producer.prims)


def _reads_in_order(user: LoweredOp, value: fx.Node, size: int) -> bool:
    """Does a call read every element of a value of `size` elements whenever it reads the value?"""
    return user.constraint.size == size and value not in user.access.strided_reads


def _reads_contiguously(producer: LoweredOp, users: Iterable[LoweredOp]) -> bool:
    """Does one of the users read the producer's value whole and in order?"""
    value = producer.node
    whole = ((1, 0),)
    for prim in producer.prims:
        if prim.out is value:
            whole = contiguous_runs(prim.size)
    for user in users:
        for prim in user.prims:
            for read in prim.reads:
                if read.value is value and not read.offset and read.runs == whole:
                    return True
    return False


def _inline_into_readers(
    sizes: Mapping[Value, int],
    producer: LoweredOp,
    users: Mapping[int, LoweredOp],
    sensitivity: NumericSensitivity,
) -> dict[int, LoweredOp] | None:
    """The readers of a producer's value, each of which computes the elements that it reads; None where that is not
    legal or not worthwhile."""
    value = producer.node
    size = next(prim.size for prim in producer.prims if prim.out is value)
    reads = {(j, r) for j, user in users.items() for p in user.prims for r in p.reads if r.value is value}
    if any(_is_contiguous(read, size) for _, read in reads):
        return None
    if any(user.is_float64 != producer.is_float64 for user in users.values()):
        return None
    if len(reads) > 1 and not sensitivity.repeatable(producer.prims):
        return None
    share = sum(math.prod(n for n, stride in read.runs if stride) for _, read in reads) / size
    operand_bytes = {base: sizes[base] for base in producer.reads}
    value_bytes, read_bytes = sizes[value], sum(operand_bytes.values())
    held_bytes = sum(n for base, n in operand_bytes.items() if base.op != "placeholder")
    if share * read_bytes > (1 + share) * value_bytes + read_bytes:
        return None
    if held_bytes > value_bytes and any(info(user.node).phase != info(value).phase for user in users.values()):
        return None
    changed: dict[int, LoweredOp] = {}
    for j, user in users.items():
        op = _Inliner(producer, user).lower()
        if op is None:
            return None
        changed[j] = op
    return changed


def _is_contiguous(read: Read, size: int) -> bool:
    """Is a value read whole and in order, each element perhaps several times in a row?"""
    runs = [(n, stride) for n, stride in read.runs if stride]
    return not read.offset and strided_runs(tuple(n for n, _ in runs), tuple(s for _, s in runs)) == contiguous_runs(
        size
    )


class _Inliner:
    """A call that computes itself the elements that it reads of another call's value."""

    def __init__(self, producer: LoweredOp, user: LoweredOp) -> None:
        self.producer_prims = {prim.out: prim for prim in producer.prims}
        self.value, self.user = producer.node, user
        self.prims: list[Prim] = []
        self.inlined: dict[tuple[Value, StridedRuns, int], Value] = {}
        self.next = 1 + max((p.out.number for p in user.prims if isinstance(p.out, Temporary)), default=-1)

    def lower(self) -> LoweredOp | None:
        for prim in self.user.prims:
            args: list[object] = []
            for arg in prim.args:
                if isinstance(arg, Read) and arg.value is self.value:
                    arg = self._read(arg.value, arg.runs, arg.offset)
                    if arg is None:
                        return None
                args.append(arg)
            self.prims.append(replace(prim, args=tuple(args)))
        constraint = space_constraint(self.prims)
        if constraint is None or len(self.prims) > 2 * MAX_INLINED_PRIMS or find_space(self.prims, constraint) is None:
            return None
        return LoweredOp(self.user.node, tuple(self.prims), constraint)

    def _read(self, value: Value, runs: StridedRuns, offset: int) -> Read | None:
        """Some elements of a value of the producer, computed by the user."""
        key = (value, runs, offset)
        size = math.prod(n for n, _ in runs)
        if key not in self.inlined:
            temporary = self._inline(self.producer_prims[value], runs, offset, size)
            if temporary is None:
                return None
            self.inlined[key] = temporary
        return Read(self.inlined[key], contiguous_runs(size))

    def _inline(self, prim: Prim, runs: StridedRuns, offset: int, size: int) -> Value | None:
        args: list[object] = []
        for arg in prim.args:
            if isinstance(arg, Read):
                composed = compose_runs(arg.runs, arg.offset, runs, offset)
                if composed is None:
                    return None
                if arg.value in self.producer_prims:
                    arg = self._read(arg.value, *composed)
                    if arg is None:
                        return None
                else:
                    if composed[0][-1][1] not in (0, 1):  # not coalesced: neighbouring elements lie far apart
                        return None
                    arg = Read(arg.value, *composed)
            args.append(arg)
        index = prim.index
        if index:
            composed = compose_runs(index, 0, runs, offset)
            if composed is None or composed[1] or not any(stride for _, stride in composed[0]):
                return None
            index = composed[0]
        out = Temporary(self.user.node, self.next)
        self.next += 1
        self.prims.append(replace(prim, out=out, args=tuple(args), size=size, index=index))
        return out
