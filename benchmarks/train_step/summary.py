"""Ratios, bars and misses from the lines of `benchmarks.train_step`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def of_files(files: Iterable[Path]) -> list[str]:
    return table([json.loads(text) for file in files for text in file.read_text().splitlines() if text.startswith("{")])


def table(lines: Sequence[Line]) -> list[str]:
    """Of each row: every contestant, then the best peer's step over the best of ours."""
    said: list[str] = []
    for row in dict.fromkeys(line["row"] for line in lines if "row" in line):
        of_row = [line for line in lines if line.get("row") == row]
        measured = [line for line in of_row if "median_ms" in line]
        said += [
            "",
            f"{row}"
            + (f": {measured[0]['device']}, torch {measured[0]['torch']}, {measured[0]['commit']}" if measured else ""),
        ]
        said += [_said(line) for line in sorted(of_row, key=lambda line: line.get("median_ms", float("inf")))]
        said += _ratios(measured)
    return said


def _said(line: Line) -> str:
    name = line["contestant"]
    if "median_ms" not in line:
        return f"  {name:26} " + next(f"{key}: {line[key]}" for key in ("left_out", "failed") if key in line)
    rounds = line["rounds_ms"]
    memory = f" {line['peak_gib']:6.2f} GiB" if "peak_gib" in line else ""
    told = f" (told {line['reported_peak_gib']})" if "reported_peak_gib" in line else ""
    told += ", again" if line.get("again") else ""
    taken = f"{line['median_ms']:9.2f} ms ({min(rounds):.2f} to {max(rounds):.2f}), free {line['free_ms']:9.2f}"
    return f"  {name:26} {taken}{memory}{told}"


def ours(line: Line) -> bool:
    return line["contestant"].startswith("ours")


def _ratios(measured: Sequence[Line]) -> list[str]:
    first = [line for line in measured if not line.get("again")]
    mine, theirs = ([line for line in first if ours(line) is side] for side in (True, False))
    if not mine or not theirs:
        return []
    best, peer = (min(some, key=lambda line: line["median_ms"]) for some in (mine, theirs))
    turns = [a / b for a, b in zip(peer["rounds_ms"], best["rounds_ms"], strict=False)]
    ratio, free = peer["median_ms"] / best["median_ms"], peer["free_ms"] / best["free_ms"]
    bar = best.get("bar")
    verdict = "" if bar is None else f", bar {bar}: " + ("met" if ratio >= bar else f"missed by {1 - ratio / bar:.1%}")
    pair = f"{peer['contestant']} / {best['contestant']}"
    said = [f"  {pair} = {ratio:.3f} ({min(turns):.3f} to {max(turns):.3f}), free {free:.3f}{verdict}"]
    if "peak_gib" in best:
        leanest = min(theirs, key=lambda line: line["peak_gib"])
        said.append(f"  memory: {best['peak_gib'] / leanest['peak_gib']:.2f} of {leanest['contestant']}'s, bar 1.05")
    return said
