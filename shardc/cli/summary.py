"""A compiled program in a few tables: what it communicates, what a rank stores, what a rank's place in the mesh is."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kernels_triton.match.op import KERNELS
from shardc.compiler.decompose_auto import DecomposeChoice
from shardc.compiler.split_auto import SplitChoice
from shardc.compiler.what_varies import batch_line
from shardc.cost.beside import beside
from shardc.cost.flops import Flops, flops, human_flops
from shardc.cost.memory import PHASES
from shardc.explain.predicted_program import PredictedProgram
from shardc.ir.buckets import is_summed
from shardc.ir.collectives import Collective, human_bytes
from shardc.ir.diagnostic import listed
from shardc.ir.fold import Line, described, fold
from shardc.ir.graph import Graph, Phase, Port, info, type_of, update
from shardc.ir.hardware import Hardware
from shardc.ir.layers import layer_of
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.exchange import EXCHANGE_COUNTS
from shardc.ir.ops.expert_capacity import LIMIT_ROWS
from shardc.ir.ops.host_copies import BEGIN_OFFLOAD
from shardc.ir.ops.scan_parts import SCAN_PART, SCAN_PART_BACKWARD
from shardc.ir.program import Program
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.partition.memory import memory
from shardc.partition.staged_program import StagedProgram
from shardc.passes.context.divide_attention import Divided
from shardc.passes.sharding.dispatch import Choice
from shardc.plan.schema import Plan
from shardc.runtime.execute.step_graph import is_never_captured


def summary(program: PredictedProgram) -> list[RenderableType]:
    """Parameters and their bytes, the work of a rank, and collectives by phase, axis and kind."""
    calls = sum(1 for _ in program.body.calls())
    head = f"{program.mesh.world_size} ranks, mesh {program.mesh}; {calls} instructions; {parameters(program)}"
    lines = [
        head,
        work(flops(program.body)),
        *dispatches(program),
        *divided_attention(program),
        *divided_scans(program),
        *host_reads(program),
        *halves(program),
        *in_buckets(program, [program.body]),
        *offloaded(program),
        *overlap(program),
        *predicted_choices(program),
        *replayed(program),
        *fusion(program),
        batch_line(program),
    ]
    return [Text("\n".join(lines)), collective_table(program.collectives())]


def halves(program: Program) -> list[str]:
    """Whether the batch, or each microbatch, is split."""
    body = program.body
    what = "the batch" if body.microbatches == 1 else f"each of {body.microbatches} microbatches"
    said = f"{what} runs in {body.halves} halves, interleaved from one collective to the next"
    return [said] if body.halves > 1 else []


def in_buckets(program: Program, graphs: Iterable[Graph]) -> list[str]:
    """How many collectives of these graphs travel together, and how that is switched off."""
    counts = [len(given(pack)["leads"]) for graph in graphs for pack in graph.calls_of(PACK) if not is_summed(pack)]
    size = human_bytes(Plan.parse(program.plan.get("text", "")).bucket_bytes)
    said = f"{sum(counts)} collectives travel as {len(counts)}, of up to {size} each; alone by bucket: false"
    return [f"buckets: {said}"] if counts else []


def offloaded(program: Program) -> list[str]:
    """What a rank has on its host."""
    body, lines = program.body, list[str]()
    copies = [call for call in body.calls_of(BEGIN_OFFLOAD) if info(call).phase == "fwd"]
    if copies:
        size = human_bytes(sum(type_of(call).local_bytes(body.mesh) for call in copies))
        of_each = f" of each of {body.microbatches} microbatches" if body.microbatches > 1 else ""
        lines.append(f"{len(copies)} values{of_each}, {size} a rank, lie on the host until backward reads them")
    staged: StagedProgram | None = getattr(program, "staged", None)
    if staged is not None and staged.axis:
        copies = [call for stage in staged.stages for call in stage.parts["forward"].calls_of(BEGIN_OFFLOAD)]
        if copies:
            host = memory(staged).host
            stages = f"{len(staged.stages)} stages hold {len(copies)} values of each microbatch under way on the host"
            lines.append(f"{stages} until backward reads them, up to {human_bytes(host.most - host.stored)} a rank")
    if staged is not None and (states := staged.states_on_host):
        inputs = body.input_nodes()
        size = human_bytes(sum(type_of(inputs[name]).local_bytes(body.mesh) for name in states))
        of_stages = " of all stages" if len(staged.lists.ranks) > 1 else ""
        lines.append(f"{len(states)} states of the optimizer, {size} a rank{of_stages}, lie on the host between steps")
    return lines


def overlap(program: Program) -> list[str]:
    """How many collectives, in each phase, have products to run beside them."""
    if Plan.parse(program.plan.get("text", "")).pipeline is not None:
        return []  # whose graphs are the stages'
    counts: dict[Phase, list[bool]] = {}
    for row in beside(program.body):
        counts.setdefault(row.phase, []).append(bool(row.products))
    said = [f"{sum(found)} of {len(found)} in {PHASES[phase]}" for phase, found in counts.items() if any(found)]
    return [f"collectives beside products: {', '.join(said)}"] if said else []


def replayed(program: PredictedProgram) -> list[str]:
    """Whether steps would be shorter from a CUDA graph, by prediction for the GPU that the plan names."""
    on_gpu = Hardware.of(program.plan.get("hardware", {})).device == "gpu"
    if not on_gpu or is_never_captured(program.staged, program.plan.get("nonfinite")):
        return []
    choice = program.graphs_choice
    return [f'{choice}; on by launch(graphs="auto")'] if choice.replayed else []


def predicted_choices(program: Program) -> list[str]:
    """What was predicted of halves of the batch and of decomposed products, where the plan left it to that."""
    of_batch = [str(SplitChoice(*program.plan["halves"]))] if "halves" in program.plan else []
    return of_batch + ([str(DecomposeChoice(*program.plan["decompose"]))] if "decompose" in program.plan else [])


def host_reads(program: Program) -> list[str]:
    """How often the host of a rank waits for its device in a step: to know how many rows to send."""
    microbatches = program.body.microbatches
    exchanges = (node for node in program.body.calls() if node.target is EXCHANGE_COUNTS)
    reads = microbatches * sum(given(node).get("reads", True) for node in exchanges)
    return [f"the host reads how many rows go to experts, {reads} times a step"] if reads else []


def dispatches(program: Program) -> list[str]:
    """How rows come to experts over an axis of theirs, and what the other form would send: a line for equal layers."""
    lines: dict[str, list[str]] = {}
    for said in program.plan.get("dispatch", ()):
        choice = Choice(*said)
        lines.setdefault(str(choice), []).append(choice.fqn or "the model")
    even = ", with even routing" if not any(node.target is LIMIT_ROWS for node in program.body.calls()) else ""
    return [f"to experts of {listed(names)}: {line}{even}" for line, names in lines.items()]


def divided_attention(program: Program) -> list[str]:
    """How attention runs whose rows lie over axes, and what other ways would cost: a line for equal layers."""
    lines: dict[str, list[str]] = {}
    for said in program.plan.get("context", ()):
        divided = Divided.read(said)
        lines.setdefault(str(divided), []).append(divided.fqn or "the model")
    return [f"attention of {listed(names)}: {line}" for line, names in lines.items()]


def divided_scans(program: Program) -> list[str]:
    """How states of recurrences travel whose steps lie over axes: a line for equal layers."""
    lines: dict[str, list[str]] = {}
    for node in program.body.calls():
        if node.target in (SCAN_PART, SCAN_PART_BACKWARD):
            args = given(node)
            way = "a factor and an addend gathered" if args["affine"] else "from rank to rank"
            what = "states" if node.target is SCAN_PART else "gradients of states"
            names = lines.setdefault(f"{what} along {'.'.join(args['axes'])}: {way}", [])
            names += [name] if (name := info(node).fqn or "the model") not in names else []
    return [f"recurrence of {listed(names)}: {line}" for line, names in lines.items()]


def fusion(program: Program) -> list[str]:
    """Why there are kernels, where the plan did not ask for them, and what they saved; products and communication are
    not among them."""
    lines = [f"fused: {program.plan['fused_on']}; off by fuse: false"] if "fused_on" in program.plan else []
    if "traffic" not in program.plan:
        return lines
    if not any(node.target in KERNELS for node in program.body.calls()):
        return [*lines, Plan.parse(program.plan.get("text", "")).fuse.without_kernels]
    (calls, unfused), (kernels, fused) = program.plan["traffic"]
    moved = f"move {human_bytes(fused)} instead of {human_bytes(unfused)}"
    return [*lines, f"fused: {calls} kernels are {kernels}, and {moved}"]


def parameters(program: Program) -> str:
    """How many there are, and what a rank stores of them."""
    stored, whole = program.parameter_bytes()
    ports = [(p, v) for p, v in zip(program.body.inputs, program.body.placeholders, strict=True) if p.role == "param"]
    sharded = sum(1 for _, v in ports if type_of(v).axes)
    return f"{len(ports)} parameters, {sharded} sharded: {human_bytes(stored)} a rank of {human_bytes(whole)}"


def work(products: Flops) -> str:
    """What a rank computes, phase by phase."""
    phases = [(PHASES[phase], products.of_phase(phase)) for phase in PHASES]
    parts = ", ".join(f"{name} {human_flops(count)}" for name, count in phases if count)
    return f"{human_flops(products.total)} a rank in products" + (f": {parts}" if parts else "")


def collective_table(collectives: Sequence[Collective]) -> RenderableType:
    """Counts and bytes a step, a row for each phase, axes and kind."""
    if not collectives:
        return Text("no collectives: every rank works alone")
    return communication_table(map(communication, collectives))


class Communication(NamedTuple):
    phase: str
    axes: str
    kind: str
    times: int
    bytes: int  # sent by a rank in a step


def communication(collective: Collective) -> Communication:
    kind = collective.kind + (f" ({collective.op})" if collective.op else "")
    return Communication(collective.phase, ".".join(collective.axes), kind, collective.times, collective.bytes_per_step)


def communication_table(communications: Iterable[Communication]) -> Table:
    """A row for each phase, axes and kind, and one for all."""
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    for phase, axes, kind, times, size in communications:
        count, sent = rows.get((phase, axes, kind), (0, 0))
        rows[phase, axes, kind] = (count + times, sent + size)
    table = table_of("phase", "axis", "collective", "count", "sent by a rank", number=(3, 4))
    for (phase, axes, kind), (count, sent) in rows.items():
        table.add_row(phase, axes, kind, str(count), human_bytes(sent))
    table.add_section()
    counts, sizes = zip(*rows.values(), strict=True)
    table.add_row("total", "", "", str(sum(counts)), human_bytes(sum(sizes)))
    return table


def collective_list(collectives: Sequence[Collective]) -> RenderableType:
    """Every collective with its number and where it comes from: what `explain` is asked about."""
    table = table_of("#", "value", "collective", "axis", "phase", "sent by a rank", "line", number=(0, 5))
    for i, collective in enumerate(collectives):
        kind = collective.kind + (f" ({collective.op})" if collective.op else "")
        axes = ".".join(collective.axes)
        table.add_row(
            str(i), f"%{collective.value}", kind, axes, collective.phase, _sent(collective), collective.source
        )
    return table


def collectives_by_layer(collectives: Sequence[Collective]) -> RenderableType:
    """The same in 80 columns: by phase and layer, layers that communicate alike once, by the numbers of the lowest.

    A value's name ends in the kind of its collective. What is reduced is summed, unless the row says otherwise.
    """
    table = table_of("#", "value", "axis", "sent", number=(0, 3))
    entries: list[Entry] = []
    for i, c in enumerate(collectives):
        kind = "" if c.kind in c.value.rpartition(".")[2] else c.kind
        said = " ".join(filter(None, (kind, c.op if c.op != "sum" else "")))
        cells = (str(i), f" ({said})" if said else "", ".".join(c.axes), _sent(c))
        entries.append(Entry(c.phase, layer_of(c.fqn), c.value, cells, f"{c.kind} {c.op} {c.axes} {_sent(c)}"))
    add_by_layer(table, entries, 1)
    return table


class Entry(NamedTuple):
    """A row of a table by phase and layer: what the value's own cell has after its name, and what equal rows share."""

    phase: Phase
    layer: str
    value: str
    cells: tuple[str, ...]
    form: str


