"""The sum of the rows of a concatenation is that of its parts' sums.

    %c = cat([%q, %k, %v], dim=-1)             %c = cat([%q, %k, %v], dim=-1)
    %s = sum(%c, [0, 1])               ->      %a, %b, %d = sum(%q, [0, 1]), sum(%k, [0, 1]), sum(%v, [0, 1])
                                               %s = cat([%a, %b, %d])

A kernel that stores a concatenation part by part has no value of the whole: its sum would read it from memory. The sums
of the parts are of values that the kernel has. Backward of a fused weight with a bias, as that of q, k and v, is so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, op_name, type_of, update
from shardc.ir.types import Axes, TensorType
from shardc.passes.fusion.analysis.view_analysis import VIEWS

aten = torch.ops.aten
SUM, CAT, CAST = aten.sum.dim_IntList, aten.cat.default, aten._to_copy.default
HALVES = 2  # are selected from, element by element: such a concatenation is a value of its kernel


@dataclass(frozen=True)
class PartSum:
    """A sum over all dims but the last of the `parts` that are concatenated along the last. `result` is the sum, or a
    view of it, or a cast of that, if nothing else reads it: one number a column."""

    node: fx.Node
    cat: fx.Node
    parts: tuple[fx.Node, ...]
    cast: fx.Node | None
    result: fx.Node


def part_sums(graph: Graph, exclude: Collection[str] = ()) -> list[PartSum]:
    """The sums that `split_part_sums` rewrites."""
    found = [_part_sum(graph, node) for node in graph.calls_of(SUM)]
    calls = [each for each in found if each is not None]
    return [each for each in calls if not any(_names(node) & {*exclude} for node in (each.node, each.cat))]


def split_part_sums(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Rewrite them, in place."""
    for each in part_sums(graph, exclude):
        _split(graph, each)


def _names(node: fx.Node) -> set[str]:
    return {op_name(node.target), info(node).name}


def _part_sum(graph: Graph, node: fx.Node) -> PartSum | None:
    summed = node.args[0]
    assert isinstance(summed, fx.Node)
    rank = type_of(summed).ndim
    dims: list[int] = [dim % rank for dim in node.args[1] or ()]  # type: ignore[union-attr]
    source = summed
    while source.target in VIEWS and type_of(source).dims[-1:] == type_of(source.args[0]).dims[-1:]:  # type: ignore[arg-type]
        source = source.args[0]
        assert isinstance(source, fx.Node)
    if source.target is not CAT or sorted(dims) != list(range(rank - 1)):
        return None
    tensors, dim = source.args[0], source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
    parts: tuple[fx.Node, ...] = tuple(tensors)  # type: ignore[arg-type]
    types, last = [type_of(part) for part in parts], type_of(source).ndim - 1
    alike = len(parts) > HALVES and last > 0 and len(set(types)) == 1
    if not alike or dim % (last + 1) != last or type_of(source).partial:  # type: ignore[operator]
        return None
    # Views of the whole have its elements, each in its column.
    shapes = [type_of(value).local_shape(graph.mesh) for value in (source, summed)]
    if len({(math.prod(shape), shape[-1]) for shape in shapes}) > 1:
        return None
    result, cast = node, None
    if type_of(node).ndim > 1:  # its dims are kept
        (result,) = node.users if len(node.users) == 1 else (node,)
        if result.target not in VIEWS or type_of(result).dims != type_of(node).dims[-1:]:
            return None
    if len(result.users) == 1 and next(iter(result.users)).target is CAST:
        (cast,) = result.users
    return PartSum(node, source, parts, cast, cast or result)


def _split(graph: Graph, found: PartSum) -> None:
    node, part, whole = found.node, type_of(found.parts[0]), type_of(found.result)
    column = replace(TensorType(type_of(node).dtype, part.dims[-1:]), partial=type_of(node).partial)
    given = {"dtype": node.kwargs["dtype"]} if "dtype" in node.kwargs else {}
    rows = list(range(part.ndim - 1))
    with graph.fx.inserting_before(found.result):
        split = _split_dims("self", part)
        sums = [graph.call(SUM, (x, rows), given, like=node, type=column, assignment=split) for x in found.parts]
        if found.cast is not None:
            wide, split = column.with_dtype(whole.dtype), _split_dims("~", column)
            about: dict[str, Any] = {"assignment": split, "passes": info(found.cast).passes}
            sums = [graph.call(CAST, (x,), found.cast.kwargs, like=found.cast, type=wide, **about) for x in sums]
        joined = graph.call(CAT, (sums, 0), like=node, type=whole, assignment=_split_dims("tensors0_", column))
    found.result.replace_all_uses_with(joined)
    for table in (graph.activations, graph.gradients):
        table.update({name: joined for name, value in table.items() if value is found.result})
    name = info(found.result).name
    update(found.result, name=graph.unique(f"{name}.whole"))
    update(joined, name=name)
    graph.erase_dead()


def _split_dims(prefix: str, type: TensorType) -> tuple[tuple[str, Axes], ...]:
    """What a call splits that has a factor for each dim of an operand, or for each atom of one."""
    named = [(f"{prefix}{d}", dim) for d, dim in enumerate(type.dims)]
    atoms = [(name if len(dim) == 1 else f"{name}.{a}", atom.axes) for name, dim in named for a, atom in enumerate(dim)]
    return tuple((name, axes) for name, axes in atoms if axes)
