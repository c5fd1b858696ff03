"""One rank of a running job: its list, and the parameters, buffers and state of its own stages alone.

Rank (c, i) runs list c as rank i of the mesh of the other axes. What several stages hold, tied weights, is held by the
ranks of each, and equal on all; the lowest of them answers for it where the whole of the model is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardc.cost.profile import Profile
from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.group_axes import axes_used, axes_used_twice
from shardc.ir.types import TensorType
from shardc.partition.program_counter import ListCounterNames, graphs_of
from shardc.partition.same_state import homes
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.call_recorder import CallRecorder
from shardc.runtime.execute.data_parts import DataParts
from shardc.runtime.execute.executor import Executor, makers_of
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.measured_timeline import StepClock, gather_timeline, start_clock
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.monitor import Monitor
from shardc.runtime.execute.peer_groups import PeerGroups, groups_of, ranks_of_position
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from shardc.runtime.execute.step_epilogue import blame_failures
from shardc.runtime.execute.step_graph import Graphs
from shardc.runtime.train.agreement import ranks_text, sides
from shardc.runtime.train.consensus import Consensus
from shardc.runtime.train.nonfinite import probe
from shardc.runtime.train.rank_part import RankPart
from shardc.runtime.train.rank_session import Member, Shards
from shardc.runtime.train.replicas import HINTS, Peers
from shardc.schedule.instructions import Optimizer, RunBody
from shardc.schedule.prove import prove

if TYPE_CHECKING:
    from shardc.runtime.checkpoint.checkpoint import Checkpoints


class Job:
    """Joins the job on construction; tensors that it holds are this rank's shards, on its device."""

    def __init__(
        self,
        program: StagedProgram,
        timeout: float,
        device: str | None = None,
        facts: Mapping[str, str] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        prove(program.lists).check()
        self.member = member = Member(program.mesh, timeout, device, facts)
        self.rank, self.device = member.rank, member.device
        self._connect(program, None)
        store = member.store(self.body.name)
        names, limit = ListCounterNames(program), member.limit.total_seconds()
        self.monitor = Monitor(store, self.rank, member.world, names, fatal=member.on_gpu, replay_limit=limit)
        self.graphs = graphs
        self.number = 0  # of the program, to the monitor
        self._topics = 0  # that ranks exchanged the forms of their batches on
        self._attend()

    def beside(self, program: StagedProgram, evaluates: bool) -> Job:
        """This rank with another program of the job, over the same connections; all ranks must call it.

        Raises ShardcError (SC541) where it is not the same program on all ranks.
        """
        prove(program.lists).check()
        other = object.__new__(Job)
        other.member, other.rank, other.device, other.monitor = self.member, self.rank, self.device, self.monitor
        texts = [program.text(c, comments=False) for c in program.coordinate_range]
        if differing := self._differing("\n".join(texts)):
            does = "evaluate" if evaluates else "run"
            message = (
                f"{ranks_text(differing)} {does}{'s' * (len(differing) == 1)} another program than the other ranks"
            )
            hint = "give every rank the same batches (all of each, of the same shapes), model and optimizers"
            raise error("SC541", message, hint=hint)
        other._connect(program, self.comm)
        other.number = self.monitor.add(ListCounterNames(program), evaluates)
        other.graphs = None if evaluates else self.graphs
        other._attend()
        return other

    def release(self) -> None:
        self.monitor.remove(self.number)

    def agree(self, form: str, when: str, *, alone: bool = False) -> None:
        if not alone and not self._differing(form):
            return
        topic, self._topics = f"form/{self.monitor.begun}/{self._topics}", self._topics + 1
        forms = self.monitor.exchange(topic, form, self.member.limit.total_seconds())
        majority, others = sides([f for f in forms if f is not None])
        if ahead := [rank for rank, other in enumerate(forms) if other is None]:
            message = f"{when}: rank {self.rank} was given a batch of another form than {ranks_text(ahead)}"
            raise error("SC542", message, cause=f"rank {self.rank}: {form}", hint=HINTS["form"])
        if others:
            ranks = sorted(rank for of in others.values() for rank in of)
            message = (
                f"{when}: {ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} given a batch of another form"
            )
            shown = [majority, *(of[0] for of in others.values())]
            cause = "\n".join(f"rank {rank}: {forms[rank]}" for rank in shown)
            raise error("SC542", f"{message} than the other ranks", cause=cause, hint=HINTS["form"])

    def _differing(self, text: str) -> list[int]:
        """The ranks whose text is not that of most; all must call it."""
        digest = hashlib.sha256(text.encode()).digest()[:8]
        own = torch.tensor(int.from_bytes(digest, signed=True), device=self.device)
        others = [int(row) for row in self.member.gather(own, self.monitor.blame)]
        return sorted(rank for ranks in sides(others)[1].values() for rank in ranks)

    def _connect(self, program: StagedProgram, known: ProcessGroupCommunicator | None) -> None:
        """The groups and connections of a program, and what runs it; all ranks must call it."""
        self.program, self.body, member = program, program.body, self.member
        self.c, self.i = program.coordinates(self.rank)
        mesh, count = self.body.mesh, len(program.lists.ranks)
        copies = [[program.rank_of(c, i) for i in range(mesh.world_size)] for c in range(count)]
        axes = {frozenset(axis_names): axis_names for graph in _all_graphs(program) for axis_names in axes_used(graph)}
        twice = {frozenset(names): names for graph in _all_graphs(program) for names in axes_used_twice(graph)}
        pipelines = [ranks_of_position(program, i) for i in range(mesh.world_size)]
        self.comm = ProcessGroupCommunicator(
            *(mesh, self.i, axes.values(), member.limit, copies, self.c, groups_of(program), known, twice.values()),
            pipelines,
        )
        pipeline = pipelines[self.i]
        back = self.comm.back.get(tuple(sorted(pipeline)))
        self.links = PeerGroups(pipeline, self.comm.group, self.device, member.limit, back)
        if member.on_gpu:
            self.links.connect(program, self.c)
        context = rank_context(mesh, self.i, self.comm)
        self.executor = Executor(program, self.c, context, self.rank, self.links)
        self._copies = copies

    def _attend(self) -> None:
        """What the connections serve between steps."""
        program, mesh, member = self.program, self.body.mesh, self.member
        self.shards = Shards(mesh, self.i, self.device, self.comm, self.monitor.blame)
        self.homes: Mapping[str, Sequence[int]] = _homes(program)
        self.on_host = program.states_on_host
        places = [program.coordinates(rank) for rank in range(member.world)]
        self.peers = Peers(mesh, self.device, lambda x: member.gather(x, self.monitor.blame), places, self.homes)
        self._read = {port.name for graph in _graphs_of(program, self.c) for port in graph.inputs}
        self._types = {name: type_of(node) for name, node in self.body.input_nodes().items()}
        self._clock: StepClock | None = None
        self._recorder: CallRecorder | None = None
        self.graph = None if self.graphs is None else self.graphs.of(self.executor, self.device, self.monitor)

    def brings(self, parts: DataParts) -> RankPart:
        self._types |= parts.types
        coordinates = [parts.index(member) for _, member in self.peers.places]
        return RankPart(parts, coordinates[self.rank], coordinates, self.peers)

    def placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self.on_host or not self.member.on_gpu:
            return tensor
        return tensor if tensor.is_pinned() else tensor.to("cpu").pin_memory()

    def settle(self) -> None:
        if self.on_host and self.member.on_gpu:
            torch.cuda.synchronize(self.device)

    def holds(self, name: str) -> bool:
        return self.c in self.homes[name]

    def fetch(self, name: str, tensor: torch.Tensor | None, type: TensorType) -> torch.Tensor:
        source = self.homes[name][0]
        if self.c == source:
            assert tensor is not None, f"stage {self.c} holds {name}"
            whole = self.shards.whole(tensor, type)
        else:
            whole = torch.empty(type.shape, dtype=type.dtype, device=self.device)
        return self._everywhere(whole, source)

    def output(self, port: Port, tensor: torch.Tensor | None) -> torch.Tensor:
        type = type_of(self.body.output_values[self.body.outputs.index(port)])
        source, count = makers_of(self.program, port)[0], self.body.microbatches
        if self.c != source:
            shape = type.shape if count == 1 else (count, *type.shape)
            whole = torch.empty(shape, dtype=type.dtype, device=self.device)
        elif tensor is None:
            raise AssertionError(f"stage {self.c} makes {port.name}")
        elif count == 1:
            whole = self.shards.whole(tensor, type)
        else:
            whole = torch.stack([self.shards.whole(one, type) for one in tensor])
        return self._everywhere(whole, source)

    def derived(self, port: Port, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        source = makers_of(self.program, port)[0]
        if self.c != source or whole is None:
            whole = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        return self._everywhere(whole, source)

    def _everywhere(self, whole: torch.Tensor, source: int) -> torch.Tensor:
        """What the ranks of a coordinate have, on those of all."""
        if len(self.links.ranks) > 1:
            whole = whole.contiguous()
            origin, group = self.links.ranks[source], self.links.whole_group
            blame_failures(lambda: dist.broadcast(whole, src=origin, group=group), self.monitor, self.monitor.counter)
        return whole

    def run(self, state: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]:
        parts = self._parts(fed)
        self.monitor.begin(step, self.number)
        recorder = self._recorder
        if self.graph is not None and recorder is None and self._clock is None:
            return self.graph.run(state, parts, self.monitor)
        outputs = self.executor.run(state, parts, recorder or self.monitor, self._clock)
        if recorder is not None:
            recorder.stop()
        return outputs

    def nonfinite(self, state: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        """The result for all ranks. Each rank checks the gradients of its own stages."""
        params = [port.name for port in self.body.inputs if port.role == "param"]
        last = next(i for i in reversed(self.program.lists.ranks[self.c]) if isinstance(i, (Optimizer, RunBody)))
        graph, *_ = graphs_of(self.program, self.c, last)
        sums = self.executor.run(state, self._parts(fed), self.monitor, probe=probe(graph, params))
        wrong = {port.name for port, value in sums.items() if not value.isfinite().all()}
        flags = torch.tensor([name in wrong for name in params], dtype=torch.int32, device=self.device)
        blame_failures(lambda: dist.all_reduce(flags, op=dist.ReduceOp.MAX), self.monitor, self.monitor.counter)
        return [name for name, flag in zip(params, flags.tolist(), strict=True) if flag]

    def _parts(self, fed: Sequence[Feed]) -> list[Feed]:
        """What this rank's stages read of each microbatch."""
        return [{n: self.shards.hold(x, self._types[n]) for n, x in feed.items() if n in self._read} for feed in fed]

    def checkpoints(self) -> Checkpoints:
        """Made at the first save or load, by all ranks at once: a group on CPUs that no step uses."""
        from shardc.runtime.checkpoint.checkpoint import Checkpoints

        group = self.member.group(self.monitor.blame)
        mesh, blame = self.body.mesh, self.monitor.blame
        return Checkpoints(
            mesh, self.i, group, blame, self.rank, lambda name: self._copies[self._home(name)], self.program.mesh
        )

    def consensus(self) -> Consensus:
        member = self.member
        return Consensus(member.group(self.monitor.blame), self.rank, self.monitor, member.store("ends"))

    def _home(self, name: str) -> int:
        """The coordinate that answers for a tensor; of an average, which is `<parameter>:average`, the parameter's."""
        return self.homes[name if name in self.homes else name.rpartition(":")[0]][0]

    def timed(self, act: Callable[[], object]) -> Any:
        if not self.program.axis:
            hint = "trainer.profile(batch) measures its calls"
            raise error("SC510", "there is no timeline of a program without a pipeline", hint=hint)
        self._clock = clock = start_clock(self.device)
        try:
            act()
        finally:
            self._clock = None
        return gather_timeline(self.program, clock.spans())

    def profiled(self, act: Callable[[], object]) -> Profile:
        self._recorder = recorder = CallRecorder(self.monitor, self.device)
        try:
            act()
        finally:
            self._recorder = None
        return recorder.profile(self.program, self.rank)

    def close(self, failure: BaseException | None = None) -> None:
        self.monitor.close(failure)
        if self.graphs is not None:
            self.graphs.release()
        self.member.leave()


def _graphs_of(program: StagedProgram, c: int) -> list[Graph]:
    """All graphs that a coordinate's ranks run."""
    graphs: dict[int, Graph] = {}
    for instruction in program.lists.ranks[c]:
        graphs |= {id(graph): graph for graph in graphs_of(program, c, instruction)}
    return list(graphs.values())


def _all_graphs(program: StagedProgram) -> list[Graph]:
    return [graph for c in range(len(program.lists.ranks)) for graph in _graphs_of(program, c)]


def _homes(program: StagedProgram) -> dict[str, list[int]]:
    """By parameter, buffer and state: the coordinates that hold it, where it is read. What is not read is kept too."""
    return {name: coordinates or [0] for name, coordinates in homes(program).items()}
