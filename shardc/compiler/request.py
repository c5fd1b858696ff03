"""What `shardc.compile` is asked for, and the way from there to the graphs of a program and its record.

    train    the loss, its gradients, and with an optimizer the update; model and modes as they are
    eval     the loss, if there is one, and the outputs, of the model as `model.eval()` makes it, under `no_grad`

An evaluation may be compiled `like` a program that trains: it then takes parameters and buffers as that program holds
them, stage by stage, so that both run on one state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
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
from shardc.compiler.pass_pipeline import Options, Watch
from shardc.compiler.pipelining import tensor_mesh
from shardc.frontend.evaluation_mode import evaluating
from shardc.frontend.optimizer import AppendUpdates, learning_rates
from shardc.frontend.sample_call import Call
from shardc.frontend.saved_state import saved_state
from shardc.frontend.token_weights import bind_tokens
from shardc.frontend.trace import Traced, trace
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.mesh import Mesh
from shardc.ir.program import PlanRecord
from shardc.partition.staged_program import StagedProgram
from shardc.passes.memory.recompute import Recompute
from shardc.passes.sharding.seed import Bound
from shardc.plan.schema import Plan
from shardc.runtime.execute.batch import describe_sample, leaves_of
from shardc.runtime.execute.microbatches import split
from shardc.runtime.train.result import Kept

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class Request:
    """The arguments of `compile`; of an evaluation also which outputs it keeps, and whose state it shares."""

    model: nn.Module
    batch: Any
    mesh: Mesh | Mapping[str, int] | str | Any = None
    plan: Plan | Mapping[str, Any] | str | Path | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    strict: bool = False
    watch: Watch | None = None
    mode: Mode = "train"
    kept: Kept = "all"
    like: StagedProgram | None = None

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
    model, optimizer, trains = request.model, request.optimizer, request.trains
    plan = collect_plan(model, request.plan)
    if request.like is not None:
        plan = _in_fewer_parts(plan, request.batch)
    mesh = read_mesh(request.mesh if request.mesh is not None else plan.mesh)
    placed = tensor_mesh(plan, mesh)
    micro = split(request.batch, plan.microbatches)[0]
    call = Call(model, request.batch, request.loss)
    tokens = bind_tokens(plan.loss, call) if trains or plan.loss.tokens in call.names else None
    precision, check_finite = bind_precision(plan)
    with evaluating(model, on=not trains):
        traced = trace(
            model,
            micro,
            request.loss,
            with_outputs=bool(plan.outputs) if trains else "scalars" if request.kept == "scalars" else True,
            microbatches=plan.microbatches,
            weighted=tokens is not None,
            precision=precision,
            forward_only=not trains,
        )
    read = {i.name for i in traced.inputs if i.role == "input" and i.node.users}
    call.refuse_unread({*read, *([] if plan.loss.tokens is None else [plan.loss.tokens])})
    if not any(output.role == "loss" for output in traced.outputs):
        tokens = None  # of an evaluation without a loss
    elif tokens is None:
        bind_tokens(plan.loss, call)  # raises for an input that the batch does not have
    bound = bind(plan if trains else _for_evaluation(request, plan, traced), traced, placed)
    store, keep = bind_storage(plan.storage, traced, placed)
    options = Options(
        request.strict or plan.strict,
        watch=request.watch,
        store=store if request.like is None else store.like(request.like.body),
        keep_gathered=keep,
        reduce=None if precision is None else precision.reduce,
    )
    options = bind_passes(plan, plan.hardware.value.on(mesh), options)
    updates = None
    if not trains:
        options = replace(options, recompute=Recompute(hardware=options.hardware))
    elif optimizer is not None or check_finite or plan.clip_grad_norm is not None:
        updates = AppendUpdates(model, optimizer, plan.clip_grad_norm, precision, check_finite)
    notes = [*traced.diagnostics, *idle_axes(traced, placed, bound, store)]
    notes += [*whole_gradients(plan), *without_gradient(traced)] if trains else _without_backward(plan)
    task = Task(traced, plan, mesh, placed, bound, updates, tokens, notes, request.like)
    record = _record(request, call, plan, traced, options, updates)
    if plan.microbatches > 1 and any(_output_shapes(traced).values()):
        record["by_row"] = _by_row(request, call, traced, plan.microbatches)
    graphs = compile_step(task, options)
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
        record |= {"fills": updates.fills, "nonfinite": plan.nonfinite, "clip_grad_norm": plan.clip_grad_norm}
    if request.optimizer is not None:
        rates = {name: float(rate) for name, rate in learning_rates(request.optimizer).items()}
        record |= {"optimizer": type(request.optimizer).__name__, "rates": rates}
    return record


def _in_fewer_parts(plan: Plan, batch: Any) -> Plan:
    """The plan for an evaluation on a batch that need not be as long as training's: in as many microbatches as divide
    it, of those that a step has."""
    rows = next((leaf.shape[0] for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
    count = math.gcd(rows, plan.microbatches)
    if plan.pipeline is None:
        return plan.model_copy(update={"accumulate": count})
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"microbatches": count})})


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
    and, beside training, of inputs that only training has, such as labels."""
    outputs = {pattern: a for pattern, a in plan.outputs.items() if request.kept == "all" and pattern != "loss"}
    inputs = plan.inputs
    if request.like is not None:
        names = [i.name for i in traced.inputs if i.role == "input"]
        inputs = {pattern: a for pattern, a in inputs.items() if any(map(a.matches, names))}
    return plan.model_copy(update={"outputs": outputs, "inputs": inputs})


def _without_backward(plan: Plan) -> Iterator[Diagnostic]:
    """A note of what a plan says of gradients, which a program for evaluation does not have: one plan serves both."""
    asked = {
        "clip_grad_norm": plan.clip_grad_norm is not None,
        "nonfinite": plan.nonfinite not in (None, "ignore"),
        "recompute": plan.recompute.mode != "none",
    }
    names = [f"'{key}'" for key, said in asked.items() if said]
    if names:
        message = f"{' and '.join(names)} of the plan {'is' if len(names) == 1 else 'are'} without effect"
        cause = "a program for evaluation has no backward"
        yield Diagnostic("SC218", f"{message}: {cause}", "note")
