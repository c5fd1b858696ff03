"""A step's body cut into stages: every call gets one, every stage its parts as graphs, and the pipeline is described.

    wte  h.0  h.1 | h.2  h.3  ln_f  head        forward: units in order, cut where it is balanced, or where a plan says
                  | d.head  d.ln_f  d.h.3 ...   backward: each call in the stage whose values it reads
    mask            mask                        free calls: in each stage that reads them

Cut is the body of all the axes but the pipeline's, compiled and localized: the stages differ in what they run, and not
in how it is sharded. So what crosses has one type on both sides, and goes shard by shard from a rank of one stage to
the rank of the same coordinates in another. It goes to each stage that reads it straight from the one that makes it:
handing it on from stage to stage is as many bytes at best, and more wherever a stage between does not read it.

"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, info
from shardc.ir.storages import storages
from shardc.stages.again import keep_what_was_sent
from shardc.stages.anatomy import Anatomy
from shardc.stages.balance import call_costs, choose, named
from shardc.stages.bodies import extract
from shardc.stages.carried import keep_for_backward
from shardc.stages.costs import Costs, StageCost
from shardc.stages.finish import End, Finish
from shardc.stages.hoist import KEPT, merge_gathers
from shardc.stages.parts import Parts, Place
from shardc.stages.pipeline import PARTS, Part, PartName, Pipeline, Stage
from shardc.stages.sums import Sum, split_sums


@dataclass(frozen=True)
class StageBodies:
    """The graphs of a stage's parts, by name of what it gathers, and of what reduces its gradients over other axes.
    `backward` is dgrad and wgrad in one, in the order of the body."""

    forward: Graph
    backward: Graph
    dgrad: Graph
    wgrad: Graph
    gathers: Mapping[str, Graph] = field(default_factory=dict[str, Graph])
    reduce: Graph | None = None

    def __getitem__(self, part: PartName) -> Graph:
        return getattr(self, part)

    @cached_property
    def held(self) -> frozenset[str]:
        """The parameters and buffers that the stage reads."""
        graphs = (self.forward, self.backward, *self.gathers.values())
        return frozenset(p.name for graph in graphs for p in graph.inputs if p.role in ("param", "buffer"))


@dataclass(frozen=True, eq=False)
class Staged:
    """A step in stages. `body` is the whole of it, run by no stage; `bundles` lists the values kept under one name.

    `sums` are those over microbatches; `groups` the stages that must have each, whether or not they have terms of it.
    """

    body: Graph
    pipeline: Pipeline
    stages: tuple[StageBodies, ...]
    bundles: Mapping[str, tuple[str, ...]]
    sums: tuple[Sum, ...]
    groups: Mapping[str, tuple[int, ...]]
    costs: Costs
    end: End = field(repr=False)

    def finish(self, stages: Iterable[int]) -> Finish:
        """The end of the step for a rank that has these stages."""
        return self.end.of(stages)

    def members(self, name: str) -> tuple[str, ...]:
        """The values that a name of the pipeline stands for."""
        return self.bundles.get(name, (name,))


def cut(body: Graph, stages: int | None = None, split: Sequence[str] = ()) -> Staged:
    """Cut a localized body into `stages` of equal cost, or where the modules of `split` begin.

    The body must have been compiled with `accumulate`, also of one microbatch. Raises ShardcError (SC221) where it
    cannot be cut.
    """
    graph = body.copy()
    kept = merge_gathers(graph)
    keep_for_backward(graph)
    anatomy = Anatomy(graph)
    if split and stages is not None and stages != len(split) + 1:
        message = f"{len(split)} split points make {len(split) + 1} stages, and not {stages}"
        raise error("SC221", message, hint="leave out one of `split` and `stages`")
    starts = named(anatomy, split) if split else choose(anatomy, stages or 1)
    stage_of = {call: bisect_right(starts, unit) - 1 for call, unit in anatomy.unit_of.items()}
    sums = split_sums(graph, stage_of)
    keep_what_was_sent(graph, stage_of, anatomy.again)
    return _described(Parts(graph, len(starts), stage_of, tuple(sums), kept))


def _described(parts: Parts) -> Staged:
    sizes = _bytes(parts)
    bodies = tuple(_bodies(parts, stage) for stage in range(parts.count))
    own = [_own_sums(parts, stage) for stage in range(parts.count)]
    end = End(parts.anatomy, parts.sums, parts.groups, [body.held for body in bodies], own)
    bodies = tuple(replace(body, reduce=end.reduce(stage)) for stage, body in enumerate(bodies))
    ordered = set(parts.carried_by.values())
    stages: list[Stage] = []
    for at in range(parts.count):
        forward, dgrad, wgrad = (_part(parts, (at, which)) for which in PARTS)
        gathers = parts.gathers[at]
        kept = tuple(name for name in gathers if name.endswith(KEPT))
        stages.append(Stage(forward, dgrad, wgrad, gathers, kept, ordered=at in ordered))
    bundles: dict[str, dict[str, None]] = {}
    for (_, value), name in parts.names.items():
        if name != info(value).name:
            bundles.setdefault(name, {})[info(value).name] = None
    return Staged(
        parts.graph,
        Pipeline(tuple(stages), sizes, clips=bool(end.totals)),
        bodies,
        {name: tuple(values) for name, values in bundles.items()},
        parts.sums,
        parts.groups,
        _costs(parts, sizes),
        end,
    )


def _own_sums(parts: Parts, stage: int) -> frozenset[str]:
    """The gradients that a stage accumulates alone: `grads1` to the lists."""
    ports = (port for which in ("dgrad", "wgrad") for port, _ in parts.outputs[stage, which])
    return frozenset(port.name for port in ports if port.role == "sum" and parts.groups[port.name] == (stage,))


def _part(parts: Parts, place: Place) -> Part:
    stage, which = place
    accumulates: dict[str, None] = {}
    results: list[str] = []
    for port, _ in parts.outputs[place]:
        alone = port.role != "sum" or parts.groups[port.name] == (stage,)
        if port.role == "sum" and not (alone and which == "forward"):
            accumulates[f"grads{stage}" if alone else port.name] = None
        else:
            results.append(port.name)
    if which == "wgrad":  # a stage that only holds a tied weight has to be told its gradient
        held = (one.name for one in parts.sums if stage in parts.groups[one.name] and stage not in one.parts)
        accumulates |= dict.fromkeys(held)
    makes = dict.fromkeys(parts.makes(place).values())
    return Part(tuple(parts.reads(place)), tuple(makes), tuple(accumulates), tuple(results))


def _bodies(parts: Parts, stage: int) -> StageBodies:
    made: dict[PartName, Graph] = {}
    for which in PARTS:
        passed = parts.makes((stage, which))
        made[which] = _graph(parts, f"{which}{stage}", parts.calls[stage, which], passed, [(stage, which)])
    both: list[Place] = [(stage, "dgrad"), (stage, "wgrad")]
    # What only dgrad and wgrad pass to each other does not show.
    leaving = [v for place in both for v in parts.makes(place) if any(s != stage for s, _ in parts.readers[place, v])]
    backward = _graph(parts, f"backward{stage}", parts.backward[stage], leaving, both)
    gathers = {
        name: _graph(parts, name, parts.calls[stage, name], parts.makes((stage, name)), [])
        for name in parts.gathers[stage]
    }
    return StageBodies(made["forward"], backward, made["dgrad"], made["wgrad"], gathers)


def _graph(
    parts: Parts, name: str, calls: Sequence[fx.Node], passed: Iterable[fx.Node], places: Sequence[Place]
) -> Graph:
    outputs = [(Port("value", info(value).name), value) for value in passed]
    outputs += [one for place in places for one in parts.outputs[place]]
    return extract(parts.graph, name, calls, outputs)


def _bytes(parts: Parts) -> dict[str, int]:
    """Of a value on its own, its local size; of what is kept, that of the memory which nothing else keeps."""
    memory = storages(parts.graph)
    bytes_of = parts.anatomy.bytes_of
    sizes: dict[str, int] = {}
    counted: set[tuple[str, fx.Node]] = set()
    for (maker, value), name in parts.names.items():
        owner = memory[value].value
        if name == info(value).name:
            sizes[name] = bytes_of(value)
            continue
        there = owner in parts.anatomy.given or (name, owner) in counted
        if not there and owner is not value:  # a view of what the same parts read under another name?
            readers = set(parts.readers[maker, value])
            there = any(v is owner and readers <= set(places) for (_, v), places in parts.readers.items())
        counted.add((name, owner))
        sizes[name] = sizes.get(name, 0) + (0 if there else memory[value].bytes)
    for one in parts.sums:
        first, *others = parts.groups[one.name]
        name = one.name if others else f"grads{first}"
        sizes[name] = sizes.get(name, 0) + bytes_of(one.total)
    return sizes


def _costs(parts: Parts, sizes: Mapping[str, int]) -> Costs:
    cost = call_costs(parts.anatomy)
    found: list[StageCost] = []
    for stage in range(parts.count):
        forward, dgrad, wgrad = (sum(cost[call] for call in parts.calls[stage, which]) for which in PARTS)
        kept = sum(sizes[name] for name in dict.fromkeys(parts.makes((stage, "forward")).values()))
        found.append(StageCost(forward, dgrad, wgrad, activation=float(kept)))
    gathers = {
        name: float(sum(cost[call] for call in parts.calls[stage, name]))
        for stage, names in enumerate(parts.gathers)
        for name in names
    }
    return Costs(tuple(found), gathers=gathers)
