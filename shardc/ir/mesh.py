"""A mesh names the axes along which ranks are laid out: `Mesh(dp=2, tp=4)` is eight ranks, the last axis fastest.

    rank = dp * 4 + tp      groups("tp") = (0 1 2 3) (4 5 6 7)      groups("dp") = (0 4) (1 5) (2 6) (3 7)

A collective runs along a set of axes, in every group of ranks that differ only there. An axis may be split into
sub-axes (`tp` of 4 into `tp:0` and `tp:1` of 2 each, major first) when only part of it fits a dim, as when kv-heads <
tp; ranks keep their numbers, and `merged` gives names back the way the user wrote them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from shardc.ir.diagnostic import did_you_mean, error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXIS_NAME = re.compile(r"[A-Za-z_]\w*(?::\d+)*")
Axes = str | Sequence[str]
MOST = 2**20  # ranks


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Ordered named axes; `Mesh(dp=2, tp=4)` or `Mesh((("dp", 2), ("tp", 4)))`."""

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Iterable[tuple[str, int]] = (), /, **sizes: int) -> None:
        pairs = (*((name, size) for name, size in axes), *sizes.items())
        object.__setattr__(self, "axes", pairs)
        for name, size in pairs:
            if not AXIS_NAME.fullmatch(name):
                raise error("SC210", f"'{name}' is not a name for an axis", hint="use letters, digits and underscores")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise error("SC210", f"axis '{name}' has size {size!r}", hint="sizes are integers of at least 1")
        if math.prod(size for _, size in pairs) > MOST:
            raise error("SC210", f"the mesh ({self}) has more than {MOST:,} ranks", hint="give each axis its size")
        for name in self.names:
            if self.names.count(name) > 1:
                raise error("SC210", f"axis '{name}' appears twice in the mesh", hint="give each axis its own name")
            if any(other.startswith(name + ":") for other in self.names):
                raise error("SC210", f"the mesh has both axis '{name}' and sub-axes of it", hint="keep one of them")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read "dp=2,tp=4"; `str(mesh)` gives it back."""
        pairs: list[tuple[str, int]] = []
        for item in filter(None, (item.strip() for item in text.split(","))):
            name, _, size = (part.strip() for part in item.partition("="))
            if not size.isdecimal() or len(size) > 18:
                raise error(
                    "SC210", f"cannot read '{item[:40]}' in mesh '{text[:80]}'", hint='write a mesh as "dp=2,tp=4"'
                )
            pairs.append((name, int(size)))
        return cls(pairs)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The same axes as a torch DeviceMesh, whose ranks must be numbered as ours are (last axis fastest, from 0)."""
        names = device_mesh.mesh_dim_names
        if names is None:
            raise error(
                "SC210", "the DeviceMesh has no names", hint='pass mesh_dim_names=("dp", "tp") to init_device_mesh'
            )
        ranks: list[int] = device_mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise error(
                "SC210", f"the DeviceMesh lists its ranks as {ranks}", hint="use init_device_mesh, which counts up"
            )
        return cls(zip(names, device_mesh.mesh.shape, strict=True))

    def to_device_mesh(self, device_type: str) -> DeviceMesh:
        """A torch DeviceMesh over the running job (the default process group)."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = tuple(size for _, size in self.axes)
        return init_device_mesh(device_type, sizes, mesh_dim_names=self.names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axes: Axes) -> int:
        """How many shards these axes make together; a split axis counts as the product of its sub-axes."""
        return _size(self, axes if isinstance(axes, str) else tuple(axes))

    def resolve(self, axes: Axes) -> tuple[str, ...]:
        """The axes of this mesh that the given ones stand for: themselves, or their sub-axes, major first."""
        resolved: list[str] = []
        for axis in (axes,) if isinstance(axes, str) else axes:
            axis_names = (axis,) if axis in self.names else self.children(axis)
            if not axis_names:
                hint = did_you_mean(axis, self.names, "axes of the mesh")
                raise error("SC201", f"the mesh ({self}) has no axis '{axis}'", hint=hint)
            resolved += axis_names
        return tuple(resolved)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank lies on each axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} is not in a mesh of {self.world_size} ranks"
        strides = self._strides()
        return {name: rank // strides[name] % size for name, size in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate, which gives every axis."""
        return sum(coordinate[name] * stride for name, stride in self._strides().items())

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """All groups along these axes, in order of their first rank; within a group the first axis given is major."""
        return _groups(self, self.resolve(axes))

    def group_of(self, rank: int, axes: Axes) -> tuple[int, ...]:
        """The one group along these axes that a rank belongs to."""
        resolved, coordinate = self.resolve(axes), self.coordinate(rank)
        strides = self._strides()
        base = sum(coordinate[name] * stride for name, stride in strides.items() if name not in resolved)
        return tuple(base + offset for offset in _offsets(self, resolved))

    def index(self, rank: int, axes: Axes) -> int:
        """A rank's position in its group along these axes: which shard it holds of a dim that they shard."""
        sizes, coordinate, position = dict(self.axes), self.coordinate(rank), 0
        for name in self.resolve(axes):
            position = position * sizes[name] + coordinate[name]
        return position

    def split(self, axis: str, sizes: Sequence[int]) -> Mesh:
        """Replace an axis by sub-axes of the given sizes, major first; every rank keeps its number."""
        assert math.prod(sizes) == self.size(axis), f"cannot split '{axis}' of {self.size(axis)} into {tuple(sizes)}"
        subs = tuple((f"{axis}:{i}", size) for i, size in enumerate(sizes))
        index = self.names.index(axis)
        return Mesh((*self.axes[:index], *subs, *self.axes[index + 1 :]))

    def parent(self, axis: str) -> str:
        """The axis that a sub-axis was split from; an axis that is no sub-axis is its own parent."""
        return axis.rpartition(":")[0] or axis

    def children(self, axis: str) -> tuple[str, ...]:
        """The sub-axes that an axis was split into (all the way down), major first; none if it is whole."""
        return tuple(name for name in self.names if name.startswith(axis + ":"))

    def merged(self, axes: Axes) -> tuple[str, ...]:
        """Axes as the user named them: a full consecutive run of an axis's sub-axes becomes that axis again."""
        return tuple(self._merge(self.resolve(axes)))

    def _merge(self, axes: tuple[str, ...]) -> Iterator[str]:
        while axes:
            # The widest ancestor whose sub-axes stand here in full wins: of "tp:0:1", "tp" before "tp:0".
            levels = axes[0].split(":")
            ancestors = (":".join(levels[:depth]) for depth in range(1, len(levels)))
            fits = ((name, subs) for name in ancestors if axes[: len(subs := self.children(name))] == subs)
            name, subs = next(fits, (axes[0], axes[:1]))
            yield name
            axes = axes[len(subs) :]

    def _strides(self) -> dict[str, int]:
        strides: dict[str, int] = {}
        stride = self.world_size
        for name, size in self.axes:
            stride //= size
            strides[name] = stride
        return strides

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f"Mesh({self})"


def _offsets(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Rank offsets of all coordinates along the axes, the first axis slowest."""
    sizes, strides = dict(mesh.axes), mesh._strides()  # pyright: ignore[reportPrivateUsage]
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in axes]
    return tuple(sum(point) for point in product(*steps))


@lru_cache(maxsize=65536)
def _size(mesh: Mesh, axes: Axes) -> int:
    sizes = dict(mesh.axes)
    return math.prod([sizes[name] for name in mesh.resolve(axes)])


# A program has thousands of collectives but few sets of axes, and each rank asks for its groups of every one.
@lru_cache(maxsize=1024)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    other_axes = [name for name in mesh.names if name not in axes]
    return tuple(tuple(base + offset for offset in _offsets(mesh, axes)) for base in _offsets(mesh, other_axes))
