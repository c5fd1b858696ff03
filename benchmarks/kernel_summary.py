"""What lines of benchmarks/kernels.py say against the goals: 0.9 of a copy, the best peer's time, and why not.

A reason says how far off it was measured to bring a line, and explains none that is further off. A line is a dict: op,
shape, provider, us, of_copy. Lines of several runs are put together; of two for the same op, shape and provider the
later counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

COPY = 0.9  # of the copy
TIE = 0.02  # of the best peer's time, at most; and where a run did not time ours twice

_BOTH = (
    *("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "softmax", "masked_softmax", "causal_softmax"),
    *("bias_gelu_tanh", "bias_gelu", "swiglu", "swiglu_packed", "geglu", "geglu_packed", "squared_relu"),
    *("bias_dropout_residual", "rope", "group_norm"),
)
OPS = (
    *(name for op in _BOTH for name in (op, f"{op}_backward")),
    *("adamw", "cross_entropy", "cross_entropy_stats", "cross_entropy_finish"),
)  # as the table has them


@dataclass(frozen=True)
class Reason:
    """Why an op misses a goal, as measured: it accounts for shares of the copy, or of the best peer's time, down to
    `least`. What is further off is unexplained."""

    op: str
    goal: str
    least: float
    why: str
    cols: range = range(1 << 20)


SUMS = (
    "a second kernel adds the programs' sums over rows: 2.2 to 3.2 us at 1024 columns, 3 to 5 at 4096, measured by "
    "leaving it out; started early (programmatic launch) it takes 0.3 us less, as a barrier of all programs no less"
)
RUNS = (
    "the peer loads, sums and stores the same: of 13 such lines, 1 to 3 % behind in one run, 10 were not in the run "
    "before, of the same kernels"
)
SHARED = (
    "a group above 32 KiB is shared by programs, which load nothing while they wait for each other's sums; from 8192 "
    "columns on, reading it twice takes 1.25 to 1.45 times as long"
)
CHOSEN = (
    "torch.compile times kernels and chooses one anew in each run: at 4096 x 1024 its layer norm took 9.5, 11.1 and "
    "12.4 us in three runs, its RMSNorm 9.15 and 9.89; at 8192 x 1024 its add + layer norm 21.4 to 23.6 in five (ours "
    "22.2 to 22.6), its layer norm 13.8 to 15.8 in five (ours 14.6 to 14.9)"
)
ALONE = (
    "of ten tiles at 4096 x 1024 all are within 3 %, and launched one after another they take 7.0 to 7.3 us where "
    "torch.compile's kernel takes 7.8: alone, after others, 12.0 to 12.4 and 11.6 to 12.0"
)
OVER = (
    "Liger writes over gate and up: its own kernel, made to write elsewhere, takes 16.7 us at 4096 x 1024 and not "
    "16.2 (ours 16.9), 25.9 at 8192 x 1024 and not 25.7; ours, made to write over them, 16.3 and 25.6"
)
HALVES = (
    "a thread has both halves of a pair, and a warp writes every other 128 bytes: torch.compile's kernel, made to, "
    "takes 196.0 us at 16384 x 12288 and not 192.2"
)
NARROW, WIDE = range(1025), range(1025, 1 << 20)
REASONS: tuple[Reason, ...] = (  # the first that fits
    Reason("group_norm*", "copy", 0.72, SHARED, WIDE),
    Reason("group_norm_backward", "copy", 0.68, "a second kernel adds the samples' sums: 3 to 4 us", NARROW),
    Reason("*norm_backward", "copy", 0.68, SUMS, NARROW),
    Reason("*norm_backward", "copy", 0.76, SUMS, WIDE),
    Reason("*norm", "copy", 0.82, "a row's load, sums and store follow each other: 1 us of 8 to 14", NARROW),
    Reason(
        "masked_softmax", "copy", 0.85, "each row reads the mask from the L2 cache: half a logit's bytes, not counted"
    ),
    Reason("bias_*_backward", "copy", 0.68, SUMS, NARROW),
    Reason("bias_*_backward", "copy", 0.79, SUMS, WIDE),
    Reason("bias_dropout_residual", "copy", 0.88, "ten rounds of Philox for four elements: a quarter of the rate"),
    Reason(
        "cross_entropy",
        "copy",
        0.8,
        "a row's passes overlap with memory in part; 4096 rows are 31.03 rounds of 132",
        range(60_000),
    ),
    Reason("cross_entropy", "copy", 0.62, "two thirds of a row are read twice, a third fits in registers"),
    Reason(
        "cross_entropy_stats",
        "copy",
        0.7,
        "16 us do not grow with the width, of a plain kernel's 7; the rest runs at the copy's 4.3 TB/s",
    ),
    Reason("layer_norm", "peer", 0.93, CHOSEN, NARROW),
    *(Reason(op, "peer", 0.96, CHOSEN, NARROW) for op in ("rms_norm", "add_layer_norm")),
    Reason("squared_relu_backward", "peer", 0.955, ALONE, NARROW),
    Reason("swiglu_backward", "peer", 0.945, OVER, NARROW),
    Reason("rope*", "peer", 0.973, HALVES, WIDE),
    *(
        Reason(op, "peer", 0.97, RUNS)
        for op in ("*norm", "softmax*", "*glu*", "squared_relu*", "adamw", "cross_entropy_finish")
    ),
)
UNKNOWN = "unexplained"


@dataclass(frozen=True)
class Result:
    """Ours beside the best peer, at one shape."""

    op: str
    shape: tuple[int, int]
    us: float
    of_copy: float
    peers: dict[str, float]
    again: float | None = None  # microseconds of ours once more

    @property
    def best(self) -> str | None:
        return min(self.peers, key=self.peers.__getitem__) if self.peers else None

    @property
    def speedup(self) -> float | None:
        return min(self.peers.values()) / self.us if self.peers else None

    def short(self, tie: float) -> dict[str, str]:
        """Why, by goal that is missed; `tie` is what two times of the same kernel differ by."""
        why: dict[str, str] = {}
        if self.of_copy < COPY:
            why["copy"] = self._why("copy", self.of_copy)
        if self.speedup is not None and self.speedup < 1.0:
            tied = f"within the {tie:.1%} that two times of the same kernel differ by"
            why["peer"] = tied if self.speedup >= 1.0 - tie else self._why("peer", self.speedup)
        return why

    def _why(self, goal: str, share: float) -> str:
        cols = self.shape[1]
        fits = (one for one in REASONS if one.goal == goal and cols in one.cols and fnmatch(self.op, one.op))
        return next((one.why for one in fits if share >= one.least), UNKNOWN)


def tie_of(found: list[Result]) -> float:
    """What 95 % of the lines differ by at most when the same kernel is timed twice."""
    apart = sorted(abs(one.again / one.us - 1) for one in found if one.again is not None)
    return min(apart[int(0.95 * len(apart))], TIE) if apart else TIE


def read(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The lines of files of JSON lines; whatever else a run printed is passed over."""
    for path in paths:
        for text in Path(path).read_text(encoding="utf-8").splitlines():
            line = json.loads(text) if text.startswith("{") else {}
            if "provider" in line:
                yield line


