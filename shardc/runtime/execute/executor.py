"""Executes a rank's instruction list as prepared code: what a process of a job runs every step.

    RunBody 0         runs the body, microbatch by microbatch (`body_code`): the whole list of a rank without a pipeline
    Forward 2 #5      runs the graph of stage 2's forward on microbatch 5's values, its feed, and the held tensors
    Send, Recv        run beside compute (`transfers`)
    ReduceGrads       for a sum of one stage: runs the stage's graph over the other axes; for a sum of several stages:
                      begins an all-reduce, which the optimizer waits for
    Gather            runs the graphs of its values on the held tensors
    Optimizer         runs norm, its total over the pipeline, and update, in place
    Free              frees values; those whose last reader is the preceding work are freed one by one while it runs

Each graph is prepared once (`runtime.execute.prepared_code`). Its collectives begin early and are waited for late. Each
gradient is added to its sum in place, as soon as backward has made it; those of small sums by one call a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.ops.accumulate import ADDED_WITH, ADDS
from shardc.ir.ops.context import RankContext, running
from shardc.partition.program_counter import STRIDE, graphs_of
from shardc.partition.stage_arena import arena_plans
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.direct_call import direct_call
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.monitor import RunMonitor
from shardc.runtime.execute.peer_groups import PeerGroups
from shardc.runtime.execute.stage_code import GraphCode, StepState, add_terms
from shardc.runtime.execute.step_epilogue import EpilogueCode, Outputs, blame_failures
from shardc.runtime.execute.transfers import ChannelEnd, Clock, PendingReceive, TensorSpec, Transfers, goes_onward
from shardc.schedule.instructions import (
    COMPUTE,
    TRANSFER,
    Compute,
    Free,
    Gather,
    Instruction,
    Optimizer,
    ReduceGrads,
    RunBody,
    Send,
    instruction_text,
)
from shardc.schedule.lists import split_batches
from shardc.schedule.pipeline import StagePart, ValueKey
from shardc.torch_compat import add_all

Act = Callable[[StepState], None]


class Executor:
    """Runs the list of coordinate `c` as the rank of `context`, a mesh of the other axes. Tensors are its shards."""

    def __init__(self, program: StagedProgram, c: int, context: RankContext, rank: int, peers: PeerGroups) -> None:
        self.program, self.c, self.context, self.rank, self.peers = program, c, context, rank, peers
        self.transfers = Transfers(peers.directions, peers.device, peers.limit)
        self.arena = Arena(arena_plans(program, c), peers.device, overwrites=peers.device.type == "cpu")
        self.body: BodyCode | None = None
        self.epilogue: EpilogueCode | None = None
        self._probe: Graph | None = None
        self._parts: dict[int, _PartCode] = {}
        self._gathers: dict[int, GraphCode] = {}
        self._reduces: dict[str, list[GraphCode]] = {}  # by sum
        self._outputs: Outputs = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._pending_reductions: dict[int, Any] = {}  # by place, what has begun
        self._broadcasts = _output_broadcasts(program)
        self._acts = self._prepare(program.lists.ranks[c])

    @torch.no_grad()
    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        feeds: Sequence[Feed],
        monitor: RunMonitor | None = None,
        clock: Clock | None = None,
        probe: Graph | None = None,
    ) -> Outputs:
        """Run one step. Returns the outputs that this rank has, and always the loss and the model's outputs.

        If `probe` is given, it runs instead of the body or the epilogue and its outputs are returned: nothing is
        updated. Raises ShardcError naming the rank to blame when communication fails.
        """
        state = StepState(tensors, feeds, monitor, clock)
        self._probe, self._outputs, self._sums = probe, {}, state.sums
        self._pending_reductions.clear()
        self.transfers.drop()
        self.transfers.monitor, self.transfers.clock = monitor, clock
        self.arena.enter()
        with running(self.context):
            for act in self._acts:
                act(state)
            self.transfers.drain()
            if probe is None:
                self._outputs |= {
                    port: _step_output(port, by_microbatch) for port, by_microbatch in state.outputs.items()
                }
                self._broadcast_outputs(monitor)
        outputs, self._outputs = self._outputs, {}  # the executor must not keep a step's tensors alive
        return outputs

    # ------------------------------------------------------------------ from instructions to acts
    def _prepare(self, instructions: Sequence[Instruction]) -> list[Act]:
        """The prepared acts of a list, in order."""
        acts: list[Act] = []
        types, tags = _value_specs(self.program), dict[tuple[type, int], int]()
        code_args = self.context, self.rank, self.peers.device, self.arena
        index = 0
        for batch in split_batches(instructions):
            i, counter = batch[0], index * STRIDE
            if isinstance(i, TRANSFER):
                acts.append(self._transfer(batch, index, types, tags))
            elif isinstance(i, COMPUTE):
                acts.append(self._work(i, counter, _freed_at(instructions, index + 1)))
            elif isinstance(i, ReduceGrads):
                graphs = graphs_of(self.program, self.c, i)
                self._reduces[i.value] = [GraphCode(graph, *code_args) for graph in graphs]
                acts.append(partial(self._reduce, i, counter))
            elif isinstance(i, Gather):
                acts.append(self._gather(i, counter))
            elif isinstance(i, Free):
                acts.append(partial(_free, [(name, i.microbatch) for name in i.values], counter))
            elif isinstance(i, RunBody):
                (graph,) = graphs_of(self.program, self.c, i)
                self.body = BodyCode(graph, *code_args)
                acts.append(partial(self._run_body, self.body, counter))
            else:
                assert isinstance(i, Optimizer), i
                epilogue = self.program.epilogues[self.c]
                self.epilogue = EpilogueCode(epilogue, self.context, self.rank, self.peers, self.arena)
                acts.append(partial(self._optimize, self.epilogue, i, counter))
            index += len(batch)
        return acts

    def _work(self, i: Compute, counter: int, freed: frozenset[ValueKey]) -> Act:
        (graph,) = graphs_of(self.program, self.c, i)
        if id(graph) not in self._parts:
            code = GraphCode(graph, self.context, self.rank, self.peers.device, self.arena)
            self._parts[id(graph)] = _PartCode(code, self.program, self.program.lists.pipeline.part(i), self)
        part = self._parts[id(graph)]
        values_read = [self.program.lists.pipeline.value_key(name, i.microbatch) for name in part.reads]
        consumed = [value for value in values_read if value in freed]
        return partial(part.run, i.microbatch, consumed, counter, f" of {instruction_text(i)}")

    def _gather(self, i: Gather, counter: int) -> Act:
        """An act that runs the graphs of all values, with their calls numbered consecutively."""
        gathers: list[tuple[str, GraphCode, int, list[int]]] = []
        base = counter + 1
        for name, graph in zip(i.values, graphs_of(self.program, self.c, i), strict=True):
            if id(graph) not in self._gathers:
                self._gathers[id(graph)] = GraphCode(graph, self.context, self.rank, self.peers.device, self.arena)
            code = self._gathers[id(graph)]
            slots = {port.name: slot for port, slot in code.outputs}
            gathers.append((name, code, base, [slots[member] for member in self.program.members(name)]))
            base += len(code.routine.names)
        within = f" of {instruction_text(i)}"

        def act(state: StepState) -> None:
            state.begin(counter)
            for name, code, base, slots in gathers:
                env = code.environment(state, -1)
                code.run(env, state, base, within)
                state.values[name, None] = tuple(env[slot] for slot in slots)
            state.end(counter)

        return act

    def _transfer(
        self,
        batch: Sequence[Instruction],
        index: int,
        types: Mapping[str, TensorSpec],
        tags: dict[tuple[type, int], int],
    ) -> Act:
        """An act that posts a batch. Both ends number the tensors of a channel alike, in the order that is proved."""
        sends: list[tuple[ChannelEnd, ValueKey]] = []
        receives: list[tuple[ChannelEnd, ValueKey, list[TensorSpec]]] = []
        for offset, i in enumerate(batch):
            assert isinstance(i, TRANSFER)
            names = self.program.members(i.value)
            first = tags.get((type(i), i.peer), 0)
            tags[type(i), i.peer] = first + len(names)
            numbers = tuple(range(first, first + len(names)))
            peer, onward = self.peers.ranks[i.peer], goes_onward(i, self.c)
            channel = ChannelEnd((index + offset) * STRIDE, peer, numbers, onward)
            if isinstance(i, Send):
                sends.append((channel, (i.value, i.microbatch)))
            else:
                receives.append((channel, (i.value, i.microbatch), [types[name] for name in names]))

        def act(state: StepState) -> None:
            leaving = [(channel, state.value(value)) for channel, value in sends]
            arrivals = self.transfers.post(leaving, [(channel, shapes) for channel, _, shapes in receives])
            state.values.update(zip((value for _, value, _ in receives), arrivals, strict=True))

        return act

    # ------------------------------------------------------------------ gradients, and the end of the step
    def add(self, name: str, term: torch.Tensor, *more: Any, by: OpOverload | None = None) -> None:
        """Add a microbatch's term to a sum, which has its own memory. Sums over ranks are contiguous on all of them. Or
        what an op that adds to sums makes of the arguments."""
        total = self._sums.get(name)
        if by is not None:
            given, device = (term, *more), self.peers.device
            if total is None:
                self._sums[name] = direct_call(by, device)(*given)
            else:
                direct_call(ADDS[by], device)(total, *(given[position] for position in ADDED_WITH[by]))
        elif total is not None:
            total.add_(term)
        elif name in self.program.shared:
            self._sums[name] = term.clone(memory_format=torch.contiguous_format)
        else:
            self._sums[name] = term.clone()

    def add_small(self, sums: Sequence[tuple[str, bool]], *terms: torch.Tensor) -> None:
        """Add a microbatch's terms to their sums, each by its name, and whether the term may become the sum."""
        totals: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for (name, may_be_sum), term in zip(sums, terms, strict=True):
            total = self._sums.get(name)
            if total is not None:
                totals.append(total)
                others.append(term)
            elif may_be_sum and term.untyped_storage().nbytes() == term.nbytes and term.is_contiguous():
                self._sums[name] = term
            else:
                self.add(name, term)
        add_all(totals, others)

    def _reduce(self, i: ReduceGrads, counter: int, state: StepState) -> None:
        state.begin(counter)
        shared = i.value in self.program.shared  # else nobody else has any
        if shared and i.value not in state.sums:  # a weight that is only held here
            type = self.program.shared[i.value]
            shape = type.local_shape(self.program.body.mesh)
            state.sums[i.value] = torch.zeros(shape, dtype=type.dtype, device=self.peers.device)
        for code in self._reduces.get(i.value, ()):
            env = code.environment(state, -1)
            for slot, name in code.sums:
                env[slot] = state.sums.pop(name)
            code.run(env, state, counter + 1, f" of {instruction_text(i)}")
            state.sums |= {port.name: env[slot] for port, slot in code.outputs}
        if not shared or len(i.group) == 1:
            state.end(counter)
        else:
            terms, group = state.sums[i.value], self.peers.group(i.group)

            def begin() -> None:
                self._pending_reductions[counter] = dist.all_reduce(terms, group=group, async_op=True)

            blame_failures(begin, state.monitor, counter)

    def _run_body(self, body: BodyCode, counter: int, state: StepState) -> None:
        if self._probe is not None:
            body = BodyCode(self._probe, self.context, self.rank, self.peers.device)
        self._outputs = body.step(state.tensors, state.feeds, state.monitor, counter + 1)

    def _optimize(self, epilogue: EpilogueCode, i: Optimizer, counter: int, state: StepState) -> None:
        for reduction_counter, work in self._pending_reductions.items():
            blame_failures(work.wait, state.monitor, reduction_counter)
            state.end(reduction_counter)
        self._pending_reductions.clear()
        if self._probe is None:
            self._outputs = epilogue.run(state, i, counter)
            return
        code = GraphCode(self._probe, self.context, self.rank, self.peers.device)
        env = code.environment(state, -1)
        for slot, name in code.sums:
            env[slot] = state.sums[name]
        code.run(env, state, counter + 1, ", to see what is not finite")
        self._outputs = {port: env[slot] for port, slot in code.outputs}

    def _broadcast_outputs(self, monitor: RunMonitor | None) -> None:
        """Broadcast the outputs that only some stages make and all ranks must return."""
        counter = len(self.program.lists.ranks[self.c]) * STRIDE
        for port, source, spec in self._broadcasts:
            if self.c == source:
                self._outputs[port] = self._outputs[port].contiguous()
            else:
                self._outputs[port] = torch.empty(spec.shape, dtype=spec.dtype, device=self.peers.device)
            tensor, origin = self._outputs[port], self.peers.ranks[source]
            blame_failures(partial(dist.broadcast, tensor, src=origin, group=self.peers.whole_group), monitor, counter)


