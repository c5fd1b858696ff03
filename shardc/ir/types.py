"""Tensor types: a dtype, a global shape factored into atoms, and where each atom is sharded.

A tensor dim is a product of *atoms*, major first; an atom is the smallest piece of a dim that a
mesh axis may shard. A fused QKV weight of 3*8*64 columns sharded by heads prints as

    f32[512, (3 8@tp 64)]

so splits, head reshapes and flattened batches need no communication and no strided-shard special
case. A size-1 dim has no atoms. A pending reduction prints as ``|sum tp``.

An atom of unequal *blocks*, which an axis cuts each by itself, prints its blocks: see `ir.blocks`.

Uneven atoms are padded: sharding size n by k stores ceil(n/k) on every rank, axis by axis, major
first, so that gathering the minor axis yields exactly the layout of the major axis alone.

A *ragged* type speaks of pairs of which only some exist: rows of tokens, each with the expert it is routed to. Behind a
semicolon stand ragged dims, which say who else a value is divided by, and are of no size of their own:

    f32[(8@dp 16 2), 64; 4@ep]   rows (8 16 2) in the order of their experts: a rank has those of its tokens which are
                                 routed to its experts. How many is known at run time alone: there is room for all.
    i32[4@ep; (8@dp 16 2)]       for each of a rank's experts, a count over those of its tokens.
    f32[(8 16 2)<=80, 64; 4@ep]  rows that came by a capacity: a rank has room for 80 of the 256.

Order within dim 0 is each rank's own, so dim 0 and ragged dims of a value are never resharded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from kernels_triton.base.dtypes import DTYPE_NAMES, DTYPES
from shardc.ir.blocks import Axes, Blocks, blocks_of, local_size
from shardc.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Atom:
    """One factor of one tensor dim: its global size, and the axes that shard it, major first."""

    size: int
    axes: Axes = ()

    def local(self, mesh: Mesh) -> int:
        return local_size(self.size, self.axes, mesh)

    def uneven(self, mesh: Mesh) -> bool:
        """Does some rank hold padding?"""
        return _uneven(self.size, self.axes, mesh)

    def surplus(self, mesh: Mesh) -> bool:
        """Does some rank hold what a sum over all ranks must not count: padding, or a copy of a whole block?"""
        copies = isinstance(self.size, Blocks) and self.size.copied and mesh.size(self.axes) > 1
        return bool(self.axes) and (copies or self.uneven(mesh))

    def __str__(self) -> str:
        return str(self.size) + (f"@{'.'.join(self.axes)}" if self.axes else "")


@lru_cache(maxsize=4096)
def _uneven(size: int, axes: Axes, mesh: Mesh) -> bool:
    ranks = math.prod(mesh.size(a) for a in axes)
    return any(block.uneven(ranks) for block in blocks_of(size))


@lru_cache(maxsize=4096)
def _atom(size: int, axes: Axes) -> Atom:
    return Atom(size, axes)


Dim = tuple[Atom, ...]
Partial = tuple[tuple[str, str], ...]  # (axis, reduction), sorted


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype, global shape as atoms with their axes, and pending reductions. The last `ragged` of `dims` are ragged.

    `room` is how many rows of a ragged type a rank has at most, where a capacity says so; 0: as many as its dim 0.
    """

    dtype: torch.dtype
    dims: tuple[Dim, ...]
    partial: Partial = ()
    ragged: int = 0
    room: int = 0
    # Derived once: passes read these of every value many times.
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)  # global, without ragged dims
    extents: tuple[int, ...] = field(init=False, compare=False, repr=False)  # of all dims, the ragged ones too
    sizes: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)  # of the atoms, dim by dim
    atoms: tuple[Atom, ...] = field(init=False, compare=False, repr=False)  # dims flattened
    placement: tuple[Axes, ...] = field(init=False, compare=False, repr=False)  # the axes of each flat atom
    is_sharded: bool = field(init=False, compare=False, repr=False)  # does some atom have axes?
    in_blocks: tuple[int, ...] = field(init=False, compare=False, repr=False)  # the dims with an atom of blocks
    _hash: int = field(init=False, compare=False, repr=False)  # types are keys of many caches

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dtype, self.dims, self.partial, self.ragged, self.room)))
        sizes = tuple([tuple([a.size for a in dim]) for dim in self.dims])
        atoms = tuple([a for dim in self.dims for a in dim])
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "atoms", atoms)
        extents = tuple([math.prod(dim) for dim in sizes])
        object.__setattr__(self, "extents", extents)
        object.__setattr__(self, "shape", extents[: len(extents) - self.ragged])
        placement = tuple([a.axes for a in atoms])
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "is_sharded", any(placement))
        in_blocks = tuple([d for d, dim in enumerate(sizes) if dim and isinstance(dim[0], Blocks)])
        object.__setattr__(self, "in_blocks", in_blocks)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[TensorType], tuple[object, ...]]:
        return TensorType, (
            self.dtype,
            self.dims,
            self.partial,
            self.ragged,
            self.room,
        )  # another process hashes otherwise

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        """The unplaced type of a tensor: one atom a dim, none for a dim of size 1."""
        return TensorType.plain(tensor.dtype, tensor.shape)

    @staticmethod
    def plain(dtype: torch.dtype, shape: Iterable[int]) -> TensorType:
        return TensorType(dtype, tuple(() if n == 1 else (Atom(int(n)),) for n in shape))

    @property
    def ndim(self) -> int:
        return len(self.dims) - self.ragged

    @property
    def axes(self) -> frozenset[str]:
        """Every axis that shards some atom."""
        return frozenset(axis for a in self.atoms for axis in a.axes)

    @property
    def partial_axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.partial)

    def numel(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape every rank stores (the same on all of them; uneven atoms are padded)."""
        if not self.is_sharded:
            return (self.room, *self.shape[1:]) if self.room else self.shape
        return _local_shape(self, mesh)

    def local_extents(self, mesh: Mesh) -> tuple[int, ...]:
        """The local shape, and behind it the local sizes of ragged dims."""
        return tuple([math.prod([a.local(mesh) for a in dim]) for dim in self.dims])

    def local_atoms(self, mesh: Mesh) -> tuple[int, ...]:
        """The sizes of the flat atoms in memory, where those of ragged dims are 1."""
        stored = len(self.atoms) - self.ragged_atoms
        return tuple(a.local(mesh) if i < stored else 1 for i, a in enumerate(self.atoms))

    @property
    def ragged_atoms(self) -> int:
        """How many of the flat atoms, at their end, are of ragged dims."""
        return sum(map(len, self.dims[self.ndim :]))

    @property
    def bound_atoms(self) -> frozenset[int]:
        """Of a ragged type, the flat atoms that are never resharded: those of dim 0 and of ragged dims."""
        if not self.ragged:
            return frozenset()
        last = len(self.atoms)
        return frozenset([*range(len(self.dims[0])), *range(last - self.ragged_atoms, last)])

    def local_bytes(self, mesh: Mesh) -> int:
        return math.prod(self.local_shape(mesh)) * self.dtype.itemsize

    def place(self, placement: Sequence[Axes], partial: Iterable[tuple[str, str]] = ()) -> TensorType:
        """The same tensor, each flat atom sharded by the given axes, with the given pending reductions."""
        pending = tuple(sorted(partial))
        if pending == self.partial and tuple(placement) == self.placement:
            return self
        it = iter(placement)
        dims = tuple([tuple([_atom(size, next(it)) for size in dim]) for dim in self.sizes])
        return TensorType(self.dtype, dims, pending, self.ragged, self.room)

    def replicated(self) -> TensorType:
        return self.place([()] * len(self.atoms))

    def with_dtype(self, dtype: torch.dtype) -> TensorType:
        return TensorType(dtype, self.dims, self.partial, self.ragged, self.room)

    def divided_by(self, *dims: Dim) -> TensorType:
        """The ragged type of the same tensor, unplaced dims behind its own."""
        assert not self.ragged, f"{self} is ragged already"
        return TensorType(self.dtype, (*self.dims, *dims), self.partial, len(dims))

    def uneven_atoms(self, mesh: Mesh) -> list[int]:
        """Flat positions of the atoms that hold padding on some rank: not rows of a ragged type, which have a tail."""
        if not self.is_sharded:
            return []
        bound = self.bound_atoms
        return [i for i, a in enumerate(self.atoms) if a.axes and a.uneven(mesh) and i not in bound]

    def surplus_atoms(self, mesh: Mesh) -> list[int]:
        """The same, and the atoms of which some rank holds a copy of a whole block."""
        bound = self.bound_atoms
        return [i for i, a in enumerate(self.atoms) if a.surplus(mesh) and i not in bound]

    def __str__(self) -> str:
        printed = ["1" if not d else str(d[0]) if len(d) == 1 else f"({' '.join(map(str, d))})" for d in self.dims]
        if self.room:
            printed[0] += f"<={self.room}"
        dims = ", ".join(printed[: self.ndim]) + "".join(f"; {dim}" for dim in printed[self.ndim :])
        pending = "".join(f" |{kind} {axis}" for axis, kind in self.partial)
        return f"{DTYPE_NAMES[self.dtype]}[{dims}]{pending}"

    @staticmethod
    def parse(text: str) -> TensorType:
        """Read what `str` prints. Raises ValueError on anything else."""
        match = re.fullmatch(r"(\w+)\[(.*?)\]((?: \|\w+ [\w:]+)*)", text.strip())
        if match is None or match[1] not in DTYPES:
            raise ValueError(f"not a tensor type: {text!r}")
        stored, *ragged = match[2].split(";")
        first, room = re.fullmatch(r"(.*?)(?:<=([1-9]\d*))?", stored.partition(",")[0]).groups()  # type: ignore[union-attr]
        if room and not ragged:
            raise ValueError(f"room for rows of a tensor that is not ragged: {text!r}")
        stored = "".join([first, *stored.partition(",")[1:]])
        dims = tuple(_parse_dim(d) for d in stored.split(",")) if stored.strip() else ()
        if ragged and not dims:
            raise ValueError(f"ragged dims of a tensor without others: {text!r}")
        dims += tuple(map(_parse_dim, ragged))
        pending = re.findall(r"\|(\w+) ([\w:]+)", match[3])
        return TensorType(
            DTYPES[match[1]], dims, tuple(sorted((axis, kind) for kind, axis in pending)), len(ragged), int(room or 0)
        )


@lru_cache(maxsize=65536)
def _local_shape(type: TensorType, mesh: Mesh) -> tuple[int, ...]:
    """Of a sharded type: `TensorType.local_shape`, which passes and costs ask for the same few thousand types."""
    shape = tuple([math.prod([a.local(mesh) for a in dim]) for dim in type.dims[: type.ndim]])
    return (type.room, *shape[1:]) if type.room else shape


def _parse_dim(text: str) -> Dim:
    words = text.strip().removeprefix("(").removesuffix(")").split()
    if words == ["1"]:
        return ()
    atoms: list[Atom] = []
    for word in words:
        size, _, axes = word.partition("@")
        if not size.isdigit() and not set("|~/") & set(size):
            raise ValueError(f"not a dim: {text!r}")
        count = int(size) if size.isdigit() else Blocks.parse(size)
        atoms.append(Atom(count, tuple(axes.split(".")) if axes else ()))
    return tuple(atoms)


def kind_of(t: torch.Tensor) -> str | None:
    """What a tensor is if it is no plain one, whose memory a program can read."""
    if t.is_nested:
        return "nested"
    if t.is_quantized:
        return "quantized"
    return None if t.layout == torch.strided else "sparse"
