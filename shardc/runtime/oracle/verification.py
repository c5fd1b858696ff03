"""A program against the single device, and the single device against the model as eager PyTorch trains or evaluates it.

    step 1    the batch                the reference's parameters, state and buffers ...
    step 2    another of its rows      ... are what everybody starts the second step from

A second step is made where one leaves something to the next. Each is compared by `runtime.oracle.verify`. Where nothing
is left, eager PyTorch makes the first step once more: what Python keeps (a counter, a list) would make another of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardc.frontend.model_changes import CompiledModel
from shardc.frontend.precision import HALF
from shardc.frontend.program_inputs import model_state
from shardc.frontend.program_optimizers import Optimizers, optimizers_of
from shardc.frontend.token_weights import counted
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Port, info, type_of
from shardc.ir.ops.grouped import grouped_mm
from shardc.ir.program import PlanRecord
from shardc.partition.staged_program import StagedProgram
from shardc.passes.normalize.limit_experts import LOAD
from shardc.runtime.execute.batch import batch_inputs
from shardc.runtime.oracle.eager_witness import EagerTraining, Witness
from shardc.runtime.oracle.report import EAGER_HALF, EAGER_OWN, EAGER_TOLERANCE, Report, worst_of
from shardc.runtime.oracle.verify import beside_another, reference_step, verify
from shardc.runtime.oracle.whole_batch import whole_batch_finding
from shardc.torch_compat import flatten, override_aten, unflatten

LEFT = ("param", "state", "buffer")  # what a step leaves to the next


class CompiledStep(Protocol):
    """What verification reads of a compiled program: its graphs, and the model and batch that it was compiled from."""

    @property
    def body(self) -> Graph: ...
    @property
    def reference(self) -> Graph: ...
    @property
    def staged(self) -> StagedProgram: ...
    @property
    def plan(self) -> PlanRecord: ...
    @property
    def model(self) -> nn.Module | None: ...
    @property
    def sample(self) -> Any: ...
    @property
    def loss(self) -> Callable[[Any, Any], Tensor] | None: ...
    @property
    def optimizer(self) -> Optimizers: ...
    @property
    def compiled(self) -> CompiledModel | None: ...
    def inputs(self, batch: Any = None, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]: ...


def verify_program(
    program: CompiledStep, batch: Any, dtype: torch.dtype, params: Mapping[str, Tensor] | None, order: int | None
) -> Report:
    """Verify one step of `program`, or two where the first leaves something to the second; the worst of each output.

    Of a sample on the meta device the values are drawn. A report that is not right ends it.
    """
    reference = program.reference
    drawn = batch is None and _lies_on_meta(program.sample)
    batch = program.sample if batch is None and not drawn else batch
    names = [port.name for port in reference.inputs if port.role == "input"]
    has_state = any(port.role in LEFT for port in reference.outputs)
    reports: list[Report] = []
    next_state: dict[str, Tensor] = {}
    drops: list[str] = []
    with _Eager(program, batch, dtype, params is not None) as eager:
        for part in (batch, other_rows(batch))[: 2 if has_state else 1]:
            inputs = {**program.inputs(part, params), **next_state}
            if drawn and reports:
                inputs |= other_rows({name: inputs[name] for name in names})
            expected = reference_step(reference, inputs, dtype)
            gradients = {port.name: value for port, value in expected.items() if port.role == "grad"}
            dropped = rows_dropped(expected)
            if dropped is not None:
                drops.append(dropped)
            witness = eager.step(part, gradients) if not drops else None
            against = witness, eager.absent or "".join(drops[:1]), eager.near, expected
            reports.append(verify(program.staged, reference, inputs, dtype, *against, order))
            if not reports[-1].ok:
                break
            again = not has_state and witness is not None
            if again and (second_witness := eager.step(part, gradients)) is not None:
                reports[-1] = beside_another(reports[-1], reference, inputs, dtype, expected, second_witness)
            next_state = {port.name: value for port, value in expected.items() if port.role in LEFT}
    report = worst_of(reports)
    found = _of_the_whole_batch(program, batch, dtype) if report.ok else ()
    return replace(report, diagnostics=(*map(_of_drops, drops[:1]), *found))


def rows_dropped(outputs: Mapping[Port, Tensor]) -> str | None:
    """What is said of a step whose experts dropped rows; None if they did not."""
    load = next((value for port, value in outputs.items() if port.name == LOAD), None)
    if load is None or not int(load[:, -1].sum()):
        return None
    return f"{int(load[:, -1].sum())} of {int(load[:, :-1].sum())} rows of experts are over their capacity"


def _of_drops(said: str) -> Diagnostic:
    message = f"{said}, and were dropped; the single device dropped the same"
    hint = "eager PyTorch drops none: it is compared where a capacity is large enough for the batch"
    return Diagnostic("SC513", message, "note", hint=hint)


def _of_the_whole_batch(program: CompiledStep, batch: Any, dtype: torch.dtype) -> tuple[Diagnostic, ...]:
    """Whether the loss of a step of several microbatches is that of its batch."""
    microbatches, model = program.reference.microbatches, program.model
    if microbatches == 1 or model is None or _lies_on_meta(batch):
        return ()
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return ()
    try:
        found = whole_batch_finding(model, program.loss, batch, microbatches, _counting(program), (dtype, None))
    finally:
        if program.compiled is not None:
            program.compiled.put_back()
    return () if found is None else (found,)


def other_rows(batch: Any) -> Any:
    """A batch of the same shapes and other gradients: the last row but one again, in the place of the last.

    Rows are those of dim 0, of all tensors that have as many as the first. Each is one that the batch had: tokens lie
    in their tables, probabilities add up to 1, what is sorted stays so.
    """
    leaves, structure = flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    count = tensors[0].shape[0] if tensors else 0

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != count or leaf.layout != torch.strided:
            return leaf
        return leaf.detach()[torch.arange(count, device=leaf.device).clamp(max=count - 2)]

    return unflatten([rows(leaf) for leaf in leaves], structure) if count > 1 else batch


def _lies_on_meta(batch: Any) -> bool:
    return batch is None or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in flatten(batch)[0])


class _Eager:
    """The model in eager PyTorch, or why it does not run (`absent`). `near` is the reference's tolerance against it."""

    def __init__(self, program: CompiledStep, batch: Any, dtype: torch.dtype, other_params: bool) -> None:
        self.program, self.near, self._stack = program, EAGER_TOLERANCE, ExitStack()
        self.training: EagerTraining | None = None
        self.absent = _reason(program, batch, other_params)
        if self.absent:
            return
        assert program.model is not None
        dtypes = {p.dtype for p in program.model.parameters()}
        lifted = "precision" not in program.plan and dtypes.isdisjoint(HALF)
        values = (v for v in program.reference.values() if info(v).phase != "opt")  # an optimizer's casts are lifted
        halves = any(type_of(v).dtype in HALF for v in values)
        if lifted and halves:
            self.near = EAGER_HALF  # the model's own casts round in eager PyTorch, and are lifted in the reference
        # A model may make float32 of its own, which is lifted too. Where it takes no other, it is asked in its own.
        self._kinds: list[tuple[torch.dtype | None, bool]] = [(dtype, False)]
        if dtype == torch.float64 and (dtypes == {torch.float32} or (dtypes == {torch.float64} and not halves)):
            self._kinds.insert(0, (dtype, True))
        if dtypes == {torch.float32}:
            self._kinds.append((None, False))
        self._stored = model_state(program.model, program.reference)

    def __enter__(self) -> _Eager:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self.program.compiled is not None:
            self.program.compiled.put_back()

    def step(self, batch: Any, gradients: Mapping[str, Tensor]) -> Witness | None:
        """One step on `batch`, with the optimizer's update on `gradients`. None if the model does not run."""
        while not self.absent:
            if started := self.training is None:
                # PyTorch's own products of groups take no float64, and no rows of odd widths.
                self._stack.enter_context(override_aten({"_grouped_mm": grouped_mm}))
                self.training = self._stack.enter_context(self._training(*self._kinds[0]).active())
            try:
                return self.training.step(batch, gradients)
            except Exception as failed:
                self._stack.close()
                self.training = None
                kind, lifted_code = self._kinds.pop(0)
                if started and self._kinds:
                    if not lifted_code:
                        self.near, self._first = max(self.near, EAGER_OWN), failed
                    continue
                problem = getattr(self, "_first", failed)
                reason = str(problem).strip().partition("\n")[0]
                self.absent = f"the model does not run in {kind}: {type(problem).__name__}: {reason}"
        return None

    def _training(self, dtype: torch.dtype | None, lifted_code: bool) -> EagerTraining:
        program = self.program
        assert program.model is not None
        return EagerTraining(
            program.model,
            program.loss,
            dtype,
            microbatches=program.reference.microbatches,
            stored=self._stored,
            counted=_counting(program),
            optimizers=optimizers_of(program.optimizer),
            clip_grad_norm=program.plan.get("clip_grad_norm"),
            check_finite=any(port.name == "finite" for port in program.reference.outputs),
            evaluates=program.reference.is_forward_only,
            lifted_code=lifted_code,
        )


def _reason(program: CompiledStep, batch: Any, other_params: bool) -> str:
    if program.model is None:
        return "the program came from a file, without its model"
    if batch is None:
        return "the sample batch has no values"
    if other_params or any(t.is_meta for t in (*program.model.parameters(), *program.model.buffers())):
        return "the parameters are not the model's own"
    if any(port.role == "seed" for port in program.reference.inputs):
        return "the model draws random numbers, and torch draws others"
    return ""


def _counting(program: CompiledStep) -> Callable[[Any], int] | None:
    """The tokens of a microbatch, for a loss that is weighted by them."""
    tokens = program.reference.tokens
    if tokens is None:
        return None
    names: Sequence[str] = [p.name for p in program.reference.inputs if p.role == "input"]
    return lambda part: counted(batch_inputs(part, names)[tokens.input], tokens)
