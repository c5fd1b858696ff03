"""A program in stages against itself: its lists are proved, and its graphs are what the lists take them for.

    stage 0 forward     makes   x1            f32[4@dp, 8]
    Send x1#2 -> 1, 128 B                     of its bytes
    stage 1 forward     reads   x1            of the same type

What calls compute is checked by `joined_stages`, of all stages together. Here: every value and sum has one type
wherever it goes, what a part reads and makes is what its ports say, an input of the step is one everywhere, and each
output of the step is returned by some rank, as the body types it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.host_copies import on_host
from shardc.ir.types import TensorType
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram
from shardc.passes.type_check import Fault
from shardc.schedule.instructions import COMPUTE, TRANSFER, ReduceGrads, RunBody

BETWEEN = ("value", "sum")  # roles of what passes between graphs


def bound_faults(program: StagedProgram) -> list[Fault]:
    """Counts that contradict the lengths of the lists: later checks are linear in lists and graphs."""
    lists = program.lists
    body_work = sum(isinstance(i, RunBody) for listed in lists.ranks for i in listed) * 2 * lists.microbatches
    work = sum(isinstance(i, COMPUTE) for listed in lists.ranks for i in listed) + body_work
    stages = len(lists.pipeline.stages)
    if stages * lists.microbatches * (2 if lists.pipeline.trains else 1) > work:
        message = (
            f"{stages} stages of {lists.microbatches} microbatches are more work than the {work} parts in the lists"
        )
        return [Fault(program.body.name, message)]
    if lists.microbatches != program.body.microbatches:
        message = f"lists of {lists.microbatches} microbatches, of a step of {program.body.microbatches}"
        return [Fault(program.body.name, message)]
    return []


def stage_faults(program: StagedProgram) -> list[Fault]:
    """Everything in which graphs, lists and body disagree. Types of single calls, and proofs, are elsewhere."""
    body = program.body
    faults: list[Fault] = []
    for graph in (program.body, *program.graphs()):
        if graph.mesh != body.mesh:
            faults.append(Fault(graph.name, f"its mesh is ({graph.mesh}), the body's ({body.mesh})"))
        if graph is not body and graph.microbatches != 1:
            faults.append(Fault(graph.name, f"it runs on a microbatch, and says {graph.microbatches}"))
    if program.inner.world_size != body.mesh.world_size:
        faults.append(
            Fault(body.name, f"its mesh is ({body.mesh}), the job's but for '{program.axis}' ({program.inner})")
        )
    for stage in range(len(program.stages)):
        faults += _part_faults(program, stage)
    faults += _type_faults(program)
    faults += _place_faults(program)
    faults += _byte_faults(program)
    for rank in range(len(program.epilogues)):
        faults += _finish_faults(program, rank)
    return [*faults, *_returned_faults(program)]


def _ports(graph: Graph, side: str, *roles: str) -> dict[str, fx.Node]:
    ports, values = (graph.inputs, graph.placeholders) if side == "in" else (graph.outputs, graph.output_values)
    return {p.name: v for p, v in zip(ports, values, strict=True) if p.role in roles}


def _part_faults(program: StagedProgram, stage_index: int) -> Iterator[Fault]:
    """What the pipeline says that a part reads and makes is what its graph takes and gives. A body is a whole step."""
    stage, bodies = program.lists.pipeline.stages[stage_index], program.stages[stage_index]
    if set(stage.gathers) != set(bodies.gathers) or not set(stage.kept) <= set(stage.gathers):
        yield Fault(
            program.body.name,
            f"stage {stage_index} gathers {sorted(stage.gathers)}, its graphs {sorted(bodies.gathers)}",
        )
        return
    for name, graph in bodies.gathers.items():
        if {*_ports(graph, "out", "value")} != {*program.members(name)} or len(graph.outputs) != len(
            program.members(name)
        ):
            yield Fault(graph.name, f"it gives {sorted(_ports(graph, 'out', 'value'))}, and not the values of {name}")
        if _ports(graph, "in", *BETWEEN):
            yield Fault(graph.name, "it gathers what another graph makes")
    described = program.lists.pipeline.parts(stage_index)
    if program.axis and ("backward" in bodies.parts) != program.lists.pipeline.trains:
        yield Fault(program.body.name, f"stage {stage_index} has a backward, or the pipeline, and not the other")
        return
    if program.axis and program.lists.pipeline.trains == program.body.is_forward_only:
        yield Fault(program.body.name, "the pipeline trains, or the body, and not the other")
        return
    if len(halves := [bodies.parts[half] for half in ("dgrad", "wgrad") if half in bodies.parts]) == 2:
        backward_sums = {*_ports(bodies.parts["backward"], "out", "sum")}
        if differ := backward_sums ^ {name for half in halves for name in _ports(half, "out", "sum")}:
            listed = ", ".join(sorted(differ))
            yield Fault(bodies.parts["backward"].name, f"{listed}: summed by one of backward and its halves alone")
    for graph, part in ((graph, described[name]) for name, graph in bodies.parts.items() if name in described):
        reads = {member for name in part.reads for member in program.members(name)}
        makes = [member for name in part.makes for member in program.members(name)]
        if lacking := {*_ports(graph, "in", "value")} - reads:
            yield Fault(graph.name, f"it reads {', '.join(sorted(lacking))}, which the pipeline does not give it")
        if _ports(graph, "in", "sum"):
            yield Fault(graph.name, f"it reads sums: {', '.join(_ports(graph, 'in', 'sum'))}")
        values = _ports(graph, "out", "value")
        if {*values} != {*makes} or len(makes) != len({*makes}):
            yield Fault(graph.name, f"it makes {sorted(values)}, the pipeline says {sorted(makes)}")
        alone = f"grads{stage_index}" in part.accumulates
        for port in graph.outputs:
            expected = port.name in part.accumulates or port.name in part.results or (alone and port.role == "sum")
            if port.role != "value" and not expected:
                yield Fault(graph.name, f"it gives {port.role} '{port.name}', which the pipeline does not know")
            if port.role not in ("value", "sum", "buffer", "output"):
                yield Fault(graph.name, f"a microbatch gives no {port.role} '{port.name}'")
        shown = {port.name for port in graph.outputs if port.role != "value"}
        if lacking := {*part.results} - shown:
            yield Fault(graph.name, f"it does not give {', '.join(sorted(lacking))}, as the pipeline says")


def _type_faults(program: StagedProgram) -> Iterator[Fault]:
    """One type for each value and sum, wherever it is made or read; inputs of the step are the body's."""
    step_inputs = {
        (p.role, p.name): (p, type_of(v)) for p, v in zip(program.body.inputs, program.body.placeholders, strict=True)
    }
    reductions = {stage.reduce for stage in program.stages}
    for role in BETWEEN:
        types: dict[str, TensorType] = dict(program.shared) if role == "sum" else {}
        for graph in (program.body, *program.graphs()):
            if graph is program.body:
                continue
            for side in ("out", "in"):
                # What a reduction gives takes the place of a sum.
                roles = (role, "grad") if role == "sum" and side == "out" and graph in reductions else (role,)
                for name, value in _ports(graph, side, *roles).items():
                    if types.setdefault(name, type_of(value)) != type_of(value):
                        message = f"{role} '{name}' is {type_of(value)}, elsewhere {types[name]}"
                        yield Fault(graph.name, message, value)
    for graph in (program.body, *program.graphs()):
        for port, value in zip(graph.inputs, graph.placeholders, strict=True):
            if port.role not in BETWEEN and step_inputs.get((port.role, port.name)) != (port, type_of(value)):
                yield Fault(graph.name, f"{port.role} '{port.name}' of {type_of(value)} is no input of the step", value)


