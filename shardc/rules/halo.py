"""Ops with windows over a sharded spatial dim: a rank computes its rows from its own and few of others'.

A dim that windows tile (see `window`) is free. But where a kernel reaches beyond a rank's own rows, ranks must hold
runs of rows, and at least as many as the neighbours need. `unfit` says where they do not. What lies at the outer ends
is the op's padding, so that a rank's call runs without; what pads a last rank that holds fewer rows is filled alike.

    reads    convolution, pooling: the neighbours' rows of the operand are put to a rank's own (`halo`)
    gives    its gradient, a transposed convolution: what a rank computes of the neighbours' rows of the result is sent
             to them, and added there (`halo_sum`)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, op_name, results, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import HALO, HALO_SUM, NEIGHBOUR_ROWS
from shardc.ir.ops.local import mask_pad
from shardc.ir.ops.windows import MEAN_ANEW, SHIFT_POSITIONS, WIDEN
from shardc.ir.provenance import Cause, Derivation
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.local import LocalCall
from shardc.rules.projection import Projection
from shardc.rules.registry import bind_call
from shardc.rules.window import WINDOWED, Window, Windowed, uncounted


def tiled(op: Any, args: Sequence[Any]) -> list[int]:
    """For each spatial dim of a call whose tensors are `Dims`, its stride if windows tile it, else 0."""
    about = WINDOWED[op](bind_call(op, args, {}, lambda _, v: v), lambda x: x.shape)
    return [window.stride if window.tiles else 0 for window in about.windows]


def _windowed(target: Any, args: Mapping[str, Any]) -> Windowed:
    return WINDOWED[target](args, lambda value: type_of(value).shape)


def _pieces(projection: Projection, name: str) -> list[int]:
    """Those of a factor, major first."""
    return [i for i, n in enumerate(projection.names) if n == name or n.startswith(f"{name}.")]


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """The pieces that cannot be split so, since ranks would need more than their neighbours' rows."""
    about = _windowed(node.target, given(node))
    wrong: set[int] = set()
    for i, window in enumerate(about.windows):
        local = window.alone and not about.always_runs
        pieces = _pieces(projection, f"p{i}") if window.tiles and not local else []
        if any(split.get(piece) for piece in pieces) and not _fits(window, projection, pieces, split, mesh):
            wrong.update(piece for piece in pieces if split.get(piece))
    return wrong


def _fits(window: Window, projection: Projection, pieces: Sequence[int], split: Mapping[int, Axes], mesh: Mesh) -> bool:
    """Do ranks hold runs of rows, and as many as a neighbour needs?"""
    whole, rows = False, window.stride  # whole: a factor before is not wholly split: what follows would be no runs
    for piece in pieces:
        atom = Atom(projection.sizes[piece], tuple(split.get(piece, ())))
        if isinstance(atom.size, Blocks) or (atom.axes and whole):
            return False
        if atom.uneven(mesh) and (any(split.get(p) for p in pieces if p != piece) or _has_gaps(atom, mesh)):
            return False
        whole = whole or atom.local(mesh) > 1
        rows *= atom.local(mesh)
    return max(window.before, window.behind) <= rows


