"""A graph on the streams of one rank: when each call runs, from the seconds of the calls and the executor's order.

    host     issues one call after another: `kernel_launch_seconds` a kernel, `call_seconds` a call at the least, views
             too; it runs ahead, and waits for nothing
    compute  all kernels but the collectives', one after another, `kernel_gap_seconds` between two
    tp, dp   the collectives of a process group, one after another

A kernel starts when the host has issued it and its stream is free. A collective begins, beside that, when compute has
come to where it begins (`ir.overlap_schedule`), and compute stands still where it is waited for until it has ended. The
time that compute stands still is exposed: it is the collective's, or the host's.

Where collectives take the cores that compute (`Contention.cores`), compute stands still for that share of each from
when it begins, and what is left may be hidden. Ranks do not begin a collective at the same time (`Meetings`): it starts
when the last one comes, by what has been computed since compute last stood still for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from shardc.cost.call_seconds import COMPUTE, KINDS, CallCost, Kind
from shardc.ir.account import with_additions
from shardc.ir.call_slots import slotted_calls
from shardc.ir.graph import Graph, Phase, info, type_of
from shardc.ir.hardware import DELAY, Hardware
from shardc.ir.overlap_schedule import Action, schedule_of

ADDITION = "add"


class Span(NamedTuple):
    """A call, or what is copied before or after a collective, on a stream, in seconds."""

    name: str
    kind: Kind
    stream: str
    start: float
    end: float
    phase: Phase
    microbatch: int


class Exposed(NamedTuple):
    """How long compute stood still for a collective."""

    node: fx.Node
    seconds: float


@dataclass
class Timed:
    """What came of a run. `idle` is how long compute waited for the host, `gaps` the time between its kernels."""

    spans: list[Span] = field(default_factory=list[Span])
    exposed: list[Exposed] = field(default_factory=list[Exposed])
    by_call: dict[fx.Node, float] = field(default_factory=dict[fx.Node, float])  # of compute, what it stood still too
    runs: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    kinds: dict[Kind, float] = field(default_factory=dict[Kind, float])
    seconds: float = 0.0
    compute: float = 0.0  # when the compute stream has done all
    host: float = 0.0  # when the host has issued all
    idle: float = 0.0
    gaps: float = 0.0
    launches: int = 0
    taken: float = 0.0  # of the compute's cores, by collectives
    met: float = 0.0  # compute stood still for slower ranks


@dataclass(frozen=True)
class Steps:
    """A graph's actions in order, the first `repeated` of which run once a microbatch."""

    calls: Sequence[fx.Node]
    repeated: Sequence[Action]
    once: Sequence[Action]
    added: Mapping[fx.Node, int]  # call -> bytes that are added to sums after it


def steps_of(graph: Graph) -> Steps:
    """The actions of a rank that runs a localized graph."""
    listed = slotted_calls(graph)
    actions, terms = with_additions(graph, listed, schedule_of(listed))
    added: dict[fx.Node, int] = {}
    for call in listed.calls:
        if size := sum(type_of(v).local_bytes(graph.mesh) for v, _, _ in call.yields if v in terms):
            added[call.node] = size
    nodes = [call.node for call in listed.calls]
    many = graph.microbatches > 1
    repeated = [a for a in actions if many and a.at < listed.repeated]
    return Steps(nodes, repeated, [a for a in actions if not (many and a.at < listed.repeated)], added)


def run(graph: Graph, costs: Mapping[fx.Node, CallCost], hardware: Hardware, products: float = 1.0) -> Timed:
    """One run of a localized graph by one rank, all its microbatches, from an empty queue. Products take `products`
    times as long as their costs say."""
    streams = _Streams(costs, hardware, products)
    steps = steps_of(graph)
    for microbatch in range(graph.microbatches if steps.repeated else 0):
        streams.do(steps, steps.repeated, microbatch)
    streams.do(steps, steps.once, -1)
    return streams.ended()


