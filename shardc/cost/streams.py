"""A graph on the streams of one rank: when each call runs, from the seconds of the calls and the executor's order.

    host     issues one call after another: `kernel_launch_seconds` a kernel, `call_seconds` a call at the least, views
             too; it runs ahead, and waits for nothing
    compute  all kernels but the collectives', one after another, `kernel_gap_seconds` between two
    tp, dp   the collectives of a process group, one after another
    to host, from host    copies of one direction, one after another; each begins when compute has come to its begin,
             and compute stands still at its end until it has ended

A kernel starts when the host has issued it and its stream is free. A collective begins, beside that, when compute has
come to where it begins (`ir.overlap_schedule`), and compute stands still where it is waited for until it has ended. The
time that compute stands still is exposed: it is the collective's, or the host's.

Where collectives take the cores that compute (`Contention.cores`), compute stands still for that share of each from
when it begins, and what is left may be hidden. Ranks do not begin a collective at the same time (`Meetings`): it starts
when the last one comes, by what has been computed since compute last stood still for one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from shardc.cost.call_seconds import COMPUTE, KINDS, CallCost, Kind
from shardc.ir.account import with_additions
from shardc.ir.call_slots import SlottedCalls, slotted_calls
from shardc.ir.graph import Graph, Phase, info, operands, type_of
from shardc.ir.hardware import DELAY, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.overlap_schedule import Action, schedule_of
from shardc.torch_compat import ADDED_AT_ONCE

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
    """How long compute stood still for a collective, or a copy of the host."""

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
    """A graph's actions in order: those `before` several microbatches, `repeated` ones of each, those `once` a step.
    `later` are those of a microbatch that is not the first."""

    mesh: Mesh
    calls: Sequence[fx.Node]
    before: Sequence[Action]
    repeated: Sequence[Action]
    later: Sequence[Action]
    once: Sequence[Action]


def steps_of(graph: Graph, listed: SlottedCalls | None = None) -> Steps:
    """The actions of a rank that runs a localized graph, whose calls are `listed`, if they are known."""
    listed = slotted_calls(graph) if listed is None else listed
    actions, _ = with_additions(graph, listed, schedule_of(listed))
    nodes = [call.node for call in listed.calls]
    many = graph.microbatches > 1
    first, last = (listed.repeated.start, listed.repeated.stop) if many else (0, 0)
    before, repeated = ([a for a in actions if a.at in section] for section in (range(first), range(first, last)))
    later = [a for a in repeated if a.at not in listed.first] if listed.first else repeated
    return Steps(graph.mesh, nodes, before, repeated, later, [a for a in actions if a.at >= last])


def run(
    graph: Graph,
    costs: Mapping[fx.Node, CallCost],
    hardware: Hardware,
    products: float = 1.0,
    steps: Steps | None = None,
    pace: float = 1.0,
) -> Timed:
    """One run of a localized graph by one rank, all its microbatches, from an empty queue. Products take `products`
    times as long as their costs say, and all kernels `pace` times. `steps` are the graph's, if they are known."""
    streams = _Streams(costs, hardware, products, pace)
    steps = steps_of(graph) if steps is None else steps
    streams.do(steps, steps.before, -1)
    for microbatch in range(graph.microbatches if steps.repeated else 0):
        streams.do(steps, steps.later if microbatch else steps.repeated, microbatch)
    streams.do(steps, steps.once, -1)
    return streams.ended()


def device_seconds(
    graph: Graph, costs: Mapping[fx.Node, CallCost], hardware: Hardware, listed: SlottedCalls | None = None
) -> float:
    """What a run takes whose host has issued everything before it is needed: what an order of calls is judged by. Of a
    graph with few of many equal layers, with the others as well: each takes what those beside it take."""
    timed = run(graph, without_issuing(costs), issued_before(hardware), steps=steps_of(graph, listed))
    seconds = timed.seconds
    for units in graph.units:
        ends = (units.first, units.last)
        beside = sum(t for node, t in timed.by_call.items() if units.within(info(node).fqn)[0] in ends)
        seconds += len(units.removed) * beside / len(ends)
    return seconds


def issued_before(hardware: Hardware) -> Hardware:
    """The hardware with a host that takes no time for a call, as if it had issued all before."""
    return dataclasses.replace(hardware, kernel_launch_seconds=DELAY.least, call_seconds=0.0)


def without_issuing(costs: Mapping[fx.Node, CallCost]) -> dict[fx.Node, CallCost]:
    """The same of collectives, which the host takes longer to begin."""
    return {node: dataclasses.replace(cost, issuing=0.0) if cost.issuing else cost for node, cost in costs.items()}


