"""A coordinate's instruction list walked, for what its ranks hold: inside each piece of work, its graph is walked too.

    14  Forward 0 #3    what is stored, sums so far, values of microbatches 0..3 that no Free has named yet,
                        and on top of them what the forward's own calls hold

Ranks store what their stages read (parameters, buffers, their optimizer states, inputs of the batch) and get the rest
as the list says: a value from the part that makes it, its Recv or its Gather, to its Free; a gradient from the first
term of its sum to its last use in the update. What was sent stays until the send is waited for. Values that share
memory count once. What is freed right after a piece of work goes inside it, and a term of a sum as soon as it is added.
A value is an activation where a backward of the same ranks reads it, communication if it only comes or goes, or is
gathered, else temporary. Longer than 400 lines: one walk, and what each instruction does to what is held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from shardc.cost.memory import (
    CATEGORIES,
    RETURNED,
    STORED,
    Category,
    Host,
    LiveValue,
    Moment,
    Walk,
    category_of,
    live_value,
    moment_of,
    nothing,
)
from shardc.ir.account import Account, account_of
from shardc.ir.graph import Graph, Port, info, operands, type_of
from shardc.ir.liveness import Life
from shardc.ir.microbatch import GIVEN
from shardc.ir.ops.accumulate import ADDS
from shardc.ir.ops.host_copies import BEGIN_FETCH
from shardc.ir.ops.host_copies import on_host as lies_on_host
from shardc.ir.small_sums import may_be_sums
from shardc.ir.storages import Storage
from shardc.partition.program_counter import graphs_of
from shardc.partition.stage_arena import arena_plans
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import (
    COMPUTE,
    TRANSFER,
    Compute,
    Forward,
    Free,
    Gather,
    Instruction,
    Optimizer,
    Recv,
    ReduceGrads,
    Send,
)
from shardc.schedule.lists import SENDS_IN_FLIGHT, split_batches
from shardc.schedule.pipeline import PART_OF, PartName, ValueKey


@dataclass(eq=False)
class Block:
    """Memory that outlives the work that made it; `uses` counts the values that lie in it."""

    value: LiveValue
    uses: int = 0
    on_host: bool = False


Blocks = dict[str, Block | None]  # by value: its memory; None for what is stored anyway


@dataclass(frozen=True, eq=False)
class Body:
    """A graph of the ranks: its calls, and the memory of its values."""

    graph: Graph
    account: Account
    last: Mapping[Storage, int]  # when it is read last
    placed: Collection[fx.Node]  # in the arena

    @classmethod
    def of_graph(cls, graph: Graph, placed: Collection[fx.Node], overlap: bool) -> Body:
        account = account_of(graph, overlap=overlap)
        last: dict[Storage, int] = {}
        for call, until in zip(account.calls, account.times.read, strict=True):
            for value in operands(call):
                last[account.of[value]] = max(last.get(account.of[value], 0), until)
        return cls(graph, account, last, placed)

    @cached_property
    def returned(self) -> dict[Storage, list[Port]]:
        ports_of: dict[Storage, list[Port]] = {}
        for port, value in zip(self.graph.outputs, self.graph.output_values, strict=True):
            ports_of.setdefault(self.account.of[value], []).append(port)
        return ports_of

    def added_at(self, port: Port) -> int:
        """When a term is added to its sum."""
        return self.account.added.get(self._outputs[port], self.account.moments)

    @cached_property
    def becoming_sums(self) -> set[fx.Node]:
        """The terms that are the sums of a first microbatch, which do not copy them."""
        together = [term for action in self.account.times.actions if len(action.terms) > 1 for term in action.terms]
        return may_be_sums(self.graph, together) if together else set()

    @cached_property
    def _outputs(self) -> dict[Port, fx.Node]:
        return dict(zip(self.graph.outputs, self.graph.output_values, strict=True))

    @cached_property
    def inputs(self) -> dict[str, Storage]:
        pairs = zip(self.graph.inputs, self.graph.placeholders, strict=True)
        return {port.name: self.account.of[node] for port, node in pairs if port.role in ("value", "sum")}

    @cached_property
    def read(self) -> dict[fx.Node, str]:
        return {storage.value: name for name, storage in self.inputs.items()}


@dataclass(frozen=True)
class Run:
    """A body as it runs at some instruction."""

    body: Body
    lives: Sequence[Life]
    categories: Sequence[Category]

    @cached_property
    def walk(self) -> Walk:
        return Walk.over(self.lives, self.categories, self.body.account.moments, self.body.placed)


class Ranks:
    """Where a coordinate's ranks are in their list, what they hold beyond what is stored, and the most so far."""

    def __init__(self, program: StagedProgram, c: int, early: bool) -> None:
        self.program, self.c, self.early = program, c, early
        self.mesh, self.pipeline, self.listed = program.body.mesh, program.lists.pipeline, program.lists.ranks[c]
        self.bodies: dict[int, Body] = {}
        self.runs: dict[tuple[int, frozenset[str], frozenset[str]], Run] = {}
        self.values: dict[ValueKey, Blocks] = {}
        self.sums: Blocks = {}
        self.results: Blocks = {}  # outputs, new buffers, and what the norm hands to the update
        self.sending: list[list[Block | None]] = []  # what was sent, a batch each, until it is waited for
        self.now, self.most, self.at_peak = nothing(), nothing(), nothing()
        self.host, self.most_on_host = 0, 0  # bytes of values there
        arenas = arena_plans(program, c) if early else {}  # a simulation has none
        self._placed = {graph: plan.values for graph, plan in arenas.items()}
        self.now["arena"] = max((plan.bytes for plan in arenas.values()), default=0)
        self.peak, self.peak_at = -1, 0
        self.moment: Moment | None = None
        self.live: list[LiveValue] = []
        self.timeline: list[int] = []

    def run(self) -> None:
        for batch in split_batches(self.listed):
            if self.early and isinstance(batch[0], TRANSFER):
                self._send([i for i in batch if isinstance(i, Send)])
            for i in batch:
                self.timeline.append(0)
                self._do(len(self.timeline) - 1, i)
                self._look(len(self.timeline) - 1, None)

    # ------------------------------------------------------------------ the list
    def _do(self, index: int, i: Instruction) -> None:
        if isinstance(i, COMPUTE):
            self._compute(index, i)
        elif isinstance(i, Recv):
            arrived = Block(live_value(Storage(self._named[i.value], i.bytes), self._category(i.value)))
            self.values[i.value, i.microbatch] = {i.value: self._take(arrived)}
        elif isinstance(i, Gather):
            for name, graph in zip(i.values, graphs_of(self.program, self.c, i), strict=True):
                blocks = self._run(index, graph, {}, ())
                self.values[name, None] = {port.name: self._take(block) for port, block in blocks.items()}
        elif isinstance(i, Free):
            for name in i.values:
                self._forget(self.values.pop((name, i.microbatch), {}))
        elif isinstance(i, ReduceGrads) and i.value in self.program.shared:
            self._begin_sum(i.value)  # also where there are no terms of it
        elif isinstance(i, ReduceGrads):
            for graph in graphs_of(self.program, self.c, i):
                read = {name: self.sums.pop(name) for name in self._body(graph).inputs}
                if self.early:
                    self._forget(read)
                reduced = self._run(index, graph, read, read if self.early else ())
                self.sums |= {port.name: self._take(block) for port, block in reduced.items()}
                if not self.early:
                    self._forget(read)
        elif isinstance(i, Optimizer):
            finish = self.program.epilogues[self.c]
            passed = self._run(index, finish.norm, self.sums, ())
            self.results |= {port.name: self._take(block) for port, block in passed.items()}
            inputs = {**self.sums, **self.results}
            read = self._body(finish.update).inputs
            for table in (self.sums, self.results) if self.early else ():
                self._forget({name: table.pop(name) for name in list(table) if name in read})
            self._run(index, finish.update, inputs, read if self.early else ())

    def _send(self, sends: Sequence[Send]) -> None:
        """Values that leave stay until their batch is waited for, which is as late as a rank of a job may."""
        while len(self.sending) >= SENDS_IN_FLIGHT:
            for block in self.sending.pop(0):
                self._drop(block)
        if sends:
            leaving = [self.values.get((i.value, i.microbatch), {}) for i in sends]
            self.sending.append([self._take(block) for blocks in leaving for block in blocks.values()])

    def _compute(self, index: int, i: Compute) -> None:
        graph, part = self.program.stages[i.stage][PART_OF[type(i)]], self.pipeline.part(i)
        inputs: Blocks = {}
        released: list[str] = []
        fetched: list[Block] = []
        for name in part.reads:
            value = self.pipeline.value_key(name, i.microbatch)
            inputs |= self.values.get(value, {})
            if self.early and value in self.values and value in self._freed_after(index):
                released += self.values[value]
                blocks = self.values.pop(value)
                fetched += [block for block in blocks.values() if block is not None and block.on_host]
                self._forget({name: block for name, block in blocks.items() if block not in fetched})
        outputs = self._run(index, graph, inputs, released)
        for block in fetched:  # the host holds them until they are there
            self._drop(block)
        by_name = {port.name: block for port, block in outputs.items() if port.role == "value"}
        for name in part.makes:
            members = self.program.members(name)
            self.values[name, i.microbatch] = {member: self._take(by_name[member]) for member in members}
        for port, block in outputs.items():
            if port.role == "sum":
                self._begin_sum(port.name)
            elif port.role in ("buffer", "output"):  # the next microbatch starts from new buffers; outputs add up
                key = port.name if port.role == "buffer" else f"{port.name}#{i.microbatch}"
                previous, self.results[key] = self.results.get(key), self._take(block)
                self._drop(previous)

    def _freed_after(self, index: int) -> set[ValueKey]:
        """The values that the `Free` instructions right after this one release."""
        freed: set[ValueKey] = set()
        while index + 1 < len(self.listed) and isinstance(free := self.listed[index + 1], Free):
            freed |= {(name, free.microbatch) for name in free.values}
            index += 1
        return freed

    # ------------------------------------------------------------------ a graph
    def _run(self, index: int, graph: Graph, inputs: Blocks, released: Collection[str]) -> dict[Port, Block | None]:
        """Account for the memory held while a graph runs; returns the memory of its outputs.

        `released` are the names of inputs that only the run itself still holds: those that it does not read are gone.
        """
        body = self._body(graph)
        owned = {b: n for n in released if n in body.inputs and (b := inputs[n]) and not b.uses and not b.on_host}
        begun = {port.name for port in graph.outputs if port.role == "sum" and port.name not in self.sums}
        key = (id(graph), frozenset(owned.values()), frozenset(begun))
        if key not in self.runs:
            lives = [
                *self._input_lives(body, owned, inputs),
                *self._call_lives(body, begun),
                *self._sum_lives(body, begun),
            ]
            lives.sort(key=lambda life: life[0].born)
            self.runs[key] = Run(body, [life for life, _ in lives], [category for _, category in lives])
        self._look(index, self.runs[key])
        fresh: dict[Storage, Block] = {}
        outputs: dict[Port, Block | None] = {}
        for home, ports in body.returned.items():
            for port in ports:
                if home.value.op == "placeholder":
                    outputs[port] = inputs.get(body.read.get(home.value, ""))
                    continue
                if home not in fresh:
                    fresh[home] = Block(live_value(home, self._returned(port)), on_host=lies_on_host(home.value))
                outputs[port] = fresh[home]
        return outputs

    def _input_lives(self, body: Body, owned: Mapping[Block, str], inputs: Blocks) -> list[tuple[Life, Category]]:
        """Inputs that only the run holds: each lives to its last use, or to the end if an output lies in it."""
        lives: list[tuple[Life, Category]] = []
        for block in owned:
            homes = [storage for name, storage in body.inputs.items() if inputs.get(name) is block]
            leaves = any(home in body.returned for home in homes)
            end = body.account.moments  # also of what nothing reads: no call lets go of it
            dies = end if leaves else max((body.last.get(home, end) for home in homes), default=end)
            storage = Storage(homes[0].value, block.value.bytes)
            lives.append((Life(storage, 0, dies, "bwd", "bwd", False, False), block.value.category))
        return lives

    def _call_lives(self, body: Body, begun: Collection[str]) -> list[tuple[Life, Category]]:
        lives: list[tuple[Life, Category]] = []
        for life in body.account.lives:
            ports = body.returned.get(life.storage, [])
            if self.early and ports and all(port.role == "sum" for port in ports):
                if life.storage.value.target in ADDS:  # it is the sum, or is added by its call
                    continue
                becomes = life.storage.value in body.becoming_sums and ports[0].name in begun
                added = body.account.moments if becomes else max(body.added_at(port) for port in ports)
                life = replace(life, dies=max(life.born, added, body.last.get(life.storage, 0)))
            # Only what leaves a part is an activation, or has come back: masks are made by each part that reads them.
            fetched = life.storage.value.target is BEGIN_FETCH
            category: Category = category_of(life)
            category = "temporaries" if category == "activations" and not fetched else category
            lives.append((life, self._returned(ports[0]) if ports else category))
        return lives

    def _sum_lives(self, body: Body, names: Collection[str]) -> list[tuple[Life, Category]]:
        """Sums that begin here: each lives from its first term on. A simulation keeps the term itself."""
        lives: list[tuple[Life, Category]] = []
        for storage, ports in body.returned.items() if self.early else ():
            for port in ports:
                if port.name in names and storage.value not in body.becoming_sums:
                    sum_ = Storage(storage.value, type_of(self._named[port.name]).local_bytes(self.mesh))
                    start = body.added_at(port)
                    lives.append((Life(sum_, start, body.account.moments, "bwd", "bwd", False, False), "gradients"))
        return lives

    # ------------------------------------------------------------------ bytes
    def _look(self, instruction: int, run: Run | None) -> None:
        """Update the peaks and the timeline; with a run, by the memory that its calls hold in addition."""
        most_in_run = nothing() if run is None else run.walk.most
        for category in CATEGORIES:
            self.most[category] = max(self.most[category], self.now[category] + most_in_run[category])
        total = sum(self.now.values()) + (0 if run is None else max(run.walk.timeline, default=0))
        self.timeline[instruction] = max(self.timeline[instruction], total)
        if total <= self.peak:
            return
        self.peak, self.peak_at, self.moment, self.at_peak = total, instruction, None, dict(self.now)
        tables = (*(blocks.values() for blocks in (*self.values.values(), self.sums, self.results)), *self.sending)
        live_blocks = dict.fromkeys(b for table in tables for b in table if b is not None and not b.on_host)
        self.live = [block.value for block in live_blocks]
        if run is not None and run.walk.peak_at is not None:
            self.moment = moment_of(run.body.account, run.walk.peak_at)
            for category, size in run.walk.at_peak.items():
                self.at_peak[category] += size
            for index in run.walk.there(run.lives):
                storage = run.lives[index].storage
                self.live.append(live_value(storage, run.categories[index]))

    def _take(self, block: Block | None) -> Block | None:
        if block is not None:
            self._count(block, 0 if block.uses else block.value.bytes)
            block.uses += 1
        return block

    def _drop(self, block: Block | None) -> None:
        if block is not None:
            block.uses -= 1
            self._count(block, 0 if block.uses else -block.value.bytes)

    def _count(self, block: Block, more: int) -> None:
        if block.on_host:
            self.host += more
            self.most_on_host = max(self.most_on_host, self.host)
        else:
            self.now[block.value.category] += more

    def _forget(self, blocks: Blocks) -> None:
        for block in blocks.values():
            self._drop(block)

    def _begin_sum(self, name: str) -> None:
        if name not in self.sums:
            node = self._named[name]
            self.sums[name] = self._take(
                Block(live_value(Storage(node, type_of(node).local_bytes(self.mesh)), "gradients"))
            )

    # ------------------------------------------------------------------ what is what
    def _body(self, graph: Graph) -> Body:
        if id(graph) not in self.bodies:
            self.bodies[id(graph)] = Body.of_graph(graph, self._placed.get(graph, ()), self.early)
        return self.bodies[id(graph)]

    def _returned(self, port: Port) -> Category:
        """What an output of a graph counts as."""
        if port.role == "value":
            return self._category(port.name)
        return "gradients" if port.role == "sum" else RETURNED.get(port.role, "activations")

    def _category(self, value: str) -> Category:
        if value in self._gathered:
            return "communication"
        name = self._bundle.get(value, value)
        if name in self._activations:
            return "activations"
        return "communication" if name in self._travelling else "temporaries"

    @cached_property
    def _named(self) -> dict[str, fx.Node]:
        return {info(node).name: node for node in self.program.body.values()}

    @cached_property
    def _bundle(self) -> dict[str, str]:
        """What a value goes by in the list, where that is not its own name."""
        names = {name for i in self.program.lists.work(self.c) for name in self.pipeline.part(i).makes}
        return {member: name for name in names for member in self.program.bundles.get(name, ())}

    @cached_property
    def _activations(self) -> set[str]:
        """The values that a forward makes and a backward of these ranks reads."""
        made_by_forward = {name for stage in self.pipeline.stages for name in stage.forward.makes}
        work = [i for i in self.program.lists.work(self.c) if not isinstance(i, Forward)]
        return {name for i in work for name in self.pipeline.part(i).reads} & made_by_forward

    @cached_property
    def _gathered(self) -> set[str]:
        return {member for name in self.pipeline.gather_stages for member in self.program.members(name)}

    @cached_property
    def _travelling(self) -> set[str]:
        return {i.value for i in self.program.lists.ranks[self.c] if isinstance(i, Send | Recv)}

    def stored(self) -> tuple[dict[Category, int], list[LiveValue], Host]:
        """The inputs of the graphs that live for the whole step: bytes by category, and each value. And what lies on
        the host, where the optimizer's state may, and what a `run` has had there."""
        work: set[tuple[int, PartName]] = {(i.stage, PART_OF[type(i)]) for i in self.program.lists.work(self.c)}
        graphs = [self.program.stages[stage][part] for stage, part in sorted(work)]
        graphs += [graph for i in self.listed if isinstance(i, Gather) for graph in graphs_of(self.program, self.c, i)]
        if self.pipeline.updates:
            graphs += [self.program.epilogues[self.c].norm, self.program.epilogues[self.c].update]
        live_values: dict[str, LiveValue] = {}
        on_host: dict[str, int] = {}
        for graph in graphs:
            for port, node in zip(graph.inputs, graph.placeholders, strict=True):
                if lies_on_host(node) and port.role != "value":
                    on_host[port.name] = type_of(node).local_bytes(self.mesh)
                elif port.role not in ("value", "sum"):
                    times = self.program.lists.microbatches if port.role in GIVEN else 1
                    category, size = STORED.get(port.role, "inputs"), type_of(node).local_bytes(self.mesh) * times
                    live_values[port.name] = live_value(Storage(node, size), category)
        stored_bytes = nothing()
        for value in live_values.values():
            stored_bytes[value.category] += value.bytes
        host = sum(on_host.values())
        return stored_bytes, list(live_values.values()), Host(host, host + self.most_on_host)
