"""What the compile gate refuses of a kernel: local memory, more shared memory than there is, and narrow accesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels_triton import launch

DEVICES = {90: launch.H200, 80: launch.A100}

# What else may be narrow: each kernel's own few scalars a row or a program, by its file.
NARROW = {
    "column_sums": 1 << 20,
    "_finish.": 1 << 20,  # of a generated kernel, likewise
    "fused.": 12,  # a few statistics for each of many short rows
    "cross_entropy_finish": 48,  # a few numbers of each shard, in unrolled loops
    "dropout_forward": 4,
    "dropout_backward": 12,
    "cross_entropy": 12,
    "rope": 0,
}
# Of each full-size tensor: elements that are read or put right by themselves.
SHORT = {"column_sums": 1 << 20, "_finish.": 1 << 20, "cross_entropy": 2, "bucket.": 6, "norm_forward": 8}


def problems(line: Mapping[str, Any]) -> list[str]:
    """What the gate refuses."""
    out: list[str] = []
    if line["spills"] or line["stack"]:
        out.append(f"{line['spills']} local-memory accesses, {line['stack']} bytes of stack")
    most = DEVICES[line["arch"]].shared_bytes
    if line["shared"] > most:
        out.append(f"{line['shared']} bytes of shared memory, of {most}")
    if line["odd"]:
        return out
    accesses: Mapping[str, int] = line["accesses"]
    wide, narrow = accesses.get("128", 0), sum(count for width, count in accesses.items() if width != "128")
    kernel = str(line["kernel"])
    # Statistics of a row, or weights and sums of a channel; of stages ahead, and of loops, all may be written out.
    constants = line["constants"]
    per_row = 4 * constants.get("ROWS", 1) * constants.get("STAGES", 1) * constants.get("OF_GROUP", 1)
    per_row += 4 * (constants.get("PARTS", 1) > 1)  # what programs tell each other
    per_row += 4 * ("norm_forward" in kernel)  # the number that a row's distances are from
    allowed = next((count for name, count in NARROW.items() if name in kernel), per_row)
    if "READ" in constants and constants["READ"] > line["cols"]:  # padding, which what is added to columns has not
        allowed = 1 << 20
    if kernel != "norm.column_sums" and "_finish." not in kernel and not wide:
        out.append("no 128-bit access")
    if narrow > max(allowed + 2, 6):
        out.append(f"{narrow} accesses of less than 128 bits")
    few = next((count for name, count in SHORT.items() if name in kernel), 0)
    few *= 1 + ("norm_forward" in kernel and constants.get("ROWS", 1) > 1)
    apart = [f"{count} of {name}" for name, count in line["short"].items() if count > few]
    if apart:
        out.append(f"accesses to full-size tensors of less than 16 bytes: {', '.join(apart)}")
    return out
