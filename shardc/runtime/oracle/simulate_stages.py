"""All ranks of a step in one process: the embedded default, and the oracle of every other executor.

Their instruction lists run in any order that they allow. On the pipeline's axis there is one list a coordinate; all
ranks that share a coordinate run it in lock-step, on the mesh of the other axes (runtime/oracle/simulate.py). Between
coordinates there is no clock: whoever can do something may be next, and `choose` says who. A batch of transfers is
posted as a whole. Sends and receives meet, as in the machine that the proof is about; `buffered`, a send is done at
once, and what it sent waits for its receive.

What a list does wrong with values is an error here too: using one before it is there or after it was freed, making it
twice, leaving it behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce

import torch
from torch import fx

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.microbatch import GIVEN
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.instructions import Listing, Numerics, list_calls
from shardc.runtime.execute.microbatches import Feed, feeds
from shardc.runtime.oracle.simulate import PerRank, Returned, assembled, run_local, run_step, sharded, summed, supplied
from shardc.schedule.instructions import (
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
    Compute,
    Free,
    Gather,
    Instruction,
    PipelineCollective,
    Recv,
    ReduceGrads,
    RunBody,
    Send,
    Transfer,
    instruction_text,
)
from shardc.schedule.lists import split_batches
from shardc.schedule.pipeline import PART_OF, ValueKey
from shardc.schedule.prove import require_proved

Choose = Callable[[int], int]  # which of so many moves comes next
# A coordinate, a microbatch (-1 once a step), a value and its shards.
Observe = Callable[[int, int, fx.Node, Sequence[torch.Tensor]], None]
Held = dict[str, PerRank]  # by name: what each rank of the inner mesh has


def first(_: int) -> int:
    return 0


@torch.no_grad()
def simulate_stages(
    program: StagedProgram,
    inputs: Mapping[str, torch.Tensor],
    *,
    fed: Sequence[Feed] | None = None,
    dtype: torch.dtype | None = None,
    choose: Choose = first,
    buffered: bool = False,
    observe: Observe | None = None,
    returned: Returned | None = None,
) -> dict[Port, torch.Tensor]:
    """Run a program on global inputs by port name; the global outputs.

    `fed` is what each microbatch is fed; else the inputs hold whole batches, which are split. The lists are proved
    first. `observe` sees each value as it is made (of a body: how often it was made before, for its microbatch),
    `returned` each output, as one coordinate has it.
    """
    lists = program.lists
    if lists.microbatches != program.body.microbatches:
        message = f"lists of {lists.microbatches} microbatches cannot run a step of {program.body.microbatches}"
        raise error("SC220", message, hint="build the lists with the program's number of microbatches")
    require_proved(lists)
    return _Machine(program, inputs, fed, Numerics(dtype=dtype), buffered, observe, returned).run(choose)


class _Coordinate:
    """The state of the ranks of one coordinate on the pipeline's axis: their position in the list, and their values."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.steps = split_batches(instructions)
        self.at = 0
        self.posted: list[Transfer] = []  # of the present batch: what is not done
        self.values: dict[ValueKey, Held] = {}
        self.gone: set[ValueKey] = set()
        self.sums: Held = {}
        self.buffers: Held = {}
        self.post()

    def post(self) -> None:
        batch = self.steps[self.at] if self.at < len(self.steps) else []
        self.posted = [i for i in batch if isinstance(i, TRANSFER)]

    def next(self) -> None:
        self.at += 1
        self.post()

    @property
    def present(self) -> Instruction | None:
        """The present instruction; None at the end of the list, and for transfers."""
        return None if self.at >= len(self.steps) or self.posted else self.steps[self.at][0]


