"""The list of passes, and the loop that runs, verifies and shows them; `driver` says which graphs they run on."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import KEY, Graph, info, operands, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.verify import violations
from shardc.passes.base import Check, Pass
from shardc.passes.bias_products import BiasProducts
from shardc.passes.cheaper_calls import CheaperCalls
from shardc.passes.communication.bucket import Bucket
from shardc.passes.communication.causes import NameCauses
from shardc.passes.communication.combine import Combine
from shardc.passes.communication.decompose import Decompose
from shardc.passes.communication.late_gradients import LateGradients
from shardc.passes.communication.overlap import Overlap
from shardc.passes.communication.prefetch import Prefetch
from shardc.passes.communication.report_gathers import ReportGathers
from shardc.passes.communication.split_batch import SplitBatch
from shardc.passes.context.divide_attention import DivideAttention
from shardc.passes.context.merge_keys import MergeKeys
from shardc.passes.context.pack_parts import PackParts
from shardc.passes.fusion.fuse import Fuse
from shardc.passes.gemm_padding import Align
from shardc.passes.join_squares import JoinSquares
from shardc.passes.join_sums import JoinSums
from shardc.passes.memory.offload import Offload
from shardc.passes.memory.offload_states import OffloadStates
from shardc.passes.memory.recompute import Recompute
from shardc.passes.merge_updates import MergeUpdates
from shardc.passes.normalize.limit_experts import LimitExperts
from shardc.passes.normalize.quantize import Quantize
from shardc.passes.pick_columns import PickColumns
from shardc.passes.sharding.assign import Assign
from shardc.passes.sharding.atomize import Atomize
from shardc.passes.sharding.find_blocks import FindBlocks, ShardedDim, in_elements
from shardc.passes.sharding.find_sequences import FindSequences, ShardedSequence
from shardc.passes.sharding.group_sums import GroupSums
from shardc.passes.sharding.insert_reshards import InsertReshards
from shardc.passes.sharding.localize import Localize
from shardc.passes.sharding.lower_reshards import LowerReshards
from shardc.passes.sharding.propagate import Propagate
from shardc.passes.sharding.seed import Bound, SeedAnnotations, find_value
from shardc.passes.sharding.settle_partials import SettlePartials
from shardc.passes.sharding.spread_taps import SpreadTaps
from shardc.passes.sharding.store import Store
from shardc.passes.softmax.online_softmax import OnlineSoftmax
from shardc.passes.softmax.split_softmax import SplitSoftmax
from shardc.passes.sum_products import SumProducts
from shardc.passes.verify import ENSURES, PRESERVES
from shardc.plan.context import Context
from shardc.rules.notation import Notation, RuleError, fit
from shardc.rules.registry import find_rule, result_shapes, rule_of
from shardc.torch_compat import args_of, kwargs_of, target_of

DimCut = tuple[str, int, tuple[int, ...]]  # an input, one of its dims, the sizes it is factored into
Watch = Callable[[Pass, Graph, float], None]  # after each pass, with the seconds it took


@dataclass(frozen=True)
class Options:
    """How to compile. `verify` runs the static checks after each pass. `hardware` is what passes over a body weigh by;
    those that are given here have their own."""

    strict: bool = False
    verify: bool = True
    watch: Watch | None = None
    store: Store = field(default_factory=Store)
    limit: LimitExperts = field(default_factory=LimitExperts)
    quantize: Quantize = field(default_factory=Quantize)
    attention: DivideAttention = field(default_factory=DivideAttention)
    keys: MergeKeys = field(default_factory=MergeKeys)
    assign: Assign = field(default_factory=Assign)
    keep_gathered: frozenset[str] = frozenset()  # parameters that backward does not gather again
    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)
    states: OffloadStates = field(default_factory=OffloadStates)
    split: SplitBatch = field(default_factory=SplitBatch)
    align: Align = field(default_factory=Align)
    late: LateGradients = field(default_factory=LateGradients)
    decompose: Decompose = field(default_factory=Decompose)
    bucket: Bucket = field(default_factory=Bucket)
    prefetch: Prefetch = field(default_factory=Prefetch)
    fuse: Fuse = field(default_factory=lambda: Fuse(enabled=False))
    context: Context = field(default_factory=Context)
    hardware: Hardware = DEFAULT
    reduce: torch.dtype | None = None  # in which ranks sum gradients; None: in whichever is less to send


def body_passes(
    bound: Sequence[Bound],
    cuts: Sequence[DimCut],
    sharded: Sequence[ShardedDim],
    options: Options,
    sequences: Sequence[ShardedSequence] = (),
) -> list[Pass]:
    """Every pass that makes the single-device graph of a step one rank's body, in order."""
    return [
        SpreadTaps(
            frozenset(s.length for s in sequences), options.context.balance, tuple((s.port, s.dim) for s in sequences)
        ),
        Atomize(tuple(cuts)),
        FindBlocks(tuple(sharded)),
        FindSequences(tuple(sequences), options.context.balance, options.hardware),
        SeedAnnotations(tuple(bound)),
        Propagate(),
        SplitSoftmax(),
        options.keys,
        options.attention,
        options.store,
        options.assign,
        GroupSums(),
        SettlePartials(options.reduce, options.hardware),
        InsertReshards(options.keep_gathered, options.hardware),
        LowerReshards(options.hardware),
        Combine(),
        NameCauses(),
        ReportGathers(),
        options.recompute,
        Localize(),
        OnlineSoftmax(options.hardware),
        PackParts(options.hardware),
        options.split,
    ]


