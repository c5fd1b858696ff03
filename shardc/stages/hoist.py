"""What is made of stored parameters alone, and by communication, is made for many microbatches at once: hoisted.

    %w.all_gather = all_gather(%w, dp)              forward0  reads %w.cast
    %w.cast = _to_copy(%w.all_gather, bf16)         backward0 reads %w.cast, and %b.all_gather
    %b.all_gather = all_gather(%b, dp)

    params0     %w -> %w.cast                       read by forward and backward
    params0.b   %b -> %b.all_gather                 by backward alone; `params0.f` by forward alone

Hoisted are the collectives that read weights and nothing of a batch, all that they are made of, and what is made of
them and takes no more memory than what it is made of. Backward's own gathers, and what it makes of them, are one with
forward's where these are the same: whether a parameter is gathered again in between is for the instruction list to
say. Where the body keeps forward's for backward (storage's `regather: false`, and casts of master copies under ZeRO-1
and 2), it is not: these are `params0.kept`.

Why this is worth it, and what it costs: gathered within the parts, a parameter would be sent once a microbatch in each
direction, and held layer by layer; gathered for a visit of a stage, it is sent once a visit, but those of the whole
stage are held together. Stages are small where there are many of them: breadth-first was made for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import networkx as nx
from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, type_of
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.stages.anatomy import Anatomy, values_of

KEPT = ".kept"


def gathering(anatomy: Anatomy) -> set[fx.Node]:
    """The calls of a body that are hoisted."""
    free, sources = anatomy.free, anatomy.sources
    found: set[fx.Node] = set()
    for call in reversed(anatomy.calls):
        if call in free:
            communicates = call.target in COLLECTIVES and any(sources[v] for v in operands(call))
            if communicates or any(user in found for v in values_of(call) for user in v.users):
                found.add(call)
    size = anatomy.bytes_of
    for call in anatomy.calls:
        if call not in free or call in found:
            continue
        read = dict.fromkeys(operands(call))
        made = [v for v in read if producer(v)[0] in found]
        there = len(made) + sum(v in anatomy.given for v in read) == len(read)
        if made and there and sum(map(size, values_of(call))) <= sum(map(size, read)):
            found.add(call)
    return found


def merge_gathers(graph: Graph) -> frozenset[fx.Node]:
    """Make backward's gathers one with forward's. Returns those of forward that backward read before."""
    anatomy = Anatomy(graph)
    hoisted = gathering(anatomy)
    kept = {
        call
        for call in hoisted
        if info(call).phase == "fwd" and any(user in anatomy.backward for v in values_of(call) for user in v.users)
    }
    first: dict[tuple[object, ...], fx.Node] = {}
    for call in [call for call in anatomy.calls if call in hoisted and info(call).type is not None]:
        key = (call.target, repr(call.args), repr(sorted(call.kwargs.items())), type_of(call))
        one = first.setdefault(key, call)
        if one is not call:
            call.replace_all_uses_with(one)
            graph.activations = {name: one if v is call else v for name, v in graph.activations.items()}
            graph.fx.erase_node(call)
    return frozenset(kept - (hoisted - set(graph.fx.nodes)))


def grouped(
    name: str,
    readers: Mapping[str, Sequence[fx.Node]],
    hoisted: Collection[fx.Node],
    kept: frozenset[fx.Node],
) -> dict[str, list[fx.Node]]:
    """The hoisted calls that parts of a stage need, by name. What is made of one another has one name."""
    needed: nx.Graph[fx.Node] = nx.Graph()
    read: dict[fx.Node, set[str]] = {}
    for part, calls in readers.items():
        phase = "f" if part == "forward" else "b"
        todo = [made for call in calls for v in operands(call) if (made := producer(v)[0]) in hoisted]
        while todo:
            call = todo.pop()
            if phase not in read.setdefault(call, set()):
                read[call].add(phase)
                needed.add_node(call)
                above = [made for v in operands(call) if (made := producer(v)[0]) in hoisted]
                needed.add_edges_from((call, made) for made in above)
                todo += above
    found: dict[str, list[fx.Node]] = {}
    for together in nx.connected_components(needed):
        phases = {phase for call in together for phase in read[call]}
        ending = KEPT if together & kept else "" if len(phases) == 2 else f".{phases.pop()}"
        found.setdefault(name + ending, []).extend(together)
    return dict(sorted(found.items()))
