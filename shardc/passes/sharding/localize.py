"""localize: rewrite arguments from global to per-rank, and mask padding where a reduction would see it.

Needs: every operand placed as its op demands (`insert_reshards`), collectives lowered.
Ensures: every call's arguments are local, the same for every rank; no reduction reads padding that is
not neutral to it. Types stay global with their placement.

Uneven shards are padded, and padding holds anything. It only matters where a split piece is reduced
away, so that is where `mask_pad` goes: sums see 0, maxima -inf; and where positions are looked up, which see 0,
so as to be positions. A forward walk keeps which values are known to have zero padding (inputs, slices, and what
linear ops make of them), and skips their masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import Graph, info, operands, replace_operands, results, type_of, update
from shardc.ir.index_operands import positions
from shardc.ir.ops import local
from shardc.ir.types import Atom, Axes, TensorType
from shardc.passes.base import Pass, split_of
from shardc.rules.attention_keys import ALWAYS_LOCAL
from shardc.rules.local import LocalCall
from shardc.rules.projection import Projection, project, result_types
from shardc.rules.registry import OpRule, bind_call, find_rule


def neutral(kind: str, dtype: torch.dtype, rule: OpRule) -> float:
    """What a reduction of this dtype does not notice."""
    if kind == "sum" and rule.padding == "zero":
        return 0.0
    if kind == "sum":
        kind = "min"
    if dtype.is_floating_point:
        return -math.inf if kind == "max" else math.inf
    if dtype == torch.bool:
        return float(kind == "min")
    limits = torch.iinfo(dtype)
    if kind == "max":
        return float(limits.min)
    # The largest integer that both a float64 and the dtype hold: 2**63 - 1 would round up out of range.
    return float(limits.max - 1023 if limits.bits == 64 else limits.max)


@dataclass(frozen=True)
class Localize(Pass):
    """Give each call the arguments that one rank runs it with."""

    def run(self, graph: Graph) -> Graph:
        walk = _Walk(graph)
        for value in graph.placeholders:
            type = type_of(value)
            # The runtime pads inputs with 0; copies of blocks that every rank has are no padding.
            walk.zero[value] = {i for i in type.uneven_atoms(graph.mesh) if not _copied(type, i)}
        for node in list(graph.calls()):
            walk.visit(node)
        return graph


@dataclass
class _Walk:
    graph: Graph
    zero: dict[fx.Node, set[int]] = field(default_factory=dict[fx.Node, set[int]])  # flat atoms whose padding is 0

    def visit(self, node: fx.Node) -> None:
        entry = find_rule(node.target)
        if entry is None:  # a collective, a slice, or an op that runs replicated
            self._carry(node)
            return
        projection = project(node)
        split = split_of(node, projection)
        if entry.localize is not None and split and info(node).type is None:
            _place_unused(node, projection, split)
        with self.graph.fx.inserting_before(node):
            self._mask(node, entry, projection, split)
            _rewrite(self.graph, node, entry, projection, split)
        self._follow(node, projection)

    def _mask(self, node: fx.Node, entry: OpRule, projection: Projection, split: dict[int, Axes]) -> None:
        """Neutralise the padding of every uneven piece that some result reduces away, and that of positions."""
        mesh = self.graph.mesh
        values = operands(node)
        for piece, axes in split.items() if entry.padding != "unread" else ():
            kind = projection.reduces.get(piece)
            if kind is None or not Atom(projection.sizes[piece], axes).surplus(mesh):
                continue
            pieces_of = zip(projection.results, results(node), strict=True)
            if all(piece in pieces for pieces, value in pieces_of if value is not None):
                continue
            for i, pieces in enumerate(projection.operands):
                if piece not in pieces:
                    continue
                atom = pieces.index(piece)
                if atom in type_of(values[i]).bound_atoms:
                    continue  # the rows of padding are in the tail
                fill = neutral(kind, type_of(values[i]).dtype, entry)
                if fill != 0 or atom not in self.zero.get(values[i], ()):
                    copies = kind == "sum"  # the largest of copies is the largest
                    values[i] = self._mask_pad(node, values[i], atom, fill, copies)
        indices = [p.value for p in positions(node)]
        for i, value in enumerate(operands(node) if indices else ()):
            if value in indices:
                for atom in type_of(value).uneven_atoms(mesh):
                    if atom not in self.zero.get(values[i], ()):
                        values[i] = self._mask_pad(node, values[i], atom, 0.0)
        if values != operands(node):
            replace_operands(node, values)

    def _mask_pad(self, node: fx.Node, value: fx.Node, atom: int, fill: float, copies: bool = False) -> fx.Node:
        type = type_of(value)
        mesh = self.graph.mesh
        held, size, axes = list(type.local_atoms(mesh)), type.atoms[atom].size, list(type.atoms[atom].axes)
        if isinstance(size, Blocks):
            counts, units, reverse = local.told(size)
            args = (value, held, atom, counts, units, axes, fill, copies, *((reverse,) if reverse else ()))
            return self.graph.call(local.mask_blocks, args, like=node, type=type)
        masked = self.graph.call(local.mask_pad, (value, held, atom, size, axes, fill), like=node, type=type)
        self.zero[masked] = self.zero.get(value, set()) | ({atom} if fill == 0 else set())
        return masked

    def _carry(self, node: fx.Node) -> None:
        """Collectives and slices fill padding that they create with 0, and keep the padding of their operand."""
        mesh = self.graph.mesh
        sources = operands(node)
        for value in results(node):
            if value is None:
                continue
            uneven = [i for i in type_of(value).uneven_atoms(mesh) if not _copied(type_of(value), i)]
            if len(sources) == 1 and len(type_of(sources[0]).atoms) == len(type_of(value).atoms):
                nonzero = set(type_of(sources[0]).uneven_atoms(mesh)) - self.zero.get(sources[0], set())
                self.zero[value] = {i for i in uneven if i not in nonzero}
            else:
                self.zero[value] = set()

    def _follow(self, node: fx.Node, projection: Projection) -> None:
        """Padding of a result is 0 along a piece if that of all operands having it is, and the op is linear in them."""
        sources = operands(node)
        linear = range(len(sources)) if projection.linear == "joint" else projection.linear
        for value, pieces in zip(results(node), projection.results, strict=True):
            if value is None:
                continue
            self.zero[value] = set()
            for atom in type_of(value).uneven_atoms(self.graph.mesh):
                if _copied(type_of(value), atom) or pieces[atom] in projection.tied:
                    continue
                having = [i for i, operand_pieces in enumerate(projection.operands) if pieces[atom] in operand_pieces]
                if not having or not set(having) <= set(linear):
                    continue
                if projection.linear == "joint" and len(having) < len(sources):
                    continue  # a broadcast operand writes into the padding
                if all(projection.operands[i].index(pieces[atom]) in self.zero.get(sources[i], ()) for i in having):
                    self.zero[value].add(atom)


def _copied(type: TensorType, atom: int) -> bool:
    size = type.atoms[atom].size
    return isinstance(size, Blocks) and size.copied


def _place_unused(node: fx.Node, projection: Projection, split: dict[int, Axes]) -> None:
    """Say how results lie that nothing uses: the call's arguments are local, and are compared with all results."""
    declared = list(info(node).results)
    positions = [i for i, type in enumerate(declared) if type is not None]
    for k, (i, value) in enumerate(zip(positions, results(node), strict=True)):
        type = declared[i]
        if value is None and type is not None:
            placement = [split.get(piece, ()) for piece in projection.results[k]]
            declared[i] = type.place(placement, projection.partial(split, k))
    update(node, results=tuple(declared))


def _rewrite(graph: Graph, node: fx.Node, entry: OpRule, projection: Projection, split: dict[int, Axes]) -> None:
    if entry.localize is not None and (split or node.target in ALWAYS_LOCAL):
        call = LocalCall(
            graph,
            node,
            bind_call(node.target, node.args, dict(node.kwargs), lambda _, v: v),
            tuple(type_of(v) for v in operands(node)),
            tuple(result_types(node)),
            projection,
            split,
        )
        target, args, kwargs = entry.localize(call)
        node.target, node.args, node.kwargs = target, tuple(args), dict(kwargs)
    elif entry.shape_arg and (split or result_types(node)[0].room):
        shape = list(result_types(node)[0].local_shape(graph.mesh))
        _set_argument(node, entry.shape_arg, shape)


def _set_argument(node: fx.Node, name: str, value: Any) -> None:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    if position < len(node.args):
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
