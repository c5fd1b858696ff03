"""`formulas_of`: compile a request at a few sizes, and derive the formulas of its costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardc.compiler.request import Request
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Phase
from shardc.ir.plain import graph_to_plain
from shardc.ir.types import Axes
from shardc.symbolic.calls import Calls
from shardc.symbolic.expression import Expression, Fitter, Point
from shardc.symbolic.formulas import Domain, Formulas, Transfer, Work
from shardc.symbolic.layers import Layers, candidates, pruned
from shardc.symbolic.measure import Frame, Numbers, measured
from shardc.symbolic.samples import UNKNOWN, Samples, allowed_sizes, refuse_buckets, units_of
from shardc.symbolic.template import generalised

Ranges = Mapping[str, tuple[int, int]]
MESHES = 4  # beside the program's own
CHECKED = 8  # sizes at which forward alone is run


def formulas_of(request: Request, body: Graph, ranges: Ranges | None = None) -> Formulas:
    """The formulas of a request, whose own sizes `body` was compiled for: they hold for these too if they give its
    numbers. Raises ShardcError: SC208 for symbols that the batch does not have, SC232 where an extent is fixed, with
    the line that fixes it; and what `compile` raises at another size."""
    samples = Samples.of(request)
    refuse_buckets(request)
    if why := samples.guards.unknown(UNKNOWN, "take the numbers of a compile for each size"):
        raise ShardcError(why)
    tried = samples.ranges(ranges)
    points = samples.points(samples.units, tried)
    seen = [_Seen.at(samples, point) for point in points]
    first = seen[0]
    if any(other.frame != first.frame for other in seen):
        _refuse(samples, seen)
    _refuse_other_calls(samples, points, tried)
    axes, more = _on_other_meshes(samples, first.frame, seen, tried)
    seen, own = [*seen, *more], _Seen(samples.base, *measured(body))
    if own.frame == first.frame and samples.guards.broken(own.point) is None:
        try:
            if (formulas := _derived(samples, [*seen, own], axes)).memory:
                return formulas
        except ShardcError:
            pass  # a size of its own equals one of the model's, and is taken for it somewhere
    return _derived(samples, seen, axes)


@dataclass(frozen=True)
class _Seen:
    """What a compile at a point costs."""

    point: Point
    frame: Frame
    numbers: Numbers

    @classmethod
    def at(cls, samples: Samples, point: Point) -> _Seen:
        return cls(point, *measured(samples.at(point).graphs.body))


def _refuse(samples: Samples, seen: Sequence[_Seen]) -> None:
    """Raise ShardcError (SC232) for compiles that differ in more than numbers."""
    graphs = [graph_to_plain(samples.at(one.point).graphs.body) for one in seen]
    fitter = Fitter([one.point for one in seen], list(samples.extents))
    generalised(graphs, fitter)
    other = next(one for one in seen if one.frame != seen[0].frame)
    pairs = zip(_items(seen[0].frame), _items(other.frame), strict=False)
    name, source = next(((a.value, a.source) for a, b in pairs if a != b), ("", ""))
    message = f"the number of %{name} differs in kind between {dict(seen[0].point)} and {dict(other.point)}"
    raise error(
        "SC232", message, location=source or None, hint="ask for a range of sizes: program.symbolic(ranges={...})"
    )


def _refuse_other_calls(samples: Samples, points: Sequence[Point], ranges: Ranges) -> None:
    """Raise ShardcError (SC232) where forward, run between the points too, makes other calls than at them: sizes that
    all divide by something need not be like others."""
    calls = Calls.of(samples, points)
    for i in range(CHECKED):
        places = {name: low + (high - low) * (2 * i + 1) // (2 * CHECKED) for name, (low, high) in ranges.items()}
        point = {name: samples.parts[name] * (max(n, 2) // samples.parts[name] + i % 2) for name, n in places.items()}
        if samples.guards.broken(point) is None and (why := calls.other(samples, point)) is not None:
            raise ShardcError(why)


def _items(frame: Frame) -> list[Any]:
    return [*frame.senders, *frame.products, *frame.held, *frame.shards]


def _on_other_meshes(
    samples: Samples, frame: Frame, seen: Sequence[_Seen], ranges: Ranges
) -> tuple[dict[str, tuple[int, ...]], list[_Seen]]:
    """Compiles on meshes of other sizes that have the same frame; and the sizes of each axis then seen."""
    fitter = Fitter([one.point for one in seen], list(samples.extents))
    atoms = [fitter.fitted(column) for column in zip(*(one.numbers.atoms for one in seen), strict=True)]
    shards = list(dict.fromkeys((atom, shard.axes) for atom, shard in zip(atoms, frame.shards, strict=True)))
    base, sizes = samples.axes, dict[str, list[int]]()
    for axis in base:
        of_axis = [(atom, axes) for atom, axes in shards if axis in axes]
        every = [int(atom.at(seen[0].point)) for atom, _ in of_axis if atom is not None and atom.is_constant]
        fixed = [size for size in every if size != base[axis]]  # one of a part a rank grows with the axis
        blocks = any(shard.in_blocks and axis in shard.axes for shard in frame.shards)
        uneven = any(size % base[axis] for size in fixed) or axis not in samples.mesh.names
        sizes[axis] = [base[axis]] if uneven or blocks or not of_axis else allowed_sizes(fixed, base[axis], MESHES)
    found: list[_Seen] = []
    for i in range(1, MESHES + 1):
        mesh = {axis: options[i % len(options)] for axis, options in sizes.items()}
        if mesh == base or any(one.point.items() >= mesh.items() for one in found):
            continue
        known = [(atom, axes) for atom, axes in shards if atom is not None]
        units = units_of(samples.extents, known, mesh, samples.plan.microbatches)
        try:
            point = {**samples.points(units, ranges)[i], **mesh}
            one = _Seen.at(samples, point)
        except ShardcError:
            continue  # sizes of axes that this model cannot have
        if one.frame == frame:
            found.append(one)
    return {axis: tuple(sorted({base[axis], *(one.point[axis] for one in found)})) for axis in base}, found


def _derived(samples: Samples, seen: Sequence[_Seen], axes: Mapping[str, tuple[int, ...]]) -> Formulas:
    varied = {axis: sizes for axis, sizes in axes.items() if len(sizes) > 1}
    fixed = {axis: size for axis, size in samples.axes.items() if axis not in varied}
    points = [{**samples.axes, **one.point} for one in seen]
    fitter, frame = Fitter(points, list(samples.extents), list(varied)), seen[0].frame

    def fitted(kind: str, items: Sequence[Any]) -> list[Expression]:
        found: list[Expression] = []
        for item, column in zip(items, zip(*(getattr(one.numbers, kind) for one in seen), strict=True), strict=True):
            if (expression := fitter.fitted(column)) is None:
                message = f"%{item.value} has no formula: {', '.join(map(str, column))} {kind}"
                raise error("SC232", message, location=item.source or None, hint="compile for each size")
            found.append(expression)
        return found

    payloads, flops = fitted("payloads", frame.senders), fitted("flops", frame.products)
    atoms = fitted("atoms", frame.shards)
    layers, notes = Layers.of(frame), list[str]()
    moved = layers.counted((s.layer, (s[:5], p)) for s, p in zip(frame.senders, payloads, strict=True))
    products = layers.counted(
        (p.layer, ((p.phase, p.op, p.times), f)) for p, f in zip(frame.products, flops, strict=True)
    )
    if moved is None or products is None:
        layers = Layers(why=f"the layers of {layers.name} differ")
        moved = layers.counted((s.layer, (s[:5], p)) for s, p in zip(frame.senders, payloads, strict=True))
        products = layers.counted(
            (p.layer, ((p.phase, p.op, p.times), f)) for p, f in zip(frame.products, flops, strict=True)
        )
        assert moved is not None
        assert products is not None
    memory, stored, memory_layers, memory_from = (), None, 0, 0
    try:
        sizes = fitted("bytes", frame.held)
        arena = fitter.fitted([one.numbers.arena for one in seen])
    except ShardcError as without:
        notes.append(f"memory has no formula: {without.diagnostics[0].message}")
    else:
        found = None if arena is None else candidates(frame, sizes, layers, arena)
        if found is None and arena is not None:
            memory_layers = layers.count
            found = candidates(frame, sizes, Layers(), arena)
            notes.append(f"memory is that of {layers.count} layers: with others, calls overlap otherwise")
        elif found is not None and (memory_from := found.layers) > 2:
            notes.append(f"memory is that of {memory_from} layers or more: with fewer, calls overlap otherwise")
        kept = layers.counted((h.layer, s) for h, s in zip(frame.held, sizes, strict=True) if h.born < 0)
        if found is None or arena is None or kept is None:
            notes.append(f"memory has no formula: the layers of {layers.name} do not hold the same")
        else:
            memory, zero = tuple(found.candidates), fitter.constant(0)
            stored = (
                sum((s.times(n) for s, (n, _) in kept.items()), zero),
                sum((s.times(n) for s, (_, n) in kept.items()), zero),
            )
    if layers.why:
        notes.append(f"the number of layers is no symbol: {layers.why}")
    notes += [f"{axis} is no symbol: no other size of it gives the same program" for axis in fixed]
    ranges = {name: (min(p[name] for p in points), max(p[name] for p in points)) for name in samples.extents}
    least: dict[tuple[Expression, Axes], int] = {}
    for atom, shard in zip(atoms, frame.shards, strict=True):
        if str(atom) in shard.axes or (atom.is_constant and all(axis in fixed for axis in shard.axes)):
            continue  # a part for each rank; or what no size changes
        for point in points:
            ranks = math.prod(point.get(axis, 1) for axis in shard.axes)
            part = int(atom.at(point)) // ranks
            least[atom, shard.axes] = min(part, least.get((atom, shard.axes), part))
            if atom.at(point) % ranks:
                message = f"%{shard.value} is uneven: {atom} over {'.'.join(shard.axes)}"
                raise error("SC232", message, location=shard.source or None, hint="compile for each size")
    even = tuple((atom, names, part) for (atom, names), part in least.items())
    domain = Domain(ranges, varied, fixed, even, layers, samples.guards)
    memory = tuple(pruned(memory, {name: low for name, (low, _) in ranges.items()}, domain.meshes))
    transfers = [
        Transfer(phase, names, kind, op, payload.times(1), times * n, times * each)
        for ((phase, names, kind, op, times), payload), (n, each) in moved.items()
    ]
    phases: dict[Phase, None] = dict.fromkeys(p.phase for p in frame.products)
    work = [_work(phase, products, fitter.constant(0)) for phase in phases]
    return Formulas(tuple(transfers), tuple(work), memory, stored, domain, memory_layers, memory_from, tuple(notes))


def _work(phase: Phase, products: Mapping[Any, tuple[int, int]], zero: Expression) -> Work:
    fixed = each = zero
    for ((of, _, times), flops), (n, more) in products.items():
        if of == phase:
            fixed, each = fixed + flops.times(times * n), each + flops.times(times * more)
    return Work(phase, fixed, each)
