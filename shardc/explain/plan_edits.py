"""What could be written otherwise so that a collective goes away: candidates, for `explain_changes` to try.

They come from the annotations behind the collective (leave one out, move its axis to another dim, shard it in blocks),
from the parameters of the ops on both sides of it, and from the activations around it. A candidate speaks of all layers
alike: `h.0.mlp.c_fc.weight` stands for the line of the plan that placed it, and that line for the weight of every one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from shardc.explain.provenance import Trail
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.layers import in_every_layer
from shardc.ir.placement import OPEN, UNSHARDED, DimPlacement, Placement
from shardc.ir.types import TensorType
from shardc.passes.communication.causes import MOVES
from shardc.passes.sharding.seed import Bound
from shardc.rules.registry import find_rule

SECTIONS = {"param": "params", "input": "inputs", "activation": "activations", "output": "outputs"}
NEAREST_MODULES = 3  # whose outputs are worth an annotation


@dataclass(frozen=True)
class _Line:
    """One line of the plan: a placement of all tensors whose names differ in numbers only."""

    kind: Literal["param", "input", "activation", "output"]
    pattern: str
    names: tuple[str, ...]


def propose(graph: Graph, bound: Sequence[Bound], trails: Sequence[Trail]) -> list[tuple[str, tuple[Bound, ...]]]:
    """Candidates as (what to write, the whole plan), the likeliest first, none twice."""
    seen: set[tuple[tuple[str, str, str], ...]] = {_key(bound)}
    edits: list[tuple[str, tuple[Bound, ...]]] = []
    for text, plan in _all(graph, bound, trails):
        if (key := _key(plan)) not in seen:
            seen.add(key)
            edits.append((text, plan))
    return edits


def _key(plan: Sequence[Bound]) -> tuple[tuple[str, str, str], ...]:
    return tuple(sorted((b.kind, b.name, str(b.placement)) for b in plan))


def _all(graph: Graph, bound: Sequence[Bound], trails: Sequence[Trail]) -> Iterator[tuple[str, tuple[Bound, ...]]]:
    for trail in trails:
        for value, atom in trail.roots:
            annotation = next((b for b in bound if graph.seeds[value].cause == b.requirement), None)
            if annotation is not None:
                yield from _of_annotation(graph, bound, annotation, value, atom, trail.axis)
    for trail in trails:
        for value in _parameters(trail.ends):
            port = next(p for p, n in zip(graph.inputs, graph.placeholders, strict=True) if n is value)
            yield from _placed(graph, bound, "param", port.name, type_of(value), trail.axis)
        for fqn in _modules(graph, trail.ends):
            yield from _placed(graph, bound, "activation", fqn, type_of(graph.activations[fqn]), trail.axis)
    for axis in dict.fromkeys(trail.axis for trail in trails):
        yield f"use {axis} nowhere", tuple(b for b in (_without(b, axis) for b in bound) if b is not None)


def _of_annotation(
    graph: Graph, bound: Sequence[Bound], annotation: Bound, value: fx.Node, atom: int, axis: str
) -> Iterator[tuple[str, tuple[Bound, ...]]]:
    """Change the annotation, or leave it out."""
    line = _line(bound, annotation.kind, annotation.name)
    type = type_of(value)
    dims = list(annotation.placement.padded(type.ndim))
    dim_index = next((d for d, dim in enumerate(dims) if axis in dim.axes), None)
    if dim_index is None:
        return
    other_axes = _other(dims[dim_index], axis)
    for d, dim in enumerate(dims):  # the axis on another dim
        if d != dim_index and type.shape[d] > 1:
            moved = [*dims]
            moved[dim_index] = DimPlacement(other_axes, dims[dim_index].blocks if other_axes else 1)
            moved[d] = DimPlacement((*dim.axes, axis), dim.blocks)
            yield _rewrite(bound, line, Placement(tuple(moved)), str(annotation.placement))
    blocks = 1
    for piece in type.dims[dim_index][:-1]:  # the axis within each of n blocks
        blocks *= piece.size
        if blocks != dims[dim_index].blocks:
            blocked = [*dims]
            blocked[dim_index] = DimPlacement(dims[dim_index].axes, blocks)
            yield _rewrite(bound, line, Placement(tuple(blocked)), str(annotation.placement))
    dropped = [*dims]
    dropped[dim_index] = DimPlacement(other_axes) if other_axes else OPEN
    remaining = Placement(tuple(dropped))
    if remaining.axes:
        yield _rewrite(bound, line, remaining, str(annotation.placement))
    else:
        plan = tuple(b for b in bound if not (b.kind == line.kind and b.name in line.names))
        yield f'leave out {line.pattern} = "{annotation.placement}"', plan


def _without(annotation: Bound, axis: str) -> Bound | None:
    """The annotation without an axis; None if nothing is left of it."""
    dims = tuple(
        dim
        if axis not in dim.axes
        else DimPlacement(other_axes, dim.blocks)
        if (other_axes := _other(dim, axis))
        else OPEN
        for dim in annotation.placement.dims
    )
    placement = Placement(dims)
    if placement == annotation.placement:
        return annotation
    return replace(annotation, placement=placement) if placement.axes else None


def _other(dim: DimPlacement, axis: str) -> tuple[str, ...]:
    return tuple(a for a in dim.axes if a != axis)


def _placed(
    graph: Graph, bound: Sequence[Bound], kind: Literal["param", "activation"], name: str, type: TensorType, axis: str
) -> Iterator[tuple[str, tuple[Bound, ...]]]:
    """The axis on each dim of a tensor in turn, its other axes as they are now."""
    line = _line(bound, kind, name, (p.name for p in graph.inputs) if kind == "param" else graph.activations)
    axes_of = graph.mesh.resolve(axis)
    previous = next((str(b.placement) for b in bound if b.kind == kind and b.name == name), None)
    for d, n in enumerate(type.shape):
        if n == 1 or any(a in axes_of for atom in type.dims[d] for a in atom.axes):
            continue
        dims: list[DimPlacement] = []
        for i, dim in enumerate(type.dims):
            axes = graph.mesh.merged(tuple(a for atom in dim for a in atom.axes if a not in axes_of))
            axes = (*axes, axis) if i == d else axes
            dims.append(DimPlacement(axes) if axes else UNSHARDED)
        try:
            placement = Placement(tuple(dims))
        except ShardcError:
            continue  # two atoms of one dim share a sub-axis
        yield _rewrite(bound, line, placement, previous)


def _line(
    bound: Sequence[Bound], kind: str, name: str, names: Iterator[str] | Sequence[str] | dict[str, fx.Node] = ()
) -> _Line:
    """All tensors that are placed alike with this one, or could be: the same name in every layer."""
    pattern = _pattern(name)
    same = [b for b in bound if b.kind == kind and _pattern(b.name) == pattern]
    same_name = next((b for b in same if b.name == name), None)
    alike = [b.name for b in same if same_name is not None and b.placement == same_name.placement]
    names_of_line = alike or [n for n in names if _pattern(n) == pattern]
    return _Line(kind, pattern if len(names_of_line) > 1 else name, tuple(names_of_line or [name]))  # type: ignore[arg-type]


def _pattern(name: str) -> str:
    """The pattern of a name in all layers, and of all calls of a module ("h.0#2")."""
    return in_every_layer(name.partition("#")[0])


def _rewrite(
    bound: Sequence[Bound], line: _Line, placement: Placement, previous: str | None
) -> tuple[str, tuple[Bound, ...]]:
    text = f'{line.pattern} = "{placement}"'
    plan = {(b.kind, b.name): b for b in bound}
    for name in line.names:
        line_bound = Bound(line.kind, name, placement)
        old = plan.get((line.kind, name))
        plan[line.kind, name] = line_bound if old is None else replace(line_bound, location=old.location)
    under = SECTIONS[line.kind]
    instruction = f"write {text}" if previous is None else f'write {text} instead of "{previous}"'
    return f"under {under}, {instruction}", tuple(plan.values())


def _parameters(ends: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Parameters that the calls read, through views and collectives."""
    seen: set[fx.Node] = set()
    for call in ends:
        for value in operands(call):
            while value.op == "call_function":
                rule = find_rule(value.target)
                if len(operands(value)) != 1 or not (
                    value.target in MOVES or (rule is not None and rule.kind == "view")
                ):
                    break
                value = operands(value)[0]
            if value.op == "placeholder" and type_of(value).dtype.is_floating_point and value not in seen:
                seen.add(value)
                yield value


def _modules(graph: Graph, ends: Sequence[fx.Node]) -> list[str]:
    """The modules around the calls, innermost first, whose outputs an annotation can name; a value goes by one name."""
    names: dict[str, None] = {}
    for call in ends:
        parts = info(call).fqn.split(".")
        for length in range(len(parts), 0, -1):
            fqn = ".".join(parts[:length])
            value = graph.activations.get(fqn)
            if value is not None and info(value).type is not None and type_of(value).ndim >= 2:
                names[fqn] = None
    values: dict[fx.Node, str] = {}
    for fqn in list(names)[:NEAREST_MODULES]:
        values.setdefault(graph.activations[fqn], fqn)
    return list(values.values())
