"""What is false of calls that move rows between ranks (`shardc.ir.ops.shift`).

    %x.shift_rows     : i64[4, 2@cp]  = shift_rows(%x, 1, "16", "16", [cp], 1, False, 1, 1)      x : i64[4, 16@cp]
    %x.neighbour_rows : i64[4, 2@cp]  = neighbour_rows(%x.shift_rows, [cp], 1, 0, 1, -1)
    %y                : i64[4, 16@cp] = shift_join(%x, [%x.neighbour_rows], 1, "16", "16", [cp], 1, False, [1], 8, -100)

Which rows each rank needs of which other follows from the layouts alone: they must be those of the types, and every hop
must be there, sent by the same layouts, and over as many ranks as it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.ops.mirror import MIRROR, MIRROR_ROWS
from shardc.ir.ops.shift import SHIFT_JOIN, SHIFT_ROWS, routes, rows_by_hop, size_of
from shardc.ir.schema import given
from shardc.ir.types import Atom, TensorType
from shardc.rules.halo import with_rows
from shardc.rules.shift import has_both_ends, layout_of

Declared = Sequence[TensorType | None]
LAYOUT = ("dim", "source", "target", "axes", "offset", "wrap", "mirror")


class Faults(Protocol):
    def __call__(self, node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]: ...


def _layout_fault(args: Mapping[str, Any], mesh: Mesh) -> str | None:
    """What is wrong with the operand's layout as a call tells it."""
    type, dim = type_of(args["x"]), args["dim"]
    if not 0 <= dim < type.ndim or any(atom.axes for atom in type.dims[dim][1:]):
        return f"moves dim {dim} of {type}"
    axes = tuple(mesh.resolve(args["axes"]))
    lies = layout_of(type.dims[dim]), tuple(mesh.resolve(type.dims[dim][0].axes))
    if not axes or lies != (args["source"], axes):
        return f"takes dim {dim} of {type} to be {args['source']}@{'.'.join(axes)}"
    if set(axes) & type.partial_axes:
        return f"moves what is pending over {', '.join(sorted(set(axes) & type.partial_axes))}"
    return None


def _by_hop(args: Mapping[str, Any], mesh: Mesh) -> dict[int, int]:
    axes = tuple(mesh.resolve(args["axes"]))
    how = args["offset"], args["wrap"], args.get("mirror", False)
    return rows_by_hop(routes(args["source"], args["target"], axes, mesh, *how))


def _readable(text: str) -> bool:
    try:
        return int(size_of(text)) > 0
    except ValueError:
        return False


def _rows_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    if (wrong := _layout_fault(args, mesh)) is not None:
        return [wrong]
    if not _readable(args["target"]):
        return [f"{args['target']!r} is no size of a dim"]
    needed = _by_hop(args, mesh).get(args["hop"])
    if needed != args["rows"]:
        return [f"sends {args['rows']} rows {args['hop']} ranks back, where {needed or 'none'} are needed"]
    want = with_rows(type_of(args["x"]), args["dim"], args["rows"], mesh.resolve(args["axes"]), mesh)
    return [] if result_types[0] == want else [f"yields {want}, the result says {result_types[0]}"]


def _join_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args, after = given(node), result_types[0]
    if (wrong := _layout_fault(args, mesh)) is not None:
        return [wrong]
    if not _readable(args["target"]):
        return [f"{args['target']!r} is no size of a dim"]
    x, dim = args["x"], args["dim"]
    needed = _by_hop(args, mesh)
    if list(args["hops"]) != list(needed) or len(args["received"]) != len(needed):
        return [f"joins rows from {list(args['hops'])} ranks behind, where those from {list(needed)} are needed"]
    layout = [_plain(args.get(name, False)) for name in LAYOUT]
    for (hop, rows), part in zip(needed.items(), args["received"], strict=True):
        if part.op == "placeholder":  # of a stage, which did not send them itself
            want = with_rows(type_of(x), dim, rows, mesh.resolve(args["axes"]), mesh)
            if part is x or type_of(part) != want:
                return [f"%{info(part).name} are no {rows} rows of another rank"]
            continue
        sent = given(part)["x"] if part.target is NEIGHBOUR_ROWS else part
        if part.target is not NEIGHBOUR_ROWS or sent.target not in (SHIFT_ROWS,):
            return [f"%{info(part).name} are no rows of another rank"]
        way, of = given(part), given(sent)
        came = (way["start"], way["length"], -way["shift"], tuple(mesh.resolve(way["axes"])))
        said = [_plain(of.get(name, False)) for name in LAYOUT]
        if (of["x"], of["hop"], said) != (x, hop, layout) or came != (0, rows, hop, tuple(mesh.resolve(args["axes"]))):
            return [f"%{info(part).name} are other rows than those that the rank {hop} behind has to send"]
    type, atom = type_of(x), Atom(size_of(args["target"]), type_of(x).dims[dim][0].axes)
    dims = (atom,) if after is None or layout_of(after.dims[dim]) != args["target"] else after.dims[dim]
    placed = [a.axes for a in dims] == [atom.axes, *((),) * (len(dims) - 1)]
    dims = (*type.dims[:dim], dims if placed else (atom,), *type.dims[dim + 1 :])
    want = TensorType(type.dtype, dims, type.partial, type.ragged)
    if args["fill"] and not args["wrap"] and type.partial:
        return [f"fills a pending sum with {args['fill']}"]
    if atom.local(mesh) != args["rows"]:
        return [f"has {args['rows']} rows, where {atom} has {atom.local(mesh)}"]
    return [] if after == want else [f"yields {want}, the result says {after}"]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------------ the other order
def _mirror_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """Own rows are turned where they are both ends of a zigzag; else they go to the rank as far from the end."""
    args = given(node)
    type, dim = type_of(args["x"]), args["dim"]
    want = type
    if not 0 <= dim < type.ndim:
        return [f"turns dim {dim} of {type}"]
    atoms = [atom for atom in type.dims[dim] if atom.axes]
    lies = tuple(axis for atom in atoms for axis in mesh.resolve(atom.axes))
    if node.target is MIRROR and atoms and not (len(type.dims[dim]) == 1 and has_both_ends(atoms[0], mesh)):
        return [f"turns own rows of {type} alone"]
    if node.target is MIRROR_ROWS:
        if not lies or lies != tuple(mesh.resolve(args["axes"])):
            return [f"takes dim {dim} of {type} to lie over {'.'.join(args['axes'])}"]
        (atom,) = atoms
        blocks = isinstance(atom.size, Blocks) and len(atom.size.parts) > 1
        if len(type.dims[dim]) != 1 or blocks or (atom.uneven(mesh) and len(lies) > 1):
            return [f"turns {type}, of which ranks have unequal parts"]
        if atom.uneven(mesh):  # padding is turned round too: it comes first
            want = with_rows(type, dim, atom.local(mesh), lies, mesh)
    return [] if result_types[0] == want else [f"yields {want}, the result says {result_types[0]}"]


SHIFT_FAULTS: Mapping[Any, Faults] = {
    SHIFT_ROWS: _rows_faults,
    SHIFT_JOIN: _join_faults,
    MIRROR: _mirror_faults,
    MIRROR_ROWS: _mirror_faults,
}
