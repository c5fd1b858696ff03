"""What a user writes about one tensor: for each dim, the axes that shard it.

    P(None, "tp")        "-, tp"       dim 1 over tp                P(("dp", "tp"))   "dp.tp"   dp major, then tp
    P(None, (3, "tp"))   "-, 3*tp"     three blocks, each over tp   P(OPEN, "tp")     "?, tp"   propagation decides
    P(([8, 2, -1], "tp"))   "[8, 2, -1]*tp"   blocks of 8 and 2, each over tp, and one of 1 that every rank has

A placement shorter than its tensor leaves the trailing dims unsharded, as in JAX. This is the annotation language only:
inside the compiler, placements live on atoms and may be partial.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.mesh import AXIS_NAME, Mesh


@dataclass(frozen=True)
class DimPlacement:
    """One dim: its axes, major first; `blocks` equal parts of the dim that are each sharded on their own.

    `unequal` are the sizes of parts that differ: a negative one is that of a part which every rank has.
    """

    axes: tuple[str, ...] = ()
    blocks: int = 1
    open: bool = False
    unequal: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.axes or (self.blocks == 1 and not self.unequal), "blocks without an axis mean nothing"
        assert self.blocks == 1 or not self.unequal, "blocks are equal, or they are not"
        assert not (self.open and self.axes), "an open dim names no axes"

    def __str__(self) -> str:
        if self.open:
            return "?"
        axes = ".".join(self.axes) or "-"
        if self.unequal:
            return f"[{', '.join(map(str, self.unequal))}]*{axes}"
        return f"{self.blocks}*{axes}" if self.blocks > 1 else axes


OPEN = DimPlacement(open=True)
UNSHARDED = DimPlacement()


@dataclass(frozen=True)
class Placement:
    """The placement of a tensor as its user wrote it; build one with `P`, `Placement.parse` or `Placement.of`."""

    dims: tuple[DimPlacement, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for axis in self.axes:
            if axis in seen:
                hint = "an axis can shard one dim of a tensor, once"
                raise error("SC204", f"axis '{axis}' is used twice in one placement", placement=str(self), hint=hint)
            seen.add(axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that the placement uses, dim by dim."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def on(self, ndim: int) -> Placement:
        """The placement of a tensor of so many dims: a scalar's "-", or "?", is that of no dim."""
        return Placement() if not ndim and self.dims in ((UNSHARDED,), (OPEN,)) else self

    def padded(self, ndim: int) -> tuple[DimPlacement, ...]:
        """One entry for each of a tensor's dims; those that were left out are unsharded."""
        assert len(self.dims) <= ndim, "check() refuses a placement with too many dims"
        return self.dims + (UNSHARDED,) * (ndim - len(self.dims))

    def check(self, mesh: Mesh, ndim: int, tensor: str, cause: str | None = None, location: str | None = None) -> None:
        """Refuse axes that the mesh lacks (SC201), an axis with its own sub-axis (SC204), too many dims (SC205)."""

        def refuse(code: str, message: str, hint: str | None) -> ShardcError:
            details = {"tensor": tensor, "placement": str(self), "cause": cause, "location": location}
            return error(code, message, hint=hint, **details)

        try:
            resolved = mesh.resolve(self.axes)
        except ShardcError as unknown:
            first = unknown.diagnostics[0]
            raise refuse(first.code, first.message, first.hint) from None
        for axis in resolved:
            if resolved.count(axis) > 1:
                hint = "name the axis or its sub-axes, not both"
                raise refuse("SC204", f"sub-axis '{axis}' is used twice in one placement", hint)
        if len(self.dims) > ndim:
            hint = f"write at most {ndim}, one for each dim; trailing ones may be left out"
            hint = hint if ndim else 'a scalar has no dims to place: write "" or "-"'
            raise refuse("SC205", f"the placement has {len(self.dims)} dims, {tensor} has {ndim}", hint)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read "-, 3*tp"; `str(placement)` gives it back."""
        return _Reader(text).placement()

    @classmethod
    def of(cls, value: object, ndim: int | None = None, mesh: Mesh | None = None) -> Placement:
        """Accept what users have: a Placement, its text, a sequence as for `P`, or DTensor's Shard and Replicate.

        DTensor's list is mesh-major (one entry an axis), so it needs the mesh, and `ndim` where a dim is negative.
        """
        if isinstance(value, Placement):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Sequence):
            entries = cast(Sequence[Any], value)
            if any(_is_dtensor(entry) for entry in entries):
                return _from_dtensor(entries, ndim, mesh)
            return P(*entries)
        raise error("SC212", f"{value!r} is not a placement", hint='write P(None, "tp") or the text "-, tp"')

    def __str__(self) -> str:
        return ", ".join(str(dim) for dim in self.dims)

    def __repr__(self) -> str:
        """As `P` takes it: `P(None, (3, 'tp'))`."""
        return f"P({', '.join(map(_entry, self.dims))})"


def _entry(dim: DimPlacement) -> str:
    if dim.open:
        return "OPEN"
    if dim.unequal:
        return repr((list(dim.unequal), *dim.axes))
    if dim.blocks > 1:
        return repr((dim.blocks, *dim.axes))
    return repr(dim.axes if len(dim.axes) > 1 else dim.axes[0] if dim.axes else None)


def P(*dims: object) -> Placement:  # noqa: N802 (reads as a constructor, as JAX's P does)
    """A placement, dim by dim: None, an axis, a tuple of axes (major first), (blocks, axis, ...), or OPEN."""
    return Placement(tuple(_dim(dim) for dim in dims))


def _dim(value: object) -> DimPlacement:
    if value is None:
        return UNSHARDED
    if isinstance(value, DimPlacement):
        return value
    if isinstance(value, str):
        parsed = Placement.parse(value).dims
        if len(parsed) == 1:
            return parsed[0]
        hint = (
            f'write Placement.parse("{value}") for a whole placement' if parsed else "write None for an unsharded dim"
        )
        raise error("SC212", f"'{value}' is not one dim of a placement", hint=hint)
    if isinstance(value, Sequence):
        entries = list(cast(Sequence[object], value))
        unequal = _sizes(entries.pop(0)) if entries and isinstance(entries[0], list | tuple) else ()
        blocks = entries.pop(0) if entries and isinstance(entries[0], int) and not unequal else 1
        names = [entry for entry in entries if isinstance(entry, str) and AXIS_NAME.fullmatch(entry)]
        if isinstance(blocks, int) and blocks >= 1 and len(names) == len(entries) and names:
            return DimPlacement(tuple(names), blocks, unequal=unequal)
    hint = 'a dim is None, "tp", ("dp", "tp"), (3, "tp"), ([8, 2, 2], "tp") or shardc.OPEN'
    raise error("SC212", f"{value!r} does not place a dim", hint=hint)


def _sizes(value: object) -> tuple[int, ...]:
    """The sizes of unequal blocks."""
    value = cast(Sequence[object], value)
    sizes = tuple(size for size in value if isinstance(size, int) and size and not isinstance(size, bool))
    if len(sizes) == len(value) > 1 and any(size > 0 for size in sizes):
        return sizes
    hint = "write two sizes or more, [4096, 1024, 1024]; a negative one is that of a block which every rank has"
    raise error("SC212", f"{value!r} are not the sizes of blocks", hint=hint)


class _Reader:
    """A cursor over the text of a placement; its errors point at the character they mean.

    placement := dim ("," dim)*      dim := "-" | "?" | ((INT | SIZES) "*")? AXIS ("." AXIS)*
    SIZES := "[" "-"? INT ("," "-"? INT)* "]"
    """

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def placement(self) -> Placement:
        if not self.text.strip():
            return Placement()
        dims = [self.dim()]
        while self.take(r","):
            dims.append(self.dim())
        if self.peek():
            raise self.expected("',' or the end")
        return Placement(tuple(dims))

    def dim(self) -> DimPlacement:
        if self.take(r"-"):
            return UNSHARDED
        if self.take(r"\?"):
            return OPEN
        unequal = self.sizes() if self.take(r"\[") else ()
        blocks = None if unequal else self.take(r"[1-9]\d*")
        if blocks and not self.take(r"\*"):
            raise self.expected("'*' after the number of blocks")
        axes = [self.axis("an axis" if blocks or unequal else "an axis, '-' or '?'")]
        while self.take(r"\."):
            axes.append(self.axis("an axis"))
        return DimPlacement(tuple(axes), int(blocks or 1), unequal=unequal)

    def sizes(self) -> tuple[int, ...]:
        sizes: list[int] = []
        while True:
            size = self.take(r"-?[1-9]\d*")
            if size is None:
                raise self.expected("the size of a block")
            sizes.append(int(size))
            if self.take(r"\]"):
                break
            if not self.take(r","):
                raise self.expected("',' or ']'")
        if not self.take(r"\*"):
            raise self.expected("'*' after the sizes of blocks")
        if len(sizes) < 2 or all(size < 0 for size in sizes):
            raise self.expected("two sizes of blocks or more, one of which is cut")
        return tuple(sizes)

    def axis(self, what: str) -> str:
        name = self.take(AXIS_NAME.pattern)
        if name is None:
            raise self.expected(what)
        return name

    def peek(self) -> str:
        """Skip blanks; the character under the cursor, or nothing at the end."""
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, pattern: str) -> str | None:
        self.peek()
        match = re.compile(pattern).match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group()

    def expected(self, what: str) -> ShardcError:
        actual = f"'{char}'" if (char := self.peek()) else "the end"
        quoted = f"{self.text}\n{' ' * self.position}^"
        hint = 'dims are separated by commas: "-" unsharded, "?" open, "tp", "dp.tp", "3*tp", "[8, 2, 2]*tp"'
        return error("SC212", f"expected {what}, found {actual}", source_text=quoted, hint=hint)


def _is_dtensor(entry: object) -> bool:
    # By module and not by isinstance: torch.distributed.tensor takes long to import, and most plans never name it.
    return type(entry).__module__.startswith("torch.distributed.tensor")


def _from_dtensor(entries: Iterable[Any], ndim: int | None, mesh: Mesh | None) -> Placement:
    from torch.distributed.tensor import Replicate, Shard

    placements = list(entries)
    if mesh is None:
        raise error("SC212", "DTensor placements are one an axis, so they need a mesh", hint='write P(None, "tp")')
    if len(placements) != len(mesh.axes):
        message = f"{len(placements)} DTensor placements for a mesh of {len(mesh.axes)} axes ({mesh})"
        raise error("SC212", message, hint="give one Shard(dim) or Replicate() for each axis, in the mesh's order")
    axes_of: dict[int, list[str]] = {}
    for axis, placement in zip(mesh.names, placements, strict=True):
        # Exactly Shard: its subclass, the strided shard, is a layout that we write with blocks instead.
        if type(placement) is Shard:
            dim = placement.dim
            if dim < 0 and ndim is None:
                raise error(
                    "SC212", f"Shard({dim}) needs the tensor's number of dims", hint="count dims from the front"
                )
            axes_of.setdefault(dim + (ndim or 0) if dim < 0 else dim, []).append(axis)
        elif type(placement) is not Replicate:
            hint = "an annotation says Shard or Replicate; pending sums are the compiler's business"
            raise error("SC212", f"{placement!r} on axis '{axis}' cannot be annotated", hint=hint)
    # DTensor shards by the first mesh axis first, hence mesh order is major first here too.
    return P(*(tuple(axes_of[dim]) if dim in axes_of else None for dim in range(max(axes_of, default=-1) + 1)))
