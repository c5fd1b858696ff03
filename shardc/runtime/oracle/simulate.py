"""All ranks of a mesh in one process, in lock-step, through one graph: what `simulate_stages` runs programs with.

Instruction by instruction, over all ranks. Values that are replicated over some axis are *one* tensor object here, and
a call is made once for each distinct set of operands (and of the coordinates it reads), not once a rank: two replicas
of a batch cost as much as one, and an all-reduce makes its group's values one object again.

The same interpreter over a mesh of one rank runs the unsharded reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean
from shardc.ir.graph import Graph, Port, info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import GIVEN
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.decomposed import DECOMPOSED
from shardc.ir.ops.local import AXES_READ
from shardc.ir.types import DTYPE_NAMES, TensorType
from shardc.runtime.execute.failed_call import instruction_failed, out_of_range
from shardc.runtime.execute.instructions import CallInstruction, Listing, Numerics, list_calls, rank_context
from shardc.runtime.execute.layout import REDUCE, assemble, shard
from shardc.runtime.execute.microbatches import Feed, feeds

SHOWN = 5  # names in a message
PerRank = list[torch.Tensor]
Observe = Callable[[fx.Node, Sequence[torch.Tensor]], None]
Returned = Callable[[Port, fx.Node, Sequence[torch.Tensor]], None]


def simulate(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    *,
    fed: Sequence[Feed] | None = None,
    dtype: torch.dtype | None = None,
    observe: Observe | None = None,
) -> dict[Port, torch.Tensor]:
    """Run a localized body on global inputs by port name; the global outputs.

    `fed` is what each microbatch is fed; else the inputs hold whole batches, which are split. `dtype` stands for every
    floating dtype of the graph. `observe` sees each value, by rank, as it is made, those of each microbatch in turn.
    """
    return run_step(graph, graph.mesh, inputs, fed, Numerics(dtype=dtype), observe)


def run_reference(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    observe: Observe | None = None,
    numerics: Numerics | None = None,
) -> dict[Port, torch.Tensor]:
    """Run the graph from before sharding, on one device; in `dtype`, or in arithmetic of one's own."""
    return run_step(graph, Mesh(), inputs, None, numerics or Numerics(dtype=dtype), observe)


@torch.no_grad()
def run_local(
    listing: Listing, inputs: Sequence[PerRank], numerics: Numerics, observe: Observe | None = None
) -> list[PerRank]:
    """Run a body of one microbatch on what each rank has of its inputs; what each has of its outputs."""
    mesh = listing.graph.mesh
    contexts = [rank_context(mesh, rank, _Nobody()) for rank in range(mesh.world_size)]
    env: list[PerRank | None] = [None] * listing.size
    for slot, values in zip(listing.inputs, inputs, strict=True):
        env[slot] = values
    for instruction in listing.instructions:
        _call(instruction, env, contexts, numerics, observe, first=True)
    return [env[slot] or [] for slot in listing.outputs]


def supplied(
    ports: Sequence[tuple[Port, TensorType]], inputs: Mapping[str, torch.Tensor], *, any_float: bool = False
) -> list[torch.Tensor]:
    """The value of each input port; ShardcError over those that are missing or have another shape or dtype.

    A tied tensor may come under any of its names. A seed that is not given is 0.
    """
    values: list[torch.Tensor] = []
    problems: list[Diagnostic] = []
    absent: list[Port] = []
    for port, type in ports:
        name = next((name for name in (port.name, *port.aliases) if name in inputs), None)
        if name is not None:
            value = inputs[name]
            problems += _misfits(port, value, type, any_float)
            values.append(value)
        elif port.role == "seed":
            values.append(torch.zeros(type.shape, dtype=type.dtype))
        else:
            absent.append(port)
    if absent:
        problems.append(missing(absent, did_you_mean(absent[0].name, inputs, "supplied inputs")))
    if problems:
        raise ShardcError(*problems)
    return values


