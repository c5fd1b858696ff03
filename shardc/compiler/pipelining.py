"""A plan's `pipeline`, bound to a mesh and a body: what may not be said beside it, the cut and the schedule.

The body is compiled for the mesh of the other axes, as if there were no pipeline; then it is cut. So nothing that
shards a tensor may name the pipeline's axis, and a step's microbatches are its own: to accumulate more is to have more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardc.compiler.pass_pipeline import Options, inspect
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.partition.cut import cut
from shardc.partition.same_cut import StageNames
from shardc.partition.stage_offload import held_values, lighter, under_way, within
from shardc.partition.staged_check import stage_faults
from shardc.partition.staged_program import StagedProgram, mesh_without_axis, one_stage, scheduled
from shardc.passes.base import Pass
from shardc.plan.pipeline import Pipelining
from shardc.plan.schema import Plan
from shardc.schedule.schedules.judge import peak_activations


def tensor_mesh(plan: Plan, mesh: Mesh) -> Mesh:
    """The mesh that tensors are placed on: the axes that the pipeline leaves. Raises for what does not go with it."""
    pipeline = plan.pipeline
    if pipeline is None:
        return mesh
    pipeline.on(mesh)
    problems = [*_accumulated(plan, pipeline), *_placed(plan, pipeline.axis)]
    if problems:
        raise ShardcError(*problems)
    return mesh_without_axis(mesh, pipeline.axis)


@dataclass(frozen=True)
class Cut(Pass):
    """cut: what the pass list calls the step in which a body becomes the graphs of stages (`stages_of`)."""


def stages_of(
    plan: Plan, body: Graph, mesh: Mesh, options: Options, like: StagedProgram | None = None
) -> StagedProgram:
    """The step in stages, as the plan's pipeline cuts it along an axis of the whole mesh; without one, in one stage.
    Stages are those of `like`, if that is given."""
    if plan.pipeline is None:
        return one_stage(body)
    start = time.perf_counter()
    options.recompute.settle(body)
    staged = _cut(plan.pipeline, plan, body, mesh, options, like)
    for graph in staged.graphs():
        inspect(Cut(), graph, graph, time.perf_counter() - start, options)
    inspect_stages(Cut(), staged, options)
    return staged


def inspect_stages(pass_: Pass, staged: StagedProgram, options: Options) -> None:
    """Verify what a pass over all graphs of a pipeline left: each value and sum has one type in all of them, and lists,
    ports and transfers fit. A pass over one graph at a time changes no type that another graph knows
    (`passes.verify.same_interface`).

    Raises AssertionError with every fault, as `inspect` does.
    """
    if options.verify:
        broken = [f"@{fault.graph}: {fault.message}" for fault in stage_faults(staged)]
        assert not broken, f"{pass_.name} broke what the pipeline's graphs share:\n" + "\n".join(broken[:20])


def _cut(
    pipeline: Pipelining, plan: Plan, body: Graph, mesh: Mesh, options: Options, like: StagedProgram | None
) -> StagedProgram:
    """The localized body is kept.

    What takes more memory than the plan allows is an error, or for recomputation a warning among the body's.
    """
    stages, virtual = pipeline.on(mesh)
    try:
        names = None if like is None else StageNames.of(stage.forward for stage in like.stages)
        whole, fuse = _split(mesh, body), options.fuse
        staged = cut(body, stages, pipeline.split, options.hardware, pipeline.axis, names, whole, fuse)
    except ShardcError as wrong:
        raise ShardcError(*(_located(d, pipeline, "split", "stages") for d in wrong.diagnostics)) from None
    try:
        memory = None if pipeline.memory is None else float(pipeline.memory)
        offload = options.offload
        held = held_values(staged, offload.least) if offload.activations else []
        # No schedule has more under way than all microbatches: so much is moved for certain.
        most = [{stage: body.microbatches * virtual} for stage in range(len(staged.stages))]
        costs = lighter(staged.costs, staged.pipeline.bytes, within(held, offload.activations, most))
        result = scheduled(
            staged, pipeline.schedule, virtual, costs, memory, _split(mesh, body), pipeline.axis, like=like
        )
        if held:
            most = under_way(result.lists.work(c) for c in result.coordinate_range)
            costs = lighter(staged.costs, staged.pipeline.bytes, within(held, offload.activations, most))
            result = replace(result, costs=replace(result.costs, stages=costs.stages))
    except ShardcError as wrong:
        raise ShardcError(*(_located(d, pipeline, "schedule", "memory") for d in wrong.diagnostics)) from None
    if body.is_forward_only:  # nothing is held for a backward
        return result
    activations = max(peak_activations(result.lists.work(c), result.costs) for c in range(len(result.lists.ranks)))
    if activations > result.costs.memory:
        limit = human_bytes(round(result.costs.memory))
        message = f"a rank holds {human_bytes(round(activations))} of activations; the limit is {limit}"
        diagnostic = Diagnostic(
            "SC214", message, hint="write schedule: auto, more microbatches of fewer rows, or recompute"
        )
        raise ShardcError(pipeline.located(diagnostic, "memory"))
    if plan.recompute.mode == "budget":
        _within_budget(plan.recompute.budget, activations, body)
    return result


def _within_budget(budget: int, activations: float, body: Graph) -> None:
    """Recompute keeps one microbatch of the whole model within a budget; here what a rank holds is compared with it."""
    all_done = [d for d in body.diagnostics if d.code == "SC214"]
    body.diagnostics = [d for d in body.diagnostics if d.code != "SC214"]
    if activations > budget:
        message = (
            f"a rank holds {human_bytes(round(activations))} of activations, those of all microbatches under way; "
            f"the budget is {human_bytes(budget)}"
        )
        hint = "add stages" if all_done else f"write recompute: {{budget: {human_bytes(int(budget**2 / activations))}}}"
        body.diagnostics.append(Diagnostic("SC214", message, "warning", hint=f"{hint}, or use smaller microbatches"))


def _accumulated(plan: Plan, pipeline: Pipelining) -> Iterator[Diagnostic]:
    if plan.accumulate > 1:
        message = f"'accumulate: {plan.accumulate}' does not go with 'pipeline', whose microbatches are accumulated"
        hint = f"leave it out, and write microbatches: {plan.accumulate * pipeline.microbatches} for as many in all"
        yield pipeline.located(Diagnostic("SC208", message, hint=hint), "microbatches")


def _placed(plan: Plan, axis: str) -> Iterator[Diagnostic]:
    """Every annotation that names the pipeline's axis."""
    what = f"'{axis}' is the pipeline's axis: its ranks run stages, and none holds a shard along it"
    kinds = ("params", "inputs", "activations", "outputs")
    placed = [annotation for kind in kinds for annotation in plan.annotations(kind)]
    for annotation in (*placed, *plan.storage.params.values()):
        if any(name.partition(":")[0] == axis for name in annotation.placement.axes):
            hint = "place it over the other axes; which stage has it is for `split` to say"
            yield Diagnostic("SC223", what, location=annotation.origin, tensor=annotation.cause(), hint=hint)
    if axis in plan.storage.axes:
        hint = "each rank stores the parameters of its own stages already: name the other axes"
        yield Diagnostic("SC223", what, cause=f"storage.axes: {list(plan.storage.axes)}", hint=hint)


def _located(diagnostic: Diagnostic, pipeline: Pipelining, *keys: str) -> Diagnostic:
    """A proof's errors have places of their own, in lists that the user never wrote."""
    return pipeline.located(diagnostic, *keys) if diagnostic.location is None else diagnostic


def _split(mesh: Mesh, body: Graph) -> Mesh:
    """The user's mesh with the sub-axes that the body's axes were split into."""
    parts = {name: [(sub, n) for sub, n in body.mesh.axes if sub.partition(":")[0] == name] for name in mesh.names}
    return Mesh(part for name, size in mesh.axes for part in parts[name] or [(name, size)])
