"""Lowers a call of the graph: its lowering's operations, named by the graph's values, without dead ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kernels_triton.ir.kernel import DTYPES
from kernels_triton.ir.table import OPS, WIDE
from shardc.ir.graph import info, operands, results, type_of
from shardc.passes.fusion.analysis.iteration_space import Prim, Read, Value, space_constraint
from shardc.passes.fusion.analysis.view_analysis import ViewAnalysis
from shardc.passes.fusion.lowering.lowered_op import (
    LOWERINGS,
    LoweredOp,
    LoweringBuilder,
    NotLowerable,
    Operand,
    Temporary,
)


def lower_op(views: ViewAnalysis, node: fx.Node) -> LoweredOp | None:
    """A call as operations of a kernel; None if no kernel can compute it."""
    lowering = LOWERINGS.get(node.target)
    if node in views.copying_views:
        lowering = _lower_copying_view
    values = [value for value in results(node) if value is not None]
    if lowering is None or not values:
        return None
    shapes = [views.of[value].shape for value in (*values, *operands(node))]  # the result of an empty sum is not empty
    if any(type_of(v).dtype not in DTYPES for v in values) or any(math.prod(shape) == 0 for shape in shapes):
        return None
    builder = LoweringBuilder(views, node)
    try:
        results_of_lowering = lowering(builder, *node.args, **node.kwargs)
    except NotLowerable:
        return None
    return _finish(
        node,
        builder,
        results_of_lowering
        if isinstance(results_of_lowering, tuple) and not isinstance(results_of_lowering, Temporary)
        else (results_of_lowering,),
    )


def _lower_copying_view(m: LoweringBuilder, x: Any, *_: Any, **__: Any) -> Operand:
    """A "view" that no strides describe: a copy of the elements in order."""
    shape = m.shape_of(x)
    return m("same", x, shape=shape)


def _finish(node: fx.Node, builder: LoweringBuilder, results_of_lowering: Sequence[Any]) -> LoweredOp | None:
    """The operations, with the graph's values for their results, without dead ones."""
    temporaries = _values_by_result(node, results_of_lowering)
    if temporaries is None:
        return None
    names: dict[Value, Value] = {key: value for value, key in temporaries.items()}
    if len(names) < len(temporaries):
        return None
    needed: set[Value] = set(names)
    live_prims: list[Prim] = []
    for prim in reversed(builder.prims):
        if prim.out in needed:
            needed.update(read.value for read in prim.reads)
            args = tuple(a._replace(value=names.get(a.value, a.value)) if isinstance(a, Read) else a for a in prim.args)
            out = names.get(prim.out, prim.out)
            dtype = type_of(out).dtype if isinstance(out, fx.Node) else prim.dtype
            about = (prim.over, prim.cols, prim.seed, prim.index)
            live_prims.append(Prim(out, prim.op, args, prim.size, dtype, *about))
    prims = tuple(reversed(live_prims))
    constraint = space_constraint(prims)
    op = LoweredOp(node, prims, constraint) if constraint is not None else None
    if op is not None and op.is_float64:
        every = [r.value for p in prims for r in p.reads]
        bases = [value for value in every if isinstance(value, fx.Node) and value not in temporaries]
        floats = {type_of(value).dtype for value in bases if type_of(value).dtype.is_floating_point}
        narrow = any(p.op in OPS and OPS[p.op].function not in WIDE for p in prims)  # exact to float32 only
        if not floats <= {torch.float64} or not bases or narrow or any(p.over != "point" for p in prims):
            return None
    return op


def _values_by_result(node: fx.Node, results_of_lowering: Sequence[Any]) -> dict[fx.Node, Temporary] | None:
    """The graph's values -> the temporaries that the lowering returned for them."""
    if info(node).type is not None:
        return {node: results_of_lowering[0]} if isinstance(results_of_lowering[0], Temporary) else None
    temporaries: dict[fx.Node, Temporary] = {}
    for value in results(node):
        if value is not None:
            key = results_of_lowering[int(value.args[1])]  # type: ignore[arg-type]
            if not isinstance(key, Temporary):
                return None
            temporaries[value] = key
    return temporaries
