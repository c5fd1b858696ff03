"""store: decide where parameters and optimizer state lie between steps, apart from where they are computed with.

Needs: propagated placements. Ensures: `graph.stored` says how each parameter is stored; state, and every
value of the optimizer's phase, is placed as its parameter's update is.

ZeRO (Rajbhandari et al. 2020) is storage, not sharding of compute: as ordinary annotations it would make
all-to-alls. With storage over an axis, everything follows from the types:

    zero 1, 2   parameters stored as computed with; the update runs on shards: a gradient is reduce-scattered,
                the new parameter all-gathered
    zero 3      parameters stored as shards too: gathered before use, and in backward again

Under mixed precision what is stored is the master copy, which no op but a cast and the update reads. It is part of the
optimizer's state then, and zero 1 and 2 shard it too: the new parameter is not gathered, its cast is, and stays for
backward. That is a half of the bytes, and a rank holds a share of the master and the whole of the cast.

An axis that the parameter's own placement uses already is left out. The axis goes to the atom that it
divides, the leading one if several do; where it divides none, to the largest, padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.diagnostic import Diagnostic, error
from shardc.ir.graph import Graph, info, operands, results, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.program import CONSTANT
from shardc.ir.types import Axes, TensorType
from shardc.passes.base import Pass
from shardc.passes.sharding.casts import carriers, gradients, narrow_copies
from shardc.passes.sharding.seed import Bound, landed
from shardc.rules.projection import project
from shardc.rules.registry import find_rule

aten = torch.ops.aten


@dataclass(frozen=True)
class Store(Pass):
    """Place parameters' storage and their updates. `axes` are the mesh axes that storage is sharded over."""

    zero: int = 0
    axes: Axes = ()
    bound: tuple[Bound, ...] = ()  # parameters stored as an annotation says, instead
    layout: tuple[tuple[str, TensorType], ...] = ()  # parameters, buffers and state stored as another program has them

    def like(self, body: Graph, more: tuple[tuple[str, TensorType], ...] = ()) -> Store:
        """Storage as another body's: what it takes between its steps, this one takes too; and what is held beside."""
        pairs = zip(body.inputs, body.placeholders, strict=True)
        held = [(p.name, type_of(n)) for p, n in pairs if p.role in ("param", "buffer", "state")]
        held = tuple((name, type) for name, type in held if not name.startswith(CONSTANT))
        return replace(self, layout=(*held, *more))

    def cuts(self, graph: Graph) -> list[tuple[str, int, tuple[int, ...]]]:
        """The factorisations of dims that the layout asks for."""
        known = {port.name for port in graph.inputs}
        layout = ((name, type) for name, type in self.layout if name in known)
        return [(name, d, sizes) for name, type in layout for d, sizes in enumerate(type.sizes) if len(sizes) > 1]

    def run(self, graph: Graph) -> Graph:
        axes = graph.mesh.resolve(self.axes) if self.zero else ()
        updates: dict[fx.Node, tuple[Axes, ...]] = {}  # parameter, gradient or state -> where its update runs
        gradient_of, layout = gradients(graph), dict(self.layout)
        by_name = {p.name: (p, n) for p, n in zip(graph.inputs, graph.placeholders, strict=True)}
        annotated = landed(graph, [(b, by_name[b.name][1]) for b in self.bound]) if self.bound else {}
        for name, (_, node) in by_name.items():
            if name in layout:
                graph.stored[node] = _as_held(name, type_of(node), layout[name], graph.mesh)
        for name, (port, node) in by_name.items():
            if port.role != "param" or (name in layout and graph.is_forward_only):
                continue
            if name in layout:  # the update runs where its state lies
                placement = extended(type_of(node).place(graph.stored[node]), axes, graph.mesh)
                placement = self._of_state(graph, port.name, type_of(node)) or placement
            else:
                placement = annotated[node] if node in annotated else extended(type_of(node), axes, graph.mesh)
                if self.zero == 3 or node in annotated or (self.zero and narrow_copies(node)):
                    graph.stored[node] = placement
            updates[node] = placement
            if name in gradient_of:
                updates[gradient_of[name]] = placement
                _place_gradient(gradient_of[name], placement)
        for port, node in by_name.values():
            owner = by_name.get(port.parameter)
            if port.role == "state" and owner is not None and owner[1] in updates:
                beside = _beside(type_of(node), type_of(owner[1]), updates[owner[1]])
                updates[node] = graph.stored.get(node, beside)
                update(node, type=type_of(node).place(updates[node]))
        _place_updates(graph, updates)
        self._report(graph, axes)
        return graph

    def _of_state(self, graph: Graph, parameter: str, type: TensorType) -> tuple[Axes, ...] | None:
        """How the first state of a parameter's own shape is stored, if the layout says it."""
        for port, node in zip(graph.inputs, graph.placeholders, strict=True):
            if port.role == "state" and port.parameter == parameter and type_of(node).sizes == type.sizes:
                return graph.stored.get(node)
        return None

    def _report(self, graph: Graph, axes: Axes) -> None:
        for axis in axes:
            users = [n for n in graph.placeholders if axis in {a for p in graph.stored.get(n, ()) for a in p}]
            if self.zero == 3 and not users:
                message = f"storage over '{axis}' shards no parameter: all of them are computed over it already"
                graph.diagnostics.append(Diagnostic("SC209", message, "warning", hint="name another axis"))


