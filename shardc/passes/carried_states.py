"""What is false of calls that carry states from chunk to chunk over ranks (`shardc.ir.ops.carried_states`).

    %sums, %totals  = chunk_totals(%decay, %addends, "8", [cp], 1, False)     decay : f32[2, 8@cp]
    %before, %last  = states_behind(%first, %decay, %addends, %sums of all, %totals of all, "8", [cp], False)

The sums and totals are those of the same chunks, of all ranks, in the same direction; the first state lies over no axis
of the chunks, and the last one is pending over them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from shardc.ir.blocks import blocks_of
from shardc.ir.graph import info, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.carried_states import CHUNK_TOTALS, STATES_BEHIND
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.scan import wide_of
from shardc.ir.ops.shift import size_of
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.rules.carried_states import total_type

Declared = Sequence[TensorType | None]
LAYOUT = ("decay", "addends", "source", "reverse")


def carried_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    decay, addends = type_of(args["decay"]), type_of(args["addends"])
    dim, axes = decay.ndim - 1, tuple(mesh.resolve(args["axes"]))
    chunks = decay.dims[dim]
    lies = str(chunks[0].size), tuple(mesh.resolve(chunks[0].axes))
    if not axes or len(chunks) > 1 or lies != (args["source"], axes) or addends.dims[: dim + 1] != decay.dims:
        return [f"takes the chunks of {decay} and {addends} to be {args['source']}@{'.'.join(axes)}"]
    if decay.partial or addends.partial:
        return ["carries what is pending"]
    if node.target is CHUNK_TOTALS:
        blocks, dtype = len(blocks_of(size_of(args["source"]))), wide_of([decay.dtype, addends.dtype])
        if args["blocks"] != blocks:
            return [f"has {args['blocks']} totals, of {args['source']}"]
        return _unlike(result_types, [total_type(t, dim, dtype, blocks, axes, mesh) for t in (decay, addends)])
    first = type_of(args["first"])
    if first.partial or first.dims != (*addends.dims[:dim], *addends.dims[dim + 1 :]):
        return [f"begins with {first}, which is no state of {addends}"]
    for i, value in enumerate((args["sums"], args["totals"])):
        if value.op == "placeholder":  # of a stage, which did not gather it itself
            continue
        source = given(value)["x"] if value.target is all_gather else value
        if value.target is not all_gather or tuple(mesh.resolve(given(value)["axes"])) != axes:
            return [f"%{info(value).name} is not gathered of all ranks"]
        made, place = producer(source)
        if source.op != "placeholder" and (
            made.target is not CHUNK_TOTALS or place != i or any(given(made)[name] != args[name] for name in LAYOUT)
        ):
            return [f"%{info(value).name} is not what these chunks do"]
    last = TensorType(addends.dtype, first.dims, tuple((axis, "sum") for axis in axes))
    return _unlike(result_types, [addends, last])


def _unlike(result_types: Declared, wanted: Sequence[TensorType]) -> list[str]:
    pairs = zip(result_types, wanted, strict=False)
    return [f"yields {want}, the result says {said}" for said, want in pairs if said is not None and said != want]


CARRIED_FAULTS = {CHUNK_TOTALS: carried_faults, STATES_BEHIND: carried_faults}
