"""insert_reshards: make every operand exactly what its op demands.

Needs: assignments and settled partials. Ensures: each operand's type is what the rule derives from the
assignment; outputs are placed as their parameter, buffer or annotation is, and never pending.

A value may be needed in several placements; each is made once and kept. The next need starts from the
cheapest copy there is. What a gather made in forward is not kept for backward: it is gathered again there
(Korthikanti et al. 2022, section 4.2.2), since keeping it would undo the memory that sharding saved. What attention
reads by heads, that lay by rows, is kept: it is as large, and backward reads it so again. A
reshard of a view moves to the root of the chain of views, so that a weight and its transpose are gathered once. A part
of a constant that is larger than what it is computed from, as a mask of positions is, is computed by itself.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

from torch import fx

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Port, Seed, info, operands, replace_operands, results, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops import collectives
from shardc.ir.ops.attention_rows import SDPA_HEADS, SDPA_RING
from shardc.ir.provenance import Derivation
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Pass, split_of
from shardc.passes.sharding.atomize import UPDATES
from shardc.passes.sharding.casts import narrow_copies
from shardc.passes.sharding.dispatch import exchanged, is_exchange
from shardc.passes.sharding.reshard_steps import Step, plan
from shardc.passes.sharding.settle_partials import linear_in
from shardc.rules.projection import project
from shardc.rules.registry import find_rule

_GATHERS = {"all_gather", "all_to_all", "permute"}


@dataclass(frozen=True)
class InsertReshards(Pass):
    """Insert `reshard` where a value is not as its consumer needs it.

    `keep_gathered` names parameters that stay gathered for backward: memory for communication.
    """

    keep_gathered: frozenset[str] = frozenset()
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        gathered_inputs = [node for name, node in graph.input_nodes().items() if name in self.keep_gathered]
        copies = _Copies(graph, {v for node in gathered_inputs for v in (node, *narrow_copies(node))}, self.hardware)
        copies.turned = _turned(graph)
        for node in list(graph.fx.nodes):
            if node.op == "placeholder":
                copies.born(node)
            elif node.op == "output":
                outputs: list[fx.Node] = []
                for v, output_type in zip(graph.output_values, output_types(graph), strict=True):
                    with graph.fx.inserting_before(copies.earliest(v, node)):
                        outputs.append(copies.get(v, output_type, "out"))
                node.args = (tuple(outputs),)
            elif node.target is operator.getitem:
                continue
            else:
                values: list[fx.Node] = []
                for v, need in zip(operands(node), operand_types(node), strict=True):
                    # The optimizer's reductions belong where backward makes the gradients: there they can overlap.
                    early = info(node).phase == "opt" and info(v).phase == "bwd"
                    with graph.fx.inserting_before(copies.earliest(v, node) if early else node):
                        values.append(copies.get(v, need, info(v if early else node).phase))
                replace_operands(node, values)
                for v in results(node):
                    if v is not None:
                        copies.born(v)
        graph.activations = {name: copies.current(v) for name, v in graph.activations.items()}
        graph.erase_dead()
        return graph


def operand_types(node: fx.Node) -> list[TensorType]:
    """What a call demands of its operands: atoms over their pieces' axes, pending where the op passes sums on."""
    sources = operands(node)
    types = [type_of(v) for v in sources]
    if find_rule(node.target) is None:
        return [t.replicated() for t in types]
    if all(info(v).constant for v in sources):
        return types
    projection = project(node)
    split = split_of(node, projection)
    through = {
        axis: linear_in(sources, [(axis, "sum") in type.partial for type in types], projection)
        if projection.linear != "joint"
        else range(len(sources))
        for axis in info(node).passes
    }
    needs: list[TensorType] = []
    for k, type in enumerate(types):
        pending = [(axis, "sum") for axis, through_k in through.items() if k in through_k]
        needs.append(type.place([split.get(p, ()) for p in projection.operands[k]], pending))
    return needs


def output_types(graph: Graph) -> list[TensorType]:
    """Gradients are placed as their parameters, new buffers as the old, annotated outputs so, the rest as it is."""
    twins = graph.input_nodes()

    def asked(port: Port, value: fx.Node) -> TensorType:
        type = type_of(value)
        if port.role in UPDATES and port.name in twins:  # a stage's graph need not read what it updates
            return type.place(type_of(twins[port.name]).placement)
        if port.role == "loss":
            return type.replicated()
        if port.role in ("value", "sum"):  # of a stage's graph: another graph resolves what is pending
            return type
        if value in graph.seeds:
            return as_annotated(type, graph.seeds[value])
        return type.place(type.placement)

    return [asked(port, value) for port, value in zip(graph.outputs, graph.output_values, strict=True)]


