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
    told += f", predicted {line['predicted_ms'] / line['median_ms'] - 1:+.1%}" if line.get("predicted_ms") else ""
    told += ", again" if line.get("again") else ""
    taken = f"{line['median_ms']:9.2f} ms ({min(rounds):.2f} to {max(rounds):.2f}), free {line['free_ms']:9.2f}"
    return f"  {name:26} {taken}{memory}{told}"


def ours(line: Line) -> bool:
    return line["contestant"].startswith("ours")


def _ratios(measured: Sequence[Line]) -> list[str]:
    """The best peer's step over the best of ours. Each is first divided by the step of the same contestant of ours
    (`anchor`) in the same turns, round by round: what was measured at another time is not compared directly."""
    anchors = {line["turns"]: line for line in measured if ours(line) and (line["turns"] == 1 or line.get("again"))}
    first = [line for line in measured if ours(line) and line["turns"] == 1]
    anchors |= {1: first[0]} if first else {}
    said = [line for line in measured if line["turns"] in anchors and not line.get("again")]
    mine, theirs = ([line for line in said if ours(line) is side] for side in (True, False))
    if not mine or not theirs:
        return []

    def over(line: Line, key: str) -> float:
        return line[key] / anchors[line["turns"]][key]

    def rounds(line: Line) -> list[float]:
        return [a / b for a, b in zip(line["rounds_ms"], anchors[line["turns"]]["rounds_ms"], strict=False)]

    best, peer = (min(some, key=lambda line: over(line, "median_ms")) for some in (mine, theirs))
    ratio, free = (over(peer, key) / over(best, key) for key in ("median_ms", "free_ms"))
    turns = [a / b for a, b in zip(rounds(peer), rounds(best), strict=False)]
    bar = best.get("bar")
    verdict = "" if bar is None else f", bar {bar}: " + ("met" if ratio >= bar else f"missed by {1 - ratio / bar:.1%}")
    pair = f"{peer['contestant']} / {best['contestant']}"
    lines = [f"  {pair} = {ratio:.3f} ({min(turns):.3f} to {max(turns):.3f}), free {free:.3f}{verdict}"]
    for sequence_parallel in (False, True):
        mode = [
            [line for line in some if ("-sp" in line["contestant"]) is sequence_parallel and "peak_gib" in line]
            for some in (mine, theirs)
        ]
        if mode[0]:
            lines += _memory(min(mode[0], key=lambda line: over(line, "median_ms")), mode[1])
    return lines


def _memory(own: Line, peers: Sequence[Line]) -> list[str]:
    """A contestant of ours beside the leanest peer of its mode, and beside what the program says of itself."""
    name, told = own["contestant"], own["reported_peak_gib"] / own["peak_gib"] - 1
    lines = [f"  program.memory() of {name}: {told:+.1%} of the peak, bar 3%" + ": missed" * (abs(told) > 0.03)]
    if peers:
        leanest = min(peers, key=lambda line: line["peak_gib"])
        share = own["peak_gib"] / leanest["peak_gib"]
        pair = f"{name} / {leanest['contestant']} = {share:.2f}"
        lines.insert(0, f"  memory: {pair}, bar 1.05" + ": missed" * (share > 1.05))
    return lines
