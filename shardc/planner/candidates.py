"""Candidate plans of a traced model on a mesh: placements of its weights and of its batch, found in its graph.

    candidates = candidate_plans(trace(model, batch), Mesh(dp=2, tp=4), Hardware())
    candidates[0].plan                 {"params": {"h.*.attn.c_attn.weight": "-, 3*tp", ...}, "inputs": ..., ...}

Axes for the batch, the sequence and experts go where their role says. For each tensor axis the placement program is
solved (`placement_program`), in a few forms that are each the best under another condition; what comes out is written
as annotations, compiled, and ranked by the seconds of the compiled body. So what the compiler makes of an annotation
decides, and not what the program took it to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from shardc.compiler.binding import bind, bind_passes
from shardc.compiler.driver import distribute, single_device
from shardc.compiler.pass_pipeline import Options, cuts_of, run
from shardc.cost.memory import memory as memory_of
from shardc.frontend.trace import Traced
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.passes.sharding.atom_classes import Place
from shardc.passes.sharding.atomize import Atomize
from shardc.passes.sharding.seed import Bound, find_value
from shardc.plan.schema import Plan
from shardc.planner.annotations import Annotations, annotations_of, layer_modules, tensor_axes
from shardc.planner.axis_roles import Divided, Role, roles_of
from shardc.planner.call_costs import AxisCosts, trained_values, weight_values
from shardc.planner.compiled_cost import LayerCost, layer_costs
from shardc.planner.layers import EqualLayers, equal_layers
from shardc.planner.placement_program import PlacementProgram, Solution
from shardc.planner.strategies import WHOLE, State

NEAR = 0.02  # of the best time, within which predictions tell nothing
PRICES = (1e-12, 1e-11, 1e-10, 1e-9)  # seconds a byte: up to a second a GB
MOMENTS_BYTES = 8  # that an optimizer holds an element of a parameter


@dataclass(frozen=True)
class Candidate:
    """Placements, and what they cost as compiled: `seconds` of a microbatch's forward and backward on one rank, by
    `layers`, of which the entry "" is the rest. `estimate` is what the placement program predicted of the same.

    `bytes` are the peak with two moments of an optimizer, without storage over other axes (ZeRO), of the traced layers.
    """

    plan: Mapping[str, Any]
    seconds: float
    layers: tuple[LayerCost, ...]
    bytes: int
    estimate: float
    why: str
    notes: tuple[Diagnostic, ...] = field(default=(), repr=False)

    @property
    def communication(self) -> float:
        return sum(layer.count * layer.communication for layer in self.layers)

    def scaled(self, counts: Mapping[str, int]) -> float:
        """Seconds of a model with so many layers of each pattern, instead of as many as were traced."""
        return sum(counts.get(layer.pattern, layer.count) * layer.seconds for layer in self.layers)


@dataclass(frozen=True)
class _Form:
    """A condition under which the best placements are looked for.

    What layers return, the residual stream of a transformer, may lie over the axis in `any` way, or by `positions`, or
    not (`whole`). Unless in any, its features are never divided, in no other value either: an axis that is put on them
    in an embedding spreads to all layers, whose norms need them whole.
    """

    why: str
    residual: Literal["any", "positions", "whole"] = "any"
    whole_products: bool = True


FORMS = (
    _Form("what layers return divided by position", "positions"),
    _Form("what layers return whole", "whole"),
    _Form("any placement of weights", "any"),
    _Form("any placement of weights, tokens or places of an image divided as well", "any", whole_products=False),
)


def candidate_plans(
    traced: Traced,
    mesh: Mesh,
    hardware: Hardware,
    *,
    roles: Mapping[str, Role] | None = None,
    pinned: Plan | None = None,
    memory: int | None = None,
    top: int = 3,
    compiled: bool = True,
) -> list[Candidate]:
    """The best placements first, at most `top`. What `pinned` annotates stays as it is.

    Of candidates whose times differ by less than `NEAR`, that of least memory is first; with `memory`, in bytes, those
    that hold more come last. Without `compiled`, costs are those of the placement program: a tenth of the time, to
    compare meshes by. Raises ShardcError for a step that cannot be compiled, or a `pinned` plan that does not fit it.
    """
    plan, traced = pinned or Plan(), traced.copy()
    options = bind_passes(plan, hardware.on(mesh), Options(verify=False))
    reference = single_device(traced, mesh, options)
    step = Step(traced, reference, plan, mesh, hardware.on(mesh))
    search = _Search(reference, mesh, step.hardware, roles_of(mesh, roles), bind(plan, traced, mesh))
    tried: dict[str, Candidate] = {}
    refused: list[ShardcError] = []
    for why, written, solution in search.forms(memory):
        if (key := repr(written)) in tried or (solution is None and not compiled):
            continue
        try:
            tried[key] = (step.compiled if compiled else step.estimated)(written, why, solution)
        except ShardcError as wrong:
            refused.append(wrong)
    if refused and not tried:
        raise refused[0]
    return ranked(tried.values(), memory)[:top]


def ranked(candidates: Iterable[Candidate], memory: int | None = None) -> list[Candidate]:
    """Those that fit first, by time; of those near the best by memory, and of those near that the first as given."""

    def fits(candidate: Candidate) -> bool:
        return memory is None or candidate.bytes <= memory

    candidates = list(candidates)
    left = sorted(candidates, key=lambda c: (not fits(c), c.seconds))
    order: list[Candidate] = []
    while left:
        near = [c for c in left if c.seconds <= (1 + NEAR) * left[0].seconds and fits(c) == fits(left[0])]
        least = min(c.bytes for c in near)
        order.append(next(c for c in candidates if c in near and c.bytes <= (1 + NEAR) * least))
        left.remove(order[-1])
    return order


@dataclass(frozen=True)
class Step:
    """A normalised step on a mesh: what annotations cost there, beside those that the user has `pinned`."""

    traced: Traced
    reference: Graph
    pinned: Plan
    mesh: Mesh
    hardware: Hardware  # on the mesh

    def compiled(self, annotations: Annotations, why: str = "", solution: Solution | None = None) -> Candidate:
        """By the compiled body. Raises ShardcError for what cannot be compiled."""
        # Coalesced, as else each vector's gradient counts as a collective.
        plan = Plan.from_dict({"bucket": True, **annotations.as_plan()}).merge(self.pinned)
        options = bind_passes(plan, self.hardware, Options(verify=False))
        body = distribute(self.reference, bind(plan, self.traced, self.mesh), options)
        body = run(body, [options.bucket], options)
        costs = tuple(layer_costs(body, self.hardware))
        ports = zip(body.inputs, body.placeholders, strict=True)
        moments = sum(
            MOMENTS_BYTES * type_of(v).local_bytes(body.mesh) // type_of(v).dtype.itemsize
            for p, v in ports
            if p.role == "param" and p.trainable
        )
        peak = memory_of(body, listed=False).peak + moments
        seconds = sum(cost.count * cost.seconds for cost in costs)
        estimate = seconds if solution is None else solution.seconds
        return Candidate(annotations.as_plan(), seconds, costs, peak, estimate, why, tuple(body.diagnostics))

    def estimated(self, annotations: Annotations, why: str, solution: Solution | None) -> Candidate:
        """By what the placement program took placements to cost; without a tensor axis, nothing is known."""
        seconds = 0.0 if solution is None else solution.seconds
        layers = () if solution is None else solution.layers
        held = 0 if solution is None else solution.held + solution.kept
        return Candidate(annotations.as_plan(), seconds, layers, held, seconds, why)


class _Search:
    """The placement programs of one graph, axis after axis."""

    def __init__(
        self, reference: Graph, mesh: Mesh, hardware: Hardware, roles: Mapping[str, Role], bound: list[Bound]
    ) -> None:
        self.mesh, self.hardware, self.roles, self.bound = mesh, hardware, roles, bound
        self.graph = Atomize(tuple(cuts_of(reference, bound))).run(reference.copy())
        self.equal: EqualLayers = equal_layers(self.graph)
        self.trained = trained_values(self.graph)
        self.weights = weight_values(self.graph)
        self.pins = {value: b for b in bound if (value := find_value(self.graph, b)) is not None}
        shown = [name for names in self.equal.names for name in names if name and self._is_outermost(name)]
        self.layers = layer_modules(self.graph, shown)
        self.residual = {self.graph.activations[name] for name in self.layers}

    def forms(self, memory: int | None = None) -> Iterator[tuple[str, Annotations, Solution | None]]:
        """The placements that are best under each condition, and what the placement program says of them; with a bound
        of memory that those do not meet, those at the least price of a byte that do."""
        axes = [axis for axis in tensor_axes(self.roles) if self.mesh.size(axis) > 1]
        held = math.inf
        for form in FORMS if axes else FORMS[:1]:
            divided = Divided(self.graph, self.mesh, self.roles)
            solutions = [self._divide(divided, axis, form) for axis in axes]
            if all(solution is not None for solution in solutions):
                held = min(held, *(s.held + s.kept for s in solutions if s is not None), math.inf)
                yield form.why, self._written(divided), solutions[-1] if solutions else None
        for price in PRICES if axes and memory is not None else ():
            if memory is None or held <= memory:
                break
            divided = Divided(self.graph, self.mesh, self.roles)
            for axis in axes:
                if (solution := self._divide(divided, axis, FORMS[-1], price)) is not None:
                    held = solution.held + solution.kept
                    yield f"memory at {price:g} seconds a byte", self._written(divided), solution
        for atom in self._places() if axes else ():
            divided = Divided(self.graph, self.mesh, self.roles)
            for value, i in atom:
                for axis in axes:
                    divided.place(value, i, axis)
            yield "places of an image divided, as far as they go", self._written(divided), None

    def _places(self) -> Iterator[list[Place]]:
        """The longest dim of floating inputs that is of positions: the height of images, which then has rows alone."""
        divided = Divided(self.graph, self.mesh, self.roles)
        places: list[Place] = []
        for value in divided.inputs():
            sizes = type_of(value).sizes
            if type_of(value).dtype.is_floating_point and len(sizes) > 2:
                dim = max(range(2, len(sizes)), key=lambda d: (type_of(value).shape[d], -d))
                places += [(value, sum(map(len, sizes[:dim])))]
        if places:
            yield places

    def _written(self, divided: Divided) -> Annotations:
        kept = {"params": set[str](), "inputs": set[str](), "activations": set[str]()}
        for b in self.bound:
            kept.get(f"{b.kind}s", set[str]()).add(b.name)
        return annotations_of(divided, kept, layers=self.layers)

    def _is_outermost(self, name: str) -> bool:
        return not any(name.startswith(f"{other}.") for names in self.equal.names for other in names if other)

    def _divide(self, divided: Divided, axis: str, form: _Form, price: float = 0.0) -> Solution | None:
        """Solve the program of one axis, and put it on the atoms that the solution says."""
        size = self.mesh.size(axis)
        batch, experts, graph = divided.batch, divided.experts, self.graph
        inputs = {n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if p.role == "input"}
        features = divided.features & {
            divided.classes.of((v, i)) for v in self.residual for i in range(len(type_of(v).atoms))
        }
        integers = {v for v in inputs if not type_of(v).dtype.is_floating_point}

        def offered(value: fx.Node, atom: int) -> bool:
            of = divided.classes.of((value, atom))
            if of in batch or of in experts or axis in divided.axes(value, atom):
                return False
            if form.residual != "any" and of in features:
                return False
            return value not in integers and (value not in inputs or not form.whole_products)

        def allowed(value: fx.Node) -> frozenset[State] | None:
            if (pin := self.pins.get(value)) is not None:
                return _states(pin, value, axis, offered)
            if value not in self.residual or form.residual == "any":
                return None
            if form.residual == "whole":
                return frozenset({WHOLE})
            return frozenset(i for i in range(len(type_of(value).atoms)) if offered(value, i))

        sums = [a for a, role in self.roles.items() if role != "tensor" and self.mesh.size(a) > 1]
        groups = (self.hardware.group_of(self.mesh, tuple(sums)),) if sums else ()
        costs = AxisCosts(
            graph,
            self.hardware,
            size,
            self.hardware.group_of(self.mesh, (axis,)),
            divided.divisors(but=(axis,)),
            self.trained,
            groups,
            self.weights,
        )
        program = PlacementProgram(graph, axis, costs, self.equal, offered, allowed, form.whole_products)
        solution = program.solve(price)
        if math.isinf(solution.cost):
            return None
        for value, state in _placed(solution):
            divided.place(value, state, axis)
        return solution


def _placed(solution: Solution) -> Iterable[tuple[fx.Node, State]]:
    return [(value, state) for value, state in solution.states.items() if state >= 0]


def _states(pin: Bound, value: fx.Node, axis: str, offered: Any) -> frozenset[State] | None:
    """What an annotation leaves to a value over an axis: atoms of the dim that it puts the axis on, or of open dims."""
    states: set[State] = set()
    flat = 0
    for sizes, dim in zip(type_of(value).sizes, pin.placement.padded(type_of(value).ndim), strict=False):
        here = [flat + i for i in range(len(sizes)) if offered(value, flat + i)]
        flat += len(sizes)
        if axis in dim.axes:
            return frozenset(here)
        if dim.open:
            states.update(here)
    return frozenset({WHOLE, *states})
