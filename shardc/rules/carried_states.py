"""States that go from chunk to chunk (`ir.ops.carried_states`): chunks that lie over ranks gather one state a rank.

    first: b h p n    decay: b h c    addends: b h c p n    ->    b h c p n, b h p n

The state behind the last chunk is a pending sum where chunks are split: the first rank yields it, others 0.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from shardc.ir.blocks import blocks_of
from shardc.ir.graph import info, set_info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.carried_states import CARRIED_STATES, CHUNK_TOTALS, STATES_BEHIND
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.scan import wide_of
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.halo import with_rows
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block, rule
from shardc.rules.shift import cause_of, moved


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """Chunks whose dim is several atoms are whole: a rank's are no runs."""
    decay = type_of(given(node)["decay"])
    chunks = projection.operands[1][sum(map(len, decay.dims[:-1])) :]
    return {p for p in chunks if split.get(p)} if len(chunks) > 1 else set()


def total_type(type: TensorType, dim: int, dtype: Any, blocks: int, axes: Axes, mesh: Mesh) -> TensorType:
    """One element of `dim` for each run of chunks that a rank has."""
    return with_rows(TensorType(dtype, type.dims), dim, blocks, axes, mesh)


@by_block
def local_carried(call: LocalCall) -> Any:
    """On a rank's chunks, with what the runs of all ranks do."""
    args, mesh, graph = call.args, call.graph.mesh, call.graph
    decay, addends = args["decay"], args["addends"]
    dim = type_of(decay).ndim - 1
    if not any(atom.axes for atom in type_of(decay).dims[dim]):
        return call.with_args()
    (atom,) = type_of(decay).dims[dim]
    axes, source, blocks = tuple(mesh.resolve(atom.axes)), str(atom.size), len(blocks_of(atom.size))
    dtype = wide_of([type_of(x).dtype for x in (decay, addends)])
    types = tuple(total_type(type_of(x), dim, dtype, blocks, axes, mesh) for x in (decay, addends))
    name, cause = f"{info(call.node).name}.totals", cause_of(call, addends, axes)
    told = (decay, addends, source, list(axes), blocks, args["reverse"])
    made = graph.call(CHUNK_TOTALS, told, like=call.node, type=None, results=types, name=name, cause=cause)
    every: list[fx.Node] = []
    for i, type in enumerate(types):
        value = graph.fx.call_function(operator.getitem, (made, i))
        set_info(value, graph.info_like(call.node, CHUNK_TOTALS, type, name, cause=cause))
        dims = (*type.dims[:dim], (Atom(blocks * mesh.size(axes)),), *type.dims[dim + 1 :])
        whole = TensorType(dtype, dims)
        pos, atoms = sum(map(len, type.dims[:dim])), list(type.local_atoms(mesh))
        how = (list(axes), atoms, pos, blocks * mesh.size(axes), list(whole.local_shape(mesh)))
        every.append(moved(call, value, all_gather, (value, *how), whole, axes))
    return STATES_BEHIND, (args["first"], decay, addends, *every, source, list(axes), args["reverse"]), {}


@rule(
    CARRIED_STATES,
    localize=local_carried,
    unfit=unfit,
    examples=[
        ((4, 6, 3, 2), (4, 6, 8), (4, 6, 8, 3, 2), False),
        ((4, 6, 3, 2), (4, 6, 7), (4, 6, 7, 3, 2), True),
        ((4,), (4, 6), (4, 6), False),
        ((6,), (5,), (5, 6), True),
    ],
)
def carried_states(first: Dims, decay: Dims, addends: Dims, reverse: bool) -> Notation:
    batch, chunks = decay.labels[:-1], decay.labels[-1]
    rest = addends.labels[decay.ndim :]
    state, each = " ".join([*batch, *rest]) or "()", " ".join([*batch, chunks, *rest])
    return Notation(f"{state}, {decay}, {each} -> {each}, {state}", sum=chunks)
