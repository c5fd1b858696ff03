"""`shardc.autoplan`: the best plans for a model on a number of ranks, ranked by predicted time under a memory bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.compiler.binding import check_module, collect_plan, read_plan
from shardc.compiler.compiled import compiled
from shardc.compiler.request import Request, rows_of
from shardc.ir.collectives import human_bytes
from shardc.ir.default_device import on_cpu
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.gc_pause import count_as_old, gc_paused
from shardc.ir.hardware import Hardware
from shardc.partition.prediction import predict
from shardc.partition.staged_program import one_stage
from shardc.plan.hardware import hardware as find_hardware
from shardc.plan.schema import Plan, read_bytes
from shardc.plan.values import DTYPES
from shardc.planner.candidate import ORDER, Candidate
from shardc.planner.inner import Inner
from shardc.planner.layer_costs import LayerCosts
from shardc.planner.ranking import RankedPlan, Ranking
from shardc.planner.reasons import does_not_fit, reason
from shardc.planner.reduced_model import KEPT, reduced
from shardc.planner.search import Outcome, Priced, kind_of, search
from shardc.planner.small_program import Subject, elements_a_row, resized
from shardc.planner.space import Limits
from shardc.planner.step_costs import estimate

MOST_STAGES = 8  # of a program that is compiled to confirm a plan
STAGE_LAYERS = 2  # of each of its stages
MOST_LAYERS = 4  # of a model that is compiled whole
MORE = 2  # plans that may be compiled beside `confirm`: those that come first once others were
DEFAULT_PRECISION = "bf16"
SHOWN_OTHERS = 6


@on_cpu
@gc_paused()
def autoplan(
    model: nn.Module,
    batch: Any,
    *,
    gpus: int,
    memory: int | str = "80GiB",
    hardware: str | Path | Hardware = "h200-nvlink",
    rows: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    keep: Plan | Mapping[str, Any] | str | Path | None = None,
    precision: str | None = DEFAULT_PRECISION,
    reduce: Sequence[str] = (),
    top: int = 5,
    confirm: int = 1,
) -> Ranking:
    """The best plans of a training step, the fastest that fits first.

        ranking = shardc.autoplan(model, batch, gpus=8, memory="80GiB", hardware="h200-nvlink")
        print(ranking)                      # a table: time, memory, and why each other one loses
        program = shardc.compile(model, batch, plan=ranking.best.plan)

    model      an nn.Module; on the meta device nothing is allocated
    batch      a sample batch, as `compile` takes it; its first dim is the rows of a step, unless `rows` says another
    gpus       how many ranks
    memory     what a rank may hold, "80GiB" or bytes: leave room for the CUDA context and the allocator
    hardware   the name of a file in configs/hardware, the path of one, or a `Hardware`
    loss       as `compile` takes it
    optimizer  a function from a model to its optimizer; None: AdamW
    keep       a plan that every plan keeps: axes of its mesh have their sizes, annotations their placements, and what
               it says of storage, recomputation, the pipeline, precision or `fuse` stays; without the last, plans for a
               GPU fuse, and others do not
    precision  what to compute in where `keep` does not say: "bf16", "fp16", or None for the model's own dtypes
    reduce     dtypes that gradients may be summed in, beside the plan's own: ["bf16"] sends less, sums otherwise
    top        how many plans
    confirm    so many of the best are compiled, with two layers a stage, and ranked by that program's prediction; if
               another plan is the first then, it is compiled as well

    Raises ShardcError: SC250 where no plan fits, SC251 for ranks or rows that cannot be planned for, SC208 for unknown
    hardware, and what `compile` raises for a model that it cannot trace.
    """
    check_module(model)
    chosen = find_hardware(hardware)
    name = Path(hardware).stem if isinstance(hardware, str | Path) else ""
    kept = read_plan(keep) if keep is not None else Plan()
    if kept.precision is None and precision is not None and _is_float32(model):
        kept = kept.merge(Plan.of(precision=precision))
    kept = _with_fusion(kept, collect_plan(model, kept), chosen)
    total = rows_of(batch) if rows is None else rows
    _check(gpus, total, top)
    if unknown := [name for name in reduce if name not in DTYPES]:
        hint = did_you_mean(str(unknown[0]), list(DTYPES), "dtypes")
        raise error("SC251", f"gradients cannot be summed in {unknown[0]!r}", hint=hint)
    limit = read_bytes(memory)
    if not limit:
        raise error("SC251", "a rank with no memory holds no plan", hint='pass memory="80GiB", say')
    node = chosen.accelerators_per_node
    widest = max(d for d in range(1, min(gpus, node) + 1) if gpus % d == 0)
    make = optimizer or _adamw
    subject = Subject(model, resized(batch, total), loss, chosen, kept, make, max(2, widest))
    limits = Limits(gpus, limit, total, elements_a_row(batch), pinned(kept, gpus), tuple(reduce))
    outcome = search(subject, limits, top)
    fitting = outcome.fitting(limit)
    if not fitting:
        raise _nothing_fits(outcome, limits, subject)
    return _Ranker(subject, limits, outcome, fitting, name).ranking(top, confirm)


def _with_fusion(kept: Plan, merged: Plan, hardware: Hardware) -> Plan:
    """What every plan keeps, and whether it fuses: a plan is compiled as it was predicted, wherever the model lies.
    `merged` are the model's own plans and what is kept."""
    if merged.fuse.enabled is not None or merged.symbols:
        return kept
    return kept.merge(Plan.of(fuse=(merged.hardware.value.device or hardware.device) == "gpu"))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _is_float32(model: nn.Module) -> bool:
    return all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point())