def _as_held(name: str, type: TensorType, held: TensorType, mesh: Mesh) -> tuple[Axes, ...]:
    """The placement of an equal tensor, over atoms that may be finer than its own."""
    placement: list[Axes] = []
    for sizes, dim in zip(type.sizes, held.dims, strict=True):
        finer = list(sizes)
        for atom in dim:
            first, rest = finer.pop(0), 1
            axes = mesh.resolve(atom.axes)
            placement.append(axes)
            while first * rest < atom.size:
                rest *= finer.pop(0)
                placement.append(())
            assert first * rest == atom.size, f"{name} as {held}, not {type}"
            if rest > 1 and first % mesh.size(axes):
                message = f"'{name}' is held as {held}, and this program factors it as {type}: shards would cross"
                hint = "train on batches of one shape, or place the parameter by another dim"
                raise error("SC547", message, tensor=name, hint=hint)
    return tuple(placement)


def extended(type: TensorType, axes: Axes, mesh: Mesh) -> tuple[Axes, ...]:
    """A placement with storage axes added, each as the minor axis of one atom: rather not of one of blocks, whose
    gradient would be all-reduced, not reduce-scattered, and of which some blocks may be whole on every rank."""
    placement = list(type.placement)
    for axis in axes:
        if not placement or any(axis in used for used in placement):
            continue
        size = mesh.size(axis)
        local = type.place(placement).local_atoms(mesh)
        fitting = [i for i, n in enumerate(local) if n % size == 0]
        plain = [i for i in fitting if not isinstance(type.atoms[i].size, Blocks)]
        atom = (plain or fitting)[0] if fitting else max(range(len(local)), key=lambda i: local[i])
        placement[atom] = (*placement[atom], axis)
    return tuple(placement)


def _share(graph: Graph, value: fx.Node, placed: dict[fx.Node, tuple[Axes, ...]]) -> None:
    """Split the matrices of a stack, along dim 0, over the axes that leave a rank the fewest; of those, the fewest."""
    type, mesh = type_of(value), graph.mesh
    count = type.shape[0]
    sets = (axes for n in range(len(mesh.names) + 1) for axes in combinations(mesh.names, n))
    axes = min(sets, key=lambda axes: (-(-count // mesh.size(axes)), mesh.size(axes)))
    atoms = type.dims[0]
    largest = max(range(len(atoms)), key=lambda i: atoms[i].size) if atoms else -1
    placed[value] = tuple(axes if i == largest else () for i in range(len(type.atoms)))
    update(value, type=type.place(placed[value]))


def _beside(type: TensorType, owner: TensorType, placement: tuple[Axes, ...]) -> tuple[Axes, ...]:
    """The placement of a state tensor: its parameter's in the dims that both have. A sum over rows has no rows."""
    if type.ndim != owner.ndim:
        return ((),) * len(type.atoms)
    placed: list[Axes] = []
    given = iter(placement)
    for dim, of_owner in zip(type.dims, owner.dims, strict=True):
        axes = [next(given) for _ in of_owner]
        same = [atom.size for atom in dim] == [atom.size for atom in of_owner]
        placed += axes if same else [()] * len(dim)
    return tuple(placed)


def _place_gradient(gradient: fx.Node, placement: tuple[Axes, ...]) -> None:
    """Wish for a gradient that is cast to be a shard on its whole way, should its sum be resolved before the cast."""
    placed = {gradient: placement}
    for call in carriers(gradient):
        (result,) = results(call)
        if result is None or result not in placed:
            continue
        update(result, type=type_of(result).place(placed[result]))
        projection = project(call)
        of_piece = dict(zip(projection.results[0], placed[result], strict=True))
        for value, pieces in zip(operands(call), projection.operands, strict=True):
            placed[value] = tuple(of_piece.get(piece, ()) for piece in pieces)


def _place_updates(graph: Graph, placed: dict[fx.Node, tuple[Axes, ...]]) -> None:
    """Carry placements forward through the optimizer's phase alone.

    Matrices that are needed whole are stacked: ranks share the matrices of a stack, and of all values that are made of
    it. What is selected of those is placed as the matrix was.
    """
    stacked: dict[fx.Node, list[fx.Node]] = {}  # value of several matrices -> the matrices
    for node in graph.calls():
        if info(node).phase != "opt" or find_rule(node.target) is None:
            continue
        if info(node).optimizer:
            for value in (v for v in operands(node) if v not in stacked and not info(v).optimizer):
                if value.op == "call_function" and value.target in (aten.cat.default, aten.unsqueeze.default):
                    parts = operands(value) if value.target is aten.cat.default else [value]
                    stacked[value] = [operands(part)[0] for part in parts]
                    _share(graph, value, placed)
            matrices = next((stacked[v] for v in operands(node) if v in stacked), None)
            if matrices is not None and info(node).type is not None and type_of(node).ndim:
                stacked[node] = matrices
                _share(graph, node, placed)
            continue
        if node.target is aten.select.int and (source := operands(node)[0]) in stacked:
            matrix = stacked[source][int(node.args[2])]  # type: ignore[arg-type]
            if type_of(node).sizes == type_of(matrix).sizes and matrix in placed:
                placed[node] = placed[matrix]
                update(node, type=type_of(node).place(placed[node]))
            continue
        projection = project(node)
        split: dict[int, Axes] = {}
        for value, pieces in zip(operands(node), projection.operands, strict=True):
            for piece, axes in zip(pieces, placed.get(value, ()), strict=False):
                if axes and piece not in projection.blocked:
                    split.setdefault(piece, axes)
        for value, pieces in zip(results(node), projection.results, strict=True):
            if value is not None:
                placed[value] = tuple(split.get(p, ()) for p in pieces)
                update(value, type=type_of(value).place(placed[value]))
