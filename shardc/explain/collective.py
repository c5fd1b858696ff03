"""`explain`: why does this collective exist, what does it cost, and what would make it go away.

    print(shardc.compile(...).explain("h.0.mlp.c_proj.mm.all_reduce"))

It says which op leaves the communication to do and which op needs it done (`explain_chain`), the annotation that it
all comes from, the bytes, and the cheapest change of the plan that removes it: of the `explain_candidates`, each is
tried (`explain_changes`). Where every change that removes it gives up splitting the work, it is inherent, and the
reason is said. It takes no more than a program's reference graph, annotations and plan: one from a file explains
itself too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx

from shardc.compiler.binding import bind_passes, bind_precision, bind_storage
from shardc.compiler.pass_pipeline import Options
from shardc.cost.beside import beside
from shardc.explain.halo import INHERENT, explained_by_rows, halo_trails
from shardc.explain.plan_edits import propose
from shardc.explain.provenance import Step, Trail, trails
from shardc.explain.ring import INHERENT as RING
from shardc.explain.ring import MERGED, MERGES, PUT_IN, ring_trails
from shardc.explain.what_if import Change, Cost, compiled, measure, removals
from shardc.ir.collectives import Collective, bucket_of, collective, human_bytes, member, members
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.graph import Graph, info, results, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.ops.decomposed import GATHER_LINEAR, LINEAR_SCATTER
from shardc.ir.ops.exchange import EXCHANGES, ROW_MOVES
from shardc.ir.placement import Placement
from shardc.ir.program import Program
from shardc.ir.schema import given
from shardc.passes.communication.split_batch import calls_by_name
from shardc.passes.context.divide_attention import Divided
from shardc.passes.sharding.dispatch import Choice
from shardc.passes.sharding.seed import Bound
from shardc.plan.schema import Plan

SECONDS = 60.0  # for trying changes; the likeliest are tried first
PHASES = {"fwd": "forward", "bwd": "backward", "opt": "the optimizer"}
SHOWN_STEPS = 8
BESIDE = 3  # products that are named


@dataclass(frozen=True)
class Explanation:
    """Why one collective exists. `changes` are all that remove it, the best first; `inherent` says why none is good."""

    collective: Collective
    fqn: str
    source_text: str
    trails: tuple[Trail, ...]
    changes: tuple[Change, ...]
    tried: int
    untried: int  # for lack of time
    failed: tuple[str, ...]  # changes that the compiler broke on, and how
    inherent: str  # "" when some change saves it
    stages: str = ""  # of a pipeline, those that have it
    bucket: str = ""  # with what it travels
    beside: str = ""  # the products that run meanwhile
    attention: str = ""  # of what attention sends whose rows lie over axes: what other strategies would cost
    dispatch: str = ""  # of what brings rows to experts: what the other form would send

    @property
    def cheapest(self) -> Change | None:
        """The change that removes it, splits the work no less than before, and sends least; None if there is none."""
        return next((c for c in self.changes if not c.gives_up), None)

    def __repr__(self) -> str:
        return f"Explanation({self.collective!r}, {len(self.changes)} changes remove it; print it for more)"

    def __str__(self) -> str:
        c = self.collective
        op = f" ({c.op})" if c.op else ""
        often = f", {c.times} times a step" if c.times > 1 else ""
        sent = f"{human_bytes(c.bytes_per_rank)} sent by a rank{often}, of a payload of {human_bytes(c.payload_bytes)}"
        axes = f"over {'.'.join(c.axes)} ({c.group_size} ranks)"
        lines = [f"%{c.value}: {c.kind}{op} {axes}, {PHASES[c.phase]}, {sent}"]
        location = ", ".join(filter(None, (c.source, self.fqn and f"in {self.fqn}")))
        lines += [f"  --> {location}"] if location else []
        lines += [f"   | {self.source_text.strip()}"] if self.source_text else []
        lines += field_lines("stage", self.stages)
        lines += field_lines("bucket", self.bucket)
        lines += field_lines("beside", self.beside)
        lines += field_lines("experts", self.dispatch)
        lines += field_lines("context", self.attention)
        for trail in self.trails:
            lines += field_lines("why", trail.why)
            lines += field_lines("needed", trail.needed)
            lines += field_lines("cause", trail.cause or "no annotation: an op asked for it")
            lines += field_lines("way", _way(trail.steps))
        lines += field_lines("inherent", self.inherent)
        lines += self._advice()
        untried = f", {self.untried} left out for lack of time" if self.untried else ""
        lines += field_lines("tried", f"{self.tried} changes of the plan; {len(self.changes)} remove it{untried}")
        for first in self.failed[:1]:
            number = f"{len(self.failed)} of them" if len(self.failed) > 1 else "one of them"
            lines += field_lines("failed", f"{number} failed to compile: a bug in shardc, please report: {first}")
        return "\n".join(lines)

    def _advice(self) -> list[str]:
        if not self.inherent:
            return field_lines("change", str(self.cheapest))
        lines: list[str] = []
        if self.cheapest is not None:
            lines += field_lines("instead", str(self.cheapest))
        given_up = next((c for c in self.changes if c.gives_up), None)
        return lines + (field_lines("give up", str(given_up)) if given_up is not None else [])


@dataclass(frozen=True)
class _Findings:
    """Facts of the graph that the program was lowered from, collected while it exists."""

    moved: Collective  # in that graph, which has it in another form where a pass after it made one of several
    trails: list[Trail]
    cost: Cost
    candidates: list[tuple[str, tuple[Bound, ...]]]


def explain(program: Program, value: str | int, *, seconds: float = SECONDS) -> Explanation:
    """Explain a collective of a program, given by its name or by its index in `program.collectives()`.

    `seconds` bounds the time spent on trying changes; with 0, one is tried.
    """
    target, bucket = _in_bucket(program, find(program, value))
    bound, options = bound_of(program), options_of(program)
    node = program.body.by_name(target.value)
    if explained_by_rows(node):
        return _halo(program, target, node)
    if node.target in PUT_IN:
        return _ring(program, target, node)
    findings = compiled(program.reference, bound, options, lambda graph: _look(graph, bound, node))
    removed = removals(program.reference, options, findings.moved, findings.cost, findings.candidates, seconds)
    inherent = "" if any(change.saves for change in removed.changes) else _inherent(findings.moved, findings.trails)
    about = info(node)
    return Explanation(
        target,
        about.fqn,
        about.source_text,
        tuple(findings.trails),
        removed.changes,
        removed.tried,
        len(findings.candidates) - removed.tried,
        removed.failed,
        inherent,
        bucket=bucket,
        beside=_beside(program, node),
        dispatch=_dispatched(program, node),
        attention=_divided(program, node),
    )


def _beside(program: Program, node: fx.Node) -> str:
    """The products that run between where a collective, or its bucket, begins and where it is waited for; or in which
    it is."""
    if node.target is GATHER_LINEAR:
        names = [f"%{info(v).name}" for v in results(node)[:-1] if v is not None]
        what = "the products that gather their operand" if len(names) > 1 else "the product that gathers its operand"
        return f"{what} piece by piece: {', '.join(names)}"
    if node.target is LINEAR_SCATTER:
        return f"the product that scatters its result piece by piece: %{info(node).name}"
    if Plan.parse(program.plan.get("text", "")).pipeline is not None:
        return ""  # whose graphs are the stages'
    sender = info(node).name if collective(program.body, node) is not None else bucket_of(node)
    products = next((row.products for row in beside(program.body) if info(row.node).name == sender), None)
    if products is None:
        return ""
    if not products:
        return "no product: what reads it waits"
    names = [f"%{info(product).name}" for product in products]
    return ", ".join(names[:BESIDE]) + (f" and {len(names) - BESIDE} more" if len(names) > BESIDE else "")


def _halo(program: Program, target: Collective, rows: fx.Node) -> Explanation:
    """What lowering puts in for a kernel that reaches beyond a rank's rows: no change of the plan is tried."""
    found = compiled(
        program.reference, bound_of(program), options_of(program), lambda graph: tuple(halo_trails(graph, rows))
    )
    about = info(rows)
    return Explanation(target, about.fqn, about.source_text, found, (), 0, 0, (), INHERENT)


