"""offload in a pipeline: what a stage's forward leaves for its own backward lies on the host in between.

    forward 0     %x = gelu(%u)                              backward 0    %x = value "x"            on the host
                  %x.out = begin_offload(%x)                               %x.back = begin_fetch(%x)
                  ...                                                      ...
                  %x.host = end_offload(%x.out, %x)                        %x.here = end_fetch(%x.back, %x)
                  return value "x" = %x.host                               %dw = linear_wgrad(%dy, %x.here)

Needs the graphs of stages as ranks run them, with their kernels. Ensures the same calls on the same values, and copies.
A copy to the host begins and ends in the forward; the copy back, in the graph that reads it: backward, or each of dgrad
and wgrad, of which the first keeps what the second fetches again. Each microbatch under way has copies of its own.

Moved is what no other stage reads, as a whole: in the place of views of it, forward gives the value that memory was
allocated for, and backward makes the views anew. Of several lifetimes (`stage_parts`) it gets the longest. Moved are up
to `activations` bytes a rank, those of all microbatches under way at once, first what lies longest: of a rank's stages
the first, of a stage what its backward reads last. Of the last stage, whose backward begins at once, what is not free
in between stays (`passes.memory.offload`, which also says what else does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from shardc.ir.buckets import pieces, with_buckets
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Port, info, producer, set_info
from shardc.ir.in_place import writes
from shardc.ir.microbatch import calls_as_run
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.host_copies import BEGIN_FETCH, END_FETCH
from shardc.ir.schema import schema_of
from shardc.ir.storages import Storage, layouts, storages
from shardc.partition.cut import CutStep, StageBodies
from shardc.partition.staged_program import StagedProgram
from shardc.passes.memory.copy_schedule import Clock, Copy, begins_of_fetches
from shardc.passes.memory.offload import (
    Offload,
    Place,
    Renewed,
    Saved,
    bound_of,
    copies_to_host,
    copy_call,
    is_dense,
    made_of_weights,
    put,
    second_layer,
    seconds_of,
)
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Forward, Wgrad
from shardc.schedule.pipeline import Pipeline

UnderWay = Mapping[int, int]  # by stage: microbatches whose forward has run, and whose backward has not ended


@dataclass(frozen=True, eq=False)
class Held:
    """Memory that a stage's forward leaves for its backward. Calls of `saved` are of forward; but that which reads it
    first is of backward."""

    stage: int
    saved: Saved
    ports: Mapping[str, fx.Node]  # the values in it that backward reads
    bundles: frozenset[str]  # what these go by in the lists
    bundle: str  # what the memory as a whole goes by

    @property
    def bytes(self) -> int:
        return self.saved.bytes

    @property
    def name(self) -> str:
        return info(self.saved.value).name


def held_values(step: CutStep | StagedProgram, least: int) -> list[Held]:
    """What may be moved of a step in stages, first what lies longest."""
    pipeline = _pipeline(step)
    if not pipeline.trains:
        return []
    found: list[Held] = []
    for stage, bodies in enumerate(step.stages):
        last = stage == len(step.stages) - 1
        of_stage = _held_by(stage, bodies, pipeline, step.bundles, least, last=last)
        found += sorted(of_stage, key=lambda held: -held.saved.read)
    return found


def _held_by(
    stage: int,
    bodies: StageBodies,
    pipeline: Pipeline,
    bundles: Mapping[str, tuple[str, ...]],
    least: int,
    *,
    last: bool,
) -> Iterator[Held]:
    forward, backward = bodies.forward, [graph for name, graph in bodies.parts.items() if name != "forward"]
    bundle_of = {
        member: name for name in pipeline.stages[stage].forward.makes if name in bundles for member in bundles[name]
    }
    both = f"kept{stage}"
    calls, known = calls_as_run(forward), layouts(forward)
    index_of = {call: index for index, call in enumerate(calls)}
    of = with_buckets(forward, known.storages)
    stay = {of[value] for value in (*forward.placeholders, *made_of_weights(forward)) if value in of}
    stay |= {of[value] for value in (*pieces(forward), *(write.value for write in writes(forward)))}
    ports_of: dict[Storage, list[tuple[Port, fx.Node]]] = {}
    for port, value in zip(forward.outputs, forward.output_values, strict=True):
        ports_of.setdefault(of[value], []).append((port, value))
    values_of: dict[Storage, list[fx.Node]] = {}
    for value, storage in of.items():
        values_of.setdefault(storage, []).append(value)
    first_reads, fixed = _first_reads(bodies.backward, second=last), set[str]().union(*map(_fixed, backward))
    for storage, ports in ports_of.items():
        x, names = storage.value, {port.name for port, _ in ports}
        if storage in stay or storage.bytes < least or names & fixed or not bundle_of.keys() >= names:
            continue
        call, values = producer(x)[0], values_of[storage]
        readers = [user for value in values for user in value.users if user in index_of]
        read = min((first_reads[name] for name in names if name in first_reads), default=-1)
        taken = {bundle_of[name] for name in names}
        bundle = min(taken) if len(taken) == 1 else both if both in bundles else f"{both}.w"
        if (
            read >= 0
            and all(port.role == "value" for port, _ in ports)
            and not any(schema_of(user.target).is_mutable for user in readers)
            and is_dense(known, storage)
        ):
            early = [index_of[user] for user in readers]
            made = max((index_of[call], *sorted(early)[:1])) if call.target in COLLECTIVES else index_of[call]
            saved = Saved(x, storage.bytes, made, read, len(calls), frozenset(values))
            yield Held(stage, saved, {port.name: value for port, value in ports}, frozenset(taken), bundle)


def _first_reads(graph: Graph, *, second: bool) -> dict[str, int]:
    """The first call of a backward that reads each value, by its name; -1 where that is before its `second` layer."""
    calls, weights = calls_as_run(graph), made_of_weights(graph)
    index_of = {call: index for index, call in enumerate(calls)}
    own = [index for index, call in enumerate(calls) if info(call).phase == "bwd" and call not in weights]
    start = second_layer(calls, own) if second and own else 0
    first: dict[str, int] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        if port.role == "value" and (read := [index_of[user] for user in node.users if user in index_of]):
            first[port.name] = min(read) if min(read) >= start else -1
    return first


def _fixed(graph: Graph) -> set[str]:
    """The values that a backward gives again, or writes over."""
    of = storages(graph)
    given = {of[value] for value in graph.output_values}
    return {
        port.name
        for port, node in zip(graph.inputs, graph.placeholders, strict=True)
        if of[node] in given
        or any(user.op == "call_function" and schema_of(user.target).is_mutable for user in node.users)
    }


# ------------------------------------------------------------------ which of it
def under_way(orders: Iterable[Iterable[Compute]]) -> list[UnderWay]:
    """What each rank has under way at once, whenever a forward has run: each distinct one that there is."""
    found: dict[tuple[tuple[int, int], ...], UnderWay] = {}
    for order in orders:
        now = Counter[int]()
        for work in order:
            now[work.stage] += isinstance(work, Forward) - isinstance(work, Wgrad | Backward)
            if isinstance(work, Forward):
                found.setdefault(tuple(sorted((+now).items())), dict(+now))
    return list(found.values())


def within(held: Sequence[Held], most: int | Literal["all"], moments: Sequence[UnderWay]) -> list[Held]:
    """Of what may be moved, in its order, as much as takes no more than so many bytes of any rank at any moment."""
    if most == "all":
        return list(held)
    chosen, now = list[Held](), [0] * len(moments)
    for each in held:
        then = [size + moment.get(each.stage, 0) * each.bytes for size, moment in zip(now, moments, strict=True)]
        if max(then, default=0) <= most:
            chosen.append(each)
            now = then
    return chosen


def lighter(costs: Costs, sizes: Mapping[str, int], moved: Sequence[Held]) -> Costs:
    """The costs of a step of which some values lie on the host. `sizes` are the bytes of values in the lists."""
    left = lighter_sizes(sizes, moved)
    saved = Counter[int]()
    for stage, name in {(each.stage, name) for each in moved for name in each.bundles}:
        saved[stage] += sizes[name] - left[name]
    stages = (replace(cost, activation=cost.activation - saved[stage]) for stage, cost in enumerate(costs.stages))
    return replace(costs, stages=tuple(stages))


def lighter_sizes(sizes: Mapping[str, int], moved: Sequence[Held]) -> dict[str, int]:
    """The bytes of values without what lies on the host. Views of several lifetimes were counted in each."""
    left = dict(sizes)
    for each in moved:
        for name in each.bundles:
            left[name] = max(0, left[name] - each.bytes)
    return left


# ------------------------------------------------------------------ the move
def offload_stages(program: StagedProgram, offload: Offload) -> StagedProgram:
    """Move up to `activations` bytes a rank of what stages hold for their backward to the host. SC234, a warning, where
    nothing is."""
    pipeline = program.lists.pipeline
    if offload.activations == 0 or not pipeline.trains:
        return program
    program = program.transformed(lambda graph: graph.copy())
    moments = under_way(program.lists.work(c) for c in program.coordinate_range)
    moved = within(held_values(program, offload.least), offload.activations, moments)
    if not moved:
        program.stages[0].forward.diagnostics.append(_nothing(program, offload, moments))
        return program
    stages = list(pipeline.stages)
    members = {name: dict.fromkeys(values) for name, values in program.bundles.items()}
    for each in moved:
        for name in each.ports:
            for bundle in each.bundles:
                members[bundle].pop(name, None)
        members[each.bundle][each.name] = None
        dgrad = stages[each.stage].dgrad
        if len(each.bundles) > 1 and each.bundle not in dgrad.reads:  # until then it was for wgrad alone
            stages[each.stage] = replace(stages[each.stage], dgrad=replace(dgrad, reads=(*dgrad.reads, each.bundle)))
    for stage, bodies in enumerate(program.stages):
        mine = [each for each in moved if each.stage == stage]
        if not mine:
            continue
        for part, graph in bodies.parts.items():
            if part != "forward":  # while forward has the calls of views
                again = {"dgrad": bodies.parts.get("wgrad")}.get(part)
                _fetch(graph, mine, again, offload)
        _give(bodies.forward, mine, offload)
    sizes = lighter_sizes(pipeline.bytes, moved)
    return replace(
        program,
        bundles={name: tuple(values) for name, values in members.items()},
        lists=replace(program.lists, pipeline=replace(pipeline, stages=tuple(stages), bytes=sizes)),
    )


def _give(graph: Graph, held: Sequence[Held], offload: Offload) -> None:
    """Let a forward give what lies on the host."""
    calls = calls_as_run(graph)
    chosen = sorted((each.saved for each in held), key=lambda saved: saved.made)
    clock = Clock.of(seconds_of(graph, calls, offload.hardware), offload.hardware.host_bytes_per_second)
    bound = bound_of([(each.value, each.bytes) for each in chosen])
    on_host, places = copies_to_host(graph, chosen, clock, bound, len(calls))
    outputs: dict[Port, fx.Node] = {}
    held_in = {name: each for each in held for name in each.ports}
    for port, value in zip(graph.outputs, graph.output_values, strict=True):
        each = held_in.get(port.name) if port.role == "value" else None
        if each is None:
            outputs[port] = value
        else:
            outputs[Port("value", each.name)] = on_host[each.saved.value]
    graph.outputs = tuple(outputs)
    graph.output_node.args = (tuple(outputs.values()),)
    put(graph, calls, places)
    graph.erase_dead()  # views that forward itself does not read


def _fetch(graph: Graph, held: Sequence[Held], again: Graph | None, offload: Offload) -> None:
    """Let a graph of backward read what lies on the host; what the graph `again` reads too is kept there."""
    calls = calls_as_run(graph)
    index_of = {call: index for index, call in enumerate(calls)}
    inputs = {
        port.name: node for port, node in zip(graph.inputs, graph.placeholders, strict=True) if port.role == "value"
    }
    read: dict[Held, int] = {}
    for each in held:
        users = [user for name in each.ports.keys() & inputs.keys() for user in inputs[name].users]
        if users:
            read[each] = min(index_of[user] for user in users)
    order = sorted(read, key=lambda each: read[each])
    if not order:
        return
    clock = Clock.of(seconds_of(graph, calls, offload.hardware), offload.hardware.host_bytes_per_second)
    bound = bound_of([(each.saved.value, each.bytes) for each in order])
    begins = begins_of_fetches([Copy(each.bytes, read[each]) for each in order], clock, bound, 0)
    places: list[Place] = []
    gone: set[fx.Node] = set()
    for each, begin in zip(order, begins, strict=True):
        x, at = each.saved.value, read[each]
        phase, views = info(calls[at]).phase, {inputs[name]: v for name, v in each.ports.items() if name in inputs}
        host = inputs.get(each.name) or _input(graph, x)
        kept = again is not None and any(_reads(again, name) for name in each.ports)
        with graph.fx.inserting_before(graph.output_node):
            fetched = copy_call(graph, BEGIN_FETCH, (host,), x, f"{each.name}.back", phase)
            arguments = (fetched, host, True) if kept else (fetched, host)
            here = copy_call(graph, END_FETCH, arguments, x, f"{each.name}.here", phase)
            renewed = Renewed(graph, x, here, phase)
            for node, value in views.items():
                node.replace_all_uses_with(
                    renewed.value(value) if node.users else node, lambda user, own=(fetched, here): user not in own
                )
        places += [(begin, 3 if begin == at else 5, fetched), (at, 4, here)]
        places += [(at, 4, node) for node in renewed.calls]
        gone |= views.keys() - {host}
    ports = [port for port, node in zip(graph.inputs, graph.placeholders, strict=True) if node not in gone]
    for node in gone:
        graph.fx.erase_node(node)
    graph.inputs = tuple(ports)
    put(graph, calls, places)
    graph.erase_dead()  # other results of views of several, of which only some are read


def _input(graph: Graph, x: fx.Node) -> fx.Node:
    """A new input for a value of forward."""
    with graph.fx.inserting_after(graph.placeholders[-1]):
        node = graph.fx.placeholder(f"in_{len(graph.inputs) + 1}_{len(graph.fx.nodes)}")
    set_info(node, replace(info(x), phase="fwd", assignment=(), passes=(), fallback=(), results=()))
    graph.inputs = (*graph.inputs, Port("value", info(x).name))
    return node


def _reads(graph: Graph, name: str) -> bool:
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    return any(port.role == "value" and port.name == name and node.users for port, node in pairs)


def _nothing(program: StagedProgram, offload: Offload, moments: Sequence[UnderWay]) -> Diagnostic:
    movable = held_values(program, 1)
    why, hint = "no stage holds a value for its own backward alone, or only what the last one reads at once", ""
    if movable:
        size = max(each.bytes for each in movable)
        why = f"the largest that a stage holds for its backward has {human_bytes(size)} a rank and microbatch"
        why += f", and those of {human_bytes(offload.least)} or more are moved"
        if offload.activations != "all":
            most = max(moment.get(each.stage, 0) for moment in moments for each in movable)
            why += f", up to {human_bytes(offload.activations)} in all of up to {most} microbatches under way"
        hint = f"write offload: {{activations: all, least: {human_bytes(size)}}}, or "
    return Diagnostic("SC234", f"no activation lies on the host: {why}", "warning", hint=f"{hint}leave it out")


def _pipeline(step: CutStep | StagedProgram) -> Pipeline:
    return step.pipeline if isinstance(step, CutStep) else step.lists.pipeline
