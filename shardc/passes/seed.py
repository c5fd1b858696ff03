"""seed: bind annotations to atoms.

Needs: atomized types. Ensures: `graph.seeds` holds a placement for each annotated value; the mesh's
axes are split into sub-axes where an annotation needs that.

"Shard the columns over tp" means the atom that tp can follow through the model: of a fused QKV weight
(3 8 64) that is the 8, since 3 selects and 64 is contracted whole inside attention. So an axis lands on
the first atom of the dim that no op it reaches forbids. With 2 kv-heads and tp=4 the axis is split:
tp:0 shards the heads of k and v, tp:0 and tp:1 together those of q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph, Seed, info, operands, results, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.placement import DimPlacement, Placement
from shardc.ir.types import Atom, Axes
from shardc.passes.atomize import linked_gradients
from shardc.passes.base import Pass
from shardc.rules.projection import Projection, project, refine
from shardc.rules.registry import find_rule


@dataclass(frozen=True)
class Bound:
    """An annotation matched to one tensor: a port's name, or the FQN of the module whose output it is."""

    kind: str  # "param" | "input" | "activation" | "output"
    name: str
    placement: Placement
    cause: str
    location: str | None = None

    @property
    def priority(self) -> int:
        return 0 if self.kind in ("param", "input") else 1


@dataclass(frozen=True)
class SeedAnnotations(Pass):
    """Turn placements into seeds. `bound` lists the annotations."""

    bound: tuple[Bound, ...] = ()

    @property
    def name(self) -> str:
        return "seed"

    def run(self, graph: Graph) -> Graph:
        classes = Classes(graph)
        requests = [(b, value) for b in self.bound for value in [find_value(graph, b)] if value is not None]
        for b, value in requests:
            b.placement.check(graph.mesh, type_of(value).ndim, b.name, b.cause)
        graph.mesh = _split_mesh(graph.mesh, [_walk(graph, classes, b, v, graph.mesh, None) for b, v in requests])
        for b, value in requests:
            notes: list[Diagnostic] = []
            _walk(graph, classes, b, value, graph.mesh, notes)
            seed = _seed(graph, classes, b, value, graph.mesh)
            other = graph.seeds.get(value)
            if other is not None and (other.placement, other.fixed) != (seed.placement, seed.fixed):
                message = f"{b.name} and another annotation place one and the same tensor, and differ"
                raise _refuse("SC206", message, b, f"make them agree, or drop one; the other is: {other.cause}")
            graph.seeds[value] = seed
            graph.diagnostics += notes
        return graph


def find_value(graph: Graph, bound: Bound) -> fx.Node | None:
    """The value an annotation speaks of; None when the graph does not hold it (an input that nothing uses)."""
    if bound.kind == "activation":
        return graph.activations.get(bound.name)
    if bound.kind == "output":
        pairs = zip(graph.outputs, graph.output_values, strict=True)
        return next((v for p, v in pairs if p.name == bound.name and p.role == "output"), None)
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    return next((v for p, v in pairs if bound.name == p.name or bound.name in p.aliases), None)