def _ring(program: Program, target: Collective, moved: fx.Node) -> Explanation:
    """What lowering puts in for attention by a ring, or by merging, and what another strategy would cost."""
    found = compiled(
        program.reference, bound_of(program), options_of(program), lambda graph: tuple(ring_trails(graph, moved))
    )
    about = info(moved)
    divided = _divided(program, moved)
    inherent = MERGED if moved.target in MERGES else RING
    return Explanation(target, about.fqn, about.source_text, found, (), 0, 0, (), inherent, attention=divided)


def _divided(program: Program, node: fx.Node) -> str:
    """Of what attention sends: its strategy, and what others would cost."""
    choices = [Divided.read(said) for said in program.plan.get("context", ())]
    choice = next((c for c in choices if c.fqn == info(node).fqn), None)
    transfer = collective(program.body, node)
    summed = transfer is not None and transfer.kind == "all_reduce"
    if choice is None or transfer is None or (summed and choice.strategy != "merge"):
        return ""
    return str(choice)


def _dispatched(program: Program, node: fx.Node) -> str:
    """Of what brings rows, or tokens, to experts over an axis of theirs: what the other form would send."""
    choices = [Choice(*said) for said in program.plan.get("dispatch", ())]
    choice = next((c for c in choices if c.fqn == info(node).fqn), None)
    is_exchange, transfer = node.target in EXCHANGES, collective(program.body, node)
    if choice is None or transfer is None or transfer.kind == "all_reduce":
        return ""
    capacity = given(node).get("capacity", 0)
    each = f"blocks of {capacity} rows for each expert, filled or not" if capacity else "its bytes are of even routing"
    return f"{choice}{f'; {each}' if is_exchange and node.target in ROW_MOVES else ''}"


