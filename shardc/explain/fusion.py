"""`explain` for kernels: which calls became one, what that saves, and why other calls stayed calls.

    print(program.explain("h.0.fused_add_gelu"))     a kernel
    print(program.explain("h.0.gelu"))               a call of the body without kernels: its kernel, or why it has none

The program is compiled anew from its reference graph and fused once more, with a watcher. That must give the program's
own graphs, to the letter. Bytes are those that the program's summary counts (`passes/fusion/analysis/traffic`): of one
rank, for one run of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from kernels_triton.match.match import match_template as template_of
from kernels_triton.match.op import KERNELS, OPS, kernel_of
from shardc.compiler.driver import distribute, finish
from shardc.compiler.pipelining import stages_of
from shardc.explain.collective import PHASES, Explanation, bound_of, field_lines, hardware_of, options_of
from shardc.explain.transfer import TransferExplanation, explain_step
from shardc.explain.unfused import NotFused, not_fused
from shardc.ir.collectives import KINDS, human_bytes
from shardc.ir.diagnostic import ShardcError, did_you_mean, error
from shardc.ir.graph import Graph, ValueInfo, info, op_name, operands, results, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.program import Program
from shardc.ir.text import print_graph
from shardc.partition.rank_costs import graphs_by_name
from shardc.partition.staged_program import StagedProgram
from shardc.passes.fusion.analysis.traffic import PRODUCTS, bytes_by_call
from shardc.passes.fusion.clustering.clustering import Clustering
from shardc.passes.fusion.clustering.excluded import excluded
from shardc.passes.fusion.clustering.rematerialize import FusionGroup
from shardc.passes.fusion.fuse import fuse
from shardc.plan.fuse import Fusing
from shardc.plan.schema import Plan

MAX_NAMES = 8  # on a line
NEW = "it came with the kernels: it makes ready what they read"
NOTHING = "kernels held more at the peak of memory whatever was left out of them, so nothing is fused (SC217)"


@dataclass(frozen=True)
class FusedCall:
    """A call that is in a kernel, and the bytes that it moved by itself."""

    name: str
    op: str
    source: str
    bytes: int


@dataclass(frozen=True)
class KernelExplanation:
    """Why a kernel is there. `inside` are results of its calls that are no longer stored, `rematerialized` results of
    other calls that it recomputes."""

    name: str
    graph: str  # of a pipelined program
    about: ValueInfo
    template: str  # "" where it is generated
    generated: str  # and why it is
    calls: tuple[FusedCall, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inside: tuple[str, ...]
    rematerialized: tuple[str, ...]
    read: int  # bytes
    written: int

    @property
    def before(self) -> int:
        return sum(call.bytes for call in self.calls)

    @property
    def after(self) -> int:
        return self.read + self.written

    def __str__(self) -> str:
        size = f"{human_bytes(self.after)} moved instead of {human_bytes(self.before)}"
        number = f"{len(self.calls)} calls as one kernel" if len(self.calls) > 1 else "one call as a kernel"
        lines = [f"%{self.name}: {number}, {PHASES[self.about.phase]}, {size}", *_place(self.about)]
        runs = f"shardc.{self.template}, a hand-tuned template" if self.template else f"generated: {self.generated}"
        lines += field_lines("runs", runs)
        rows = [(f"%{call.name}", call.op, human_bytes(call.bytes), call.source) for call in self.calls]
        lines += field_lines("fuses", "\n".join(_columns(rows)))
        lines += field_lines("reads", f"{human_bytes(self.read)}: {_named(self.reads)}")
        lines += field_lines("writes", f"{human_bytes(self.written)}: {_named(self.writes)}")
        if self.inside:
            lines += field_lines("inside", f"neither written nor read: {_named(self.inside)}")
        if self.rematerialized:
            lines += field_lines("again", f"made here of what it reads: {_named(self.rematerialized)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class CallExplanation:
    """Why a call is in no kernel; `beside` says why it did not merge with each neighbouring kernel or call."""

    name: str
    graph: str  # of a pipelined program
    about: ValueInfo
    op: str
    before: int  # bytes
    after: int
    why: str
    beside: tuple[tuple[str, str], ...] = ()  # its name, and why the two did not merge

    def __str__(self) -> str:
        size = f", {human_bytes(self.after)} moved" if self.after else ", nothing moved"
        size += "" if self.before == self.after else f" instead of {human_bytes(self.before)}"
        size = "" if self.op in PRODUCTS or self.op in KINDS else size  # which is not counted
        lines = [f"%{self.name}: {self.op}, {PHASES[self.about.phase]}{size}", *_place(self.about)]
        lines += field_lines("why", self.why)
        lines += field_lines("beside", "\n".join(f"%{name}: {why}" for name, why in self.beside))
        return "\n".join(lines)


@dataclass(frozen=True)
class Fusion:
    """One graph of a program: its kernels, the calls that stayed, and the calls of which nothing is left."""

    graph: str  # "" where the program has but one
    kernels: dict[str, KernelExplanation] = field(default_factory=dict[str, KernelExplanation])
    stayed: dict[str, CallExplanation] = field(default_factory=dict[str, CallExplanation])
    gone: dict[str, CallExplanation] = field(default_factory=dict[str, CallExplanation])
    inside: dict[str, str] = field(default_factory=dict[str, str])  # a call, or what it yields -> its kernel

    @property
    def names(self) -> tuple[str, ...]:
        return *self.kernels, *self.inside, *self.stayed, *self.gone

    def of(self, name: str) -> KernelExplanation | CallExplanation | None:
        kernel = self.kernels.get(self.inside.get(name, name))
        return kernel or self.stayed.get(name) or self.gone.get(name)


Explained = Explanation | TransferExplanation | KernelExplanation | CallExplanation


def explain_value(program: Program, value: str | int, staged: StagedProgram) -> Explained:
    """Explain a collective or a transfer, by its index or name; else a kernel, or what became of a call."""
    try:
        return explain_step(program, staged, value)
    except ShardcError as unknown:
        if unknown.code != "SC106" or str(value).lstrip("-").isdecimal():
            raise
        name = str(value).removeprefix("%")
        graph_fusions = fusions(program, staged)
        explanation = explain_kernel(graph_fusions, name)
        if explanation is None and graph_fusions:
            message = f"'{name}' is no collective, kernel or call of the program"
            names = [collective.value for collective in program.collectives()]
            names += [known for fusion in graph_fusions for known in fusion.names]
            raise error("SC106", message, hint=did_you_mean(name, names, "collectives and kernels")) from unknown
        if explanation is None:
            raise
        return explanation


def explain_kernel(graph_fusions: list[Fusion], name: str) -> KernelExplanation | CallExplanation | None:
    """Explain a kernel or a call by name; None if there is none. In a pipeline, `GRAPH:NAME` selects one of several."""
    matching = [(fusion, part) for fusion in graph_fusions if (part := fusion.of(name)) is not None]
    if not matching and ":" in name:
        graph, _, name = name.partition(":")
        matching = [(fusion, part) for fusion in graph_fusions if fusion.graph == graph and (part := fusion.of(name))]
    if len(matching) > 1:
        named = " or ".join(f"'{fusion.graph}:{name}'" for fusion, _ in matching)
        raise error("SC106", f"'{name}' is in {len(matching)} graphs of the pipeline", hint=f"write {named}")
    return matching[0][1] if matching else None


def fusions(program: Program, staged: StagedProgram) -> list[Fusion]:
    """What fusion did to each graph of a program; an empty list if the plan does not fuse."""
    plan = Plan.parse(program.plan.get("text", ""))
    if not plan.fuse.enabled:
        return []
    before, after = graphs_by_name(unfused(program)), graphs_by_name(staged)
    hardware = hardware_of(program)
    return [_fusion(name if len(after) > 1 else "", before[name], after[name], plan.fuse, hardware) for name in after]


def why_unfused(program: Program, staged: StagedProgram) -> dict[str, str]:
    """Why calls are in no kernel, by their names; nothing where the plan asks for none."""
    return {name: call.why for fusion in fusions(program, staged) for name, call in fusion.stayed.items()}


def asked_of(program: Program) -> Fusing:
    """The fusion settings of its plan."""
    return Plan.parse(program.plan.get("text", "")).fuse


def unfused(program: Program) -> StagedProgram:
    """The stages before fusion."""
    plan, options = Plan.parse(program.plan.get("text", "")), options_of(program)
    body = distribute(program.reference, bound_of(program), options)
    return finish(stages_of(plan, body, program.mesh, options), options, fused=False)


class _FusionWatcher:
    """Records the last try of the fusion pass: its groups, by the first value that each stores, and the other calls.
    By name, since the pass erases the calls."""

    def __init__(self, by_plan: Mapping[str, str]) -> None:
        self.by_plan = by_plan
        self.records: dict[str, _KernelRecord] = {}
        self.not_fused: dict[str, NotFused] = {}

    def __call__(self, clustering: Clustering, groups: list[FusionGroup]) -> None:
        records = [_KernelRecord.of(clustering, group) for group in groups]
        self.records = {record.stored[0]: record for record in records}
        self.not_fused = not_fused(clustering, groups, self.by_plan)


@dataclass(frozen=True)
class _KernelRecord:
    """A kernel before it is emitted: its calls, all their results, the stored ones, and results of other calls that it
    recomputes."""

    calls: tuple[str, ...]
    yields: tuple[str, ...]
    stored: tuple[str, ...]
    rematerialized: tuple[str, ...]

    @classmethod
    def of(cls, clustering: Clustering, group: FusionGroup) -> _KernelRecord:
        nodes = [clustering.graph.calls[i] for i in group.calls]
        values = [value for node in nodes for value in results(node) if value is not None]
        computed = dict.fromkeys(prim.out for prim in group.prims if isinstance(prim.out, fx.Node))
        return cls(
            tuple(info(node).name for node in nodes),
            tuple(info(value).name for value in values),
            tuple(info(value).name for value in group.outputs),
            tuple(info(value).name for value in computed if value not in values),
        )


def _fusion(graph: str, before: Graph, after: Graph, fusing: Fusing, hardware: Hardware) -> Fusion:
    watcher = _FusionWatcher({value: pattern for pattern in fusing.left for value in excluded(before, [pattern])})
    if print_graph(fuse(before, fusing.left, fusing.templates, watcher, hardware)) != print_graph(after):
        message = "compiling the program's reference anew does not give its kernels: it was written by another compiler"
        raise error("SC403", message, hint="compile the model again")
    fusion = Fusion(graph)
    bytes_before, bytes_after = bytes_by_call(before), bytes_by_call(after)
    records = {node: watcher.records[_yields(node)[0]] for node in after.calls() if node.target in KERNELS}
    kernel_of_name = {
        name: info(node).name for node, record in records.items() for name in (*record.calls, *record.yields)
    }
    stays = {info(node).name: node for node in after.calls() if node not in records}
    calls: dict[str, list[FusedCall]] = {info(node).name: [] for node in records}
    total_bytes: dict[str, int] = {}
    for node in before.calls():
        about, op, size = info(node), op_name(node.target), bytes_before.get(node, 0)
        kernel = next((kernel_of_name[name] for name in _names(node) if name in kernel_of_name), None)
        total_bytes[about.name] = size
        if kernel is not None:
            fusion.inside.update(dict.fromkeys(_names(node), kernel))
            calls[kernel].append(FusedCall(about.name, op, about.source, size))
        elif about.name not in stays:
            readers = dict.fromkeys(
                kernel_of_name.get(name, name) for user in _readers(node) for name in _names(user)[:1]
            )
            why = f"nothing is left of it: what reads it makes it itself ({_named(tuple(readers))})"
            fusion.gone[about.name] = CallExplanation(about.name, graph, about, op, size, 0, why)
    for node, record in records.items():
        name = info(node).name
        fusion.kernels[name] = _explained(graph, node, record, tuple(calls[name]), fusing, after)
    given_up = {name for record in watcher.records.values() for name in record.calls}
    for name, node in stays.items():
        why = watcher.not_fused.get(name) or NotFused(NOTHING if name in given_up else NEW)
        size = bytes_after.get(node, 0)
        blockers = tuple((kernel_of_name.get(other, other), reason) for other, reason in why.beside)
        fusion.stayed[name] = CallExplanation(
            name, graph, info(node), op_name(node.target), total_bytes.get(name, 0), size, why.why, blockers
        )
    return fusion


def _explained(
    graph: str, node: fx.Node, record: _KernelRecord, calls: tuple[FusedCall, ...], fusing: Fusing, after: Graph
) -> KernelExplanation:
    kernel = kernel_of(node.target, node.args)
    assert kernel is not None
    match = template_of(kernel)
    generated = "no template computes just this"
    if match is not None:
        generated = f"the template {match.template.name} would compute it, and the plan leaves that out"
    stored = [value for value in results(node) if value is not None]
    written = sum(type_of(value).local_bytes(after.mesh) for value in stored)
    return KernelExplanation(
        info(node).name,
        graph,
        info(node),
        op_name(node.target).removeprefix("shardc.") if node.target in OPS.values() else "",
        "" if node.target in OPS.values() else generated,
        calls,
        tuple(dict.fromkeys(info(value).name for value in operands(node))),
        record.stored,
        tuple(name for name in record.yields if name not in record.stored),
        record.rematerialized,
        kernel.bytes_moved - written,
        written,
    )


# ---------------------------------------------------------------------- names and lines
def _yields(node: fx.Node) -> list[str]:
    return [info(value).name for value in results(node) if value is not None]


def _names(node: fx.Node) -> list[str]:
    """The names of a call: its own, and those of its results."""
    return [info(node).name, *(name for name in _yields(node) if name != info(node).name)]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that read a call's results."""
    for value in results(node):
        if value is not None:
            yield from (user for user in value.users if user.op == "call_function")


def _place(about: ValueInfo) -> list[str]:
    location = ", ".join(filter(None, (about.source, about.fqn and f"in {about.fqn}")))
    text = about.source_text.strip()
    return [*([f"  --> {location}"] if location else []), *([f"   | {text}"] if text else [])]


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(f"%{name}" for name in names[:MAX_NAMES]) + more


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