def call_passes(options: Options) -> list[Pass]:
    """The passes over what a rank runs that leave single calls, in order: over its body, or each graph of each of its
    pipeline stages."""
    return [
        JoinSquares(),
        options.align,
        Overlap(options.hardware),
        options.late,
        SumProducts(),
        options.decompose,
        options.bucket,
        options.prefetch,
        BiasProducts(kernels=options.fuse.enabled),
        PickColumns(not options.fuse.enabled),
        CheaperCalls(not options.fuse.enabled),
        MergeUpdates(not options.fuse.enabled),
    ]


def kernel_passes(options: Options) -> list[Pass]:
    """The passes behind those: kernels are made, and then what graphs leave in memory is known, and may be moved."""
    return [options.fuse, JoinSums(), options.offload, options.states]


@dataclass
class Verified:
    """What checks have read of each graph that they held of, and which: until it changes they are not made again."""

    contents: WeakKeyDictionary[Graph, list[object]] = field(default_factory=WeakKeyDictionary)
    held: WeakKeyDictionary[Graph, set[Check]] = field(default_factory=WeakKeyDictionary)

    def of(self, before: Graph, after: Graph) -> set[Check]:
        """The checks that hold of `after` as it is, known from `before`, which may be the same graph."""
        contents, known = _contents(after), self.contents.pop(before, [])
        held = self.held.pop(before, set[Check]())
        if len(contents) != len(known) or not all(map(operator.is_, contents, known)):
            held = set()
        self.contents[after], self.held[after] = contents, held
        return held


def run(graph: Graph, todo: Sequence[Pass], options: Options, verified: Verified | None = None) -> Graph:
    """Run passes in turn, checking after each what it ensures. `verified` is what is known of graphs, and learns it."""
    verified = Verified() if verified is None else verified
    for pass_ in todo:
        start = time.perf_counter()
        after = pass_.run(graph)
        seconds = time.perf_counter() - start
        inspect(pass_, graph, after, seconds, options, verified.of(graph, after) if options.verify else None)
        graph = after
    return graph


