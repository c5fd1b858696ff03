"""What a request is compiled from: a trace, the plan bound to it, and the passes with their options.

    Request, Plan  ->  Prepared(task, options, record)  ->  graphs, by `driver.compile_step`

All that the model, the batch and the user's code decide is decided here, by running them. What follows depends on what
is prepared, on the optimizer's own update, and on shardc's passes: on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardc.compiler.binding import (
    bind,
    bind_passes,
    bind_precision,
    bind_storage,
    idle_axes,
    read_mesh,
    whole_gradients,
    without_gradient,
)
from shardc.compiler.driver import Task
from shardc.compiler.pass_pipeline import Options
from shardc.compiler.pipelining import tensor_mesh
from shardc.compiler.request import Request
from shardc.compiler.step_plan import bound_step
from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.optimizer import AppendUpdates
from shardc.frontend.program_optimizers import learning_rates, optimizers_of
from shardc.frontend.sample_call import Call
from shardc.frontend.saved_state import saved_state
from shardc.frontend.token_weights import bind_tokens, refuse_unpaddable
from shardc.frontend.trace import Traced, trace
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Tokens
from shardc.ir.mesh import Mesh
from shardc.ir.program import PlanRecord
from shardc.ir.units import UnequalError
from shardc.passes.memory.recompute import Recompute
from shardc.passes.normalize.limit_experts import LimitExperts
from shardc.passes.normalize.quantize import Quantize
from shardc.plan.schema import Plan
from shardc.runtime.execute.batch import describe_sample
from shardc.runtime.execute.microbatches import split


@dataclass(frozen=True)
class Prepared:
    """A request before its passes run. To compile it consumes its trace.

    `record` is what a program says of its plan and batch; `fused_on`, what says that it has kernels where the plan
    leaves that open.
    """

    request: Request
    task: Task
    options: Options
    record: PlanRecord
    fused_on: str
    sample: Sample
    all_layers: bool = False  # were all of many equal layers recorded, as few did not tell?

    def of_all_layers(self) -> Prepared:
        """The same from a trace that records all layers, where the few that were recorded do not tell what all do."""
        traced = self.sample.traced(self.request, all_layers=True)
        prepared = _prepared(self.request, self.task.plan, self.fused_on, self.sample, traced)
        return replace(prepared, all_layers=True)


@dataclass(frozen=True)
class Sample:
    """The sample batch of a request as it is traced: one `microbatch`, and in which `form` its trace is asked for."""

    call: Call  # of the whole batch
    microbatch: Any
    tokens: Tokens | None
    form: Mapping[str, Any]

    @classmethod
    def of(cls, request: Request, plan: Plan) -> Sample:
        microbatch = split(request.batch, plan.microbatches)[0]
        call = Call(request.model, request.batch, request.loss)
        tokens = bind_tokens(plan.loss, call) if request.trains or plan.loss.tokens in call.names else None
        kept = bool(plan.outputs) if request.trains else "scalars" if request.kept == "scalars" else True
        form = {
            "with_outputs": kept,
            "microbatches": plan.microbatches,
            "weighted": tokens is not None,
            "precision": bind_precision(plan)[0],
            "forward_only": not request.trains,
        }
        return cls(call, microbatch, tokens, form)

    def traced(self, request: Request, *, all_layers: bool = False) -> Traced:
        """Of few of many equal layers, which is to be checked, or of all."""
        with evaluating(request.model, on=not request.trains):
            how: dict[str, Any] = {**self.form, "all_layers": all_layers, "checked": False}
            return trace(request.model, self.microbatch, request.loss, **how)


def prepare(request: Request, plan: Plan, fused_on: str) -> Prepared:
    """Of a plan of which nothing is left open but whether products are decomposed. That its trace tells what all layers
    do is seen when it is compiled. Raises ShardcError with every problem found."""
    tensor_mesh(plan, _mesh(request, plan))  # raises for one that no plan can have, before anything takes long
    sample = Sample.of(request, plan)
    traced = request.traced or sample.traced(request)
    try:
        return _prepared(request, plan, fused_on, sample, traced)
    except ShardcError:
        if traced.layers is None:
            raise
        try:
            traced.layers.check()
        except UnequalError:
            return _prepared(request, plan, fused_on, sample, sample.traced(request, all_layers=True))
        raise


def _mesh(request: Request, plan: Plan) -> Mesh:
    return read_mesh(request.mesh if request.mesh is not None else plan.mesh)


def _prepared(request: Request, plan: Plan, fused_on: str, sample: Sample, traced: Traced) -> Prepared:
    optimizer, trains, call, tokens = request.optimizer, request.trains, sample.call, sample.tokens
    mesh = _mesh(request, plan)
    placed = tensor_mesh(plan, mesh)
    precision, check_finite = bind_precision(plan)
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
            request.model,
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
    if plan.microbatches > 1 and any(_output_shapes(traced).values()):
        record["by_row"] = _by_row(request, call, traced, plan.microbatches)
    if plan.microbatches > 1:
        record["split"] = parts
    return Prepared(request, task, options, record, fused_on, sample)


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


def split_inputs(call: Call) -> list[str]:
    """The inputs that are split into microbatches: those whose dim 0 is that of the first."""
    rows = next((t.shape[0] for t in call.tensors if t.dim()), 0)
    return [name for name, t in zip(call.names, call.tensors, strict=True) if t.dim() and t.shape[0] == rows]


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
