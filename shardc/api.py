"""The public API: annotate an unmodified model, compile it, and get a `Program` to read, verify and run. It is over 400
lines because `help` shows its docstrings.

program = shardc.compile(model, batch, mesh=Mesh(dp=2, tp=2), plan="configs/plans/gpt2.yaml")
print(program.text())
assert program.verify().ok             # all ranks simulated here against the single device
trainer = program.launch()             # this rank under torchrun; simulated in this process otherwise
"""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from shardc.compiler.binding import PLAN, check_module, read_plan
from shardc.compiler.compiled import Compiled, compiled, refuse_divided
from shardc.compiler.generation import decode_request, prefill_request
from shardc.compiler.graphs_auto import AUTO
from shardc.compiler.pass_pipeline import Watch
from shardc.compiler.preparation import Prepared
from shardc.compiler.program_check import refuse_false
from shardc.compiler.rank import Rank
from shardc.compiler.request import Kept, Mode, Request, rows_of
from shardc.compiler.what_varies import header
from shardc.cost.flops import Flops
from shardc.explain.fusion import Explained, explain_value
from shardc.explain.predicted_program import PredictedProgram
from shardc.explain.transfer import cause_of
from shardc.frontend.cached_model import Form
from shardc.frontend.model_changes import CompiledModel, changed
from shardc.frontend.optimizer import initial_state
from shardc.frontend.own_values import computed_buffers
from shardc.frontend.program_inputs import complete_inputs, drawn_batch, model_state
from shardc.frontend.program_optimizers import Optimizers, cycles_momentum, fingerprint, learning_rates, optimizers_of
from shardc.frontend.sample_call import Call
from shardc.frontend.traced import Traced
from shardc.ir import program as data
from shardc.ir.caller import warn
from shardc.ir.default_device import on_cpu
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.files import write_text
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Graph, info
from shardc.ir.lazy_graph import LazyGraph
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import SCALE, fewest_microbatches
from shardc.ir.ops.streams import step_key
from shardc.ir.plain import diagnostic_from_plain, graph_from_plain
from shardc.ir.stack_room import with_room
from shardc.page.content import PassRecorder, content
from shardc.page.render import frame, render
from shardc.partition import rank_costs
from shardc.partition.memory import ProgramMemory, memory
from shardc.partition.same_state import refuse_other_state
from shardc.partition.staged_program import StagedProgram, one_stage
from shardc.partition.transfer_report import ReportedTransfer, report_transfers
from shardc.passes.type_check import unknown_ops
from shardc.plan.schema import TOTAL, Plan
from shardc.program_cache.folder import packed, unpacked
from shardc.program_cache.place import Place
from shardc.runtime.execute.batch import batch_inputs, describe_sample
from shardc.runtime.execute.data_parts import data_parts_of
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.oracle.report import TOLERANCE, Report
from shardc.runtime.oracle.rounded_products import RoundedProduct, rounded_products
from shardc.runtime.oracle.simulate_stages import simulate_stages
from shardc.runtime.oracle.verification import verify_program
from shardc.runtime.train.replicas import EVERY
from shardc.runtime.train.result import StepResult
from shardc.schedule.costs import Costs
from shardc.schedule.prove import Proof, prove, prove_body
from shardc.schedule.replay import replay
from shardc.schedule.timeline import Timeline, checked_costs
from shardc.symbolic.derive import formulas_of
from shardc.symbolic.formulas import Formulas
from shardc.symbolic.instances import Instance, Instances
from shardc.symbolic.samples import Samples
from shardc.symbolic.stages import StageFormulas, stage_formulas

if TYPE_CHECKING:  # the trainer brings torch.distributed.checkpoint: as long to import as all else
    from shardc.runtime.checkpoint.weights import Init, Weights
    from shardc.runtime.generate.result import Generated
    from shardc.runtime.train.trainer import Trainer