def _contents(graph: Graph) -> list[object]:
    """All that checks read of a graph. None of it is changed in place: another value is another object."""
    contents: list[object] = [*graph.inputs, *graph.outputs, *graph.mesh.axes, graph.microbatches, graph.halves]
    contents += (*graph.seeds, *graph.seeds.values())
    nodes = list(graph.fx.nodes)
    contents += nodes
    for read in (target_of, args_of, kwargs_of):
        contents += map(read, nodes)
    contents += [node.meta.get(KEY) for node in nodes]
    return contents


def inspect(
    pass_: Pass, before: Graph, after: Graph, seconds: float, options: Options, held: set[Check] | None = None
) -> None:
    """Verify what a pass left, and show it. A pass that edits in place gives the same graph twice.

    Checks that are known to have `held` of the graph as it is now are not made again; those made here are added.
    Raises AssertionError with every violation: a graph that a pass broke is our fault, not the user's.
    """
    if options.verify:
        held = set() if held is None else held
        checks = [check for check in (violations, *ENSURES.get(pass_.name, ())) if check not in held]
        broken = [line for check in checks for line in check(after)]
        if after is not before:
            broken += [line for check in PRESERVES.get(pass_.name, ()) for line in check(before, after)]
        assert not broken, f"{pass_.name} broke the graph '{after.name}':\n" + "\n".join(broken[:20])
        held.update(checks)
    if options.watch is not None:
        options.watch(pass_, after, seconds)


def report_missing_rules(graph: Graph, *, strict: bool) -> None:
    """Note each op without a rule (SC301) among the graph's diagnostics; under strict, raise them all at once."""
    gaps = missing_rules(graph, "error" if strict else "warning")
    if gaps and strict:
        raise ShardcError(*gaps)
    graph.diagnostics += gaps


def missing_rules(graph: Graph, severity: str) -> list[Diagnostic]:
    """One diagnostic an op that has no rule: how often it occurs, in which modules, at which lines."""
    gaps: dict[str, list[fx.Node]] = {}
    for node in graph.calls():
        if find_rule(node.target) is None:
            gaps.setdefault(str(node.target), []).append(node)
    diagnostics: list[Diagnostic] = []
    for op, calls in sorted(gaps.items()):
        modules = Counter(info(call).fqn or "the model" for call in calls)
        lines = sorted({info(call).source for call in calls if info(call).source})
        shown = ", ".join(f"{fqn} ({n})" if n > 1 else fqn for fqn, n in modules.most_common(4))
        more = f" and {len(modules) - 4} more" if len(modules) > 4 else ""
        runs = "1 call runs" if len(calls) == 1 else f"{len(calls)} calls run"
        diagnostics.append(
            Diagnostic(
                "SC301",
                f"{op} has no sharding rule: {runs} replicated, in {shown}{more}",
                severity,  # type: ignore[arg-type]
                location=lines[0] if lines else None,
                op=op,
                hint=_rule_to_register(calls[0]),
            )
        )
    return diagnostics


def _rule_to_register(call: fx.Node) -> str:
    """A rule by rows, if the call's shapes allow it; whether the op does work by rows, its author knows."""
    inputs, outputs = [type_of(value).shape for value in operands(call)], result_shapes(call)
    text = f"{', '.join(['... n'] * len(inputs))} -> {', '.join(['... n'] * len(outputs))}"
    try:
        fit(Notation(text, whole="n"), inputs, outputs)
    except RuleError:
        return f"register one: shardc.rule(torch.ops.{call.target}, ...); 'Add an op' in CONTRIBUTING.md shows how"
    said = f"shardc.rule(torch.ops.{call.target}, '{text}', whole='n')"
    return f"if it computes each row by itself, register that: {said}"


