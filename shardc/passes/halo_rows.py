"""What is false of calls that exchange neighbours' rows (`shardc.ir.ops.halo`), and of a convolution that reads them.

    %x.before : f32[4, 3, 2@sp, 8]    = neighbour_rows(%x, [sp], 2, 3, 1, 1)        x : f32[4, 3, 8@sp, 8]
    %x.behind : f32[4, 3, 2@sp, 8]    = neighbour_rows(%x, [sp], 2, 0, 1, -1)
    %x.halo   : f32[4, 3, 12@sp, 8]   = halo(%x, %x.before, %x.behind, 2, [sp])

The dim of rows has one atom in the types of what is exchanged: so many rows a rank, times the ranks. A convolution that
reads them has no padding along it, and is the one that reads `x` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import HALO, HALO_SUM, NEIGHBOUR_ROWS
from shardc.ir.schema import given
from shardc.ir.types import Axes, TensorType
from shardc.rules.halo import FIRST_SPATIAL, windows, with_rows

aten = torch.ops.aten
CONVOLUTIONS: frozenset[Any] = frozenset((aten.convolution.default, aten.convolution_backward.default))
Declared = Sequence[TensorType | None]


def halos_of(node: fx.Node) -> list[fx.Node]:
    """The halos that the input of a convolution is made by, the first one first."""
    value, found = given(node)["input"], list[fx.Node]()
    while value.target is HALO:
        found.append(value)
        value = value.args[0]
    return found[::-1]


@dataclass(frozen=True)
class WithoutHalo:
    """The convolution on own rows that one with a halo stands for: its padding, and the type of its input."""

    padding: tuple[int, ...]
    input: TensorType
    widened: TensorType

    def gradient(self, type: TensorType | None) -> TensorType | None:
        """The type of the gradient of the input."""
        return type if type is None else self.input.with_dtype(type.dtype).place(self.input.placement, type.partial)


def without_halos(node: fx.Node, halos: Sequence[fx.Node], mesh: Mesh) -> WithoutHalo | str:
    """The call for which a convolution reads these halos; or what is wrong with it."""
    args = given(node)
    own = type_of(given(halos[0])["x"])
    shape, space = own.local_shape(mesh), own.ndim - FIRST_SPATIAL
    padding = list(args["padding"]) * (space if len(args["padding"]) == 1 else 1)
    reads = {given(halo)["dim"]: halo for halo in halos}
    if len(reads) < len(halos) or args["transposed"]:
        return "reads rows of neighbours that it has no use for"
    for dim, halo in reads.items():
        if padding[dim - FIRST_SPATIAL]:
            return f"pads dim {dim}, which has the rows of neighbours"
        padding[dim - FIRST_SPATIAL] = _length(given(halo)["before"], dim, mesh)
    kernel = type_of(args["weight"]).local_shape(mesh)[FIRST_SPATIAL:]
    for i, window in enumerate(windows(shape[FIRST_SPATIAL:], kernel, args["stride"], padding, args["dilation"])):
        halo = reads.get(i + FIRST_SPATIAL)
        behind = _length(given(halo)["behind"], i + FIRST_SPATIAL, mesh) if halo is not None else 0
        if halo is not None and not (window.tiles and behind == window.behind):
            return f"reads {behind} rows behind its own along dim {i + FIRST_SPATIAL}, and needs {window.behind}"
    return WithoutHalo(tuple(padding), own, type_of(halos[-1]))


def _length(rows: fx.Node | None, dim: int, mesh: Mesh) -> int:
    return 0 if rows is None else type_of(rows).local_shape(mesh)[dim]


def _axes_fault(type: TensorType, dim: int, axes: Axes) -> str | None:
    if not 0 <= dim < type.ndim:
        return f"dim is {dim}, of {type.ndim}"
    lies = tuple(axis for atom in type.dims[dim] for axis in atom.axes)
    return None if lies == axes else f"takes dim {dim} to lie over {'.'.join(axes)}, in {type}"


def _neighbour_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    type, dim, axes = type_of(args["x"]), args["dim"], mesh.resolve(args["axes"])
    if (wrong := _axes_fault(type, dim, axes)) is not None:
        return [wrong]
    if set(axes) & type.partial_axes or args["shift"] % mesh.size(axes) == 0:
        return [f"takes rows of the rank {args['shift']} before, of {type}"]
    want = with_rows(type, dim, args["length"], axes, mesh)
    return [] if result_types[0] == want else [f"yields {want}, the result says {result_types[0]}"]


def _exchanged(rows: fx.Node | None, x: fx.Node, start: int, length: int, shift: int, args: dict[str, Any]) -> bool:
    """Are these the rows of `x` that the rank `shift` before has there? Of an input of a graph it is not known."""
    if rows is None or rows.op == "placeholder":
        return rows is not None or not length
    if rows.target is not NEIGHBOUR_ROWS:
        return False
    taken = given(rows)
    want = (x, args["dim"], start, length, shift, list(args["axes"]))
    return want == tuple(taken[name] for name in ("x", "dim", "start", "length", "shift")) + (list(taken["axes"]),)


def _halo_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    type, dim, axes = type_of(args["x"]), args["dim"], mesh.resolve(args["axes"])
    if (wrong := _axes_fault(type, dim, axes)) is not None:
        return [wrong]
    rows = type.local_shape(mesh)[dim]
    before, behind = (_length(args[name], dim, mesh) for name in ("before", "behind"))
    if not _exchanged(args["before"], args["x"], rows - before, before, 1, args) or not _exchanged(
        args["behind"], args["x"], 0, behind, -1, args
    ):
        return [f"puts other rows about %{info(args['x']).name} than those of its neighbours"]
    want = with_rows(type, dim, before + rows + behind, axes, mesh)
    return [] if result_types[0] == want else [f"yields {want}, the result says {result_types[0]}"]


def _sum_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args, after = given(node), result_types[0]
    assert after is not None
    type, dim, axes = type_of(args["x"]), args["dim"], mesh.resolve(args["axes"])
    for value in (type, after):
        if (wrong := _axes_fault(value, dim, axes)) is not None:
            return [wrong]
    lead, tail = args["lead"], args["tail"]
    rows = type.local_shape(mesh)[dim] - lead - tail
    if not _exchanged(args["before"], args["x"], lead + rows, tail, 1, args) or not _exchanged(
        args["behind"], args["x"], 0, lead, -1, args
    ):
        return [f"adds other rows to %{info(args['x']).name} than those of its neighbours"]
    if with_rows(after, dim, lead + rows + tail, axes, mesh) != type:
        return [f"yields {rows} rows a rank of {type}, the result says {after}"]
    return []


HALO_FAULTS: Mapping[Any, Callable[[fx.Node, Declared, Mesh], list[str]]] = {
    NEIGHBOUR_ROWS: _neighbour_faults,
    HALO: _halo_faults,
    HALO_SUM: _sum_faults,
}