class _PartCode:
    """The code of a part of a stage, and the mapping between its ports and the values of the list."""

    def __init__(
        self,
        code: GraphCode,
        program: StagedProgram,
        part: StagePart,
        executor: Executor,
    ) -> None:
        members, self._value = program.members, program.lists.pipeline.value_key
        self._code, self._add, self.reads = code, executor.add, part.reads
        source = {member: (name, k) for name in part.reads for k, member in enumerate(members(name))}
        self._reads = [(slot, *source[name]) for slot, name in code.values]
        slots = {port.name: slot for port, slot in code.outputs if port.role == "value"}
        self._makes = [(name, [slots[member] for member in members(name)]) for name in part.makes]
        self._microbatch_outputs = [(port, slot) for port, slot in code.outputs if port.role in ("buffer", "output")]
        self._remaining_terms = add_terms(code, executor.add, executor.add_small)

    def run(self, microbatch: int, consumed: Sequence[ValueKey], counter: int, within: str, state: StepState) -> None:
        """Values that are `consumed` are read for the last time: only the code's slots hold them then."""
        env = self._code.environment(state, microbatch)
        for slot, name, k in self._reads:
            env[slot] = state.value(self._value(name, microbatch))[k]
        for value in consumed:
            del state.values[value]
        state.begin(counter)
        self._code.run(env, state, counter + 1, within)
        state.end(counter)
        for name, slots in self._makes:
            state.values[name, microbatch] = tuple(env[slot] for slot in slots)
        for name, slot in self._remaining_terms:
            self._add(name, env[slot])
        for port, slot in self._microbatch_outputs:
            by_microbatch = state.outputs.setdefault(port, {})
            if port.role == "buffer":
                state.buffers[port.name] = env[slot]
                by_microbatch.clear()
            by_microbatch[microbatch] = env[slot]


