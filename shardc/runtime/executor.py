"""One rank's body as a flat list of calls: what a process of a job runs every step.

Everything that can be known beforehand is: argument templates, slots, what dies when, offsets that depend on the rank
alone. A step is then one loop over plain calls; an error in it names the instruction, the user's line and the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import shardc.ir.ops.fused_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what GPUs run)
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, Port
from shardc.ir.ops.collectives import COLLECTIVES, run_collective
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.local import axis_offset
from shardc.runtime.instructions import Numerics, flatten
from shardc.runtime.monitor import Monitor

Single = int  # the slot of a call's only result
Many = tuple[tuple[int, int], ...]  # (position among the results, slot)


class Executor:
    """Runs a localized body as the rank of `context`. Tensors in and out are this rank's shards."""

    def __init__(self, body: Graph, context: RankContext, rank: int, device: torch.device) -> None:
        self.body, self.context, self.rank = body, context, rank
        self.listing = listing = flatten(body, Numerics(device))
        self.names = [instruction.where for instruction in listing.instructions]
        self._empty: list[Any] = [None] * listing.size
        self._code: list[tuple[int, Callable[..., Any], Any, Single | Many, tuple[int, ...]]] = []
        constant: set[int] = set()
        for at, instruction in enumerate(listing.instructions):
            places = instruction.yields
            into = (
                places[0][2] if len(places) == 1 and places[0][1] is None else tuple((p or 0, s) for _, p, s in places)
            )
            if instruction.target is axis_offset:
                args, kwargs = instruction.arguments(self._empty)
                assert isinstance(into, int)
                with running(context):
                    self._empty[into] = axis_offset(*args, **kwargs).to(device)
                constant.add(into)
                continue
            steps = COLLECTIVES.get(instruction.target)
            call = instruction.target if steps is None else partial(run_collective, steps)
            free = tuple(slot for slot in instruction.free if slot not in constant)
            self._code.append((at, call, instruction.arguments, into, free))

    @torch.no_grad()
    def run(self, inputs: Sequence[torch.Tensor], monitor: Monitor | None = None) -> dict[Port, torch.Tensor]:
        """One step. Raises ShardcError naming the rank to blame when a collective fails."""
        env = self._empty.copy()
        for slot, value in zip(self.listing.inputs, inputs, strict=True):
            env[slot] = value
        at = 0
        try:
            with running(self.context):
                for at, call, arguments, into, free in self._code:
                    if monitor is not None:
                        monitor.at = at
                    args, kwargs = arguments(env)
                    result = call(*args, **kwargs)
                    if type(into) is int:
                        env[into] = result
                    else:
                        for position, slot in into:  # type: ignore[union-attr]
                            env[slot] = result[position]
                    for slot in free:
                        env[slot] = None
        except Exception as failure:
            explained = self._explained(failure, at, monitor)
            if explained is failure:
                raise
            raise explained from failure
        return {port: env[slot] for port, slot in zip(self.body.outputs, self.listing.outputs, strict=True)}

    def _explained(self, failure: Exception, at: int, monitor: Monitor | None) -> Exception:
        failure.add_note(f"in instruction {self.names[at]}, on rank {self.rank}")
        if isinstance(failure, ShardcError) or monitor is None:
            return failure
        if self.listing.instructions[at].target in COLLECTIVES:
            return monitor.blame(failure)
        monitor.failed_alone(f"{type(failure).__name__}: {failure} in instruction {self.names[at]}")
        return failure
