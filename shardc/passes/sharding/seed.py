"""seed: bind annotations to atoms.

Needs: atomized types. Ensures: `graph.seeds` holds a placement for each annotated value; the mesh's
axes are split into sub-axes where an annotation needs that.

"Shard the columns over tp" means the atom that tp can follow through the model: of a fused QKV weight
(3 8 64) that is the 8, since 3 selects and 64 is contracted whole inside attention. So an axis lands on
the first atom of the dim that no op it reaches forbids. With 2 kv-heads and tp=4 the axis is split:
tp:0 shards the heads of k and v, tp:0 and tp:1 together those of q.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.diagnostic import Diagnostic, Severity, ShardcError, error, merged
from shardc.ir.graph import Graph, Seed, info, op_name, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.grouped import GROUPED_MM
from shardc.ir.placement import DimPlacement, Placement
from shardc.ir.provenance import Requirement
from shardc.ir.types import Atom, Axes
from shardc.passes.base import Pass
from shardc.passes.sharding.atom_classes import Classes, Place
from shardc.passes.sharding.atomize import linked_gradients
from shardc.passes.sharding.find_blocks import in_elements
from shardc.rules.projection import refine
from shardc.rules.registry import rule_of

EXPERTS = "no sum over rows, no weight or bias that experts share, no random numbers (docs/experts.md)"


@dataclass(frozen=True)
class Bound:
    """An annotation matched to one tensor: a port's name, or the FQN of the module whose output it is.

    `alike` are the tensors of equal layers that the graph is without (`ir/equal_layers.py`): what is found of this one
    is found of each of them.
    """

    kind: str  # "param" | "input" | "activation" | "output"
    name: str
    placement: Placement
    location: str | None = None
    pattern: str = ""  # what it was matched by; findings of one pattern are said once
    alike: tuple[str, ...] = ()

    @property
    def requirement(self) -> Requirement:
        return Requirement("annotation", self.name, str(self.placement), self.location or "")

    @property
    def cause(self) -> str:
        """How diagnostics cite it."""
        return str(self.requirement)

    @property
    def priority(self) -> int:
        return 0 if self.kind in ("param", "input") else 1


_Note = tuple[Hashable, Diagnostic]  # notes of one key are said once


@dataclass(frozen=True)
class SeedAnnotations(Pass):
    """Turn placements into seeds. `bound` lists the annotations."""

    bound: tuple[Bound, ...] = ()

    @property
    def name(self) -> str:
        return "seed"

    def run(self, graph: Graph) -> Graph:
        classes = Classes(graph)
        bound_values = [(b, find_value(graph, b)) for b in self.bound]
        requests = [(b, value) for b, value in bound_values if value is not None]
        for b, value in requests:
            b.placement.check(graph.mesh, type_of(value).ndim, b.name, b.cause)
        graph.mesh = _split_mesh(graph.mesh, [_landings(classes, b, v, graph.mesh, {}) for b, v in requests])
        claims = _claims(classes, requests, graph.mesh)
        unread = [(b, [_unread(b)]) for b, value in bound_values if value is None]
        found: list[tuple[Bound, list[_Note]]] = []
        for b, value in requests:
            landings = _landings(classes, b, value, graph.mesh, claims)
            seed = _seed(b, value, landings, graph.mesh)
            other = graph.seeds.get(value)
            if other is not None and (other.placement, other.fixed) != (seed.placement, seed.fixed):
                message = f"{b.name} and another annotation place one and the same tensor, and differ"
                raise _refuse("SC206", message, b, hint=f"make them agree, or drop one; the other is: {other.cause}")
            graph.seeds[value] = seed
            found.append((b, [note for d, at in landings.items() for note in _notes(b, value, d, at, graph.mesh)]))
        graph.diagnostics += merged([*_of_equal_layers(unread), *_of_equal_layers(found)])
        return graph


def _of_equal_layers(found: Sequence[tuple[Bound, list[_Note]]]) -> Iterator[_Note]:
    """Notes in the order of a graph with all layers: those of a layer that stands for others, once for each of them."""
    for count, group in groupby(found, key=lambda each: len(each[0].alike)):
        layer = list(group)
        yield from (note for _, notes in layer for note in notes)
        for other in range(count):
            yield from ((key, replace(note, tensor=b.alike[other])) for b, notes in layer for key, note in notes)


def find_value(graph: Graph, bound: Bound) -> fx.Node | None:
    """The value an annotation speaks of; None when the graph does not hold it (an input that nothing uses)."""
    if bound.kind == "activation":
        return graph.activations.get(bound.name)
    if bound.kind == "output":
        pairs = zip(graph.outputs, graph.output_values, strict=True)
        return next((v for p, v in pairs if p.name == bound.name and p.role == "output"), None)
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    return next((v for p, v in pairs if bound.name == p.name or bound.name in p.aliases), None)


Claims = Mapping[Place, Set[str]]  # class -> the axes that parameters' annotations put on it


@dataclass
class _Landing:
    """Where the axes of one dim go: flat atom -> axes; `splits` are the sub-axes that it takes.

    `dropped` axes have no atom left to shard. `copied` axes shard the reader along a dim of another tensor.
    """

    axes: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    splits: list[tuple[str, tuple[int, int]]] = field(default_factory=list[tuple[str, tuple[int, int]]])
    dropped: list[str] = field(default_factory=list[str])
    copied: list[str] = field(default_factory=list[str])

    def shared(self, mesh: Mesh) -> list[str]:
        """The dropped whose sister did land: of two kv-heads over four ranks, each is copied to two."""
        landed = {mesh.parent(axis) for axes in self.axes.values() for axis in axes}
        return [axis for axis in self.dropped if mesh.parent(axis) in landed]


def _landings(classes: Classes, bound: Bound, value: fx.Node, mesh: Mesh, claims: Claims) -> dict[int, _Landing]:
    """The landing of each dim that an annotation shards."""

    def barred(atom: int, axis: str) -> bool:
        return bound.kind == "param" and any(axis in claims.get(c, ()) for c in classes.rivals(value, atom))

    return {
        d: _land(_candidates(classes, bound, value, d, dim_placement), mesh.resolve(dim_placement.axes), mesh, barred)
        for d, dim_placement in enumerate(bound.placement.padded(type_of(value).ndim))
        if dim_placement.axes
    }


def _claims(classes: Classes, requests: Sequence[tuple[Bound, fx.Node]], mesh: Mesh) -> Claims:
    """What parameters' annotations put on atoms that every op can split."""
    claims: dict[Place, set[str]] = {}
    for bound, value in requests:
        if bound.kind == "param":
            for landing in _landings(classes, bound, value, mesh, {}).values():
                for atom, axes in landing.axes.items():
                    if classes.clean(value, atom):
                        claims.setdefault(classes.of((value, atom)), set()).update(axes)
    return claims


