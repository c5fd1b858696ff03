"""The peers of a pipeline rank: the ranks with the same coordinates on the other axes, one for each stage coordinate.

mesh pp=2, tp=2        rank (c=1, i=0) is rank 2; its peer at coordinate 0 is rank 0, that of (1, 1) is rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import COLLECTIVE, TRANSFER, CoordinateGroup


@dataclass(frozen=True)
class PeerGroups:
    """`ranks` are the job's ranks by coordinate. `handle` gives the process group of some ranks, None for one rank;
    `back` is the group of all of them for what is sent to a coordinate before one's own."""

    ranks: tuple[int, ...]
    handle: Callable[[Sequence[int]], Any]
    device: torch.device
    limit: timedelta
    back: Any = None

    @property
    def directions(self) -> dict[bool, Any]:
        """The groups of transfers, by whether the receiver's coordinate is behind the sender's."""
        return {True: self.whole_group, False: self.back}

    def group(self, coordinates: Sequence[int]) -> Any:
        return self.handle([self.ranks[c] for c in coordinates])

    @property
    def whole_group(self) -> Any:
        return self.handle(self.ranks)

    def connect(self, program: StagedProgram, c: int) -> None:
        """Make NCCL connect coordinate `c` with all its transfer peers. All ranks must call it.

        All ranks of a group must make its first call, and the first transfer of a pair in a direction blocks both hosts
        until they meet. Within a step that would be a wait that the proof does not model. A rank alone has no peers.
        """
        if len(self.ranks) == 1:
            return
        peers = sorted({i.peer for i in program.lists.ranks[c] if isinstance(i, TRANSFER)})
        for onward, group in self.directions.items():
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            ops: list[dist.P2POp] = []
            for peer in peers:
                act = dist.isend if onward == (peer > c) else dist.irecv
                ops.append(dist.P2POp(act, torch.zeros(1, device=self.device), self.ranks[peer], group=group))
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()
        torch.cuda.synchronize(self.device)


def ranks_of_position(program: StagedProgram, i: int) -> tuple[int, ...]:
    """The ranks of the job that run as rank i of the body's mesh, by coordinate."""
    return tuple(program.rank_of(c, i) for c in range(len(program.lists.ranks)))


def groups_of(program: StagedProgram) -> list[list[int]]:
    """Every group along the pipeline's axis that a program needs, in an order that all ranks share."""
    groups: dict[CoordinateGroup, None] = {tuple(range(len(program.lists.ranks))): None}
    for instructions in program.lists.ranks:
        groups |= dict.fromkeys(i.group for i in instructions if isinstance(i, COLLECTIVE))
    inner = range(program.body.mesh.world_size)
    return [[program.rank_of(c, i) for c in group] for group in groups for i in inner]
