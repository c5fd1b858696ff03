"""A `Prediction`: what a step of a program takes on a machine, and where the time goes.

    step 54.1 ms, 151,400 tokens/s, MFU 43.3 %, peak 6.0 GiB
    product 33.2 ms   attention 3.1   elementwise 6.4   ...        on the rank that is busy longest
    exposed 5.6 ms of 12.9 ms of collectives
      3.10 ms  all_reduce over tp, fwd, x 16   blocks.0.out.weight = "-, tp"

`shardc.partition.prediction` makes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardc.cost.call_seconds import KINDS, Kind
from shardc.cost.profile import CallTime, Profile, ProfileDiff
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import error
from shardc.ir.files import write_text
from shardc.ir.graph import Phase
from shardc.schedule.costs import Costs
from shardc.schedule.timeline import Timeline

SHOWN = 8  # collectives in a table


@dataclass(frozen=True)
class ExposedTime:
    """Collectives of one kind and cause: how long compute stands still in a step for them and for ranks that come later
    to them, and how long they take. Or copies between a rank and its host, of one direction, which have no axes."""

    kind: str
    axes: tuple[str, ...]
    phase: Phase
    cause: str  # the annotation, storage or optimizer that asks for them
    source: str  # the line of the first
    times: int
    bytes: int  # that a rank sends in a step
    exposed_ms: float
    ms: float

    @property
    def what(self) -> str:
        return f"{self.kind} over {'.'.join(self.axes)}" if self.axes else self.kind

    def __str__(self) -> str:
        text = f"{self.exposed_ms:9.3f} of {self.ms:.3f} ms  {self.what}, {self.phase}, "
        where = f"   {self.source}" if self.source else ""
        return f"{text}x{self.times}, {human_bytes(self.bytes)}   {self.cause}{where}"


@dataclass(frozen=True)
class Prediction:
    """Times of the step as a whole, and of the rank that works longest (`coordinate` on the pipeline's axis).

    `mfu` divides the model's FLOPs (of one device, nothing recomputed) by what all ranks could compute at
    their peak. `bubble` is the share of the step in which ranks of a pipeline do no work. `idle_ms` is how long compute
    waits for the host to launch kernels, `gaps_ms` the time between kernels. `replicated` is the share of a rank's
    FLOPs that are not the model's: work that several ranks do alike, padding, what is recomputed, and of a pipeline
    what its longest stage has more than a mean one. Of `exposed_ms`, collectives take the compute's cores for
    `taken_ms`, and `met_ms` are waits for ranks that come later than others.
    """

    hardware: str
    ranks: int
    step_ms: float
    tokens: int
    mfu: float
    bubble: float
    peak_bytes: int
    exposed_ms: tuple[ExposedTime, ...]
    kinds_ms: Mapping[Kind, float]
    idle_ms: float
    gaps_ms: float
    host_ms: float
    launches: int
    model_flops: int
    rank_flops: int
    coordinate: int = 0
    timeline: Timeline | None = field(default=None, compare=False, repr=False)
    costs: Costs | None = field(default=None, compare=False, repr=False)
    calls: Mapping[CallTime, Kind] = field(default_factory=dict[CallTime, Kind], compare=False, repr=False)
    events: Callable[[], dict[str, Any]] = field(default=dict[str, Any], compare=False, repr=False)
    unit: Literal["tokens", "samples"] = "tokens"  # what `tokens` counts
    taken_ms: float = 0.0
    met_ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Elements of the batch's ids; of a batch that has none its rows, which are samples (`unit`)."""
        return self.tokens / (self.step_ms / 1e3) if self.step_ms else 0.0

    @property
    def exposed_total_ms(self) -> float:
        return sum(row.exposed_ms for row in self.exposed_ms)

    @property
    def replicated(self) -> float:
        share = self.model_flops / self.ranks
        return 1 - share / self.rank_flops if self.rank_flops > share else 0.0

    def diff(self, profile: Profile) -> ProfileDiff:
        """What each call took on a rank of this coordinate (`trainer.profile`), beside what is predicted.

        Raises ShardcError (SC402) for a profile with fewer than half of its calls in common: one of another program, or
        of a rank of another coordinate.
        """
        known, measured = {time[:2] for time in self.calls}, {time[:2] for time in profile.calls}
        if 2 * len(known & measured) < len(measured):
            shared = f"{len(known & measured)} of its {len(measured)} calls are in the prediction"
            raise error(
                "SC402",
                f"the profile of rank {profile.rank} is of other calls than the prediction: {shared}",
                hint=f"profile the same program, on a rank of coordinate {self.coordinate} if it is a pipeline",
            )
        return ProfileDiff.of(self.step_ms, self.calls, profile)

    def trace(self) -> dict[str, Any]:
        """As trace events (`cost.prediction_trace`)."""
        return self.events()

    def to_trace(self, path: str | Path) -> None:
        """Write a trace file for ui.perfetto.dev or chrome://tracing. Raises ShardcError (SC409) where it cannot."""
        write_text(path, json.dumps(self.trace()), [".json", ".trace"])

    def __str__(self) -> str:
        kinds = [f"{kind} {self.kinds_ms[kind]:.2f}" for kind in KINDS if self.kinds_ms.get(kind)]
        step = f"step {self.step_ms:.2f} ms, {self.tokens_per_s:,.0f} {self.unit}/s, MFU {self.mfu:.1%}"
        of_those = [f"{self.taken_ms:.2f} on the compute's cores"] if self.taken_ms else []
        of_those += [f"{self.met_ms:.2f} for slower ranks"] if self.met_ms else []
        causes = f" (of which {', '.join(of_those)})" if of_those else ""
        copies = sum(row.exposed_ms for row in self.exposed_ms if not row.axes)
        waits = f"collectives {self.exposed_total_ms - copies:.2f}{causes}, "
        waits += f"copies of the host {copies:.2f}, " if "host copy" in self.kinds_ms else ""
        waits += f"host {self.idle_ms:.2f} ms; bubble {self.bubble:.1%}"
        lines = [
            f"{step}, peak {human_bytes(self.peak_bytes)}, on {self.ranks} x {self.hardware}",
            f"ms of a rank: {', '.join(kinds)}; gaps {self.gaps_ms:.2f}",
            f"waits: {waits}; {self.launches:,} launches take the host {self.host_ms:.2f} ms",
        ]
        rows = [row for row in self.exposed_ms if row.exposed_ms > 0]
        lines += [str(row) for row in rows[:SHOWN]]
        if len(rows) > SHOWN:
            rest = sum(row.exposed_ms for row in rows[SHOWN:])
            lines.append(f"{rest:9.3f} ms of {len(rows) - SHOWN} more")
        return "\n".join(lines)