def _land(
    atoms: Sequence[tuple[int, int]], axes: Sequence[str], mesh: Mesh, barred: Callable[[int, str], bool]
) -> _Landing:
    """Lay axes over (flat index, size) atoms in turn; an axis larger than its atom continues on the next.

    An axis of size 1 shards nothing: kept, it would reduce over groups of one rank. An atom that is barred to an axis
    is passed over.
    """
    landing = _Landing()
    todo = [(axis, mesh.size(axis)) for axis in axes if mesh.size(axis) > 1]
    queue = list(atoms)
    atom, remaining = queue.pop(0) if queue else (-1, 1)
    while todo:
        axis, size = todo.pop(0)
        while queue and (remaining == 1 or barred(atom, axis)):
            atom, remaining = queue.pop(0)
        if atom < 0 and size == 1:  # nothing to shard, and nobody to share it with
            continue
        if atom >= 0 and remaining > 1 and barred(atom, axis):
            landing.copied.append(axis)
        elif remaining == 1 and size > 1:
            landing.dropped.append(axis)
        elif remaining >= size or size % remaining:
            landing.axes.setdefault(atom, []).append(axis)
            remaining = -(-remaining // size)
        else:  # the axis is a multiple of the atom: its major part goes here
            landing.splits.append((axis, (remaining, size // remaining)))
            todo.insert(0, (axis, size // remaining))
            remaining = 1
    return landing


def _candidates(
    classes: Classes, bound: Bound, value: fx.Node, dim: int, dim_placement: DimPlacement
) -> list[tuple[int, int]]:
    """The atoms of a dim that its axes may land on, in order of preference of the leading ones."""
    type = type_of(value)
    start = sum(len(d) for d in type.dims[:dim])
    atoms = [(start + i, a.size) for i, a in enumerate(type.dims[dim])]
    if dim_placement.blocks > 1:
        product = 1
        while atoms and product < dim_placement.blocks:
            product *= atoms.pop(0)[1]
        if product != dim_placement.blocks:
            factors = " ".join(str(a.size) for a in type.dims[dim])
            blocks = f"{dim_placement.blocks} blocks: its factors are ({factors})"
            message = f"dim {dim} of {bound.name} does not fall into {blocks}"
            raise _refuse(
                "SC203", message, bound, hint="use a block count that the model's splits and views agree with"
            )
    found = in_elements(type.sizes[dim])
    if dim_placement.unequal and dim_placement.unequal != found:
        raise _not_its_blocks(bound, dim, type.shape[dim], dim_placement, found)
    readers = [classes.needing_whole(value, i) for i, _ in atoms]
    if atoms and all(readers) and any(node.target is GROUPED_MM for node in readers[0]):
        raise _unshardable(classes, bound, value, dim, readers[0])
    atoms = [(i, n.shards if isinstance(n, Blocks) else n) for i, n in atoms]
    clean = [(i, n) for i, n in atoms if classes.clean(value, i)]
    return clean or [(i, n) for i, n in atoms if not classes.selector(value, i)] or atoms


def _unshardable(classes: Classes, bound: Bound, value: fx.Node, dim: int, readers: list[fx.Node]) -> ShardcError:
    readers = [node for node in readers if info(node).phase == "fwd"] or readers
    names = list(dict.fromkeys(op_name(node.target) for node in readers))
    message = (
        f"no axis can shard dim {dim} of {bound.name}: {' and '.join(names)} need{'s' * (len(names) == 1)} it whole"
    )
    starts = accumulate((len(d) for d in type_of(value).dims), initial=0)
    free = [
        str(d)
        for d, (start, atoms) in enumerate(zip(starts, type_of(value).dims, strict=False))
        if any(not classes.needing_whole(value, start + i) for i in range(len(atoms)))
    ]
    hint = f"shard its dim {' or '.join(free)} instead, or leave it unsharded" if free else "leave it unsharded"
    if any(node.target is GROUPED_MM for node in readers):
        hint += "; experts have axes of their own where all that is done with their rows goes row by row: " + EXPERTS
    return _refuse("SC207", message, bound, op=f"{names[0]}   {rule_of(readers[0])}", hint=hint)


def _refuse(code: str, message: str, bound: Bound, **details: str) -> ShardcError:
    return error(code, message, **_about(bound), **details)


def _about(bound: Bound) -> dict[str, str | None]:
    return {
        "location": bound.location,
        "tensor": bound.name,
        "placement": str(bound.placement),
        "cause": bound.cause,
    }


def _family(bound: Bound) -> tuple[str, str]:
    """What the annotations of a pattern have in common; without one, those of all layers."""
    return bound.kind, bound.pattern or re.sub(r"\d+", "*", bound.name)


def _unread(bound: Bound) -> _Note:
    message = f"nothing in the step reads {bound.name}: its annotation has no effect"
    return _family(bound), Diagnostic("SC209", message, "note", **_about(bound), hint="drop the annotation")


def _not_its_blocks(
    bound: Bound, dim: int, size: int, dim_placement: DimPlacement, found: tuple[int, ...]
) -> ShardcError:
    """What is wrong with the sizes of blocks: `found` are those of the dim, if it has any."""
    written, total = DimPlacement(dim_placement.axes, unequal=found), sum(map(abs, dim_placement.unequal))
    if total != size:
        why = f"the sizes sum up to {total}"
    else:
        why = f"the sections that the model takes of it are {list(found)}" if found else "no axis can follow them"
    message = f"dim {dim} of {bound.name}, of size {size}, does not fall into {dim_placement}: {why}"
    alone = "the axis alone, and a note says which sections the model takes"
    return _refuse(
        "SC203", message, bound, hint=f'write "{written}" for this dim, or {alone}' if found else f"write {alone}"
    )


def _notes(bound: Bound, value: fx.Node, dim: int, landing: _Landing, mesh: Mesh) -> list[_Note]:
    """Diagnostics for axes that were dropped or shard another factor than written; each with its key for merging."""
    type, dim_placement = type_of(value), bound.placement.dims[dim]
    family = (*_family(bound), dim, type.sizes[dim])
    about = f"dim {dim} of {bound.name}"
    notes: list[_Note] = []

    def note(code: str, message: str, hint: str | None = None, severity: Severity = "note") -> None:
        diagnostic = Diagnostic(code, message, severity, **_about(bound), hint=hint)
        notes.append(((*family, message.replace(bound.name, "")), diagnostic))

    for axis in landing.dropped:
        message = f"axis '{axis}' ({mesh.size(axis)}) finds nothing left to shard in {about}: replicated over it"
        note(
            "SC209",
            message,
            "a smaller axis, or fewer axes on this dim",
            "note" if axis in landing.shared(mesh) else "warning",
        )  # as much as can be had
    for axis in landing.copied:
        message = (
            f"axis '{axis}' ({mesh.size(axis)}) splits what {about} goes into along another tensor: copied over it"
        )
        note("SC209", message, "a smaller axis; a head of keys and values that several ranks share is copied to them")
    for i, axes in landing.axes.items():
        size = type.atoms[i].size
        if Atom(size, tuple(axes)).uneven(mesh):
            over = f"{'.'.join(axes)} ({mesh.size(axes)})"
            note("SC211", f"the {size} of {about} over {over}: the last shards are padded")
    start = sum(len(d) for d in type.dims[:dim])
    first = min(landing.axes, default=start)
    skipped = math.prod(atom.size for atom in type.atoms[start:first])
    blocks = in_elements(type.sizes[dim])
    size = type.dims[dim][0].size if type.dims[dim] else 1
    if isinstance(size, Blocks) and size.zigzag and start in landing.axes:
        message = f"{about} is in zigzag over {size.zigzag}: a rank has a chunk from the front, and one from the back"
        note("SC203", message, "context: {balance: none} gives each rank one run")
    elif isinstance(size, Blocks) and any(block.room for block in size.parts):
        pass  # it lies as a longer sequence does
    elif blocks and start in landing.axes and not dim_placement.unequal:
        text = str(DimPlacement(dim_placement.axes, unequal=blocks))
        message = f"{about} is sharded as {text}: the model takes sections of these sizes"
        note("SC203", message, f'write "{text}" for this dim to say so')
    if landing.axes and skipped != dim_placement.blocks:
        text = f"{skipped}*{'.'.join(dim_placement.axes)}"
        message = f"{about} is sharded as {text}: its leading factor {skipped} selects or is needed whole"
        note("SC203", message, f'write "{text}" for this dim to say so')
    return notes


def _split_mesh(mesh: Mesh, walks: list[dict[int, _Landing]]) -> Mesh:
    """The coarsest mesh whose axes allow every landing."""
    cuts: dict[str, tuple[int, ...]] = {}
    for landings in walks:
        for landing in landings.values():
            heads_of: dict[str, list[int]] = {}
            for axis, (head, _) in landing.splits:
                heads_of.setdefault(axis, []).append(head)
            for axis, heads in heads_of.items():
                remainder = mesh.size(axis)
                for head in heads:
                    remainder //= head
                sizes = tuple(n for n in (*heads, remainder) if n > 1)
                merged = refine(cuts.get(axis, (mesh.size(axis),)), sizes)
                cuts[axis] = merged if merged is not None else cuts[axis]
    for axis, sizes in cuts.items():
        if len(sizes) > 1:
            mesh = mesh.split(axis, sizes)
    return mesh


def copied_axes(graph: Graph) -> dict[fx.Node, Axes]:
    """Axes that no op on a value is to be split over, of parameters that are copied over them, and their gradients."""
    copied = {value: seed.copied for value, seed in graph.seeds.items() if seed.copied}
    return copied | {twin: copied[value] for value, twin in linked_gradients(graph) if value in copied}


def landed(graph: Graph, requests: Sequence[tuple[Bound, fx.Node]]) -> dict[fx.Node, tuple[Axes, ...]]:
    """Where each annotation puts its value's atoms, on the mesh as it is."""
    classes = Classes(graph)  # a walk over the whole graph: once for all of them
    placements: dict[fx.Node, tuple[Axes, ...]] = {}
    for bound, value in requests:
        bound.placement.check(graph.mesh, type_of(value).ndim, bound.name, bound.cause, bound.location)
        landings = _landings(classes, bound, value, graph.mesh, {})
        placements[value] = _seed(bound, value, landings, graph.mesh).placement
    return placements


def _seed(bound: Bound, value: fx.Node, landings: dict[int, _Landing], mesh: Mesh) -> Seed:
    type = type_of(value)
    placement: list[Axes] = [()] * len(type.atoms)
    fixed: list[bool] = []
    for d, dim_placement in enumerate(bound.placement.padded(type.ndim)):
        fixed += [not dim_placement.open] * len(type.dims[d])
        for i, axes in landings[d].axes.items() if d in landings else ():
            placement[i] = tuple(axes)
    fixed += [False] * type.ragged_atoms
    shared = tuple(axis for landing in landings.values() for axis in (*landing.copied, *landing.shared(mesh)))
    return Seed(tuple(placement), tuple(fixed), bound.priority, bound.requirement, shared)
