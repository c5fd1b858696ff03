"""The graphs of a program, and its record: a request is prepared, in one way or in two, and compiled.

    overlap: {split: 1}        one way
    overlap: {split: auto}     whole, and where that may pay in halves too: see `split_auto`

`Preparing` makes a way ready; the cache of programs has one of its own, which looks at what it prepares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardc.compiler.driver import CompiledGraphs, compile_step
from shardc.compiler.preparation import Prepared, prepare
from shardc.compiler.request import Request, rows_of
from shardc.compiler.split_auto import Splitting
from shardc.frontend.sample_call import Call
from shardc.frontend.trace import Traced
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.program import PlanRecord
from shardc.ir.units import UnequalError
from shardc.passes.normalize.limit_experts import LOAD
from shardc.passes.sharding.dispatch import layers_of_experts
from shardc.passes.sharding.seed import Bound
from shardc.plan.overlap import AUTO
from shardc.plan.schema import Plan
from shardc.runtime.execute.data_parts import DataParts
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.microbatches import split
from shardc.torch_compat import is_fake


@dataclass(frozen=True)
class Compiled:
    """The graphs of a program, and what they were made of."""

    graphs: CompiledGraphs
    record: PlanRecord
    traced: Traced
    bound: Sequence[Bound]
    plan: Plan
    mesh: Mesh  # the user's
    strict: bool
    prepared: Prepared


class Preparing:
    """How a request is read, and its ways made ready to be compiled."""

    def asked(self, request: Request) -> tuple[Plan, str]:
        request.check()
        return request.asked()

    def way(self, request: Request, plan: Plan, fused_on: str) -> Prepared:
        return prepare(request, plan, fused_on)

    def of_all_layers(self, prepared: Prepared) -> Prepared:
        return prepared.of_all_layers()


def compiled(request: Request, preparing: Preparing | None = None) -> Compiled:
    """Compile what is asked for. Raises ShardcError with every problem found."""
    preparing = preparing or Preparing()
    plan, fused_on = preparing.asked(request)
    if plan.overlap.split != AUTO:
        return _finished(preparing.way(request, plan, fused_on), preparing)
    return _predicted_faster(request, plan, fused_on, preparing)


def _predicted_faster(request: Request, plan: Plan, fused_on: str, preparing: Preparing) -> Compiled:
    """In halves or whole: see `compiler.split_auto`."""
    ways: dict[int, Compiled] = {}

    def way(parts: int, *, watched: bool = False) -> Compiled:
        asked = replace(request, watch=request.watch if watched else None)
        asked = asked if parts == 1 else replace(asked, traced=None)
        ways[parts] = _finished(preparing.way(asked, in_parts(plan, parts), fused_on), preparing)
        return ways[parts]

    try:
        taken, choice = Splitting(plan, rows_of(request.batch)).chosen(way)
    except ShardcError:
        if request.watch is not None and not ways:
            way(1, watched=True)  # which shows how far it comes, and raises the same
        raise
    if request.watch is not None:  # the passes of one way are shown
        taken = way(taken.plan.overlap.parts, watched=True)
    taken.record["halves"] = list(choice)
    return taken


def in_parts(plan: Plan, parts: int) -> Plan:
    """The plan with its batch in so many parts."""
    return plan.model_copy(update={"overlap": plan.overlap.in_parts(parts)})


def _finished(prepared: Prepared, preparing: Preparing) -> Compiled:
    """A way that passes have run over."""
    try:
        if (layers := prepared.task.traced.layers) is not None:
            layers.check()
        graphs = compile_step(prepared.task, prepared.options)
    except UnequalError:  # the layers that were recorded do not tell what all do, after all
        prepared = preparing.of_all_layers(prepared)
        graphs = compile_step(prepared.task, prepared.options)
    task, plan, options, record = prepared.task, prepared.task.plan, prepared.options, prepared.record
    refuse_divided(prepared, graphs.reference)
    if plan.data.per_rank:
        record["data"] = plan.data.dumped()
        if prepared.request.like is None:
            _refuse_unequal_parts(plan, graphs.body, record.get("split", ()))
    if options.assign.chosen:
        record["dispatch"] = [list(choice) for choice in options.assign.chosen]
    if divided := [*options.attention.chosen, *options.keys.chosen]:
        record["context"] = [choice.plain() for choice in divided]
    if any(port.name == LOAD for port in graphs.body.outputs):
        record["experts"] = layers_of_experts(graphs.body)
    if prepared.fused_on:
        record["fused_on"] = prepared.fused_on
    if plan.overlap.decompose == AUTO:
        choice = graphs.decompose
        decided = plan.overlap.decided(decompose=choice is not None and choice.decomposed)
        record["text"] = plan.model_copy(update={"overlap": decided}).self_contained().dump()
        if choice is not None:
            record["decompose"] = list(choice)
    if graphs.traffic is not None:
        record["traffic"] = [list(moved) for moved in graphs.traffic]
    return Compiled(graphs, record, task.traced, task.bound, plan, task.mesh, options.strict, prepared)


def asks(prepared: Prepared) -> bool:
    """Does forward ask for values of its sample, so that others may make another program?"""
    return any(d.code == "SC128" for d in prepared.task.traced.diagnostics)


def refuse_divided(prepared: Prepared, reference: Graph) -> None:
    """Raise ShardcError (SC512) for a sample whose microbatches answer what forward asks of them differently."""
    request, count = prepared.request, prepared.task.plan.microbatches
    if count == 1 or not asks(prepared):
        return
    assumptions = IndexCheck(reference).assumptions
    for place, micro in enumerate(split(request.batch, count)):
        part = Call(request.model, micro, request.loss)
        if not any(t.is_meta or is_fake(t) for t in part.tensors):
            feed = dict(zip(part.names, part.tensors, strict=True))
            assumptions.check(feed, f": microbatch {place} of the sample answers otherwise than microbatch 0")


def _refuse_unequal_parts(plan: Plan, body: Graph, split: Sequence[str]) -> None:
    """Raise ShardcError (SC226), at the plan's line, for inputs that ranks cannot bring in parts."""
    try:
        DataParts.of(body, split)
    except ShardcError as wrong:
        raise ShardcError(*map(plan.data.located, wrong.diagnostics)) from None
