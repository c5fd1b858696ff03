"""The best placements over one mesh axis: a strategy for each call of forward, and a state for each parameter.

An integer program as Alpa's (Zheng et al. 2022, section 4.2): one choice for each call and each parameter, costs of
each choice, and costs of reshards between a choice and the next. It is solved exactly by `min_sum`, on one of equal
layers: choices of equal layers are one variable, whose costs count as often as the layer stands in the model.

A value that several calls read is a variable of its own: the state in which it is made, and one more in which it is
handed on. Its reshard is then paid for once, as the compiler does it once, and not by each reader. Without that
variable a sharded residual stream seems to be gathered three times for q, k and v, and sequence parallelism never pays.

Memory comes in as a price of a byte, in seconds: the program under a bound of memory is the one at the least price that
meets the bound (Lagrange's relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from shardc.ir.graph import Graph, info, operands, producer, results, type_of
from shardc.ir.layers import in_every_layer
from shardc.planner.call_costs import AxisCosts
from shardc.planner.compiled_cost import LayerCost
from shardc.planner.layers import EqualLayers
from shardc.planner.min_sum import Table, least
from shardc.planner.strategies import (
    BROADCAST,
    PENDING,
    WHOLE,
    Offered,
    State,
    Strategy,
    strategies_of,
)
from shardc.rules.registry import find_rule

Allowed = Callable[[fx.Node], "frozenset[State] | None"]  # of a value: the states that a user's plan leaves; None: all
TIE = 1e-12  # seconds, by which a whole value is preferred where nothing else tells


@dataclass(frozen=True)
class Solution:
    """States of values over the axis, and what they cost: `seconds` of all, and of each class of equal `layers`.

    `held` are bytes of parameters, their gradients and moments on a rank, `kept` those of values that backward reads.
    """

    states: Mapping[fx.Node, State]
    strategies: Mapping[fx.Node, Strategy]
    cost: float  # that was minimised: infinite where the conditions cannot be met
    seconds: float
    held: int
    exact: bool
    kept: int = 0
    layers: tuple[LayerCost, ...] = ()


@dataclass
class PlacementProgram:
    """The tables of one axis. With `whole_products`, no product splits what the parameter in it has not."""

    graph: Graph
    axis: str
    costs: AxisCosts
    equal: EqualLayers
    offered: Offered
    allowed: Allowed = lambda value: None
    whole_products: bool = True
    strategies: dict[fx.Node, list[Strategy]] = field(default_factory=dict[fx.Node, list[Strategy]])
    wanted: dict[fx.Node, list[State | None]] = field(default_factory=dict[fx.Node, "list[State | None]"])
    limits: dict[fx.Node, frozenset[State]] = field(default_factory=dict[fx.Node, "frozenset[State]"])
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = field(default_factory=dict[fx.Node, list[tuple[fx.Node, int]]])

    def __post_init__(self) -> None:
        self.offered = self._offered_to_all(self.offered)
        matrices = {v for v in self.costs.weights if type_of(v).ndim > 1} if self.whole_products else set[fx.Node]()
        graph = self.graph
        for node in graph.calls():
            if info(node).phase != "fwd" or info(node).constant:
                continue
            first = self.equal.of(node)
            known = self.strategies.get(first) or strategies_of(graph, node, self.axis, self.offered, matrices)
            self.strategies[first] = self.strategies[node] = known
            for k, value in enumerate(operands(node)):
                if not info(value).constant:
                    self.readers.setdefault(value, []).append((node, k))
                    wanted = self.wanted.setdefault(self.equal.of(value), [None])
                    needs = dict.fromkeys(s.needs[k] for s in self.strategies[node] if s.needs[k] != PENDING)
                    wanted += [state for state in needs if state not in wanted]
        self.shared = {self.equal.of(v) for v, uses in self.readers.items() if len(uses) > 1}
        for value in self.graph.values():
            if (allowed := self.allowed(value)) is not None:
                first = self.equal.of(value)
                self.limits[first] = self.limits.get(first, allowed) & allowed
        self.shared |= self.limits.keys()

    def _offered_to_all(self, offered: Offered) -> Offered:
        """What is offered to every value of a class, as one choice is made for all: the weight of the first layer may
        meet an input where those of the others meet what a layer returns."""
        classes: dict[fx.Node, list[fx.Node]] = {}
        for value in self.equal.representative:
            classes.setdefault(self.equal.of(value), []).append(value)

        def to_all(value: fx.Node, atom: int) -> bool:
            first = self.equal.of(value)
            return all(offered(v, atom) for v in (first, *classes.get(first, ())))

        return to_all

    # ------------------------------------------------------------------ choices
    def states_of(self, value: fx.Node) -> list[State]:
        """In which a value may be made: by its call, or as a parameter or an input lies."""
        allowed = self.limits.get(self.equal.of(value))
        if value.op == "placeholder":
            atoms = [i for i in range(len(type_of(value).atoms)) if self.offered(value, i)]
            states = [WHOLE, *atoms]
            return [s for s in states if allowed is None or s in allowed] or states
        call, k = producer(value)
        return list(dict.fromkeys(s.makes[k] for s in self.strategies[call]))

    def handed(self, value: fx.Node) -> list[tuple[State, State | None]]:
        """The choices of a shared value: the state it is made in, and the one that it is handed on in besides."""
        others = self.wanted[self.equal.of(value)]
        allowed = self.limits.get(self.equal.of(value))

        def fits(made: State, other: State | None) -> bool:
            """A pending value that is limited is handed on as it may be."""
            return made != PENDING or allowed is None or (WHOLE if other == BROADCAST else other) in allowed

        pairs = [(made, other) for made in self.states_of(value) for other in others if other != made]
        return [pair for pair in pairs if fits(*pair)]

    # ------------------------------------------------------------------ the program
    def solve(self, price: float = 0.0) -> Solution:
        """The least sum of seconds, and of bytes at their price."""
        variables: dict[object, int] = {}
        sizes: dict[int, int] = {}
        tables: dict[tuple[int, ...], Tensor] = {}

        def variable(key: object, size: int) -> int:
            number = variables.setdefault(key, len(variables))
            assert sizes.setdefault(number, size) == size, key
            return number

        def add(scope: tuple[int, ...], costs: Tensor) -> None:
            if len(scope) == 2 and scope[0] == scope[1]:
                scope, costs = scope[:1], costs.diagonal()
            if len(scope) == 2 and scope[0] > scope[1]:
                scope, costs = (scope[1], scope[0]), costs.T
            tables[scope] = tables[scope] + costs if scope in tables else costs

        of = self.equal.of
        cache: dict[object, Tensor] = {}

        def cached(key: object, make: Callable[[], list[object]]) -> Tensor:
            if key not in cache:
                cache[key] = torch.tensor(make(), dtype=torch.float64)
            return cache[key]

        for node, strategies in self.strategies.items():
            number = variable(of(node), len(strategies))
            add((number,), cached(("call", of(node)), lambda n=node, s=strategies: [*self._call_costs(n, s, price)]))
            if (limits := [*self._limits(node, strategies)]) and any(limits):
                add((number,), torch.tensor(limits, dtype=torch.float64))
        values = [v for v in self.readers if v.op == "placeholder" or producer(v)[0] in self.strategies]
        for value in values:
            made, choices = self.states_of(value), self.handed(value)
            if value.op == "placeholder":
                source, position = variable(of(value), len(made)), -1
                add((source,), cached(("held", of(value)), lambda v=value, m=made: [*self._held_costs(v, m, price)]))
            else:
                call, position = producer(value)
                source = variable(of(call), len(self.strategies[call]))
            from_states = made if position < 0 else [s.makes[position] for s in self.strategies[producer(value)[0]]]
            if of(value) not in self.shared:
                ((reader, k),) = self.readers[value]
                target = variable(of(reader), len(self.strategies[reader]))
                pair = cached(
                    ("pair", of(value), of(reader), k, tuple(from_states)),
                    lambda v=value, f=from_states, r=reader, k=k: [
                        [self.costs.reshard_seconds(v, m, s.needs[k]) for s in self.strategies[r]] for m in f
                    ],
                )
                add((source, target), pair)
                continue
            hand = variable(("handed", of(value)), len(choices))
            add(
                (source, hand),
                cached(
                    ("hand", of(value), tuple(from_states)),
                    lambda v=value, f=from_states, c=choices: [
                        [self._handing(v, m, choice) for choice in c] for m in f
                    ],
                ),
            )
            for reader, k in self.readers[value]:
                target = variable(of(reader), len(self.strategies[reader]))
                reading = cached(
                    ("read", of(value), of(reader), k),
                    lambda v=value, c=choices, r=reader, k=k: [
                        [self._reading(v, choice, s.needs[k]) for s in self.strategies[r]] for choice in c
                    ],
                )
                add((hand, target), reading)
        best = least(sizes, [Table(scope, costs) for scope, costs in tables.items()])
        return self._solution(best.choice, variables, best.cost, best.exact)

    def _call_costs(self, node: fx.Node, strategies: list[Strategy], price: float) -> list[float]:
        costs: list[float] = []
        for strategy in strategies:
            made = [(v, s) for v, s in zip(results(node), strategy.makes, strict=True) if v is not None]
            kept = sum(self.costs.bytes_of(v, s) for v, s in made if self._is_kept(v))
            seconds = self.costs.call_seconds(node, strategy) + price * kept
            costs.append(seconds + (0.0 if strategy.piece is None else TIE))
        return costs

    def _held_costs(self, value: fx.Node, states: list[State], price: float) -> list[float]:
        seconds = [
            self.costs.parameter_seconds(value, s) + price * self.costs.parameter_bytes(value, s) for s in states
        ]
        return [cost + (0.0 if s == WHOLE else TIE) for cost, s in zip(seconds, states, strict=True)]

    def _limits(self, node: fx.Node, strategies: list[Strategy]) -> list[float]:
        """Infinite for what a user's plan does not leave to a result."""
        limits = [0.0] * len(strategies)
        for k, value in enumerate(results(node)):
            allowed = self.limits.get(self.equal.of(value)) if value is not None else None
            if allowed is not None:
                limits = [
                    limit if s.makes[k] in allowed or s.makes[k] == PENDING else math.inf
                    for limit, s in zip(limits, strategies, strict=True)
                ]
        return limits

    def _handing(self, value: fx.Node, made: State, choice: tuple[State, State | None]) -> float:
        if choice[0] != made:
            return math.inf
        return 0.0 if choice[1] is None else self.costs.reshard_seconds(value, made, choice[1]) + TIE

    def _reading(self, value: fx.Node, choice: tuple[State, State | None], needed: State) -> float:
        made, other = choice
        if made == PENDING and other is not None and self.equal.of(value) in self.limits:
            made = WHOLE if other == BROADCAST else other
        if needed == other or (needed == WHOLE and other == BROADCAST):
            return 0.0
        return self.costs.reshard_seconds(value, made, needed)

    def _solution(
        self, choice: Mapping[int, int], variables: Mapping[object, int], cost: float, exact: bool
    ) -> Solution:
        of, states, chosen = self.equal.of, dict[fx.Node, State](), dict[fx.Node, Strategy]()
        for node, strategies in self.strategies.items():
            strategy = strategies[choice[variables[of(node)]]]
            chosen[node] = strategy
            states.update({v: s for v, s in zip(results(node), strategy.makes, strict=True) if v is not None})
        for value in self.readers:
            if value.op == "placeholder":
                states[value] = self.states_of(value)[choice[variables[of(value)]]]
            if ("handed", of(value)) in variables and states.get(value) == PENDING:
                other = self.handed(value)[choice[variables["handed", of(value)]]][1]
                states[value] = PENDING if other is None else WHOLE if other == BROADCAST else other
        held = sum(
            self.costs.parameter_bytes(v, states[v])
            for v in states
            if v.op == "placeholder" and v in self.costs.trained
        )
        seconds, _ = self._part_seconds(set(chosen), states, chosen)
        kept = sum(self.costs.bytes_of(v, s) for v, s in states.items() if v.op != "placeholder" and self._is_kept(v))
        return Solution(states, chosen, cost, seconds, held, exact, kept, tuple(self._layers(seconds, states, chosen)))

    def _is_kept(self, value: fx.Node) -> bool:
        """Does backward read it? A view counts as what it is a view of."""
        rule = find_rule(producer(value)[0].target)
        read = any(user.op == "call_function" and info(user).phase == "bwd" for user in value.users)
        return read and value in self.costs.trained and not (rule is not None and rule.kind == "view")

    def _layers(
        self, seconds: float, states: Mapping[fx.Node, State], chosen: Mapping[fx.Node, Strategy]
    ) -> Iterator[LayerCost]:
        for parts, names in zip(self.equal.layers, self.equal.names, strict=True):
            one, communication = self._part_seconds(set(parts[0]), states, chosen)
            yield LayerCost(in_every_layer(names[0]), len(parts), one, communication)
            seconds -= len(parts) * one
        yield LayerCost("", 1, seconds, 0.0)

    def _part_seconds(
        self, part: set[fx.Node], states: Mapping[fx.Node, State], chosen: Mapping[fx.Node, Strategy]
    ) -> tuple[float, float]:
        """Calls of a part, reshards of what it reads, and the parameters that it reads first; of that, reshards."""
        seconds = sum(self.costs.call_seconds(node, chosen[node]) for node in part)
        reshards = 0.0
        for value, uses in self.readers.items():
            mine = {chosen[reader].needs[k] for reader, k in uses if reader in part}
            if not mine:
                continue
            made = states[value] if value.op == "placeholder" else self._made(value, chosen)
            if made is None:
                continue
            needs = mine - ({WHOLE} if BROADCAST in mine else set())
            reshards += sum(self.costs.reshard_seconds(value, made, needed) for needed in needs)
            if value.op == "placeholder" and uses[0][0] in part:
                seconds += self.costs.parameter_seconds(value, made)
        return seconds + reshards, reshards

    def _made(self, value: fx.Node, chosen: Mapping[fx.Node, Strategy]) -> State | None:
        call, k = producer(value)
        return chosen[call].makes[k] if call in chosen else None