def _check(gpus: int, rows: int, top: int) -> None:
    checks: tuple[tuple[str, object, str], ...] = (
        ("ranks", gpus, "pass gpus=8, say"),
        ("rows of a batch", rows, "pass a batch whose first dim is its rows"),
        ("plans", top, "pass top=5, say"),
    )
    for what, count, hint in checks:
        if type(count) is not int or count < 1:
            raise error("SC251", f"{count!r} is no number of {what}", hint=hint)


def pinned(kept: Plan, gpus: int) -> dict[str, tuple[object, ...]]:
    """What a plan fixes of a candidate, by field. Raises ShardcError (SC251) for a mesh that the ranks do not have."""
    fixed: dict[str, tuple[object, ...]] = {}
    for axis, size in kept.mesh.axes if kept.mesh is not None else ():
        if axis not in ORDER:
            hint = "name the axes pp, dp, ep, cp and tp, or dp_replicate over which storage is not divided"
            raise error("SC251", f"the planner has no axis '{axis}', which the plan's mesh names", hint=hint)
        if gpus % size:
            hint = f"pass a number of ranks that {axis}={size} divides"
            raise error("SC251", f"{gpus} ranks are no multiple of the plan's {axis}={size}", hint=hint)
        fixed[axis] = (size,)
    said = kept.model_fields_set
    if "storage" in said:
        fixed["zero"] = (kept.storage.zero,)
    if "recompute" in said:
        fixed["recompute"] = (kept.recompute.mode,)
    if "bucket" in said:
        fixed["bucket"] = (True if kept.bucket.size is None else kept.bucket.size,)
    named = {
        axis
        for kind in (kept.params, kept.inputs, kept.activations)
        for a in kind.values()
        for axis in a.placement.axes
    }
    if "dp" in {*named, *kept.storage.axes}:
        fixed.setdefault("dp_replicate", (1,))  # what is said of dp is said of all replicas
    if kept.pipeline is not None:
        fixed |= {"schedule": (kept.pipeline.schedule,), "microbatches": (kept.pipeline.microbatches,)}
        if kept.pipeline.virtual is not None:
            fixed["virtual"] = (kept.pipeline.virtual,)
    elif kept.accumulate > 1:
        fixed |= {"microbatches": (kept.accumulate,), "pp": (1,)}
    return fixed


