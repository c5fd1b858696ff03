"""report_gathers: say where an op could not be split as annotations ask, so that replication is never silent.

Needs: lowered collectives. Changes nothing. Every warning names the op with its rule, the user's line, the annotation
and the cost, and is an error under strict:

    SC203   a value is gathered because an op keeps the dim whole that an axis shards: a sort of sharded columns
    SC209   an annotated parameter or input is gathered before use
    SC209   an op computes on every rank what is then sliced, since it keeps whole the dim that is asked to be sharded

What a plan means to communicate is none of this: where an op is split over the axis along another dim (the gather of
sequence parallelism before a column-parallel matmul), where ZeRO gathers what it stored, and where an optimizer needs
matrices whole.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.collectives import collective, human_bytes
from shardc.ir.diagnostic import Diagnostic, Severity, listed
from shardc.ir.graph import Graph, Seed, info, op_name, operands, producer, results, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives, local
from shardc.ir.provenance import Cause
from shardc.ir.types import Axes
from shardc.ir.units import UnequalError
from shardc.passes.base import Pass, split_of
from shardc.passes.communication.causes import needs_whole
from shardc.passes.sharding.casts import narrows
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule, rule_of

_GIVES: dict[object, int] = {
    collectives.all_gather: 3,
    collectives.gather_blocks: 3,
    collectives.all_to_all: 4,
}  # the argument that is the atom given up
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
# A batch that is indexed is not to be left unsharded.
INDEXED = (
    "x[i] may read any row: where each sample reads its own, write x[torch.arange(len(x)), i], x.gather or "
    "x.take_along_dim; otherwise shard a dim that is not indexed"
)
NEAR = 64  # values behind a slice that are looked at for its annotation
_MOVES = (*_GIVES, collectives.all_reduce, collectives.reduce_scatter, collectives.permute_ranks, local.shard_slice)


@dataclass(frozen=True)
class _Finding:
    """An op at which an axis stops, and what that costs: `moved` bytes of a gather, or work done whole."""

    code: str
    op: fx.Node
    value: fx.Node  # gathered, or computed whole
    over: str
    message: str  # up to the cost
    cause: str
    hint: str
    kind: str = ""
    moved: int = 0
    severity: Severity = "warning"

    @property
    def line(self) -> tuple[str, ...]:
        """The user's line, the same for every layer."""
        return _starred(info(self.op).fqn), info(self.op).source, self.over

    @property
    def family(self) -> tuple[str, ...]:
        about = _starred(info(self.value).name) if self.value.op == "placeholder" else ""
        return (self.code, about, *self.line, self.kind and info(self.op).phase)


@dataclass(frozen=True)
class ReportGathers(Pass):
    """Add one diagnostic for all findings of one line."""

    def run(self, graph: Graph) -> Graph:
        families: dict[tuple[str, ...], list[_Finding]] = {}
        stopped: set[tuple[str, ...]] = set()  # lines
        for node in graph.calls():
            if needs_whole(node):  # an optimizer's matrices are shared out, and sent back
                continue
            if node.target in _GIVES:
                finding = _gathered(graph, node)
            else:
                finding = _computed_whole(graph, node) if node.target is local.shard_slice else None
                # Work done whole follows from a gather before it, and in backward from the same in forward.
                if finding is not None and finding.line in stopped and finding.family not in families:
                    continue
            if finding is not None:
                stopped.add(finding.line)
                families.setdefault(finding.family, []).append(finding)
        _refuse_few_layers(graph, [finding for family in families.values() for finding in family])
        graph.diagnostics += [_diagnostic(family) for family in families.values()]
        return graph


def _refuse_few_layers(graph: Graph, findings: Sequence[_Finding]) -> None:
    """Raise UnequalError where something is found in layers of which the graph has few: a diagnostic says how often."""
    about = [info(node) for finding in findings for node in (finding.op, finding.value)]
    if any(units.within(name)[0] is not None for units in graph.units for of in about for name in (of.fqn, of.name)):
        raise UnequalError("what is found in layers is counted")


def _gathered(graph: Graph, node: fx.Node) -> _Finding | None:
    """A gather whose reason is an op's rule, or which undoes an annotation of an input."""
    root, axes, atom = _root(node), _axes(node), _atom(node, _GIVES[node.target])
    seed = graph.seeds.get(root)
    if root.op == "placeholder":
        computed = {axis for _, axis in graph.priorities.get(root, {})}
        computed |= {axis for atom_axes in seed.placement for axis in atom_axes} if seed is not None else set()
        axes = tuple(axis for axis in axes if axis in computed)  # over the others it is only stored
    annotated = seed is not None and root.op == "placeholder"
    readers = sorted(_readers(node, atom, axes, graph.mesh), key=lambda entry: not entry[1])
    if not axes or not readers or not (annotated or readers[0][1]):
        return None
    reader, needs_whole = readers[0]
    over = ".".join(graph.mesh.merged(axes))
    moved = collective(graph, node)
    assert moved is not None
    if annotated:
        needs = "needs it whole" if needs_whole else "is split over that along another dim"
        message = f"{info(root).name} is sharded over '{over}', but {info(reader).name} {needs}"
        hint = "shard a dim that the op can split, or leave this tensor unsharded"
    else:
        size = type_of(node).atoms[atom].size
        message = f"axis '{over}' ({graph.mesh.size(axes)}) cannot shard the factor of size {size} that "
        message += f"{info(reader).name} needs whole"
        hint = _hint(reader)
    root_cause = info(root).cause  # one for all axes: of this one it may say nothing
    nearest_cause = root_cause if _says(root_cause, axes) else info(node).cause or root_cause
    cause = str(nearest_cause if seed is None else seed.cause)
    code = "SC209" if annotated else "SC203"
    return _Finding(code, reader, root, over, message, cause, hint, moved.kind, moved.bytes_per_rank)


