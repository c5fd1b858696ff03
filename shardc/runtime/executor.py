"""One rank's body, microbatch by microbatch: what a process of a job runs every step.

The first microbatch begins the sums, any other adds to them in place, and what hangs on the sums runs once; `code`
says how the calls are prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardc.ir.graph import Graph, Port
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.context import RankContext, running
from shardc.runtime.arena import Arena
from shardc.runtime.code import Code, Routine
from shardc.runtime.monitor import Monitor


class Executor:
    """Runs a localized body as the rank of `context`. Tensors in and out are this rank's shards; none of them lies in
    the arena, where there is one."""

    def __init__(
        self, body: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.body, self.context, self.arena = body, context, arena
        self.routine = routine = Routine(body, context, rank, device, arena)
        self.listing = listing = routine.listing
        self._micro = routine.code(0, listing.repeated)  # of the first microbatch,
        self._again: list[Code] = []  # of any other, which adds to the sums of the first,
        self._rest = routine.code(listing.repeated)  # and what runs once a step
        for at, *rest in self._micro:
            instruction = listing.instructions[at]
            if instruction.node.target is ACCUMULATE:
                into = instruction.yields[0][2]
                rest = [torch.Tensor.add_, _sum_of(into, instruction.reads[0]), into, rest[-1]]
            self._again.append((at, *rest))  # type: ignore[arg-type]

    @torch.no_grad()
    def run(
        self,
        held: Mapping[str, torch.Tensor],
        feeds: Sequence[Mapping[str, torch.Tensor]],
        monitor: Monitor | None = None,
    ) -> dict[Port, torch.Tensor]:
        """One step: what it holds and what each microbatch is fed, by the names of inputs.

        New parameters and state are written over those held, where nothing reads these any more (`ir.in_place`).
        Outputs of the model's that each microbatch has of its own come back stacked. Raises ShardcError naming the
        rank to blame when a collective fails.
        """
        listing, env, run = self.listing, self.routine.empty.copy(), self.routine.run
        stacks: dict[int, list[torch.Tensor]] = {i: [] for i in listing.stacked}
        if self.arena is not None:
            self.arena.enter()
        with running(self.context):
            for k, feed in enumerate(feeds):
                after = [(into, env[slot]) for slot, into in listing.carried] if k else []
                for port, slot in zip(self.body.inputs, listing.inputs, strict=True):
                    if port.name in feed:
                        env[slot] = feed[port.name]
                    elif not k:
                        env[slot] = held[port.name]
                for into, value in after:
                    env[into] = value
                run(self._micro if k == 0 else self._again, env, monitor)
                for i, stack in stacks.items():
                    stack.append(env[listing.outputs[i]])
            run(self._rest, env, monitor)
        for i, stack in stacks.items():
            env[listing.outputs[i]] = torch.stack(stack)
        return {port: env[slot] for port, slot in zip(self.body.outputs, listing.outputs, strict=True)}


def _sum_of(total: int, term: int) -> Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]]:
    """The arguments that add a slot to another in place: `accumulate` copied its first term, so none else sees it."""
    return lambda env: ((env[total], env[term]), {})
