"""Predicts a step of a program: every call timed, on the streams of its rank, and the instruction lists over them.

    body        once, as one rank runs it (`cost.streams`)
    pipeline    each graph of each coordinate by itself; then the lists are replayed with its seconds

A transfer between stages takes as long as a permute of its bytes. Ranks of one coordinate take the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

from torch import fx

from shardc.cost.call_seconds import CallCost, Kind, call_costs
from shardc.cost.flops import flops
from shardc.cost.prediction import ExposedTime, Prediction
from shardc.cost.prediction_trace import body_trace, pipeline_trace
from shardc.cost.profile import CallTime
from shardc.cost.streams import Steps, Timed, issued_before, run, steps_of, without_issuing
from shardc.ir.graph import Graph, Phase, info, type_of
from shardc.ir.hardware import Group, Hardware
from shardc.ir.layers import in_every_layer
from shardc.ir.mesh import Mesh
from shardc.partition.memory import memory
from shardc.partition.program_counter import graphs_of, runner_of
from shardc.partition.rank_costs import all_reduce_bytes, rank_flops, stage_sums
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.costs import Costs, InstructionCosts, StageCost
from shardc.schedule.instructions import COMPUTE, TRANSFER, Instruction, Optimizer, Send
from shardc.schedule.replay import replay
from shardc.schedule.timeline import Timeline


def predict(
    program: StagedProgram, reference: Graph, hardware: Hardware, name: str = "", *, replayed: bool = False
) -> Prediction:
    """`reference` is the same step on one device: the model's FLOPs and tokens are counted there. `replayed` is a step
    that no host issues, as from a CUDA graph."""
    return _Predictor(program, reference, hardware, name, replayed).prediction()


class _Predictor:
    def __init__(self, program: StagedProgram, reference: Graph, hardware: Hardware, name: str, replayed: bool) -> None:
        self.program, self.reference, self.name, self.replayed = program, reference, name, replayed
        self.mesh = whole_mesh(program)
        self.hardware = issued_before(hardware.on(self.mesh)) if replayed else hardware.on(self.mesh)
        self.products = 1.0  # how many times as long as by the table products take,
        self.pace = 1.0  # and all kernels
        self._costs: dict[Graph, dict[fx.Node, CallCost]] = {}
        self._timed: dict[Graph, Timed] = {}
        self._steps: dict[Graph, Steps] = {}
        self._work: dict[int, dict[Send, Instruction]] = {}  # by coordinate, what it computes last before each send

    def _step(self) -> tuple[float, int, Timeline | None, Costs | None]:
        """The seconds of a step, the coordinate that works longest, and of a pipeline the timeline and its costs."""
        program = self.program
        c = max(program.coordinate_range, key=lambda c: sum(t.compute * n for t, n in self._runs(c)))
        if not program.axis:
            return self.timed(program.body).seconds, c, None, None
        costs = self.costs()
        timeline = replay(program.lists, costs)
        return timeline.makespan, c, timeline, costs

    def _limit_power(self, seconds: float, c: int) -> None:
        """Run all graphs anew with the rate of products that a device has over such a step."""
        products = sum(timed.kinds.get("product", 0.0) * n for timed, n in self._runs(c))
        self.products = self.hardware.tables.power.factor(products, max(0.0, seconds - products))
        if self.products != 1.0:
            self._timed.clear()

    def _free_neighbours(self, seconds: float, timeline: Timeline | None) -> None:
        """Run all graphs anew at the pace of ranks whose neighbours wait for as long as in such a step."""
        contention, node = self.hardware.tables.contention, self.hardware.accelerators_per_node
        if contention.neighbours == 1.0 or node == 1:
            return
        busy = 1 - _bubble(seconds, timeline)
        self.pace = contention.pace(1 - busy * (min(self.mesh.world_size, node) - 1) / (node - 1))
        if self.pace != 1.0:
            self._timed.clear()

    def prediction(self) -> Prediction:
        program = self.program
        seconds, c, timeline, _ = self._step()
        self._limit_power(seconds, c)
        self._free_neighbours(seconds, timeline)
        seconds, c, timeline, costs = self._step()
        runs = self._runs(c)
        count, unit = _tokens(self.reference)
        ranks, model = program.mesh.world_size, flops(self.reference).total
        peak = self.hardware.peak_flops_per_second
        kinds = Counter[Kind]()
        for timed, n in runs:
            for kind, spent in timed.kinds.items():
                kinds[kind] += spent * n * 1e3  # type: ignore[assignment]
        return Prediction(
            self.name,
            ranks,
            seconds * 1e3,
            count,
            model / (ranks * peak * seconds) if seconds else 0.0,
            _bubble(seconds, timeline),
            memory(program).peak,
            self._exposed(c),
            dict(kinds),
            sum(t.idle * n for t, n in runs) * 1e3,
            sum(t.gaps * n for t, n in runs) * 1e3,
            sum(t.host * n for t, n in runs) * 1e3,
            sum(t.launches * n for t, n in runs),
            model,
            rank_flops(program, c).total,
            c,
            timeline,
            costs,
            self._calls(c),
            partial(self._trace, timeline),
            unit,
            sum(t.taken * n for t, n in runs) * 1e3,
            sum(t.met * n for t, n in runs) * 1e3,
        )

    # ------------------------------------------------------------------ graphs
    def costs_of(self, graph: Graph) -> dict[fx.Node, CallCost]:
        if graph not in self._costs:
            costs = call_costs(graph, self.hardware, self.mesh)
            self._costs[graph] = without_issuing(costs) if self.replayed else costs
        return self._costs[graph]

    def timed(self, graph: Graph) -> Timed:
        if graph not in self._timed:
            if graph not in self._steps:
                self._steps[graph] = steps_of(graph)
            costs, steps = self.costs_of(graph), self._steps[graph]
            self._timed[graph] = run(graph, costs, self.hardware, self.products, steps, self.pace)
        return self._timed[graph]

    def _graph_runs(self, c: int) -> Mapping[Graph, int]:
        counts = Counter[Graph]()
        for i in self.program.lists.ranks[c]:
            counts.update(graphs_of(self.program, c, i))
        return counts

    def _runs(self, c: int) -> list[tuple[Timed, int]]:
        return [(self.timed(graph), n) for graph, n in self._graph_runs(c).items()]

    def _calls(self, c: int) -> dict[CallTime, Kind]:
        """What each call takes on compute in a step."""
        times: dict[tuple[str, str], tuple[int, float, Kind]] = {}
        for i, n in Counter(map(_without_microbatch, self.program.lists.ranks[c])).items():
            for graph in graphs_of(self.program, c, i):
                timed, costs = self.timed(graph), self.costs_of(graph)
                for node, runs in timed.runs.items():
                    key = runner_of(i), info(node).name
                    known, spent, _ = times.get(key, (0, 0.0, costs[node].kind))
                    spent += n * timed.by_call.get(node, 0.0) * 1e3
                    times[key] = known + n * runs, spent, costs[node].kind
        return {CallTime(*key, known, spent): kind for key, (known, spent, kind) in times.items()}

    def _trace(self, timeline: Timeline | None) -> dict[str, Any]:
        program = self.program
        if timeline is None:
            return body_trace(self.timed(program.body), program.mesh.world_size)
        inner = range(program.body.mesh.world_size)
        ranks = [[program.rank_of(c, i) for i in inner] for c in program.coordinate_range]
        of = {
            (c, i): [self.timed(graph) for graph in graphs_of(program, c, i)]
            for c in program.coordinate_range
            for i in program.lists.ranks[c]
        }
        return pipeline_trace(timeline, ranks, of)

    def _exposed(self, c: int) -> tuple[ExposedTime, ...]:
        rows: dict[tuple[object, ...], ExposedTime] = {}
        for graph, n in self._graph_runs(c).items():
            waited = Counter[fx.Node]()
            for node, seconds in self.timed(graph).exposed:
                waited[node] += seconds  # type: ignore[assignment]
            repeated = self.timed(graph).runs
            for node, cost in self.costs_of(graph).items():
                times = n * repeated.get(node, 1)
                if (moved := cost.moved) is not None:
                    key = moved.kind, moved.axes, moved.phase, in_every_layer(moved.cause)
                    source, size = moved.source, moved.bytes_per_rank
                elif cost.kind == "host copy" and cost.launches:
                    key = f"copy {cost.stream}", (), info(node).phase, "offload"
                    source, size = "", type_of(node).local_bytes(graph.mesh)
                else:
                    continue
                known = rows.get(key) or ExposedTime(*key, source, 0, 0, 0.0, 0.0)
                rows[key] = ExposedTime(
                    *key,
                    known.source,
                    known.times + times,
                    known.bytes + times * size,
                    known.exposed_ms + n * waited[node] * 1e3,
                    known.ms + times * cost.seconds * 1e3,
                )
        for row in self._stage_sums(c):
            rows[row.kind, row.axes, row.phase, row.cause] = row
        return tuple(sorted(rows.values(), key=lambda row: -row.exposed_ms))

    def _stage_sums(self, c: int) -> Iterator[ExposedTime]:
        """The sums over stages, by what is summed: compute waits for all of each."""
        sums: dict[tuple[str, Phase], list[tuple[int, float]]] = {}
        for i in self.program.lists.ranks[c]:
            for cause, group, size in stage_sums(self.program, c, i):
                phase: Phase = "opt" if isinstance(i, Optimizer) else "bwd"
                spent = all_reduce_bytes(size, len(group)), self._sum_seconds(size, group)
                sums.setdefault((cause, phase), []).append(spent)
        for (cause, phase), of in sums.items():
            ms = 1e3 * sum(seconds for _, seconds in of)
            axes = (self.program.axis,)
            yield ExposedTime("all_reduce", axes, phase, cause, "", len(of), sum(sent for sent, _ in of), ms, ms)

    # ------------------------------------------------------------------ pipelines
    def costs(self) -> Costs:
        """The seconds of the instructions of every rank's list, and those that schedules are searched by."""
        stages: list[StageCost] = []
        for number, bodies in enumerate(self.program.stages):
            seconds = {part: self.timed(graph).seconds for part, graph in bodies.parts.items()}
            stages.append(
                StageCost(
                    seconds["forward"],
                    seconds.get("dgrad", 0.0),
                    seconds.get("wgrad", 0.0),
                    seconds.get("backward"),
                    self.program.costs.stages[number].activation if self.program.costs.stages else 1.0,
                )
            )
        costs = Costs(tuple(stages), memory=self.program.costs.memory)
        return InstructionCosts.given(costs, cache(self.seconds), cache(self.taken))

    def seconds(self, c: int, i: Instruction) -> float:
        """How long an instruction of a coordinate's list takes."""
        if isinstance(i, Send):
            return self.hardware.tables.meetings.wait(self._computed_before(c, i)) + self._moving(c, i)
        spent = sum(self.timed(graph).seconds for graph in graphs_of(self.program, c, i))
        return spent + sum(self._sum_seconds(size, group) for _, group, size in stage_sums(self.program, c, i))

    def taken(self, c: int, send: Send) -> float:
        """How long compute of both coordinates stands still for a transfer, where it takes their cores."""
        contention = self.hardware.tables.contention
        return contention.switch_seconds + contention.cores * self._moving(c, send)

    def _moving(self, c: int, send: Send) -> float:
        return self.hardware.collective_seconds("send", send.bytes, self._group((c, send.peer)), graph=True)

    def _computed_before(self, c: int, send: Send) -> float:
        """The seconds of what a coordinate's list computes last before it sends."""
        work = self._last_work(c).get(send)
        return 0.0 if work is None else sum(self.timed(graph).compute for graph in graphs_of(self.program, c, work))

    def _last_work(self, c: int) -> Mapping[Send, Instruction]:
        if c not in self._work:
            last: Instruction | None = None
            of: dict[Send, Instruction] = {}
            for i in self.program.lists.ranks[c]:
                if isinstance(i, COMPUTE):
                    last = i
                elif isinstance(i, Send) and last is not None:
                    of[i] = last
            self._work[c] = of
        return self._work[c]

    def _sum_seconds(self, size: int, group: tuple[int, ...]) -> float:
        return self.hardware.collective_seconds("all_reduce", size, self._group(group), graph=True)

    def _group(self, coordinates: tuple[int, ...]) -> Group:
        """How the ranks of some coordinates that are otherwise alike lie in the network."""
        node = self.hardware.accelerators_per_node
        nodes = {self.program.rank_of(c, 0) // node for c in coordinates}
        return Group((len(coordinates),)) if len(nodes) == 1 else Group((len(coordinates) // len(nodes), len(nodes)))


def _bubble(seconds: float, timeline: Timeline | None) -> float:
    """The share of a pipeline's step in which its ranks do nothing; without one 0."""
    if timeline is None or not seconds:
        return 0.0
    busy = sum(e.end - e.start for e in timeline.events if e.busy)
    return 1 - busy / (timeline.ranks * seconds)


def _without_microbatch(i: Instruction) -> Instruction:
    return replace(i, microbatch=0) if isinstance(i, (*COMPUTE, *TRANSFER)) else i


def whole_mesh(program: StagedProgram) -> Mesh:
    """The mesh of all ranks, its axes split as those of the body."""
    inner = program.body.mesh
    axes: list[tuple[str, int]] = []
    for name, size in program.mesh.axes:
        children = inner.children(name)
        axes += [(child, dict(inner.axes)[child]) for child in children] if children else [(name, size)]
    return Mesh(axes)


def _tokens(reference: Graph) -> tuple[int, Literal["tokens", "samples"]]:
    """The elements of the first input of whole numbers with two dims; without one, the rows of the first input, which
    are samples."""
    inputs = [
        type_of(node)
        for port, node in zip(reference.inputs, reference.placeholders, strict=True)
        if port.role == "input" and type_of(node).ndim
    ]
    ids = [t for t in inputs if not t.dtype.is_floating_point and t.ndim == 2]
    rows = ids[0].numel() if ids else inputs[0].shape[0] if inputs else 1
    return rows * reference.microbatches, "tokens" if ids else "samples"
