"""A localized body as the fusion pass sees it: its calls in order, which of them can be fused, and who reads what.

lowered   a call that a kernel can compute; it reads the memory of values, through any views
barrier   a product, an attention, a collective: no call is reordered with another of these
movable   views, constants, and small calls that no kernel can compute: they move to their readers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, Phase, info, op_name, operands, results, type_of
from shardc.ir.microbatch import sections
from shardc.ir.ops import assumed, check_index, local
from shardc.ir.ops.buckets import UNPACK
from shardc.ir.storages import Operand
from shardc.passes.fusion.analysis.iteration_space import (
    Prim,
    Read,
    SpaceConstraint,
    StridedRuns,
    Value,
    space_constraint,
)
from shardc.passes.fusion.analysis.space_cache import SpaceCache
from shardc.passes.fusion.analysis.view_analysis import VIEWS, ViewAnalysis
from shardc.passes.fusion.clustering.numeric_sensitivity import NumericSensitivity
from shardc.passes.fusion.clustering.producer_inlining import inline_producers
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS, LoweredOp, Temporary
from shardc.passes.fusion.lowering.lowering_cache import LoweringCache
from shardc.rules.registry import find_rule

aten = torch.ops.aten
MOVABLE = {
    *VIEWS,
    *(aten.full.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default),
    *(
        local.axis_offset,
        local.shard_slice,
        local.mask_pad,
        check_index.check_index,
        UNPACK,
        assumed.assume,
        assumed.after,
    ),
}
MAX_CHEAP_PRIMS = 4  # operations: values of no more are recomputed by each reader


@dataclass
class FusionGraph:
    """`calls` are in execution order; all else refers to a call by its index there."""

    body: Graph
    calls: list[fx.Node]
    values: list[list[fx.Node]]  # the results of each call that something reads
    phases: list[Phase]
    lowered: dict[int, LoweredOp]
    barriers: list[int]
    edges: list[tuple[int, int]]
    readers: dict[fx.Node, set[int]]  # value -> calls that read its memory; `call_count` stands for an output
    barrier_epoch: list[int]  # the number of barriers before each call
    per_microbatch: list[bool]  # does the call run once a microbatch?
    views: ViewAnalysis
    sensitivity: NumericSensitivity  # which values several kernels may each compute
    bytes: dict[Value, int]
    inlined: set[int]  # calls that compute producers of their operands
    unneeded: set[int]  # calls whose readers all compute the results themselves
    spaces: SpaceCache
    lowerings: LoweringCache
    narrow_floats: set[Value]  # values that are floats of less than 64 bits
    call_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.call_count = len(self.calls)

    def has_space(self, calls: Iterable[int], constraint: SpaceConstraint) -> bool:
        """Have the operations of some calls a space?"""
        numbers: dict[Value, int] = {}
        key: list[object] = [constraint]
        ops = [self.lowered[i] for i in sorted(calls)]
        for op in ops:
            structure, values = op.structure
            for value in values:
                if value not in numbers:
                    numbers[value] = len(numbers)
            key += [structure, *[numbers[value] for value in values]]
        return self.spaces.answer(tuple(key), lambda: [prim for op in ops for prim in op.prims], constraint)

    def keep_call(self, i: int) -> None:
        """Let no kernel compute a call: it reads its operands, and so do those calls that kernels computed for it."""
        self.lowered.pop(i, None)
        self.unneeded.discard(i)
        for value in operands(self.calls[i]):
            base = self.views.of[value].base
            self.readers.setdefault(base, set()).add(i)
            j = self.number.get(base)
            if j in self.unneeded:
                self.keep_call(j)

    @cached_property
    def number(self) -> dict[fx.Node, int]:
        """The call that makes each value."""
        return {value: i for i, written in enumerate(self.values) for value in written}


def build_fusion_graph(
    graph: Graph,
    exclude: frozenset[str] = frozenset(),
    inline: bool = True,
    layouts: Mapping[fx.Node, Operand] | None = None,
) -> FusionGraph:
    """The fusion graph of a body. `exclude` holds names of ops and values that stay calls. With `inline`, producers are
    inlined where `inline_producers` finds it worthwhile. `layouts` are the body's, where the caller knows them."""
    # What is made for all microbatches may be made in the kernels of each, where that moves no more bytes.
    per_microbatch = set[fx.Node]().union(*sections(graph))
    calls = [*graph.calls()]
    if graph.microbatches > 1:
        calls.sort(key=lambda node: node not in per_microbatch)
    values = [[value for value in results(node) if value is not None] for node in calls]
    views = ViewAnalysis(graph, LOWERINGS, layouts)
    sizes: dict[Value, int] = {}
    narrow_floats: set[Value] = set()
    for value in views.of:
        operand = views.layouts[value]
        sizes[value] = operand.bytes
        if operand.dtype.is_floating_point and operand.dtype is not torch.float64:
            narrow_floats.add(value)
    number = {value: i for i, written in enumerate(values) for value in written}
    lowered: dict[int, LoweredOp] = {}
    cheap: dict[fx.Node, LoweredOp] = {}
    cache, spaces = LoweringCache(views), SpaceCache()
    for i, node in enumerate(calls):
        if exclude and (op_name(node.target) in exclude or info(node).name in exclude):
            continue
        op = cache.lower(node)
        if op is not None:
            lowered[i] = op
    sensitivity = NumericSensitivity(views, calls, lowered)
    duplicates = sensitivity.computed_twice()
    lowered = (
        {
            i: rounded
            for i, op in lowered.items()
            if i not in duplicates and (rounded := sensitivity.with_eager_rounding(op)) is not None
        }
        if sensitivity.required
        else dict(lowered)
    )
    for i, op in lowered.items():
        op_alone = op
        if cheap and not cheap.keys().isdisjoint(op.reads):
            lowered[i] = op_alone = _with_cheap_operands(op, cheap, spaces)
        if _is_cheap(sizes, op_alone) and sensitivity.repeatable(op.prims):
            cheap[op_alone.node] = op_alone
    inlined: set[int] = set()
    if inline:
        before = lowered
        lowered = inline_producers(graph, views, calls, lowered, per_microbatch, sensitivity, sizes)
        inlined = {i for i, op in lowered.items() if op is not before[i]}
    before = sensitivity.lowered
    if len(lowered) != len(before) or [*lowered.values()] != [before[i] for i in lowered]:
        sensitivity = NumericSensitivity(views, calls, lowered)
    readers: dict[fx.Node, set[int]] = {}
    for value in graph.output_values:
        readers.setdefault(views.of[value].base, set()).add(len(calls))
    edges: list[tuple[int, int]] = []
    unneeded: set[int] = set()
    for i in range(len(calls) - 1, -1, -1):
        node, op = calls[i], lowered.get(i)
        if op is not None and readers.keys().isdisjoint(values[i]):
            del lowered[i]  # its readers compute it themselves
            unneeded.add(i)
            continue
        if op is not None:
            bases = op.reads
            for value in bases:
                if value in readers:
                    readers[value].add(i)
                else:
                    readers[value] = {i}
        else:
            bases = node.all_input_nodes
            for value in () if node.target in VIEWS else bases:
                readers.setdefault(views.of[value].base, set()).add(i)
        edges += [(number[value], i) for value in bases if value in number]
    edges = sorted(set(edges))
    barriers = [i for i, node in enumerate(calls) if i not in lowered and i not in unneeded and not _is_movable(node)]
    barrier_epoch: list[int] = []
    for epoch, (begin, end) in enumerate(pairwise([-1, *barriers, len(calls) - 1])):
        barrier_epoch += [epoch] * (end - begin)
    inner = [node in per_microbatch for node in calls]
    phases: list[Phase] = [info(node).phase for node in calls]
    about = (
        barriers,
        edges,
        readers,
        barrier_epoch,
        inner,
        views,
        sensitivity,
        sizes,
        inlined,
        unneeded,
        spaces,
        cache,
        narrow_floats,
    )
    return FusionGraph(graph, calls, values, phases, lowered, *about)


