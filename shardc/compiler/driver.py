"""The driver: every step from a traced graph to what ranks run, top to bottom.

    reference   ingest, normalize ... accumulate, append_updates       on one device: what a program must equal
    body        atomize ... localize, online_softmax                   one rank of the mesh without the pipeline's axis
    stages      cut                                                    by a plan's pipeline, else one: graphs and lists
    parts       align, bucket, fuse                                    each graph of each stage; of only one, the body

Each pass is verified, and shown to `Options.watch`, whatever graph it runs on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardc.compiler.decompose_auto import DecomposeChoice, can_decompose, choose
from shardc.compiler.layer_copies import Bodies, made_by_layers, normalized_by_layers, sharded_by_layers
from shardc.compiler.pass_pipeline import (
    Options,
    Verified,
    body_passes,
    call_passes,
    cuts_of,
    inspect,
    kernel_passes,
    refuse_unfit,
    report_missing_rules,
    run,
    sharded_dims,
    sharded_sequences,
)
from shardc.compiler.pipelining import inspect_stages, stages_of
from shardc.frontend.ingest import ingest
from shardc.frontend.join_loads import JoinLoads
from shardc.frontend.optimizer import AppendUpdates
from shardc.frontend.trace import Traced
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Tokens
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import in_first_microbatch
from shardc.ir.units import UnequalError
from shardc.partition.stage_offload import offload_stages
from shardc.partition.staged_program import StagedProgram, one_stage
from shardc.passes.accumulate import Accumulate
from shardc.passes.base import Pass
from shardc.passes.communication.combine import Combine
from shardc.passes.communication.decompose import Decompose
from shardc.passes.communication.report_gathers import ReportGathers
from shardc.passes.fusion.analysis.traffic import Traffic, traffic
from shardc.passes.fusion.fuse import check_excluded
from shardc.passes.merge_updates import MergeUpdates
from shardc.passes.normalize.group_experts import GroupExperts
from shardc.passes.normalize.imply_masks import ImplyMasks
from shardc.passes.normalize.limit_experts import LimitExperts, group_as_ranks
from shardc.passes.normalize.normalize import Normalize
from shardc.passes.normalize.sum_parts import SumParts
from shardc.passes.sharding.seed import Bound
from shardc.plan.overlap import AUTO
from shardc.plan.schema import Plan


@dataclass(frozen=True)
class Task:
    """What is compiled: a traced microbatch, its plan bound to it, and what a step makes of its gradients.

    `mesh` is the user's; `traced` was bound on `placed`, the mesh without the pipeline's axis.
    """

    traced: Traced
    plan: Plan
    mesh: Mesh
    placed: Mesh
    bound: Sequence[Bound]
    updates: AppendUpdates | None = None  # None: gradients are outputs, as they are
    tokens: Tokens | None = None
    notes: Sequence[Diagnostic] = field(default_factory=list[Diagnostic])
    like: StagedProgram | None = None  # the program whose parameters and buffers this one takes as that holds them


@dataclass(frozen=True)
class CompiledGraphs:
    """The graphs of a program for the ranks of `mesh`. `pipelined` is what they run where a pipeline cuts the body.

    `traffic` is what moving data costs the body before and after fusion, where the body is fused. `decompose` is what
    was chosen where the plan left to a prediction whether products are decomposed.
    """

    reference: Graph
    body: Graph
    mesh: Mesh
    pipelined: StagedProgram | None = None
    traffic: tuple[Traffic, Traffic] | None = None
    decompose: DecomposeChoice | None = None


_Finished = tuple[StagedProgram, StagedProgram, DecomposeChoice | None]  # before it has kernels, and with them


def compile_step(task: Task, options: Options) -> CompiledGraphs:
    """Compile a step. Raises ShardcError for a plan that this step cannot have."""
    plan = task.plan
    reference, few = _references(task, options)
    made = _by_layers(task, reference, few, options)
    if made.finished is not None:
        group_as_ranks(reference, made.finished)
        merge = [pass_ for pass_ in call_passes(options) if isinstance(pass_, MergeUpdates)]
        unfused = one_stage(run(made.finished, merge, options))
        return _compiled(task, reference, (unfused, _with_kernels(unfused, options), None), options)
    body = distribute(reference, task.bound, options) if made.body is None else made.body
    group_as_ranks(reference, body)
    check_excluded(body, plan.fuse.exclude)
    staged = stages_of(plan, body, task.mesh, options, task.like)
    finished = _decided(task, staged, reference, options)
    if staged.body is body:
        return _compiled(task, reference, finished, options)
    _, fused, choice = finished
    body.diagnostics += [note for graph in fused.graphs() for note in graph.diagnostics]  # which no rank runs
    return CompiledGraphs(reference, body, fused.mesh, fused, decompose=choice)


def _compiled(task: Task, reference: Graph, finished: _Finished, options: Options) -> CompiledGraphs:
    """Of a step without a pipeline."""
    unfused, fused, choice = finished
    for graph in (unfused.body, fused.body):  # stages gather once a step anyway
        keep_gathered(graph, options)
    bytes_moved = (traffic(unfused.body), traffic(fused.body)) if task.plan.fuse.enabled else None
    return CompiledGraphs(reference, fused.body, fused.mesh, traffic=bytes_moved, decompose=choice)


def _references(task: Task, options: Options) -> tuple[Graph, Graph | None]:
    """The step on one device; and with few of its equal layers, where no more is known of one than of another."""
    plan, placed = task.plan, task.placed
    by_layers = _normalized_by_layers(task.traced, placed, options)
    reference, few = by_layers or (single_device(task.traced, placed, options), None)
    few = few if task.updates is None else None  # which may be other ones in each layer
    made: list[Graph] = []
    for graph in filter(None, (reference, few)):
        graph.diagnostics += task.notes
        made.append(accumulated(graph, plan.microbatches, options, task.updates, always=plan.pipeline is not None))
        made[-1].tokens = task.tokens
    return made[0], made[1] if few is not None else None


def _by_layers(task: Task, reference: Graph, few: Graph | None, options: Options) -> Bodies:
    """What can be made of a step by few of its equal layers. What looks over the whole step then sees the whole step:
    the cut of a pipeline, updates that are merged, kernels."""

    def finished(body: Graph, few: Options) -> Graph:
        staged = one_stage(body)
        if _is_open(task, staged, few):
            raise UnequalError("whether products are decomposed is predicted of the whole step")
        return finish(staged, few, fused=False, merged=False).body

    is_cut = task.plan.pipeline is not None
    finishing = None if is_cut or task.plan.fuse.exclude else finished  # values are excluded by names that a body has
    return made_by_layers(reference, task.bound, options, distribute, finishing, few) or Bodies(None)


def _is_open(task: Task, staged: StagedProgram, options: Options) -> bool:
    """Is it left to a prediction whether products are decomposed?"""
    plan = task.plan
    auto = plan.overlap.decompose == AUTO and not plan.symbols
    return auto and can_decompose(staged, options.hardware, task.mesh)


def _decided(task: Task, staged: StagedProgram, reference: Graph, options: Options) -> _Finished:
    """The step before and after it is fused, with products decomposed where the plan or a prediction says so."""
    if not _is_open(task, staged, options):
        return *_finished(staged, options), None
    ways = {way: replace(options, decompose=Decompose(way), watch=None) for way in (False, True)}
    steps = {way: _finished(staged.transformed(lambda graph: graph.copy()), ways[way]) for way in ways}
    choice = choose(steps[False][1], steps[True][1], reference, options.hardware)
    if options.watch is not None:  # which sees the passes of one way
        return *_finished(staged, replace(ways[choice.decomposed], watch=options.watch)), choice
    return *steps[choice.decomposed], choice


def _finished(staged: StagedProgram, options: Options) -> tuple[StagedProgram, StagedProgram]:
    unfused = finish(staged, options, fused=False)
    return unfused, _with_kernels(unfused, options)


def single_device(traced: Traced, mesh: Mesh, options: Options) -> Graph:
    """The traced microbatch, normalised. Raises ShardcError for what no rule can split (SC103, SC303, under strict
    SC301)."""
    by_layers = _normalized_by_layers(traced, mesh, options)
    return _normalized(ingest(traced, mesh), options) if by_layers is None else by_layers[0]


def _normalized_by_layers(traced: Traced, mesh: Mesh, options: Options) -> tuple[Graph, Graph] | None:
    # Equal layers may be normalised each in its own way: products of 8-bit floats are asked for by name, and experts
    # that are limited are counted.
    if traced.layers is None or options.quantize.compute is not None or options.limit != LimitExperts():
        return None
    return normalized_by_layers(traced.layers.graph(), mesh, lambda few: _normalized(few, options), options)


def _normalized(graph: Graph, options: Options) -> Graph:
    apart = SumParts(options.fuse.enabled)
    passes = [Normalize(), ImplyMasks(), GroupExperts(), options.limit, options.quantize, apart]
    graph = run(graph, passes, options)
    refuse_unfit(graph)
    report_missing_rules(graph, strict=options.strict)
    return graph


def accumulated(
    microbatch: Graph, count: int, options: Options, updates: AppendUpdates | None = None, *, always: bool = False
) -> Graph:
    """A normalised microbatch as a step of several, with the optimizer's `updates`."""
    return run(
        microbatch,
        [Accumulate(count, always=always), JoinLoads(), *([updates] if updates is not None else [])],
        options,
    )


