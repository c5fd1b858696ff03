"""Convolution over a sharded spatial dim: a rank computes its rows of the result from its own and few of others'.

    size 8, kernel 3, stride 1, padding 1     (p: 8)     one row from the rank before, one from that behind
    size 8, kernel 3, stride 2, padding 1     (p: 4 2)   one row from the rank before
    size 8, kernel 2, stride 2                (p: 4 2)   none: kernels lie side by side

A dim *tiles* where it has `stride` elements for each of the result. Its `p` is then a factor of both, and free: but
where a kernel reaches beyond a rank's own rows, ranks must hold equally many, and as many as the neighbours need.
`unfit` says where they do not. The zeros at the outer ends are the convolution's padding, so that a rank's runs
without.

The gradient of the input is that of own rows and of the neighbours'; theirs is sent back and added there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, op_name, results, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import HALO, HALO_SUM, NEIGHBOUR_ROWS
from shardc.ir.provenance import Cause, Derivation
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.local import LocalCall
from shardc.rules.projection import Projection

FIRST_SPATIAL = 2  # dims before it are the batch and the channels


@dataclass(frozen=True)
class Window:
    """What a convolution does along one spatial dim: `extent` is from the first element that a kernel reads to the
    last."""

    size: int
    extent: int
    stride: int
    padding: int

    @property
    def results(self) -> int:
        return (self.size + 2 * self.padding - self.extent) // self.stride + 1

    @property
    def tiles(self) -> bool:
        """Has the dim `stride` elements for each of the result?"""
        return self.results * self.stride == self.size and self.padding < self.extent

    @property
    def before(self) -> int:
        """How many rows before its own a rank reads."""
        return self.padding

    @property
    def behind(self) -> int:
        return max(0, self.extent - self.padding - self.stride)

    @property
    def alone(self) -> bool:
        """A rank reads its own rows only."""
        return not (self.before or self.behind)


def windows(
    space: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Window]:
    """One for each spatial dim, of the shapes of input and weight behind the first two dims."""

    def along(values: Sequence[int], i: int) -> int:
        return int(values[i if len(values) > 1 else 0])

    return [
        Window(size, (taps - 1) * along(dilation, i) + 1, along(stride, i), along(padding, i))
        for i, (size, taps) in enumerate(zip(space, kernel, strict=True))
    ]


def windows_of(args: Mapping[str, Any], input: TensorType, weight: TensorType) -> list[Window]:
    space, kernel = input.shape[FIRST_SPATIAL:], weight.shape[FIRST_SPATIAL:]
    return windows(space, kernel, args["stride"], args["padding"], args["dilation"])


def _pieces(projection: Projection, name: str) -> list[int]:
    """Those of a factor, major first."""
    return [i for i, n in enumerate(projection.names) if n == name or n.startswith(f"{name}.")]


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """The pieces of a convolution that cannot be split so, since ranks would need more than their neighbours' rows."""
    args = given(node)
    if args["transposed"]:
        return set()
    wrong: set[int] = set()
    for i, window in enumerate(windows_of(args, type_of(args["input"]), type_of(args["weight"]))):
        pieces = _pieces(projection, f"p{i}") if window.tiles and not window.alone else []
        if any(split.get(piece) for piece in pieces) and not _fits(window, projection, pieces, split, mesh):
            wrong.update(piece for piece in pieces if split.get(piece))
    return wrong


def _fits(window: Window, projection: Projection, pieces: Sequence[int], split: Mapping[int, Axes], mesh: Mesh) -> bool:
    """Do ranks hold runs of rows, equally many, and as many as a neighbour needs?"""
    whole = False  # a factor before is not wholly split: the next ones' shards would be no runs
    for piece in pieces:
        atom = Atom(projection.sizes[piece], tuple(split.get(piece, ())))
        if isinstance(atom.size, Blocks) or (atom.axes and (whole or atom.uneven(mesh))):
            return False
        whole = whole or atom.local(mesh) > 1
    rows = window.size // math.prod(mesh.size(split.get(piece, ())) for piece in pieces)
    return max(window.before, window.behind) <= rows


# ---------------------------------------------------------------------- one rank's call
def local_convolution(call: LocalCall) -> Any:
    """The call on own rows and those of the neighbours."""
    halos, value = _halos(call), call.args["input"]
    for halo in halos:
        value = halo.put(call, value)
    if halos and info(call.node).results:
        _give_back(call, halos)
    groups = call.size("g") if call.args["groups"] > 1 else 1
    return call.with_args(input=value, padding=_padding(call, halos), groups=groups)


