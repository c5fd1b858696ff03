"""The end of a step on a rank, as prepared code: norm, totals over the pipeline's ranks, update (see `finish`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardc.ir.graph import Graph, Port
from shardc.ir.ops.context import RankContext
from shardc.ir.storages import storages
from shardc.runtime.arena import Arena
from shardc.runtime.monitor import Monitor
from shardc.stages.finish import Finish
from shardc.stages.graph_code import GraphCode, Now
from shardc.stages.instructions import Group, Optimizer, in_words
from shardc.stages.links import Links

Outputs = dict[Port, torch.Tensor]


class FinishCode:
    """`run` gives the step's outputs. New parameters and state are written over those that are held."""

    def __init__(self, finish: Finish, context: RankContext, rank: int, links: Links, arena: Arena) -> None:
        self._totals, self._links = finish.totals, links
        self._norm = GraphCode(finish.norm, context, rank, links.device, arena)
        self._update = GraphCode(finish.update, context, rank, links.device, arena)
        self._copied = _views_of_state(finish.norm)

    def run(self, now: Now, instruction: Optimizer, place: int) -> Outputs:
        within = f" of {in_words(instruction)}"
        passed = {port.name: value for port, value in self.norm(now, place, within).items()}
        for name in self._totals:
            passed[name] = total(passed[name], self._links, instruction.group, now.monitor, place)
        now.begin(place)
        env = self._update.environment(now, -1)
        for slot, name in self._update.sums:
            env[slot] = now.sums.pop(name)
        for slot, name in self._update.values:
            env[slot] = passed.pop(name)
        # The calls of norm have the first numbers, those of update the next.
        self._update.run(env, now, place + 1 + len(self._norm.routine.names), within)
        now.end(place)
        return {port: env[slot] for port, slot in self._update.outputs}

    def norm(self, now: Now, place: int, within: str) -> Outputs:
        env = self._norm.environment(now, -1)
        for slot, name in self._norm.sums:
            env[slot] = now.sums[name]
        self._norm.run(env, now, place + 1, within)
        found = {port: env[slot] for port, slot in self._norm.outputs}
        return {port: value.clone() if port.name in self._copied else value for port, value in found.items()}


def total(share: torch.Tensor, links: Links, group: Group, monitor: Monitor | None, place: int) -> torch.Tensor:
    """The sum of the shares of a group's ranks."""
    made = share.clone(memory_format=torch.contiguous_format)
    if len(group) > 1:
        guarded(lambda: dist.all_reduce(made, group=links.group(group)), monitor, place)
    return made


def guarded(act: Callable[[], object], monitor: Monitor | None, place: int) -> None:
    """Communicate; if that fails, the error says whose fault it is."""
    if monitor is not None:
        monitor.at = place
    try:
        act()
    except Exception as failure:
        if monitor is None:
            raise
        raise monitor.blame(failure) from failure


def _views_of_state(graph: Graph) -> set[str]:
    """The outputs that share memory with what the update writes over."""
    of = storages(graph)
    written = {of[node] for port, node in zip(graph.inputs, graph.placeholders, strict=True) if port.role != "sum"}
    pairs = zip(graph.outputs, graph.output_values, strict=True)
    return {port.name for port, value in pairs if of[value] in written}