def trails_of(program: Program, values: Sequence[str]) -> dict[str, tuple[Trail, ...]]:
    """Why each collective of those names exists, with one compile for all, and without changes that are tried.

    A name that compiling anew does not give, of a bucket that has no member left say, is left out.
    """
    body = {info(node).name: node for node in program.body.calls()}

    def look(graph: Graph) -> dict[str, tuple[Trail, ...]]:
        nodes = calls_by_name(graph)
        trails_by_value: dict[str, tuple[Trail, ...]] = {}
        for value in values:
            if value in body and body[value].target in PUT_IN:
                trails_by_value[value] = tuple(ring_trails(graph, body[value]))
                continue
            if value in body and explained_by_rows(body[value]):
                trails_by_value[value] = tuple(halo_trails(graph, body[value]))
                continue
            of_bucket = members(body[value]).values() if value in body else ()
            name = info(_largest(program.body, of_bucket)).name if of_bucket else value
            about = info(body[value]) if value in body else None
            origin = about.origin.of if about is not None and about.origin is not None else ""
            node = nodes.get(name) or nodes.get(origin)
            if node is not None and collective(graph, node) is not None:
                trails_by_value[value] = tuple(trails(graph, node))
        return trails_by_value

    return compiled(program.reference, bound_of(program), options_of(program), look) if values else {}