def keep_gathered(graph: Graph, options: Options) -> None:
    """Let the first microbatch of a step gather weights for all, where ranks have whole weights by ZeRO-1 and 2.

    Then they hold them until the last microbatch ends, those too that only forward reads. A plan that stores single
    weights in shards asks for less, and an evaluation lets go of each weight once it is read.
    """
    store = options.store
    graph.gathers_once = store.zero in (1, 2) and not store.bound and not graph.is_forward_only
    graph.gathers_once = bool(in_first_microbatch(graph))  # is there any?


def distribute(
    reference: Graph,
    bound: Sequence[Bound],
    options: Options,
    last: type[Pass] | None = None,
) -> Graph:
    """One rank's body of a step, which has no kernels yet; or what it is after the pass `last`."""
    behind = _passes(body_passes((), (), (), options), Combine, last)
    if behind and (sharded := sharded_by_layers(reference, bound, options, _sharded)) is not None:
        return run(sharded, behind, options)
    return _sharded(reference, bound, options, last)


def _sharded(reference: Graph, bound: Sequence[Bound], options: Options, last: type[Pass] | None = Combine) -> Graph:
    cuts = [*cuts_of(reference, bound), *options.store.cuts(reference)]
    sharded = sharded_dims(reference, bound, options.store)
    sequences = sharded_sequences(reference, bound, options.context)
    todo = body_passes(bound, cuts, sharded, options, sequences)
    return run(reference.copy(), _passes(todo, None, last), options)


