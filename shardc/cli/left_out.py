"""What of a plan `run` does not do: on CPUs, over few steps of one batch, a part of a plan has nothing to act on."""

from __future__ import annotations

from shardc.api import Program
from shardc.plan.schema import Plan


def left_out(program: Program, *, processes: bool) -> list[str]:
    """A line for each part of the plan that has no effect here; the rest is honoured."""
    plan = Plan.parse(program.plan.get("text", ""))
    notes: list[str] = []
    if "optimizer" not in program.plan and plan.storage.zero in (1, 2):
        what = "there is no optimizer, whose state it would shard; --optimizer adamw makes one"
        notes.append(f"storage.zero: {plan.storage.zero}: {what}")
    if plan.fuse.enabled:
        notes.append("fuse: CPUs run the kernels' references, not Triton's code")
    if not processes and program.staged.axis:
        notes.append("pipeline: ranks take turns in one process, so nothing overlaps")
    return notes
