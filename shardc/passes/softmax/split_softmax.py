"""split_softmax: a softmax over a sharded dim in pieces that shards can run, where that sends less than gathering it.

    y = _softmax(x, d)                       m = amax(x, d);  e = exp(x - m);  y = e / sum(e, d)
    dx = _softmax_backward_data(g, y, d)     dx = (g - sum(g * y, d)) * y

A call of `_softmax` needs its dim whole, and so its rule says; but it need not stay one call. So `propagate` carries
placements through that dim (`opened`), and here each call that has it sharded before and behind is taken apart or not:

    whole        each rank is sent the other shards of what is sharded: (k-1) parts of x, or of g
    in pieces    the maximum and the sum of each row and shard (`online_softmax`: one all-gather of both); backward one
                 all-reduced number a row; and the result, if somebody reads it who needs the dim whole: a topk

    8192 rows, 32000 columns over 8 ranks, bfloat16: 459 MB a rank, or 459 KB
    8192 rows, 64 experts over 8 ranks, then a topk: 7 shards of x, or statistics and 7 shards of y: whole

Needs the wishes of `propagate`. Ensures the same values but for rounding; the new calls wish what the old one did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import Graph, info, operands, results, type_of, update
from shardc.ir.types import Axes, TensorType
from shardc.passes.base import Pass
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule

aten = torch.ops.aten
FORWARD, BACKWARD = aten._softmax.default, aten._softmax_backward_data.default
PIECES = (aten._to_copy.default, aten.amax.default, aten.sub.Tensor, aten.exp.default, aten.sum.dim_IntList)
STATISTICS = 2  # numbers a row and shard
NEAR = 64  # values behind a softmax that are looked at for a reader that needs the dim whole


def opened(node: fx.Node, projection: Projection) -> dict[int, int]:
    """The pieces that a call keeps whole, and what it can be taken apart into does not: into how many shards, at most,
    it pays to cut them."""
    if node.target not in (FORWARD, BACKWARD) or not type_of(node).shape:
        return {}
    forward = node if node.target is FORWARD else operands(node)[1]
    type, dim = type_of(operands(forward)[0] if forward.target is FORWARD else forward), _dim(node)
    if forward.target is FORWARD and (_dim(forward) != dim or _wanted_whole(forward)):
        return {}
    most = (type.shape[dim] * type.dtype.itemsize - 1) // (STATISTICS * max(4, type.dtype.itemsize))
    every = (*projection.operands, *projection.results)
    pieces = (projection.operands[0][atom] for atom in _atoms(type_of(operands(node)[0]), node))
    whole = (p for p in pieces if not isinstance(projection.sizes[p], Blocks))
    return {p: most for p in whole if most > 1 and all(p in tensor for tensor in every)}


def _dim(node: fx.Node) -> int:
    return int(node.args[1 if node.target is FORWARD else 2]) % type_of(node).ndim  # type: ignore[arg-type]


def _atoms(type: TensorType, node: fx.Node) -> range:
    """Those of the softmax's dim, among all."""
    dim = _dim(node)
    first = sum(map(len, type.dims[:dim]))
    return range(first, first + len(type.dims[dim]))


@dataclass(frozen=True)
class SplitSoftmax(Pass):
    """Take apart what then sends less."""

    def run(self, graph: Graph) -> Graph:
        todo = [n for n in graph.calls() if n.target in (FORWARD, BACKWARD) and _axes(n) and _pays(graph, n)]
        for node in todo:
            with graph.fx.inserting_before(node):
                _Pieces(graph, node).put()
        if todo:
            _merge(graph)
        return graph


def _merge(graph: Graph) -> None:
    """A log-softmax of the same values has the same pieces: they are made once in each phase."""
    first_by_key: dict[object, fx.Node] = {}
    for node in list(graph.calls()):
        if node.target in PIECES:
            first = first_by_key.setdefault((node.target, str(node.args), str(node.kwargs), info(node).phase), node)
            if first is not node and type_of(first) == type_of(node) and node not in graph.seeds:
                replaced(graph, node, first)


