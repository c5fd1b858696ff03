"""The public API: annotate an unmodified model, compile it, and get a `Program` to read, verify and run.

program = shardc.compile(model, batch, mesh=Mesh(dp=2, tp=2), plan="configs/plans/gpt2.yaml")
print(program.text())
assert program.verify().ok             # all ranks simulated here against the single device
trainer = program.launch()             # this rank under torchrun; simulated in this process otherwise
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardc import compiler
from shardc.binding import (
    PLAN,
    bind,
    bind_precision,
    bind_storage,
    check_loss,
    check_module,
    collect_plan,
    nothing_placed,
    read_mesh,
    read_plan,
)
from shardc.compiler import Options, Watch
from shardc.cost.flops import Flops, flops
from shardc.cost.memory import MemoryReport, memory
from shardc.explain import Explanation, explain
from shardc.ir import program as data
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from shardc.optimizer import append_updates, fingerprint, initial_state, learning_rates
from shardc.passes.accumulate import accumulate
from shardc.passes.recompute import Recompute
from shardc.plan import TOTAL, Plan
from shardc.precision import HALF
from shardc.runtime.batch import batch_inputs, describe
from shardc.runtime.eager import Witness, eager_outputs
from shardc.runtime.index_check import IndexCheck
from shardc.runtime.launch import StepResult, Trainer
from shardc.runtime.launch import launch as launch_program
from shardc.runtime.microbatches import feeds, split
from shardc.runtime.simulate import simulate
from shardc.runtime.verify import EAGER_HALF, EAGER_OWN, EAGER_TOLERANCE, TOLERANCE, Report, verify
from shardc.trace import trace
from shardc.trace_call import Call

Module = TypeVar("Module", bound=type[nn.Module])


def shard(
    *,
    params: Mapping[str, object] | None = None,
    inputs: Mapping[str, object] | None = None,
    activations: Mapping[str, object] | None = None,
    outputs: Mapping[str, object] | None = None,
) -> Callable[[Module], Module]:
    """Class decorator: placements that travel with a module class, itself untouched.

    Patterns are relative to the module, so a decorated block is annotated wherever it is used.
    """
    plan = Plan.of(params=params, inputs=inputs, activations=activations, outputs=outputs)

    def decorate(cls: Module) -> Module:
        setattr(cls, PLAN, plan)
        return cls

    return decorate


def annotate(model: nn.Module, plan: Plan | Mapping[str, Any] | str | Path) -> nn.Module:
    """Attach a plan to one model, which is returned; it is merged over what its classes carry."""
    check_module(model)
    object.__setattr__(model, PLAN, read_plan(plan))
    return model


def compile(
    model: nn.Module,
    batch: Any,
    *,
    mesh: Mesh | Mapping[str, int] | str | Any = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = False,
    watch: Watch | None = None,
) -> Program:
    """Compile one training step (loss and gradients) of `model` for every rank of `mesh`.

    `batch` is a tensor, a tuple of positional arguments or a dict of keyword arguments; the model and the batch may
    lie on the meta device. Without `loss`, the model returns a scalar or an output with `.loss`; else `loss(output,
    batch)`. Raises ShardcError with every problem found; under `strict` (or the plan's) also where work would be
    replicated that a placement asked to shard.
    """
    check_module(model)
    check_loss(loss)
    wanted = collect_plan(model, plan)
    chosen = read_mesh(mesh if mesh is not None else wanted.mesh)
    micro = split(batch, wanted.accumulate)[0]
    precision, check_finite = bind_precision(wanted)
    traced = trace(
        model,
        micro,
        loss,
        with_outputs=bool(wanted.outputs),
        microbatches=wanted.accumulate,
        precision=precision,
    )
    bound = bind(wanted, traced, chosen)
    store, keep = bind_storage(wanted.storage, traced, chosen)
    recompute = Recompute(**wanted.recompute.model_dump())
    options = Options(
        strict or wanted.strict,
        watch=watch,
        store=store,
        keep_gathered=keep,
        recompute=recompute,
        reduce=None if precision is None else precision.reduce,
    )
    reference = compiler.single_device(traced, chosen, options)
    reference.diagnostics += traced.diagnostics
    if not (bound or store.zero or store.bound) and chosen.world_size > 1:
        reference.diagnostics.append(nothing_placed(traced, chosen))
    if traced.unused:
        names = ", ".join(traced.unused[:4]) + (f" and {len(traced.unused) - 4} more" if len(traced.unused) > 4 else "")
        message = f"the loss does not depend on {names}: no gradient"
        hint = "freeze what is not trained; reentrant checkpointing hides gradients: use_reentrant=False"
        reference.diagnostics.append(Diagnostic("SC108", message, "note", hint=hint))
    accumulate(reference, wanted.accumulate)
    record: dict[str, Any] = {
        "text": wanted.dump(),
        "seed": wanted.seed,
        "batch": describe(batch, Call(model, batch).paths),
    }
    if precision is not None:
        record["precision"] = str(precision.compute)
    if optimizer is not None or check_finite:
        fills = append_updates(
            reference,
            optimizer,
            model,
            clip_grad_norm=wanted.clip_grad_norm if optimizer is not None else None,
            precision=precision,
            check_finite=check_finite,
        )
        record |= {"fills": fills, "nonfinite": wanted.nonfinite}
    if optimizer is not None:
        rates = {name: float(rate) for name, rate in learning_rates(optimizer).items()}
        record |= {"optimizer": type(optimizer).__name__, "rates": rates}
    body = compiler.distribute(reference.copy(), bound, options)
    program = Program(
        body=body,
        reference=reference,
        mesh=body.mesh,
        diagnostics=tuple(body.diagnostics),
        annotations=tuple((b.kind, b.name, str(b.placement), b.location or "") for b in bound),
        constants=traced.constants,
        plan=record,
        model=model,
        sample=batch,
        loss=loss,
        optimizer=optimizer,
        baked=fingerprint(optimizer) if optimizer is not None else (),
    )
    program.refuse(wanted, chosen, options.strict)
    return program


@dataclass(frozen=True)
class Program(data.Program):
    """A compiled step: the body that every rank runs, and the single-device graph that it must equal.

    Plain data apart from `model`, `sample` and `loss`, which a program that was loaded from a file lacks.
    """

    model: nn.Module | None = field(default=None, compare=False, repr=False)
    sample: Any = field(default=None, compare=False, repr=False)
    loss: Callable[[Any, Any], Tensor] | None = field(default=None, compare=False, repr=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, compare=False, repr=False)
    baked: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)  # the optimizer's hyperparameters

    def simulate(self, batch: Any = None, *, params: Mapping[str, Tensor] | None = None) -> StepResult:
        """Run all ranks in this process, in lock-step on the CPU; gradients and buffers come back whole."""
        outputs = simulate(self.body, self.inputs(batch, params))
        return StepResult.of(self.body, outputs)

    def verify(
        self, batch: Any = None, dtype: torch.dtype = torch.float64, *, params: Mapping[str, Tensor] | None = None
    ) -> Report:
        """Every rank simulated against the single device: loss, every gradient, every updated buffer.

        The reference is the traced graph; with the model at hand (and no random ops) also the eager model itself.
        Floats are lifted to `dtype`, those that a library hard-codes to float32 too.
        """
        if dtype not in TOLERANCE:
            known = ", ".join(map(str, TOLERANCE))
            raise error("SC508", f"a program cannot be verified in {dtype}", hint=f"pass one of {known}")
        eager, absent, near = self._witness(self.sample if batch is None else batch, dtype, params is not None)
        return verify(self.body, self.reference, self.inputs(batch, params), dtype, eager, absent, near)

    def _witness(self, batch: Any, dtype: torch.dtype, other_params: bool) -> tuple[Witness | None, str, float]:
        """What eager PyTorch computes, or why it cannot be asked; and how near the reference should come to it."""
        near = EAGER_TOLERANCE
        if self.model is None:
            return None, "the program came from a file, without its model", near
        if other_params or any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers())):
            return None, "the parameters are not the model's own", near
        if any(port.role == "seed" for port in self.reference.inputs):
            return None, "the model draws random numbers, and torch draws others", near
        own = {p.dtype for p in self.model.parameters()}
        rounds = "precision" not in self.plan and own.isdisjoint(HALF)
        if rounds and any(type_of(v).dtype in HALF for v in self.reference.values()):
            near = EAGER_HALF  # the model's own casts round in eager PyTorch, and are lifted in the reference
        stored = model_state(self.model, self.reference)
        problem: Exception | None = None
        # A model may make float32 of its own, which does not mix with `dtype`: then it is asked in its own.
        for kind in (dtype, *([None] if own == {torch.float32} else [])):
            try:
                found = eager_outputs(self.model, batch, self.loss, kind, self.reference.microbatches, stored)
            except Exception as failed:
                problem = problem or failed
            else:
                return found, "", near if kind is not None else max(near, EAGER_OWN)
        assert problem is not None
        said = str(problem).strip().partition("\n")[0]
        return None, f"a copy of the model does not run in {dtype}: {type(problem).__name__}: {said}", near

    def memory(self) -> MemoryReport:
        """What a rank holds over a step, by category: stored, and at the peak of its liveness."""
        return memory(self.body)

    def flops(self) -> Flops:
        """What a rank computes in a step, by phase and op."""
        return flops(self.body)

    def explain(self, value: str | int) -> Explanation:
        """Why a collective exists, given by its name or its index in `collectives()`, and what would remove it."""
        return explain(self, value)

    def inputs(self, batch: Any = None, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every input of the program by name: parameters and buffers (drawn at random if there are none), the batch."""
        batch = self.sample if batch is None else batch
        state = dict(params) if params is not None else model_state(self.model, self.reference)
        names = [p.name for p in self.reference.inputs if p.role == "input"]
        given = batch_inputs(batch, names, self.plan.get("batch")) if batch is not None else {}
        if batch is None:
            given = _drawn_batch(self.reference)
        own = {**self.constants, **self.optimizer_state(), **self.learning_rates()}
        found = complete_inputs(self.reference, {**own, **state, **given}, seed=0)
        check = IndexCheck(self.reference)
        for feed in feeds(self.reference, found):
            check(feed)
        return found

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state before the next step, by name; a program from a file starts afresh."""
        return initial_state(self.reference, self.plan.get("fills", {}), self.optimizer, self.model)

    def learning_rates(self) -> dict[str, Tensor]:
        """Each parameter group's present learning rate; of a program from a file, those it was compiled with."""
        if self.optimizer is not None:
            if fingerprint(self.optimizer) != self.baked:
                message = "the optimizer's hyperparameters changed since the program was compiled"
                raise error("SC107", message, hint="only learning rates may change; compile again for other values")
            return learning_rates(self.optimizer)
        return {name: torch.tensor(rate, dtype=torch.float64) for name, rate in self.plan.get("rates", {}).items()}

    def launch(self, **options: Any) -> Trainer:
        """The job's trainer: this rank under torchrun (gloo on CPUs, NCCL on GPUs), else all ranks simulated."""
        return launch_program(self, **options)

    def refuse(self, plan: Plan, mesh: Mesh, strict: bool) -> None:
        """Raise for a budget that is exceeded, by the axes of the user's mesh, and under strict for every warning."""
        spent: dict[str, int] = {}
        for one in self.collectives():
            for axis in {mesh.parent(a) if a not in mesh.names else a for a in one.axes}:  # all that it runs along
                spent[axis] = spent.get(axis, 0) + one.bytes_per_step
        total = sum(one.bytes_per_step for one in self.collectives())
        found: list[Diagnostic] = list(plan.over_budget({**spent, TOTAL: total}, mesh))
        if strict:
            found += [d for d in self.diagnostics if d.severity == "warning"]
        if found:
            raise ShardcError(*found)


def model_state(model: nn.Module | None, graph: Graph | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by every one of their names; nothing of what lies on the meta device.

    With a graph, parameters have the dtype that it stores them in.
    """
    if model is None:
        return {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    found = {name: t.detach() for name, t in tensors if not t.is_meta}
    if graph is not None:
        for port, node in zip(graph.inputs, graph.placeholders, strict=True):
            names = (port.name, *port.aliases) if port.role == "param" else ()
            found |= {name: found[name].to(type_of(node).dtype) for name in names if name in found}
    return found


def complete_inputs(graph: Graph, given: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """All inputs of a graph: those given, and for parameters and buffers that are not, small random values."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        known = next((given[n] for n in (port.name, *port.aliases) if n in given), None)
        if known is not None:
            found[port.name] = known
        elif port.role == "seed":
            found[port.name] = torch.tensor(seed)
        elif port.role in ("param", "buffer"):
            type = type_of(node)
            drawn = torch.rand(type.shape, generator=generator) * 0.2
            # Weights around 0; vectors, which may be variances or scales of a norm, below 1.
            drawn = drawn - 0.1 if type.ndim > 1 else 1 - drawn
            found[port.name] = drawn.to(type.dtype)
    return found


def _drawn_batch(graph: Graph) -> dict[str, Tensor]:
    """Values that any model takes: floats in [0, 1); whole numbers 0 and 1, which are in any table."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        type = type_of(node)
        if port.role == "input" and type.dtype.is_floating_point:
            found[port.name] = torch.rand(type.shape, generator=generator).to(type.dtype)
        elif port.role == "input":
            found[port.name] = torch.randint(2, type.shape, generator=generator).to(type.dtype)
    return found
