"""What `shardc.compile` is asked for, and the way from there to the graphs of a program and its record.

    train    the loss, its gradients, and with an optimizer the update; model and modes as they are
    eval     the loss, if there is one, and the outputs, of the model as `model.eval()` makes it, under `no_grad`

A program may be compiled `like` one that trains: it then takes parameters, buffers and state as that program holds
them, stage by stage, so that both run on one state. An evaluation is, and a step for batches of another shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from shardc.compiler.binding import (
    bind,
    bind_passes,
    bind_precision,
    bind_storage,
    check_loss,
    check_module,
    collect_plan,
    idle_axes,
    read_mesh,
    whole_gradients,
    without_gradient,
)
from shardc.compiler.driver import CompiledGraphs, Task, compile_step
from shardc.compiler.fusion_default import with_fusion
from shardc.compiler.pass_pipeline import Options, Watch
from shardc.compiler.pipelining import tensor_mesh
from shardc.compiler.split_auto import Splitting
from shardc.compiler.step_plan import Held, bound_step
from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.optimizer import AppendUpdates
from shardc.frontend.program_optimizers import Optimizers, learning_rates, optimizers_of
from shardc.frontend.sample_call import Call
from shardc.frontend.saved_state import saved_state
from shardc.frontend.token_weights import bind_tokens, refuse_unpaddable
from shardc.frontend.trace import Traced, trace
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import fewest_microbatches
from shardc.ir.program import PlanRecord
from shardc.ir.units import UnequalError
from shardc.partition.staged_program import StagedProgram
from shardc.passes.memory.recompute import Recompute
from shardc.passes.normalize.limit_experts import LOAD, LimitExperts
from shardc.passes.normalize.quantize import Quantize
from shardc.passes.sharding.dispatch import layers_of_experts
from shardc.passes.sharding.seed import Bound
from shardc.plan.overlap import AUTO
from shardc.plan.schema import Plan
from shardc.runtime.execute.batch import describe_sample, leaves_of
from shardc.runtime.execute.data_parts import DataParts
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.microbatches import split
from shardc.runtime.train.result import Kept
from shardc.torch_compat import is_fake

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class Request:
    """The arguments of `compile`; also which outputs an evaluation keeps, and whose state a program shares. A step that
    `generates` takes its cache as it is held.

    `rows` are the most that a microbatch of such a program may have: as many as the other's.
    """

    model: nn.Module
    batch: Any
    mesh: Mesh | Mapping[str, int] | str | Any = None
    plan: Plan | Mapping[str, Any] | str | Path | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Optimizers = None
    strict: bool = False
    watch: Watch | None = None
    mode: Mode = "train"
    kept: Kept = "all"
    like: StagedProgram | None = None
    data_parts: int = 1  # of a program like another: in how many parts ranks bring a batch
    generates: bool = False
    cache: Held = ()
    rows: int = 0
    updates: bool = True  # of a step: else its gradients are returned, as they are
    traced: Traced | None = None  # the trace of this very call, where there is one
    checked: bool = True  # whether passes are verified: a planner's estimates run none of what they make

    @property
    def trains(self) -> bool:
        return self.mode == "train"

    def check(self) -> None:
        """Raise ShardcError for arguments that no program can be made of."""
        check_module(self.model)
        check_loss(self.loss)
        if self.mode not in get_args(Mode):
            hint = did_you_mean(str(self.mode), get_args(Mode), "modes")
            raise error("SC553", f"compile is given mode={self.mode!r}", hint=hint)
        if self.optimizer is not None and not optimizers_of(self.optimizer):
            hint = "leave optimizer= out to have gradients returned"
            raise error("SC107", "there is no optimizer in the list", hint=hint)
        if not self.trains and self.optimizer is not None:
            message = "a program for evaluation has no update for the optimizer to make"
            hint = 'leave out optimizer=, or mode="eval"; trainer.evaluate(batches) evaluates a program that trains'
            raise error("SC218", message, hint=hint)


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


def compiled(request: Request) -> Compiled:
    """Compile what is asked for. Raises ShardcError with every problem found."""
    request.check()
    model, trains = request.model, request.trains
    plan, fused_on = with_fusion(collect_plan(model, request.plan), model, request.batch)
    if not request.updates:
        plan = plan.model_copy(
            update={"clip_grad_norm": None, "nonfinite": None, "experts": plan.experts.without_refusal}
        )
    if request.like is not None or not trains:
        plan = plan.model_copy(update={"overlap": plan.overlap.in_parts(1)})
    if request.like is not None:
        plan = _in_parts(plan, request)
    if plan.clip_grad_norm is not None and trains and request.optimizer is None:
        plan.clip_grad_norm.refuse_returned()
    if plan.overlap.split != AUTO:
        return _compiled(request, plan, fused_on)
    return _predicted_faster(request, plan, fused_on)


def _predicted_faster(request: Request, plan: Plan, fused_on: str) -> Compiled:
    """In halves or whole: see `compiler.split_auto`."""
    ways: dict[int, Compiled] = {}

    def way(parts: int, *, watched: bool = False) -> Compiled:
        decided = plan.model_copy(update={"overlap": plan.overlap.in_parts(parts)})
        asked = replace(request, watch=request.watch if watched else None)
        ways[parts] = _compiled(asked if parts == 1 else replace(asked, traced=None), decided, fused_on)
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


def _compiled(request: Request, plan: Plan, fused_on: str) -> Compiled:
    """A plan of which nothing is left open but whether products are decomposed."""
    model, optimizer, trains = request.model, request.optimizer, request.trains
    mesh = read_mesh(request.mesh if request.mesh is not None else plan.mesh)
    placed = tensor_mesh(plan, mesh)
    micro = split(request.batch, plan.microbatches)[0]
    call = Call(model, request.batch, request.loss)
    tokens = bind_tokens(plan.loss, call) if trains or plan.loss.tokens in call.names else None
    precision, check_finite = bind_precision(plan)
    kept = bool(plan.outputs) if trains else "scalars" if request.kept == "scalars" else True
    many, weighted = plan.microbatches, tokens is not None
    form: dict[str, Any] = {"with_outputs": kept, "microbatches": many, "weighted": weighted, "precision": precision}
    record_step = partial(trace, model, micro, request.loss, **form, forward_only=not trains)
    with evaluating(model, on=not trains):
        traced = request.traced or record_step()
    read = {i.name for i in traced.inputs if i.role == "input" and i.node.users}
    call.refuse_unread({*read, *([] if plan.loss.tokens is None else [plan.loss.tokens])})
    if not any(output.role == "loss" for output in traced.outputs):
        tokens = None  # of an evaluation without a loss
    elif tokens is None:
        bind_tokens(plan.loss, call)  # raises for an input that the batch does not have
    if trains and plan.pad:
        refuse_unpaddable(plan.pad, tokens, call, plan.experts.factor)
    bound = bind(plan if trains else _for_evaluation(request, plan, traced), traced, placed)
    if request.generates:
        bound = bound_step(bound, traced, request.cache)
    store, keep = bind_storage(plan.storage, traced, placed)
    options = Options(
        request.strict or plan.strict,
        verify=request.checked,
        watch=request.watch,
        store=store if request.like is None else store.like(request.like.body, request.cache),
        keep_gathered=keep,
        reduce=None if precision is None else precision.reduce,
    )
    parts = split_inputs(call) if plan.microbatches > 1 else []
    options = bind_passes(plan, plan.hardware.value.on(mesh), options, parts)
    if request.generates:  # what a token is rounded to must not depend on those beside it
        options = replace(options, quantize=Quantize())
    updates = None
    if not trains:
        options = replace(options, recompute=Recompute(hardware=options.hardware), limit=LimitExperts())
    elif optimizer is not None or check_finite or plan.clip_grad_norm is not None or plan.experts.refuses_drops:
        updates = AppendUpdates(
            model,
            optimizer,
            None if plan.clip_grad_norm is None else plan.clip_grad_norm.norm,
            precision,
            check_finite,
            refuses_drops=plan.experts.refuses_drops,
            together=int(placed != mesh),  # the cut of a pipeline keeps apart what different stages hold
        )
    if not trains or optimizer is None:  # nothing is remembered from step to step
        options = replace(options, quantize=replace(options.quantize, history=0))
    notes = [*traced.diagnostics, *idle_axes(traced, placed, bound, store)]
    notes += [*whole_gradients(plan), *without_gradient(traced)] if trains else _without_backward(plan)
    on = placed if request.like is None else request.like.body.mesh  # with its sub-axes
    task = Task(traced, plan, mesh, on, bound, updates, tokens, notes, request.like)
    record = _record(request, call, plan, traced, options, updates)
    asks = any(d.code == "SC128" for d in traced.diagnostics)
    if plan.microbatches > 1 and any(_output_shapes(traced).values()):
        record["by_row"] = _by_row(request, call, traced, plan.microbatches)
    if plan.microbatches > 1:
        record["split"] = parts
    try:
        graphs = compile_step(task, options)
    except UnequalError:  # the layers that were recorded do not tell what all do, after all
        with evaluating(model, on=not trains):
            traced = record_step(all_layers=True)
        graphs = compile_step(replace(task, traced=traced), options)
    if asks and plan.microbatches > 1:
        _refuse_divided(request, graphs.reference, plan.microbatches)
    if plan.data.per_rank:
        record["data"] = plan.data.dumped()
        if request.like is None:
            _refuse_unequal_parts(plan, graphs.body, record.get("split", ()))
    if options.assign.chosen:
        record["dispatch"] = [list(choice) for choice in options.assign.chosen]
    if divided := [*options.attention.chosen, *options.keys.chosen]:
        record["context"] = [choice.plain() for choice in divided]
    if any(port.name == LOAD for port in graphs.body.outputs):
        record["experts"] = layers_of_experts(graphs.body)
    if fused_on:
        record["fused_on"] = fused_on
    if plan.overlap.decompose == AUTO:
        choice = graphs.decompose
        decided = plan.overlap.decided(decompose=choice is not None and choice.decomposed)
        record["text"] = plan.model_copy(update={"overlap": decided}).self_contained().dump()
        if choice is not None:
            record["decompose"] = list(choice)
    if graphs.traffic is not None:
        record["traffic"] = [list(moved) for moved in graphs.traffic]
    return Compiled(graphs, record, traced, bound, plan, mesh, options.strict)


def _record(
    request: Request,
    call: Call,
    plan: Plan,
    traced: Traced,
    options: Options,
    updates: AppendUpdates | None,
) -> PlanRecord:
    record: PlanRecord = {
        "text": plan.self_contained().dump(),
        "seed": plan.seed,
        "batch": describe_sample(request.batch, call.paths, traced.written),
        "hardware": options.hardware.quantities(),
    }
    if not request.trains:
        record["mode"] = request.mode
    if (state := saved_state(request.model)) is not None:
        record["state"] = [list(entry) for entry in state]  # as a file has them
    if plan.pipeline is not None:
        record["cut"] = plan.pipeline.place("split", "stages") or ""
    if plan.precision is not None and (precision := bind_precision(plan)[0]) is not None:
        record["precision"] = str(precision.compute)
    if updates is not None:
        record |= {"fills": updates.fills, "nonfinite": plan.nonfinite, "clip_grad_norm": updates.clip_grad_norm}
    if request.optimizer is not None:
        rates = {name: float(rate) for name, rate in learning_rates(request.optimizer).items()}
        names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers_of(request.optimizer))
        record |= {"optimizer": ", ".join(names), "rates": rates}
    return record


def _refuse_divided(request: Request, reference: Graph, count: int) -> None:
    """Raise ShardcError (SC512) for a sample whose microbatches answer what forward asks of them differently."""
    assumptions = IndexCheck(reference).assumptions
    for place, micro in enumerate(split(request.batch, count)):
        part = Call(request.model, micro, request.loss)
        if not any(t.is_meta or is_fake(t) for t in part.tensors):
            feed = dict(zip(part.names, part.tensors, strict=True))
            assumptions.check(feed, f": microbatch {place} of the sample answers otherwise than microbatch 0")


def _in_parts(plan: Plan, request: Request) -> Plan:
    """The plan for a batch that need not be as long as the first. All microbatches are of one size: of an evaluation
    as many as divide the batch, of those that a step has; of a step as few as divide it and have no more rows each. Of
    a batch that ranks bring in parts, each part is divided."""
    rows, most = rows_of(request.batch), max(request.rows, 1)
    if plan.microbatches == 1:
        return plan
    if rows % request.data_parts == 0:
        rows, most = rows // request.data_parts, max(most // request.data_parts, 1)
    count = fewest_microbatches(rows, most) if request.trains else math.gcd(rows, plan.microbatches)
    if plan.pipeline is None:
        return plan.model_copy(update={"accumulate": count})
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"microbatches": count})})


def _refuse_unequal_parts(plan: Plan, body: Graph, split: Sequence[str]) -> None:
    """Raise ShardcError (SC226), at the plan's line, for inputs that ranks cannot bring in parts."""
    try:
        DataParts.of(body, split)
    except ShardcError as wrong:
        raise ShardcError(*map(plan.data.located, wrong.diagnostics)) from None


