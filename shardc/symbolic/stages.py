"""What the ranks of a pipeline's stages compute, send and hold, as formulas of extents and of `M` microbatches.

    stages = program.stage_formulas()
    stages.sent[0, 1, "fwd"]                       4*B*S*32 / dp of it: all microbatches of a step
    stages.at(B=64, S=128, M=16).peak[0]           without compiling

The mesh, the cut, the schedule and the number of layers are the program's own. Numbers are those of compiles at a few
sizes; each has an exact expression (`expression`), or is refused (SC232). Of memory, which is the most of several
moments, a coordinate whose peak has none is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardc.compiler.request import Request
from shardc.ir.collectives import CollectiveKind
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Phase
from shardc.ir.types import Axes
from shardc.partition.memory import memory
from shardc.partition.rank_costs import rank_collectives, rank_flops
from shardc.partition.staged_program import StagedProgram
from shardc.partition.transfer_report import report_transfers
from shardc.plan.symbols import MICROBATCHES
from shardc.symbolic.expression import Expression, Fitter, Point
from shardc.symbolic.formulas import Domain
from shardc.symbolic.layers import Layers
from shardc.symbolic.measure import shards_of
from shardc.symbolic.samples import UNKNOWN, Samples, refuse_buckets
from shardc.symbolic.template import whole

PHASES: tuple[Phase, ...] = ("fwd", "bwd", "opt")
Moved = tuple[int, Phase, Axes, CollectiveKind]  # a coordinate, and what it sends along other axes
Sent = tuple[int, int, Phase]  # from a stage to a stage
Work = tuple[int, Phase]


@dataclass(frozen=True)
class StageCosts:
    """Numbers of one rank of each coordinate of the pipeline, and of a step."""

    bytes: Mapping[Moved, int]
    sent: Mapping[Sent, int]
    flops: Mapping[Work, int]
    stored: Mapping[int, int]
    peak: Mapping[int, int]

    @classmethod
    def of(cls, program: StagedProgram) -> StageCosts:
        moved, sent, held = Counter[Moved](), Counter[Sent](), memory(program).coordinates
        for c in program.coordinate_range:
            for collective in rank_collectives(program, c):
                moved[c, collective.phase, collective.axes, collective.kind] += collective.bytes_per_step
        for transfer in report_transfers(program):
            sent[transfer.origin, transfer.target, transfer.phase] += transfer.bytes_per_step
        flops: dict[Work, int] = {}
        for c in program.coordinate_range:
            total = rank_flops(program, c)
            flops |= {(c, phase): count for phase in PHASES if (count := total.of_phase(phase))}
        stored = {c: one.report.stored for c, one in enumerate(held)}
        return cls(dict(moved), dict(sent), flops, stored, {c: one.report.peak for c, one in enumerate(held)})


KINDS = ("bytes", "sent", "flops", "stored", "peak")


@dataclass(frozen=True)
class StageFormulas:
    """By coordinate or by pairs of stages; of `peak` those that have a formula."""

    bytes: Mapping[Moved, Expression]
    sent: Mapping[Sent, Expression]
    flops: Mapping[Work, Expression]
    stored: Mapping[int, Expression]
    peak: Mapping[int, Expression]
    domain: Domain
    parts: Mapping[str, int]  # what guards are divided by
    samples: Samples
    notes: tuple[str, ...] = ()

    def at(self, point: Point | None = None, /, **sizes: int) -> StageCosts:
        """The numbers for these sizes. Raises ShardcError (SC232) where the formulas do not hold."""
        values = {**(point or {}), **sizes}
        self.domain.check(values)
        # Guards are of one microbatch, and told of as many as the program has.
        own = {
            name: values[name] // values[MICROBATCHES] * n if n > 1 else values[name] for name, n in self.parts.items()
        }
        if (guard := self.samples.guards.broken(own)) is not None:
            raise ShardcError(guard.diagnostic(own))
        return StageCosts(*({key: whole(f, values) for key, f in getattr(self, kind).items()} for kind in KINDS))

    def __str__(self) -> str:
        lines = ["bytes between stages, in a step"]
        lines += [f"  {a} -> {b} {phase}: {form}" for (a, b, phase), form in self.sent.items()]
        coordinates = dict.fromkeys(c for c, _ in self.flops)
        for c in coordinates:
            lines += ["", f"a rank of coordinate {c}"]
            lines += [f"  FLOPs {phase}: {form}" for (of, phase), form in self.flops.items() if of == c]
            lines += [
                f"  bytes {phase} {'.'.join(axes)} {kind}: {form}"
                for (of, phase, axes, kind), form in self.bytes.items()
                if of == c
            ]
            lines += [f"  bytes stored: {self.stored[c]}"]
            lines += [f"  bytes at the peak: {self.peak[c]}"] if c in self.peak else []
        lines += ["", "where", *(f"  {line}" for line in str(self.domain).splitlines())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def stage_formulas(request: Request, ranges: Mapping[str, tuple[int, int]] | None = None) -> StageFormulas:
    """The formulas of a program with a pipeline. Raises ShardcError (SC232) where a line fixes an extent, and where
    stages differ between sizes in more than numbers."""
    samples = Samples.of(request, pipelined=True)
    refuse_buckets(request)
    if why := samples.guards.unknown(UNKNOWN, "compile for each size"):
        raise ShardcError(why)
    points = _points(samples, ranges)
    programs = [_compiled(samples, point) for point in points]
    every = [StageCosts.of(program) for program in programs]
    fitter = Fitter(points, list(samples.extents), [MICROBATCHES])

    def fitted(kind: str, *, needed: bool = True) -> dict[Any, Expression]:
        columns = [getattr(costs, kind) for costs in every]
        if any(list(column) != list(columns[0]) for column in columns):
            raise error("SC232", f"the stages differ in kind from size to size: {kind}", hint="compile for each size")
        forms = {key: fitter.fitted([column[key] for column in columns]) for key in columns[0]}
        if needed and (lacking := [key for key, form in forms.items() if form is None]):
            said = ", ".join(str(column[lacking[0]]) for column in columns)
            raise error("SC232", f"{kind} of {lacking[0]} have no formula: {said}", hint="compile for each size")
        return {key: form for key, form in forms.items() if form is not None}

    peak = fitted("peak", needed=False)
    notes = ["the mesh, the cut and the number of layers are the program's own"]
    notes += [f"the peak of coordinate {c} has no formula" for c in every[0].peak if c not in peak]
    frames = [shards_of(program.body) for program in programs]
    if any(frame[0] != frames[0][0] for frame in frames):
        raise error("SC232", "the bodies differ in kind from size to size", hint="compile for each size")
    shards: dict[tuple[Expression, Axes], int] = {}
    fixed = samples.axes
    for shard, column in zip(frames[0][0], zip(*(atoms for _, atoms in frames), strict=True), strict=True):
        atom, ranks = fitter.fitted(column), math.prod(fixed.get(axis, 1) for axis in shard.axes)
        if atom is None or any(size % ranks for size in column):
            message = f"%{shard.value} is uneven, or has no formula"
            raise error("SC232", message, location=shard.source or None, hint="compile for each size")
        if not atom.is_constant:
            shards[atom, shard.axes] = min(shards.get((atom, shard.axes), column[0]), *(n // ranks for n in column))
    seen = {name: [point[name] for point in points] for name in points[0]}
    domain = Domain(
        {name: (min(seen[name]), max(seen[name])) for name in samples.extents},
        {MICROBATCHES: tuple(sorted(set(seen[MICROBATCHES])))},
        fixed,
        tuple((atom, axes, least) for (atom, axes), least in shards.items()),
        Layers(why="the stages are the program's own"),
        replace(samples.guards, guards=()),
    )
    return StageFormulas(
        bytes=fitted("bytes"),
        sent=fitted("sent"),
        flops=fitted("flops"),
        stored=fitted("stored"),
        peak=peak,
        domain=domain,
        parts=samples.parts,
        samples=samples,
        notes=tuple(notes),
    )


def _points(samples: Samples, ranges: Mapping[str, tuple[int, int]] | None) -> list[dict[str, int]]:
    """The program's own sizes, and eight others, of as many microbatches as stages or more: with fewer, ranks hold
    fewer."""
    plan, axes = samples.plan.pipeline, samples.axes
    assert plan is not None
    if plan.microbatches == 1:
        hint = "compile with two microbatches or more"
        raise error("SC232", "of one microbatch it is not known which dims microbatches divide", hint=hint)
    if MICROBATCHES in samples.extents:
        raise samples.plan.symbols.located(MICROBATCHES, f"'{MICROBATCHES}' is the number of microbatches", "rename it")
    stages, own = axes.get(plan.axis, 1), plan.microbatches
    counts = sorted({stages, stages + 1, stages + 2, 2 * stages, 2 * stages + 1, max(own, stages)})
    unit = math.prod(size for name, size in axes.items() if name != plan.axis)
    tried = samples.ranges(ranges)
    sizes = samples.sizes_of(samples.call)
    fits = own >= stages and samples.guards.broken(sizes) is None
    points: list[dict[str, int]] = [{**sizes, MICROBATCHES: own}] if fits else []
    for i, count in enumerate([*counts, *counts[:3]]):
        units = {name: unit * (count if n > 1 else 1) for name, n in samples.parts.items()}
        least = {name: 2 * (count if n > 1 else 1) for name, n in samples.parts.items()}  # of a microbatch, 2
        wide = {name: (max(low, least[name]), max(high, 6 * units[name])) for name, (low, high) in tried.items()}
        points.append({**samples.candidates(units, wide)[i % 5], MICROBATCHES: count})
    return points


def _compiled(samples: Samples, point: Point) -> StagedProgram:
    program = samples.at(point).graphs.pipelined
    assert program is not None
    return program
