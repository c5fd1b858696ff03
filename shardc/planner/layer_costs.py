"""What one microbatch costs a rank, layer by layer: read off a small compiled program of the model.

    program of 2 equal layers     entry (embedding)   layer, layer   exit (norm, head, loss)
    the model's 80                entry + 80 x the mean of both layers + exit

A part's seconds are what passes on the compute stream while its calls run (`cost.streams`); its activations are the
storages that forward makes and backward reads; what lives shorter is the transient of the part in which it is most.
Gradients, casts of weights and what is reduced once a step are left to `step_costs`, which knows the storage.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import fx

from shardc.cost.call_seconds import COMPUTE, CallCost, call_costs
from shardc.cost.flops import node_flops
from shardc.cost.streams import run
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.liveness import lives
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import sections
from shardc.ir.ops.accumulate import SUMS
from shardc.ir.storages import layouts
from shardc.planner.reduced_model import KEPT, Run

ENTRY, EXIT = "entry", "exit"
EXPERTS = "ep"


@dataclass
class Part:
    """A layer, or what comes before or after all layers: of one microbatch on one rank, seconds and bytes.

    `sent` are the seconds that it waits for collectives, within `forward` and `backward`, `products` those of products
    at their rate of the hardware's table, which power limits over a whole step; `late` those of weights' gradients,
    which a schedule may put off, within `backward`; `host` those that the host takes to issue the part's calls, at the
    same time. `weights` are elements of parameters, `own` those that are placed
    over the experts' axis, which no other rank of it has. `boundary` are bytes that a cut after the part sends.
    """

    forward: float = 0.0
    backward: float = 0.0
    sent: float = 0.0
    products: float = 0.0
    host: float = 0.0
    late: float = 0.0
    recomputed: float = 0.0
    flops: float = 0.0
    kept: float = 0.0
    transient: float = 0.0
    weights: float = 0.0
    own: float = 0.0
    largest: float = 0.0  # elements of its largest parameter
    boundary: float = 0.0
    tensors: float = 0.0  # of parameters

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward

    def plus(self, other: Part) -> Part:
        pairs = zip(VALUES(self), VALUES(other), PEAKS, strict=True)
        return Part(*[max(a, b) if peak else a + b for a, b, peak in pairs])

    def times(self, count: float) -> Part:
        return Part(*[a if peak else a * count for a, peak in zip(VALUES(self), PEAKS, strict=True)])


VALUES: Callable[[Part], tuple[float, ...]] = operator.attrgetter(*(f.name for f in fields(Part)))
PEAKS = tuple(f.name in ("transient", "largest", "boundary") for f in fields(Part))  # of several the most


@dataclass(frozen=True)
class LayerCosts:
    """The parts of a model in the order of forward: a run of equal layers as one part and its count."""

    entry: Part
    exit: Part
    runs: tuple[tuple[Part, int], ...]
    collectives: Mapping[str, float] = field(default_factory=dict[str, float])  # seconds by axes, of all layers

    @property
    def layers(self) -> list[Part]:
        return [part for part, count in self.runs for _ in range(count)]

    def total(self) -> Part:
        """Of the whole model, a microbatch."""
        whole = self.entry.plus(self.exit)
        for part, count in self.runs:
            whole = whole.plus(part.times(count))
        return whole

    def blended(self, other: LayerCosts, share: float) -> LayerCosts:
        """Between both: 0 is these, 1 the other. Beyond 1 it goes on as it went between them."""

        def mix(a: Part, b: Part) -> Part:
            return Part(*[max(0.0, x + share * (y - x)) for x, y in zip(VALUES(a), VALUES(b), strict=True)])

        runs = tuple((mix(a, b), count) for (a, count), (b, _) in zip(self.runs, other.runs, strict=True))
        axes = {*self.collectives, *other.collectives}
        sent = {
            axis: (1 - share) * self.collectives.get(axis, 0.0) + share * other.collectives.get(axis, 0.0)
            for axis in axes
        }
        return LayerCosts(mix(self.entry, other.entry), mix(self.exit, other.exit), runs, sent)


def layer_costs(body: Graph, runs: Sequence[Run], hardware: Hardware, mesh: Mesh) -> LayerCosts:
    """The costs of a localized body of several microbatches, whose model has the first repetitions of each run.

    `mesh` is that of the whole job.
    """
    return _Reader(body, runs, hardware, mesh).read()


class _Reader:
    def __init__(self, body: Graph, runs: Sequence[Run], hardware: Hardware, mesh: Mesh) -> None:
        self.body, self.runs, self.hardware = body, runs, hardware.on(mesh)
        self.sections = sections(body)
        self.calls, self.microbatch = self.sections.in_order(body), self.sections.microbatch
        self.known = layouts(body)
        self.costs: Mapping[fx.Node, CallCost] = call_costs(body, hardware, mesh, self.known)
        self.index = {call: i for i, call in enumerate(self.calls)}
        self.part_of = self._parts()
        self.summed = self._summed()
        self.parts: dict[object, Part] = defaultdict(Part)
        self.sent: dict[str, float] = defaultdict(float)

    def read(self) -> LayerCosts:
        self._time()
        for call in self.calls:
            if call in self.microbatch and call in self.costs:
                self._count(call, self.costs[call])
        self._weights()
        self._memory()
        self._boundaries()
        runs: list[tuple[Part, int]] = []
        for number, repeated in enumerate(self.runs):
            mean = Part()
            for unit in range(KEPT):
                mean = mean.plus(self.parts[number, unit])
            runs.append((mean.times(1 / KEPT), repeated.count))
        sent = dict(self.sent)
        return LayerCosts(self.parts[ENTRY], self.parts[EXIT], tuple(runs), sent)

    # ------------------------------------------------------------------ which part a call is in
    def _parts(self) -> dict[fx.Node, object]:
        """By module; those outside of all runs by whether forward has come to a run, and backward has left all."""
        direct = {call: self._unit(info(call).fqn) for call in self.calls}
        entered = {"fwd": False, "bwd": False}
        last_backward = max((i for i, c in enumerate(self.calls) if direct[c] and info(c).phase == "bwd"), default=-1)
        parts: dict[fx.Node, object] = {}
        outside: dict[str, object] = {}
        for i, call in enumerate(self.calls):
            phase, fqn = info(call).phase, info(call).fqn
            unit = direct[call]
            if unit is not None:
                entered[phase if phase != "opt" else "bwd"] = True
                parts[call] = unit
            elif phase == "fwd":
                parts[call] = EXIT if entered["fwd"] or not self.runs else ENTRY
                if fqn:
                    outside.setdefault(fqn, parts[call])
            else:
                parts[call] = outside.get(fqn) or (ENTRY if self.runs and i > last_backward else EXIT)
        return parts

    def _unit(self, fqn: str) -> object:
        for number, repeated in enumerate(self.runs):
            unit = repeated.unit(fqn)
            if unit is not None and unit < KEPT:
                return number, unit
        return None

    def _summed(self) -> set[fx.Node]:
        """The values that nothing but the sums over microbatches reads, casts and views on the way included."""
        summed: set[fx.Node] = set()
        for call in reversed(self.calls):
            readers = [user for user in call.users if user.op != "output"]
            if readers and all(user.target in SUMS or user in summed for user in readers):
                summed.add(call)
        return summed

    # ------------------------------------------------------------------ seconds
    def _time(self) -> None:
        """Of the first microbatch: what passes on the compute stream from the end of one call to that of the next."""
        named = {info(call).name: call for call in self.calls}
        last = 0.0
        spans = run(self.body, self.costs, self.hardware).spans
        sending = Covered((span.start, span.end) for span in spans if span.stream != COMPUTE)
        for span in spans:
            if span.stream != COMPUTE:
                continue
            seconds, last = span.end - last, span.end
            if span.microbatch != 0:
                continue
            call = named.get(span.name) or named[span.name.rpartition(".")[0]]
            part, about = self.parts[self.part_of[call]], info(call)
            part.products += span.end - span.start if span.kind == "product" else 0.0
            if about.phase == "fwd":
                part.forward += seconds
            else:
                part.backward += seconds
                if "wgrad" in str(call.target):
                    part.late += seconds
            part.recomputed += seconds if about.is_recomputed else 0.0
            part.sent += sending.between(span.end - seconds, span.start)  # else it waits for the host

    def _count(self, call: fx.Node, cost: CallCost) -> None:
        part = self.parts[self.part_of[call]]
        part.host += max(self.hardware.call_seconds, cost.issuing, self.hardware.kernel_launch_seconds * cost.launches)
        part.flops += 0 if info(call).is_recomputed else node_flops(self.body, call)
        if cost.moved is not None:
            self.sent[".".join(cost.moved.axes)] += cost.total

    # ------------------------------------------------------------------ memory
    def _weights(self) -> None:
        for port, node in zip(self.body.inputs, self.body.placeholders, strict=True):
            if port.role != "param":
                continue
            readers = [user for user in node.users if user in self.part_of]
            part = self.parts[self._unit(port.name) or (self.part_of[readers[0]] if readers else EXIT)]
            size = type_of(node).local_bytes(self.body.mesh) / type_of(node).dtype.itemsize
            part.weights += size
            part.tensors += 1
            part.largest = max(part.largest, size)
            axes = {axis.partition(":")[0] for dim in type_of(node).dims for atom in dim for axis in atom.axes}
            if EXPERTS in axes:
                part.own += size

    def _memory(self) -> None:
        _, lived = lives(self.body, self.calls, self.sections, self.known.storages)
        change: dict[int, float] = defaultdict(float)
        released: dict[int, float] = defaultdict(float)
        for life in lived:
            if life.weights or life.returned is not None:
                continue
            node = life.storage.value
            if node in self.summed:  # gradients are added up as soon as they are there
                life.dies = life.born
            if life.phase == "fwd" and life.last == "bwd":
                self.parts[self.part_of.get(node, EXIT)].kept += life.storage.bytes
                if life.dies + 1 <= len(self.calls):
                    released[life.dies + 1] -= life.storage.bytes
                released[life.born] += life.storage.bytes
            elif life.phase != "opt":
                change[life.born] += life.storage.bytes
                change[life.dies + 1] -= life.storage.bytes
        short = 0.0
        for i, call in enumerate(self.calls):
            short += change[i]
            if call in self.microbatch and (part := self.part_of.get(call)) is not None:
                self.parts[part].transient = max(self.parts[part].transient, short)

    def _boundaries(self) -> None:
        """Bytes of forward's values that the next layer reads and this one makes."""
        for number in range(len(self.runs)):
            first, second = (number, 0), (number, 1)
            size = 0
            for call in self.calls:
                if info(call).phase != "fwd" or self.part_of[call] != first or call.target is operator.getitem:
                    continue
                if info(call).type is not None and any(
                    self.part_of.get(user) == second and info(user).phase == "fwd" for user in call.users
                ):
                    size += type_of(call).local_bytes(self.body.mesh)
            self.parts[first].boundary = self.parts[second].boundary = size


class Covered:
    """The time that spans cover, once where several do."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def between(self, start: float, end: float) -> float:
        """How much of the time from one moment to another."""
        first, found = bisect_right(self._ends, start), 0.0
        for begin, until in zip(self._starts[first:], self._ends[first:], strict=True):
            if begin >= end:
                break
            found += min(until, end) - max(begin, start)
        return found