def device_seconds(graph: Graph, costs: Mapping[fx.Node, CallCost], hardware: Hardware) -> float:
    """What a run takes whose host has issued everything before it is needed: what an order of calls is judged by."""
    free = dataclasses.replace(hardware, kernel_launch_seconds=DELAY.least, call_seconds=0.0)
    return run(
        graph,
        {node: dataclasses.replace(cost, issuing=0.0) if cost.issuing else cost for node, cost in costs.items()},
        free,
    ).seconds


class _Streams:
    def __init__(self, costs: Mapping[fx.Node, CallCost], hardware: Hardware, products: float) -> None:
        self.costs, self.hardware, self.products = costs, hardware, products
        self.launch = hardware.kernel_launch_seconds
        # Tables are measured with one launch after another: what passes between two kernels is in them.
        self.gap = 0.0 if hardware.tables.memory is not None else hardware.kernel_gap_seconds
        self.timed = Timed()
        self.free: dict[str, float] = {COMPUTE: 0.0}
        self.under_way: dict[str, tuple[float, float]] = {}  # by stream, its last collective
        self.begun: dict[str, list[tuple[fx.Node, float, float]]] = {}  # by stream, all so far: start and end
        # End, seconds, `busy` where it began, and how long it waited for the host.
        self.arrives: dict[fx.Node, tuple[float, float, float, float]] = {}
        self.busy = 0.0  # of compute so far
        self.met = 0.0  # `busy` when compute last stood still for a collective
        self.late: dict[fx.Node, float] = {}  # how much later than it could a collective began, for slower ranks
        contention = hardware.tables.contention
        self.cores, self.meetings = contention.cores, hardware.tables.meetings
        self.factors = dict.fromkeys(KINDS, contention.memory) | {
            "product": contention.product,
            "attention": contention.attention,
            "collective": contention.collective,
        }

    def do(self, steps: Steps, actions: Sequence[Action], microbatch: int) -> None:
        for action in actions:
            node = steps.calls[action.at]
            cost = self.costs[node]
            if action.kind in ("run", "begin"):
                self.timed.runs[node] = self.timed.runs.get(node, 0) + 1
            match action.kind:
                case "run" if cost.kind == "collective":
                    self._begin(node, cost, microbatch)
                    self._wait(node, cost, microbatch)
                case "run":
                    seconds = cost.seconds * self.products if cost.kind == "product" else cost.seconds
                    self._kernel(node, cost.kind, seconds, cost.launches, microbatch)
                case "begin":
                    self._begin(node, cost, microbatch)
                case "wait":
                    self._wait(node, cost, microbatch)
                case "add":
                    seconds = self.hardware.memory_seconds(3 * steps.added[node])
                    self._kernel(node, "elementwise", seconds, 1, microbatch, f".{ADDITION}")
                case "free":
                    pass

    def _issue(self, launches: int) -> float:
        """The host issues a call's kernels: when the first of them may start."""
        timed = self.timed
        seconds = max(self.hardware.call_seconds, self.launch * launches)
        first = timed.host + max(self.launch, self.hardware.call_seconds - self.launch * (launches - 1))
        timed.host += seconds
        timed.launches += launches
        return first

    def _slowed(self, kind: Kind, start: float, seconds: float) -> float:
        """How long a kernel takes whose work takes so long alone: more while a collective is under way."""
        factor = self.factors[kind]
        if factor == 1.0:
            return seconds
        at, left = start, seconds
        for first, last in sorted(self.under_way.values()):
            if last <= at:
                continue
            alone = max(0.0, first - at)
            if alone >= left:
                break
            at, left = max(at, first), left - alone
            beside = min(left, (last - at) / factor)
            at, left = at + beside * factor, left - beside
        return at + left - start

    def _kernel(
        self, node: fx.Node, kind: Kind, seconds: float, launches: int, microbatch: int, suffix: str = ""
    ) -> None:
        timed = self.timed
        if not launches:
            timed.host += self.hardware.call_seconds
            return
        gap = self.gap if timed.launches else 0.0
        free, issued = self.free[COMPUTE] + gap, self._issue(launches)
        start, gaps = max(free, issued), self.gap * (launches - 1)
        seconds = self._slowed(kind, start, seconds)
        self.busy += seconds
        end = max(start + seconds + gaps, timed.host)  # the last of its kernels runs when it has been issued
        timed.idle += end - free - seconds - gaps
        timed.gaps += gap + gaps
        timed.kinds[kind] = timed.kinds.get(kind, 0.0) + seconds
        timed.by_call[node] = timed.by_call.get(node, 0.0) + seconds
        about = info(node)
        timed.spans.append(Span(about.name + suffix, kind, COMPUTE, start, end, about.phase, microbatch))
        self.free[COMPUTE] = end

    def _begin(self, node: fx.Node, cost: CallCost, microbatch: int) -> None:
        if cost.before:
            self._kernel(node, "copy", cost.before, 1, microbatch, ".before")
        timed, about = self.timed, info(node)
        timed.host += max(cost.issuing, self.hardware.call_seconds)
        timed.launches += 1
        ready = max(self.free[COMPUTE], self.free.get(cost.stream, 0.0))
        start = max(ready, timed.host)
        computed = max(self.free[COMPUTE], timed.host)
        self.late[node] = max(0.0, computed + self.meetings.wait(self.busy - self.met) - start)
        start += self.late[node]
        end = start + cost.seconds
        timed.kinds["collective"] = timed.kinds.get("collective", 0.0) + cost.seconds
        timed.spans.append(Span(about.name, "collective", cost.stream, start, end, about.phase, microbatch))
        self.free[cost.stream] = end
        self.under_way[cost.stream] = start, end
        self.begun.setdefault(cost.stream, []).append((node, start, end))
        self.arrives[node] = end, cost.seconds, self.busy, start - self.late[node] - ready
        if taken := self.cores * cost.seconds:
            self.free[COMPUTE] = computed + taken
            timed.taken += taken
            timed.exposed.append(Exposed(node, taken))
            timed.by_call[node] = timed.by_call.get(node, 0.0) + taken

    def _wait(self, node: fx.Node, cost: CallCost, microbatch: int) -> None:
        free, (end, seconds, busy, late) = self.free[COMPUTE], self.arrives.pop(node)
        # Beside kernels it was slower; what came after it in its stream is taken to have had time.
        end += (self.factors["collective"] - 1) * min(seconds, self.busy - busy)
        if end > free:
            host = min(late, max(0.0, end - free - seconds))
            self.timed.idle += host
            self._expose(node, cost.stream, free, end, end - free - host)
            self.timed.met += min(self.late[node], end - free)
            self.met = self.busy
            self.timed.by_call[node] = self.timed.by_call.get(node, 0.0) + end - free
            self.free[COMPUTE] = end
        if cost.after:
            self._kernel(node, "copy", cost.after, 1, microbatch, ".after")

    def _expose(self, node: fx.Node, stream: str, free: float, end: float, seconds: float) -> None:
        """Compute stood still for so long, until `end`: for the collective that it waits for, and before that began for
        those in front of it in its stream."""
        listed, left = reversed(self.begun[stream]), seconds
        begun = next(start for other, start, _ in listed if other is node)
        own = min(left, end - max(begun, free))
        left -= own
        for other, start, ended in listed:
            if left <= 0 or ended <= free:
                break
            spent = min(left, ended - max(start, free))
            self.timed.exposed.append(Exposed(other, spent))
            left -= spent
        self.timed.exposed.append(Exposed(node, own + left))

    def ended(self) -> Timed:
        timed = self.timed
        timed.compute = max(0.0, self.free[COMPUTE])
        timed.seconds = max(*self.free.values(), timed.host, 0.0)
        return timed
