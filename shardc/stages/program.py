"""A pipelined step as plain data: what every rank runs, and in which order; nothing of how it was cut.

    lists       by coordinate on the pipeline's axis: its instructions, proved
    stages      the graphs of each stage's parts, of its gathers, and of what reduces its gradients
    finishes    by coordinate: the end of the step, of the stages that live there
    body        the whole step, which no rank runs: its ports, and what the pipeline must equal

    mesh, axis  all ranks of the job, and the axis whose coordinates the lists are for
    costs       what the lists were made by: of the cut, in FLOPs, unless others were given

Survives JSON. The other axes of the mesh are the body's: rank (c, i) runs list c as rank i of the body's mesh. Where
that is in the whole mesh is for its own order to say, in which the pipeline's axis may stand anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.plain import (
    fields_known,
    graph_from_plain,
    graph_to_plain,
    listed,
    mesh_from_plain,
    mesh_to_plain,
    text_of,
    texts_of,
)
from shardc.ir.text import print_graph
from shardc.ir.types import TensorType
from shardc.stages.build import build
from shardc.stages.costs import Costs
from shardc.stages.cut import StageBodies, Staged
from shardc.stages.finish import Finish
from shardc.stages.lists import RankLists
from shardc.stages.pipeline import PartName

GRAPHS: tuple[PartName, ...] = ("forward", "backward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Pipelined:
    """`bundles` lists the values that are kept under one name; `shared` types the sums that several stages have."""

    body: Graph
    lists: RankLists
    stages: tuple[StageBodies, ...]
    finishes: tuple[Finish, ...]
    bundles: Mapping[str, tuple[str, ...]]
    shared: Mapping[str, TensorType]
    mesh: Mesh
    axis: str
    costs: Costs

    def __post_init__(self) -> None:
        size, inner = self.mesh.size(self.axis), self.body.mesh.world_size
        wanted = len(self.lists.pipeline.stages)
        assert len(self.stages) == wanted, f"graphs of {len(self.stages)} stages, of {wanted}"
        assert len(self.finishes) == size, f"{len(self.finishes)} ends of a step for axis '{self.axis}' of {size}"
        assert size == len(self.lists.ranks), f"{len(self.lists.ranks)} lists for axis '{self.axis}' of {size}"
        assert size * inner == self.mesh.world_size, f"mesh ({self.mesh}) is not {size} times ({self.body.mesh})"

    @property
    def inner(self) -> Mesh:
        """The mesh without the pipeline's axis: the body's, before any of its axes was split."""
        return without(self.mesh, self.axis)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Where a rank of the whole mesh is on the pipeline's axis, and which rank of the body's mesh it is."""
        at = self.mesh.coordinate(rank)
        c = at.pop(self.axis)
        return c, self.inner.rank(at)

    def rank_of(self, c: int, i: int) -> int:
        """The rank of the whole mesh that runs list c as rank i of the body's mesh."""
        return self.mesh.rank({self.axis: c, **self.inner.coordinate(i)})

    def members(self, name: str) -> tuple[str, ...]:
        """The values that a name in the lists stands for."""
        return self.bundles.get(name, (name,))

    def held(self, rank: int) -> frozenset[str]:
        """The parameters and buffers that a coordinate's ranks hold."""
        return frozenset(name for stage in self.lists.stages_of(rank) for name in self.stages[stage].held)

    def text(self, rank: int, *, comments: bool = True) -> str:
        """A coordinate's list, then every graph that it runs."""
        parts = [self.lists.text(rank)]
        split = any(type(work).__name__ == "Dgrad" for work in self.lists.work(rank))
        for stage in self.lists.stages_of(rank):
            names: tuple[PartName, ...] = ("forward", "dgrad", "wgrad") if split else ("forward", "backward")
            graphs = [*self.stages[stage].gathers.values(), *(self.stages[stage][name] for name in names)]
            graphs += [one for one in (self.stages[stage].reduce,) if one is not None]
            parts += [print_graph(graph, comments=comments) for graph in graphs]
        finish = self.finishes[rank]
        parts += [
            print_graph(graph, comments=comments)
            for graph in ((finish.norm,) if finish.totals else ()) + (finish.update,)
        ]
        return "\n".join(parts)

    def to_plain(self) -> dict[str, Any]:
        return {
            "body": graph_to_plain(self.body),
            "lists": self.lists.to_plain(),
            "stages": [
                {name: graph_to_plain(bodies[name]) for name in GRAPHS}
                | {"gathers": {name: graph_to_plain(graph) for name, graph in bodies.gathers.items()}}
                | {"reduce": None if bodies.reduce is None else graph_to_plain(bodies.reduce)}
                for bodies in self.stages
            ],
            "finishes": [
                {"norm": graph_to_plain(f.norm), "update": graph_to_plain(f.update), "totals": list(f.totals)}
                for f in self.finishes
            ],
            "bundles": {name: list(values) for name, values in self.bundles.items()},
            "shared": {name: str(type) for name, type in self.shared.items()},
            "mesh": mesh_to_plain(self.mesh),
            "axis": self.axis,
            "costs": self.costs.to_plain(),
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Pipelined:
        """Raises ShardcError, ValueError, KeyError or AssertionError for what `to_plain` does not write."""
        fields_known(data, tuple(f.name for f in fields(cls)))
        return cls(
            graph_from_plain(data["body"]),
            RankLists.from_plain(data["lists"]),
            tuple(map(_stage, listed(data["stages"]))),
            tuple(map(_finish, listed(data["finishes"]))),
            {name: texts_of(values) for name, values in data["bundles"].items()},
            {name: TensorType.parse(text) for name, text in data["shared"].items()},
            mesh_from_plain(data["mesh"]),
            text_of(data["axis"]),
            Costs.from_plain(data["costs"]),
        )


def _stage(data: Mapping[str, Any]) -> StageBodies:
    fields_known(data, (*GRAPHS, "gathers", "reduce"))
    return StageBodies(
        **{name: graph_from_plain(data[name]) for name in GRAPHS},
        gathers={name: graph_from_plain(graph) for name, graph in data["gathers"].items()},
        reduce=None if data["reduce"] is None else graph_from_plain(data["reduce"]),
    )


def _finish(data: Mapping[str, Any]) -> Finish:
    fields_known(data, ("norm", "update", "totals"))
    return Finish(graph_from_plain(data["norm"]), graph_from_plain(data["update"]), texts_of(data["totals"]))


def without(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of the other axes."""
    return Mesh((name, size) for name, size in mesh.axes if name != axis)


def pipelined(
    staged: Staged,
    schedule: str,
    virtual: int = 1,
    costs: Costs | None = None,
    memory: float | None = None,
    mesh: Mesh | None = None,
    axis: str = "pp",
) -> Pipelined:
    """A cut step under a schedule, which is proved. `costs` default to those of the cut, in FLOPs.

    `mesh` is that of all ranks; by default, the pipeline's axis and then the axes of the body.
    """
    costs = costs or staged.costs
    if memory is not None:
        costs = replace(costs, memory=memory)
    lists = build(staged.pipeline, schedule, staged.body.microbatches, virtual, costs)
    return Pipelined(
        staged.body,
        lists,
        staged.stages,
        tuple(staged.finish(lists.stages_of(rank)) for rank in range(len(lists.ranks))),
        staged.bundles,
        {one.name: type_of(one.total) for one in staged.sums if len(staged.groups[one.name]) > 1},
        mesh or Mesh(((axis, len(lists.ranks)), *staged.body.mesh.axes)),
        axis,
        costs,
    )
