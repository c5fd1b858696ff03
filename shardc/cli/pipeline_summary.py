"""A pipelined program in a few tables: its stages, what a rank communicates, when ranks would do what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shardc.api import Program
from shardc.cli.summary import (
    Communication,
    collective_list,
    collectives_by_layer,
    communication,
    communication_table,
    in_buckets,
    local_graph,
    parameters,
    predicted_choices,
    table_of,
    work,
)
from shardc.compiler.what_varies import batch_line
from shardc.ir.collectives import human_bytes
from shardc.ir.graph import Graph, info
from shardc.ir.layers import layer_or_module, list_and_index
from shardc.ir.text import print_graph
from shardc.partition import rank_costs
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import ReduceGrads, Send

NAMED = 6  # modules of a stage


def pipeline_summary(program: Program) -> list[RenderableType]:
    """What `summary` says of other programs, and the stages."""
    pipelined, lists = program.staged, program.staged.lists
    stages = (
        f"{len(pipelined.stages)} stages along {pipelined.axis}, {lists.schedule}, {lists.microbatches} microbatches"
    )
    head = f"{program.mesh.world_size} ranks, mesh {program.mesh}; {stages}"
    busiest = max(range(len(lists.ranks)), key=lambda c: rank_costs.total_bytes_sent(pipelined, c))
    timeline = program.timeline()
    phases = ("fwd", "bwd", "opt")
    sent = communication_table(sorted(_communications(pipelined, busiest), key=lambda row: phases.index(row.phase)))
    free = "" if pipelined.costs.latency else ", as if sending took no time"
    sent.title, sent.title_justify = f"a rank of {pipelined.axis}={busiest}, which sends most", "left"
    lines = [
        head,
        f"{parameters(program)} (the fullest)",
        f"{work(program.flops())} (the busiest)",
        *in_buckets(program, dict.fromkeys(graph for graph, _ in rank_costs.graph_runs(pipelined, busiest))),
        *predicted_choices(program),
        batch_line(program),
    ]
    return [
        Text("\n".join(lines)),
        stage_table(pipelined, timeline.peak_bytes),
        sent,
        Text(f"predicted, in FLOPs of a rank{free}: {timeline.text(100)}", no_wrap=True),
    ]


def stage_table(program: StagedProgram, peaks: tuple[int, ...]) -> RenderableType:
    """A row a stage: where it is, its modules, its share of the cost, and what it sends on of one microbatch."""
    costs = [stage.forward + stage.dgrad + stage.wgrad for stage in program.costs.stages]
    table = table_of(
        *("stage", program.axis, "modules", "cost", "parameters", "sent forward", "and back", "held at most"),
        number=(0, 1, 3, 4, 5, 6, 7),
    )
    for c in range(len(program.lists.ranks)):
        for stage in program.lists.stages_of(c):
            forward, backward = _sent(program, c, stage)
            table.add_row(
                *(str(stage), str(c), modules(program, stage), f"{costs[stage] / (sum(costs) or 1.0):.1%}"),
                *(str(_parameters(program, stage)), human_bytes(forward), human_bytes(backward)),
                human_bytes(peaks[c]) if stage == program.lists.stages_of(c)[0] else "",
            )
    return table


def communication_list(program: Program, by_layer: bool = False) -> list[RenderableType]:
    """What `explain` is asked about: collectives, and what stages send each other, numbered on; all of them, or
    `by_layer`."""
    collectives, transfers = program.collectives(), program.transfers()
    if by_layer:
        table = table_of("#", "transfer", "stages", "phase", "sent", number=(0, 4))
    else:
        table = table_of("#", "transfer", "from stage", "to", "phase", "sent by a rank", "line", number=(0, 2, 3, 5))
    for i, transfer in enumerate(transfers, len(collectives)):
        sent = f"{human_bytes(transfer.bytes_per_rank)} x{transfer.times}"
        name, origin, target = f"%{transfer.name}", str(transfer.origin), str(transfer.target)
        if by_layer:
            table.add_row(str(i), name, f"{origin} to {target}", transfer.phase, sent)
        else:
            table.add_row(str(i), name, origin, target, transfer.phase, sent, transfer.source)
    listed = collectives_by_layer if by_layer and collectives else collective_list
    tables = [listed(collectives)] if collectives or not transfers else []
    return [*tables, table] if transfers else tables


def modules(program: StagedProgram, stage: int) -> str:
    """The layers and modules of a stage, in the order of its forward; neighbours as a range: `h.0-3, ln_f, lm_head`."""
    # What several stages run, such as a mask, names the first of them.
    earlier = {info(call).name for bodies in program.stages[:stage] for call in bodies.forward.calls()}
    calls = [info(call) for call in program.stages[stage].forward.calls() if info(call).name not in earlier]
    units = dict.fromkeys(layer_or_module(about.fqn) for about in calls)
    # What a module does itself, between the modules in it, does not name it here.
    outermost = [unit for unit in units if unit and not any(other.startswith(f"{unit}.") for other in units)]
    ranges: list[tuple[str, int, int]] = []  # a name, and from where to where if it is numbered
    for unit in outermost:
        base, index = list_and_index(unit)
        if index >= 0 and ranges and ranges[-1][0] == base and ranges[-1][2] == index - 1:
            ranges[-1] = (base, ranges[-1][1], index)
        else:
            ranges.append((base, index, index) if index >= 0 else (unit, -1, -1))
    shown = [name if a < 0 else f"{name}.{a}" + (f"-{b}" if b > a else "") for name, a, b in ranges]
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return (", ".join(shown[:NAMED]) or "the model's own") + more


def _parameters(program: StagedProgram, stage: int) -> int:
    params = {port.name for port in program.body.inputs if port.role == "param"}
    return len(params & program.stages[stage].held)


def _sent(program: StagedProgram, c: int, stage: int) -> tuple[int, int]:
    """Bytes of one microbatch that a rank sends of what the stage's forward makes, and its backward."""
    part = program.lists.pipeline.stages[stage]
    sends = [i for i in program.lists.ranks[c] if isinstance(i, Send) and i.microbatch == 0]
    forward = sum(i.bytes for i in sends if i.value in part.forward.makes)
    return forward, sum(i.bytes for i in sends if i.value in (*part.dgrad.makes, *part.wgrad.makes))


