"""What each mesh axis is for, and which atoms of a graph's values it divides.

    batch       dim 0 of the batch's inputs                 dp, and every axis whose name begins with it
    sequence    dim 1 of inputs of token ids                cp, sp
    expert      dim 0 of the experts' weights, and the batch's dim 0     ep
    tensor      whatever the placement program finds        tp, and any other

The roles of the first three say where the axis goes; it then goes as far as atoms are tied by the calls between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.passes.sharding.atom_classes import Classes, Place
from shardc.rules.registry import find_rule

Role = Literal["batch", "sequence", "expert", "tensor"]
BY_NAME: Mapping[str, Role] = {"dp": "batch", "fsdp": "batch", "cp": "sequence", "sp": "sequence", "ep": "expert"}


def roles_of(mesh: Mesh, roles: Mapping[str, Role] | None = None) -> dict[str, Role]:
    """The role of each axis: as given, else by its name."""
    given = roles or {}
    return {
        name: given.get(name) or BY_NAME.get(name) or ("batch" if name.startswith("dp") else "tensor")
        for name in mesh.names
    }


@dataclass
class Divided:
    """The atoms that axes divide, by their class."""

    graph: Graph
    mesh: Mesh
    roles: Mapping[str, Role]
    classes: Classes = field(init=False)
    axes_of: dict[Place, list[str]] = field(default_factory=dict[Place, list[str]])  # by class
    placed: dict[Place, list[str]] = field(default_factory=dict[Place, list[str]])  # of one value's atom alone

    def __post_init__(self) -> None:
        self.classes = Classes(self.graph)
        self.batch = {self.classes.of(p) for v in self.inputs() for p in self._dim(v, 0)}
        self.experts = {self.classes.of(p) for v in self.expert_weights() for p in self._dim(v, 0)}
        vectors = [n for n in self.graph.placeholders if type_of(n).ndim == 1 and n not in self.inputs()]
        self.features = {self.classes.of((v, i)) for v in vectors for i in range(len(type_of(v).atoms))}
        sequence = {self.classes.of(p) for v in self.sequences() for p in self._dim(v, 1)}
        places = {
            "batch": self.batch,
            "sequence": sequence,
            "expert": self.batch | self.experts,
            "tensor": set[Place](),
        }
        for axis, role in self.roles.items():
            for place in places[role]:
                self.axes_of.setdefault(place, []).append(axis)

    # ------------------------------------------------------------------ what roles speak of
    def inputs(self) -> list[fx.Node]:
        """Leaves of the batch with as many rows as the first."""
        ports = zip(self.graph.inputs, self.graph.placeholders, strict=True)
        leaves = [n for p, n in ports if p.role == "input" and type_of(n).ndim]
        rows = type_of(leaves[0]).shape[0] if leaves else 0
        return [n for n in leaves if type_of(n).shape[0] == rows]

    def sequences(self) -> list[fx.Node]:
        """Those that have a dim of positions: token ids, or without any, rows of features."""
        ids = [v for v in self.inputs() if type_of(v).ndim == 2 and not type_of(v).dtype.is_floating_point]
        return ids or [v for v in self.inputs() if type_of(v).ndim == 3]

    def expert_weights(self) -> list[fx.Node]:
        """Parameters of grouped products, which have a matrix for each expert."""
        found: dict[fx.Node, None] = {}
        for node in self.graph.calls():
            if op_name(node.target) in ("shardc.expert_mm", "shardc.grouped_mm") and info(node).phase == "fwd":
                value = parameter_behind(self.graph, operands(node)[1])
                if value is not None:
                    found[value] = None
        return list(found)

    def _dim(self, value: fx.Node, dim: int) -> list[Place]:
        """The first atom of a dim, if it has one."""
        sizes = type_of(value).sizes
        return [(value, sum(map(len, sizes[:dim])))] if dim < len(sizes) and sizes[dim] else []

    # ------------------------------------------------------------------ atoms
    def axes(self, value: fx.Node, atom: int) -> list[str]:
        return [*self.axes_of.get(self.classes.of((value, atom)), []), *self.placed.get((value, atom), [])]

    def divisors(self, but: Iterable[str] = ()) -> dict[tuple[fx.Node, int], int]:
        """By how many ranks each atom is divided."""
        left_out = set(but)
        divisors: dict[tuple[fx.Node, int], int] = {}
        for value in self.graph.values():
            for atom in range(len(type_of(value).atoms)):
                axes = [axis for axis in self.axes(value, atom) if axis not in left_out]
                if axes:
                    divisors[value, atom] = self.mesh.size(tuple(axes))
        return divisors

    def place(self, value: fx.Node, atom: int, axis: str) -> None:
        """An axis divides this atom of one value: what the placement program says, value by value."""
        self.placed.setdefault((value, atom), []).append(axis)


def parameter_behind(graph: Graph, value: fx.Node) -> fx.Node | None:
    """The parameter that a value is, as it is or through views and casts of it alone."""
    while value.op == "call_function" and len(operands(value)) == 1:
        rule = find_rule(value.target)
        if rule is None or rule.kind not in ("view", "pointwise"):
            return None
        value = operands(value)[0]
    return (
        value
        if any(n is value and p.role == "param" for p, n in zip(graph.inputs, graph.placeholders, strict=True))
        else None
    )
