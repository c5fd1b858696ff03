"""A rank's instruction list as prepared code: what a process of a pipelined job runs every step.

    Forward 2 #5      the graph of stage 2's forward, on microbatch 5's values, its feed, and what the rank holds
    Send, Recv        beside compute: see `transfers`
    ReduceGrads       a stage's own: its graph, over the other axes; one that other stages have terms of: begun, and
                      the optimizer waits for it
    Gather            runs the graphs of its values, on what the rank holds
    Optimizer         norm, its total over the pipeline, update, in place
    Free              forgets values; those that the work just before reads last go one by one while it runs

Each graph is prepared once (`runtime.code`), its collectives begun early and waited for late, as in a program without
a pipeline. Gradients are added to their sums in place, each as soon as backward has made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardc.ir.graph import Port, type_of
from shardc.ir.ops.context import RankContext, running
from shardc.runtime.arena import Arena
from shardc.runtime.microbatches import Feed
from shardc.runtime.monitor import Monitor
from shardc.stages.arena import plans
from shardc.stages.finishing import FinishCode, Outputs, guarded
from shardc.stages.graph_code import GraphCode, Now, summing
from shardc.stages.instructions import (
    COMPUTE,
    TRANSFER,
    Compute,
    Free,
    Gather,
    Instruction,
    Optimizer,
    ReduceGrads,
    Send,
    in_words,
)
from shardc.stages.links import Links
from shardc.stages.lists import batches
from shardc.stages.pipeline import Part, Value
from shardc.stages.places import STRIDE, graphs_of
from shardc.stages.program import Pipelined
from shardc.stages.transfers import Arrival, Channel, Clock, Tensor, Transfers

Act = Callable[[Now], None]
End = Callable[[Now, Optimizer, int], Outputs]


class ListExecutor:
    """Runs the list of coordinate `c` as the rank of `context`, a mesh of the other axes. Tensors are its shards."""

    def __init__(self, program: Pipelined, c: int, context: RankContext, rank: int, links: Links) -> None:
        self.program, self.c, self.context, self.rank, self.links = program, c, context, rank, links
        self.transfers = Transfers(links.everyone, links.device, links.limit)
        self.arena = Arena(plans(program, c), links.device)
        self.finish = FinishCode(program.finishes[c], context, rank, links, self.arena)
        self._end: End = self.finish.run
        self._parts: dict[int, _PartCode] = {}
        self._gathers: dict[int, GraphCode] = {}
        self._reduces: dict[str, list[GraphCode]] = {}  # by sum
        self._outputs: Outputs = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._reducing: dict[int, Any] = {}  # by place, what has begun
        self._lacking = _lacking(program)
        self._acts = self._prepared(program.lists.ranks[c])

    @torch.no_grad()
    def run(
        self,
        held: Mapping[str, torch.Tensor],
        feeds: Sequence[Feed],
        monitor: Monitor | None = None,
        clock: Clock | None = None,
        end: End | None = None,
    ) -> Outputs:
        """One step; its outputs as far as this rank has them, the loss and others of the whole step in any case.

        With an `end` in the optimizer's place, what that gives. Raises ShardcError naming the rank to blame when
        communication fails.
        """
        now = Now(held, feeds, monitor, clock)
        self._end, self._outputs, self._sums = end or self.finish.run, {}, now.sums
        self._reducing.clear()
        self.transfers.drop()
        self.transfers.monitor, self.transfers.clock = monitor, clock
        self.arena.enter()
        with running(self.context):
            for act in self._acts:
                act(now)
            self.transfers.drain()
            if end is None:
                self._pass_on(monitor)
                self._outputs |= {port: _whole(port, found) for port, found in now.outputs.items()}
        made, self._outputs = self._outputs, {}  # nothing of a step is held on to
        return made

    # ------------------------------------------------------------------ what a list becomes
    def _prepared(self, listed: Sequence[Instruction]) -> list[Act]:
        """What to do, in order."""
        made: list[Act] = []
        types, tags = _types(self.program), dict[tuple[type, int], int]()
        where = self.context, self.rank, self.links.device, self.arena
        at = 0
        for batch in batches(listed):
            i, place = batch[0], at * STRIDE
            if isinstance(i, TRANSFER):
                made.append(self._transfer(batch, at, types, tags))
            elif isinstance(i, COMPUTE):
                made.append(self._work(i, place, _freed_at(listed, at + 1)))
            elif isinstance(i, ReduceGrads):
                graphs = graphs_of(self.program, self.c, i)
                self._reduces[i.value] = [GraphCode(graph, *where) for graph in graphs]
                made.append(partial(self._reduce, i, place))
            elif isinstance(i, Gather):
                made.append(self._gather(i, place))
            elif isinstance(i, Free):
                made.append(partial(_free, [(name, i.microbatch) for name in i.values], place))
            else:
                assert isinstance(i, Optimizer), i
                made.append(partial(self._optimize, i, place))
            at += len(batch)
        return made

    def _work(self, i: Compute, place: int, freed: frozenset[Value]) -> Act:
        (graph,) = graphs_of(self.program, self.c, i)
        if id(graph) not in self._parts:
            code = GraphCode(graph, self.context, self.rank, self.links.device, self.arena)
            self._parts[id(graph)] = _PartCode(code, self.program, self.program.lists.pipeline.part(i), self._add)
        part = self._parts[id(graph)]
        read = [self.program.lists.pipeline.value(name, i.microbatch) for name in part.reads]
        consumed = [value for value in read if value in freed]
        return partial(part.run, i.microbatch, consumed, place, f" of {in_words(i)}")

    def _gather(self, i: Gather, place: int) -> Act:
        """The graphs of all its values, their calls numbered through."""
        made: list[tuple[str, GraphCode, int, list[int]]] = []
        base = place + 1
        for name, graph in zip(i.values, graphs_of(self.program, self.c, i), strict=True):
            if id(graph) not in self._gathers:
                self._gathers[id(graph)] = GraphCode(graph, self.context, self.rank, self.links.device, self.arena)
            code = self._gathers[id(graph)]
            slots = {port.name: slot for port, slot in code.outputs}
            made.append((name, code, base, [slots[member] for member in self.program.members(name)]))
            base += len(code.routine.names)
        within = f" of {in_words(i)}"

        def act(now: Now) -> None:
            now.begin(place)
            for name, code, base, slots in made:
                env = code.environment(now, -1)
                code.run(env, now, base, within)
                now.values[name, None] = tuple(env[slot] for slot in slots)
            now.end(place)

        return act

    def _transfer(
        self, batch: Sequence[Instruction], at: int, types: Mapping[str, Tensor], tags: dict[tuple[type, int], int]
    ) -> Act:
        """Tensors are numbered along their channel, which both ends do alike: the proof has them in one order."""
        sends: list[tuple[Channel, Value]] = []
        receives: list[tuple[Channel, Value, list[Tensor]]] = []
        for offset, i in enumerate(batch):
            assert isinstance(i, TRANSFER)
            names = self.program.members(i.value)
            first = tags.get((type(i), i.peer), 0)
            tags[type(i), i.peer] = first + len(names)
            numbers = tuple(range(first, first + len(names)))
            channel = Channel((at + offset) * STRIDE, self.links.ranks[i.peer], numbers)
            if isinstance(i, Send):
                sends.append((channel, (i.value, i.microbatch)))
            else:
                receives.append((channel, (i.value, i.microbatch), [types[name] for name in names]))

        def act(now: Now) -> None:
            leaving = [(channel, now.value(value)) for channel, value in sends]
            arrivals = self.transfers.post(leaving, [(channel, shapes) for channel, _, shapes in receives])
            now.values.update(zip((value for _, value, _ in receives), arrivals, strict=True))

        return act

    # ------------------------------------------------------------------ gradients, and the end of the step
    def _add(self, name: str, term: torch.Tensor) -> None:
        """Add a microbatch's term to a sum, whose memory is its own. What ranks will sum lies alike on all of them."""
        before = self._sums.get(name)
        if before is not None:
            before.add_(term)
        elif name in self.program.shared:
            self._sums[name] = term.clone(memory_format=torch.contiguous_format)
        else:
            self._sums[name] = term.clone()

    def _reduce(self, i: ReduceGrads, place: int, now: Now) -> None:
        now.begin(place)
        shared = i.value in self.program.shared  # else nobody else has any
        if shared and i.value not in now.sums:  # a weight that is only held here
            type = self.program.shared[i.value]
            shape = type.local_shape(self.program.body.mesh)
            now.sums[i.value] = torch.zeros(shape, dtype=type.dtype, device=self.links.device)
        for code in self._reduces.get(i.value, ()):
            env = code.environment(now, -1)
            for slot, name in code.sums:
                env[slot] = now.sums.pop(name)
            code.run(env, now, place + 1, f" of {in_words(i)}")
            now.sums |= {port.name: env[slot] for port, slot in code.outputs}
        if not shared or len(i.group) == 1:
            now.end(place)
        else:
            terms, group = now.sums[i.value], self.links.group(i.group)

            def begin() -> None:
                self._reducing[place] = dist.all_reduce(terms, group=group, async_op=True)

            guarded(begin, now.monitor, place)

    def _optimize(self, i: Optimizer, place: int, now: Now) -> None:
        for begun, work in self._reducing.items():
            guarded(work.wait, now.monitor, begun)
            now.end(begun)
        self._reducing.clear()
        self._outputs = self._end(now, i, place)

    def _pass_on(self, monitor: Monitor | None) -> None:
        """Give all stages what only some of them make and everyone asks for."""
        place = len(self.program.lists.ranks[self.c]) * STRIDE
        for port, source, made in self._lacking:
            if self.c == source:
                self._outputs[port] = self._outputs[port].contiguous()
            else:
                self._outputs[port] = torch.empty(made.shape, dtype=made.dtype, device=self.links.device)
            tensor, origin = self._outputs[port], self.links.ranks[source]
            guarded(partial(dist.broadcast, tensor, src=origin, group=self.links.everyone), monitor, place)


