"""The public API: annotate an unmodified model, compile it, and get a `Program` to read, verify and run.

program = shardc.compile(model, batch, mesh=Mesh(dp=2, tp=2), plan="configs/plans/gpt2.yaml")
print(program.text())
assert program.verify().ok             # all ranks simulated here against the single device
trainer = program.launch()             # this rank under torchrun; simulated in this process otherwise
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardc.compiler.binding import (
    PLAN,
    bind,
    bind_passes,
    bind_precision,
    bind_storage,
    check_loss,
    check_module,
    collect_plan,
    idle_axes,
    read_mesh,
    read_plan,
    whole_gradients,
    without_gradient,
)
from shardc.compiler.driver import Task, compile_step
from shardc.compiler.pass_pipeline import Options, Watch
from shardc.compiler.pipelining import tensor_mesh
from shardc.compiler.program_check import refuse_false
from shardc.compiler.rank import Rank
from shardc.cost.flops import Flops
from shardc.explain.fusion import Explained, explain_value
from shardc.explain.transfer import cause_of
from shardc.frontend.model_changes import CompiledModel, changed
from shardc.frontend.optimizer import AppendUpdates, fingerprint, initial_state, learning_rates
from shardc.frontend.own_values import computed_buffers
from shardc.frontend.program_inputs import complete_inputs, drawn_batch, model_state
from shardc.frontend.sample_call import Call
from shardc.frontend.saved_state import saved_state
from shardc.frontend.token_weights import bind_tokens
from shardc.frontend.trace import trace
from shardc.ir import program as data
from shardc.ir.caller import warn
from shardc.ir.default_device import on_cpu
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import info
from shardc.ir.mesh import Mesh
from shardc.ir.ops.streams import step_key
from shardc.partition import rank_costs
from shardc.partition.memory import ProgramMemory, memory
from shardc.partition.staged_program import StagedProgram, one_stage
from shardc.partition.transfer_report import ReportedTransfer, report_transfers
from shardc.passes.type_check import unknown_ops
from shardc.plan.schema import TOTAL, Plan
from shardc.runtime.execute.batch import batch_inputs, describe_sample
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.microbatches import feeds, split
from shardc.runtime.oracle.report import TOLERANCE, Report
from shardc.runtime.oracle.simulate_stages import simulate_stages
from shardc.runtime.oracle.verification import verify_program
from shardc.runtime.train.result import StepResult
from shardc.runtime.train.trainer import Trainer
from shardc.runtime.train.trainer import launch as launch_program
from shardc.schedule.costs import Costs
from shardc.schedule.prove import Proof, prove, prove_body
from shardc.schedule.replay import replay
from shardc.schedule.timeline import Timeline, checked_costs

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


@on_cpu
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
    placed = tensor_mesh(wanted, chosen)
    micro = split(batch, wanted.microbatches)[0]
    tokens = bind_tokens(wanted.loss, Call(model, batch))
    precision, check_finite = bind_precision(wanted)
    traced = trace(
        model,
        micro,
        loss,
        with_outputs=bool(wanted.outputs),
        microbatches=wanted.microbatches,
        weighted=tokens is not None,
        precision=precision,
    )
    bound = bind(wanted, traced, placed)
    store, keep = bind_storage(wanted.storage, traced, placed)
    options = Options(
        strict or wanted.strict,
        watch=watch,
        store=store,
        keep_gathered=keep,
        reduce=None if precision is None else precision.reduce,
    )
    options = bind_passes(wanted, wanted.hardware.value.on(chosen), options)
    updates = None
    if optimizer is not None or check_finite or wanted.clip_grad_norm is not None:
        updates = AppendUpdates(model, optimizer, wanted.clip_grad_norm, precision, check_finite)
    notes = [*traced.diagnostics, *idle_axes(traced, placed, bound, store), *whole_gradients(wanted)]
    notes += without_gradient(traced)
    graphs = compile_step(Task(traced, wanted, chosen, placed, bound, updates, tokens, notes), options)
    record: data.PlanRecord = {
        "text": wanted.self_contained().dump(),
        "seed": wanted.seed,
        "batch": describe_sample(batch, Call(model, batch).paths, traced.written),
        "hardware": options.hardware.quantities(),
    }
    if (state := saved_state(model)) is not None:
        record["state"] = state
    if wanted.pipeline is not None:
        record["cut"] = wanted.pipeline.place("split", "stages") or ""
    if precision is not None:
        record["precision"] = str(precision.compute)
    if updates is not None:
        record |= {
            "fills": updates.fills,
            "nonfinite": wanted.nonfinite,
            "clip_grad_norm": wanted.clip_grad_norm,
        }
    if optimizer is not None:
        rates = {name: float(rate) for name, rate in learning_rates(optimizer).items()}
        record |= {"optimizer": type(optimizer).__name__, "rates": rates}
    if graphs.traffic is not None:
        record["traffic"] = [list(moved) for moved in graphs.traffic]
    buffers = computed_buffers(model)
    program = Program(
        body=graphs.body,
        reference=graphs.reference,
        mesh=graphs.mesh,
        diagnostics=tuple(graphs.body.diagnostics),
        annotations=tuple((b.kind, b.name, str(b.placement), b.location or "") for b in bound),
        constants={**buffers.values, **traced.constants},
        plan=record,
        pipelined=graphs.pipelined,
        model=model,
        sample=batch,
        loss=loss,
        optimizer=optimizer,
        baked=fingerprint(optimizer) if optimizer is not None else (),
        uncomputed=buffers.reasons,
        compiled=CompiledModel(model, loss, traced.constants, traced.changed_attributes),
        recompile=partial(
            compile, model, batch, mesh=mesh, plan=plan, loss=loss, optimizer=optimizer, strict=strict, watch=watch
        ),
    )
    program.refuse(wanted, chosen, options.strict)
    return program


@dataclass(frozen=True)
class Program(data.Program):
    """A compiled step: what every rank runs, in stages, and the single-device graph that it must equal.

    Without a pipeline there is one stage, the body, which all ranks run. With one no rank runs the body: it is what the
    stages of `pipelined` add up to. So `collectives()` are those of all stages along the other axes; `transfers()` are
    the pipeline's own. Plain data apart from `model`, `sample` and `loss`, which a program from a file lacks.
    """

    pipelined: StagedProgram | None = field(default=None, repr=False)
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    sample: Any = field(default=None, compare=False, repr=False)
    loss: Callable[[Any, Any], Tensor] | None = field(default=None, compare=False, repr=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, compare=False, repr=False)
    baked: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)  # the optimizer's hyperparameters
    uncomputed: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)  # buffers, and why
    compiled: CompiledModel | None = field(default=None, compare=False, repr=False)
    recompile: Callable[[], Program] | None = field(default=None, compare=False, repr=False)  # with the same arguments

    @property
    def staged(self) -> StagedProgram:
        """The stages, and the instruction lists of all ranks."""
        return self.pipelined or one_stage(self.body)

    @on_cpu
    def simulate(self, batch: Any = None, *, params: Mapping[str, Tensor] | None = None) -> StepResult:
        """Run all ranks in this process, on the CPU; gradients and buffers come back whole."""
        self.refuse_changed_model()
        inputs = self.inputs(batch, params)
        return StepResult.of(self.body, simulate_stages(self.staged, inputs))

    @on_cpu
    def verify(
        self,
        batch: Any = None,
        dtype: torch.dtype = torch.float64,
        *,
        params: Mapping[str, Tensor] | None = None,
        order: int | None = None,
    ) -> Report:
        """Every rank simulated against the single device, and that against the model as eager PyTorch trains it.

        Compared are the loss, every gradient and buffer, with an optimizer every parameter and state too, after two
        steps of different batches where one leaves something to the next. Eager PyTorch is asked where the model is at
        hand and draws no random numbers; whatever it changes is put back. Floats are lifted to `dtype`, those that a
        library hard-codes to float32 too. The ranks of a pipeline take turns as their lists allow: in one way, or, with
        an `order`, in one that this number picks.
        """
        self.refuse_changed_model()
        if dtype not in TOLERANCE:
            known = ", ".join(map(str, TOLERANCE))
            raise error("SC508", f"a program cannot be verified in {dtype}", hint=f"pass one of {known}")
        return verify_program(self, batch, dtype, params, order)

    def memory(self) -> ProgramMemory:
        """What a rank holds over a step, by category: stored, and at the peak; of a pipeline, rank by rank."""
        return memory(self.staged)

    def flops(self) -> Flops:
        """What a rank computes in a step, by phase and op; with a pipeline, the rank that computes most."""
        every = (rank_costs.rank_flops(self.staged, c) for c in self.staged.coordinate_range)
        return max(every, key=lambda one: one.total)

    def parameter_bytes(self) -> data.ParameterBytes:
        """Memory for parameters: what one rank stores, padding included (with a pipeline, at most), and the model's."""
        every = (rank_costs.parameter_bytes(self.staged, c) for c in self.staged.coordinate_range)
        return super().parameter_bytes()._replace(per_rank=max(every))

    def prove(self) -> Proof:
        """That no timing whatever lets ranks wait for each other for ever, or do other work than the step's."""
        return prove(self.staged.lists) if self.staged.axis else prove_body(self.body)

    def rank(self, number: int) -> Rank:
        """What one rank of the mesh runs: its list and graphs."""
        return Rank.of(number, self.staged)

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """When each rank of the pipeline would do what; `costs` are those of the cut, in FLOPs, unless given."""
        if not self.staged.axis:
            hint = 'compile with a plan that has one, as in {"pipeline": {"microbatches": 8}}'
            raise error("SC220", "the program has no pipeline, so there is no timeline", hint=hint)
        staged = self.staged
        return replay(staged.lists, staged.costs if costs is None else checked_costs(costs, len(staged.stages)))

    def text(self) -> str:
        """The body as text, which `shardc.parse` reads back; of a pipeline, the lists and graphs of all stages."""
        return "\n".join(self.staged.text(c) for c in self.staged.coordinate_range)

    def to_json(self) -> str:
        """The program as text that `from_json` reads; raises ShardcError (SC301) for an op that it would refuse."""
        for name, node in {**unknown_ops(self.body), **unknown_ops(self.reference)}.items():
            about = info(node)
            raise error(
                "SC301",
                f"a program that calls {name} cannot be read back: the op has no sharding rule",
                location=about.source or None,
                source_text=about.source_text or None,
                fqn=about.fqn or None,
                op=name,
                hint=f"register one, here and where the file is loaded: shardc.rule(torch.ops.aten.{name}, ...); "
                "or compute it by other ops",
            )
        return super().to_json()

    def to_plain(self) -> dict[str, Any]:
        more = {} if self.pipelined is None else {"pipelined": self.pipelined.to_plain()}
        return {**super().to_plain(), **more}

    @classmethod
    def fields_of(cls, content: dict[str, Any]) -> dict[str, Any]:
        found = super().fields_of(content)
        return found | {key: StagedProgram.from_plain(found[key]) for key in ("pipelined",) if key in found}

    def refuse_false(self) -> None:
        """Raise ShardcError with what is wrong with a program that was read, by instruction."""
        refuse_false(self, self.staged)

    def transfers(self) -> list[ReportedTransfer]:
        """What the stages of a pipeline send each other of a microbatch; without one there is nothing."""
        return report_transfers(self.staged, cause_of(self.plan))

    def explain(self, value: str | int) -> Explained:
        """Why a collective or a transfer exists, and what would remove it: of `[*collectives(), *transfers()]`, that of
        this index or name. By its name also a kernel, and what became of a call under `fuse`."""
        return explain_value(self, value, self.staged)

    @on_cpu
    def inputs(self, batch: Any = None, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every input of the program by name: parameters and buffers (drawn at random if there are none), the batch."""
        names, own_batch = [p.name for p in self.reference.inputs if p.role == "input"], batch is None
        batch = self.sample if own_batch else batch
        state = dict(params) if params is not None else model_state(self.model, self.reference)
        given = batch_inputs(batch, names, self.plan.get("batch")) if batch is not None else {}
        if batch is None or (own_batch and any(value.is_meta for value in given.values())):
            given = drawn_batch(self.reference)
        own = {**self.constants, **self.optimizer_state(), **self.learning_rates()}
        key = torch.tensor(step_key(self.plan.get("seed", 0), 0))  # that of a run's first step
        own |= {port.name: key for port in self.reference.inputs if port.role == "seed"}
        found = complete_inputs(self.reference, {**own, **state, **given}, seed=0)
        check = IndexCheck(self.reference)
        for feed in feeds(self.reference, found):
            check(feed)
        return found

    @on_cpu
    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state before the next step, by name; a program from a file starts afresh."""
        return initial_state(self.reference, self.plan.get("fills", {}), self.optimizer, self.model)

    @on_cpu
    def learning_rates(self) -> dict[str, Tensor]:
        """Each parameter group's present learning rate; of a program from a file, those it was compiled with."""
        if self.optimizer is not None:
            if fingerprint(self.optimizer) != self.baked:
                message = "the optimizer's hyperparameters changed since the program was compiled"
                raise error("SC107", message, hint="only learning rates may change; compile again for other values")
            return learning_rates(self.optimizer)
        return {name: torch.tensor(rate, dtype=torch.float64) for name, rate in self.plan.get("rates", {}).items()}

    @on_cpu
    def launch(self, **options: Any) -> Trainer:
        """The job's trainer: this rank under torchrun (gloo on CPUs, NCCL on GPUs), else all ranks simulated.

        Of a model that was changed since (put into another mode, frozen, hooked), it is that of the model as it is now.
        """
        if self.compiled is not None and self.recompile is not None and (now := self.compiled.all_changes()):
            warn(f"{changed(now).diagnostics[0].message}: it is compiled again")
            return self.recompile().launch(**options)
        self.accept_values()
        return launch_program(self, **options)

    def refuse_changed_model(self) -> None:
        """Raise ShardcError (SC124) where the model's modes, numbers, or what is trained, are not as compiled."""
        if self.compiled is not None:
            self.compiled.refuse_changes()

    def accept_values(self) -> None:
        """The model's present values are the trainer's own."""
        if self.compiled is not None:
            self.compiled.accept_values()

    def refuse(self, plan: Plan, mesh: Mesh, strict: bool) -> None:
        """Raise for a budget that is exceeded, by the axes of the user's mesh, and under strict for every warning."""
        spent: dict[str, int] = {}
        for c in self.staged.coordinate_range:  # the rank that sends most
            sent = rank_costs.bytes_sent_by_axis(self.staged, c, mesh)
            sent[TOTAL] = rank_costs.total_bytes_sent(self.staged, c)
            spent |= {axis: max(size, spent.get(axis, 0)) for axis, size in sent.items()}
        found: list[Diagnostic] = list(plan.over_budget(spent, mesh))
        if strict:
            found += [d for d in self.diagnostics if d.severity == "warning"]
        if found:
            raise ShardcError(*found)
