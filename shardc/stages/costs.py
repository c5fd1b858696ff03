"""What a schedule is judged by: seconds of each part of each stage, the link between ranks, and a limit of memory.

Any unit will do, as long as it is one: `Costs.unit(8)` has every part take 1, links take nothing, and memory no end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardc.ir.plain import listed
from shardc.stages.instructions import Backward, Compute, Dgrad, Forward, Gather


@dataclass(frozen=True)
class StageCost:
    """Times for one microbatch; `backward` is the unsplit one's, where that is not dgrad + wgrad.

    `activation` is what a microbatch holds from its forward to the end of its backward: bytes, or any unit.
    """

    forward: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    backward: float | None = None
    activation: float = 1.0


@dataclass(frozen=True)
class Costs:
    """`memory` limits the activations that a rank may hold at once; `crossing` is what a stage hands to the next, which
    searches go by before there is a pipeline. Sums and the optimizer take seconds each, and so does a Gather: `gather`,
    and on top of it what `gathers` says of each of its values."""

    stages: tuple[StageCost, ...]
    latency: float = 0.0
    bandwidth: float = math.inf  # bytes a second
    crossing: int = 0  # bytes
    gather: float = 0.0
    gathers: Mapping[str, float] = field(default_factory=dict[str, float])
    reduce: float = 0.0
    optimizer: float = 0.0
    memory: float = math.inf

    @classmethod
    def unit(cls, stages: int, memory: float = math.inf) -> Costs:
        return cls((StageCost(),) * stages, memory=memory)

    def of(self, work: Compute) -> float:
        stage = self.stages[work.stage]
        if isinstance(work, Forward):
            return stage.forward
        if isinstance(work, Dgrad):
            return stage.dgrad
        whole = stage.dgrad + stage.wgrad if stage.backward is None else stage.backward
        return whole if isinstance(work, Backward) else stage.wgrad

    def gathering(self, work: Gather) -> float:
        return self.gather + sum(self.gathers.get(name, 0.0) for name in work.values)

    def transfer(self, size: int) -> float:
        return self.latency + size / self.bandwidth

    def to_plain(self) -> dict[str, Any]:
        """Without what is at its default: JSON has no infinity."""
        plain, unsaid = asdict(self), asdict(Costs(()))
        return {key: value for key, value in plain.items() if key == "stages" or value != unsaid[key]}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Costs:
        """ValueError, TypeError for what `to_plain` does not write."""
        more: dict[str, Any] = {key: value for key, value in data.items() if key != "stages"}
        stages = [dict(stage) for stage in listed(data["stages"])]
        gathers: dict[str, Any] = more.get("gathers", {})
        numbers = [*gathers.values(), *(value for key, value in more.items() if key != "gathers")]
        numbers += [value for stage in stages for value in stage.values() if value is not None]
        if any(isinstance(n, bool) or not isinstance(n, int | float) or n != n for n in numbers):
            raise ValueError("a cost is no number")
        return cls(tuple(StageCost(**stage) for stage in stages), **more)
