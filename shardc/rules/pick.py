"""A few rows of a dim (`shardc.ir.ops.pick`): ranks that have them yield them and others zeros, which add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.pick import PICK_ROWS, PLACE_ROWS
from shardc.ir.schema import given
from shardc.ir.types import Axes, Dim, TensorType
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block, rule


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """Of a dim of several atoms, or of copied blocks, a rank's rows are no runs."""
    pieces = [p for p, name in enumerate(projection.names) if name == "s" or name.startswith("s.")]
    sizes = [projection.sizes[p] for p in pieces]
    one = len(sizes) == 1 and not (isinstance(sizes[0], Blocks) and sizes[0].copied)
    return set() if one else {p for p in pieces if split.get(p)}


def lies(dim: Dim) -> tuple[str, list[str]]:
    """How a dim lies, as arguments of a rank's call."""
    axes = [axis for atom in dim for axis in atom.axes]
    return (str(dim[0].size), axes) if axes else ("", [])


def pick_faults(node: fx.Node, result_types: Sequence[TensorType | None]) -> list[str]:
    """What is false of a rank's call, beside what its rule says."""
    args = given(node)
    whole = type_of(args["x"]) if "x" in args else result_types[0]
    assert whole is not None
    told, dim = (args.get("rows", ""), list(args.get("axes") or [])), whole.dims[args["dim"]]
    if len(dim) > 1 and any(atom.axes for atom in dim):
        return [f"takes rows of a dim of several atoms, in {whole}"]
    if told != lies(dim):
        return [f"takes its rows to be {'@'.join((told[0], '.'.join(told[1])))}, of {whole}"]
    if "index" in args:  # the numbers of rows are known when the step runs
        return []
    start, rows = args["start"], type_of(args["g"]).shape[args["dim"]] if node.target is PLACE_ROWS else args["length"]
    if not 0 <= start <= start + rows <= whole.shape[args["dim"]]:
        return [f"takes rows {start} to {start + rows} of {whole}"]
    return []


@by_block
def local_pick(call: LocalCall) -> Any:
    """A rank's call, which knows how its operand's dim lies."""
    return call.with_args(**dict(zip(("rows", "axes"), lies(call.operands[0].dims[call.args["dim"]]), strict=True)))


@rule(
    PICK_ROWS,
    localize=local_pick,
    unfit=unfit,
    padding="unread",
    examples=[((4, 6, 3), 1, 4, 2), ((6, 4), 0, 5, 1), ((3, 4, 6), 2, 0, 3)],
)
def pick_rows(x: Dims, dim: int, start: int, length: int, rows: str, axes: Sequence[str] | None) -> Notation:
    x, picked = x.replace(dim, "s"), x.replace(dim, "r")
    return Notation(f"{x} -> {picked}", sum="s", whole="r", linear=(0,))


@by_block
def local_place(call: LocalCall) -> Any:
    """A rank's call, which knows how its result's dim lies."""
    dim = call.args["dim"]
    rows, axes = lies(call.results[0].dims[dim])
    return call.with_args(size=call.result_shape()[dim], rows=rows, axes=axes)


@rule(
    PLACE_ROWS,
    localize=local_place,
    unfit=unfit,
    examples=[((4, 2, 3), 1, 3, 6), ((1, 4), 0, 5, 6), ((3, 4, 3), 2, 0, 6)],
)
def place_rows(g: Dims, dim: int, start: int, size: int, rows: str, axes: Sequence[str] | None) -> Notation:
    g, placed = g.replace(dim, "r"), g.replace(dim, "s")
    return Notation(f"{g} -> {placed}", whole="r", linear=(0,))
