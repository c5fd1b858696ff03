"""What a rank writes and reads of a checkpoint: its shards of parameters, buffers and the optimizer's state.

What several ranks hold is written by the lowest of them (`runtime.checkpoint.held.writes`), which is the first on every
axis that does not shard it. The first rank of a coordinate is the lowest for all that it holds, so it writes most. All
ranks read what they hold, on whatever mesh it was saved: beside that, at most a chunk more at each end of a shard.
"""

from __future__ import annotations

from shardc.cost.failures import Recovery
from shardc.ir.graph import type_of
from shardc.ir.hardware import Hardware
from shardc.partition.staged_program import StagedProgram

KEPT = ("param", "buffer", "state")
RELAUNCH_SECONDS = 300.0  # an estimate: a watchdog's timeout, new processes, and their first meeting


def held_bytes(program: StagedProgram, c: int) -> int:
    """Bytes of what a rank of this coordinate has of a checkpoint."""
    held, body = program.held(c), program.body
    ports = zip(body.inputs, body.placeholders, strict=True)
    types = [
        type_of(value)
        for port, value in ports
        if port.role in KEPT and (not program.axis or (port.parameter or port.name) in held)
    ]
    return sum(type.local_bytes(body.mesh) for type in types)


def recovery(
    program: StagedProgram, hardware: Hardware, relaunch_seconds: float, restarted: StagedProgram | None = None
) -> Recovery:
    """A save of a program's state, and a restart, of `restarted` where that is another."""
    most = max(held_bytes(program, c) for c in program.coordinate_range)
    rate = hardware.storage_bytes_per_second
    if restarted is None:
        return Recovery(most, most, most / rate, most / rate, relaunch_seconds)
    read = max(held_bytes(restarted, c) for c in restarted.coordinate_range)
    return Recovery(most, most, most / rate, most / rate, relaunch_seconds, read, read / rate)
