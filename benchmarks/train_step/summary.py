"""Ratios, bars and misses from the lines of `benchmarks.train_step`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.train_step.switches import ALL_ON, OFF

Line = dict[str, Any]


def of_files(files: Iterable[Path]) -> list[str]:
    return table([json.loads(text) for file in files for text in file.read_text().splitlines() if text.startswith("{")])


def table(lines: Sequence[Line]) -> list[str]:
    """Of each row: every contestant, then the best peer's step over each of ours."""
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
        said += [*_ratios(measured), *_shares(measured)]
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
    """The best peer's step over each of ours, the best first. Each is first divided by the step of the same contestant
    of ours (`anchor`) in the same turns, round by round: what was measured at another time is not compared directly."""
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

    peer, lines = min(theirs, key=lambda line: over(line, "median_ms")), list[str]()
    for own in sorted(mine, key=lambda line: over(line, "median_ms")):
        ratio, free = (over(peer, key) / over(own, key) for key in ("median_ms", "free_ms"))
        turns = [a / b for a, b in zip(rounds(peer), rounds(own), strict=False)]
        bar, verdict = own.get("bar"), ""
        if bar is not None and not lines:
            verdict = f", bar {bar}: " + ("met" if ratio >= bar else f"missed by {1 - ratio / bar:.1%}")
        pair = f"{peer['contestant']} / {own['contestant']}"
        lines.append(f"  {pair} = {ratio:.3f} ({min(turns):.3f} to {max(turns):.3f}), free {free:.3f}{verdict}")
    for sequence_parallel in (False, True):
        mode = [
            [line for line in some if _is_sequence_parallel(line) is sequence_parallel and "peak_gib" in line]
            for some in (mine, theirs)
        ]
        if mode[0]:
            lines += _memory(min(mode[0], key=lambda line: over(line, "median_ms")), mode[1])
    return lines


def _is_sequence_parallel(line: Line) -> bool:
    return "sp" in line["contestant"].split("-")


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


def _shares(measured: Sequence[Line]) -> list[str]:
    """Of each pass that was switched off or on, the step with that over the step without, of the same turns."""
    lines: list[str] = []
    for line in measured:
        form, switch = OFF.get(line["contestant"], ("", ALL_ON))
        beside = [other for other in measured if other["contestant"] == form and other["turns"] == line["turns"]]
        if not beside:
            continue
        ours_whole = beside[0]
        head = f"  {'with' if switch.on else 'without'} {switch.off}: "
        if line["program"] == ours_whole["program"]:
            lines.append(f"{head}the same program")
            continue
        turns = [a / b for a, b in zip(line["rounds_ms"], ours_whole["rounds_ms"], strict=False)]
        ratio, free = (line[key] / ours_whole[key] for key in ("median_ms", "free_ms"))
        text = f"{head}{ratio:.3f} of {form}'s step ({min(turns):.3f} to {max(turns):.3f}), free {free:.3f}"
        if "peak_gib" in line:
            text += f", peak {line['peak_gib'] - ours_whole['peak_gib']:+.2f} GiB"
        lines.append(text)
    return lines