def missing(ports: Sequence[Port], hint: str) -> Diagnostic:
    """One diagnostic for all inputs that are missing: a model has hundreds."""
    first, *others = ports
    message = f"{first.role} '{first.name}' was not supplied"
    if others:
        message += ", nor was 1 other" if len(others) == 1 else f", nor were {len(others)} others"
    shown_names = [port.name for port in others[:SHOWN]] + ["..."] * (len(others) > SHOWN)
    cause = "missing too: " + ", ".join(shown_names) if others else None
    return Diagnostic("SC504", message, tensor=first.name, cause=cause, hint=hint)


def _misfits(port: Port, value: torch.Tensor, type: TensorType, any_float: bool) -> list[Diagnostic]:
    if value.is_meta:
        message, hint = f"{port.role} '{port.name}' lies on the meta device: it has no values", "give one with values"
        return [Diagnostic("SC501", message, tensor=port.name, hint=hint)]
    if tuple(value.shape) != type.shape:
        message = (
            f"{port.role} '{port.name}' has shape {list(value.shape)}, the program was compiled for {list(type.shape)}"
        )
        hint = "pass tensors of the sample batch's shapes, or compile again with this batch"
        return [Diagnostic("SC501", message, tensor=port.name, hint=hint)]
    alike = value.dtype.is_complex == type.dtype.is_complex
    loose = any_float and alike and _is_inexact(value.dtype) and _is_inexact(type.dtype)
    if value.dtype != type.dtype and not loose:
        value_dtype, port_dtype = (DTYPE_NAMES.get(d, str(d)) for d in (value.dtype, type.dtype))
        message = f"{port.role} '{port.name}' has dtype {value_dtype}, the program was compiled for {port_dtype}"
        return [Diagnostic("SC501", message, tensor=port.name, hint="cast it, or compile again with this batch")]
    return []


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@torch.no_grad()
def run_step(
    graph: Graph,
    mesh: Mesh,
    inputs: Mapping[str, torch.Tensor],
    fed: Sequence[Feed] | None,
    numerics: Numerics,
    observe: Observe | None,
    returned: Returned | None = None,
) -> dict[Port, torch.Tensor]:
    """Run a whole step, microbatch by microbatch. `returned` sees each output as ranks have it in the end."""
    listing = list_calls(graph, numerics)
    contexts = [rank_context(mesh, rank, _Nobody()) for rank in range(mesh.world_size)]
    env: list[PerRank | None] = [None] * listing.size
    ports = [(port, type_of(node)) for port, node in zip(graph.inputs, graph.placeholders, strict=True)]

    def run(instructions: Sequence[CallInstruction], first: bool) -> None:
        for instruction in instructions:
            _call(instruction, env, contexts, numerics, observe, first)

    stacks: dict[int, list[torch.Tensor]] = {i: [] for i in listing.stacked}
    for k, feed in enumerate(feeds(graph, inputs) if fed is None else fed):
        whole = supplied(ports, {**inputs, **feed}, any_float=numerics.dtype is not None)
        after = [(into, env[slot]) for slot, into in listing.buffer_slots] if k else []
        for slot, node, value, (port, type) in zip(listing.inputs, graph.placeholders, whole, ports, strict=True):
            if k and port.role not in GIVEN:
                continue
            env[slot] = values = sharded(numerics.cast(value.detach()), type, mesh)
            if observe:
                observe(node, values)
        for into, values in after:
            env[into] = values
        if k == 0:
            run(listing.instructions[: listing.repeated.start], first=True)
        run([listing.instructions[i] for i in listing.repeated if k == 0 or i not in listing.first], first=k == 0)
        for i, stack in stacks.items():
            stack.append(assembled(env[listing.outputs[i]], graph.output_values[i], mesh))
    run(listing.instructions[listing.repeated.stop :], first=True)
    outputs: dict[Port, torch.Tensor] = {}
    for i, (port, slot, node) in enumerate(zip(graph.outputs, listing.outputs, graph.output_values, strict=True)):
        outputs[port] = torch.stack(stacks[i]) if i in stacks else assembled(env[slot], node, mesh)
        if returned:
            returned(port, node, env[slot] or [])
    return outputs


