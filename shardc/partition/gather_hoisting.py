"""Hoists gathers and casts of stored parameters out of the microbatches: one serves many microbatches.

    %w.all_gather = all_gather(%w, dp)              forward0  reads %w.cast
    %w.cast = _to_copy(%w.all_gather, bf16)         backward0 reads %w.cast, and %b.all_gather
    %b.all_gather = all_gather(%b, dp)

    params0     %w -> %w.cast                       read by forward and backward
    params0.b   %b -> %b.all_gather                 by backward alone; `params0.f` by forward alone

Hoisted are collectives that read weights and no batch values, calls that make fewer bytes of weights alone, all calls
that these depend on, and calls on their results that need no more memory than their operands. Backward's gathers, and
the calls on them, are merged with equal ones of forward; the instruction list decides whether a parameter is regathered
in between. Where the body keeps forward's gathered value for backward (storage's `regather: false`, and casts of master
copies under ZeRO-1 and 2), it is never regathered, and what is only cast is never cast again: these are `params0.kept`.
So are weights that forward alone reads, as an embedding's, where backward gathers none again.

Profit and cost: gathered within the parts, a parameter would be sent once a microbatch in each direction, and held
layer by layer. Hoisted, it is sent once a visit of the stage, but all parameters of the stage are held together. Stages
are small where there are many of them; breadth-first schedules are made for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import networkx as nx
from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, type_of
from shardc.ir.microbatch import narrowed_weights
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.partition.step_analysis import StepAnalysis, result_values


class GatherGroup(NamedTuple):
    """Hoisted calls of a stage that run together. `kept`: the body keeps what they gather for backward."""

    calls: list[fx.Node]
    kept: bool


def hoisted_calls(analysis: StepAnalysis) -> set[fx.Node]:
    """The calls of a body that are hoisted."""
    replicable, sources = analysis.replicable, analysis.weight_sources
    narrowed, hoisted = narrowed_weights(analysis.body, replicable), set[fx.Node]()
    for call in reversed(analysis.calls):
        if call in replicable:
            communicates = call.target in COLLECTIVES and any(sources[v] for v in operands(call))
            if (
                communicates
                or call in narrowed
                or any(user in hoisted for v in result_values(call) for user in v.users)
            ):
                hoisted.add(call)
    size = analysis.bytes_of
    for call in analysis.calls:
        if call not in replicable or call in hoisted:
            continue
        read = dict.fromkeys(operands(call))
        hoisted_reads = [v for v in read if producer(v)[0] in hoisted]
        all_available = len(hoisted_reads) + sum(v in analysis.available_inputs for v in read) == len(read)
        if hoisted_reads and all_available and sum(map(size, result_values(call))) <= sum(map(size, read)):
            hoisted.add(call)
    return hoisted


def merge_gathers(graph: Graph) -> frozenset[fx.Node]:
    """Merge backward's gathers into equal ones of forward. Returns forward's gathers that stay gathered: those that
    backward already read, and if there were no others in backward, those that forward alone reads."""
    analysis = StepAnalysis(graph)
    hoisted = hoisted_calls(analysis)
    read_by_backward = {
        call
        for call in hoisted
        if info(call).phase == "fwd" and any(user in analysis.backward for v in result_values(call) for user in v.users)
    }
    again = any(info(call).phase == "bwd" and call.target in COLLECTIVES for call in hoisted)
    stays = {c for c in hoisted if info(c).phase == "fwd"} if read_by_backward and not again else read_by_backward
    first: dict[tuple[object, ...], fx.Node] = {}
    for call in [call for call in analysis.calls if call in hoisted and info(call).type is not None]:
        key = (call.target, repr(call.args), repr(sorted(call.kwargs.items())), type_of(call))
        original = first.setdefault(key, call)
        if original is not call:
            call.replace_all_uses_with(original)
            graph.activations = {name: original if v is call else v for name, v in graph.activations.items()}
            graph.fx.erase_node(call)
    return frozenset(stays - (hoisted - set(graph.fx.nodes)))


def group_gathers(
    name: str,
    readers: Mapping[str, Sequence[fx.Node]],
    hoisted: Collection[fx.Node],
    kept: frozenset[fx.Node],
) -> dict[str, GatherGroup]:
    """The hoisted calls that the parts of a stage need, by name. Connected calls share one name."""
    needed: nx.Graph[fx.Node] = nx.Graph()
    read: dict[fx.Node, set[str]] = {}
    for part, calls in readers.items():
        phase = "f" if part == "forward" else "b"
        todo = [source for call in calls for v in operands(call) if (source := producer(v)[0]) in hoisted]
        while todo:
            call = todo.pop()
            if phase not in read.setdefault(call, set()):
                read[call].add(phase)
                needed.add_node(call)
                above = [source for v in operands(call) if (source := producer(v)[0]) in hoisted]
                needed.add_edges_from((call, source) for source in above)
                todo += above
    groups: dict[str, GatherGroup] = {}
    for component in nx.connected_components(needed):
        phases = {phase for call in component for phase in read[call]}
        is_kept = bool(component & kept) or not any(call.target in COLLECTIVES for call in component)
        ending = ".kept" if is_kept else "" if len(phases) == 2 else f".{phases.pop()}"
        groups.setdefault(name + ending, GatherGroup([], is_kept)).calls.extend(component)
    return dict(sorted(groups.items()))