def _place_faults(program: StagedProgram) -> Iterator[Fault]:
    """What a graph leaves on the host, others only bring from there; and nothing else is brought."""
    graphs = [graph for stage in program.stages for graph in stage.parts.values()]
    given = {name: on_host(value) for graph in graphs for name, value in _ports(graph, "out", "value").items()}
    for graph in graphs:
        for name, value in _ports(graph, "in", "value").items():
            if value.users and given.get(name, False) != on_host(value):
                where = "on the host" if given.get(name, False) else "on the accelerator"
                yield Fault(graph.name, f"value '{name}' lies {where}, and is read as if it did not", value)


def _byte_faults(program: StagedProgram) -> Iterator[Fault]:
    """A transfer is of as many bytes as its value has, of a name that stands for one value."""
    types = {
        name: type_of(value)
        for stage in program.stages
        for graph in stage.parts.values()
        for name, value in _ports(graph, "out", "value").items()
    }
    for rank, listed in enumerate(program.lists.ranks):
        for index, i in enumerate(listed):
            if not isinstance(i, TRANSFER):
                continue
            size = sum(types[n].local_bytes(program.body.mesh) for n in program.members(i.value) if n in types)
            if i.value not in program.bundles and i.bytes != size:
                location = f"rank {rank}, instruction {index}"
                yield Fault(program.body.name, f"{location}: {i} moves {size} bytes")


