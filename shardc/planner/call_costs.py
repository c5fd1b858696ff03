"""Seconds of one call of a forward graph over one axis, and of what its gradient takes, before anything is compiled.

An estimate, to find candidates by; compiled programs rank them. Products count with their gradients (two of the same
size), everything else as a kernel that reads its operands and writes its results, in forward and in backward. Views are
free. A reshard counts with what backward does in its place:

    from      to          forward          backward
    pending   whole       all_reduce       -
    pending   sharded     reduce_scatter   all_gather
    sharded   whole       all_gather       -
    sharded   broadcast   all_gather       reduce_scatter
    sharded   otherwise   all_to_all       all_to_all
    whole     broadcast   -                all_reduce
    whole     sharded     -                all_gather
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.cost.flops import COUNTS
from shardc.ir.graph import Graph, info, op_name, operands, results, type_of
from shardc.ir.hardware import Group, Hardware
from shardc.ir.schema import given
from shardc.planner.compiled_cost import UPDATE_BYTES
from shardc.planner.strategies import BROADCAST, PENDING, WHOLE, State, Strategy
from shardc.rules.registry import find_rule

Shape = tuple[int, ...]
Divisors = Mapping[tuple[fx.Node, int], int]  # (value, flat atom) -> the ranks of other axes that divide it
GATHERED = 1.0  # seconds: more than all else, so that it is done where a user's plan leaves nothing else
HELD_BYTES = 12  # held an element beside the parameter itself: its gradient and two moments


@dataclass(frozen=True)
class AxisCosts:
    """What calls and reshards of a graph cost over one axis, other axes having divided what they have.

    `gradient_groups` are those of other axes over which gradients of parameters are summed.
    """

    graph: Graph
    hardware: Hardware
    size: int
    group: Group
    divided: Divisors
    trained: frozenset[fx.Node]  # values that have a gradient
    gradient_groups: tuple[Group, ...] = ()
    weights: frozenset[fx.Node] = frozenset()  # parameters, as they are or through views and casts alone

    # ------------------------------------------------------------------ shapes
    def local_shape(self, value: fx.Node, state: State = WHOLE) -> Shape:
        """What a rank holds of a value. An atom smaller than the axis leaves the rest of it to the next of its dim."""
        left, shape, flat = self.size, list[int](), 0
        for dim in type_of(value).sizes[: type_of(value).ndim]:
            extent = 1
            begun = False
            for atom in dim:
                local = -(-atom // self.divided.get((value, flat), 1))
                if flat == state or (begun and left > 1):
                    begun = True
                    taken = left if local >= left or left % local else local
                    local, left = -(-local // taken), left // taken
                extent *= local
                flat += 1
            shape.append(extent)
        return tuple(shape)

    def bytes_of(self, value: fx.Node, state: State = WHOLE) -> int:
        return math.prod(self.local_shape(value, state)) * type_of(value).dtype.itemsize

    # ------------------------------------------------------------------ calls
    def call_seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """One call under a strategy, with its gradient."""
        sources, outs = operands(node), [v for v in results(node) if v is not None]
        trained = any(v in self.trained for v in outs)
        seconds = self._statistics(node) if strategy.reduced else 0.0
        rule = find_rule(node.target)
        if rule is not None and rule.kind == "view":
            return seconds
        states = dict(zip(sources, strategy.needs, strict=True))
        made = {v: s for v, s in zip(results(node), strategy.makes, strict=True) if v is not None}
        op = op_name(node.target)
        if op in COUNTS and outs:

            def argument(value: Any) -> Any:
                if isinstance(value, (list, tuple)):
                    return [argument(v) for v in value]
                return self.local_shape(value, states[value]) if isinstance(value, fx.Node) else value

            arguments = {name: argument(value) for name, value in given(node).items()}
            result = self.local_shape(outs[0], made[outs[0]])
            count = COUNTS[op](arguments, result)
            dtype = type_of(outs[0]).dtype
            if op.startswith("shardc.sdpa"):
                forward = self.hardware.attention_seconds(count, dtype)
                return seconds + forward + (self.hardware.attention_seconds(5 * count // 2, dtype) if trained else 0.0)
            batch = result[0] if op in ("bmm", "baddbmm") else 1
            columns = result[1] if op == "convolution" else result[-1] if result else 1
            rows = max(1, math.prod(result) // max(1, columns * batch))
            depth = max(1, count // max(1, 2 * batch * rows * columns))
            seconds += self.hardware.product_seconds(batch, rows, columns, depth, dtype)
            if trained:
                seconds += self.hardware.product_seconds(batch, rows, depth, columns, dtype)
                seconds += self.hardware.product_seconds(batch, depth, columns, rows, dtype)
            return seconds
        if rule is not None and rule.kind == "create":
            moved = sum(self.bytes_of(v, made[v]) for v in outs)
        else:
            moved = sum(self.bytes_of(v, s) for v, s in {**states, **made}.items() if not info(v).constant)
        return seconds + self.hardware.memory_seconds(moved) * (2 if trained else 1)

    def _statistics(self, node: fx.Node) -> float:
        """The all-reduce of a number for each row of what is split, forward and backward."""
        value = operands(node)[0]
        rows = math.prod(self.local_shape(value)) // max(1, type_of(value).shape[-1] if type_of(value).ndim else 1)
        return 2 * self.hardware.collective_seconds("all_reduce", 4.0 * rows, self.group)

    # ------------------------------------------------------------------ values
    def reshard_seconds(self, value: fx.Node, made: State, needed: State) -> float:
        """From the state in which a value is made to that in which it is read, and the gradient's way back.

        Weights are computed with as they are placed. To hold less of them than one computes with is a matter of storage
        (ZeRO), and no placement says it: so that costs `GATHERED` more.
        """
        if info(value).constant or made == needed:
            if made == needed and made == BROADCAST:
                return math.inf
            return 0.0
        if needed == PENDING:
            return math.inf
        trained, size = value in self.trained, float(self.bytes_of(value))
        forward: str | None = None
        backward: str | None = None
        if made == PENDING:
            forward, backward = (
                ("all_reduce", None) if needed in (WHOLE, BROADCAST) else ("reduce_scatter", "all_gather")
            )
            if needed == BROADCAST:
                backward = "all_reduce"
        elif made == WHOLE:
            backward = {WHOLE: None, BROADCAST: "all_reduce"}.get(needed, "all_gather")
        elif needed in (WHOLE, BROADCAST):
            forward, backward = "all_gather", "reduce_scatter" if needed == BROADCAST else None
        else:
            forward = backward = "all_to_all"
            size /= self.size
        apart = GATHERED if made >= 0 and value in self.weights else 0.0
        kinds = [kind for kind in (forward, backward if trained else None) if kind is not None]
        return apart + sum(self.hardware.collective_seconds(kind, size, self.group) for kind in kinds)

    def parameter_seconds(self, value: fx.Node, state: State) -> float:
        """The update of a parameter, and the sum of its gradient over other axes."""
        if value not in self.trained:
            return 0.0
        size = self.bytes_of(value, state)
        elements = size // type_of(value).dtype.itemsize
        sums = (self.hardware.collective_seconds("all_reduce", size, group) for group in self.gradient_groups)
        return self.hardware.memory_seconds(UPDATE_BYTES * elements) + sum(sums)

    def parameter_bytes(self, value: fx.Node, state: State) -> int:
        """What a rank holds for a parameter, without storage that is sharded over other axes."""
        size = self.bytes_of(value, state)
        return size + (HELD_BYTES * size // type_of(value).dtype.itemsize if value in self.trained else 0)


def trained_values(graph: Graph) -> frozenset[fx.Node]:
    """Values of forward through which a gradient flows, and trainable parameters that are floats."""
    ports = zip(graph.inputs, graph.placeholders, strict=True)
    trained = {n for p, n in ports if p.role == "param" and p.trainable and type_of(n).dtype.is_floating_point}
    for node in graph.calls():
        if info(node).phase == "fwd" and any(v in trained for v in operands(node)):
            trained.update(v for v in results(node) if v is not None and type_of(v).dtype.is_floating_point)
    return frozenset(trained)


def weight_values(graph: Graph) -> frozenset[fx.Node]:
    """Parameters, and what views and casts alone make of them."""
    weights = {n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if p.role == "param"}
    for node in graph.calls():
        rule = find_rule(node.target)
        alone = rule is not None and rule.kind in ("view", "pointwise") and len(operands(node)) == 1
        if alone and operands(node)[0] in weights:
            weights.update(v for v in results(node) if v is not None)
    return frozenset(weights)
