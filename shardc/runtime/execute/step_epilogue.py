"""The epilogue of a step on a rank as prepared code: norm, totals over the pipeline's ranks, update
(`partition.step_epilogue`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardc.ir.graph import Graph, Port
from shardc.ir.ops.context import RankContext
from shardc.ir.storages import storages
from shardc.partition.step_epilogue import StepEpilogue
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.monitor import RunMonitor
from shardc.runtime.execute.peer_groups import PeerGroups
from shardc.runtime.execute.stage_code import GraphCode, StepState
from shardc.schedule.instructions import CoordinateGroup, Optimizer, instruction_text

Outputs = dict[Port, torch.Tensor]


class EpilogueCode:
    """`run` returns the step's outputs. New parameters and state overwrite the held ones."""

    def __init__(
        self, epilogue: StepEpilogue, context: RankContext, rank: int, peers: PeerGroups, arena: Arena
    ) -> None:
        self._totals, self._peers = epilogue.totals, peers
        self._norm = GraphCode(epilogue.norm, context, rank, peers.device, arena)
        self._update = GraphCode(epilogue.update, context, rank, peers.device, arena)
        self._state_views = _views_of_state(epilogue.norm)

    def run(self, state: StepState, instruction: Optimizer, counter: int) -> Outputs:
        within = f" of {instruction_text(instruction)}"
        norm_outputs = {port.name: value for port, value in self.norm(state, counter, within).items()}
        for name in self._totals:
            norm_outputs[name] = sum_over_group(
                norm_outputs[name], self._peers, instruction.group, state.monitor, counter
            )
        state.begin(counter)
        env = self._update.environment(state, -1)
        for slot, name in self._update.sums:
            env[slot] = state.sums.pop(name)
        for slot, name in self._update.values:
            env[slot] = norm_outputs.pop(name)
        # The calls of `update` are numbered after those of `norm`.
        self._update.run(env, state, counter + 1 + len(self._norm.routine.names), within)
        state.end(counter)
        return {port: env[slot] for port, slot in self._update.outputs}

    def norm(self, state: StepState, counter: int, within: str) -> Outputs:
        env = self._norm.environment(state, -1)
        for slot, name in self._norm.sums:
            env[slot] = state.sums[name]
        self._norm.run(env, state, counter + 1, within)
        outputs = {port: env[slot] for port, slot in self._norm.outputs}
        return {port: value.clone() if port.name in self._state_views else value for port, value in outputs.items()}


def sum_over_group(
    contribution: torch.Tensor, peers: PeerGroups, group: CoordinateGroup, monitor: RunMonitor | None, counter: int
) -> torch.Tensor:
    """The sum of the contributions of a group's ranks."""
    total = contribution.clone(memory_format=torch.contiguous_format)
    if len(group) > 1:
        blame_failures(lambda: dist.all_reduce(total, group=peers.group(group)), monitor, counter)
    return total


def blame_failures(act: Callable[[], object], monitor: RunMonitor | None, counter: int) -> None:
    """Communicate. If that fails, the error names the rank to blame."""
    if monitor is not None:
        monitor.counter = counter
    try:
        act()
    except Exception as failure:
        if monitor is None:
            raise
        raise monitor.blame(failure) from failure


def _views_of_state(graph: Graph) -> set[str]:
    """The outputs that share storage with tensors that the update overwrites."""
    storage_of = storages(graph)
    written = {
        storage_of[node] for port, node in zip(graph.inputs, graph.placeholders, strict=True) if port.role != "sum"
    }
    pairs = zip(graph.outputs, graph.output_values, strict=True)
    return {port.name for port, value in pairs if storage_of[value] in written}