def _padding(call: LocalCall, halos: Sequence[_Halo]) -> list[int]:
    """What is left of it: the neighbours' rows, or zeros at the outer ends, stand for that of their dims."""
    padding, space = call.args["padding"], call.operands[0].ndim - FIRST_SPATIAL
    spread = list(padding) if len(padding) > 1 else list(padding) * space
    dims = {halo.dim for halo in halos}
    return [0 if i + FIRST_SPATIAL in dims else n for i, n in enumerate(spread)]


def _halos(call: LocalCall) -> list[_Halo]:
    if call.args["transposed"]:
        return []
    halos: list[_Halo] = []
    for i, window in enumerate(windows_of(call.args, type_of(call.args["input"]), type_of(call.args["weight"]))):
        axes = tuple(axis for piece in _pieces(call.projection, f"p{i}") for axis in call.split.get(piece, ()))
        if axes and not window.alone:
            halos.append(_Halo(window, i + FIRST_SPATIAL, axes))
    return halos


@dataclass(frozen=True)
class _Halo:
    """The rows that are exchanged along one dim."""

    window: Window
    dim: int
    axes: Axes

    def put(self, call: LocalCall, value: fx.Node) -> fx.Node:
        """A rank's rows with those of its neighbours."""
        before, behind = self.window.before, self.window.behind
        rows = type_of(value).local_shape(call.graph.mesh)[self.dim]
        parts = (
            self._from_neighbour(call, value, rows - before, before, 1),
            self._from_neighbour(call, value, 0, behind, -1),
        )
        args = (value, *parts, self.dim, list(self.axes))
        return self._call(call, HALO, args, self.widened(type_of(value), call.graph.mesh), info(value).name)

    def widened(self, type: TensorType, mesh: Mesh) -> TensorType:
        """The type with the neighbours' rows."""
        rows = type.local_shape(mesh)[self.dim] + self.window.before + self.window.behind
        return with_rows(type, self.dim, rows, self.axes, mesh)

    def summed(self, call: LocalCall, gradient: fx.Node, type: TensorType, of: str) -> fx.Node:
        """The gradient of a rank's own rows, by those of them that it has and that its neighbours have."""
        before, behind = self.window.before, self.window.behind
        rows = type.local_shape(call.graph.mesh)[self.dim]
        parts = (
            self._from_neighbour(call, gradient, rows + before, behind, 1),
            self._from_neighbour(call, gradient, 0, before, -1),
        )
        return self._call(call, HALO_SUM, (gradient, *parts, before, behind, self.dim, list(self.axes)), type, of)

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
        known = [info(value).cause for value in (call.args["input"], call.node)]
        axes = {*self.axes, *call.graph.mesh.merged(self.axes)}
        named = [r for cause in known for r in cause.requirements if axes.intersection(r.axes)]
        return Cause(tuple(named[:1])) if named else known[0]


def _give_back(call: LocalCall, halos: Sequence[_Halo]) -> None:
    """Of a backward call that reads its input with the neighbours' rows: the gradient of own rows, after the call."""
    node, graph = call.node, call.graph
    declared = info(node).results
    gradient = results(node)[0] if declared[0] is not None else None
    if gradient is None:
        return
    name, readers = info(gradient).name, list(gradient.users)
    types = [type_of(gradient)]
    for halo in halos:
        types.append(halo.widened(types[-1], graph.mesh))
    update(gradient, type=types[-1], name=graph.unique(f"{name}.halo"))
    update(node, results=(types[-1], *declared[1:]))
    last = gradient
    while last.next.target is operator.getitem:
        last = last.next
    value = gradient
    with graph.fx.inserting_before(last.next):
        for halo, type in zip(reversed(halos), reversed(types[:-1]), strict=True):
            value = halo.summed(call, value, type, name)
    update(value, name=name)
    gradient.replace_all_uses_with(value, lambda user: user in readers)
    for table in (graph.activations, graph.gradients):
        table.update({key: value for key, of in table.items() if of is gradient})


def with_rows(type: TensorType, dim: int, rows: int, axes: Axes, mesh: Mesh) -> TensorType:
    """The type of as many rows a rank along a dim that lies over the axes."""
    size = rows * mesh.size(axes)
    dims = (*type.dims[:dim], (Atom(size, axes),), *type.dims[dim + 1 :])
    return TensorType(type.dtype, dims, type.partial, type.ragged)
