"""A call of the graph as a unit: what its lowering wrote down, in the graph's names, and nothing that no one needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kernels_triton.fused.kernel import DTYPES
from kernels_triton.fused.table import OPS, WIDE
from shardc.ir.graph import info, operands, results, type_of
from shardc.passes.fuse.memory_of import Memories
from shardc.passes.fuse.spaces import Prim, Read, Value, demand
from shardc.passes.fuse.units import LOWERINGS, Inner, Make, Operand, Unfit, Unit


def unit(memories: Memories, node: fx.Node) -> Unit | None:
    """A call as a part of a kernel; None if it is none."""
    lowering = LOWERINGS.get(node.target)
    if node in memories.copies:
        lowering = _copied
    values = [value for value in results(node) if value is not None]
    if lowering is None or not values:
        return None
    shapes = [memories.of[value].shape for value in (*values, *operands(node))]  # a sum of nothing has elements
    if any(type_of(v).dtype not in DTYPES for v in values) or any(math.prod(shape) == 0 for shape in shapes):
        return None
    make = Make(memories, node)
    try:
        made = lowering(make, *node.args, **node.kwargs)
    except Unfit:
        return None
    return _finished(node, make, made if isinstance(made, tuple) and not isinstance(made, Inner) else (made,))


def _copied(m: Make, x: Any, *_: Any, **__: Any) -> Operand:
    """A "view" of what does not lie so: its elements in order, one by one."""
    shape = m.shape_of(x)
    return m("same", x, shape=shape)


def _finished(node: fx.Node, make: Make, made: Sequence[Any]) -> Unit | None:
    """The prims with the graph's values for what they yield, and nothing that no one needs."""
    yielded = _yielded(node, made)
    if yielded is None:
        return None
    names: dict[Value, Value] = {key: value for value, key in yielded.items()}
    if len(names) < len(yielded):
        return None
    needed: set[Value] = set(names)
    kept: list[Prim] = []
    for prim in reversed(make.prims):
        if prim.out in needed:
            needed.update(read.value for read in prim.reads)
            args = tuple(a._replace(value=names.get(a.value, a.value)) if isinstance(a, Read) else a for a in prim.args)
            out = names.get(prim.out, prim.out)
            dtype = type_of(out).dtype if isinstance(out, fx.Node) else prim.dtype
            about = (prim.over, prim.cols, prim.seed, prim.index)
            kept.append(Prim(out, prim.op, args, prim.size, dtype, *about))
    prims = tuple(reversed(kept))
    wanted = demand(prims)
    found = Unit(node, prims, wanted) if wanted is not None else None
    if found is not None and found.double:
        every = [r.value for p in prims for r in p.reads]
        bases = [value for value in every if isinstance(value, fx.Node) and value not in yielded]
        floats = {type_of(value).dtype for value in bases if type_of(value).dtype.is_floating_point}
        narrow = any(p.op in OPS and OPS[p.op].function not in WIDE for p in prims)  # exact to float32 only
        if not floats <= {torch.float64} or not bases or narrow or any(p.over != "point" for p in prims):
            return None
    return found


def _yielded(node: fx.Node, made: Sequence[Any]) -> dict[fx.Node, Inner] | None:
    """The graph's value -> what was made for it."""
    if info(node).type is not None:
        return {node: made[0]} if isinstance(made[0], Inner) else None
    found: dict[fx.Node, Inner] = {}
    for value in results(node):
        if value is not None:
            key = made[int(value.args[1])]  # type: ignore[arg-type]
            if not isinstance(key, Inner):
                return None
            found[value] = key
    return found