@dataclass(eq=False)
class _Begun:
    """A collective of a rank: `ready` is when its ranks have come, `host` how long it waited for the host."""

    node: fx.Node
    ready: float
    seconds: float  # alone
    start: float
    end: float
    host: float = 0.0


class _Copied(NamedTuple):
    """A copy between a rank and its host: when it ends, and how long it waited for Python to begin it."""

    end: float
    seconds: float
    host: float


class _Streams:
    def __init__(self, costs: Mapping[fx.Node, CallCost], hardware: Hardware, products: float, pace: float) -> None:
        self.costs, self.hardware, self.products, self.pace = costs, hardware, products, pace
        self.launch = hardware.kernel_launch_seconds
        # Tables are measured with one launch after another: what passes between two kernels is in them.
        self.gap = 0.0 if hardware.tables.memory is not None else hardware.kernel_gap_seconds
        self.timed = Timed()
        self.free: dict[str, float] = {COMPUTE: 0.0}
        self.begun: dict[str, list[_Begun]] = {}  # by stream, all so far, in order
        self.under_way: dict[str, deque[_Begun]] = {}  # of them those that compute has not passed
        self.copied: dict[fx.Node, _Copied] = {}
        self.busy = 0.0  # of compute so far
        self.met = 0.0  # `busy` when compute last stood still for a collective
        self.late: dict[fx.Node, float] = {}  # how much later than it could a collective began, for slower ranks
        contention = hardware.tables.contention
        self.cores, self.meetings = contention.cores, hardware.tables.meetings
        self.switch = contention.switch_seconds
        self.switches: dict[fx.Node, float] = {}  # what collectives under way will take of the kernels beside them
        self.factors = dict.fromkeys(KINDS, contention.memory) | {  # of products each call says its own
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
                case "run" if cost.kind == "host copy":
                    self._host_copy(node, cost, microbatch)
                case "run":
                    seconds = cost.seconds * self.products if cost.kind == "product" else cost.seconds
                    self._kernel(node, cost.kind, seconds, cost.launches, microbatch, beside=cost.beside)
                case "begin":
                    self._begin(node, cost, microbatch)
                case "wait":
                    self._wait(node, cost, microbatch)
                case "add":
                    size = sum(type_of(term).local_bytes(steps.mesh) for term in action.terms)
                    seconds, launches = self.hardware.memory_seconds(3 * size), -(-len(action.terms) // ADDED_AT_ONCE)
                    self._kernel(node, "elementwise", seconds, launches, microbatch, f".{ADDITION}")
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

    def _slowed(self, factor: float, start: float, seconds: float) -> float:
        """How long a kernel takes whose work takes so long alone: `factor` times as long while a collective is under
        way."""
        if factor == 1.0:
            return seconds
        at, left = start, seconds
        for begun in self.under_way.values():
            while begun and begun[0].end <= start:
                begun.popleft()
        for first, last in sorted((one.start, one.end) for begun in self.under_way.values() for one in begun):
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
        self,
        node: fx.Node,
        kind: Kind,
        seconds: float,
        launches: int,
        microbatch: int,
        suffix: str = "",
        beside: float = 1.0,
    ) -> None:
        timed, seconds = self.timed, seconds * self.pace
        if not launches and not seconds:
            timed.host += self.hardware.call_seconds
            return
        for begun, left in list(self.switches.items()):
            if all(one.end <= self.free[COMPUTE] for one in self.begun[self.costs[begun].stream] if one.node is begun):
                del self.switches[begun]  # it has passed
                continue
            self._take(begun, min(left, seconds))
            if left <= seconds:
                del self.switches[begun]
            else:
                self.switches[begun] = left - seconds
        gap = self.gap if timed.launches else 0.0
        free, issued = self.free[COMPUTE] + gap, self._issue(launches)
        start, gaps = max(free, issued), self.gap * max(0, launches - 1)
        seconds = self._slowed(beside if kind == "product" else self.factors[kind], start, seconds)
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
        free = self.free.get(cost.stream, 0.0)
        computed = max(self.free[COMPUTE], timed.host)
        met = computed + self.meetings.wait(self.busy - self.met)
        start = max(free, computed)
        self.late[node] = max(0.0, met - start)
        start += self.late[node]
        timed.kinds["collective"] = timed.kinds.get("collective", 0.0) + cost.seconds
        span = Span(about.name, "collective", cost.stream, start, start + cost.seconds, about.phase, microbatch)
        timed.spans.append(span)
        # Beside kernels all the time, as long as nobody waits.
        begun = _Begun(node, met, cost.seconds, start, start + self.factors["collective"] * cost.seconds)
        begun.host = max(0.0, timed.host - max(self.free[COMPUTE], free))
        self.free[cost.stream] = begun.end
        self.begun.setdefault(cost.stream, []).append(begun)
        self.under_way.setdefault(cost.stream, deque()).append(begun)
        if taken := self.cores * cost.seconds:
            self.free[COMPUTE] = computed
            self._take(node, taken)
        if self.switch:
            self.switches[node] = self.switch

    def _take(self, node: fx.Node, seconds: float) -> None:
        """Compute stands still for so long, since a collective has its cores."""
        self.free[COMPUTE] += seconds
        self.timed.taken += seconds
        self.timed.exposed.append(Exposed(node, seconds))
        self.timed.by_call[node] = self.timed.by_call.get(node, 0.0) + seconds

    def _wait(self, node: fx.Node, cost: CallCost, microbatch: int) -> None:
        self.switches.pop(node, None)
        free = self.free[COMPUTE]
        begun = self._settled(node, cost.stream, free)
        end = begun.end
        if end > free:
            host = min(begun.host, max(0.0, end - free - begun.seconds))
            self.timed.idle += host
            self._expose(node, cost.stream, free, end, end - free - host)
            self.timed.met += min(self.late[node], end - free)
            self.met = self.busy
            self.timed.by_call[node] = self.timed.by_call.get(node, 0.0) + end - free
            self.free[COMPUTE] = end
        if cost.after:
            self._kernel(node, "copy", cost.after, 1, microbatch, ".after")

    def _host_copy(self, node: fx.Node, cost: CallCost, microbatch: int) -> None:
        """A copy begins, or compute waits for one."""
        timed, about = self.timed, info(node)
        timed.host += max(self.launch * cost.launches, self.hardware.call_seconds)
        if cost.launches:
            free = max(self.free.get(cost.stream, 0.0), self.free[COMPUTE])
            start = max(free, timed.host)
            self.free[cost.stream] = end = start + cost.seconds
            self.copied[node] = _Copied(end, cost.seconds, start - free)
            timed.launches += cost.launches
            timed.kinds[cost.kind] = timed.kinds.get(cost.kind, 0.0) + cost.seconds
            timed.spans.append(Span(about.name, cost.kind, cost.stream, start, end, about.phase, microbatch))
            return
        begun = operands(node)[0]
        copied = self.copied[begun]
        waited = copied.end - self.free[COMPUTE]
        if waited > 0:
            host = min(copied.host, max(0.0, waited - copied.seconds))
            timed.idle += host
            timed.exposed.append(Exposed(begun, waited - host))
            timed.by_call[node] = timed.by_call.get(node, 0.0) + waited
            self.free[COMPUTE] += waited

    def _settled(self, node: fx.Node, stream: str, now: float) -> _Begun:
        """The collective that compute waits for from `now` on. Until then it, and those in front of it in its stream,
        had kernels beside them; from then on they have none. Those behind it move up."""
        factor, listed = self.factors["collective"], self.under_way[stream]
        wanted = next(one for one in reversed(self.begun[stream]) if one.node is node)
        if factor > 1 and wanted.end > now:
            alone, last = True, now
            for one in listed:
                if one.end <= now:
                    continue
                if one.start < now:  # under way
                    one.end = now + one.seconds - (now - one.start) / factor
                else:
                    one.start = max(one.ready, last)
                    one.end = one.start + (1 if alone else factor) * one.seconds
                last = one.end
                alone = alone and one is not wanted
            self.free[stream] = last
        return wanted

    def _expose(self, node: fx.Node, stream: str, free: float, end: float, seconds: float) -> None:
        """Compute stood still for so long, until `end`: for the collective that it waits for, and before that began for
        those in front of it in its stream."""
        listed, left = reversed(self.begun[stream]), seconds
        start = next(one.start for one in listed if one.node is node)
        own = min(left, end - max(start, free))
        left -= own
        for other in listed:
            if left <= 0 or other.end <= free:
                break
            spent = min(left, other.end - max(other.start, free))
            self.timed.exposed.append(Exposed(other.node, spent))
            left -= spent
        self.timed.exposed.append(Exposed(node, own + left))

    def ended(self) -> Timed:
        timed = self.timed
        timed.compute = max(0.0, self.free[COMPUTE])
        timed.seconds = max(*self.free.values(), timed.host, 0.0)
        return timed
