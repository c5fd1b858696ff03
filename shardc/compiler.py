"""The compiler, top to bottom: the list of passes, and the loop that runs and verifies them.

`single_device` takes a traced graph to its normal form, which is also the reference that every
distributed program is compared with; `distribute` takes a copy of that to one body, valid for every rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardc.ingest import ingest
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.verify import violations
from shardc.passes.align import Align
from shardc.passes.assign import Assign
from shardc.passes.atomize import Atomize
from shardc.passes.base import Pass
from shardc.passes.bucket import Bucket
from shardc.passes.causes import NameCauses
from shardc.passes.combine import Combine
from shardc.passes.fuse import Fuse
from shardc.passes.group_sums import GroupSums
from shardc.passes.insert_reshards import InsertReshards
from shardc.passes.localize import Localize
from shardc.passes.lower_reshards import LowerReshards
from shardc.passes.normalize import Normalize
from shardc.passes.online_softmax import OnlineSoftmax
from shardc.passes.propagate import Propagate
from shardc.passes.recompute import Recompute
from shardc.passes.report_gathers import ReportGathers
from shardc.passes.seed import Bound, SeedAnnotations, find_value
from shardc.passes.settle_partials import SettlePartials
from shardc.passes.split_softmax import SplitSoftmax
from shardc.passes.store import Store
from shardc.passes.verify import ENSURES
from shardc.rules.notation import RuleError
from shardc.rules.registry import find_rule, rule_of
from shardc.trace import Traced

Watch = Callable[[Pass, Graph, float], None]  # after each pass, with the seconds it took


@dataclass(frozen=True)
class Options:
    """How to compile. `verify` runs the static checks after each pass."""

    strict: bool = False
    verify: bool = True
    watch: Watch | None = None
    store: Store = field(default_factory=Store)
    keep_gathered: frozenset[str] = frozenset()  # parameters that backward does not gather again
    recompute: Recompute = field(default_factory=Recompute)
    align: Align = field(default_factory=Align)
    bucket: Bucket = field(default_factory=Bucket)
    fuse: Fuse = field(default_factory=lambda: Fuse(enabled=False))
    reduce: torch.dtype | None = None  # in which ranks sum gradients; None: in whichever is less to send


def passes(bound: Sequence[Bound], cuts: Sequence[tuple[str, int, tuple[int, ...]]], options: Options) -> list[Pass]:
    """Every pass that makes a single-device graph a per-rank one, in order."""
    return [
        Atomize(tuple(cuts)),
        SeedAnnotations(tuple(bound)),
        Propagate(),
        SplitSoftmax(),
        options.store,
        Assign(),
        GroupSums(),
        SettlePartials(options.reduce),
        InsertReshards(options.keep_gathered),
        LowerReshards(),
        Combine(),
        NameCauses(),
        ReportGathers(),
        options.recompute,
        Localize(),
        OnlineSoftmax(),
        options.align,
        options.bucket,
        options.fuse,
    ]


def single_device(traced: Traced, mesh: Mesh, options: Options) -> Graph:
    """The traced graph, normalised. Reports ops without a rule, all at once (SC301): an error under strict."""
    graph = run(ingest(traced, mesh), [Normalize()], options)
    refuse_empty(graph)
    gaps = missing_rules(graph, "error" if options.strict else "warning")
    if gaps and options.strict:
        raise ShardcError(*gaps)
    graph.diagnostics += gaps
    return graph


def distribute(graph: Graph, bound: Sequence[Bound], options: Options, last: type[Pass] = Fuse) -> Graph:
    """One rank's body of a normalised graph, which it consumes; or what it is after the pass `last`."""
    todo = passes(bound, _cuts(graph, bound), options)
    body = run(graph, todo[: 1 + next(i for i, one in enumerate(todo) if isinstance(one, last))], options)
    if options.recompute.mode == "budget":
        options.recompute.settle(body)
    return body


def run(graph: Graph, todo: Sequence[Pass], options: Options) -> Graph:
    """Run passes in turn, checking after each what it ensures."""
    for one in todo:
        start = time.perf_counter()
        graph = one.run(graph)
        if options.verify:
            found = [*violations(graph), *(line for check in ENSURES.get(one.name, ()) for line in check(graph))]
            assert not found, f"{one.name} broke the graph:\n" + "\n".join(found[:20])
        if options.watch is not None:
            options.watch(one, graph, time.perf_counter() - start)
    return graph


def missing_rules(graph: Graph, severity: str) -> list[Diagnostic]:
    """One diagnostic an op that has no rule: how often it occurs, in which modules, at which lines."""
    gaps: dict[str, list[tuple[str, str]]] = {}
    for node in graph.calls():
        if find_rule(node.target) is None:
            gaps.setdefault(str(node.target), []).append((info(node).fqn, info(node).source))
    found: list[Diagnostic] = []
    for op, places in sorted(gaps.items()):
        modules = Counter(fqn or "the model" for fqn, _ in places)
        lines = sorted({source for _, source in places if source})
        shown = ", ".join(f"{fqn} ({n})" if n > 1 else fqn for fqn, n in modules.most_common(4))
        more = f" and {len(modules) - 4} more" if len(modules) > 4 else ""
        found.append(
            Diagnostic(
                "SC301",
                f"{op} has no sharding rule: {len(places)} calls run replicated, in {shown}{more}",
                severity,  # type: ignore[arg-type]
                location=lines[0] if lines else None,
                op=op,
                hint=f"register one; shardc.rule(torch.ops.{op}, '... n -> ... n', whole='n') keeps its last dim whole",
            )
        )
    return found


def refuse_empty(graph: Graph) -> None:
    """Raise ShardcError (SC103) for a call on a tensor without elements that no rule says how to split."""
    for node in graph.calls():
        empty = next((value for value in operands(node) if 0 in type_of(value).shape), None)
        if empty is None or find_rule(node.target) is None:
            continue
        try:
            rule_of(node)
        except RuleError:
            about = info(node)
            raise error(
                "SC103",
                f"'{info(empty).name}' of {list(type_of(empty).shape)} has no elements, and {node.target} reads it",
                location=about.source or None,
                source_text=about.source_text or None,
                fqn=about.fqn or None,
                tensor=info(empty).name,
                hint="give a sample batch of a real size",
            ) from None


def _cuts(graph: Graph, bound: Sequence[Bound]) -> list[tuple[str, int, tuple[int, ...]]]:
    """The factorisations that blocked placements ask for: `3*tp` of 96 is (3, 32)."""
    cuts: list[tuple[str, int, tuple[int, ...]]] = []
    for one in bound:
        value = find_value(graph, one)
        if value is None:
            continue
        shape = type_of(value).shape
        for d, wanted in enumerate(one.placement.dims[: len(shape)]):
            if wanted.blocks > 1 and shape[d] % wanted.blocks == 0:
                port = next(
                    (p.name for p, n in zip(graph.inputs, graph.placeholders, strict=True) if n is value), one.name
                )
                cuts.append((port, d, (wanted.blocks, shape[d] // wanted.blocks)))
    return cuts