def _nothing_fits(outcome: Outcome, limits: Limits, subject: Subject) -> ShardcError:
    every = [*outcome.priced, *outcome.guessed]
    if not every:
        if outcome.refused:
            return next(iter(outcome.refused.values()))
        for axis, (size, *_) in limits.pinned.items():
            if axis in ("ep", "cp", "tp") and type(size) is int and size > 1 and not subject.placements.has(axis):
                message = (
                    f"nothing of the model is placed over the kept {axis}={size}: over it, ranks would do the same"
                )
                return error("SC251", message, hint=f"leave {axis} to the planner, or keep {axis}=1")
        layers = sum(run.count for run in subject.runs)
        if type(stages := limits.pinned.get("pp", (1,))[0]) is int and stages > max(1, layers):
            message = f"the kept pp={stages} has more stages than the model has equal layers, {layers}"
            return error("SC251", message, hint=f"keep pp={max(1, layers)} or less")
        message = f"{limits.gpus} ranks cannot divide a step of {limits.batch} rows"
        fixed = ", ".join(f"{name}={'|'.join(map(str, values))}" for name, values in limits.pinned.items())
        hint = "pass a batch that more of the ranks' divisors divide" + (f"; kept are {fixed}" if fixed else "")
        return ShardcError(Diagnostic("SC251", message, hint=hint))
    least = min(every, key=lambda p: p.estimate.memory.total)
    held = human_bytes(least.estimate.memory.total)
    message = f"no plan fits {human_bytes(limits.memory)} on {limits.gpus} ranks: the smallest needs {held}"
    cause = f"that is {least.candidate}: {does_not_fit(least.estimate.memory, limits.memory)}"
    hint = f"give each rank {held} or more, take more ranks, or a shorter sequence"
    return ShardcError(Diagnostic("SC250", message, cause=cause, hint=hint))


