"""combine: say the same communication in fewer collectives.

Needs: lowered reshards. Ensures: no two equal collectives of one value in one phase; reductions over
several axes of one value are one collective over their product; a reduced value of which only parts are
read is reduce-scattered; parts of a constant fill are made as parts.

    x -> all_reduce(dp) -> all_reduce(tp)                     all_reduce(dp.tp)
    x -> all_reduce(tp) -> slice(tp) by every reader          reduce_scatter(tp)
    w -> all_gather(tp:1) -> all_gather(tp:0), same atom      all_gather(tp)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import Graph, info, type_of, update
from shardc.ir.ops import collectives, local
from shardc.ir.schema import given
from shardc.passes.base import Pass
from shardc.passes.sharding.reshard_steps import even

_GATHERS = {collectives.all_gather, collectives.gather_blocks, collectives.all_to_all, collectives.permute_ranks}
_SLICES = (local.shard_slice, local.slice_blocks)
_MOVES = {*_GATHERS, collectives.all_reduce, collectives.reduce_scatter, *_SLICES}


@dataclass(frozen=True)
class Combine(Pass):
    """Merge equal and adjacent collectives."""

    def run(self, graph: Graph) -> Graph:
        _merge_equal(graph)
        for node in list(graph.calls()):
            if node.target is collectives.all_reduce:
                _reduce_scatter(graph, node)
        for node in list(graph.calls()):
            if node.target is collectives.all_reduce:
                _merge_reductions(graph, node)
            elif node.target is collectives.all_gather:
                _merge_gathers(graph, node)
            elif node.target in _SLICES:
                _slice_of_fill(graph, node)
        _merge_equal(graph)
        graph.erase_dead()
        return graph


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _merge_equal(graph: Graph) -> None:
    """One collective for equal ones on one value; gathers are kept apart by phase, so that backward gathers anew."""
    first_by_key: dict[Any, fx.Node] = {}
    for node in list(graph.calls()):
        if node.target not in _MOVES:
            continue
        phase = info(node).phase if node.target in _GATHERS else ""
        key = (node.target, node.args[0], repr(node.args[1:]), type_of(node), phase)
        first = first_by_key.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.activations = {k: first if v is node else v for k, v in graph.activations.items()}
            graph.fx.erase_node(node)


def _merge_reductions(graph: Graph, node: fx.Node) -> None:
    """all_reduce of an all_reduce that nothing else reads."""
    first = _source(node)
    if first.target is not collectives.all_reduce or len(first.users) != 1 or first.args[1] != node.args[1]:
        return
    axes = sorted({*first.args[2], *node.args[2]}, key=graph.mesh.names.index)  # type: ignore[misc]
    node.args = (first.args[0], node.args[1], axes)
    graph.fx.erase_node(first)


def _merge_gathers(graph: Graph, node: fx.Node) -> None:
    """all_gather of an all_gather of the same, evenly divided atom: the later one gathers the major axis."""
    first = _source(node)
    if first.target is not collectives.all_gather or len(first.users) != 1 or first.args[3] != node.args[3]:
        return
    atom = node.args[3]
    assert isinstance(atom, int)
    source_type = type_of(_source(first))
    if not even(source_type, atom, source_type.atoms[atom].axes, graph.mesh):
        return
    axes = [*node.args[1], *first.args[1]]  # type: ignore[misc]
    node.args = (first.args[0], axes, first.args[2], atom, node.args[4], node.args[5])
    graph.fx.erase_node(first)


def _reduce_scatter(graph: Graph, node: fx.Node) -> None:
    """all_reduce of which every reader slices the same part."""
    readers = list(node.users)
    if not readers or any(r.target not in _SLICES or r.args[1] != node.args[2] for r in readers):
        return
    if len({(r.args[3], type_of(r)) for r in readers}) != 1:
        return
    first = readers[0]
    size = type_of(first).atoms[int(first.args[3])].size  # type: ignore[arg-type]
    if isinstance(size, Blocks) and size.copied:
        return
    told = given(first)
    blocks = (told["counts"], told["units"], told.get("reverse")) if isinstance(size, Blocks) else ()
    with graph.fx.inserting_before(node):
        scattered = graph.call(
            collectives.reduce_scatter,
            (node.args[0], node.args[1], *(told[name] for name in ("axes", "atoms", "pos", "shape")), *blocks),
            like=node,
            type=type_of(first),
            name=info(node).name.replace(".all_reduce", ".reduce_scatter"),
            origin=info(node).origin,
        )
    for reader in readers:
        reader.replace_all_uses_with(scattered)
        graph.fx.erase_node(reader)
    graph.fx.erase_node(node)


def _slice_of_fill(graph: Graph, node: fx.Node) -> None:
    """A part of a constant fill is a smaller fill: the whole is never made."""
    source = _source(node)
    if source.target is not torch.ops.aten.full.default or type_of(source).partial:
        return
    with graph.fx.inserting_before(node):
        part = graph.call(
            source.target,
            (list(type_of(node).local_shape(graph.mesh)), *source.args[1:]),
            dict(source.kwargs),
            like=source,
            type=type_of(node),
            name=info(source).name,
        )
    update(part, phase=info(node).phase)
    node.replace_all_uses_with(part)
    graph.fx.erase_node(node)