def _call(
    instruction: CallInstruction,
    env: list[PerRank | None],
    contexts: Sequence[RankContext],
    numerics: Numerics,
    observe: Observe | None,
    first: bool,
) -> None:
    """One instruction on all ranks; an `accumulate` of another microbatch than the first adds to what is there."""
    operands = [env[slot] for slot in instruction.reads]
    total = None if first else instruction.total
    if instruction.node.target is ACCUMULATE and total is not None:
        _, _, slot = instruction.yields[0]
        env[slot] = summed(env[total] or [], operands[0] or [])
    else:
        run = _meet if instruction.target in COLLECTIVES else _each
        try:
            results = run(instruction, env, operands, contexts)
        except Exception as failure:
            failure.add_note(f"in instruction {instruction.where}, simulated")
            for rank in range(len(contexts)):
                operands_of_rank = [values[rank] if values else None for values in operands]
                if (named := out_of_range(instruction, rank, operands_of_rank)) is not None:
                    raise named from failure
            if (refused := instruction_failed(instruction, failure, "simulated")) is not None:
                raise refused from failure
            raise
        for _, position, slot in instruction.yields:
            picked = _pick(results, position, numerics)
            env[slot] = picked if total is None else summed(env[total] or [], picked)
    if observe:
        for value, _, slot in instruction.yields:
            observe(value, env[slot] or [])
    for slot in instruction.free:
        env[slot] = None


def summed(totals: PerRank, terms: PerRank) -> PerRank:
    """The sums rank by rank. Ranks that share both operands share the sum."""
    sums: dict[tuple[int, int], torch.Tensor] = {}
    for total, term in zip(totals, terms, strict=True):
        if (id(total), id(term)) not in sums:
            sums[id(total), id(term)] = total + term
    return [sums[id(total), id(term)] for total, term in zip(totals, terms, strict=True)]


def assembled(values: PerRank | None, node: fx.Node, mesh: Mesh) -> torch.Tensor:
    """The global tensor of a value, given each rank's shard."""
    assert values is not None, f"output {info(node).name} was freed"
    return assemble(dict(enumerate(values)), type_of(node), mesh)


def sharded(value: torch.Tensor, type: TensorType, mesh: Mesh) -> PerRank:
    """The shard that each rank stores of a global tensor."""
    if not type.axes:
        return [value.contiguous()] * mesh.world_size
    shards: dict[tuple[int, ...], torch.Tensor] = {}
    axes = sorted(type.axes)
    result: PerRank = []
    for rank in range(mesh.world_size):
        key = tuple(mesh.index(rank, axis) for axis in axes)
        if key not in shards:
            shards[key] = shard(value, type, mesh, rank)
        result.append(shards[key])
    return result


def _each(
    instruction: CallInstruction, env: list[Any], operands: Sequence[Any], contexts: Sequence[RankContext]
) -> list[Any]:
    """The result of a call on every rank, computed once for the ranks that cannot differ."""
    results_by_key: dict[tuple[int, ...], Any] = {}
    results: list[Any] = []
    reader = AXES_READ.get(instruction.target)
    for rank, context in enumerate(contexts):
        args, kwargs = instruction.arguments(_Rank(env, rank))
        key = tuple(id(values[rank]) for values in operands)
        if reader is not None:
            key += tuple(context.index((axis,)) for axis in reader(*args, **kwargs))
        if key not in results_by_key:
            with running(context):
                results_by_key[key] = instruction.target(*args, **kwargs)
        results.append(results_by_key[key])
    return results