def _is_movable(node: fx.Node) -> bool:
    if node.target in MOVABLE:
        return True
    if op_name(node.target) in KINDS:
        return False
    rule = find_rule(node.target)
    return rule is not None and rule.kind == "pointwise" and op_name(node.target) != "shardc.accumulate"


def _with_cheap_operands(user: LoweredOp, cheap: dict[fx.Node, LoweredOp], spaces: SpaceCache) -> LoweredOp:
    """The call, computing itself the operands that are cheaper to recompute than to read: masks, positions, constants.

    It computes one of them once for each way in which it reads it: a position may be that of a row and of a column.
    """
    prims: list[Prim] = []
    recomputed: dict[tuple[Value, StridedRuns, int], Value] = {}

    def inlined(read: Read, size: int) -> Read:
        producer_op = cheap.get(read.value) if isinstance(read.value, fx.Node) else None
        if producer_op is None or producer_op.is_float64 != user.is_float64:
            return read
        key = (read.value, read.runs, size)
        if key not in recomputed:
            names: dict[Value, Value] = {}
            for prim in producer_op.prims:
                names[prim.out] = Temporary(user.node, -1 - len(prims))
                prims.append(prim.renamed(names))
            recomputed[key] = names[read.value]
        return read._replace(value=recomputed[key])

    user_prims = [
        replace(p, args=tuple([inlined(a, p.size) if isinstance(a, Read) else a for a in p.args]))
        if any(read.value in cheap for read in p.reads)
        else p
        for p in user.prims
    ]
    every = (*prims, *user_prims)
    constraint = space_constraint(every) if recomputed else None
    if constraint is None or not spaces.has_space(every, constraint):
        return user
    return LoweredOp(user.node, every, constraint)


def _is_cheap(sizes: Mapping[Value, int], op: LoweredOp) -> bool:
    """Is it cheaper to recompute the result than to read it?"""
    if op.node not in sizes:  # it has several results
        return False
    reads = op.reads
    if 2 * sum([sizes[value] for value in reads]) > sizes[op.node]:
        if len(reads) > 1 or type_of(op.node).dtype != torch.bool:
            return False
        if any(type_of(value).dtype.is_floating_point for value in reads):
            return False
    count = 0
    for prim in op.prims:
        count += prim.op != "iota"
        if count > MAX_CHEAP_PRIMS or prim.over != "point":
            return False
    return True