def refuse_unfit(graph: Graph) -> None:
    """Raise ShardcError for a call that its rule does not fit, SC303; SC103 if an input of the step that it reads, or a
    tensor that does not fit, has no elements."""
    inputs = set(graph.placeholders)
    for node in graph.calls():
        if find_rule(node.target) is None:
            continue
        empty = next((value for value in operands(node) if 0 in type_of(value).shape), None)
        try:
            if empty in inputs:
                raise RuleError("a batch without samples")
            rule_of(node)
        except Exception as wrong:  # the rule may be a user's function, which can raise anything
            about = info(node)
            place = {
                "location": about.source or None,
                "source_text": about.source_text or None,
                "fqn": about.fqn or None,
            }
            if empty is not None:
                raise error(
                    "SC103",
                    f"'{info(empty).name}' of {list(type_of(empty).shape)} has no elements, and {node.target} reads it",
                    **place,
                    tensor=info(empty).name,
                    hint="give a sample batch of a real size",
                ) from None
            kind = "" if isinstance(wrong, RuleError) else f"{type(wrong).__name__}: "
            shapes = [str(list(type_of(value).shape)) for value in operands(node)]
            results = [str(list(shape)) for shape in result_shapes(node)]
            raise error(
                "SC303",
                f"the sharding rule of {node.target} does not fit a call: {kind}{wrong}",
                **place,
                op=str(node.target),
                hint=f"the rule must fit tensors of shapes {', '.join(shapes)} -> {', '.join(results)}",
            ) from wrong


def sharded_dims(graph: Graph, bound: Sequence[Bound], store: Store) -> list[ShardedDim]:
    """The dims that annotations of parameters shard, which unequal sections may be taken of; and those that say so."""
    held = dict(store.layout)
    dims = [
        ShardedDim(name, d, 1, in_elements(type.sizes[d]))
        for name, type in held.items()
        for d, dim in enumerate(type.dims)
        if dim and isinstance(dim[0].size, Blocks) and name in graph.input_nodes()
    ]
    for annotation in bound:
        value = find_value(graph, annotation)
        if value is None or annotation.name in held:
            continue
        for d, placement in enumerate(annotation.placement.dims[: type_of(value).ndim]):
            if placement.axes and placement.blocks == 1 and (annotation.kind == "param" or placement.unequal):
                ranks = graph.mesh.size(graph.mesh.resolve(placement.axes))
                if sum(map(abs, placement.unequal)) in (0, type_of(value).shape[d]):
                    dims.append(ShardedDim(_port(graph, value, annotation), d, ranks, placement.unequal))
    return dims


def sharded_sequences(graph: Graph, bound: Sequence[Bound], context: Context) -> list[ShardedSequence]:
    """The dims of inputs behind the first that annotations shard; the first too, if `context` names the axis."""
    found: list[ShardedSequence] = []
    for annotation in bound:
        value = find_value(graph, annotation) if annotation.kind == "input" else None
        if value is None:
            continue
        for d, placement in enumerate(annotation.placement.dims[: type_of(value).ndim]):
            axes = placement.axes
            named = not context.axis or bool(set(axes) & set(context.axis))
            if not axes or placement.blocks > 1 or placement.unequal or (d == 0 and not (context.axis and named)):
                continue
            text, port = f'{annotation.name} = "{annotation.placement}"', _port(graph, value, annotation)
            ranks = graph.mesh.size(axes[0])
            length = type_of(value).shape[d]
            found.append(ShardedSequence(port, d, length, axes[0], ranks, named, text, annotation.location, axes))
    return found


def _port(graph: Graph, value: fx.Node, annotation: Bound) -> str:
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    return next((p.name for p, n in pairs if n is value), annotation.name)


def cuts_of(graph: Graph, bound: Sequence[Bound]) -> list[DimCut]:
    """The factorisations that blocked placements ask for: `3*tp` of 96 is (3, 32)."""
    cuts: list[DimCut] = []
    for annotation in bound:
        value = find_value(graph, annotation)
        if value is None:
            continue
        shape = type_of(value).shape
        for d, dim_placement in enumerate(annotation.placement.dims[: len(shape)]):
            if dim_placement.blocks > 1 and shape[d] % dim_placement.blocks == 0:
                cuts.append(
                    (_port(graph, value, annotation), d, (dim_placement.blocks, shape[d] // dim_placement.blocks))
                )
    return cuts