def _finish_faults(program: StagedProgram, rank: int) -> Iterator[Fault]:
    """The inputs of the step's epilogue exist: sums of its rank's stages, shared sums, and results of the norm."""
    finish = program.epilogues[rank]
    sums: set[str] = set()
    for stage in program.lists.stages_of(rank):
        for graph in program.stages[stage].parts.values():
            sums |= {*_ports(graph, "out", "sum")}
    for i in program.lists.ranks[rank]:
        if isinstance(i, ReduceGrads):
            sums |= {i.value} & {*program.shared}
            for graph in graphs_of(program, rank, i):
                if lacking := {*_ports(graph, "in", "sum")} - sums:
                    yield Fault(graph.name, f"it reads {', '.join(sorted(lacking))}, which nothing sums")
                sums = sums - {*_ports(graph, "in", "sum")} | {port.name for port in graph.outputs}
    norm_outputs = {port.name for port in finish.norm.outputs}
    for graph, values in ((finish.norm, set[str]()), (finish.update, norm_outputs)):
        for port in graph.inputs:
            if port.role in BETWEEN and port.name not in (values if port.role == "value" else sums):
                yield Fault(graph.name, f"rank {rank}: it reads {port.role} '{port.name}', which is not there")
    if not {*finish.totals} <= norm_outputs or len({*finish.totals}) != len(finish.totals):
        yield Fault(finish.norm.name, f"rank {rank}: it gives no {', '.join(sorted({*finish.totals} - norm_outputs))}")
    if finish.totals != program.epilogues[0].totals:
        yield Fault(finish.norm.name, f"rank {rank}: its totals are other ones than rank 0's")


def _returned_faults(program: StagedProgram) -> Iterator[Fault]:
    """Every output of the step is some rank's, of the body's type; no rank returns another."""
    body = program.body
    step_outputs = {(p.role, p.name): (p, type_of(v)) for p, v in zip(body.outputs, body.output_values, strict=True)}
    returned: set[tuple[str, str]] = set()
    running = [
        *((g, None if g is body else ("output", "buffer")) for stage in program.stages for g in stage.parts.values()),
        *((finish.update, None) for finish in program.epilogues),
    ]
    for graph, roles in running:
        for port, value in zip(graph.outputs, graph.output_values, strict=True):
            if roles is not None and port.role not in roles:
                continue
            returned.add((port.role, port.name))
            if step_outputs.get((port.role, port.name)) != (port, type_of(value)):
                yield Fault(
                    graph.name, f"{port.role} '{port.name}' of {type_of(value)} is no output of the step", value
                )
    for role, name in step_outputs.keys() - returned:
        yield Fault(body.name, f"no rank returns {role} '{name}'")
