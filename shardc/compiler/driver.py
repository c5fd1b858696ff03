"""The driver: every step from a traced graph to what ranks run, top to bottom.

    reference   ingest, normalize, accumulate, append_updates          on one device: what a program must equal
    body        atomize ... localize, online_softmax                   one rank of the mesh without the pipeline's axis
    stages      cut                                                    of a plan with a pipeline: graphs, lists, a proof
    parts       align, bucket, fuse                                    the body, or each graph of each stage

Each pass is verified, and shown to `Options.watch`, whatever graph it runs on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardc.compiler.pass_pipeline import (
    Options,
    body_passes,
    cuts_of,
    inspect,
    part_passes,
    refuse_empty,
    report_missing_rules,
    run,
)
from shardc.compiler.pipelining import Cut, pipeline_of
from shardc.frontend.ingest import ingest
from shardc.frontend.optimizer import AppendUpdates
from shardc.frontend.trace import Traced
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Tokens
from shardc.ir.mesh import Mesh
from shardc.partition.staged_program import Pipelined
from shardc.passes.accumulate import Accumulate
from shardc.passes.base import Pass
from shardc.passes.fusion.analysis.traffic import Traffic, traffic
from shardc.passes.fusion.fuse import check_excluded
from shardc.passes.normalize.normalize import Normalize
from shardc.passes.sharding.seed import Bound
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


@dataclass(frozen=True)
class CompiledGraphs:
    """The graphs of a program: `staged` is what ranks run where the plan has a pipeline, and the body otherwise.

    `traffic` is what moving data costs the body before and after fusion, where the body is fused.
    """

    reference: Graph
    body: Graph
    staged: Pipelined | None
    traffic: tuple[Traffic, Traffic] | None = None


def compile_step(task: Task, options: Options) -> CompiledGraphs:
    """Compile a step. Raises ShardcError for a plan that this step cannot have."""
    plan = task.plan
    reference = single_device(task.traced, task.placed, options)
    reference.diagnostics += task.notes
    accumulate = Accumulate(plan.microbatches, always=plan.pipeline is not None)
    reference = run(reference, [accumulate, *([task.updates] if task.updates is not None else [])], options)
    reference.tokens = task.tokens

    body = distribute(reference, task.bound, options)
    check_excluded(body, plan.fuse.exclude)
    start = time.perf_counter()
    if plan.pipeline is not None:
        _settle(body, options)
        staged = pipeline_of(plan.pipeline, plan, body, task.mesh)
        for graph in staged.graphs():
            inspect(Cut(), graph, graph, time.perf_counter() - start, options)
        staged = finish_stages(staged, part_passes(options), options)
        body.diagnostics += [note for graph in staged.graphs() for note in graph.diagnostics]
        return CompiledGraphs(reference, body, staged)
    body = finish_body(body, options, fused=False)
    fused = run(body, [options.fuse], options)
    return CompiledGraphs(reference, fused, None, (traffic(body), traffic(fused)) if plan.fuse.enabled else None)


def single_device(traced: Traced, mesh: Mesh, options: Options) -> Graph:
    """The traced microbatch, normalised. Raises ShardcError for what no rule can split (SC103, under strict SC301)."""
    graph = run(ingest(traced, mesh), [Normalize()], options)
    refuse_empty(graph)
    report_missing_rules(graph, strict=options.strict)
    return graph


def distribute(reference: Graph, bound: Sequence[Bound], options: Options, last: type[Pass] | None = None) -> Graph:
    """One rank's body of a step, which has no kernels yet; or what it is after the pass `last`."""
    todo = body_passes(bound, cuts_of(reference, bound), options)
    if last is not None:
        todo = todo[: 1 + next(i for i, one in enumerate(todo) if isinstance(one, last))]
    return run(reference.copy(), todo, options)


def finish_body(body: Graph, options: Options, *, fused: bool = True) -> Graph:
    """A body of a step without a pipeline, as ranks run it; or before it is `fused`."""
    *before_fusion, fuse = part_passes(options)
    body = run(body, before_fusion, options)
    _settle(body, options)
    return run(body, [fuse], options) if fused else body


def finish_stages(staged: Pipelined, todo: Sequence[Pass], options: Options) -> Pipelined:
    """The same lists over graphs that each pass has gone through: one pass over all graphs, then the next."""
    for one in todo:
        staged = staged.transformed(lambda graph, one=one: run(graph, [one], options))
    return staged


def _settle(body: Graph, options: Options) -> None:
    """A budget of recomputation is judged by what its step holds in the end."""
    if options.recompute.mode == "budget":
        options.recompute.settle(body)