def as_annotated(type: TensorType, seed: Seed) -> TensorType:
    """The dims that an annotation fixes as it says; the open ones as they are, less the axes that those take."""
    fixed_axes = {axis for axes, fixed in zip(seed.placement, seed.fixed, strict=True) if fixed for axis in axes}
    return type.place(
        [
            want if fixed else tuple(axis for axis in has if axis not in fixed_axes)
            for want, fixed, has in zip(seed.placement, seed.fixed, type.placement, strict=True)
        ]
    )


def find_view(value: fx.Node) -> bool:
    """The value is a view of another, so that resharding it may start at another copy."""
    entry = find_rule(value.target) if value.op == "call_function" else None
    return entry is not None and entry.kind == "view"


def _bound_rows(value: fx.Node, seed: Seed) -> ShardcError:
    placed = replace(type_of(value), partial=())
    return error(
        "SC207",
        f"the rows of {seed.cause.tensor} are in the order of their experts, and no axis can be put on them or taken",
        location=seed.cause.location or None,
        tensor=f"{info(value).name}: {placed}",
        cause=str(seed.cause),
        hint="annotate dim 0 of the experts' parameters, or the module around the experts, whose tokens lie as before",
    )


def _turned(graph: Graph) -> set[fx.Node]:
    """What attention reads whose heads are divided for its time, and what that is a view of."""
    turned: set[fx.Node] = set()
    for node in graph.calls():
        if node.target not in (SDPA_HEADS, SDPA_RING) or not given(node)["heads"]:
            continue
        for value in operands(node):
            turned.add(value)
            while find_view(value) and len(operands(value)) == 1:
                (value,) = operands(value)
                turned.add(value)
    return turned


def _bytes(value: fx.Node) -> int:
    return math.prod(type_of(value).shape) * type_of(value).dtype.itemsize


