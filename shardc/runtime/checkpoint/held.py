"""What a checkpoint holds: tensors of a trainer, and how far training was.

Apart from what reads and writes them, which imports torch.distributed.checkpoint: a launch does not wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType


@dataclass(frozen=True)
class Position:
    """The progress of training. Together with the tensors it determines the next step."""

    step: int
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Held:
    """A tensor of a trainer: the shard of this process, and the type of the whole. None: other stages hold it."""

    tensor: torch.Tensor | None
    type: TensorType
    role: str = "param"
    aliases: tuple[str, ...] = ()


def writes(type: TensorType, mesh: Mesh, rank: int) -> bool:
    """Whether a rank is the lowest of those that hold the same: it is the first on every axis that does not shard."""
    sharding = mesh.resolve(sorted(type.axes))
    return all(coordinate == 0 for axis, coordinate in mesh.coordinate(rank).items() if axis not in sharding)