class Classes:
    """Atoms tied together by the ops they pass through, and what those ops forbid.

    `clean(v, i)`: no op that the atom reaches keeps it whole. `selector(v, i)`: some op takes equal
    sections along it, as a split into q, k and v does.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[tuple[fx.Node, int], tuple[fx.Node, int]] = {}
        self._blocked: set[tuple[fx.Node, int]] = set()
        self._selectors: set[tuple[fx.Node, int]] = set()
        self.direct: dict[fx.Node, list[tuple[int, Projection]]] = {}  # value -> (operand, projection) of its uses
        blocked: list[tuple[fx.Node, int]] = []
        selectors: list[tuple[fx.Node, int]] = []
        for node in graph.calls():
            if find_rule(node.target) is None:
                continue
            projection = project(node)
            first: dict[int, tuple[fx.Node, int]] = {}
            values = [*operands(node), *results(node)]
            for k, value in enumerate(operands(node)):
                self.direct.setdefault(value, []).append((k, projection))
            for value, pieces in zip(values, (*projection.operands, *projection.results), strict=True):
                if value is None:
                    continue
                for i, piece in enumerate(pieces):
                    key = (value, i)
                    if piece in first:
                        self._union(first[piece], key)
                    else:
                        first[piece] = key
                        if piece in projection.blocked:
                            blocked.append(key)
                            if projection.names[piece].isdigit():
                                selectors.append(key)
        for value, twin in linked_gradients(graph):
            for i in range(min(len(type_of(value).atoms), len(type_of(twin).atoms))):
                self._union((value, i), (twin, i))
        self._blocked = {self._find(key) for key in blocked}
        self._selectors = {self._find(key) for key in selectors}

    def _find(self, key: tuple[fx.Node, int]) -> tuple[fx.Node, int]:
        root = key
        while (up := self._parent.get(root, root)) != root:
            root = up
        while self._parent.get(key, key) != root:
            self._parent[key], key = root, self._parent.get(key, key)
        return root

    def _union(self, a: tuple[fx.Node, int], b: tuple[fx.Node, int]) -> None:
        ra, rb = self._find(a), self._find(b)
        if ra != rb:
            self._parent[rb] = ra

    def clean(self, value: fx.Node, atom: int) -> bool:
        return self._find((value, atom)) not in self._blocked

    def selector(self, value: fx.Node, atom: int) -> bool:
        return self._find((value, atom)) in self._selectors

    def unshardable(self, value: fx.Node, atom: int) -> bool:
        """Every op that reads the value keeps this atom whole."""
        uses = self.direct.get(value, [])
        return bool(uses) and all(projection.operands[k][atom] in projection.blocked for k, projection in uses)


@dataclass
class _Landing:
    """Where the axes of one dim go: flat atom -> axes; `splits` are the sub-axes that it takes."""

    axes: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    splits: list[tuple[str, tuple[int, int]]] = field(default_factory=list[tuple[str, tuple[int, int]]])
    dropped: list[str] = field(default_factory=list[str])


def _land(atoms: Sequence[tuple[int, int]], axes: Sequence[str], mesh: Mesh) -> _Landing:
    """Lay axes over (flat index, size) atoms in turn; an axis larger than its atom continues on the next.

    An axis of size 1 shards nothing: kept, it would reduce over groups of one rank.
    """
    landing = _Landing()
    todo = [(axis, mesh.size(axis)) for axis in axes if mesh.size(axis) > 1]
    queue = list(atoms)
    at, left = queue.pop(0) if queue else (-1, 1)
    while todo:
        axis, size = todo.pop(0)
        while left == 1 and queue:
            at, left = queue.pop(0)
        if at < 0 and size == 1:  # nothing to shard, and nobody to share it with
            continue
        if left == 1 and size > 1:
            landing.dropped.append(axis)
        elif left >= size or size % left:
            landing.axes.setdefault(at, []).append(axis)
            left = -(-left // size)
        else:  # the axis is a multiple of the atom: its major part goes here
            landing.splits.append((axis, (left, size // left)))
            todo.insert(0, (axis, size // left))
            left = 1
    return landing


def _candidates(
    classes: Classes, bound: Bound, value: fx.Node, dim: int, wanted: DimPlacement
) -> list[tuple[int, int]]:
    """The atoms of a dim that its axes may land on, in order of preference of the leading ones."""
    type = type_of(value)
    start = sum(len(d) for d in type.dims[:dim])
    atoms = [(start + i, a.size) for i, a in enumerate(type.dims[dim])]
    if wanted.blocks > 1:
        product = 1
        while atoms and product < wanted.blocks:
            product *= atoms.pop(0)[1]
        if product != wanted.blocks:
            found = " ".join(str(a.size) for a in type.dims[dim])
            message = f"dim {dim} of {bound.name} does not fall into {wanted.blocks} blocks: its factors are ({found})"
            raise _refuse("SC203", message, bound, "use a block count that the model's splits and views agree with")
    if atoms and all(classes.unshardable(value, i) for i, _ in atoms):
        message = f"no axis can shard dim {dim} of {bound.name}: the ops that read it need it whole"
        raise _refuse("SC207", message, bound, "shard another dim, for a convolution its batch or its channels")
    clean = [(i, n) for i, n in atoms if classes.clean(value, i)]
    return clean or [(i, n) for i, n in atoms if not classes.selector(value, i)] or atoms


def _refuse(code: str, message: str, bound: Bound, hint: str) -> ShardcError:
    return ShardcError(
        Diagnostic(
            code,
            message,
            location=bound.location,
            tensor=bound.name,
            placement=str(bound.placement),
            cause=bound.cause,
            hint=hint,
        )
    )


def _walk(
    graph: Graph, classes: Classes, bound: Bound, value: fx.Node, mesh: Mesh, notes: list[Diagnostic] | None
) -> list[_Landing]:
    """Land every dim's axes; with `notes`, say what was dropped or lands where the text does not say."""
    landings: list[_Landing] = []
    for d, wanted in enumerate(bound.placement.padded(type_of(value).ndim)):
        if not wanted.axes:
            continue
        atoms = _candidates(classes, bound, value, d, wanted)
        landing = _land(atoms, mesh.resolve(wanted.axes), mesh)
        landings.append(landing)
        if notes is not None:
            notes += _notes(bound, value, d, wanted, landing, mesh)
    return landings