def split_inputs(call: Call) -> list[str]:
    """The inputs that are split into microbatches: those whose dim 0 is that of the first."""
    rows = next((t.shape[0] for t in call.tensors if t.dim()), 0)
    return [name for name, t in zip(call.names, call.tensors, strict=True) if t.dim() and t.shape[0] == rows]


def rows_of(batch: Any) -> int:
    """The dim 0 that a batch is split along: that of its first tensor that has one."""
    return next((leaf.shape[0] for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _output_shapes(traced: Traced) -> dict[str, tuple[int, ...]]:
    return {o.name: tuple(o.node.meta["val"].shape) for o in traced.outputs if o.role == "output"}


def _by_row(request: Request, call: Call, traced: Traced, microbatches: int) -> list[str]:
    """The outputs whose dim 0 is the rows of a microbatch, and for the whole batch the rows of the batch.

    Of a size alone it cannot be told: a microbatch of 4 rows may give a table of 4 experts, and an output of twice as
    many rows may have them in any order. A model that takes no more rows than a microbatch's is judged by it.
    """
    rows = next((t.shape[0] for t in call.tensors if t.dim()), 0)
    part = rows // microbatches
    shapes = {name: shape for name, shape in _output_shapes(traced).items() if shape[:1] == (part,)}
    try:
        with evaluating(request.model, on=not request.trains):
            whole = _output_shapes(
                trace(request.model, request.batch, request.loss, with_outputs=True, forward_only=True)
            )
    except ShardcError:
        return list(shapes)
    return [name for name, shape in shapes.items() if whole.get(name) == (rows, *shape[1:])]


def _for_evaluation(request: Request, plan: Plan, traced: Traced) -> Plan:
    """The plan without annotations of outputs that an evaluation does not return as such (the loss is the result's),
    and, beside training, of what only training has: inputs such as labels, modules and outputs that need them."""
    outputs = {pattern: a for pattern, a in plan.outputs.items() if request.kept == "all" and pattern != "loss"}
    maps = {"inputs": plan.inputs, "activations": plan.activations, "outputs": outputs}
    if request.like is not None:
        names = {
            "inputs": [i.name for i in traced.inputs if i.role == "input"],
            "activations": [name for call in traced.modules for name in {call, call.partition("#")[0]}],
            "outputs": [o.name for o in traced.outputs if o.role == "output"],
        }
        maps = {
            key: {pattern: a for pattern, a in annotations.items() if any(map(a.matches, names[key]))}
            for key, annotations in maps.items()
        }
    return plan.model_copy(update=maps)


def _without_backward(plan: Plan) -> Iterator[Diagnostic]:
    """A note of what a plan says of gradients, which a program for evaluation does not have: one plan serves both."""
    asked = {
        "clip_grad_norm": plan.clip_grad_norm is not None,
        "nonfinite": plan.nonfinite not in (None, "ignore"),
        "recompute": plan.recompute.mode != "none",
        "offload": plan.offload.dumped() is not None,
    }
    names = [f"'{key}'" for key, said in asked.items() if said]
    if names:
        message = f"{' and '.join(names)} of the plan {'is' if len(names) == 1 else 'are'} without effect"
        cause = "a program for evaluation has no backward"
        yield Diagnostic("SC218", f"{message}: {cause}", "note")