class _PartCode:
    """The code of a part of a stage, and how its ports stand to the values of the list."""

    def __init__(
        self,
        code: GraphCode,
        program: Pipelined,
        part: Part,
        add: Callable[[str, torch.Tensor], None],
    ) -> None:
        members, self._value = program.members, program.lists.pipeline.value
        self._code, self._add, self.reads = code, add, part.reads
        where = {member: (name, k) for name in part.reads for k, member in enumerate(members(name))}
        self._reads = [(slot, *where[name]) for slot, name in code.values]
        slots = {port.name: slot for port, slot in code.outputs if port.role == "value"}
        self._makes = [(name, [slots[member] for member in members(name)]) for name in part.makes]
        self._own = [(port, slot) for port, slot in code.outputs if port.role in ("buffer", "output")]
        self._left = summing(code, add)

    def run(self, microbatch: int, consumed: Sequence[Value], place: int, within: str, now: Now) -> None:
        """Values that are `consumed` are read for the last time: only the code's slots hold them then."""
        env = self._code.environment(now, microbatch)
        for slot, name, k in self._reads:
            env[slot] = now.value(self._value(name, microbatch))[k]
        for value in consumed:
            del now.values[value]
        now.begin(place)
        self._code.run(env, now, place + 1, within)
        now.end(place)
        for name, slots in self._makes:
            now.values[name, microbatch] = tuple(env[slot] for slot in slots)
        for name, slot in self._left:
            self._add(name, env[slot])
        for port, slot in self._own:
            found = now.outputs.setdefault(port, {})
            if port.role == "buffer":
                now.buffers[port.name] = env[slot]
                found.clear()
            found[microbatch] = env[slot]


