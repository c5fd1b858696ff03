"""The cost model of schedules: seconds of each part of each stage, the link between ranks, and a memory limit.

Any unit of time works if all fields use the same one. In `Costs.unit(8)` every part of 8 stages takes 1, transfers take
0, and memory is unlimited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shardc.ir.plain import listed
from shardc.schedule.instructions import (
    COMPUTE,
    Backward,
    Compute,
    Dgrad,
    Forward,
    Gather,
    Instruction,
    Optimizer,
    ReduceGrads,
    Send,
)


@dataclass(frozen=True)
class StageCost:
    """Times for one microbatch. `backward` is the time of the unsplit backward, if it differs from dgrad + wgrad.

    `activation` is the memory that a microbatch holds from its forward to the end of its backward: bytes, or any unit.
    """

    forward: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    backward: float | None = None
    activation: float = 1.0


@dataclass(frozen=True)
class Costs:
    """`memory` limits the activations that a rank may hold at once. `crossing` is the bytes that a stage sends to the
    next one; searches use it before a pipeline exists. `reduce` and `optimizer` are seconds of one instruction. A
    Gather takes `gather` seconds and in addition the seconds that `gathers` lists for each of its values."""

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

    def work_seconds(self, work: Compute) -> float:
        stage = self.stages[work.stage]
        if isinstance(work, Forward):
            return stage.forward
        if isinstance(work, Dgrad):
            return stage.dgrad
        backward = stage.dgrad + stage.wgrad if stage.backward is None else stage.backward
        return backward if isinstance(work, Backward) else stage.wgrad

    def gather_seconds(self, work: Gather) -> float:
        return self.gather + sum(self.gathers.get(name, 0.0) for name in work.values)

    def transfer_seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth

    def seconds(self, rank: int, i: Instruction) -> float:
        """How long an instruction of a rank's list takes; a Send, how long its transfer does."""
        if isinstance(i, COMPUTE):
            return self.work_seconds(i)
        if isinstance(i, Gather):
            return self.gather_seconds(i)
        if isinstance(i, Send):
            return self.transfer_seconds(i.bytes)
        return self.optimizer if isinstance(i, Optimizer) else self.reduce if isinstance(i, ReduceGrads) else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Fields at their defaults are left out, because JSON has no infinity."""
        plain, defaults = asdict(self), asdict(Costs(()))
        return {key: value for key, value in plain.items() if key == "stages" or value != defaults[key]}

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


class InstructionCosts(Costs):
    """Costs that tell the seconds of each rank's instructions, such as a prediction's; the other fields are for
    searches. `of` gives those of a rank's instruction; `taken`, how long compute stands still for a Send, of its rank
    and of its peer, while the transfer is under way. Collectives along other axes than the pipeline's take their place
    among a rank's work, as in the executor; by plain costs they run beside it."""

    of: Callable[[int, Instruction], float]
    taken: Callable[[int, Send], float]

    @classmethod
    def given(
        cls,
        costs: Costs,
        of: Callable[[int, Instruction], float],
        taken: Callable[[int, Send], float] = lambda _rank, _send: 0.0,
    ) -> InstructionCosts:
        made = cls(**{field.name: getattr(costs, field.name) for field in fields(costs)})
        object.__setattr__(made, "of", of)
        object.__setattr__(made, "taken", taken)
        return made

    def seconds(self, rank: int, i: Instruction) -> float:
        return self.of(rank, i)
