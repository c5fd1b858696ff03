"""Whether a batch runs in halves where a plan says `overlap: {split: auto}`: where a step is predicted faster so.

    48.7 ms whole, 43.1 ms in halves       in halves
    48.7 ms whole, 48.2 ms in halves       whole: within the margin of 2 %, which a prediction does not tell apart

The step is compiled whole, and predicted on the plan's hardware. Where collectives keep compute waiting for more than
the margin, it is compiled in halves too, from a trace of half as many rows, and the faster is taken as products are
decomposed (`compiler.decompose_auto`). The choice says why there was none.

A step of halves makes what `accumulate: 2` makes. That is what the whole step makes where the loss is a mean over rows,
which a program does not tell. It is not where forward changes buffers, nor where halves compute fewer products, as a
loss that compares all rows with each other does: then the step stays whole. So it does where halves bring a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from shardc.compiler.decompose_auto import MARGIN, pays
from shardc.compiler.driver import CompiledGraphs
from shardc.cost.flops import flops
from shardc.cost.prediction import Prediction
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import HALVES
from shardc.partition.prediction import predict
from shardc.partition.rank_costs import most_sent
from shardc.partition.staged_program import StagedProgram, one_stage
from shardc.plan.schema import TOTAL, Plan

WORDS = {True: "in halves", False: "whole"}


class SplitChoice(NamedTuple):
    """What was chosen, and the predicted milliseconds of a step of whole microbatches and of one of halves; or `why`
    halves were not asked for, or not taken."""

    halves: bool
    whole_ms: float = 0.0
    halves_ms: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"batch: whole, {self.why}"
        ms = {True: self.halves_ms, False: self.whole_ms}
        off = "; off by overlap: {split: 1}" if self.halves else ""
        said = f"predicted {ms[self.halves]:.2f} ms a step, {WORDS[not self.halves]} {ms[not self.halves]:.2f}"
        return f"batch: {WORDS[self.halves]}, {said}{off}"


class Step(Protocol):
    """A compiled step, of which this reads the graphs."""

    @property
    def graphs(self) -> CompiledGraphs: ...
    @property
    def mesh(self) -> Mesh: ...


S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class Splitting:
    """A plan that leaves halves to a prediction, and the rows of its batch."""

    plan: Plan
    rows: int

    def chosen(self, compiled: Callable[[int], S]) -> tuple[S, SplitChoice]:
        """The step that is taken, of those that are `compiled` in 1 or 2 parts. Raises ShardcError for a plan that the
        whole step cannot have."""
        whole = compiled(1)
        if why := self._never() or self._not_worth(whole):
            return whole, SplitChoice(False, why=why)
        try:
            halves = compiled(HALVES)
        except ShardcError as refused:
            return whole, SplitChoice(False, why=f"halves cannot be compiled: {refused.diagnostics[0].message}")
        if why := self._unlike(whole, halves):
            return whole, SplitChoice(False, why=why)
        before, after = self._predicted(whole), self._predicted(halves)
        choice = SplitChoice(pays(before, after), before.step_ms, after.step_ms)
        return halves if choice.halves else whole, choice

    def _never(self) -> str:
        """Why halves are not compiled, whatever the step is."""
        if self.plan.hardware.value.device != "gpu":
            return "as the plan's hardware is no GPU"
        if self.plan.symbols:
            return "as its sizes are symbols"
        if self.rows % (HALVES * self.plan.microbatches):
            return "as the rows of a microbatch are odd"
        return ""

    def _not_worth(self, whole: Step) -> str:
        reference, prediction = whole.graphs.reference, self._predicted(whole)
        inputs = reference.input_nodes()
        outputs = zip(reference.outputs, reference.output_values, strict=True)
        if any(port.role == "buffer" and inputs.get(port.name) is not value for port, value in outputs):
            return "as forward changes buffers, which would see each half alone"
        if prediction.exposed_total_ms <= MARGIN * prediction.step_ms:
            share = prediction.exposed_total_ms / prediction.step_ms if prediction.step_ms else 0.0
            return f"as collectives keep compute waiting for {share:.1%} of the step"
        return ""

    def _unlike(self, whole: Step, halves: Step) -> str:
        """What the step of halves is that the whole one is not."""
        if flops(halves.graphs.reference).total != flops(whole.graphs.reference).total:
            return "as halves compute other products: rows depend on each other"
        known = {d.code for d in _warnings(whole)}
        if more := next((d for d in _warnings(halves) if d.code not in known), None):
            return f"as of halves a warning is given: {more.message}"
        sent = most_sent(_staged(halves), halves.mesh, TOTAL)
        return "as halves exceed the plan's budget" if self.plan.over_budget(sent, halves.mesh) else ""

    def _predicted(self, step: Step) -> Prediction:
        hardware: Hardware = self.plan.hardware.value.on(step.mesh)
        return predict(_staged(step), step.graphs.reference, hardware)


def _staged(step: Step) -> StagedProgram:
    return step.graphs.pipelined or one_stage(step.graphs.body)


def _warnings(step: Step) -> list[Diagnostic]:
    body: Graph = step.graphs.body
    return [d for d in body.diagnostics if d.severity == "warning"]
