"""The costs of a coordinate's ranks in one step: what they hold, run, compute and send. A graph counts once a run.

Sent bytes are those of one rank, as in ir/collectives.py: all bytes of a transfer, and 2 (k-1)/k of the tensor for an
all-reduce over the ranks of k stages.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardc.cost.flops import Flops, flops
from shardc.ir.collectives import Collective, collectives
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.mesh import Mesh
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import STAGE_WORK, Gather, Instruction, Optimizer, ReduceGrads, Send
from shardc.schedule.pipeline import PART_OF


def graph_runs(program: StagedProgram, c: int) -> Iterator[tuple[Graph, int]]:
    """The graphs that a coordinate's ranks run, and how often in a step."""
    work_counts = Counter((i.stage, type(i)) for i in program.lists.ranks[c] if isinstance(i, STAGE_WORK))
    for (stage, kind), count in work_counts.items():
        yield program.stages[stage][PART_OF[kind]], count
    gather_counts = Counter(
        (i.stage, name) for i in program.lists.ranks[c] if isinstance(i, Gather) for name in i.values
    )
    for (stage, name), count in gather_counts.items():
        yield program.stages[stage].gathers[name], count
    reductions = [i for i in program.lists.ranks[c] if isinstance(i, ReduceGrads)]
    yield from ((graph, 1) for i in reductions for graph in graphs_of(program, c, i))
    for epilogue in program.epilogues[c : c + 1]:
        yield from [(epilogue.norm, 1), (epilogue.update, 1)] if epilogue.totals else [(epilogue.update, 1)]


def graphs_by_name(program: StagedProgram) -> dict[str, Graph]:
    """All graphs that some rank runs, by a name of their own. Each coordinate has its own graphs of the step's end."""
    graphs: dict[str, Graph] = {}
    for c in program.coordinate_range:
        for graph, _ in graph_runs(program, c):
            graphs[f"{graph.name}{c}" if graph.name in ("norm", "update") else graph.name] = graph
    return graphs


def rank_flops(program: StagedProgram, c: int) -> Flops:
    """The FLOPs of a rank at this coordinate."""
    return sum_flops((flops(graph), times) for graph, times in graph_runs(program, c))


def stages_with_value(program: StagedProgram, name: str) -> list[int]:
    """The stages that make the body's value of this name, or made it before backward's gathers were merged into
    forward's."""
    gathers = [set(_names(stage.gathers.values())) for stage in program.stages]
    parts = [
        set(_names(s for s in (*bodies.parts.values(), bodies.reduce) if s is not None)) for bodies in program.stages
    ]
    stages = [
        stage_index
        for stage_index, names in enumerate(zip(gathers, parts, strict=True))
        if any(name in part_names for part_names in names)
    ]
    merged = re.sub(r"_\d+$", "", name)
    return stages or [stage_index for stage_index, names in enumerate(gathers) if merged in names]


def _names(graphs: Iterable[Graph]) -> Iterator[str]:
    """Of values that are made there, also of those that come out of a bucket."""
    return (info(value).name for graph in graphs for value in graph.values() if value.op != "placeholder")


def sum_flops(parts: Iterable[tuple[Flops, int]]) -> Flops:
    """The sum of counts by phase and op, each multiplied by its number of runs."""
    counts: Counter[tuple[object, str]] = Counter()
    for flop_counts, times in parts:
        for phase, op, count in flop_counts.counts:
            counts[phase, op] += count * times
    return Flops(tuple((phase, op, count) for (phase, op), count in counts.items()))  # type: ignore[misc]


def rank_collectives(program: StagedProgram, c: int) -> list[Collective]:
    """The collectives of a rank along the other axes."""
    return [
        replace(collective, times=n * collective.times)
        for graph, n in graph_runs(program, c)
        for collective in collectives(graph)
    ]


def bytes_sent_by_axis(program: StagedProgram, c: int, mesh: Mesh) -> dict[str, int]:
    """Bytes that a rank sends in a step, by axis of the user's mesh. A collective along several counts for each."""
    bytes_by_axis: Counter[str] = Counter()
    for collective in rank_collectives(program, c):
        for axis in {axis if axis in mesh.names else mesh.parent(axis) for axis in collective.axes}:
            bytes_by_axis[axis] += collective.bytes_per_step
    bytes_by_axis[program.axis] += _bytes_between_stages(program, c)
    return dict(bytes_by_axis)


def total_bytes_sent(program: StagedProgram, c: int) -> int:
    """Bytes that a rank sends in a step, each counted once."""
    return _bytes_between_stages(program, c) + sum(
        collective.bytes_per_step for collective in rank_collectives(program, c)
    )


def most_sent(program: StagedProgram, mesh: Mesh, total: str) -> dict[str, int]:
    """Bytes that the rank which sends most sends in a step: by axis of the user's mesh; and in all, as `total`."""
    most: dict[str, int] = {}
    for c in program.coordinate_range:
        sent = {**bytes_sent_by_axis(program, c, mesh), total: total_bytes_sent(program, c)}
        most |= {axis: max(size, most.get(axis, 0)) for axis, size in sent.items()}
    return most


def _bytes_between_stages(program: StagedProgram, c: int) -> int:
    transferred = sum(i.bytes for i in program.lists.ranks[c] if isinstance(i, Send))
    return transferred + sum(stage_sum_bytes(program, c, i) for i in program.lists.ranks[c])


def parameter_bytes(program: StagedProgram, c: int) -> int:
    """Bytes of the parameter shards that a rank stores, with the padding of uneven shards."""
    held_names, body = program.held(c), program.body
    ports = zip(body.inputs, body.placeholders, strict=True)
    types = [type_of(node) for port, node in ports if port.role == "param" and port.name in held_names]
    return sum(type.local_bytes(body.mesh) for type in types)


def stage_sum_bytes(program: StagedProgram, c: int, i: Instruction) -> int:
    """Bytes sent by sums over stages."""
    return sum(all_reduce_bytes(size, len(group)) for _, group, size in stage_sums(program, c, i))


def stage_sums(program: StagedProgram, c: int, i: Instruction) -> list[tuple[str, tuple[int, ...], int]]:
    """The all-reduces over stages that an instruction does: of what, over which coordinates, of how many bytes."""
    if isinstance(i, ReduceGrads):
        return [("gradients of weights that stages share", i.group, i.bytes)] if i.value in program.shared else []
    if isinstance(i, Optimizer) and program.epilogues:
        epilogue = program.epilogues[c]
        outputs = zip(epilogue.norm.outputs, epilogue.norm.output_values, strict=True)
        sizes = [type_of(v).local_bytes(program.body.mesh) for port, v in outputs if port.name in epilogue.totals]
        return [("norm of all stages' gradients", i.group, size) for size in sizes]
    return []


def all_reduce_bytes(size: int, members: int) -> int:
    return math.ceil(2 * (members - 1) * size / members)
