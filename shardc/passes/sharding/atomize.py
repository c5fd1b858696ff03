"""atomize: factor every tensor dim into atoms, so that an axis lands on heads and not on columns.

Needs: normalised calls with unplaced types. Ensures: every value's dims are products of atoms, and
each rule's factors nest in the atoms of its operands and results wherever the cuts allow it. A gradient has the atoms
of its parameter, and a sum over microbatches those of its term, whatever the cuts are.

A view that splits 1536 into (3, 8, 64) refines the dim it came from, that dim refines the weight's
columns through the matmul, and those the bias and both gradients: a fixpoint over all calls. Two cuts
that do not nest (12 as 3x4 and as 4x3 nest; 6x4 and 3x8 do not) stay apart, and the op that would
need both keeps those factors whole.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of, update
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.types import Atom, TensorType
from shardc.passes.base import Pass
from shardc.rules.notation import FactorRule
from shardc.rules.projection import refine
from shardc.rules.registry import find_rule, rule_of

Sizes = tuple[int, ...]
UPDATES = ("grad", "param", "buffer", "state")  # outputs that are placed as the input of their name
Slot = fx.Node | tuple[fx.Node, int]  # a value, or a result that nothing uses


@dataclass(frozen=True)
class Atomize(Pass):
    """Refine dims to a fixpoint. `cuts` are the factorisations that annotations ask for: port name -> dim -> sizes."""

    cuts: tuple[tuple[str, int, Sizes], ...] = ()

    def run(self, graph: Graph) -> Graph:
        state = _Atoms(graph)
        ports = {p.name: n for p, n in zip(graph.inputs, graph.placeholders, strict=True)}
        for name, dim, sizes in self.cuts:
            state.cut(ports.get(name) or graph.activations[name], dim, sizes)
        state.run()
        state.write()
        return graph


def linked_gradients(graph: Graph) -> list[tuple[fx.Node, fx.Node]]:
    """(parameter, gradient) pairs, and (buffer, its new value): the two are placed alike."""
    ports = {p.name: n for p, n in zip(graph.inputs, graph.placeholders, strict=True)}
    outputs = zip(graph.outputs, graph.output_values, strict=True)
    returned = [(ports[p.name], v) for p, v in outputs if p.role in UPDATES and p.name in ports]
    return [*returned, *((ports[name], grad) for name, grad in graph.gradients.items())]


def _summed_terms(graph: Graph) -> list[tuple[fx.Node, fx.Node]]:
    """(sum over microbatches, its term) pairs: the two are one tensor in memory."""
    return [(call, operands(call)[0]) for call in graph.calls_of(ACCUMULATE)]


@dataclass
class _Op:
    tensors: list[tuple[Slot, tuple[tuple[str, ...], ...]]]  # each with the factors of its dims
    split: dict[str, Sizes]  # factor -> atoms
    once: bool  # no tensor stands here twice: what is said of the second would be news to the first


@dataclass
class _Atoms:
    graph: Graph
    dims: dict[Slot, list[Sizes]] = field(default_factory=dict[Slot, list[Sizes]])
    users: dict[Slot, list[_Op]] = field(default_factory=dict[Slot, list[_Op]])
    queue: deque[_Op] = field(default_factory=deque[_Op])
    queued: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        for value in self.graph.values():
            self._add(value, type_of(value))
        self._tie([*linked_gradients(self.graph), *_summed_terms(self.graph)])
        for node in self.graph.calls():
            if find_rule(node.target) is None:
                continue
            rule = rule_of(node)
            slots: list[Slot] = [*operands(node), *self._results(node)]
            self._op(slots, (*rule.operands, *rule.results), rule)

    def _add(self, slot: Slot, type: TensorType) -> None:
        self.dims[slot] = [tuple(a.size for a in dim) for dim in type.dims]
        self.users[slot] = []

    def _tie(self, pairs: list[tuple[fx.Node, fx.Node]]) -> None:
        """Make pairs one: where cuts do not nest, a gradient must still be factored exactly as its parameter is, and a
        sum over microbatches as its term."""
        tied: dict[fx.Node, list[fx.Node]] = {}
        for a, b in pairs:
            joined = tied.get(a, [a]) + [v for v in tied.get(b, [b]) if v not in tied.get(a, [a])]
            for value in joined:
                tied[value] = joined
                self.dims[value], self.users[value] = self.dims[a], self.users[a]

    def _results(self, node: fx.Node) -> list[Slot]:
        declared = [(i, t) for i, t in enumerate(info(node).results) if t is not None]
        slots: list[Slot] = []
        for position, value in enumerate(results(node)):
            if value is None:
                index, type = declared[position]
                self._add((node, index), type)
                slots.append((node, index))
            else:
                slots.append(value)
        return slots

    def _op(self, slots: list[Slot], labels: tuple[tuple[tuple[str, ...], ...], ...], rule: FactorRule) -> None:
        users = {id(self.users[slot]): self.users[slot] for slot in slots}
        once = len(users) == len(slots)
        op = _Op(list(zip(slots, labels, strict=True)), {f: (n,) for f, n in rule.sizes.items()}, once)
        for slot_ops in users.values():
            slot_ops.append(op)
        self._push(op)

    def _push(self, op: _Op) -> None:
        if id(op) not in self.queued:
            self.queued.add(id(op))
            self.queue.append(op)

    def cut(self, value: fx.Node, dim: int, sizes: Sizes) -> None:
        merged = refine(self.dims[value][dim], sizes)
        if merged is not None:
            self.dims[value][dim] = merged

    def run(self) -> None:
        while self.queue:
            op = self.queue.popleft()
            self.queued.discard(id(op))
            while self._refine(op):
                pass

    def _refine(self, op: _Op) -> bool:
        """Bring an op's factors and its tensors' dims to common cuts; True when a factor changed."""
        changed = False
        for slot, labels in op.tensors:
            dims = self.dims[slot]
            for d, factors in enumerate(labels):
                have = dims[d]
                want = op.split[factors[0]] if len(factors) == 1 else tuple(n for f in factors for n in op.split[f])
                if have == want:
                    continue
                merged = refine(have, want)
                if merged is None:
                    continue
                if merged != have:
                    dims[d] = merged
                    changed = changed or not op.once
                    for user in self.users[slot]:
                        if user is not op:
                            self._push(user)
                if merged != want:
                    changed = True
                    position = 0
                    for f in factors:
                        size, run = math.prod(op.split[f]), 1
                        start = position
                        while run < size:
                            run *= merged[position]
                            position += 1
                        op.split[f] = merged[start:position]
        return changed

    def write(self) -> None:
        for slot, dims in self.dims.items():
            atoms = tuple(tuple(Atom(n) for n in dim) for dim in dims)
            if isinstance(slot, tuple):
                node, index = slot
                declared = list(info(node).results)
                declared_type = declared[index]
                assert declared_type is not None
                declared[index] = replace(declared_type, dims=atoms)
                update(node, results=tuple(declared))
            elif type_of(slot).dims != atoms:
                update(slot, type=replace(type_of(slot), dims=atoms))