def _meet(
    instruction: CallInstruction, env: list[Any], operands: Sequence[Any], contexts: Sequence[RankContext]
) -> list[Any]:
    """A collective on all ranks: everyone up to the exchange, then each group's exchange, then everyone to the end."""
    mesh = contexts[0].mesh
    arguments = [instruction.arguments(_Rank(env, rank)) for rank in range(len(contexts))]
    operand_ids = [tuple(id(values[rank]) for values in operands) for rank in range(len(contexts))]

    def begin(rank: int) -> tuple[Steps, Exchange]:
        args, kwargs = arguments[rank]
        steps = COLLECTIVES[instruction.target](*args, **kwargs)
        with running(contexts[rank]):
            return steps, next(steps)

    waiting: dict[tuple[int, ...], tuple[Steps, Exchange]] = {}
    brought: list[Exchange] = []
    for rank, ids in enumerate(operand_ids):
        if ids not in waiting:
            waiting[ids] = begin(rank)
        brought.append(waiting[ids][1])
    exchanged: dict[tuple[int, ...], PerRank] = {}
    finished: dict[tuple[int, ...], torch.Tensor] = {}
    results: list[Any] = [None] * len(contexts)
    multiplies = instruction.target in DECOMPOSED  # by an operand of its own, after the exchange
    for group in mesh.groups(brought[0].axes):
        key = tuple(id(brought[rank]) for rank in group)
        if key not in exchanged:
            exchanged[key] = exchange([brought[rank] for rank in group])
        for rank, received in zip(group, exchanged[key], strict=True):
            ended = (id(received), *(operand_ids[rank] if multiplies else ()))
            if ended not in finished:
                # Ranks with the same operands share a generator, but may receive different things: then start another.
                steps, _ = waiting.pop(operand_ids[rank], None) or begin(rank)
                finished[ended] = finish(steps, received)
            results[rank] = finished[ended]
    return results


def exchange(brought: Sequence[Exchange]) -> PerRank:
    """The tensor that each member of a group receives, given what it brings. Equal results are one object."""
    rows, how, count = [member.x for member in brought], brought[0], len(brought)
    match how.kind:
        case "all_reduce":
            return [reduce(REDUCE[how.op], rows)] * count
        case "all_gather":
            return [torch.stack(list(rows))] * count
        case "reduce_scatter":
            return list(reduce(REDUCE[how.op], rows).unbind(0))
        case "all_to_all":
            return [torch.stack([row[i] for row in rows]) for i in range(count)]
        case "permute":
            return [rows[source] for source in how.source]
        case "all_to_all_uneven":
            parts = [member.x.split(list(member.sizes.sent)) for member in brought]
            received = [torch.cat([sent[i] for sent in parts]) for i in range(count)]
            expected = [sum(member.sizes.received) for member in brought]
            assert [x.shape[0] for x in received] == expected, "ranks expect other rows than are sent"
            return received


def finish(steps: Steps, received: torch.Tensor) -> torch.Tensor:
    """What a collective yields of what it receives."""
    try:
        steps.send(received)
    except StopIteration as done:
        result: torch.Tensor = done.value
        return result
    raise AssertionError("a collective meets its group once")


def _pick(results: Sequence[Any], position: int | None, numerics: Numerics) -> PerRank:
    """One result of a call on every rank, in the run's dtype; ranks that share an object go on sharing one."""
    picked: dict[int, torch.Tensor] = {}
    for result in results:
        if id(result) not in picked:
            picked[id(result)] = numerics.cast(result if position is None else result[position])
    return [picked[id(result)] for result in results]


class _Rank:
    """One rank's view of values that are held by slot and rank; what an instruction's argument template reads."""

    def __init__(self, env: list[Any], rank: int) -> None:
        self.env, self.rank = env, rank

    def __getitem__(self, slot: int) -> Any:
        return self.env[slot][self.rank]


class _Nobody:
    """In simulation collectives meet in `_meet`; nothing may call a communicator."""

    def _refuse(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a simulated rank cannot communicate by itself")

    all_reduce = all_gather = reduce_scatter = all_to_all = permute = all_to_all_uneven = _refuse