def _whole(port: Port, found: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """What the step gives, of what each microbatch gave: outputs stacked, and the last one's buffers."""
    several = port.role == "output" and len(found) > 1
    return torch.stack([found[k] for k in sorted(found)]) if several else found[max(found)]


def _free(values: Sequence[Value], place: int, now: Now) -> None:
    now.begin(place)
    for value in values:
        found = now.values.pop(value, None)
        if isinstance(found, Arrival):  # received for nothing, but its memory is still written to
            found.wait()
    now.end(place)


def _freed_at(listed: Sequence[Instruction], at: int) -> frozenset[Value]:
    """What is freed before anything else is done."""
    found: set[Value] = set()
    while at < len(listed) and isinstance(i := listed[at], Free):
        found |= {(name, i.microbatch) for name in i.values}
        at += 1
    return frozenset(found)


def _types(program: Pipelined) -> dict[str, Tensor]:
    """What a rank holds of every value that passes between parts."""
    mesh = program.body.mesh
    found: dict[str, Tensor] = {}
    for stage in program.stages:
        for graph in (stage.forward, stage.dgrad, stage.wgrad):
            for port, value in zip(graph.outputs, graph.output_values, strict=True):
                if port.role == "value":
                    found[port.name] = Tensor(type_of(value).local_shape(mesh), type_of(value).dtype)
    return found


def _lacking(program: Pipelined) -> list[tuple[Port, int, Tensor]]:
    """What the step gives that not every rank makes, but all must have: from whom they get it, and what it is."""
    mesh, found = program.body.mesh, list[tuple[Port, int, Tensor]]()
    for port, value in zip(program.body.outputs, program.body.output_values, strict=True):
        makers = [c for c, finish in enumerate(program.finishes) if port in finish.update.outputs]
        if port.role in ("loss", "output") and makers and len(makers) < len(program.finishes):
            found.append((port, makers[0], Tensor(type_of(value).local_shape(mesh), type_of(value).dtype)))
    return found