def _communications(program: StagedProgram, c: int) -> Iterator[Communication]:
    instructions, pipeline = program.lists.ranks[c], program.lists.pipeline
    forward = {name for stage in pipeline.stages for name in stage.forward.makes}
    for i in instructions:
        if isinstance(i, Send):
            yield Communication("fwd" if i.value in forward else "bwd", program.axis, "send", 1, i.bytes)
    yield from map(communication, rank_costs.rank_collectives(program, c))
    for i in instructions:
        if size := rank_costs.stage_sum_bytes(program, c, i):
            phase = "bwd" if isinstance(i, ReduceGrads) else "opt"
            yield Communication(phase, program.axis, "all_reduce (sum)", 1, size)


# ---------------------------------------------------------------------- one rank, and all graphs
def rank_text(program: StagedProgram, c: int, keep: Callable[[Any], bool] | None, *, fold: bool = False) -> str:
    """The list of a coordinate's ranks, and its graphs with the shapes that a rank holds."""
    graphs = [print_graph(local_graph(graph), keep=keep, fold=fold) for graph, _ in rank_costs.graph_runs(program, c)]
    return "\n".join([*program.list_text(c), *graphs])


def graphs(program: StagedProgram) -> Iterator[Graph]:
    """Every graph that some rank runs, under a name of its own."""
    for name, graph in rank_costs.graphs_by_name(program).items():
        copy = graph.copy()
        copy.name = name
        yield copy
