"""A rank's body as prepared code, which runs microbatch by microbatch: what `RunBody` does every step.

What all microbatches read alike is made before them. The first microbatch initializes the sums, and later ones add to
them in place. A flat tensor of terms (`passes/join_sums.py`) becomes the sum itself, others are copied. Nor do later
microbatches gather what the first has gathered for all. Calls that depend on the sums run once a step. `prepared_code`
prepares the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from shardc.ir.buckets import is_summed
from shardc.ir.graph import Graph, Port, operands
from shardc.ir.ops.accumulate import ACCUMULATE, ADDED_WITH, ADDS
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.context import RankContext, running
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.call_arguments import CallArguments, Slot
from shardc.runtime.execute.direct_call import direct_call
from shardc.runtime.execute.monitor import RunMonitor
from shardc.runtime.execute.prepared_code import CodeLine, Routine


class BodyCode:
    """Runs a localized body as the rank of `context`. Inputs and outputs are this rank's shards, and never lie in the
    arena."""

    def __init__(
        self, body: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.body, self.context, self.arena = body, context, arena
        self.routine = routine = Routine(body, context, rank, device, arena)
        self._slot_of = {port.name: slot for port, slot in zip(body.inputs, routine.listing.inputs, strict=True)}
        self.listing = listing = routine.listing
        repeated = listing.repeated
        self._before = routine.code(0, repeated.start)  # what runs before the microbatches,
        self._first_microbatch = routine.code(repeated.start, repeated.stop)  # in the first of them,
        self._later_microbatches: list[CodeLine] = []  # in any other: it adds to the first's sums, which are copies,
        self._once_per_step = routine.code(repeated.stop)  # and once, after all of them
        for position, line in enumerate(self._first_microbatch):
            index, *rest = line
            if index in listing.first:
                self._free_in_last(line[4])
                continue
            instruction = listing.instructions[index]
            if instruction.total is not None:
                op, into, given = instruction.node.target, instruction.yields[0][2], instruction.arguments.args
                add = direct_call(ADDS.get(op, torch.Tensor.add_), device)
                added = (Slot(instruction.total), *(given[position] for position in ADDED_WITH.get(op, (0,))))
                rest = [add, CallArguments(added, {}), into, rest[-1]]
                if self._is_flat(instruction.node):
                    self._first_microbatch[position] = index, _taken, *line[2:]
            self._later_microbatches.append((index, *rest))  # type: ignore[arg-type]

    def _free_in_last(self, slots: tuple[int, ...]) -> None:
        """What a line of the first microbatch alone frees is of calls before it, too."""
        if slots and self._later_microbatches:
            last = self._later_microbatches[-1]
            self._later_microbatches[-1] = (*last[:4], last[4] + slots)

    def _is_flat(self, summed: fx.Node) -> bool:
        """Is the term of a sum a flat tensor that nothing else reads, and that each microbatch makes anew?"""
        term, listing = operands(summed)[0], self.listing
        if summed.target is not ACCUMULATE or term.target is not PACK or not is_summed(term):
            return False
        return any(listing.instructions[index].node is term for index in listing.repeated if index not in listing.first)

    @torch.no_grad()
    def run(
        self,
        state: Mapping[str, torch.Tensor],
        feeds: Sequence[Mapping[str, torch.Tensor]],
        monitor: RunMonitor | None = None,
    ) -> dict[Port, torch.Tensor]:
        """Run one step by itself, without a list."""
        if self.arena is not None:
            self.arena.enter()
        with running(self.context):
            return self.step(state, feeds, monitor)

    def step(
        self,
        state: Mapping[str, torch.Tensor],
        feeds: Sequence[Mapping[str, torch.Tensor]],
        monitor: RunMonitor | None = None,
        base: int = 0,
    ) -> dict[Port, torch.Tensor]:
        """One step on the held tensors and each microbatch's feed, both by the names of inputs.

        New parameters and state overwrite the held ones after their last read (`ir.in_place`). Model outputs of single
        microbatches are returned stacked. `base` is the monitor's counter of the first call. Raises ShardcError naming
        the rank to blame when a collective fails.
        """
        listing, env, run = self.listing, self.routine.empty.copy(), self.routine.run
        stacks: dict[int, list[torch.Tensor]] = {i: [] for i in listing.stacked}
        for k, feed in enumerate(feeds):
            buffer_values = [(into, env[slot]) for slot, into in listing.buffer_slots] if k else []
            if not k:
                for name, slot in self._slot_of.items():
                    env[slot] = feed[name] if name in feed else state[name]
            else:
                for name, x in feed.items():
                    if (slot := self._slot_of.get(name)) is not None:
                        env[slot] = x
            if not k:
                self.routine.held_views.fill(env)
            for into, value in buffer_values:
                env[into] = value
            if self._before and not k:
                run(self._before, env, monitor, base)
            run(self._first_microbatch if k == 0 else self._later_microbatches, env, monitor, base)
            for i, stack in stacks.items():
                stack.append(env[listing.outputs[i]])
        run(self._once_per_step, env, monitor, base)
        for i, stack in stacks.items():
            env[listing.outputs[i]] = torch.stack(stack)
        return {port: env[slot] for port, slot in zip(self.body.outputs, listing.outputs, strict=True)}


def _taken(term: torch.Tensor) -> torch.Tensor:
    return term
