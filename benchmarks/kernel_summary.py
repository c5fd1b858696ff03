"""What lines of benchmarks/kernels.py say against the goals: 0.9 of a copy, the best peer's time, and why not.

A line is a dict: op, shape, provider, us, of_copy. Lines of several runs are put together; of two for the same op,
shape and provider the later counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

COPY, EQUAL = 0.9, 0.98  # of the copy; of the best peer's time, where measuring tells no difference

ANY = range(1 << 20)
SUMS = "a second kernel adds the programs' sums over rows, 3 to 4 us; rows divide unevenly over multiprocessors"
# (what falls short, by op; of which goal; at which columns; why): the first that fits
REASONS: tuple[tuple[str, str, range, str], ...] = (
    (
        "group_norm*",
        "copy",
        range(1025, 1 << 20),
        "a group above 32 KiB is read twice, the second time from the L2 cache",
    ),
    ("group_norm_backward", "copy", ANY, "a second kernel adds the samples' sums, 3 to 4 us"),
    ("*norm_backward", "copy", ANY, SUMS),
    ("bias_gelu*_backward", "copy", ANY, SUMS),
    ("bias_dropout_residual_backward", "copy", ANY, SUMS),
    (
        "bias_dropout_residual",
        "copy",
        ANY,
        "ten rounds of Philox an element: wide multiplications, a quarter of the rate",
    ),
    (
        "cross_entropy",
        "copy",
        range(60_000),
        "a row's passes overlap with memory in part; 4096 rows are 31.03 rounds of 132",
    ),
    (
        "cross_entropy",
        "copy",
        ANY,
        "two thirds of a row are read twice, a third fits in registers; passes overlap in part",
    ),
    ("*norm", "copy", range(1025), "a row's load, sums and store follow each other: 1 us of 10 to 14"),
)
TIE = "within the 2 % that two runs differ by"
UNKNOWN = "unexplained"


@dataclass(frozen=True)
class Result:
    """Ours beside the best peer, at one shape."""

    op: str
    shape: tuple[int, int]
    us: float
    of_copy: float
    peers: dict[str, float]

    @property
    def best(self) -> str | None:
        return min(self.peers, key=self.peers.__getitem__) if self.peers else None

    @property
    def speedup(self) -> float | None:
        return min(self.peers.values()) / self.us if self.peers else None

    @property
    def short(self) -> dict[str, str]:
        """Why, by goal that is missed."""
        why: dict[str, str] = {}
        if self.of_copy < COPY:
            why["copy"] = self._why("copy", UNKNOWN)
        if self.speedup is not None and self.speedup < 1.0:
            why["peer"] = self._why("peer", TIE if self.speedup >= EQUAL else UNKNOWN)
        return why

    def _why(self, goal: str, otherwise: str) -> str:
        cols = self.shape[1]
        found = (why for op, of, at, why in REASONS if of == goal and cols in at and fnmatch(self.op, op))
        return next(found, otherwise)


def read(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The lines of files of JSON lines; whatever else a run printed is passed over."""
    for path in paths:
        for text in Path(path).read_text(encoding="utf-8").splitlines():
            line = json.loads(text) if text.startswith("{") else {}
            if "provider" in line:
                yield line


def results(lines: Iterable[dict[str, Any]]) -> list[Result]:
    """In the order in which ops and shapes came first."""
    found: dict[tuple[str, tuple[int, int]], dict[str, dict[str, Any]]] = {}
    for line in lines:
        if "us" in line:
            found.setdefault((line["op"], tuple(line["shape"])), {})[line["provider"]] = line
    return [
        Result(op, shape, at["ours"]["us"], at["ours"]["of_copy"], {k: v["us"] for k, v in at.items() if k != "ours"})
        for (op, shape), at in found.items()
        if "ours" in at
    ]


def summary(found: list[Result]) -> Iterator[dict[str, Any]]:
    """Each line that falls short and why, then the counts and the geometric mean."""
    for one in found:
        if one.short:
            speedup = {"best_peer": one.best, "speedup": round(one.speedup, 3)} if one.speedup else {}
            ours = {"op": one.op, "shape": one.shape, "us": one.us, "of_copy": one.of_copy}
            yield {"summary": "short", **ours, **speedup, "why": one.short}
    ratios = [one.speedup for one in found if one.speedup is not None]
    yield {
        "summary": "goals",
        "lines": len(found),
        "copy >= 0.9": sum(one.of_copy >= COPY for one in found),
        "with peers": len(ratios),
        "peer >= 1.0": sum(r >= 1.0 for r in ratios),
        "peer >= 0.98": sum(r >= EQUAL for r in ratios),
        "geometric mean": round(mean(ratios), 3) if ratios else None,
        "unexplained": sum(UNKNOWN in one.short.values() for one in found),
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
