"""A localized body as the fusion pass sees it: its calls in order, which of them can be fused, and who reads what.

lowered   a call that a kernel can compute; it reads the memory of values, through any views
barrier   a product, an attention, a collective: no call is reordered with another of these
movable   views, constants, and small calls that no kernel can compute: they move to their readers
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name, operands, producer, results, type_of
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops import check_index, local
from shardc.ir.ops.buckets import UNPACK
from shardc.passes.fusion.analysis.iteration_space import Prim, Read, StridedRuns, Value, find_space, space_constraint
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
    *(local.axis_offset, local.shard_slice, local.mask_pad, check_index.check_index, UNPACK),
}
MAX_CHEAP_PRIMS = 4  # operations: values of no more are recomputed by each reader


@dataclass
class FusionGraph:
    """`calls` are in execution order; all else refers to a call by its index there."""

    body: Graph
    calls: list[fx.Node]
    lowered: dict[int, LoweredOp]
    barriers: list[int]
    edges: list[tuple[int, int]]
    readers: dict[fx.Node, set[int]]  # value -> calls that read its memory; `call_count` stands for an output
    barrier_epoch: list[int]  # the number of barriers before each call
    per_microbatch: list[bool]  # does the call run once a microbatch?
    views: ViewAnalysis
    sensitivity: NumericSensitivity  # which values several kernels may each compute
    bytes: dict[Value, int] = field(default_factory=dict[Value, int])

    @property
    def call_count(self) -> int:
        return len(self.calls)


def build_fusion_graph(graph: Graph, exclude: frozenset[str] = frozenset(), inline: bool = True) -> FusionGraph:
    """The fusion graph of a body. `exclude` holds names of ops and values that stay calls. With `inline`, producers are
    inlined where `inline_producers` finds it worthwhile."""
    per_microbatch = in_microbatch(graph)
    calls = sorted(graph.calls(), key=lambda node: node not in per_microbatch)
    views = ViewAnalysis(graph, lambda node: node.target in LOWERINGS)
    number = {node: i for i, node in enumerate(calls)}
    lowered: dict[int, LoweredOp] = {}
    cheap: dict[fx.Node, LoweredOp] = {}
    cache = LoweringCache(views)
    for i, node in enumerate(calls):
        if exclude and (op_name(node.target) in exclude or info(node).name in exclude):
            continue
        op = cache.lower(node)
        if op is not None:
            lowered[i] = op
    sensitivity = NumericSensitivity(views, calls, lowered)
    duplicates = sensitivity.computed_twice()
    lowered = {
        i: rounded
        for i, op in lowered.items()
        if i not in duplicates and (rounded := sensitivity.with_eager_rounding(op)) is not None
    }
    for i, op in lowered.items():
        lowered[i] = inlined = _with_cheap_operands(op, cheap)
        if sensitivity.repeatable(op.prims) and _is_cheap(graph, inlined):
            cheap[inlined.node] = inlined
    if inline:
        lowered = inline_producers(graph, views, calls, lowered, per_microbatch, sensitivity)
    sensitivity = NumericSensitivity(views, calls, lowered)
    readers: dict[fx.Node, set[int]] = {}
    for value in graph.output_values:
        readers.setdefault(views.of[value].base, set()).add(len(calls))
    edges: set[tuple[int, int]] = set()
    unneeded: set[int] = set()
    for i, node in reversed(list(enumerate(calls))):
        if i in lowered and not any(value in readers for value in results(node)):
            del lowered[i]  # its readers compute it themselves
            unneeded.add(i)
            continue
        bases = lowered[i].reads if i in lowered else operands(node)
        if node.target not in VIEWS or i in lowered:
            for value in bases:
                readers.setdefault(views.of[value].base, set()).add(i)
        sources = (number.get(producer(value)[0]) for value in bases)
        edges.update((source, i) for source in sources if source is not None)
    barriers = [i for i, node in enumerate(calls) if i not in lowered and i not in unneeded and not _is_movable(node)]
    barrier_epoch, count = [], 0
    fixed = set(barriers)
    for i in range(len(calls)):
        barrier_epoch.append(count)
        count += i in fixed
    sizes: dict[Value, int] = {value: type_of(value).local_bytes(graph.mesh) for value in graph.values()}
    inner = [node in per_microbatch for node in calls]
    return FusionGraph(
        graph, calls, lowered, barriers, sorted(edges), readers, barrier_epoch, inner, views, sensitivity, sizes
    )


def _is_movable(node: fx.Node) -> bool:
    if node.target in MOVABLE:
        return True
    if op_name(node.target) in KINDS:
        return False
    rule = find_rule(node.target)
    return rule is not None and rule.kind == "pointwise" and op_name(node.target) != "shardc.accumulate"


def _with_cheap_operands(user: LoweredOp, cheap: dict[fx.Node, LoweredOp]) -> LoweredOp:
    """The call, computing itself the operands that are cheaper to recompute than to read: masks, positions, constants.

    It computes one of them once for each way in which it reads it: a position may be that of a row and of a column.
    """
    if user.reads.isdisjoint(cheap):
        return user
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
                prims.append(_renamed(prim, names))
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
    if constraint is None or find_space(every, constraint) is None:
        return user
    return LoweredOp(user.node, every, constraint)


def _renamed(prim: Prim, names: dict[Value, Value]) -> Prim:
    args = tuple(a._replace(value=names.get(a.value, a.value)) if isinstance(a, Read) else a for a in prim.args)
    return replace(prim, out=names.get(prim.out, prim.out), args=args)


def _is_cheap(graph: Graph, op: LoweredOp) -> bool:
    """Is it cheaper to recompute the result than to read it?"""
    count = sum(prim.op != "iota" for prim in op.prims)
    if count > MAX_CHEAP_PRIMS or info(op.node).type is None or any(prim.over != "point" for prim in op.prims):
        return False
    read = sum(type_of(value).local_bytes(graph.mesh) for value in op.reads)
    reads_floats = any(type_of(value).dtype.is_floating_point for value in op.reads)
    is_mask = type_of(op.node).dtype == torch.bool and not reads_floats
    return 2 * read <= type_of(op.node).local_bytes(graph.mesh) or (is_mask and len(op.reads) == 1)