def _notes(
    bound: Bound, value: fx.Node, dim: int, wanted: DimPlacement, landing: _Landing, mesh: Mesh
) -> list[Diagnostic]:
    atoms = type_of(value).atoms
    about = f"dim {dim} of {bound.name}"
    where: dict[str, str | None] = {
        "location": bound.location,
        "tensor": bound.name,
        "placement": str(bound.placement),
        "cause": bound.cause,
    }
    notes: list[Diagnostic] = []
    for axis in landing.dropped:
        message = f"axis '{axis}' ({mesh.size(axis)}) finds nothing left to shard in {about}: replicated over it"
        # Fewer kv-heads than ranks must be copied; that a part of the axis did land is as much as can be had.
        partly = any(mesh.parent(axis) == mesh.parent(a) for axes in landing.axes.values() for a in axes)
        severity = "note" if partly else "warning"
        notes.append(Diagnostic("SC209", message, severity, **where, hint="a smaller axis, or fewer axes on this dim"))
    for i, axes in landing.axes.items():
        if Atom(atoms[i].size, tuple(axes)).uneven(mesh):
            over = f"{'.'.join(axes)} ({mesh.size(axes)})"
            message = f"the {atoms[i].size} of {about} over {over}: the last shards are padded"
            notes.append(Diagnostic("SC211", message, "note", **where))
    start = sum(len(d) for d in type_of(value).dims[:dim])
    first = min(landing.axes, default=start)
    skipped = 1
    for i in range(start, first):
        skipped *= atoms[i].size
    if landing.axes and skipped != wanted.blocks:
        text = f"{skipped}*{'.'.join(wanted.axes)}"
        message = (
            f"dim {dim} of {bound.name} is sharded as {text}: its leading factor {skipped} selects or is needed whole"
        )
        notes.append(Diagnostic("SC203", message, "note", **where, hint=f'write "{text}" for this dim to say so'))
    return notes


def _split_mesh(mesh: Mesh, walks: list[list[_Landing]]) -> Mesh:
    """The coarsest mesh whose axes allow every landing."""
    cuts: dict[str, tuple[int, ...]] = {}
    for landings in walks:
        for landing in landings:
            done: dict[str, list[int]] = {}
            for axis, (head, _) in landing.splits:
                done.setdefault(axis, []).append(head)
            for axis, heads in done.items():
                rest = mesh.size(axis)
                for head in heads:
                    rest //= head
                sizes = tuple(n for n in (*heads, rest) if n > 1)
                merged = refine(cuts.get(axis, (mesh.size(axis),)), sizes)
                cuts[axis] = merged if merged is not None else cuts[axis]
    for axis, sizes in cuts.items():
        if len(sizes) > 1:
            mesh = mesh.split(axis, sizes)
    return mesh


def landed(graph: Graph, bound: Bound, value: fx.Node) -> tuple[Axes, ...]:
    """Where an annotation puts a value's atoms, on the mesh as it is."""
    bound.placement.check(graph.mesh, type_of(value).ndim, bound.name, bound.cause, bound.location)
    return _seed(graph, Classes(graph), bound, value, graph.mesh).placement


def _seed(graph: Graph, classes: Classes, bound: Bound, value: fx.Node, mesh: Mesh) -> Seed:
    type = type_of(value)
    placement: list[Axes] = [()] * len(type.atoms)
    fixed: list[bool] = []
    for d, wanted in enumerate(bound.placement.padded(type.ndim)):
        fixed += [not wanted.open] * len(type.dims[d])
        if wanted.axes:
            atoms = _candidates(classes, bound, value, d, wanted)
            for i, axes in _land(atoms, mesh.resolve(wanted.axes), mesh).axes.items():
                placement[i] = tuple(axes)
    return Seed(tuple(placement), tuple(fixed), bound.priority, bound.cause or info(value).name)
