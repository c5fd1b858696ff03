"""`explain` for kernels: which calls became one, what that saves, and why other calls stayed calls.

    print(program.explain("h.0.bias_gelu"))     a kernel
    print(program.explain("h.0.gelu"))          a call of the body without kernels: the kernel that it is in, or why not

What the program was fused from is compiled anew from its reference graph, and fused again, watched; that this gives the
program's own graphs, to the letter, is checked. Bytes are those that the program's summary counts
(`passes/fuse/traffic`): of one rank, and one run of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from kernels_triton.templates.match import found as template_of
from kernels_triton.templates.op import KERNELS, OPS, kernel_of
from shardc import compiler
from shardc.explain import PHASES, Explanation, bound_of, explain, field_lines, options_of
from shardc.explain_alone import Alone, alone
from shardc.explain_transfers import TransferExplanation, explain_step
from shardc.ir.collectives import KINDS, human_bytes
from shardc.ir.diagnostic import ShardcError, did_you_mean, error
from shardc.ir.graph import Graph, ValueInfo, info, op_name, operands, results, type_of
from shardc.ir.program import Program
from shardc.ir.text import print_graph
from shardc.passes.align import Align
from shardc.passes.bucket import Bucket
from shardc.passes.fuse import Fuse, fuse
from shardc.passes.fuse.again import Part
from shardc.passes.fuse.clusters import Clustering
from shardc.passes.fuse.excluded import excluded
from shardc.passes.fuse.traffic import PRODUCTS, moved
from shardc.passes.recompute import Recompute
from shardc.pipelining import pipeline_of
from shardc.plan import Plan
from shardc.plan_fuse import Fusing
from shardc.stages import share
from shardc.stages.fused import finished
from shardc.stages.program import Pipelined

NAMED = 8  # values of a line
NEW = "it came with the kernels: it makes ready what they read"
NOTHING = "kernels held more at the peak of memory whatever was left out of them, so nothing is fused (SC217)"


@dataclass(frozen=True)
class Fused:
    """A call that is a part of a kernel, and the bytes that it moved by itself."""

    name: str
    op: str
    source: str
    bytes: int


@dataclass(frozen=True)
class KernelExplanation:
    """Why one kernel is there. `inside` are the values of its calls that are no longer stored, `again` those of other
    calls that it makes itself."""

    name: str
    graph: str  # of a pipeline
    about: ValueInfo
    template: str  # "" where it is generated
    generated: str  # and why it is
    calls: tuple[Fused, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inside: tuple[str, ...]
    again: tuple[str, ...]
    read: int  # bytes
    written: int

    @property
    def before(self) -> int:
        return sum(one.bytes for one in self.calls)

    @property
    def after(self) -> int:
        return self.read + self.written

    def __str__(self) -> str:
        size = f"{human_bytes(self.after)} moved instead of {human_bytes(self.before)}"
        many = f"{len(self.calls)} calls as one kernel" if len(self.calls) > 1 else "one call as a kernel"
        lines = [f"%{self.name}: {many}, {PHASES[self.about.phase]}, {size}", *_place(self.about)]
        runs = f"shardc.{self.template}, a hand-tuned template" if self.template else f"generated: {self.generated}"
        lines += field_lines("runs", runs)
        rows = [(f"%{one.name}", one.op, human_bytes(one.bytes), one.source) for one in self.calls]
        lines += field_lines("fuses", "\n".join(_columns(rows)))
        lines += field_lines("reads", f"{human_bytes(self.read)}: {_named(self.reads)}")
        lines += field_lines("writes", f"{human_bytes(self.written)}: {_named(self.writes)}")
        if self.inside:
            lines += field_lines("inside", f"neither written nor read: {_named(self.inside)}")
        if self.again:
            lines += field_lines("again", f"made here of what it reads: {_named(self.again)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class CallExplanation:
    """Why a call is no part of a kernel; `beside` says so of each kernel or call that it could be with."""

    name: str
    graph: str  # of a pipeline
    about: ValueInfo
    op: str
    before: int  # bytes
    after: int
    why: str
    beside: tuple[tuple[str, str], ...] = ()  # its name, and what keeps the two apart

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
    """One graph of a program: its kernels, the calls that are none, and those of which nothing is left."""

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


def explain_value(program: Program, value: str | int, pipelined: Pipelined | None = None) -> Explained:
    """A collective or a transfer, by its index or name; else a kernel, or what became of a call."""
    try:
        return explain(program, value) if pipelined is None else explain_step(program, pipelined, value)
    except ShardcError as unknown:
        if unknown.code != "SC106" or str(value).lstrip("-").isdecimal():
            raise
        name = str(value).removeprefix("%")
        made = fusions(program, pipelined)
        found = explain_kernel(made, name)
        if found is None and made:
            message = f"'{name}' is no collective, kernel or call of the program"
            names = [*(one.value for one in program.collectives()), *(known for one in made for known in one.names)]
            raise error("SC106", message, hint=did_you_mean(name, names, "collectives and kernels")) from unknown
        if found is None:
            raise
        return found


def explain_kernel(made: list[Fusion], name: str) -> KernelExplanation | CallExplanation | None:
    """What became of a kernel or a call of that name; None if there is none. Of a pipeline, `GRAPH:NAME` if need be."""
    every = [(one, it) for one in made if (it := one.of(name)) is not None]
    if not every and ":" in name:
        graph, _, name = name.partition(":")
        every = [(one, it) for one in made if one.graph == graph and (it := one.of(name))]
    if len(every) > 1:
        named = " or ".join(f"'{one.graph}:{name}'" for one, _ in every)
        raise error("SC106", f"'{name}' is in {len(every)} graphs of the pipeline", hint=f"write {named}")
    return every[0][1] if every else None


def fusions(program: Program, pipelined: Pipelined | None = None) -> list[Fusion]:
    """What became of each graph of a program; nothing where the plan wants no kernels."""
    asked = Plan.parse(program.plan.get("text", ""))
    if not asked.fuse.enabled:
        return []
    if pipelined is None:
        return [_fusion("", unfused(program, asked), program.body, asked.fuse)]
    staged = pipeline_of(asked, program.body.copy(), program.mesh)
    assert staged is not None
    before = _graphs(finished(staged, asked.align, asked.bucket.size, Fuse(enabled=False)))
    return [_fusion(name, before[name], after, asked.fuse) for name, after in _graphs(pipelined).items()]


def asked_of(program: Program) -> Fusing:
    """What its plan says of kernels."""
    return Plan.parse(program.plan.get("text", "")).fuse


def unfused(program: Program, plan: Plan) -> Graph:
    """The body as it was before it had kernels."""
    options = replace(
        options_of(program),
        recompute=Recompute(**plan.recompute.model_dump()),
        align=Align(plan.align),
        bucket=Bucket(plan.bucket.size),
    )
    return compiler.distribute(program.reference.copy(), bound_of(program), options, Bucket)


def _graphs(program: Pipelined) -> dict[str, Graph]:
    """All that some rank runs, by name; the step's end is each rank's own."""
    found: dict[str, Graph] = {}
    for c in range(len(program.lists.ranks)):
        for graph, _ in share.runs(program, c):
            found[f"{graph.name}{c}" if graph.name in ("norm", "update") else graph.name] = graph
    return found


class _Tries:
    """What the fusion pass did last: the kernels to be made, by the first value that each stores, and the other calls.
    By name, since the calls themselves go."""

    def __init__(self, by_plan: Mapping[str, str]) -> None:
        self.by_plan = by_plan
        self.parts: dict[str, _Part] = {}
        self.alone: dict[str, Alone] = {}

    def __call__(self, found: Clustering, todo: list[Part]) -> None:
        parts = [_Part.of(found, part) for part in todo]
        self.parts = {part.stored[0]: part for part in parts}
        self.alone = alone(found, todo, self.by_plan)


@dataclass(frozen=True)
class _Part:
    """A kernel to be made: its calls, all that they yield, what of it is stored, what it makes of other calls'."""

    calls: tuple[str, ...]
    yields: tuple[str, ...]
    stored: tuple[str, ...]
    again: tuple[str, ...]

    @classmethod
    def of(cls, found: Clustering, part: Part) -> _Part:
        nodes = [found.scene.calls[i] for i in part.calls]
        own = [value for node in nodes for value in results(node) if value is not None]
        made = dict.fromkeys(prim.out for prim in part.prims if isinstance(prim.out, fx.Node))
        return cls(
            tuple(info(node).name for node in nodes),
            tuple(info(value).name for value in own),
            tuple(info(value).name for value in part.outputs),
            tuple(info(value).name for value in made if value not in own),
        )


