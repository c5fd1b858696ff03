"""What is false of calls that continue sums, products and extremes of other ranks' rows (`shardc.ir.ops.cumulative`).

    %totals = cumulative_totals(%x, 1, "sum", "16", [cp], 1)                       x : f32[4, 16@cp]
    %y      = cumulative_part(%x, %totals of all, 1, "sum", False, "16", [cp])

The totals are those of the same rows and kind, of all ranks, and the layout is that of the type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import info, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.cumulative import CUMULATIVE_PART, CUMULATIVE_TOTALS, KINDS, total_rows, wide
from shardc.ir.ops.cumulative_extremes import (
    CUMULATIVE_EXTREME_PART,
    EXTREME_GRADIENT_PART,
    EXTREME_SPILLS,
    EXTREME_TOTALS,
)
from shardc.ir.ops.extreme import EXTREME_OF_RUNS, RUN_EXTREMES
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.rules.cumulative import totals_of

Declared = Sequence[TensorType | None]
# The calls that read what is gathered: the calls that make it, and their arguments that hold it.
READS: Mapping[Any, tuple[Any, tuple[str, ...]]] = {
    CUMULATIVE_PART: (CUMULATIVE_TOTALS, ("totals",)),
    CUMULATIVE_EXTREME_PART: (EXTREME_TOTALS, ("values", "indices")),
    EXTREME_GRADIENT_PART: (EXTREME_SPILLS, ("spilled", "rows")),
}
MAKERS = (*(maker for maker, _ in READS.values()), RUN_EXTREMES)


def _results(node: fx.Node, args: Mapping[str, Any], mesh: Mesh) -> tuple[TensorType, ...]:
    """The types of what a call yields."""
    x, dim = type_of(args["x" if "x" in args else "g"]), args["dim"]
    places = replace(x, dtype=torch.int64, partial=())
    if node.target is CUMULATIVE_TOTALS:
        return totals_of(x, dim, (wide(x.dtype),), mesh, total_rows(args["kind"], x.dtype)).types
    if node.target in MAKERS:
        dtype = wide(x.dtype) if node.target is EXTREME_SPILLS else x.dtype
        value, row = totals_of(x, dim, (dtype, torch.int64), mesh).types
        return value, replace(row, partial=())
    return (x, places) if node.target is CUMULATIVE_EXTREME_PART else (x,)


def cumulative_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    args = given(node)
    of = args["x" if "x" in args else "g"]
    x, dim, axes = type_of(of), args["dim"], tuple(mesh.resolve(args["axes"]))
    if not 0 <= dim < x.ndim or len(x.dims[dim]) != 1:
        return [f"continues along dim {dim} of {x}"]
    (atom,) = x.dims[dim]
    if not axes or (str(atom.size), tuple(mesh.resolve(atom.axes))) != (args["source"], axes):
        return [f"takes dim {dim} of {x} to be {args['source']}@{'.'.join(axes)}"]
    if args.get("kind", "sum") not in KINDS:
        return [f"knows no {args['kind']!r}"]
    linear = args.get("kind") == "sum" or "g" in args
    if (set(axes) & x.partial_axes) or (x.partial and not linear):
        return [f"continues what is pending, of {x}"]
    if "indices" in args and "g" in args and type_of(args["indices"]).dims != x.dims:
        return [f"takes places of {type_of(args['indices'])}, of {x}"]
    if node.target in MAKERS:
        blocks = totals_of(x, dim, (x.dtype,), mesh).layout[2]
        if args["blocks"] != blocks:
            return [f"has {args['blocks']} totals, of {args['source']}"]
    else:
        maker, names = READS[node.target]
        for place, name in enumerate(names):
            if fault := _read_fault(node, args[name], maker, place, mesh):
                return [fault]
    pairs = zip(result_types, _results(node, args, mesh), strict=False)
    return [f"yields {want}, the result says {said}" for said, want in pairs if said is not None and said != want]


def _read_fault(node: fx.Node, value: fx.Node, maker: Any, place: int, mesh: Mesh) -> str:
    """What is wrong with totals that a call reads: they are those of its own rows, of all ranks."""
    args, name = given(node), info(value).name
    if value.op == "placeholder":  # of a stage, which did not gather it itself
        return ""
    if value.target is not all_gather or mesh.resolve(given(value)["axes"]) != mesh.resolve(args["axes"]):
        return f"%{name} is not gathered of all ranks along {'.'.join(args['axes'])}"
    source = given(value)["x"]
    if source.op == "placeholder":
        return ""
    made, at = producer(source)
    said = given(made)
    if made.target is not maker or at != place or any(said[key] != args[key] for key in {*said} & {*args}):
        return f"%{name} is not what these rows come to"
    return ""


def extreme_faults(node: fx.Node, result_types: Declared, mesh: Mesh) -> list[str]:
    """Of the greatest of all runs: it is found of the values and places of the same runs."""
    args = given(node)
    dim, types = args["dim"], (type_of(args["values"]), type_of(args["indices"]))
    for place, name in enumerate(("values", "indices")):
        if fault := _read_fault(node, args[name], RUN_EXTREMES, place, mesh):
            return [fault]
    makers = {producer(given(args[name])["x"])[0] for name in ("values", "indices") if args[name].op != "placeholder"}
    if len(makers) > 1 or types[0].partial:
        return ["takes the places of other values"]
    wanted = [replace(type, dims=(*type.dims[:dim], (), *type.dims[dim + 1 :])) for type in types]
    pairs = zip(result_types, wanted, strict=False)
    return [f"yields {want}, the result says {said}" for said, want in pairs if said is not None and said != want]


CUMULATIVE_FAULTS: Mapping[Any, Callable[[fx.Node, Declared, Mesh], list[str]]] = {
    **dict.fromkeys((*READS, *MAKERS), cumulative_faults),
    EXTREME_OF_RUNS: extreme_faults,
}
