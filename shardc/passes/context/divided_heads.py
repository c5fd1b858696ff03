"""How axes divide the heads of attention instead of its rows, and what of a call is written anew for it.

    heads of keys          8 heads over 4 ranks: 2 a rank, and the query heads that read them
    query heads of each    1 head of keys that 8 query heads read, over 4 ranks: 2 a rank, and all keys, gathered
    groups                 2 heads of keys that 4 query heads read each, over 4 ranks: of 4 groups of 2 query heads, and
                           as many heads of keys, each twice, a rank has one, so that it is sent no other keys

Query heads are divided as evenly as they can be, and then keys. Where heads do not divide, the last ranks have fewer:
of 6 over 4 the last one has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import Graph, info, results, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_heads import GROUP_HEADS, REPEAT_HEADS, SUM_HEADS, UNGROUP_HEADS
from shardc.ir.schema import given, schema_of
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.projection import project


class Heads(NamedTuple):
    """Which piece of a call's heads axes divide, or into how many groups the query heads of each head of keys are cut
    first. `queries`, `keys`: what a rank then has of those that it had; of keys that are gathered, all."""

    queries: float
    keys: float
    times: int = 1
    piece: int = -1

    @property
    def gathers(self) -> bool:
        return self.times == 1 and self.keys == 1.0


def divided(node: fx.Node, axes: Axes, mesh: Mesh) -> Heads | None:
    """The best way to divide the heads of a call; None where a rank has fewer heads than there are ranks."""
    args = given(node)
    q, k = type_of(args["q"]), type_of(args["k"])
    if q.ndim < 3:
        return None
    projection, size = project(node), mesh.size(axes)

    def pieces(operand: int, type: TensorType) -> dict[int, Atom]:
        before = sum(len(dim) for dim in type.dims[:-3])
        found = projection.operands[operand][before : before + len(type.dims[-3])]
        return dict(zip(found, type.dims[-3], strict=True))

    of_keys, of_queries = pieces(1, k), pieces(0, q)
    ways: list[Heads] = []
    for piece, atom in (of_keys | of_queries).items():
        count = atom.local(mesh)
        if piece not in projection.blocked and not isinstance(atom.size, Blocks) and count >= size:
            part = -(-count // size) / count
            ways.append(Heads(part, part if piece in of_keys else 1.0, piece=piece))
    inner = {piece: atom for piece, atom in of_queries.items() if piece not in of_keys}
    shared = math.prod(atom.size for atom in inner.values())
    regular = not any(atom.axes or piece in projection.blocked for piece, atom in inner.items())
    if regular and len(of_keys) <= 1 and all(map(_plain, of_keys.values())) and not _uneven(of_keys, mesh):
        count = math.prod(atom.local(mesh) for atom in of_keys.values())
        for times in range(2, shared + 1):
            if count * times >= size:
                held = -(-count * times // size)
                ways.append(Heads(held * -(-shared // times) / (count * shared), held / count, times))
    return min(ways, key=lambda way: (way.queries, way.keys, way.times), default=None)


def _plain(atom: Atom) -> bool:
    return not isinstance(atom.size, Blocks)


def _uneven(pieces: dict[int, Atom], mesh: Mesh) -> bool:
    return any(atom.uneven(mesh) for atom in pieces.values())


def wish(value: fx.Node, pieces: Sequence[int], piece: int, axes: Axes) -> None:
    """Let a result be wished to lie over axes by this piece, and by no other."""
    type = type_of(value)
    lies = [tuple(axis for axis in has if axis not in axes) for has in type.placement]
    update(value, type=type.place([(*has, *(axes if p == piece else ())) for p, has in zip(pieces, lies, strict=True)]))


QUERIES, KEYS, SUMS, MASKS = ("q", "g", "o", "dq"), ("k", "v", "dk", "dv"), ("lse",), ("mask", "dmask")


class Groups:
    """The heads of one call and of its backward in groups, `times` for each head of keys."""

    def __init__(self, graph: Graph, node: fx.Node, times: int) -> None:
        self.graph, self.times, args = graph, times, given(node)
        q, keys = type_of(args["q"]), type_of(args["k"])
        self.heads = q.shape[-3]
        self.each = self.heads // keys.shape[-3]
        self.after = -(-self.each // times)
        self.groups = Atom(keys.shape[-3] * times, tuple(axis for atom in keys.dims[-3] for axis in atom.axes))
        self._known: dict[fx.Node, fx.Node] = {}

    def write(self, call: fx.Node) -> None:
        """Let a call have its operands and results by group, and the readers of these as they were."""
        with self.graph.fx.inserting_before(call):
            call.args = tuple(self._operand(call, name, value) for name, value in given(call).items())
            call.kwargs = {}
        values = {i: value for i, value in enumerate(results(call)) if value is not None}
        names = [result.name for result in schema_of(call.target).returns]
        update(
            call, results=tuple(t and self._type(name, t) for name, t in zip(names, info(call).results, strict=True))
        )
        order = {node: i for i, node in enumerate(self.graph.fx.nodes)}
        for i, value in values.items():
            if self._type(names[i], type_of(value)) != type_of(value):
                with self.graph.fx.inserting_after(max(values.values(), key=order.__getitem__)):
                    self._result(call, names[i], value)

    def drop_unread(self) -> None:
        """Erase the results that the backward alone has read: it reads those by group."""
        for value in self._known:
            if value.target is UNGROUP_HEADS and not value.users:
                self.graph.priorities.pop(value, None)
                self.graph.fx.erase_node(value)

    def _type(self, name: str, type: TensorType) -> TensorType:
        """That of an operand or result of this name, by group."""
        dim = self._dim(name, type)
        if name in MASKS and (dim < 0 or type.shape[dim] != self.heads):
            return type
        of_group = (Atom(self.after),) if name not in KEYS and self.after > 1 else ()
        return replace(type, dims=(*type.dims[:dim], (self.groups, *of_group), *type.dims[dim + 1 :]))

    def _operand(self, call: fx.Node, name: str, value: Any) -> Any:
        if name not in (*QUERIES, *KEYS, *SUMS, *MASKS) or not isinstance(value, fx.Node):
            return value
        type = type_of(value)
        if value not in self._known and (after := self._type(name, type)) != type:
            if name in KEYS:
                target, args = REPEAT_HEADS, (value, self.times)
            else:
                target, args = GROUP_HEADS, (value, self._dim(name, type), self.each, self.times)
            label = f"{info(value).name}.groups"
            self._known[value] = self.graph.call(target, args, like=call, type=after, name=label)
        return self._known.get(value, value)

    @staticmethod
    def _dim(name: str, type: TensorType) -> int:
        return type.ndim - (2 if name in SUMS else 3)

    def _result(self, call: fx.Node, name: str, value: fx.Node) -> None:
        type, about, readers = type_of(value), info(value), list(value.users)
        if name in KEYS:
            target, args = SUM_HEADS, (value, self.times)
        else:
            target, args = UNGROUP_HEADS, (value, self._dim(name, type), self.each, self.times)
        back = self.graph.call(target, args, like=call, type=type, name=about.name)
        update(value, type=self._type(name, type), name=self.graph.unique(f"{about.name}.groups"))
        update(back, name=about.name)
        self._known[back] = value
        for reader in readers:
            reader.replace_input_with(value, back)
        for table in (self.graph.activations, self.graph.gradients):
            table.update({key: back for key, held in table.items() if held is value})
        if value in self.graph.seeds:
            self.graph.seeds[back] = self.graph.seeds.pop(value)
        if value in self.graph.priorities:
            self.graph.priorities[back] = self.graph.priorities.pop(value)