def _fusion(graph: str, before: Graph, after: Graph, asked: Fusing) -> Fusion:
    tries = _Tries({value: one for one in asked.left for value in excluded(before, [one])})
    if print_graph(fuse(before, asked.left, asked.templates, tries)) != print_graph(after):
        message = "compiling the program's reference anew does not give its kernels: it was written by another compiler"
        raise error("SC403", message, hint="compile the model again")
    found = Fusion(graph)
    alone_before, alone_after = moved(before), moved(after)
    parts = {node: tries.parts[_yields(node)[0]] for node in after.calls() if node.target in KERNELS}
    home = {name: info(node).name for node, part in parts.items() for name in (*part.calls, *part.yields)}
    stays = {info(node).name: node for node in after.calls() if node not in parts}
    calls: dict[str, list[Fused]] = {info(node).name: [] for node in parts}
    whole: dict[str, int] = {}
    for node in before.calls():
        about, op, size = info(node), op_name(node.target), alone_before.get(node, 0)
        kernel = next((home[name] for name in _names(node) if name in home), None)
        whole[about.name] = size
        if kernel is not None:
            found.inside.update(dict.fromkeys(_names(node), kernel))
            calls[kernel].append(Fused(about.name, op, about.source, size))
        elif about.name not in stays:
            readers = dict.fromkeys(home.get(name, name) for user in _readers(node) for name in _names(user)[:1])
            why = f"nothing is left of it: what reads it makes it itself ({_named(tuple(readers))})"
            found.gone[about.name] = CallExplanation(about.name, graph, about, op, size, 0, why)
    for node, part in parts.items():
        name = info(node).name
        found.kernels[name] = _explained(graph, node, part, tuple(calls[name]), asked, after)
    given_up = {name for part in tries.parts.values() for name in part.calls}
    for name, node in stays.items():
        why = tries.alone.get(name) or Alone(NOTHING if name in given_up else NEW)
        size, beside = alone_after.get(node, 0), tuple((home.get(other, other), reason) for other, reason in why.beside)
        found.stayed[name] = CallExplanation(
            name, graph, info(node), op_name(node.target), whole.get(name, 0), size, why.why, beside
        )
    return found


def _explained(
    graph: str, node: fx.Node, part: _Part, calls: tuple[Fused, ...], asked: Fusing, after: Graph
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
        part.stored,
        tuple(name for name in part.yields if name not in part.stored),
        part.again,
        kernel.bytes_moved - written,
        written,
    )


# ---------------------------------------------------------------------- names and lines
def _yields(node: fx.Node) -> list[str]:
    return [info(value).name for value in results(node) if value is not None]


def _names(node: fx.Node) -> list[str]:
    """What a call is known by: its own name, and those of what it yields."""
    return [info(node).name, *(name for name in _yields(node) if name != info(node).name)]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that read what a call yields."""
    for value in results(node):
        if value is not None:
            yield from (user for user in value.users if user.op == "call_function")


def _place(about: ValueInfo) -> list[str]:
    place = ", ".join(filter(None, (about.source, about.fqn and f"in {about.fqn}")))
    text = about.source_text.strip()
    return [*([f"  --> {place}"] if place else []), *([f"   | {text}"] if text else [])]


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(f"%{name}" for name in names[:NAMED]) + more


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