@dataclasses.dataclass(frozen=True)
class _Ranker:
    subject: Subject
    limits: Limits
    outcome: Outcome
    fitting: list[Priced]
    hardware: str

    def ranking(self, top: int, confirm: int) -> Ranking:
        best = self._distinct(top)
        confirmed = {p.candidate: self._confirmed(p) for p in best[:confirm]}
        scale = next((confirmed[p.candidate][0] / p.seconds for p in best[:confirm]), 1.0)

        def ordered() -> list[tuple[Priced, float, int, str]]:
            rows = [(p, *(confirmed.get(p.candidate) or self._extrapolated(p, scale))) for p in best]
            return sorted(rows, key=lambda row: (row[2] > self.limits.memory, row[1]))

        rows = ordered()
        while confirmed and (first := rows[0][0]).candidate not in confirmed and len(confirmed) < confirm + MORE:
            confirmed[first.candidate] = self._confirmed(first)
            rows = ordered()
        leader = rows[0][0]
        plans = [self._of(*row, self._reason(row[0], leader) if row[0] is not leader else "") for row in rows]
        others = [
            self._of(p, *self._extrapolated(p, scale), self._reason(p, leader)) for p in self._others(leader, best)
        ]
        notes: list[str] = []
        considered = len(self.outcome.priced) + len(self.outcome.guessed) + self.outcome.far
        if refused := len({(i.tp, i.cp, i.ep) for i in self.outcome.refused}):
            notes.append(f"{refused} ways of placing layers cannot be compiled, and were left out")
        return Ranking(tuple(plans), tuple(others), considered, self.subject.compiles, tuple(notes))

    def _distinct(self, top: int) -> list[Priced]:
        """The fastest, one for each mesh, level of storage and recomputation."""
        chosen: dict[object, Priced] = {}
        for p in self.fitting:
            chosen.setdefault(kind_of(p.candidate), p)
        return list(chosen.values())[:top]

    def _others(self, leader: Priced, shown: list[Priced]) -> list[Priced]:
        """For each choice the fastest candidate that makes it otherwise, whether it fits or not."""
        found: dict[Candidate, Priced] = {}
        known = {p.candidate for p in shown}
        everything = sorted(self.outcome.priced, key=lambda p: p.seconds)
        for name in ("tp", "pp", "cp", "ep", "zero", "recompute", "sequence", "rows", "schedule"):
            value = getattr(leader.candidate, name)
            other = next((p for p in everything if getattr(p.candidate, name) != value), None)
            if other is not None and other.candidate not in known:
                found.setdefault(other.candidate, other)
        return list(found.values())[:SHOWN_OTHERS]

    def _reason(self, loser: Priced, leader: Priced) -> str:
        return reason(loser, leader, self.limits.memory, self.subject.hardware)

    def _extrapolated(self, p: Priced, scale: float) -> tuple[float, int, str]:
        """Seconds, bytes, and what they are based on: by `scale`, the best plan's compiled step and its closed form
        differ."""
        layers = sum(run.count * run.period for run in self.subject.runs)
        few = KEPT * sum(run.period for run in self.subject.runs)
        basis = f"extrapolated from a compiled microbatch of {few} of {layers} equal layers"
        if not self.subject.runs:
            basis = "extrapolated from a compiled microbatch of the whole model"
        return p.seconds * scale, round(p.estimate.memory.total), basis

    def _of(self, p: Priced, seconds: float, peak: int, basis: str, why: str) -> RankedPlan:
        c = p.candidate
        base = self.subject.costs(Inner())
        flops = base.total().flops * self.limits.batch if isinstance(base, LayerCosts) else 0.0
        peak_rate = self.subject.hardware.peak_flops_per_second * self.limits.gpus
        return RankedPlan(
            self._plan(c),
            c,
            p.estimate,
            seconds * 1e3,
            self.limits.batch * self.limits.length / seconds,
            flops / (peak_rate * seconds),
            peak,
            peak <= self.limits.memory,
            basis,
            why,
            "tokens" if self.limits.length > 1 else "samples",
        )

    def _plan(self, c: Candidate) -> Plan:
        plan = c.plan(self.subject.placements, self.subject.kept)
        return plan.model_copy(update={"hardware": self.subject.kept.hardware})

    def _confirmed(self, p: Priced) -> tuple[float, int, str]:
        """The plan compiled for a model of a few layers a stage, or for the whole of a small one; and what its
        prediction says of the closed form."""
        subject, c = self.subject, p.candidate
        layers = sum(run.count for run in subject.runs)
        most = STAGE_LAYERS * c.stages
        few = max(KEPT, -(-most // max(1, len(subject.runs))))
        whole = layers <= MOST_LAYERS or all(run.count <= few for run in subject.runs)
        if c.stages > MOST_STAGES:
            seconds, peak, basis = self._extrapolated(p, 1.0)
            return seconds, peak, f"{basis}; not compiled in its {c.stages} stages"
        model = subject.model if whole else reduced(subject.model, subject.runs, few)
        request = Request(
            model,
            subject.rows(self.limits.batch),
            plan=self._plan(c),
            loss=subject.loss,
            optimizer=subject.optimizer(model),
            checked=False,
        )
        count_as_old()  # the programs of the search: tracing may have the collector look at young objects
        made = compiled(request).graphs
        staged = made.pipelined or one_stage(made.body)
        prediction = predict(staged, made.reference, subject.hardware, self.hardware)
        costs = subject.costs(c.inner)
        assert isinstance(costs, LayerCosts), "a candidate that was priced has compiled layers"
        runs = costs.runs if whole else tuple((part, min(few, count)) for part, count in costs.runs)
        closed = estimate(c, dataclasses.replace(costs, runs=runs), subject.hardware, subject.numbers)
        if whole:
            seconds = prediction.step_ms / 1e3
        else:
            # Stages of so few layers are more or less even than those of all: compared is what ranks do. It differs by
            # what each layer takes, and by what there is once: which of both, one program does not tell.
            busy, expected = (1 - prediction.bubble) * prediction.step_ms / 1e3, closed.seconds - closed.idle
            by_layer = (p.seconds - p.estimate.idle) * (busy / expected - 1)
            seconds = p.seconds + (by_layer + busy - expected) / 2
        peak = round(p.estimate.memory.total + prediction.peak_bytes - closed.memory.total)
        said = "the whole model" if whole else f"{few} of {layers} equal layers, and extrapolated to all"
        return seconds, peak, f"compiled and predicted as a step of {said}"