def _passes(todo: Sequence[Pass], after: type[Pass] | None, last: type[Pass] | None) -> Sequence[Pass]:
    """Those behind the pass `after`, up to `last`."""
    start, end = (
        None if kind is None else 1 + next(i for i, p in enumerate(todo) if isinstance(p, kind))
        for kind in (after, last)
    )
    return todo[start:end]


def localized(sharded: Graph, options: Options) -> Graph:
    """One rank's body, of a copy of what `distribute` left after ReportGathers: recomputation, and all behind it."""
    return run(sharded.copy(), _passes(body_passes((), (), (), options), ReportGathers, None), options)


def finish(staged: StagedProgram, options: Options, *, fused: bool = True, merged: bool = True) -> StagedProgram:
    """The same lists over graphs as ranks run them, or before they are `fused`, or their updates `merged`: each pass
    goes through all of them."""
    verified = Verified()
    for pass_ in (each for each in call_passes(options) if merged or not isinstance(each, MergeUpdates)):
        staged = staged.transformed(lambda graph, pass_=pass_: run(graph, [pass_], options, verified))
    if staged.body in staged.graphs():  # of a pipeline, the cut has judged what a step holds
        options.recompute.settle(staged.body)
    return _with_kernels(staged, options) if fused else staged


def _with_kernels(staged: StagedProgram, options: Options) -> StagedProgram:
    """The last passes: what graphs leave in memory is known once they have their kernels."""
    fuse, join, *offload = kernel_passes(options)
    fused = staged.transformed(lambda graph: run(graph, [fuse, join], options))
    if staged.axis:
        fused, offload = _stages_offloaded(fused, options), [options.states]
    moved = fused.transformed(lambda graph: run(graph, offload, options))
    if moved.body in moved.graphs() and moved.body is not fused.body:
        options.recompute.settle(moved.body)
    return moved


def _stages_offloaded(fused: StagedProgram, options: Options) -> StagedProgram:
    """What stages of a pipeline hold for their backward is moved in all of their graphs, which change together."""
    start = time.perf_counter()
    moved = offload_stages(fused, options.offload)
    seconds = time.perf_counter() - start
    for graph in dict.fromkeys(moved.graphs()):
        inspect(options.offload, graph, graph, seconds, options)
    if moved is not fused:
        inspect_stages(options.offload, moved, options)
    return moved


def finish_body(body: Graph, options: Options) -> Graph:
    """A body of a step without a pipeline, as ranks run it."""
    return finish(one_stage(body), options).body