def _has_gaps(atom: Atom, mesh: Mesh) -> bool:
    """Of nested uneven chunks an inner one may end short of the next: 5 over 2 over 2 are 0 1, 2, 3 4 and none."""
    chunk = -(-atom.size // mesh.size(atom.axes[:1]))
    return chunk % mesh.size(atom.axes[1:]) != 0


# ---------------------------------------------------------------------- one rank's call
def local_windows(call: LocalCall) -> Any:
    """The call on own rows and those of the neighbours."""
    about = _windowed(call.node.target, call.args)
    sides = _sides(call, about)
    halos = [side for side in sides if not side.window.alone]
    changes: dict[str, Any] = {}
    if halos:
        changes.update(_paddings(call, about, halos))
        if about.reads:
            changes[about.reads] = _widened(call, about, halos)
        if about.gives:
            changes[about.by_window] = _filled(call, call.args[about.by_window], halos, 0.0)
        if about.shaped:
            changes[about.shaped] = _stand_in(call, about.shaped, halos)
    changes.update(_shifted(call, about, sides))
    if about.means and call.args["divisor_override"] is None:
        _weigh(call, about, sides, changes)
    if halos and about.gives:
        _give_back(call, halos)
    if "groups" in call.args:
        changes["groups"] = call.size("g") if call.args["groups"] > 1 else 1
    return call.with_args(**changes)


def _sides(call: LocalCall, about: Windowed) -> list[_Side]:
    """The spatial dims that are sharded."""
    sides: list[_Side] = []
    for i, window in enumerate(about.windows):
        axes = tuple(axis for piece in _pieces(call.projection, f"p{i}") for axis in call.split.get(piece, ()))
        if axes and window.tiles:
            sides.append(_Side(window, i + about.first, axes, about))
    return sides


def _paddings(call: LocalCall, about: Windowed, halos: Sequence[_Side]) -> dict[str, list[int]]:
    """What is left of it: the neighbours' rows, or what lies at the outer ends, stand for that of their dims."""
    windows, dims = about.windows, {halo.dim for halo in halos}
    spread = {"padding": [window.padding for window in windows]}
    for i in range(len(windows)):
        if i + about.first in dims:
            spread["padding"][i] = 0
    if about.output_padding:
        given_ = list(call.args["output_padding"])
        given_ = given_ * len(windows) if len(given_) == 1 else given_
        spread["output_padding"] = [
            max(0, w.padding + w.stride - w.extent) if i + about.first in dims else given_[i]
            for i, w in enumerate(windows)
        ]
    return spread


def _widened(call: LocalCall, about: Windowed, halos: Sequence[_Side]) -> fx.Node:
    value = call.args[about.reads]
    fill = about.fill
    if not type_of(value).dtype.is_floating_point and fill:
        fill = float(torch.iinfo(type_of(value).dtype).min)
    value = _filled(call, value, halos, fill)
    for halo in halos:
        value = halo.put(call, value, fill)
    return value


def _filled(call: LocalCall, value: fx.Node, halos: Sequence[_Side], fill: float) -> fx.Node:
    """A value with what pads its exchanged dims filled: a neighbour reads it, or adds it to its own."""
    type, mesh = type_of(value), call.graph.mesh
    for halo in halos:
        start = sum(map(len, type.dims[: halo.dim]))
        for atom in range(start, start + len(type.dims[halo.dim])):
            if type.atoms[atom].uneven(mesh):
                held = (list(type.local_atoms(mesh)), atom, type.atoms[atom].size, list(type.atoms[atom].axes), fill)
                if not (value.target is mask_pad and tuple(value.args[1:]) == held):
                    value = call.emit(mask_pad, value, *held, type=type)
    return value


def _stand_in(call: LocalCall, name: str, halos: Sequence[_Side]) -> fx.Node:
    """A tensor in the shape of an operand with the neighbours' rows."""
    value = call.args[name]
    for halo in halos:
        args = (value, halo.window.before, halo.window.behind, halo.dim)
        value = call.emit(WIDEN, *args, type=halo.widened(type_of(value), call.graph.mesh))
    return value


def _shifted(call: LocalCall, about: Windowed, sides: Sequence[_Side]) -> dict[str, Any]:
    """Positions count in the whole plane; a rank's in its own with the neighbours' rows."""
    if not about.positions or not sides:
        return {}
    if about.positions == "result":
        node = call.node
        positions = results(node)[1]
        if positions is not None:
            with _after(call, positions) as follow:
                value = positions
                for side in sides:
                    value = side.shift(call, about, value, back=False, sides=sides)
                follow(value)
        return {}
    value = call.args[about.positions]
    for side in reversed(sides):
        value = side.shift(call, about, value, back=True, sides=sides)
    return {about.positions: value}


def _weigh(call: LocalCall, about: Windowed, sides: Sequence[_Side], changes: dict[str, Any]) -> None:
    """Means at the outer ends are of what there is of a window; a rank's call takes all of its windows to be full."""
    counts = call.args["count_include_pad"]
    sides = [side for side in sides if not side.window.alone and uncounted(side.window, counts)]
    if not sides:
        return
    if about.means == "result":
        with _after(call, call.node) as follow:
            value = call.node
            for side in sides:
                value = side.mean(call, value, counts)
            follow(value)
        return
    value = changes[about.means]
    for side in sides:
        value = side.mean(call, value, counts)
    changes[about.means] = value


@dataclass(frozen=True)
class _Side:
    """A sharded dim, and the rows that are exchanged along it."""

    window: Window
    dim: int
    axes: Axes
    about: Windowed

    def put(self, call: LocalCall, value: fx.Node, fill: float) -> fx.Node:
        """A rank's rows with those of its neighbours."""
        before, behind = self.window.before, self.window.behind
        rows = type_of(value).local_shape(call.graph.mesh)[self.dim]
        parts = (
            self._from_neighbour(call, value, rows - before, before, 1),
            self._from_neighbour(call, value, 0, behind, -1),
        )
        args = (value, *parts, self.dim, list(self.axes), *([fill] if fill else []))
        return self._call(call, HALO, args, self.widened(type_of(value), call.graph.mesh), info(value).name)

    def widened(self, type: TensorType, mesh: Mesh) -> TensorType:
        """The type with the neighbours' rows."""
        rows = type.local_shape(mesh)[self.dim] + self.window.before + self.window.behind
        return with_rows(type, self.dim, rows, self.axes, mesh)

    def summed(self, call: LocalCall, value: fx.Node, type: TensorType, of: str) -> fx.Node:
        """What there is of a rank's own rows: what it has computed of them, and what its neighbours have."""
        before, behind = self.window.before, self.window.behind
        rows = type.local_shape(call.graph.mesh)[self.dim]
        parts = (
            self._from_neighbour(call, value, rows + before, behind, 1),
            self._from_neighbour(call, value, 0, before, -1),
        )
        return self._call(call, HALO_SUM, (value, *parts, before, behind, self.dim, list(self.axes)), type, of)

    def shift(self, call: LocalCall, about: Windowed, value: fx.Node, *, back: bool, sides: Sequence[_Side]) -> fx.Node:
        """Positions whose dims before this one count in the whole plane, and those behind in a rank's."""
        shape = type_of(call.args["self"]).local_shape(call.graph.mesh)
        ends = {side.dim: side.window.before + side.window.behind for side in sides}
        inner = 1
        for d in range(self.dim + 1, len(shape)):
            inner *= shape[d] + ends.get(d, 0)
        sizes = (shape[self.dim] + ends[self.dim], self.window.size)
        args = (value, *(reversed(sizes) if back else sizes), inner, shape[self.dim], self.window.before)
        args = (*args, self.window.dilation, back, list(self.axes))
        return self._call(call, SHIFT_POSITIONS, args, type_of(value), info(call.node).name)

    def mean(self, call: LocalCall, value: fx.Node, counts: bool) -> fx.Node:
        w = self.window
        args = (value, self.dim, w.size, w.extent, w.stride, w.padding, counts, list(self.axes))
        return self._call(call, MEAN_ANEW, args, type_of(value), info(value).name)

    def _from_neighbour(self, call: LocalCall, value: fx.Node, start: int, length: int, shift: int) -> fx.Node | None:
        if not length:
            return None
        type = with_rows(type_of(value), self.dim, length, self.axes, call.graph.mesh)
        args = (value, list(self.axes), self.dim, start, length, shift)
        return self._call(call, NEIGHBOUR_ROWS, args, type, info(value).name)

    def _call(self, call: LocalCall, target: Any, args: tuple[Any, ...], type: TensorType, of: str) -> fx.Node:
        name = f"{of}.{op_name(target).removeprefix('shardc.')}"
        origin = Derivation("moved", of)
        return call.graph.call(
            target, args, like=call.node, type=type, name=name, origin=origin, cause=self._cause(call)
        )

    def _cause(self, call: LocalCall) -> Cause:
        """The annotation of the axes, as far as the values of the call know of it."""
        read = self.about.reads or self.about.shaped or self.about.by_window
        known = [info(value).cause for value in (call.args[read], call.node)]
        axes = {*self.axes, *call.graph.mesh.merged(self.axes)}
        named = [r for cause in known for r in cause.requirements if axes.intersection(r.axes)]
        return Cause(tuple(named[:1])) if named else known[0]


@contextmanager
def _after(call: LocalCall, value: fx.Node) -> Generator[Callable[[fx.Node], None], None, None]:
    """Behind the call and its results; what is then yielded to the function stands for the value to its readers."""
    graph, readers, last = call.graph, list(value.users), value
    while last.next.target is operator.getitem:
        last = last.next

    def follow(after: fx.Node) -> None:
        name = info(value).name
        update(value, name=graph.unique(f"{name}.local"))
        update(after, name=name)
        value.replace_all_uses_with(after, lambda user: user in readers)
        for table in (graph.activations, graph.gradients):
            table.update({key: after for key, of in table.items() if of is value})

    with graph.fx.inserting_before(last.next):
        yield follow


def _give_back(call: LocalCall, halos: Sequence[_Side]) -> None:
    """Of a call whose result has the neighbours' rows: that of own rows, after the call."""
    node, graph = call.node, call.graph
    value = results(node)[0]
    if value is None:
        return
    name, types = info(value).name, [type_of(value)]
    with _after(call, value) as follow:
        for halo in halos:
            types.append(halo.widened(types[-1], graph.mesh))
        update(value, type=types[-1])
        declared = info(node).results
        if declared:
            update(node, results=(types[-1], *declared[1:]))
        total = value
        for halo, type in zip(reversed(halos), reversed(types[:-1]), strict=True):
            total = halo.summed(call, total, type, name)
        follow(total)


def with_rows(type: TensorType, dim: int, rows: int, axes: Axes, mesh: Mesh) -> TensorType:
    """The type of as many rows a rank along a dim that lies over the axes."""
    size = rows * mesh.size(axes)
    dims = (*type.dims[:dim], (Atom(size, axes),), *type.dims[dim + 1 :])
    return TensorType(type.dtype, dims, type.partial, type.ragged)
