"""Whom a rank of a pipeline reaches: the ranks at the same place of the other axes, one for each coordinate.

mesh pp=2, tp=2        rank (c=1, i=0) is rank 2; its link to coordinate 0 is rank 0, that of (1, 1) is rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardc.stages.instructions import COLLECTIVE, TRANSFER, Group
from shardc.stages.program import Pipelined


@dataclass(frozen=True)
class Links:
    """`ranks` are the job's, by coordinate; `handle` gives the process group of some of them, None of a single one."""

    ranks: tuple[int, ...]
    handle: Callable[[Sequence[int]], Any]
    device: torch.device
    limit: timedelta

    def group(self, coordinates: Sequence[int]) -> Any:
        return self.handle([self.ranks[c] for c in coordinates])

    @property
    def everyone(self) -> Any:
        return self.handle(self.ranks)

    def connect(self, program: Pipelined, c: int) -> None:
        """Have NCCL connect coordinate `c` with all that it sends to or receives from; all ranks must call it.

        A group's first call must be made by all of it, and a pair's first transfer in a direction keeps both hosts
        until they have met. In a step that would be a wait that the proof knows nothing of.
        """
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.everyone)
        peers = sorted({i.peer for i in program.lists.ranks[c] if isinstance(i, TRANSFER)})
        ops: list[dist.P2POp] = []
        for peer in peers:
            for act in (dist.isend, dist.irecv):
                ops.append(dist.P2POp(act, torch.zeros(1, device=self.device), self.ranks[peer], group=self.everyone))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        torch.cuda.synchronize(self.device)


def ranks_at(program: Pipelined, i: int) -> tuple[int, ...]:
    """The ranks of the job that run as rank i of the body's mesh, by coordinate."""
    return tuple(program.rank_of(c, i) for c in range(len(program.lists.ranks)))


def groups_of(program: Pipelined) -> list[list[int]]:
    """Every group along the pipeline's axis that a program needs, in an order that all ranks share."""
    found: dict[Group, None] = {tuple(range(len(program.lists.ranks))): None}
    for listed in program.lists.ranks:
        found |= dict.fromkeys(i.group for i in listed if isinstance(i, COLLECTIVE))
    inner = range(program.body.mesh.world_size)
    return [[program.rank_of(c, i) for c in group] for group in found for i in inner]
