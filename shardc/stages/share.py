"""A coordinate's share of a step: what its ranks hold, run, compute and send. Graphs count as often as lists run them.

Bytes that are sent are those of one rank, as in ir/collectives.py: a transfer's all, of an all-reduce over the ranks of
k stages 2 (k-1)/k of the tensor.
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
from shardc.stages.instructions import Gather, Instruction, Optimizer, ReduceGrads, Send
from shardc.stages.pipeline import PART_OF
from shardc.stages.places import graphs_of
from shardc.stages.program import Pipelined


def runs(program: Pipelined, c: int) -> Iterator[tuple[Graph, int]]:
    """The graphs that a coordinate's ranks run, and how often in a step."""
    times = Counter((work.stage, type(work)) for work in program.lists.work(c))
    for (stage, kind), count in times.items():
        yield program.stages[stage][PART_OF[kind]], count
    gathered = Counter((i.stage, name) for i in program.lists.ranks[c] if isinstance(i, Gather) for name in i.values)
    for (stage, name), count in gathered.items():
        yield program.stages[stage].gathers[name], count
    sums = [i for i in program.lists.ranks[c] if isinstance(i, ReduceGrads)]
    yield from ((graph, 1) for i in sums for graph in graphs_of(program, c, i))
    finish = program.finishes[c]
    if program.lists.pipeline.updates:
        yield from [(finish.norm, 1), (finish.update, 1)] if finish.totals else [(finish.update, 1)]


def computed(program: Pipelined, c: int) -> Flops:
    """The products of a rank at this coordinate."""
    return added((flops(graph), times) for graph, times in runs(program, c))


def stages_with(program: Pipelined, name: str) -> list[int]:
    """The stages that make a value of this name of the body, or did before backward's gathers were merged into
    forward's."""
    gathers = [set(_names(stage.gathers.values())) for stage in program.stages]
    parts = [set(_names(s for s in (one.forward, one.backward, one.reduce) if s is not None)) for one in program.stages]
    found = [at for at, names in enumerate(zip(gathers, parts, strict=True)) if any(name in some for some in names)]
    merged = re.sub(r"_\d+$", "", name)
    return found or [at for at, names in enumerate(gathers) if merged in names]


def _names(graphs: Iterable[Graph]) -> Iterator[str]:
    return (info(call).name for graph in graphs for call in graph.calls())


def added(parts: Iterable[tuple[Flops, int]]) -> Flops:
    """Counts by phase and op, each so many times."""
    found: Counter[tuple[object, str]] = Counter()
    for one, times in parts:
        for phase, op, count in one.counts:
            found[phase, op] += count * times
    return Flops(tuple((phase, op, count) for (phase, op), count in found.items()))  # type: ignore[misc]


def communicated(program: Pipelined, c: int) -> list[Collective]:
    """The collectives along the other axes."""
    return [replace(one, times=n) for graph, n in runs(program, c) for one in collectives(graph)]


def sent(program: Pipelined, c: int) -> dict[str, int]:
    """Bytes that a rank sends in a step, by axis; a collective along several counts for each."""
    found: Counter[str] = Counter()
    for one in communicated(program, c):
        for axis in {program.mesh.parent(axis) for axis in one.axes}:
            found[axis] += one.bytes_per_step
    along = sum(i.bytes for i in program.lists.ranks[c] if isinstance(i, Send))
    found[program.axis] = along + sum(summed(program, c, i) for i in program.lists.ranks[c])
    return dict(found)


def sent_in_all(program: Pipelined, c: int) -> int:
    """Bytes that a rank sends in a step, each once."""
    return sent(program, c)[program.axis] + sum(one.bytes_per_step for one in communicated(program, c))


def parameter_bytes(program: Pipelined, c: int) -> int:
    """What a rank stores of parameters, the padding of uneven shards included."""
    held, body = program.held(c), program.body
    ports = zip(body.inputs, body.placeholders, strict=True)
    types = [type_of(node) for port, node in ports if port.role == "param" and port.name in held]
    return sum(type.local_bytes(body.mesh) for type in types)


def summed(program: Pipelined, c: int, i: Instruction) -> int:
    """What sums over stages send: gradients of tied weights, and the parts of the gradients' norm."""
    if isinstance(i, ReduceGrads):
        return _all_reduce(i.bytes, len(i.group)) if i.value in program.shared else 0
    if isinstance(i, Optimizer):
        finish = program.finishes[c]
        outputs = zip(finish.norm.outputs, finish.norm.output_values, strict=True)
        sizes = [type_of(v).local_bytes(program.body.mesh) for port, v in outputs if port.name in finish.totals]
        return sum(_all_reduce(size, len(i.group)) for size in sizes)
    return 0


def _all_reduce(size: int, members: int) -> int:
    return math.ceil(2 * (members - 1) * size / members)
