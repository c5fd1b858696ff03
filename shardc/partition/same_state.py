"""Does a program take its parameters, buffers and state as another of the same model holds them?

    compiled first    batch [8, 128]    w : f32[64@tp, 64]        compiled later    batch [3, 96]    the same w

Both run on the same tensors in turn. So each rank must hold the same elements of each of them, in the same order, and a
stage of a pipeline must read what it read before. `passes/sharding/store.py` and `same_cut.py` see to it; this checks
it, whatever the two call their axes: an axis may be split into sub-axes in one of the meshes.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardc.ir.diagnostic import error, listed
from shardc.ir.graph import Port, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.program import CONSTANT
from shardc.ir.types import TensorType
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram

KEPT = ("param", "buffer", "state")
HINT = "train on batches of one shape: leave the last short one out (drop_last=True), or pad what is shorter"
Steps = tuple[tuple[int, int], ...]  # of axes: distance between ranks and their number, major first
Layout = tuple[tuple[tuple[int, Steps], ...], ...]  # by dim: factors, and the axes that shard them


def refuse_other_state(program: StagedProgram, first: StagedProgram) -> None:
    """Raise ShardcError (SC547) unless the program, compiled like the first, takes and leaves the same tensors."""
    held, taken = _held(first), _held(program)
    fresh = [name for name in taken if name not in held]
    if fresh:
        message = f"for this batch a step keeps {listed(fresh)}, which it does not for the first"
        raise error("SC547", message, tensor=fresh[0], hint=HINT)
    for name, (port, type) in taken.items():
        other_port, other = held[name]
        same = type.dtype == other.dtype and layout(type, program.body.mesh) == layout(other, first.body.mesh)
        if not same or port.role != other_port.role:
            message = f"for this batch '{name}' would be held as {type}, and it is held as {other}"
            raise error("SC547", message, tensor=name, hint=HINT)
    places, stages = homes(first), homes(program)
    for name, stage in stages.items():
        if name in places and stage and stage != places[name]:
            message = f"for this batch '{name}' is read at {list(stage)} of the pipeline, and it lies at {places[name]}"
            raise error("SC547", message, tensor=name, hint=HINT)


def homes(program: StagedProgram) -> dict[str, list[int]]:
    """By parameter, buffer and state: the coordinates of the pipeline that read it."""
    names: dict[str, list[int]] = {port.name: [] for port in program.body.inputs if port.role in KEPT}
    for c in program.coordinate_range:
        graphs = {id(g): g for instruction in program.lists.ranks[c] for g in graphs_of(program, c, instruction)}
        for name in {port.name for graph in graphs.values() for port in graph.inputs if port.role in KEPT}:
            names[name].append(c)
    return names


def layout(type: TensorType, mesh: Mesh) -> Layout:
    """Which elements each rank holds, written in one way: by the numbers of ranks, with factors as coarse as can be."""
    return tuple(_coarse([(a.size, _steps(mesh, a.axes)) for a in dim]) for dim in type.dims)


def _coarse(factors: list[tuple[int, Steps]]) -> tuple[tuple[int, Steps], ...]:
    joined: list[tuple[int, Steps]] = []
    for size, steps in factors:
        if joined:
            before, over = joined[-1]
            shards = _count(over)
            if not steps and before % shards == 0:  # each shard of the major factor has whole runs of the minor one
                joined[-1] = before * size, over
                continue
            if steps and before == shards:
                joined[-1] = before * size, _joined((*over, *steps))
                continue
        joined.append((size, steps))
    return tuple(joined)


def _steps(mesh: Mesh, axes: tuple[str, ...]) -> Steps:
    names = mesh.resolve(axes)
    distances = {name: mesh.groups((name,))[0] for name in names}
    return _joined(tuple((d[1] - d[0], len(d)) for name in names if len(d := distances[name]) > 1))


def _joined(steps: Steps) -> Steps:
    """Sub-axes that stand in order are the axis that they were split from."""
    joined: list[tuple[int, int]] = []
    for distance, count in steps:
        if joined and joined[-1][0] == distance * count:
            joined[-1] = distance, joined[-1][1] * count
        else:
            joined.append((distance, count))
    return tuple(joined)


def _count(steps: Steps) -> int:
    count = 1
    for _, n in steps:
        count *= n
    return count


def _held(program: StagedProgram) -> Mapping[str, tuple[Port, TensorType]]:
    """What lies between steps, a program's own tensors left out: each program numbers those anew."""
    pairs = zip(program.body.inputs, program.body.placeholders, strict=True)
    return {p.name: (p, type_of(n)) for p, n in pairs if p.role in KEPT and not p.name.startswith(CONSTANT)}
