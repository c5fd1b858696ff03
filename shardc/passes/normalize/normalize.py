"""normalize: rewrite a traced graph into few core ops, none of which depends on a global extent.

    mean(x, d)          ->  sum(x, d) / N           a shard's part is a pending sum
    addmm(b, x, w)      ->  mm(x, w) + b            the bias is added once
    cross entropy       ->  amax, exp, sum, one-hot  the vocabulary may be sharded
    batch norm          ->  sums / N                 statistics of the whole batch
    split(x, [n, 0])[1] ->  full([..., 0], 0)        what has no elements is of no input; `cat` goes without it

Needs: types with one atom a dim, no placements.
Ensures: `only_core_ops`: no op of `REMOVED` is left. Every value is used or an input; identical pure calls
of one phase are one; `constant` marks what is computed from no input. A value keeps its name where it
survives, and is equal up to rounding.

One forward walk: each call is stripped of its device, looked up in the table of decompositions, and then among
the calls seen so far. Calls of different phases are not merged, which would undo activation checkpointing, except
constants, of which one will do; random ops not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.ir.graph import Graph, info, op_name, operands, producer, type_of, update
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions import DECOMPOSITIONS, REMOVED, Emit
from shardc.passes.normalize.decompositions.table import is_constant, is_random
from shardc.rules.registry import bind_call

aten = torch.ops.aten

# A graph is compiled for no device in particular, and layout in memory is not its concern.
PLACEMENT_ARGUMENTS = ("device", "layout", "pin_memory", "non_blocking", "memory_format")


def only_core_ops(graph: Graph) -> list[str]:
    """No op that normalize removes is left."""
    left = [n for n in graph.calls() if n.target in REMOVED]
    return [f"{info(n).name} is a {op_name(n.target)}, which normalize removes" for n in left]


def _is_nothing(value: fx.Node) -> bool:
    return value.target is aten.full.default and 0 in type_of(value).shape


def _yields_nothing(node: fx.Node) -> bool:
    """Whether a value has no elements, and not because an input has none: that is a batch without samples."""
    if info(node).type is None or 0 not in type_of(node).shape or _is_nothing(node) or is_random(node.target):
        return False
    return all(_is_nothing(value) for value in operands(producer(node)[0]) if 0 in type_of(value).shape)


@dataclass(frozen=True)
class Normalize(Pass):
    """Rewrite every call into core ops, merge identical ones, mark constants, drop what is dead."""

    def run(self, graph: Graph) -> Graph:
        graph.erase_dead()
        walk = _Walk(graph, Emit(graph, graph.output_node))
        for node in list(graph.fx.nodes):
            if node.op == "call_function" and node.users:
                walk.visit(node)
        graph.erase_dead()
        alive = set(graph.fx.nodes)
        moved = {name: walk.survivor(node) for name, node in graph.activations.items()}
        graph.activations = {name: node for name, node in moved.items() if node in alive}
        return graph


@dataclass
class _Walk:
    graph: Graph
    emit: Emit
    moved: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])  # replaced -> its replacement

    def survivor(self, node: fx.Node) -> fx.Node:
        while node in self.moved:
            node = self.moved[node]
        return node

    def visit(self, node: fx.Node) -> None:
        emit = self.emit
        emit.at = node
        if _yields_nothing(node):
            with self.graph.fx.inserting_before(node):
                self._replace(node, emit.full(type_of(node).shape, 0, type_of(node).dtype))
            return
        if node.target is aten.cat.default and self._join_without_nothing(node):
            return
        if not node.kwargs.keys().isdisjoint(PLACEMENT_ARGUMENTS):
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in PLACEMENT_ARGUMENTS}
        function = DECOMPOSITIONS.get(node.target)
        if function is not None:
            emit.new_nodes.clear()
            arguments = bind_call(node.target, node.args, dict(node.kwargs), lambda _, value: value)
            with self.graph.fx.inserting_before(node):
                result = function(emit, *arguments.values())
            if isinstance(result, fx.Node):
                self._replace(node, result)
                return
            if isinstance(result, tuple):
                self._replace_results(node, result)
                if not node.users:
                    return
        self._merge(node)

    def _join_without_nothing(self, node: fx.Node) -> bool:
        """Leave out what a `cat` joins that has no elements. Whether one operand was left, which it is then."""
        joined: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        left = [value for value in joined if not _is_nothing(value)]
        if len(left) == 1 < len(joined):
            self._replace(node, left[0])
            return True
        if left:
            node.args = (left, *node.args[1:])
        return False

    def _merge(self, node: fx.Node) -> None:
        """Use an identical earlier call instead, if there is one."""
        if is_random(node.target):
            return
        constant = is_constant(node.target, node.args, node.kwargs)
        key = self.emit.key(node.target, node.args, node.kwargs, constant)
        earlier = self.emit.seen.setdefault(key, node)
        if earlier is not node:
            self._replace(node, earlier)
        elif constant:
            update(node, constant=True)

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        if new in self.emit.new_nodes:
            update(new, name=info(node).name)
        if info(node).type is not None:
            old, new_type = type_of(node), type_of(new)
            assert (old.dtype, old.shape) == (new_type.dtype, new_type.shape), (
                f"{info(node).name}: {old} became {new_type}"
            )
        node.replace_all_uses_with(new)
        self.moved[node] = new

    def _replace_results(self, node: fx.Node, new: tuple[fx.Node | None, ...]) -> None:
        """A result for which there is None stays as it is."""
        for user in list(node.users):
            replacement = new[int(user.args[1])]  # type: ignore[arg-type]
            if replacement is not None:
                self._replace(user, replacement)
                self.graph.fx.erase_node(user)