def results(lines: Iterable[dict[str, Any]]) -> list[Result]:
    """In the order of OPS, then of shapes."""
    found: dict[tuple[str, tuple[int, int]], dict[str, dict[str, Any]]] = {}
    for line in lines:
        if "us" in line:
            found.setdefault((line["op"], tuple(line["shape"])), {})[line["provider"]] = line
    order = {op: number for number, op in enumerate(OPS)}
    return [
        Result(
            op,
            shape,
            at["ours"]["us"],
            at["ours"]["of_copy"],
            {name: line["us"] for name, line in at.items() if name not in ("ours", "again")},
            at["again"]["us"] if "again" in at else None,
        )
        for (op, shape), at in sorted(found.items(), key=lambda item: (order.get(item[0][0], len(OPS)), item[0][1]))
        if "ours" in at
    ]


def summary(found: list[Result]) -> Iterator[dict[str, Any]]:
    """Each line that falls short and why, then the counts and the geometric mean."""
    tie = tie_of(found)
    short = [(one, why) for one in found if (why := one.short(tie))]
    for one, why in short:
        speedup = {"best_peer": one.best, "speedup": round(one.speedup, 3)} if one.speedup else {}
        ours = {"op": one.op, "shape": one.shape, "us": one.us, "of_copy": one.of_copy}
        yield {"summary": "short", **ours, **speedup, "why": why}
    ratios = [one.speedup for one in found if one.speedup is not None]
    yield {
        "summary": "goals",
        "lines": len(found),
        "copy >= 0.9": sum(one.of_copy >= COPY for one in found),
        "with peers": len(ratios),
        "peer >= 1.0": sum(r >= 1.0 for r in ratios),
        "the same kernel twice, 95 % within": round(tie, 4),
        "peer >= 1.0 but for that": sum(r >= 1.0 - tie for r in ratios),
        "geometric mean": round(mean(ratios), 3) if ratios else None,
        "unexplained": sum(UNKNOWN in why.values() for _, why in short),
    }


def table(found: list[Result], shape: tuple[int, int]) -> Iterator[str]:
    """README's table: microseconds at `shape` (or an op's own, where it has no such), shares over all shapes."""
    providers = ("ours", "eager", "compile", "liger")
    yield "| | ours | eager | torch.compile | Liger | copy | peer | mean |"
    yield "|---|---|---|---|---|---|---|---|"
    for op in dict.fromkeys(one.op for one in found):
        same = [one for one in found if one.op == op]
        groups = [same] if any(one.shape == shape for one in same) else [[one] for one in same]
        for group in groups:
            at = next((one for one in group if one.shape == shape), group[0])
            label = op if at.shape == shape else f"{op}, {at.shape[0]} x {at.shape[1]:,}"
            times = {**at.peers, "ours": at.us}
            spent = [f"{times[name]:.1f}" if name in times else "" for name in providers]
            ratios = [one.speedup for one in group if one.speedup is not None]
            shares = _span([one.of_copy for one in group]), _span(ratios), f"{mean(ratios):.2f}" if ratios else ""
            yield "| " + " | ".join((label, *spent, *shares)) + " |"


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _span(values: list[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low}-{high}"
