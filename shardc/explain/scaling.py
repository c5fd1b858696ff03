"""Why n times as many ranks are not n times as fast: where each lost share of the ideal speed-up went.

    tp   ranks  step ms  speed-up  of ideal  lost ms  latency  exposed bytes  smaller products  replicated work  ...
    1    1         40.0      1.00    100.0%
    4    4         16.0      2.50     62.5%      6.0      0.8            2.4               0.9              1.7

A step is one program, compiled for each size of an axis, of the same batch. Its parts are those of the rank that is
busy longest: kernels, the wait for collectives (what a message of one byte takes is latency, the rest is bytes), the
wait for the host with the gaps between kernels, and the rest, in which a pipeline stands still. Ideally each part is
divided by as much as the ranks are multiplied by. Of kernels that are not, more work than that (FLOPs of products,
bytes of others) is replicated; the rest is that they run at a lower rate. So the shares sum up to what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardc.cost.call_seconds import Kind
from shardc.cost.memory import aligned
from shardc.cost.prediction import Prediction
from shardc.ir.graph import info
from shardc.ir.hardware import Hardware
from shardc.partition.rank_costs import graph_runs
from shardc.partition.staged_program import StagedProgram
from shardc.passes.fusion.analysis.traffic import bytes_by_call

SHARES = (
    "latency",
    "exposed bytes",
    "smaller products",
    "smaller kernels",
    "replicated work",
    "copies",
    "launches",
    "bubble",
)
PRODUCTS: tuple[Kind, ...] = ("product", "attention", "scan")
KERNELS: tuple[Kind, ...] = ("elementwise", "reduction", "fused")


@dataclass(frozen=True)
class StepParts:
    """A step on one mesh, in ms. `waits` are those that are lost whole; the parts and `waits` sum up to `step_ms`."""

    ranks: int
    step_ms: float
    products_ms: float
    flops: float
    kernels_ms: float
    bytes: float
    waits: Mapping[str, float]


def parts_of(staged: StagedProgram, predicted: Prediction, hardware: Hardware) -> StepParts:
    """The parts of a predicted step of a program with these stages."""
    here = hardware.on(staged.mesh)
    latency = exposed = 0.0
    for row in predicted.exposed_ms:
        group = here.group_of(staged.mesh, row.axes)
        starts = row.times * here.collective_seconds(row.kind, 1, group, graph=True) * 1e3
        share = min(1.0, starts / row.ms) if row.ms else 1.0
        latency, exposed = latency + share * row.exposed_ms, exposed + (1 - share) * row.exposed_ms
    ms = predicted.kinds_ms
    products, kernels = (math.fsum(ms.get(kind, 0.0) for kind in kinds) for kinds in (PRODUCTS, KERNELS))
    copies, launches = ms.get("copy", 0.0), predicted.idle_ms + predicted.gaps_ms
    waits = {"latency": latency, "exposed bytes": exposed, "copies": copies, "launches": launches}
    waits["bubble"] = predicted.step_ms - math.fsum((products, kernels, *waits.values()))
    return StepParts(
        predicted.ranks,
        predicted.step_ms,
        products,
        predicted.rank_flops,
        kernels,
        _kernel_bytes(staged, predicted),
        waits,
    )


def _kernel_bytes(staged: StagedProgram, predicted: Prediction) -> float:
    """What the kernels of the rank read and write in a step; copies are not among them."""
    kinds = {call.call: kind for call, kind in predicted.calls.items()}
    moved = 0
    for graph, times in graph_runs(staged, predicted.coordinate):
        for node, size in bytes_by_call(graph).items():
            moved += size * times if kinds.get(info(node).name) in KERNELS else 0
    return float(moved)


@dataclass(frozen=True)
class Lost:
    """A step at one size against the first: what it takes ideally, and where the rest went, in ms."""

    size: int
    parts: StepParts
    ideal_ms: float
    shares: Mapping[str, float]

    @property
    def lost_ms(self) -> float:
        return self.parts.step_ms - self.ideal_ms


@dataclass(frozen=True)
class Scaling:
    """A row a size of the axis; the first is what the others are compared with."""

    axis: str
    hardware: str
    rows: tuple[Lost, ...] = field(default=())

    def speed_up(self, row: Lost) -> float:
        return self.rows[0].parts.step_ms / row.parts.step_ms

    def __str__(self) -> str:
        used = [name for name in SHARES if any(abs(row.shares[name]) >= 5e-4 for row in self.rows)]
        lines: list[tuple[str, ...]] = [(self.axis, "ranks", "step ms", "speed-up", "of ideal", "lost ms", *used)]
        for row in self.rows:
            share = f"{row.ideal_ms / row.parts.step_ms:.1%}"
            numbers = [row.parts.step_ms, self.speed_up(row)]
            lost = [f"{value:.3f}" for value in (row.lost_ms, *(row.shares[name] for name in used))]
            texts = [f"{row.parts.ranks:,}", *(f"{n:.3f}" for n in numbers), share]
            lines.append((str(row.size), *texts, *(lost if row is not self.rows[0] else [""] * len(lost))))
        last = self.rows[-1]
        most = sorted((name for name in used if last.shares[name] > 0), key=lambda name: -last.shares[name])
        text = [f"most is lost by {' and '.join(most[:2])}"] if last.lost_ms > 0 and most and len(self.rows) > 1 else []
        return "\n".join([*aligned(lines), *text, f"predicted on {self.hardware}"])


def scaling(axis: str, hardware: str, steps: Sequence[tuple[int, StepParts]]) -> Scaling:
    """The steps at each size of an axis, the first of which is the base."""
    base = steps[0][1]
    rows: list[Lost] = []
    for size, parts in steps:
        ratio = base.ranks / parts.ranks
        rows.append(Lost(size, parts, base.step_ms * ratio, _shares(base, parts, ratio)))
    return Scaling(axis, hardware, tuple(rows))


def _shares(base: StepParts, parts: StepParts, ratio: float) -> dict[str, float]:
    shares = {name: parts.waits[name] - ratio * base.waits[name] for name in parts.waits}
    products = _slower(base.products_ms, base.flops, parts.products_ms, parts.flops, ratio)
    kernels = _slower(base.kernels_ms, base.bytes, parts.kernels_ms, parts.bytes, ratio)
    shares |= {"smaller products": products[0], "smaller kernels": kernels[0]}
    shares["replicated work"] = products[1] + kernels[1]
    return {name: shares[name] for name in SHARES}


def _slower(base_ms: float, base_work: float, ms: float, work: float, ratio: float) -> tuple[float, float]:
    """What is lost by a lower rate, and by work that is not divided."""
    at_rate = work * base_ms / base_work if base_work else ratio * base_ms
    return ms - at_rate, at_rate - ratio * base_ms
