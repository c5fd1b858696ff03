"""A candidate: one choice of everything that the planner chooses, and the plan that says it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.plan.schema import Plan
from shardc.planner.inner import Inner
from shardc.planner.inner_placement import Placements, inner_plan

ORDER = ("pp", "dp_replicate", "dp", "ep", "cp", "tp")  # of a mesh: what talks most is innermost
ONE_STAGE = ""  # the schedule of a step without a pipeline


@dataclass(frozen=True)
class Candidate:
    """`rows` of a microbatch on each data-parallel replica; `virtual` stages of a rank; `reduce` what gradients are
    summed in, None where the plan has no precision; `bucket` the bytes of a bucket, true where the hardware says them.
    Storage is divided over dp, ep and cp, and not over `dp_replicate`: hybrid sharding (HSDP)."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    sequence: bool = False
    rows: int = 1
    microbatches: int = 1
    schedule: str = ONE_STAGE
    virtual: int = 1
    zero: int = 0
    recompute: str = "none"
    reduce: str | None = None
    bucket: bool | int = True
    dp_replicate: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.pp, self.dp_replicate, self.dp, self.ep, self.cp, self.tp

    @cached_property
    def inner(self) -> Inner:
        return Inner(self.tp, self.cp, self.ep, self.sequence, self.recompute, self.rows)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def batch(self) -> int:
        return self.dp_replicate * self.dp * self.ep * self.rows * self.microbatches

    @property
    def copies(self) -> int:
        """The ranks over which storage of a weight may be divided."""
        return self.dp * self.ep * self.cp

    @property
    def expert_copies(self) -> int:
        """Those of a weight that is placed over the experts' axis."""
        return self.dp * self.cp

    @property
    def sums_overlap(self) -> bool:
        """Whether gradients are summed while backward runs: those of several microbatches are, after the last."""
        return self.pp == 1 and self.microbatches == 1

    def stage(self, rank: int, virtual: int) -> int:
        """Which stage a rank has as its first, second, ...: one after the other, or in a V."""
        back = self.schedule == "zb-v" and virtual % 2
        return self.pp * (virtual + 1) - 1 - rank if back else rank + self.pp * virtual

    def bucket_bytes(self, hardware: Hardware) -> int:
        return hardware.bucket_bytes if self.bucket is True else int(self.bucket)

    @cached_property
    def mesh(self) -> Mesh:
        """Of all axes, those of one rank included: their groups are asked for by name."""
        return Mesh([(name, getattr(self, name)) for name in ORDER])

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """The axes that hold copies of a weight, and that its state is divided over."""
        return tuple(name for name in ("dp", "ep", "cp") if getattr(self, name) > 1)

    def plan(self, placements: Placements, kept: Plan) -> Plan:
        """The plan as a user would write it, what is kept merged over it."""
        kinds = (kept.params, kept.inputs, kept.activations, kept.outputs)
        named = {axis for kind in kinds for a in kind.values() for axis in a.placement.axes}
        named |= {*(kept.mesh.names if kept.mesh is not None else ()), *kept.storage.axes}
        used = [(name, getattr(self, name)) for name in ORDER if getattr(self, name) > 1 or name in named]
        data: dict[str, Any] = {}
        if self.zero and self.storage_axes:
            data["storage"] = {"zero": self.zero, "axes": list(self.storage_axes)}
        if self.recompute != "none":
            data["recompute"] = self.recompute
        if self.bucket is not True:
            data["bucket"] = self.bucket
        if self.schedule:
            data["pipeline"] = {"axis": "pp", "schedule": self.schedule, "microbatches": self.microbatches}
            if self.virtual > 1:
                data["pipeline"]["virtual"] = self.virtual
        elif self.microbatches > 1:
            data["accumulate"] = self.microbatches
        rows = [name for name in ("dp_replicate", "dp", "ep") if getattr(self, name) > 1]
        inner = inner_plan(placements, self.inner, Plan(), rows)
        plan = inner.merge(Plan.from_dict({"mesh": Mesh(used or [("dp", 1)]), **data}))
        plan = plan.merge(kept.model_copy(update={"mesh": None}))
        if self.reduce is not None and plan.precision is not None:
            precision = plan.precision.model_copy(update={"reduce": self.reduce})
            plan = plan.model_copy(update={"precision": precision})
        return plan

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={getattr(self, name)}" for name in ORDER if getattr(self, name) > 1) or "dp=1"
        schedule = f", {self.schedule}" + (f" x{self.virtual}" if self.virtual > 1 else "") if self.schedule else ""
        work = f"{self.microbatches} microbatches of {self.rows}{schedule}"
        return f"{mesh}; zero {self.zero}, recompute {self.recompute}, {work}"