def _computed_whole(graph: Graph, node: fx.Node) -> _Finding | None:
    """A slice of what an op computes on every rank, where its rule is why, or an annotation that it does not follow."""
    value, axes = _root(node, views=False), _axes(node)
    call, _ = producer(value)
    rule = find_rule(call.target)
    if rule is None or rule.kind == "view" or info(value).constant:
        return None
    projection, seed = project(call), graph.seeds.get(value)
    pieces = next(p for p, v in zip(projection.results, results(call), strict=True) if v is value)
    annotated = seed is not None and not {axis for atom_axes in seed.placement for axis in atom_axes}.isdisjoint(axes)
    piece = pieces[_atom(node, 3)]
    if piece not in projection.blocked and not _unfit(call, projection, piece, axes, graph.mesh) and not annotated:
        return None
    over = ".".join(graph.mesh.merged(axes))
    message = f"{info(value).name} is computed whole over '{over}' and then sliced: its op does not split that dim"
    cause = str(
        (seed if seed is not None and annotated else _annotation_behind(graph, node, set(axes)) or info(node)).cause
    )
    # Positions and indices are next to no work.
    severity: Severity = "warning" if type_of(value).dtype.is_floating_point else "note"
    hint = "annotate a dim that the op can split, or a value behind the next op that can"
    return _Finding("SC209", call, value, over, message, cause, hint, severity=severity)


def _says(cause: Cause, axes: Axes) -> bool:
    """The annotation names one of the axes."""
    return any(axis in requirement.axes for requirement in cause.requirements for axis in axes)


def _annotation_behind(graph: Graph, node: fx.Node, axes: set[str]) -> Seed | None:
    """The nearest annotation behind a slice that says one of its axes: it is what the slice is for."""
    visited, todo = {node}, deque([node])
    while todo:
        for user in todo.popleft().users:
            seed = graph.seeds.get(user)
            if seed is not None and any(axis in axes for atom_axes in seed.placement for axis in atom_axes):
                return seed
            if user not in visited and user.op != "output" and len(visited) < NEAR:
                visited.add(user)
                todo.append(user)
    return None


def _diagnostic(family: Sequence[_Finding]) -> Diagnostic:
    first, about = family[0], info(family[0].op)
    message = first.message
    if first.kind:
        moved = human_bytes(sum(finding.moved for finding in family))
        times = f"{len(family)} times, {moved} a rank in all" if len(family) > 1 else f"{moved} a rank"
        phase = {"fwd": "forward", "bwd": "backward"}.get(about.phase, "in the optimizer")
        message += f"; {first.kind} inserted, {times}, {phase}"
    name = info(first.value).name
    return Diagnostic(
        first.code,
        message,
        first.severity,
        location=about.source or None,
        source_text=about.source_text or None,
        fqn=about.fqn or None,
        tensor=name,
        placement=str(type_of(first.value)),
        also=listed(other for finding in family if (other := info(finding.value).name) != name),
        op=f"{op_name(first.op.target)}   {rule_of(first.op)}",
        cause=first.cause or None,
        hint=first.hint,
    )


def _hint(reader: fx.Node) -> str:
    rule, fitted = find_rule(reader.target), rule_of(reader)
    sections = any(name.isdigit() for tensor in (*fitted.operands, *fitted.results) for dim in tensor for name in dim)
    if sections or "split" in op_name(reader.target) or (rule is not None and rule.kind == "view"):
        return "shard a factor that the view or split keeps apart, e.g. write '3*tp' for a fused q, k, v"
    if reader.target in _INDEXING:
        return INDEXED
    return "shard a dim that the op can split, or leave this one unsharded from the annotation on"


def _starred(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _axes(node: fx.Node) -> Axes:
    return tuple(node.args[1])  # type: ignore[arg-type]


def _atom(node: fx.Node, argument: int) -> int:
    atom = node.args[argument]
    assert isinstance(atom, int)
    return atom


def _root(node: fx.Node, views: bool = True) -> fx.Node:
    """The value that a chain of moves, and of views, starts from."""
    while node.op == "call_function":
        rule, sources = find_rule(node.target), operands(node)
        view = views and ((rule is not None and rule.kind == "view" and len(sources) == 1) or narrows(node))
        if node.target not in _MOVES and not view:
            return node
        node = sources[0]
    return node


def _unfit(call: fx.Node, projection: Projection, piece: int, axes: Axes, mesh: Mesh) -> bool:
    """Whether a call cannot split a piece over these axes too, of which its rule does not say that it is whole."""
    rule, split = find_rule(call.target), split_of(call, projection)
    if rule is None or rule.unfit is None:
        return False
    return piece in rule.unfit(call, projection, {**split, piece: (*split.get(piece, ()), *axes)}, mesh)


def _readers(value: fx.Node, atom: int, axes: Axes, mesh: Mesh) -> Iterator[tuple[fx.Node, bool]]:
    """The calls that read an atom past moves and views, and whether each needs it whole, or other shards of it."""
    for user in value.users:
        rule = find_rule(user.target)
        if user.target in _MOVES:
            yield from _readers(user, atom, axes, mesh)
        elif rule is not None:  # of an op without one SC301 speaks
            projection = project(user)
            for source, pieces in zip(operands(user), projection.operands, strict=True):
                if source is not value:
                    continue
                piece = pieces[atom]
                if rule.kind == "view" and piece not in projection.blocked and piece in projection.results[0]:
                    yield from _readers(user, projection.results[0].index(piece), axes, mesh)
                else:
                    yield user, piece in projection.blocked or _unfit(user, projection, piece, axes, mesh)