def add_by_layer(table: Table, entries: Sequence[Entry], column: int) -> None:
    """The rows under a heading for each phase, and for each layer, or for layers whose rows are equal; a value's name,
    which goes into a `column`, is without the layer's there."""
    blocks: dict[tuple[Phase, str], list[Entry]] = {}
    for entry in entries:
        blocks.setdefault((entry.phase, entry.layer), []).append(entry)

    def add(name: str, cells: Sequence[str] = ()) -> None:
        own = list(cells) or [""] * len(table.columns)
        own[column] = name + own[column]
        table.add_row(*own)

    def phase_of(key: tuple[Phase, str]) -> Phase:
        return key[0]

    for phase, keys in groupby(blocks, key=phase_of):
        table.add_section()
        add(f"{PHASES[phase]}:")
        rows = [entry for key in keys for entry in blocks[key]]
        for part in fold([Line(f"%{row.value} {row.form}", row.layer) for row in rows]):
            layer = rows[part.start].layer
            if len(part.layers) > 1:
                add(f"{described(part.layers)}: x {len(part.layers)} layers")
            elif layer:
                add(layer)
            for row in rows[part.start : part.stop]:
                add(f"  %{row.value.replace(f'{layer}.', '', 1)}" if layer else f"%{row.value}", row.cells)