class _Machine:
    def __init__(
        self,
        program: StagedProgram,
        inputs: Mapping[str, torch.Tensor],
        fed: Sequence[Feed] | None,
        numerics: Numerics,
        buffered: bool,
        observe: Observe | None,
        returned: Returned | None,
    ) -> None:
        self.observe, self.returned = observe, returned
        self.program, self.lists, self.numerics, self.buffered = program, program.lists, numerics, buffered
        self.body, self.mesh = program.body, program.body.mesh
        self.given, self.fed = inputs, feeds(self.body, inputs) if fed is None else fed
        self.types = {name: type_of(node) for name, node in self.body.input_nodes().items()}
        self.local: dict[tuple[str, int], PerRank] = {}
        self.listings: dict[int, Listing] = {}
        self.coordinates = [_Coordinate(listed) for listed in program.lists.ranks]
        self.channels: dict[tuple[int, int], deque[tuple[ValueKey, Held]]] = defaultdict(deque)
        self.outputs: dict[Port, dict[int, torch.Tensor]] = {}  # by microbatch; -1 for those of the step
        self.made: dict[Port, PerRank] = {}  # of the step, to compare copies

    @cached_property
    def inputs(self) -> list[dict[str, torch.Tensor]]:
        """By microbatch: the value of each input of the step."""
        ports = [(port, self.types[port.name]) for port in self.body.inputs]
        wholes = [
            supplied(ports, {**self.given, **feed}, any_float=self.numerics.dtype is not None) for feed in self.fed
        ]
        return [{port.name: value for (port, _), value in zip(ports, whole, strict=True)} for whole in wholes]

    # ------------------------------------------------------------------ moves
    def run(self, choose: Choose) -> dict[Port, torch.Tensor]:
        while moves := self._moves():
            moves[choose(len(moves))]()
        for rank, c in enumerate(self.coordinates):
            if c.at < len(c.steps):
                raise _wrong("SC523", "waits for ever", rank, c.steps[c.at][0])
            if c.values:
                raise _wrong("SC524", f"ends, and {_name(next(iter(c.values)))} was never freed", rank, None)
        return {port: self._whole(port) for port in self.body.outputs}

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        for rank, c in enumerate(self.coordinates):
            i = c.present
            if isinstance(i, COLLECTIVE):
                group = i.group
                if rank == group[0] and all(self.coordinates[other].present == i for other in group):
                    moves.append(lambda i=i: self._collective(i))
            elif i is not None:
                moves.append(lambda rank=rank, i=i: self._work(rank, i))
            elif c.posted:
                moves += self._transfers(rank, c)
        return moves

    def _transfers(self, rank: int, c: _Coordinate) -> list[Callable[[], None]]:
        """The moves of posted transfers: the first send to each peer, and, if sends are buffered, the receives."""
        transfers: list[Callable[[], None]] = []
        seen: set[tuple[type, int]] = set()
        for i in c.posted:
            if (type(i), i.peer) in seen:
                continue
            seen.add((type(i), i.peer))
            if isinstance(i, Send):
                other = self._counterpart(rank, i)
                if self.buffered:
                    transfers.append(lambda i=i: self._send(rank, i))
                elif other is not None:
                    transfers.append(lambda i=i, other=other: self._meet(rank, i, other))
            elif self.buffered and self.channels[i.peer, rank]:
                transfers.append(lambda i=i: self._receive(rank, i))
        return transfers

    def _counterpart(self, rank: int, i: Send) -> Recv | None:
        posted = self.coordinates[i.peer].posted
        return next((r for r in posted if isinstance(r, Recv) and r.peer == rank), None)

    def _send(self, rank: int, i: Send) -> None:
        value = (i.value, i.microbatch)
        self.channels[rank, i.peer].append((value, self._there(rank, value, i)))
        self._done(rank, i)

    def _meet(self, rank: int, i: Send, other: Recv) -> None:
        self._send(rank, i)
        self._receive(i.peer, other)

    def _receive(self, rank: int, i: Recv) -> None:
        value, tensors = self.channels[i.peer, rank].popleft()
        if value != (i.value, i.microbatch):
            raise _wrong("SC521", f"is sent {_name(value)}", rank, i)
        self._put(rank, value, tensors, i)
        self._done(rank, i)

    def _done(self, rank: int, i: Transfer) -> None:
        c = self.coordinates[rank]
        c.posted.remove(i)
        if not c.posted:
            c.next()

    def _work(self, rank: int, i: Instruction) -> None:
        c = self.coordinates[rank]
        if isinstance(i, Free):
            for name in i.values:
                self._there(rank, (name, i.microbatch), i)
                del c.values[name, i.microbatch]
                c.gone.add((name, i.microbatch))
        elif isinstance(i, Gather):
            self._gather(rank, i)
        elif isinstance(i, RunBody):
            self._run_body(rank, i)
        else:
            assert isinstance(i, COMPUTE)
            self._compute(rank, i)
        c.next()

    def _collective(self, i: PipelineCollective) -> None:
        members = [self.coordinates[rank] for rank in i.group]
        if isinstance(i, ReduceGrads):
            if i.value in self.program.shared:  # else nobody else has any
                terms = [c.sums.get(i.value) or self._zeros(i.value) for c in members]
                total = reduce(summed, terms)
                for c in members:
                    c.sums[i.value] = total
            for rank in i.group:
                self._reduce(rank, i)
        else:
            self._finish(i.group)
        for c in members:
            c.next()

    # ------------------------------------------------------------------ work
    def _run_body(self, rank: int, i: RunBody) -> None:
        (graph,) = graphs_of(self.program, rank, i)
        occurrences: Counter[fx.Node] = Counter()

        def watch(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            assert self.observe is not None
            self.observe(rank, occurrences[node], node, values)
            occurrences[node] += 1

        observe = None if self.observe is None else watch
        outputs = run_step(graph, self.mesh, self.given, self.fed, self.numerics, observe, self.returned)
        self.outputs |= {port: {-1: value} for port, value in outputs.items()}

    def _compute(self, rank: int, i: Compute) -> None:
        c, microbatch = self.coordinates[rank], i.microbatch
        part, phase = self.lists.pipeline.part(i), PART_OF[type(i)]
        graph = self.program.stages[i.stage][phase]
        values_read: Held = {}
        for name in part.reads:
            values_read |= self._there(rank, self.lists.pipeline.value_key(name, microbatch), i)
        produced: Held = {}
        for port, values in self._run(graph, c, values_read, microbatch).items():
            if port.role == "value":
                produced[port.name] = values
            elif port.role == "sum":
                total = c.sums.get(port.name)
                c.sums[port.name] = values if total is None else summed(total, values)
            elif port.role == "buffer":
                c.buffers[port.name] = values
            if port.role in ("buffer", "output"):
                self._output(port, values, graph, microbatch)
        for name in part.makes:
            members = {member: produced.pop(member) for member in self.program.members(name)}
            self._put(rank, (name, microbatch), members, i)
        assert not produced, f"{instruction_text(i)} makes {', '.join(produced)}, which the pipeline does not know"

    def _reduce(self, rank: int, i: ReduceGrads) -> None:
        """Reduce a sum over the other axes. Its shards may then replace the stage's sum."""
        c = self.coordinates[rank]
        for graph in graphs_of(self.program, rank, i):
            outputs = self._run(graph, c, {}, -1)
            for port in graph.inputs:
                c.sums.pop(port.name)
            c.sums |= {port.name: values for port, values in outputs.items()}

    def _gather(self, rank: int, i: Gather) -> None:
        for name, graph in zip(i.values, graphs_of(self.program, rank, i), strict=True):
            outputs = self._run(graph, self.coordinates[rank], {}, -1)
            self._put(rank, (name, None), {port.name: values for port, values in outputs.items()}, i)

    def _finish(self, group: Sequence[int]) -> None:
        shares: dict[int, dict[Port, PerRank]] = {}
        for rank in group:
            shares[rank] = self._run(self.program.epilogues[rank].norm, self.coordinates[rank], {}, -1)
        named = {rank: {port.name: values for port, values in outputs.items()} for rank, outputs in shares.items()}
        names = self.program.epilogues[group[0]].totals
        totals = {name: reduce(summed, (named[rank][name] for rank in group)) for name in names}
        for rank in group:
            graph = self.program.epilogues[rank].update
            for port, values in self._run(graph, self.coordinates[rank], {**named[rank], **totals}, -1).items():
                self._returned(port, values, graph, rank)

    def _returned(self, port: Port, values: PerRank, graph: Graph, rank: int) -> None:
        known = self.made.setdefault(port, values)
        if any(not torch.equal(a, b) for a, b in zip(known, values, strict=True) if not a.isnan().any()):
            message = f"the copies of {port.role} '{port.name}' differ between stages, on pipeline rank {rank}"
            raise error("SC505", message, tensor=port.name)
        self._output(port, values, graph, -1)

    def _output(self, port: Port, values: PerRank, graph: Graph, microbatch: int) -> None:
        node = graph.output_values[graph.outputs.index(port)]
        self.outputs.setdefault(port, {})[microbatch] = assembled(values, node, self.mesh)
        if self.returned is not None:
            self.returned(port, node, values)

    def _run(self, graph: Graph, c: _Coordinate, values_read: Held, microbatch: int) -> dict[Port, PerRank]:
        listing = self.listings.get(id(graph))
        if listing is None:
            self.listings[id(graph)] = listing = list_calls(graph, self.numerics)
        inputs = [self._input(port, c, values_read, microbatch) for port in graph.inputs]
        watch = None if self.observe is None else partial(self.observe, self.coordinates.index(c), microbatch)
        return dict(zip(graph.outputs, run_local(listing, inputs, self.numerics, watch), strict=True))

    def _input(self, port: Port, c: _Coordinate, values_read: Held, microbatch: int) -> PerRank:
        if port.role == "value":
            return values_read[port.name]
        if port.role == "sum":
            return c.sums[port.name]
        if port.role == "buffer" and port.name in c.buffers:
            return c.buffers[port.name]
        key = (port.name, microbatch if port.role in GIVEN else 0)
        if key not in self.local:
            value = self.inputs[key[1]][port.name].detach()
            self.local[key] = sharded(self.numerics.cast(value), self.types[port.name], self.mesh)
        return self.local[key]

    def _zeros(self, name: str) -> PerRank:
        type = self.program.shared[name]
        zero = torch.zeros(type.local_shape(self.mesh), dtype=self.numerics.lift(type.dtype))
        return [zero] * self.mesh.world_size

    # ------------------------------------------------------------------ values
    def _there(self, rank: int, value: ValueKey, i: Instruction) -> Held:
        c = self.coordinates[rank]
        if value not in c.values:
            reason = "after it is freed" if value in c.gone else "before it is there"
            raise _wrong("SC524", f"uses {_name(value)} {reason}", rank, i)
        return c.values[value]

    def _put(self, rank: int, value: ValueKey, tensors: Held, i: Instruction) -> None:
        values = self.coordinates[rank].values
        if value in values:
            raise _wrong("SC524", f"makes {_name(value)}, which is there already", rank, i)
        values[value] = tensors

    def _whole(self, port: Port) -> torch.Tensor:
        by_microbatch = self.outputs[port]
        if -1 in by_microbatch:
            return by_microbatch[-1]
        if port.role == "output" and len(by_microbatch) > 1:
            return torch.stack([by_microbatch[k] for k in range(len(by_microbatch))])
        return by_microbatch[max(by_microbatch)]


def _name(value: ValueKey) -> str:
    name, microbatch = value
    return name if microbatch is None else f"{name}#{microbatch}"


def _wrong(code: str, message: str, rank: int, i: Instruction | None) -> ShardcError:
    text = f"{instruction_text(i)} {message}" if i is not None else f"the list {message}"
    return error(code, text, location=f"pipeline rank {rank}")