def _in_bucket(program: Program, target: Collective) -> tuple[Collective, str]:
    """A member of a bucket, and with what it travels; the largest where the bucket itself is meant."""
    body = program.body
    node = body.by_name(target.value)
    bucket_value = bucket_of(node) or node
    bucketed = list(members(bucket_value).values())
    if not bucketed:
        return target, ""
    if node is bucket_value:
        node = _largest(body, bucketed)
        target = replace(member(body, node), times=target.times)
    others = [info(value).name for value in bucketed if value is not node]
    shown = ", ".join(f"%{name}" for name in others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return target, f"%{info(bucket_value).name}, with {len(others)} other{'s' * (len(others) > 1)}: {shown}"


def _largest(body: Graph, of_bucket: Collection[fx.Node]) -> fx.Node:
    return max(of_bucket, key=lambda value: type_of(value).local_bytes(body.mesh))


def find(program: Program, value: str | int) -> Collective:
    """The collective of that name (with or without its %), or at that index."""
    known = program.collectives()
    if isinstance(value, str) and not value.lstrip("-").isdecimal():
        name = value.removeprefix("%")
        match = next((c for c in known if c.value == name), None)
        if match is not None:
            return match
        for bucket in known:
            for tensor_of_bucket in members(program.body.by_name(bucket.value)).values():
                if info(tensor_of_bucket).name == name:
                    return replace(member(program.body, tensor_of_bucket), times=bucket.times)
        hint = did_you_mean(name, (c.value for c in known), "collectives")
        raise error("SC106", f"'{name}' is no collective of the program", hint=hint)
    if not -len(known) <= int(value) < len(known):
        message = f"there is no collective {value}: the program has {len(known)}"
        raise error("SC106", message, hint="they are numbered from 0, in the order of the program")
    return known[int(value)]


def bound_of(program: Program) -> list[Bound]:
    """The program's annotations as the compiler takes them."""
    bound: list[Bound] = []
    for kind, name, text, origin in program.annotations:
        bound.append(Bound(kind, name, Placement.parse(text), origin or None))
    return bound


def options_of(program: Program) -> Options:
    """The program's plan as the compiler takes it, but for its annotations."""
    plan = Plan.parse(program.plan.get("text", ""))
    store, keep = bind_storage(plan.storage, program.reference, program.reference.mesh)
    precision, _ = bind_precision(plan)
    options = Options(store=store, keep_gathered=keep, reduce=None if precision is None else precision.reduce)
    return bind_passes(plan, hardware_of(program), options, program.plan.get("split", ()))


def hardware_of(program: Program) -> Hardware:
    """The hardware that the program was compiled for."""
    return Hardware.of(program.plan.get("hardware", {})).on(program.mesh)


def _look(graph: Graph, bound: list[Bound], value: fx.Node) -> _Findings:
    """The findings for a collective of the body. A value of a later pass is looked up by its origin."""
    nodes, about = calls_by_name(graph), info(value)
    node = nodes.get(about.name) or (nodes.get(about.origin.of) if about.origin is not None else None)
    if node is None:
        message = f"compiling the program's reference anew does not give %{about.name}: another compiler wrote it"
        raise error("SC403", message, hint="compile the model again")
    axis_trails = trails(graph, node)
    moved_collective = collective(graph, node)
    assert moved_collective is not None
    return _Findings(moved_collective, axis_trails, measure(graph), propose(graph, bound, axis_trails))


def _inherent(target: Collective, axis_trails: list[Trail]) -> str:
    """Why no change helps except giving up the split."""
    axis = " and ".join(dict.fromkeys(t.axis for t in axis_trails))
    if any(t.stored for t in axis_trails):
        return f"storage keeps parts over {axis} of what is computed with whole: less memory for this communication"
    if target.kind in ("all_reduce", "reduce_scatter"):
        gradient = any(t.gradient for t in axis_trails)
        what = "the terms of the gradient are" if gradient else "what is summed here is"
        if target.op != "sum":
            what = f"what the {target.op} is taken of is"
        return f"{what} split over {axis}: the parts must meet once, or the work is not split"
    return f"no other placement over {axis} that was tried splits the work as well and sends less"


def _way(steps: tuple[Step, ...]) -> str:
    """Calls from the annotated tensor on; of a long way the views and pointwise ops are left out, then its middle."""
    shown = list(steps) if len(steps) <= SHOWN_STEPS else [s for s in steps if s.main]
    if len(shown) > SHOWN_STEPS:
        half = SHOWN_STEPS // 2
        names = [f"%{s.value}" for s in shown]
        return " -> ".join([*names[:half], f"({len(names) - 2 * half} more)", *names[-half:]])
    return " -> ".join(f"%{s.value}" for s in shown)


def field_lines(label: str, text: str) -> list[str]:
    """The lines of one field of an explanation; empty if the field has no text."""
    if not text:
        return []
    first, *lines = text.splitlines()
    return [f"  {label + ':':<10}{first}", *(f"            {line}" for line in lines)]