def _sent(collective: Collective) -> str:
    return human_bytes(collective.bytes_per_rank) + (f" x{collective.times}" if collective.times > 1 else "")


def add_rows(table: Table, rows: Sequence[tuple[Line, Sequence[str]]], fold_layers: bool) -> None:
    """The rows of a table; where it folds, those of equal layers once, under a row that says of how many."""
    if not fold_layers:
        for _, cells in rows:
            table.add_row(*cells)
        return
    for part in fold([line for line, _ in rows]):
        if len(part.layers) > 1:
            shown = rows[part.start][0].layer
            table.add_row(f"x {len(part.layers)} layers: {described(part.layers)}, all as {shown}")
        for _, cells in rows[part.start : part.stop]:
            table.add_row(*cells)


def rank_view(
    program: Program, rank: int, names: Container[str], along: Sequence[str], *, fold_layers: bool = False
) -> list[RenderableType]:
    """A rank's coordinate, its groups along the axes that it communicates over, and its parameters' local shapes.

    `names` are those that it has; it communicates over the axes `along` besides.
    """
    mesh = program.mesh
    coordinate = ", ".join(f"{axis}={index}" for axis, index in mesh.coordinate(rank).items())
    groups = table_of("axis", "group", "position", number=(2,))
    for axes in dict.fromkeys([*(c.axes for c in program.collectives()), *((axis,) for axis in along)]):
        members = " ".join(map(str, mesh.group_of(rank, axes)))
        groups.add_row(".".join(axes), members, str(mesh.index(rank, axes)))
    shapes = table_of("parameter", "whole", "here", "bytes", number=(3,))
    rows: list[tuple[Line, Sequence[str]]] = []
    for port, value in zip(program.body.inputs, program.body.placeholders, strict=True):
        if port.role == "param" and port.name in names:
            cells = _shape_row(port, type_of(value), program.body)
            rows.append((Line(f"%{' '.join(cells)}", layer_of(port.name)), cells))
    add_rows(shapes, rows, fold_layers)
    return [Text(f"rank {rank} of {mesh.world_size}: {coordinate}"), groups, shapes]


def _shape_row(port: Port, type: TensorType, body: Graph) -> tuple[str, ...]:
    local = list(type.local_shape(body.mesh))
    return port.name, str(type), str(local), human_bytes(type.local_bytes(body.mesh))


def local_graph(body: Graph) -> Graph:
    """The body with the shapes that one rank holds, for reading."""
    copy = body.copy()
    for node in copy.fx.nodes:
        if node.op != "output" and (type := info(node).type) is not None:
            update(node, type=TensorType.plain(type.dtype, type.local_shape(body.mesh)))
    return copy


def table_of(*columns: str, number: tuple[int, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in number else "left", overflow="fold")
    return table


def uncounted(program: Program) -> str:
    """What of a job's memory a program does not count: a line, or nothing."""
    if any(port.role == "param" for port in program.body.outputs):
        return ""
    note = "not counted: an optimizer's state and update, as the target is compiled without one"
    return f"\n{note}. --optimizer adamw counts AdamW's"
