"""What is false of calls that exchange neighbours' rows (`shardc.ir.ops.halo`), and of an op that reads or makes them.

    %x.before : f32[4, 3, 2@sp, 8]    = neighbour_rows(%x, [sp], 2, 3, 1, 1)        x : f32[4, 3, 8@sp, 8]
    %x.behind : f32[4, 3, 2@sp, 8]    = neighbour_rows(%x, [sp], 2, 0, 1, -1)
    %x.halo   : f32[4, 3, 12@sp, 8]   = halo(%x, %x.before, %x.behind, 2, [sp])

The dim of rows has one atom in the types of what is exchanged: so many rows a rank, times the ranks. A convolution that
reads them has no padding along it, and is the one that reads `x` with it; one whose result has them has in truth
that of own rows, which `halo_sum` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import info, producer, results, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import HALO, HALO_SUM, NEIGHBOUR_ROWS
from shardc.ir.ops.local import mask_pad
from shardc.ir.ops.windows import MEAN_ANEW, SHIFT_POSITIONS, WIDEN
from shardc.ir.schema import given
from shardc.ir.types import Axes, TensorType
from shardc.passes.kernel_rows import KERNELS, counted_axes, writes_fill
from shardc.rules.halo import with_rows
from shardc.rules.window import WINDOWED, Windowed

Declared = Sequence[TensorType | None]


@dataclass(frozen=True)
class _Exchange:
    """The rows of neighbours along one dim that a call reads, or makes."""

    dim: int
    before: int
    behind: int


@dataclass(frozen=True)
class PlainCall:
    """The call on own rows for which one with the neighbours' stands."""

    changed: Mapping[str, tuple[int, ...]]  # arguments
    operands: Mapping[fx.Node, TensorType]  # those that have the neighbours' rows
    first_result: TensorType | None  # where it has them


def plain_call(node: fx.Node, mesh: Mesh) -> PlainCall | str | None:
    """What a call with the neighbours' rows stands for, or what is wrong with it; None where it has none."""
    args = given(node)
    about = WINDOWED[node.target](args, lambda value: type_of(value).local_shape(mesh))
    halos = _chain(args[about.reads], HALO) if about.reads else []
    sums = _summed(results(node)[0]) if about.gives else []
    if not (halos or sums):
        return None
    read = [_Exchange(given(n)["dim"], *(_length(given(n)[k], given(n)["dim"], mesh) for k in ENDS)) for n in halos]
    made = [_Exchange(given(n)["dim"], given(n)["lead"], given(n)["tail"]) for n in reversed(sums)]
    if about.reads and about.gives and read != made:
        return "gives other rows back than it has read of its neighbours"
    if any(given(halo).get("fill", 0.0) not in _fills(about, halo) for halo in halos):
        return f"reads {given(halos[0]).get('fill', 0.0)} beyond the outer ends, not {about.fill}"
    return _plain(node, args, about, halos, sums, read or made, mesh)


ENDS = ("before", "behind")


def _fills(about: Windowed, halo: fx.Node) -> tuple[float, ...]:
    dtype = type_of(given(halo)["x"]).dtype
    return (about.fill,) if dtype.is_floating_point or not about.fill else (float(torch.iinfo(dtype).min),)


def _chain(value: fx.Node, target: Any) -> list[fx.Node]:
    """The calls of an op that a value is made by one after the other, the first one first."""
    found: list[fx.Node] = []
    while value.target is target:
        found.append(value)
        value = value.args[0]  # type: ignore[assignment]
    return found[::-1]


def _summed(value: fx.Node | None) -> list[fx.Node]:
    """The sums of own and neighbours' rows that a value goes through, the last dim first."""
    found: list[fx.Node] = []
    while value is not None:
        value = next((user for user in value.users if user.target is HALO_SUM and user.args[0] is value), None)
        found += [value] if value is not None else []
    return found