class _Copies:
    """The placements in which each value is available."""

    def __init__(self, graph: Graph, keep: set[fx.Node], hardware: Hardware) -> None:
        self.graph, self.hardware = graph, hardware
        self.keep = keep
        self.turned: set[fx.Node] = set()  # values that attention reads by heads
        self.have: dict[fx.Node, list[tuple[TensorType, fx.Node, str | None]]] = {}  # phase None: kept for all phases
        self.origin: dict[fx.Node, fx.Node] = {}
        self.spreading: dict[fx.Node, bool] = {}  # see `_spreads`

    def born(self, value: fx.Node) -> None:
        """A value as its op produced it; an annotated activation is brought to its annotation at once."""
        self.have[value] = [(type_of(value), value, None)]
        seed = self.graph.seeds.get(value)
        if seed is None or value.op == "placeholder":
            return
        type = type_of(value)
        target = as_annotated(type, seed)
        if target != type:
            if any(target.placement[i] != type.placement[i] for i in type.bound_atoms):
                raise _bound_rows(value, seed)
            following = value.next
            while following.target is operator.getitem:
                following = following.next
            with self.graph.fx.inserting_before(following):
                constrained = self._reshard(value, value, target, info(value).phase)
            self.have[value] = [(target, constrained, None)]

    def current(self, value: fx.Node) -> fx.Node:
        return self.have[value][0][1] if value in self.have else value

    def earliest(self, value: fx.Node, last: fx.Node) -> fx.Node:
        """Where to make an output: as soon as its value is there, so that a gradient's reduction can overlap."""
        if not self._untouched(value):
            return last
        following = self.current(value).next
        while following.target is operator.getitem:
            following = following.next
        return following

    def _untouched(self, value: fx.Node) -> bool:
        """Neither the value nor the base of its view has a copy yet: a copy could lie further down."""
        if len(self.have[value]) > 1 or value.op == "placeholder":
            return False
        if not find_view(value):
            return True
        root = self._root(operands(value)[0])
        return root is not None and self._untouched(root)

    def get(self, value: fx.Node, need: TensorType, phase: str) -> fx.Node:
        """The value in the placement `need`; inserts a reshard at the insertion point if none is available."""
        usable = [(t, n) for t, n, kept_phase in self.have[value] if kept_phase is None or kept_phase == phase]
        for type, node in usable:
            if type == need:
                return node
        usable = [(type, node) for type, node in usable if not is_exchange(type, need)]
        if not usable:  # rows that their experts' ranks get; sent once, and kept for backward
            return self._exchange(value, need, phase)
        best: tuple[float, list[Step], fx.Node] | None = None
        for type, node in usable:
            planned = plan(type, need, self.graph.mesh, self.hardware)
            if planned is not None and (best is None or planned[1] < best[0]):
                best = (planned[1], planned[0], node)
        assert best is not None, f"{info(value).name} cannot become {need}"
        cost, steps, source = best
        if cost > 0 or self._spreads(value):
            hoisted = self._at_view_root(value, need, phase) if cost > 0 else self._of_own_rows(value, need, phase)
            if hoisted is not None:
                self.have[value].append((need, hoisted, phase))
                return hoisted
        copy = self._reshard(value, source, need, phase)
        moved = {step.kind for step in steps} & _GATHERS
        kept = value in self.keep or (value in self.turned and moved == {"all_to_all"})
        kept_phase = phase if moved and not kept else None
        self.have[value].append((need, copy, kept_phase))
        return copy

    def _exchange(self, value: fx.Node, need: TensorType, phase: str) -> fx.Node:
        type, source, _ = self.have[value][0]
        after = exchanged(type, need)
        copy = self._reshard(value, source, after, phase)
        self.have[value].append((after, copy, None))
        return copy if after == need else self.get(value, need, phase)

    def _reshard(self, value: fx.Node, source: fx.Node, need: TensorType, phase: str) -> fx.Node:
        name = f"{info(value).name}.reshard"
        shown = info(value).phase if phase == "out" else phase
        origin = Derivation("moved", info(value).name)
        resharded = self.graph.call(
            collectives.reshard, (source,), like=value, type=need, name=name, phase=shown, origin=origin
        )
        self.origin[resharded] = value
        return resharded

    def _at_view_root(self, value: fx.Node, need: TensorType, phase: str) -> fx.Node | None:
        """Reshard the view's input instead and repeat the view, where the two have the same pieces."""
        entry = find_rule(value.target) if value.op == "call_function" else None
        if entry is None or entry.kind != "view" or len(operands(value)) != 1 or value in self.graph.seeds:
            return None
        projection = project(value)
        if set(projection.operands[0]) != set(projection.results[0]) or projection.blocked:
            return None
        of_piece = dict(zip(projection.results[0], need.placement, strict=True))
        source = operands(value)[0]
        root = self._root(source)
        if root is None:
            return None
        root_type = type_of(root).place([of_piece[p] for p in projection.operands[0]], need.partial)
        if not set(root_type.partial) <= set(type_of(root).partial):
            return None
        placed = self.get(root, root_type, phase)
        split = tuple((projection.names[p], axes) for p, axes in of_piece.items() if axes)
        shown = info(value).phase if phase == "out" else phase
        passes = tuple(a for a, _ in need.partial)
        repeated_view = self.graph.call(
            value.target,
            value.args,
            dict(value.kwargs),
            like=value,
            type=need,
            name=info(value).name,
            assignment=split,
            passes=passes,
            phase=shown,
        )
        replace_operands(repeated_view, [placed])
        self.origin[repeated_view] = value
        return repeated_view

    def _spreads(self, value: fx.Node) -> bool:
        """Is a constant larger than all that it is computed from, as a mask is than the positions that it compares?"""
        if value not in self.spreading:
            entry = find_rule(value.target) if value.op == "call_function" and info(value).constant else None
            sources = [self._root(v) for v in operands(value)] if entry is not None else []
            computed = entry is not None and entry.kind in ("pointwise", "view") and value not in self.graph.seeds
            known = [v for v in sources if v is not None]
            self.spreading[value] = (
                computed
                and len(known) == len(sources) > 0
                and (
                    any(map(self._spreads, known))
                    or (entry.kind == "pointwise" and _bytes(value) > 2 * sum(map(_bytes, known)))  # type: ignore[union-attr]
                )
            )
        return self.spreading[value]

    def _of_own_rows(self, value: fx.Node, need: TensorType, phase: str) -> fx.Node | None:
        """Compute a rank's part of such a constant, of parts of what it is computed from."""
        projection = project(value)
        split = {p: axes for p, axes in zip(projection.results[0], need.placement, strict=True) if axes}
        if {*split} & projection.blocked:
            return None
        values: list[fx.Node] = []
        for operand, pieces in zip(operands(value), projection.operands, strict=True):
            root = self._root(operand)
            assert root is not None
            values.append(self.get(root, type_of(root).place([split.get(p, ()) for p in pieces]), phase))
        part = self.graph.call(
            value.target, value.args, dict(value.kwargs), like=value, type=need, name=info(value).name, phase=phase,
            assignment=tuple((projection.names[p], axes) for p, axes in split.items()),
        )  # fmt: skip
        replace_operands(part, values)
        self.origin[part] = value
        return part

    def _root(self, placed: fx.Node) -> fx.Node | None:
        """The value of which an operand, perhaps already a reshard, is a copy."""
        return placed if placed in self.have else self.origin.get(placed)