GRAPHS = ("body", "reference")  # of a program, which few read both
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

        @shardc.shard(params={"**.fc.weight": P(None, "tp")}, inputs={"x": P("dp", None)})
        class Block(nn.Module): ...

    Each map goes from a pattern (`*` within a dotted segment, `**` across any) to a placement: `P("dp", None)`, its
    text "dp, -", or a tuple.
    """
    plan = Plan.of(params=params, inputs=inputs, activations=activations, outputs=outputs)

    def decorate(cls: Module) -> Module:
        setattr(cls, PLAN, plan)
        return cls

    return decorate


def annotate(model: nn.Module, plan: Plan | Mapping[str, Any] | str | Path) -> nn.Module:
    """Attach a plan to one model, which is returned; it is merged over what its classes carry.

        shardc.annotate(model, {"params": {"**.wte.weight": "tp, -"}})

    The plan is what `compile` takes: a Plan, a dict of its keys, a path of YAML, or "shardc:gpt2".
    """
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
    optimizer: Optimizers = None,
    strict: bool = False,
    watch: Watch | None = None,
    mode: Mode = "train",
    cache: bool | None = None,
) -> Program:
    """Compile one training step (loss and gradients) of `model`, or an evaluation, for every rank of `mesh`.

        program = shardc.compile(
            model,
            {"input_ids": tokens, "labels": tokens},
            mesh=shardc.Mesh(dp=2, tp=2),
            plan={"inputs": {"input_ids": "dp, -", "labels": "dp, -"}, "params": {"**.c_fc.weight": "-, tp"}},
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
        )

    model      an nn.Module, which stays as it is; on the CPU, a GPU, or the meta device (then nothing is allocated)
    batch      a sample of the whole global batch: a tensor, a tuple of positional arguments, or a dict of keyword
               arguments of the model's forward; real, or on the meta device. With `loss` also tensors that forward
               does not take, such as labels: `loss` alone has them. A tuple's are named "batch.1", by their position
    mesh       a Mesh, its text "dp=2, tp=2", a dict {"dp": 2, "tp": 2}, or torch's DeviceMesh; None: the plan's
    plan       a Plan, a dict of its keys, the path of a YAML file, or the name of a plan of ours, "shardc:gpt2"; it is
               merged over what `annotate` and `shard` gave the model. None: only what those gave
    loss       a function (output, batch) -> scalar tensor; None: the model returns a scalar, or an output with `.loss`
    optimizer  of torch.optim, over the model's parameters, or a list of several over different ones: their updates and
               state become part of the step, and gradients end in it. None: gradients are returned
    strict     whether a placement that cannot be honoured is an error, and not a warning; also the plan's `strict`
    watch      a function (pass, graph, seconds), called after each pass
    mode       "eval" compiles one evaluation instead: the model as `model.eval()` makes it, its own modes left alone,
               under `no_grad`. The program returns every tensor that the model does, and a loss where there is one
    cache      whether a program that was compiled before, of an equal trace, plan and so on, is taken from the disk,
               and this one kept there, unless the variable SHARDC_CACHE is "off"; `program.cached` tells. True: also
               where passes are watched, of which then none runs; None: unless they are; False: never

    Raises ShardcError with every problem found, each with a code, the line of the model or plan, and a hint.
    """
    optimizer = tuple(optimizer) if isinstance(optimizer, list) else optimizer  # as it is now
    request = Request(model, batch, mesh, plan, loss, optimizer, strict, watch, mode)
    if cache is None:
        cache = watch is None
    return _cached_program(request) if cache else _program(request)


@with_room
@gc_paused()
def _cached_program(request: Request) -> Program:
    """The program of a request as the cache has it; else it is compiled, and kept there."""
    place = Place(request)
    if (found := place.find()) is not None:
        return _kept_program(*found)
    made = compiled(request, place)
    program = _program_of(request, made)

    def content() -> dict[str, Any]:
        plain = replace(program, constants={}).to_plain()  # these are another model's in the next start
        return {**plain, **{name: packed(plain[name]) for name in GRAPHS}}

    reason = place.write(made, content)
    return replace(program, cached=reason or "stored")


def _kept_program(prepared: Prepared, content: dict[str, Any]) -> Program:
    """A program of the cache, of a request that is prepared as the one was that it was compiled from."""
    notes = [diagnostic_from_plain(d) for d in content["diagnostics"]]
    graphs = {name: LazyGraph(partial(unpacked, content[name]), notes if name == "body" else ()) for name in GRAPHS}
    fields = Program.fields_of({**content, **graphs}, lambda graph: graph)
    refuse_divided(prepared, fields["reference"])
    fields["plan"] |= {name: value for name, value in prepared.record.items() if name == "rates"}
    return _of_request(prepared.request, prepared.task.traced, cached="hit", **fields)


@with_room
@gc_paused()
def _program(request: Request) -> Program:
    return _program_of(request, compiled(request))


def _program_of(request: Request, made: Compiled) -> Program:
    program = _of_request(
        request,
        made.traced,
        body=made.graphs.body,
        reference=made.graphs.reference,
        mesh=made.graphs.mesh,
        diagnostics=tuple(made.graphs.body.diagnostics),
        annotations=tuple((b.kind, b.name, str(b.placement), b.location or "") for b in made.bound),
        plan=made.record,
        pipelined=made.graphs.pipelined,
    )
    program.refuse(made.plan, made.mesh, made.strict)
    return program


def _of_request(request: Request, traced: Traced, **made: Any) -> Program:
    """A program, bound to the model that it is of and to what else it was compiled with."""
    model, optimizer = request.model, request.optimizer
    buffers, constants = computed_buffers(model), traced.constants
    made["constants"] = {**buffers.values, **constants}
    return Program(
        **made,
        model=model,
        sample=request.batch,
        loss=request.loss,
        optimizer=optimizer,
        baked=fingerprint(optimizer) if optimizer is not None else (),
        uncomputed=buffers.reasons,
        compiled=CompiledModel(
            model,
            request.loss,
            constants,
            traced.changed_attributes,
            trains=request.trains,
            snapshot=traced.before,
        ),
        request=request,
    )


@dataclass(frozen=True)
class Program(PredictedProgram):
    """A compiled step: what every rank runs, in stages, and the single-device graph that it must equal.

    Without a pipeline there is one stage, the body, which all ranks run. With one no rank runs the body: it is what the
    stages of `pipelined` add up to. So `collectives()` are those of all stages along the other axes; `transfers()` are
    the pipeline's own. Plain data apart from the model and what it was compiled with, which one from a file lacks.
    """

    pipelined: StagedProgram | None = field(default=None, repr=False)
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    sample: Any = field(default=None, compare=False, repr=False)
    loss: Callable[[Any, Any], Tensor] | None = field(default=None, compare=False, repr=False)
    optimizer: Optimizers = field(default=None, compare=False, repr=False)
    baked: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)  # the optimizer's fingerprint
    uncomputed: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)  # buffers, and why
    compiled: CompiledModel | None = field(default=None, compare=False, repr=False)
    request: Request | None = field(default=None, compare=False, repr=False)  # the arguments that it was compiled with
    _instances: list[Instances] = field(default_factory=list[Instances], compare=False, repr=False)  # once asked for
    _steps: dict[bool, Instances] = field(
        default_factory=dict[bool, Instances], compare=False, repr=False
    )  # by updates
    cached: str = field(default="", compare=False, repr=False)  # "hit", "stored", or why it is not in the cache
    resizes: bool = field(default=False, compare=False, repr=False)  # other sizes are not compiled each for itself

    def __repr__(self) -> str:
        what = "an evaluation" if self.body.is_forward_only else "a step"
        of = f" of {type(self.model).__name__}" if self.model is not None else ""
        stages = f"{len(self.staged.stages)} stages along {self.staged.axis}, " if self.staged.axis else ""
        calls, moved = sum(1 for _ in self.body.calls()), len(self.collectives())
        return f"Program({what}{of}: mesh {self.mesh}, {stages}{calls} calls, {moved} collectives)"

    @property
    def staged(self) -> StagedProgram:
        """The stages, and the instruction lists of all ranks."""
        return self.pipelined or one_stage(self.body)

    def recompiled(self, request: Request) -> Program:
        """The program of a request like its own: of another mesh, or another plan."""
        return _program(request)

    @on_cpu
    def simulate(self, batch: Any = None, *, params: Mapping[str, Tensor] | None = None) -> StepResult:
        """Run all ranks in this process, on the CPU; gradients and buffers come back whole. The batch may have other
        sizes where the plan has `symbols`: see `resized`."""
        self.refuse_changed_model()
        if (other := self._other_size(batch)) is not None:
            return other.simulate(batch, params=params)
        inputs = self.inputs(batch, params)
        outputs = simulate_stages(self.staged, inputs)
        return StepResult.of(self.body, outputs, by_row=self.plan.get("by_row", ()))

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
        if (other := self._other_size(batch)) is not None:
            return other.verify(batch, dtype, params=params, order=order)
        if dtype not in TOLERANCE:
            known = ", ".join(map(str, TOLERANCE))
            raise error("SC508", f"a program cannot be verified in {dtype}", hint=f"pass one of {known}")
        if dtype == torch.float16 and any(port.name == SCALE for port in self.reference.inputs):
            message = "a program whose loss is scaled cannot be verified in float16, which has no room for the scale"
            raise error("SC508", message, hint="leave dtype out, for float64, or pass torch.bfloat16")
        return verify_program(self, batch, dtype, params, order)

    @on_cpu
    def rounded_products(self, batch: Any = None) -> list[RoundedProduct]:
        """What 8-bit rounding does to each product with a weight (`precision: {linear: fp8}`), on a batch.

        By product: the relative error of its result, and for each operand the shares of its elements that saturate and
        underflow. The single device computes it, whose scales are those of every rank.
        """
        self.refuse_changed_model()
        if (other := self._other_size(batch)) is not None:
            return other.rounded_products(batch)
        return rounded_products(self.reference, self.inputs(batch))

    def memory(self) -> ProgramMemory:
        """What a rank holds over a step, by category: stored, and at the peak; of a pipeline, rank by rank."""
        return memory(self.staged)

    def flops(self) -> Flops:
        """What a rank computes in a step, by phase and op; with a pipeline, the rank that computes most."""
        every = (rank_costs.rank_flops(self.staged, c) for c in self.staged.coordinate_range)
        return max(every, key=lambda one: one.total)

    def resized(self, batch: Any) -> Program:
        """The program for a batch with other sizes of the plan's `symbols`.

        It is this one with other numbers. The first time, five sizes are compiled, which tell how each number depends
        on them; then forward alone is run, on tensors without data, to see that it makes the same calls. Results are
        those of `compile`, up to the order of sums where its choices go by size. Where a line of the model, an
        uneven shard or a size below 2 stands against that, it is compiled, and its first diagnostic (SC232) says why.
        """
        if self.request is None or self.pipelined is not None:
            what = "with a pipeline" if self.request is not None else "from a file"
            raise error("SC232", f"a program {what} is for batches of one size", hint="compile one for each size")
        if not self._instances:
            self._instances.append(Instances.of(self.request))
        request, found = replace(self.request, batch=batch), self._instances[0].at(batch)
        if isinstance(found, Diagnostic):
            other = _program(request)
            return replace(other, diagnostics=(replace(found, severity="note"), *other.diagnostics))
        return self._with(found, request)

    def _with(self, instance: Instance, request: Request) -> Program:
        """This program with the graphs of an instance, as `request` compiles it."""
        call = Call(request.model, request.batch, request.loss)
        record = instance.sample.record
        written = record.get("batch", {}).get("written", ())
        plan: data.PlanRecord = {**record, "batch": describe_sample(request.batch, call.paths, written)}
        plan.pop("traffic", None)  # of the sample's size
        return replace(
            self,
            body=instance.body,
            reference=instance.reference,
            constants={**self.constants, **instance.sample.traced.constants},
            plan=plan,
            sample=request.batch,
            optimizer=request.optimizer,
            request=request,
            _instances=[],
            _steps={},
            resizes=True,
        )

    def _other_size(self, batch: Any) -> Program | None:
        """The program for a batch whose symbols have other sizes than the program's own; None for one of its own."""
        named = "symbols:" in self.plan.get("text", "")
        if batch is None or self.request is None or self.pipelined is not None or not named:
            return None
        samples = self._instances[0].samples if self._instances else Samples.of(self.request)
        try:
            sizes = samples.sizes_of(Call(self.request.model, batch, self.request.loss))
        except ShardcError:
            return None  # `batch_inputs` says what is wrong with it
        return None if sizes == samples.sizes_of(samples.call) else self.resized(batch)

    def symbolic(self, ranges: Mapping[str, tuple[int, int]] | None = None) -> Formulas:
        """Formulas of what a step costs a rank, in the plan's `symbols`, mesh axes and the number of equal layers.

        The model is compiled at some ten sizes within `ranges`, by default up to 16 times the sample's. Raises
        ShardcError (SC232) with the line of the model that fixes an extent; of a program from a file always, and of one
        with a pipeline, whose formulas are `stage_formulas`.
        """
        if self.request is None:
            hint = "compile the program anew: its model is compiled at other sizes"
            raise error("SC232", "a program from a file has no formulas", hint=hint)
        if self.pipelined is not None:
            hint = "ask for those of its stages: program.stage_formulas(), or shardc cost --symbolic"
            raise error("SC232", "a pipeline has no formulas of one rank", hint=hint)
        return formulas_of(self.request, self.body, ranges)

    def stage_formulas(self, ranges: Mapping[str, tuple[int, int]] | None = None) -> StageFormulas:
        """Formulas of what the ranks of a pipeline's stages compute, send and hold, in the plan's `symbols` and the
        number `M` of microbatches, which is that of stages or more. Raises what `symbolic` does."""
        if self.request is None or self.pipelined is None:
            what = "a program from a file" if self.request is None else "a program without a pipeline"
            raise error("SC232", f"{what} has no formulas of stages", hint="program.symbolic() gives those of one rank")
        return stage_formulas(self.request, ranges)

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

    def text(self, *, fold: bool = False) -> str:
        """The body as text, which `shardc.parse` reads back; of a pipeline, the lists and graphs of all stages.

        Its head says what is fixed and what may change from step to step. With `fold`, equal layers are printed once,
        with their count: for reading, and not for `shardc.parse`.
        """
        return "\n".join([*header(self), *(self.staged.text(c, fold=fold) for c in self.staged.coordinate_range)])

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
                hint=f"register one, here and where the file is loaded: shardc.rule(torch.ops.{node.target}, ...); "
                "or compute it by other ops",
            )
        return super().to_json()

    def to_plain(self) -> dict[str, Any]:
        more = {} if self.pipelined is None else {"pipelined": self.pipelined.to_plain()}
        return {**super().to_plain(), **more}

    @classmethod
    def fields_of(cls, content: dict[str, Any], read: Callable[[Any], Graph] = graph_from_plain) -> dict[str, Any]:
        found = super().fields_of(content, read)
        return found | {key: StagedProgram.from_plain(found[key]) for key in ("pipelined",) if key in found}

    def refuse_false(self) -> None:
        """Raise ShardcError with what is wrong with a program that was read, by instruction."""
        refuse_false(self, self.staged)

    def transfers(self) -> list[ReportedTransfer]:
        """What the stages of a pipeline send each other of a microbatch; without one there is nothing."""
        return report_transfers(self.staged, cause_of(self.plan))

    def page(self) -> str:
        """The program as one HTML page without network: graphs, collectives and their causes, what each pass changed,
        memory, timeline and ranks. The model is compiled once more, to watch the passes; without a model, as of a
        program from a file, the page has none."""
        recorder = None
        if self.request is not None:
            recorder = PassRecorder()
            _program(replace(self.request, watch=recorder.watch))
        title = "program" if self.model is None else type(self.model).__name__
        return render(content(self, self.staged, recorder), title)

    def show(self, path: str | Path | None = None) -> Path:
        """Write the page to a file, and return its path; without one, to a temporary file, which a browser opens.

        Raises ShardcError (SC409) where the file cannot be written, or is no .html.
        """
        target = Path(tempfile.mkdtemp(prefix="shardc-")) / "program.html" if path is None else Path(path)
        write_text(target, self.page(), [".html"])
        if path is None:
            webbrowser.open(target.resolve().as_uri())
        return target

    def _repr_html_(self) -> str:
        """The page in a frame, as notebooks show a program."""
        return frame(self.page())

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
        rows = batch_inputs(batch, names, self.plan.get("batch")) if batch is not None else {}
        if batch is None or (own_batch and any(value.is_meta for value in rows.values())):
            rows = drawn_batch(self.reference, self.plan.get("split", ()))
        own = {**self.constants, **self.optimizer_state(), **self.learning_rates()}
        key = torch.tensor(step_key(self.plan.get("seed", 0), 0))  # that of a run's first step
        own |= {port.name: key for port in self.reference.inputs if port.role == "seed"}
        found = complete_inputs(self.reference, {**own, **state, **rows}, seed=0)
        check = IndexCheck(self.reference)
        for feed in feeds(self.reference, found):
            check(feed)
        return found

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that it was compiled with, in their order."""
        return optimizers_of(self.optimizer)

    @on_cpu
    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizers' state before the next step, by name; a program from a file starts afresh."""
        return initial_state(self.reference, self.plan.get("fills", {}), self.optimizer, self.model)

    @on_cpu
    def learning_rates(self) -> dict[str, Tensor]:
        """Each parameter group's present learning rate; of a program from a file, those it was compiled with."""
        if self.optimizer is not None:
            if fingerprint(self.optimizer) != self.baked:
                message = "the optimizer's parameters or hyperparameters changed since the program was compiled"
                hint = "only learning rates may change; trainer.recompile() goes on with others"
                if cycles_momentum(self.optimizer):
                    hint = "a scheduler changes the momentum: pass it cycle_momentum=False"
                raise error("SC107", message, hint=hint)
            return learning_rates(self.optimizer)
        return {name: torch.tensor(rate, dtype=torch.float64) for name, rate in self.plan.get("rates", {}).items()}

    @on_cpu
    def launch(
        self,
        *,
        state: Weights | Sequence[Weights] | None = None,
        init: Init | str | None = None,
        seed: int | None = None,
        timeout: float = 600.0,
        device: str | None = None,
        check_every: int = EVERY,
        graphs: bool | Literal["auto"] = False,
    ) -> Trainer:
        """The job's trainer: this rank under torchrun (gloo on CPUs, NCCL on GPUs), else all ranks simulated.

        Values come from `state` (a mapping, the path of safetensors or of a `save_pretrained` folder, or several of
        them in turn), then from the model unless it lies on the meta device, then from `init(name, shape, dtype)`,
        called for one tensor at a time, which must give the same on every rank; `init="model"` has the model's own code
        do so. Buffers that no file holds are computed by the model's own code (SC561 where it cannot). `seed` is that
        of random ops, by default the plan's. `device` is "cpu" or "cuda"; by default a GPU where there is one. For
        a job on the CPUs of a host with GPUs, say `fuse: false` in the plan: kernels are for GPUs.

        The ranks of a job must run the same: versions, plan, program and seed are compared first (SC541; SC543 where a
        rank does not come), then the values that they start from, and what they share of parameters, state, inputs and
        rates before the first 3 steps and every `check_every`-th (SC542; 0 leaves the steps out). A rank that is dead
        or stuck is an error that names it, at most `timeout` seconds later.

        With `graphs`, a GPU replays each step but the first three from a CUDA graph: one call instead of one a kernel,
        for programs whose kernels are shorter than what Python takes to launch them. A step that cannot be captured
        runs as it would without, and a warning (SC518) says why. "auto" is so where a step is predicted to be more than
        5 % shorter on the GPU that the plan's `hardware` names (`graphs_choice`). SC518 for another text.

            trainer = program.launch(init=lambda name, shape, dtype: 0.02 * torch.randn(shape, dtype=dtype))

        Of a model that was changed since (put into another mode, frozen, hooked), it is that of the model as it is now.
        """
        from shardc.runtime.train.trainer import launch

        if isinstance(graphs, str) and graphs != AUTO:
            raise error("SC518", f"graphs={graphs!r} is no choice", hint=f'write graphs=True, False or "{AUTO}"')
        program = self
        if self.compiled is not None and self.request is not None and (now := self.compiled.all_changes()):
            warn(f"{changed(now).diagnostics[0].message}: it is compiled again")
            program = _program(self.request)
        program.accept_values()
        return launch(
            program,
            state=state,
            init=init,
            seed=seed,
            timeout=timeout,
            device=device,
            check_every=check_every,
            graphs=program._replays if graphs == AUTO else bool(graphs),
        )

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int | Iterable[int] | None = None,
        *,
        state: Weights | Sequence[Weights] | None = None,
        init: Init | str | None = None,
        timeout: float = 600.0,
        device: str | None = None,
        **options: Any,
    ) -> Generated:
        """Launch, generate new tokens for each prompt, and leave the job: on this rank under torchrun, else simulated.

            program.generate([[5, 6, 7], [8]], max_new_tokens=20, do_sample=True, top_p=0.9).tokens

        `state` and `init` are those of `launch`; prompts and all other options those of `Trainer.generate`. To generate
        more than once, launch once: `trainer.generate`.
        """
        with self.launch(state=state, init=init, timeout=timeout, device=device) as trainer:
            return trainer.generate(prompts, max_new_tokens, **options)

    @property
    def mode(self) -> Mode:
        """What it was compiled for."""
        return "eval" if self.body.is_forward_only else "train"

    @on_cpu
    def evaluation(self, batch: Any, kept: Kept) -> Program:
        """The program that evaluates its model on batches like this one, on parameters and buffers as this one holds
        them. It returns all outputs, without the loss of a function, or their scalars with it. Raises ShardcError
        (SC546) where there is no model."""
        if self.request is None:
            message = "the program came from a file, without its model, so no evaluation can be compiled"
            hint = 'compile the model here; or compile it with mode="eval" where it is, and save that program'
            raise error("SC546", message, hint=hint)
        loss = self.request.loss if kept == "scalars" else None  # of a batch to predict for there may be no labels
        about = {"batch": batch, "loss": loss, "optimizer": None, "watch": None, "strict": False}
        if (parts := data_parts_of(self.plan, self.body)) is not None:
            about["data_parts"] = parts.count
        return _program(replace(self.request, mode="eval", kept=kept, like=self.staged, **about))

    @on_cpu
    def generation(self, form: Form) -> tuple[Program, Program]:
        """The programs that generate with its model, on parameters and buffers as this one holds them: one that fills a
        cache of keys and values from prompts, and one that reads a token. Raises ShardcError (SC571) where there is no
        model, or one that does not generate."""
        decode = self.generation_step(form)
        prefill = self.generation_step(form, decode)
        return prefill, decode

    def generation_step(self, form: Form, decode: Program | None = None, /) -> Program:
        """One of these: the program that reads a token; or, given it, the one that fills its cache. That may be of
        another number of rows, which then take the places of others. Raises ShardcError (SC571)."""
        if self.request is None:
            message = "the program came from a file, without its model, so nothing can be generated"
            raise error("SC571", message, hint="compile the model here")
        if decode is None:
            return _program(decode_request(self.request, form, self.staged))
        return _program(prefill_request(self.request, form, self.staged, decode.staged.body))

    @property
    def again(self) -> Callable[[], Program] | None:
        """Compiles it for the model and the optimizers as they are now; None where it came from a file."""
        request = self.request
        return None if request is None else lambda: _program(request)

    def training(self, batch: Any, updates: bool = True) -> Program:
        """The program that makes its steps on batches like this one, of another shape than its own: compiled from the
        same model, plan and optimizer, on parameters, buffers and state as this one holds them. Without `updates` its
        gradients are returned instead.

        Raises ShardcError (SC547) where there is no model, or where the state would have to lie otherwise.
        """
        if self.request is None:
            message = "the program came from a file, without its model, so none can be compiled for another shape"
            raise error("SC547", message, hint="give batches of the shape that it was compiled for, or compile here")
        rows = rows_of(self.request.batch) // self.body.microbatches
        optimizer = self.request.optimizer if updates else None
        about = {"like": self.staged, "rows": rows, "watch": None}
        if (parts := data_parts_of(self.plan, self.body)) is not None:
            about["data_parts"] = parts.count
        request = replace(self.request, optimizer=optimizer, updates=updates, **about)
        other = self._resized_step(request, batch) or _program(replace(request, batch=batch))
        refuse_other_state(other.staged, self.staged)
        return other

    def _resized_step(self, request: Request, batch: Any) -> Program | None:
        """The program that a request compiles, made for a batch whose symbols have other sizes; None where it is to be
        compiled, which a warning says."""
        if self.pipelined is not None or "symbols:" not in self.plan.get("text", ""):
            return None
        if request.updates not in self._steps:
            self._steps[request.updates] = Instances.of(request)
        instances = self._steps[request.updates]
        count = instances.samples.plan.microbatches
        if (
            count > 1
            and fewest_microbatches(rows_of(batch) // request.data_parts, request.rows // request.data_parts) != count
        ):
            return None  # whose microbatches are fewer
        try:
            found = None if instances.is_single(batch) else instances.at(batch)
        except ShardcError:
            return None  # dims of one extent that differ
        if found is None:
            return replace(_program(replace(request, batch=batch)), resizes=True)
        if isinstance(found, Diagnostic):
            warn(f"a step is compiled for a batch of another shape: {found}")
            return None
        return self._with(found, replace(request, batch=batch))

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
        sent = rank_costs.most_sent(self.staged, mesh, TOTAL) if plan.budget else {}
        refusals: list[Diagnostic] = list(plan.over_budget(sent, mesh))
        if strict:
            refusals += [d for d in self.diagnostics if d.severity == "warning"]
        if refusals:
            raise ShardcError(*refusals)
