"""Cuts a step's body into stages: assigns a stage to every call, extracts each stage's graphs, describes the pipeline.

    wte  h.0  h.1 | h.2  h.3  ln_f  head        forward: units in order, cut for balance or where the plan says
                  | d.head  d.ln_f  d.h.3 ...   backward: each call in the stage whose values it reads
    mask            mask                        replicable calls: in each stage that reads them

The input is a body that was compiled and localized for all axes but the pipeline's. Stages therefore differ in the
calls that they run, not in sharding. A value that crosses a cut has the same type on both sides, and each rank sends
its shard to the rank of the same coordinates in the other stage. The producing stage sends it directly to each stage
that reads it. Relaying it from stage to stage would send as many bytes at best, and more wherever a stage in between
does not read it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, info
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.storages import storages
from shardc.partition.balance import (
    call_costs,
    choose_starts,
    named_starts,
    send_seconds,
    sent_cost,
)
from shardc.partition.cross_stage_buffers import keep_buffers_for_backward
from shardc.partition.extract_subgraph import extract_subgraph
from shardc.partition.fused_costs import weighed_layers
from shardc.partition.gather_hoisting import merge_gathers
from shardc.partition.microbatch_sums import MicrobatchSum, split_sums
from shardc.partition.same_cut import StageNames
from shardc.partition.stage_parts import PartKey, StageParts
from shardc.partition.stage_recompute import reuse_received_values
from shardc.partition.step_analysis import finest_analysis
from shardc.partition.step_epilogue import EpilogueCut, StepEpilogue
from shardc.passes.fusion.fuse import Fuse
from shardc.passes.join_squares import separate_squares
from shardc.passes.join_sums import separate_sums
from shardc.passes.sum_products import separate_terms
from shardc.schedule.costs import Costs, StageCost
from shardc.schedule.pipeline import PARTS, PartName, Pipeline, Stage, StagePart

GRAPHS: tuple[PartName, ...] = ("forward", "backward", "dgrad", "wgrad")  # of a stage of a pipeline
FORWARD_ONLY: tuple[PartName, ...] = ("forward",)  # and of one that only evaluates


@dataclass(frozen=True)
class StageBodies:
    """The graphs of a stage's parts, of its gathers by name, and of the reduction of its gradients over other axes.

    The parts are forward, backward, dgrad and wgrad: backward is dgrad and wgrad in one graph, in the order of the
    body. The only stage of a step without a pipeline has one part, the body."""

    parts: Mapping[PartName, Graph]
    gathers: Mapping[str, Graph] = field(default_factory=dict[str, Graph])
    reduce: Graph | None = None

    def __getitem__(self, part: PartName) -> Graph:
        return self.parts[part]

    @property
    def forward(self) -> Graph:
        return self.parts["forward"]

    @property
    def backward(self) -> Graph:
        return self.parts["backward"]

    @property
    def dgrad(self) -> Graph:
        return self.parts["dgrad"]

    @property
    def wgrad(self) -> Graph:
        return self.parts["wgrad"]

    def graphs(self) -> Iterator[Graph]:
        yield from self.parts.values()
        yield from self.gathers.values()
        if self.reduce is not None:
            yield self.reduce

    def transformed(self, change: Callable[[Graph], Graph]) -> StageBodies:
        return StageBodies(
            {name: change(graph) for name, graph in self.parts.items()},
            {name: change(graph) for name, graph in self.gathers.items()},
            None if self.reduce is None else change(self.reduce),
        )

    @cached_property
    def held(self) -> frozenset[str]:
        """The parameters and buffers that the stage reads."""
        graphs = (*self.parts.values(), *self.gathers.values())
        return frozenset(p.name for graph in graphs for p in graph.inputs if p.role in ("param", "buffer"))


@dataclass(frozen=True, eq=False)
class CutStep:
    """A step cut into stages. `body` is the whole step, which no stage runs. `bundles` lists the values of each name.

    `sums` are the sums over microbatches. `sum_stages` lists for each sum the stages that need it, with terms or not.
    """

    body: Graph
    pipeline: Pipeline
    stages: tuple[StageBodies, ...]
    bundles: Mapping[str, tuple[str, ...]]
    sums: tuple[MicrobatchSum, ...]
    sum_stages: Mapping[str, tuple[int, ...]]
    costs: Costs
    epilogue: EpilogueCut = field(repr=False)

    def epilogue_of(self, stages: Iterable[int]) -> StepEpilogue:
        """The epilogue of the step on a rank that runs these stages."""
        return self.epilogue.for_stages(stages)

    def members(self, name: str) -> tuple[str, ...]:
        """The values that a name in the pipeline stands for."""
        return self.bundles.get(name, (name,))


def cut(
    body: Graph,
    stages: int | None = None,
    split: Sequence[str] = (),
    hardware: Hardware = DEFAULT,
    axis: str = "pp",
    like: StageNames | None = None,
    mesh: Mesh | None = None,
    fuse: Fuse | None = None,
) -> CutStep:
    """Cut a localized body into `stages` of equal cost, or where the modules of `split` begin, or as it was cut `like`.

    The stages lie along the axis, which the body's mesh does not have: what they send each other goes along it. `mesh`
    is that of all ranks; without one, the network's tables do not say how long that takes. Stages that will be fused
    are weighed as kernels, which `fuse` makes.

    The body must have been compiled with `accumulate`, also of one microbatch. Raises ShardcError (SC221) where it
    cannot be cut.
    """
    graph = body.copy()
    separate_sums(graph)
    separate_terms(graph)
    separate_squares(graph)
    kept_gathers = merge_gathers(graph)
    keep_buffers_for_backward(graph)
    if split and stages is not None and stages != len(split) + 1:
        message = f"{len(split)} split points make {len(split) + 1} stages, and not {stages}"
        raise error("SC221", message, hint="leave out one of `split` and `stages`")
    count = 1 if like is not None else len(split) + 1 if split else stages or 1
    layers, costs = weighed_layers(graph, count, fuse, hardware, mesh)
    if like is not None:
        analysis = finest_analysis(graph)
        starts = like.starts(analysis)
    elif split:
        analysis = finest_analysis(graph)
        starts = named_starts(analysis, split)
    else:
        analysis = layers
        starts = choose_starts(analysis, count, hardware, axis, mesh, costs)
    stage_of = {call: bisect_right(starts, unit) - 1 for call, unit in analysis.unit_of.items()}
    sums = split_sums(graph, stage_of)
    reuse_received_values(graph, stage_of, analysis.recomputed)
    parts = StageParts(graph, len(starts), stage_of, tuple(sums), kept_gathers)
    return _describe_cut(parts, call_costs(parts.analysis, hardware, mesh) | costs, hardware, axis, mesh)


def _describe_cut(
    parts: StageParts, costs: Mapping[fx.Node, float], hardware: Hardware, axis: str, mesh: Mesh | None
) -> CutStep:
    sizes, trains = _value_bytes(parts), not parts.graph.is_forward_only
    bodies = tuple(_stage_bodies(parts, stage) for stage in range(parts.count))
    single_stage_sums = [_single_stage_sums(parts, stage) for stage in range(parts.count)]
    epilogue = EpilogueCut(
        parts.analysis, parts.sums, parts.sum_stages, [body.held for body in bodies], single_stage_sums
    )
    bodies = tuple(replace(body, reduce=epilogue.reduce(stage)) for stage, body in enumerate(bodies))
    ordered = set(parts.buffer_stage.values())
    stages: list[Stage] = []
    for index in range(parts.count):
        forward, dgrad, wgrad = (_part(parts, (index, which)) for which in PARTS)
        gathers = parts.gathers[index]
        stages.append(Stage(forward, dgrad, wgrad, gathers, parts.kept_gathers[index], ordered=index in ordered))
    bundles: dict[str, dict[str, None]] = {}
    for (_, value), name in parts.names.items():
        if name != info(value).name:
            bundles.setdefault(name, {})[info(value).name] = None
    return CutStep(
        parts.graph,
        Pipeline(tuple(stages), sizes, bool(parts.sums) or trains, bool(epilogue.totals), trains),
        bodies,
        {name: tuple(values) for name, values in bundles.items()},
        parts.sums,
        parts.sum_stages,
        _costs(parts, sizes, costs, hardware, axis, mesh),
        epilogue,
    )


def _single_stage_sums(parts: StageParts, stage: int) -> frozenset[str]:
    """The gradients that only this stage accumulates: `grads1` in the instruction lists."""
    ports = (port for which in ("dgrad", "wgrad") for port, _ in parts.outputs[stage, which])
    return frozenset(port.name for port in ports if port.role == "sum" and parts.sum_stages[port.name] == (stage,))


def _part(parts: StageParts, part_key: PartKey) -> StagePart:
    stage, part = part_key
    accumulates: dict[str, None] = {}
    results: list[str] = []
    for port, _ in parts.outputs[part_key]:
        alone = port.role != "sum" or parts.sum_stages[port.name] == (stage,)
        if port.role == "sum" and not (alone and part == "forward"):
            accumulates[f"grads{stage}" if alone else port.name] = None
        else:
            results.append(port.name)
    if part == "wgrad":  # a stage that holds a tied weight without terms of its gradient still needs the sum
        held_gradients = (
            microbatch_sum.name
            for microbatch_sum in parts.sums
            if stage in parts.sum_stages[microbatch_sum.name] and stage not in microbatch_sum.accumulates
        )
        accumulates |= dict.fromkeys(held_gradients)
    makes = dict.fromkeys(parts.makes(part_key).values())
    return StagePart(tuple(parts.reads(part_key)), tuple(makes), tuple(accumulates), tuple(results))


def _stage_bodies(parts: StageParts, stage: int) -> StageBodies:
    graphs: dict[PartName, Graph] = {}
    for which in PARTS:
        passed = parts.makes((stage, which))
        graphs[which] = _graph(parts, f"{which}{stage}", parts.calls[stage, which], passed, [(stage, which)])
    backward_parts: list[PartKey] = [(stage, "dgrad"), (stage, "wgrad")]
    # Values that only pass from dgrad to wgrad are internal to backward.
    leaving = [
        v for part in backward_parts for v in parts.makes(part) if any(s != stage for s, _ in parts.readers[part, v])
    ]
    graphs["backward"] = _graph(parts, f"backward{stage}", parts.backward[stage], leaving, backward_parts)
    gathers = {
        name: _graph(parts, name, parts.calls[stage, name], parts.makes((stage, name)), [])
        for name in parts.gathers[stage]
    }
    return StageBodies({n: graphs[n] for n in (FORWARD_ONLY if parts.graph.is_forward_only else GRAPHS)}, gathers)


def _graph(
    parts: StageParts, name: str, calls: Sequence[fx.Node], passed: Iterable[fx.Node], part_keys: Sequence[PartKey]
) -> Graph:
    outputs = [(Port("value", info(value).name), value) for value in passed]
    outputs += [output for part_key in part_keys for output in parts.outputs[part_key]]
    return extract_subgraph(parts.graph, name, calls, outputs)


def _value_bytes(parts: StageParts) -> dict[str, int]:
    """The bytes of each name. A value of its own counts its local size. A bundle counts the storage of its members,
    without storage that is held elsewhere."""
    memory = storages(parts.graph)
    bytes_of = parts.analysis.bytes_of
    sizes: dict[str, int] = {}
    counted: set[tuple[str, fx.Node]] = set()
    for (maker, value), name in parts.names.items():
        owner = memory[value].value
        if name == info(value).name:
            sizes[name] = bytes_of(value)
            continue
        counted_elsewhere = owner in parts.analysis.available_inputs or (name, owner) in counted
        if not counted_elsewhere and owner is not value:  # a view, whose base the same parts may read by another name
            readers = set(parts.readers[maker, value])
            counted_elsewhere = any(
                v is owner and readers <= set(part_keys) for (_, v), part_keys in parts.readers.items()
            )
        counted.add((name, owner))
        sizes[name] = sizes.get(name, 0) + (0 if counted_elsewhere else memory[value].bytes)
    for microbatch_sum in parts.sums:
        first, *others = parts.sum_stages[microbatch_sum.name]
        name = microbatch_sum.name if others else f"grads{first}"
        sizes[name] = sizes.get(name, 0) + bytes_of(microbatch_sum.total)
    return sizes


def _costs(
    parts: StageParts,
    sizes: Mapping[str, int],
    cost: Mapping[fx.Node, float],
    hardware: Hardware,
    axis: str,
    mesh: Mesh | None,
) -> Costs:
    stage_costs: list[StageCost] = []
    crossing = 0
    for stage in range(parts.count):
        forward, dgrad, wgrad = (sum(cost[call] for call in parts.calls[stage, which]) for which in PARTS)
        makes = dict.fromkeys(parts.makes((stage, "forward")).values())
        activation_bytes = sum(sizes[name] for name in makes)
        stage_costs.append(StageCost(forward, dgrad, wgrad, activation=float(activation_bytes)))
        if stage + 1 < parts.count:
            read = dict.fromkeys(parts.reads((stage + 1, "forward")))
            crossing = max(crossing, sum(sizes[name] for name in makes if name in read))
    gathers = {
        name: float(sum(cost[call] for call in parts.calls[stage, name]))
        for stage, names in enumerate(parts.gathers)
        for name in names
    }
    costs = Costs(tuple(stage_costs), gathers=gathers)
    if mesh is None or not hardware.tables.links or not crossing:
        return costs  # of no machine in particular: schedules are compared by their work
    latency = send_seconds(hardware, 0, mesh, axis) * hardware.bf16_flops_per_second
    sending = sent_cost(hardware, crossing, mesh, axis)
    return replace(costs, latency=latency, bandwidth=crossing / sending if sending else math.inf, crossing=crossing)