def _plain(
    node: fx.Node, args: Mapping[str, Any], about: Windowed, halos: Sequence[fx.Node], sums: Sequence[fx.Node],
    exchanges: Sequence[_Exchange], mesh: Mesh,
) -> PlainCall | str:  # fmt: skip
    own: dict[fx.Node, TensorType] = {}
    if halos:
        own[halos[-1]] = type_of(given(halos[0])["x"])
    if about.shaped and sums:
        stand_in = args[about.shaped]
        if type_of(stand_in).dims != type_of(results(node)[0]).dims:  # type: ignore[arg-type]
            return f"takes the shape of {type_of(stand_in)} for its result's"
        own[stand_in] = replace(type_of(stand_in), dims=type_of(sums[-1]).dims)
    count = len(about.windows)
    spread = {"padding": list(args.get("padding") or [0])}
    if about.output_padding:
        spread["output_padding"] = list(args["output_padding"])
    spread = {name: values * (count if len(values) == 1 else 1) for name, values in spread.items()}
    for exchange in exchanges:
        i = exchange.dim - about.first
        if not 0 <= i < count or spread["padding"][i]:
            return f"pads dim {exchange.dim}, which has the rows of neighbours"
        window = about.windows[i]
        spread["padding"][i] = exchange.before
        if about.output_padding:
            spread["output_padding"][i] = window.stride - window.extent + 2 * exchange.before
    if len({exchange.dim for exchange in exchanges}) < len(exchanges):
        return "reads rows of neighbours that it has no use for"

    def shape(value: fx.Node) -> Sequence[int]:
        return own.get(value, type_of(value)).local_shape(mesh)

    for exchange in exchanges:
        window = WINDOWED[node.target]({**args, **spread}, shape).windows[exchange.dim - about.first]
        if not (window.tiles and exchange.behind == window.behind):
            return f"reads {exchange.behind} rows behind its own along dim {exchange.dim}, and needs {window.behind}"
    changed = {name: tuple(values) for name, values in spread.items()}
    return PlainCall(changed, own, type_of(sums[-1]) if sums else None)


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
    if (before or behind) and not _filled(args["x"], dim, args.get("fill", 0.0), mesh):
        return [f"puts what pads %{info(args['x']).name} to the rows of neighbours"]
    want = with_rows(type, dim, before + rows + behind, axes, mesh)
    return [] if result_types[0] == want else [f"yields {want}, the result says {result_types[0]}"]


def _filled(x: fx.Node, dim: int, fill: float, mesh: Mesh) -> bool:
    """Is what pads a dim of rows filled? Of an input of a graph it is not known. A kernel is trusted if it reads where
    its rank's rows begin along those axes, and writes the fill where a condition does not hold."""
    type = type_of(x)
    start = sum(map(len, type.dims[:dim]))
    uneven = {i for i in range(start, start + len(type.dims[dim])) if type.atoms[i].uneven(mesh)}
    while x.target in (mask_pad, HALO):
        if x.target is mask_pad and given(x)["fill"] == fill:
            uneven.discard(given(x)["pos"])
        x = given(x)["x"]
    (call, position), along = producer(x), {axis for i in uneven for axis in type.atoms[i].axes}
    if call.target in KERNELS and along <= counted_axes(call) and writes_fill(call, position, fill):
        return True
    return not uneven or x.op == "placeholder"


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


def _widened_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args, after = given(node), result_types[0]
    type, dim = type_of(args["x"]), args["dim"]
    axes = tuple(axis for atom in type.dims[dim] for axis in atom.axes)
    rows = type.local_shape(mesh)[dim] + args["lead"] + args["tail"]
    want = with_rows(type, dim, rows, axes, mesh)
    return [] if after == want else [f"yields {want}, the result says {after}"]


def _means_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    type = type_of(args["x"])
    if (wrong := _axes_fault(type, args["dim"], mesh.resolve(args["axes"]))) is not None:
        return [wrong]
    return [] if result_types[0] == type else [f"yields {type}, the result says {result_types[0]}"]


def _positions_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    type, axes = type_of(args["x"]), mesh.resolve(args["axes"])
    if not any(tuple(axis for atom in dim for axis in atom.axes) == axes for dim in type.dims):
        return [f"shifts positions by the place along {'.'.join(axes)}, in {type}"]
    return [] if result_types[0] == type else [f"yields {type}, the result says {result_types[0]}"]


HALO_FAULTS: Mapping[Any, Callable[[fx.Node, Declared, Mesh], list[str]]] = {
    NEIGHBOUR_ROWS: _neighbour_faults,
    HALO: _halo_faults,
    HALO_SUM: _sum_faults,
    WIDEN: _widened_faults,
    MEAN_ANEW: _means_faults,
    SHIFT_POSITIONS: _positions_faults,
}
