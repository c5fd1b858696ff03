"""The rules of the compile gate. It refuses local memory, too much shared memory, and narrow accesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels_triton.launch import launch

DEVICES = {90: launch.H200, 80: launch.A100}

# Allowed narrow accesses, by part of the kernel's name: a few scalars a row or a program.
NARROW = {
    "column_sums": 1 << 20,
    "_finish.": 1 << 20,  # of a generated kernel
    "fused.": 12,  # a few statistics for each of many short rows
    "cross_entropy_finish": 48,  # a few numbers of each shard, in unrolled loops
    "dropout_forward": 4,
    "dropout_backward": 12,
    "cross_entropy": 12,
    "long_runs": 24,  # where the rows of a tile of tokens are
    "rope": 0,
}
# Allowed narrow accesses to each full-size tensor: elements that are read or corrected on their own.
SHORT = {"column_sums": 1 << 20, "_finish.": 1 << 20, "cross_entropy": 2, "bucket.": 6, "norm_forward": 8}


def problems(line: Mapping[str, Any]) -> list[str]:
    """The reasons for which the gate refuses a kernel."""
    out: list[str] = []
    if line["spills"] or line["stack"]:
        out.append(f"{line['spills']} local-memory accesses, {line['stack']} bytes of stack")
    most = DEVICES[line["arch"]].shared_bytes
    if line["shared"] > most:
        out.append(f"{line['shared']} bytes of shared memory, of {most}")
    if line["odd"]:
        return out
    accesses: Mapping[str, int] = line["accesses"]
    wide_count, narrow_count = accesses.get("128", 0), sum(count for width, count in accesses.items() if width != "128")
    kernel = str(line["kernel"])
    # Statistics of a row, or weights and sums of a channel. Pipeline stages and loops may be unrolled.
    constants = line["constants"]
    per_row = 4 * constants.get("ROWS", 1) * constants.get("STAGES", 1) * constants.get("OF_GROUP", 1)
    per_row += 4 * (constants.get("PARTS", 1) > 1)  # the exchange between programs
    per_row += 4 * ("norm_forward" in kernel)  # the number from which a row's distances are measured
    allowed = next((count for name, count in NARROW.items() if name in kernel), per_row)
    if "READ" in constants and constants["READ"] > line["cols"]:  # logits have padding, and column operands have none
        allowed = 1 << 20
    if kernel != "norm.column_sums" and "_finish." not in kernel and not wide_count:
        out.append("no 128-bit access")
    if narrow_count > max(allowed + 2, 6):
        out.append(f"{narrow_count} accesses of less than 128 bits")
    allowed_narrow = next((count for name, count in SHORT.items() if name in kernel), 0)
    allowed_narrow *= 1 + ("norm_forward" in kernel and constants.get("ROWS", 1) > 1)
    narrow_tensors = [f"{count} of {name}" for name, count in line["short"].items() if count > allowed_narrow]
    if narrow_tensors:
        out.append(f"accesses to full-size tensors of less than 16 bytes: {', '.join(narrow_tensors)}")
    return out