def replaced(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    """The new value in the place of the old one."""
    old.replace_all_uses_with(new)
    for table in (graph.activations, graph.gradients):
        table.update({name: new for name, value in table.items() if value is old})
    graph.fx.erase_node(old)


def _axes(node: fx.Node) -> Axes:
    """What shards the dim, in all tensors of the call as they wish it."""
    if info(node).constant or not type_of(node).shape:
        return ()
    wishes = [type_of(v) for v in (*operands(node), node)]
    every = {tuple(axis for i in _atoms(wish, node) for axis in wish.atoms[i].axes) for wish in wishes}
    return every.pop() if len(every) == 1 else ()


def _pays(graph: Graph, node: fx.Node) -> bool:
    """Does a rank send less with the call in pieces?"""
    mesh, k = graph.mesh, graph.mesh.size(_axes(node))
    first = operands(node)[0]  # x or g; y is as forward left it
    gather_bytes = (k - 1) * type_of(first).local_bytes(mesh)
    shape = type_of(node).local_shape(mesh)
    dim = _dim(node)
    rows = math.prod((*shape[:dim], *shape[dim + 1 :])) * max(4, type_of(first).dtype.itemsize)
    pieces = STATISTICS * (k - 1) * rows if node.target is FORWARD else 2 * (k - 1) * rows // k
    if _wanted_whole(node):
        pieces += (k - 1) * type_of(node).local_bytes(mesh)
    return pieces < gather_bytes


def _wanted_whole(node: fx.Node) -> bool:
    """Does a call behind the softmax, past views and pointwise ops, need the dim whole?"""
    todo, visited = [(node, i) for i in _atoms(type_of(node), node)], set[fx.Node]()
    while todo and len(visited) < NEAR:
        value, atom = todo.pop()
        for user in value.users:
            rule = find_rule(user.target)
            if rule is None or user in visited or user.target in (FORWARD, BACKWARD):
                continue
            visited.add(user)
            projection = project(user)
            operand_index = operands(user).index(value)
            piece = projection.operands[operand_index][atom]
            if piece in projection.blocked:
                return True
            for result, pieces in zip(results(user), projection.results, strict=True):
                if result is not None and rule.kind in ("pointwise", "view") and piece in pieces:
                    todo.append((result, pieces.index(piece)))
    return False


class _Pieces:
    """The calls that a softmax becomes, each with the wishes that it had itself."""

    def __init__(self, graph: Graph, node: fx.Node) -> None:
        self.graph, self.node, self.dim = graph, node, _dim(node)
        self.wish = type_of(node)
        self.dim_atoms = _atoms(self.wish, node)
        dtype = self.wish.dtype
        self.wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        wide = self.wish.with_dtype(self.wide)
        self.full = wide
        dims = tuple(() if d == self.dim else dim_atoms for d, dim_atoms in enumerate(wide.dims))
        self.row = TensorType(self.wide, dims, ragged=wide.ragged, room=wide.room)

    def put(self) -> None:
        node = self.node
        replacement = self.forward() if node.target is FORWARD else self.backward()
        if self.wide != self.wish.dtype:
            replacement = self.call(aten._to_copy.default, replacement, type=self.wish, dtype=self.wish.dtype)
        name = info(node).name
        if node in self.graph.seeds:
            self.graph.seeds[replacement] = self.graph.seeds.pop(node)
        replaced(self.graph, node, replacement)
        update(replacement, name=name)

    def forward(self) -> fx.Node:
        x = self.widened(self.node.args[0])
        top = self.call(aten.amax.default, x, [self.dim], True, type=self.row)
        exp = self.call(aten.exp.default, self.call(aten.sub.Tensor, x, top))
        return self.call(aten.div.Tensor, exp, self.call(aten.sum.dim_IntList, exp, [self.dim], True, type=self.row))

    def backward(self) -> fx.Node:
        g, y = (self.widened(arg) for arg in self.node.args[:2])
        product = self.call(aten.mul.Tensor, g, y)
        inner = self.call(aten.sum.dim_IntList, product, [self.dim], True, type=self.row)
        return self.call(aten.mul.Tensor, self.call(aten.sub.Tensor, g, inner), y)

    def widened(self, x: Any) -> fx.Node:
        return x if type_of(x).dtype == self.wide else self.call(aten._to_copy.default, x, dtype=self.wide)

    def call(self, target: Any, *args: Any, type: TensorType | None = None, **kwargs: Any) -> fx.Node:
        result = self.graph.call(target, args, kwargs, like=self.node, type=type or self.full)
        priorities = self.graph.priorities.get(self.node, {})
        if type is self.row:  # one dim has no atoms
            first, atom_count = self.dim_atoms.start, len(self.dim_atoms)
            priorities = {
                (i if i < first else i - atom_count, a): p
                for (i, a), p in priorities.items()
                if i not in self.dim_atoms
            }
        self.graph.priorities[result] = dict(priorities)
        return result
