"""What a rank knows while it runs: its coordinate, and how to reach the others.

`shardc::` ops that differ between ranks (slices, offsets, collectives) read the current `RankContext`.
An executor sets it around each rank's program; there is none while compiling.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardc.ir.mesh import Mesh


class Sizes(NamedTuple):
    """How many rows a rank sends to each member of its group, and gets from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Communicator(Protocol):
    """Moves flat tensors between the ranks of one group, which is named by its mesh axes, major first."""

    def all_reduce(self, x: torch.Tensor, op: str, axes: Sequence[str]) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """[...] -> [group, ...], in group order."""
        ...

    def reduce_scatter(self, x: torch.Tensor, op: str, axes: Sequence[str]) -> torch.Tensor:
        """[group, ...] -> [...]: the reduction of everyone's row of this rank."""
        ...

    def all_to_all(self, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """[group, ...] -> [group, ...]: row i goes to group member i; row j comes from member j."""
        ...

    def all_to_all_uneven(self, x: torch.Tensor, axes: Sequence[str], sizes: Sizes) -> torch.Tensor:
        """[sent, ...] -> [received, ...]: rows lie in the order of the members that they go to, or come from."""
        ...

    def permute(self, x: torch.Tensor, axes: Sequence[str], source: Sequence[int]) -> torch.Tensor:
        """The x of group member source[own position]."""
        ...


@dataclass(frozen=True)
class RankContext:
    mesh: Mesh
    coordinate: Mapping[str, int]  # of every axis and sub-axis
    comm: Communicator

    def index(self, axes: Sequence[str]) -> int:
        """This rank's position in its group along `axes`, major first."""
        position = 0
        for axis in axes:
            position = position * self.mesh.size(axis) + self.coordinate[axis]
        return position


_current: ContextVar[RankContext] = ContextVar("shardc_rank")


def current() -> RankContext:
    """The running rank's context; LookupError outside an executor."""
    return _current.get()


@contextmanager
def running(context: RankContext) -> Generator[None]:
    """Run the body as that rank."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
