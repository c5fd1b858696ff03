"""Liveness of the storages of a per-rank body: from which call to which each is allocated.

A storage lives from the call that makes it to the last use of it or of a view of it; outputs live to the end, inputs
all along. While a call runs, its operands and its results are both there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from shardc.ir.buckets import is_summed, pieces
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, Phase, Port, Role, info, op_name
from shardc.ir.in_place import writes
from shardc.ir.microbatch import GIVEN, MADE, Sections
from shardc.ir.ops.accumulate import SUMS
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.local import axis_offset
from shardc.ir.overlap_schedule import Times
from shardc.ir.storages import Storage, yields

ORDER: tuple[Phase, ...] = ("fwd", "bwd", "opt")


@dataclass
class Life:
    """The lifetime of one storage: its first and last call, and the phases of its creation and its last use."""

    storage: Storage
    born: int
    dies: int
    phase: Phase
    last: Phase
    weights: bool  # made of parameters alone
    moved: bool  # by a collective
    returned: Role | None = None
    in_flight: bool = False  # what a collective holds for itself


def lives(
    body: Graph,
    calls: Sequence[fx.Node],
    run: Sections,
    of: dict[fx.Node, Storage],
    times: Times | None = None,
) -> tuple[list[tuple[Port, Storage]], list[Life]]:
    """The storages of inputs; and those that calls make, in order of birth.

    Of several microbatches it is the last: what all are fed is there, the sums so far, the outputs of those before, and
    the buffers that it starts from; what is made before them is made before these, and what the first microbatch
    gathers for all is there. With `times`, lives are counted in actions of a rank, which begins collectives early and
    makes offsets once and for all; else in calls.
    """
    end = len(calls) if times is None else times.end
    over = {write.value: write for write in writes(body, of, run)}
    bucket_pieces = pieces(body, run)  # in the flat tensor of a bucket
    several, begin = body.microbatches > 1, 0  # of the last microbatch
    early, microbatch_nodes, first = run
    found = {of[v] for call in first for v, _ in yields(call) if not first.issuperset(v.users)}  # by later ones
    if early:
        begin = next(i for i in range(len(early), len(calls)) if times is None or calls[i] not in first)
        begin = begin if times is None else times.begun[begin]
    input_storages: list[tuple[Port, Storage]] = []
    for port, node in zip(body.inputs, body.placeholders, strict=True):
        copies = body.microbatches if port.role in GIVEN else 1
        input_storages.append((port, replace(of[node], bytes=of[node].bytes * copies)))
    life_of: dict[Storage, Life] = {}
    earlier: list[Life] = []
    weights = {node for port, node in zip(body.inputs, body.placeholders, strict=True) if port.role == "param"}
    moves: dict[int, bool] = {}  # by the id of an op, whose own hash is written in Python
    for index, call in enumerate(calls):
        phase, sources = info(call).phase, call.all_input_nodes
        of_weights = bool(sources) and weights.issuperset(sources)
        read = index if times is None else times.read[index]
        if call in first:  # before the last microbatch
            read = begin - 1
        for source in sources:
            life = life_of.get(of[source])
            if life is not None:
                if read > life.dies:
                    life.dies = read
                if phase != life.last and ORDER.index(phase) > ORDER.index(life.last):
                    life.last = phase
        for value, _ in ((call, 0),) if info(call).type is not None else yields(call):
            storage, in_bucket = of[value], value in bucket_pieces
            if of_weights:
                weights.add(value)
            owns_storage = storage.value is value or in_bucket
            if owns_storage and storage not in life_of and (value not in over or over[value].op is None):
                target = call.target
                if (moved := moves.get(id(target))) is None:
                    moved = moves[id(target)] = target in (PACK, UNPACK) or op_name(target) in KINDS
                moved = moved or in_bucket
                if moved and (made := storage.value).target is PACK and is_summed(made):
                    moved = False
                now = index if times is None else times.arrived[index]
                forever = times is not None and target is axis_offset
                if call in first and storage not in found:
                    continue  # of the first microbatch alone
                there = several and (target in SUMS or storage in found)
                born = 0 if forever else begin if there else now
                life_of[storage] = Life(storage, born, end if forever else now, phase, phase, of_weights, moved)
    if early:
        kept = early | first
        behind = next((i for i, call in enumerate(calls) if call not in kept and call not in microbatch_nodes), None)
        until = end if behind is None else behind if times is None else times.begun[behind]
        for call in kept:
            for value, _ in yields(call):
                life = life_of.get(of[value])
                if life is not None and any(user in microbatch_nodes for user in value.users):
                    life.dies = max(life.dies, until)  # each microbatch reads it
    for port, value in zip(body.outputs, body.output_values, strict=True):
        life = life_of.get(of[value])
        if life is not None and value in over:  # copied as soon as it is made; what reads it reads the copy
            life.dies, life.returned = life.born, port.role
        elif life is not None:
            life.dies, life.returned = end, life.returned or port.role
            if several and port.role in MADE and value in microbatch_nodes:
                earlier_bytes = of[value].bytes * (body.microbatches - 1 if port.role == "output" else 1)
                earlier.append(replace(life, storage=replace(of[value], bytes=earlier_bytes), born=begin))
    return input_storages, [*earlier, *sorted(life_of.values(), key=lambda life: life.born)]