def _step_output(port: Port, by_microbatch: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A step's output from those of its microbatches: model outputs are stacked, buffers are those of the last one."""
    is_stacked = port.role == "output" and len(by_microbatch) > 1
    return (
        torch.stack([by_microbatch[k] for k in sorted(by_microbatch)])
        if is_stacked
        else by_microbatch[max(by_microbatch)]
    )


def _free(values: Sequence[ValueKey], counter: int, state: StepState) -> None:
    state.begin(counter)
    for value in values:
        tensors = state.values.pop(value, None)
        if isinstance(tensors, PendingReceive):  # never read, but the receive still writes to its memory
            tensors.wait()
    state.end(counter)


def _freed_at(instructions: Sequence[Instruction], index: int) -> frozenset[ValueKey]:
    """The values that a run of Frees from `index` on frees."""
    freed: set[ValueKey] = set()
    while index < len(instructions) and isinstance(i := instructions[index], Free):
        freed |= {(name, i.microbatch) for name in i.values}
        index += 1
    return frozenset(freed)


def _value_specs(program: StagedProgram) -> dict[str, TensorSpec]:
    """The local shape and dtype of every value that passes between parts."""
    mesh = program.body.mesh
    specs: dict[str, TensorSpec] = {}
    for stage in program.stages:
        for graph in stage.parts.values():
            for port, value in zip(graph.outputs, graph.output_values, strict=True):
                if port.role == "value":
                    specs[port.name] = TensorSpec(type_of(value).local_shape(mesh), type_of(value).dtype)
    return specs


def _output_broadcasts(program: StagedProgram) -> list[tuple[Port, int, TensorSpec]]:
    """What only some coordinates make and all ranks must return, with its source, shape and dtype: the loss, numbers of
    the whole step, and scalars of its microbatches."""
    mesh, count, broadcasts = program.body.mesh, program.body.microbatches, list[tuple[Port, int, TensorSpec]]()
    for port, value in zip(program.body.outputs, program.body.output_values, strict=True):
        type, stack = type_of(value), ()
        makers = [c for c, epilogue in enumerate(program.epilogues) if port in epilogue.update.outputs]
        is_number = type.ndim == (program.body.halves > 1)  # or two, of halves
        if port.role == "output" and is_number and not makers:
            makers, stack = makers_of(program, port), (count,) if count > 1 else ()
        if port.role in ("loss", "output") and makers and len(makers) < len(program.coordinate_range):
            broadcasts.append((port, makers[0], TensorSpec((*stack, *type.local_shape(mesh)), type.dtype)))
    return broadcasts


def makers_of(program: StagedProgram, port: Port) -> list[int]:
    """The coordinates whose stages make an output of each microbatch."""
    if not program.axis:
        return list(program.coordinate_range)
    stages = [s for s, bodies in enumerate(program.stages) if any(port in g.outputs for g in bodies.parts.values())]
    return [c for c in program.coordinate_range if {*stages} & {*program.lists.stages_of(c)}]
