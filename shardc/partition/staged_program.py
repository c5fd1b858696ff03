"""A step as plain data: the graphs of its stages, and the instruction lists of all ranks.

    lists       by coordinate on the pipeline's axis: its proved instruction list
    stages      the graphs of each stage's parts, of its gathers, and of the reduction of its gradients
    epilogues   by coordinate: the epilogue of the step, for the stages of that coordinate
    body        the whole step: it defines the ports, and the results must equal its results

    mesh, axis  all ranks of the job, and the pipeline's axis, whose coordinates the lists are for
    costs       the costs that the schedule used: those of the cut, in FLOPs, unless others were given

The other axes of the mesh are the body's axes: rank (c, i) runs list c as rank i of the body's mesh. The pipeline's
axis may stand anywhere in the order of the whole mesh's axes. Such a program round-trips through JSON.

A step without a pipeline has one stage and one list, `RunBody 0`: all ranks run the body, at coordinate 0 of an axis
without a name (`one_stage`). Of a pipeline no rank runs the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.host_copies import on_host
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
from shardc.partition.cut import FORWARD_ONLY, GRAPHS, CutStep, StageBodies
from shardc.partition.step_epilogue import StepEpilogue
from shardc.schedule.build import build
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Dgrad, RunBody
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import Pipeline, Stage, StagePart

# What a file calls the fields; the epilogues have kept their first name there.
SAVED = ("body", "lists", "stages", "finishes", "bundles", "shared", "mesh", "axis", "costs")


@dataclass(frozen=True)
class StagedProgram:
    """`bundles` lists the values of each name. `shared` gives the types of the sums that several stages have."""

    body: Graph
    lists: RankLists
    stages: tuple[StageBodies, ...]
    epilogues: tuple[StepEpilogue, ...]
    bundles: Mapping[str, tuple[str, ...]]
    shared: Mapping[str, TensorType]
    mesh: Mesh
    axis: str
    costs: Costs

    def __post_init__(self) -> None:
        size, inner = self.mesh.size(self.axis) if self.axis else 1, self.body.mesh.world_size
        stage_count = len(self.lists.pipeline.stages)
        assert len(self.stages) == stage_count, f"graphs of {len(self.stages)} stages, of {stage_count}"
        ends = size if self.lists.pipeline.updates else 0
        assert len(self.epilogues) == ends, f"{len(self.epilogues)} ends of a step for axis '{self.axis}' of {size}"
        assert size == len(self.lists.ranks), f"{len(self.lists.ranks)} lists for axis '{self.axis}' of {size}"
        assert size * inner == self.mesh.world_size, f"mesh ({self.mesh}) is not {size} times ({self.body.mesh})"

    def __repr__(self) -> str:
        along = f" along {self.axis}" if self.axis else ""
        return f"StagedProgram({len(self.stages)} stages{along}, mesh {self.mesh})"

    @property
    def coordinate_range(self) -> range:
        """The coordinates on the pipeline's axis: a list each."""
        return range(len(self.lists.ranks))

    @property
    def inner(self) -> Mesh:
        """The mesh without the pipeline's axis: the body's, before any of its axes was split."""
        return mesh_without_axis(self.mesh, self.axis)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """A rank's coordinate on the pipeline's axis, and its rank in the body's mesh."""
        coordinate = self.mesh.coordinate(rank)
        c = coordinate.pop(self.axis, 0)
        return c, self.inner.rank(coordinate)

    def rank_of(self, c: int, i: int) -> int:
        """The rank of the whole mesh that runs list c as rank i of the body's mesh."""
        return self.mesh.rank({self.axis: c, **self.inner.coordinate(i)})

    def members(self, name: str) -> tuple[str, ...]:
        """The values that a name in the lists stands for."""
        return self.bundles.get(name, (name,))

    def held(self, rank: int) -> frozenset[str]:
        """The parameters and buffers that a coordinate's ranks hold."""
        return frozenset(name for stage in self.lists.stages_of(rank) for name in self.stages[stage].held)

    def graphs(self) -> Iterator[Graph]:
        """Every graph of every stage, and the end of each coordinate's step."""
        for stage in self.stages:
            yield from stage.graphs()
        for epilogue in self.epilogues:
            yield from (epilogue.norm, epilogue.update)

    @property
    def states_on_host(self) -> frozenset[str]:
        """The states that lie in the memory of the host between steps."""
        inputs = (pair for graph in self.graphs() for pair in zip(graph.inputs, graph.placeholders, strict=True))
        return frozenset(port.name for port, node in inputs if port.role == "state" and on_host(node))

    def transformed(self, change: Callable[[Graph], Graph]) -> StagedProgram:
        """The same lists over changed graphs, each of which is changed by itself."""
        changed = {graph: change(graph) for graph in dict.fromkeys(self.graphs())}
        epilogues = (replace(e, norm=changed[e.norm], update=changed[e.update]) for e in self.epilogues)
        return replace(
            self,
            body=changed.get(self.body, self.body),  # where it is what ranks run
            stages=tuple(stage.transformed(changed.__getitem__) for stage in self.stages),
            epilogues=tuple(epilogues),
        )

    def text(self, rank: int, *, comments: bool = True, fold: bool = False) -> str:
        """A coordinate's list, followed by every graph that it runs."""
        graphs: list[Graph] = []
        unused = {"backward"} if any(isinstance(i, Dgrad) for i in self.lists.ranks[rank]) else {"dgrad", "wgrad"}
        for stage in (self.stages[number] for number in self.lists.stages_of(rank)):
            graphs += [*stage.gathers.values(), *(graph for name, graph in stage.parts.items() if name not in unused)]
            graphs += [] if stage.reduce is None else [stage.reduce]
        for epilogue in self.epilogues[rank : rank + 1]:
            graphs += [epilogue.norm, epilogue.update] if epilogue.totals else [epilogue.update]
        texts = (print_graph(graph, comments=comments, fold=fold) for graph in graphs)
        return "\n".join([*self.list_text(rank), *texts])

    def list_text(self, rank: int) -> list[str]:
        """A coordinate's list, to be printed in front of its graphs: nothing where it is to run the body."""
        return [self.lists.text(rank)] if self.axis else []

    def to_plain(self) -> dict[str, Any]:
        return {
            "body": graph_to_plain(self.body),
            "lists": self.lists.to_plain(),
            "stages": [
                {name: graph_to_plain(graph) for name, graph in bodies.parts.items()}
                | {"gathers": {name: graph_to_plain(graph) for name, graph in bodies.gathers.items()}}
                | {"reduce": None if bodies.reduce is None else graph_to_plain(bodies.reduce)}
                for bodies in self.stages
            ],
            "finishes": [
                {"norm": graph_to_plain(f.norm), "update": graph_to_plain(f.update), "totals": list(f.totals)}
                for f in self.epilogues
            ],
            "bundles": {name: list(values) for name, values in self.bundles.items()},
            "shared": {name: str(type) for name, type in self.shared.items()},
            "mesh": mesh_to_plain(self.mesh),
            "axis": self.axis,
            "costs": self.costs.to_plain(),
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> StagedProgram:
        """Raises ShardcError, ValueError, KeyError or AssertionError for what `to_plain` does not write."""
        fields_known(data, SAVED)
        if data["axis"] not in mesh_from_plain(data["mesh"]).names:
            raise ValueError(f"a pipeline over {data['axis']!r}, which is no axis of its mesh")
        return cls(
            graph_from_plain(data["body"]),
            RankLists.from_plain(data["lists"]),
            tuple(map(_stage, listed(data["stages"]))),
            tuple(map(_epilogue, listed(data["finishes"]))),
            {name: texts_of(values) for name, values in data["bundles"].items()},
            {name: TensorType.parse(text) for name, text in data["shared"].items()},
            mesh_from_plain(data["mesh"]),
            text_of(data["axis"]),
            Costs.from_plain(data["costs"]),
        )


def _stage(data: Mapping[str, Any]) -> StageBodies:
    fields_known(data, (*GRAPHS, "gathers", "reduce"))
    return StageBodies(
        {name: graph_from_plain(data[name]) for name in (GRAPHS if data.keys() & {*GRAPHS[1:]} else FORWARD_ONLY)},
        gathers={name: graph_from_plain(graph) for name, graph in data["gathers"].items()},
        reduce=None if data["reduce"] is None else graph_from_plain(data["reduce"]),
    )


def _epilogue(data: Mapping[str, Any]) -> StepEpilogue:
    fields_known(data, ("norm", "update", "totals"))
    return StepEpilogue(graph_from_plain(data["norm"]), graph_from_plain(data["update"]), texts_of(data["totals"]))


def one_stage(body: Graph) -> StagedProgram:
    """A step without a pipeline: one stage, and one list for all ranks."""
    nothing = StagePart()
    pipeline = Pipeline((Stage(nothing, nothing, nothing),), updates=False)
    lists = RankLists(pipeline, body.microbatches, ((RunBody(0),),))
    return StagedProgram(body, lists, (StageBodies({"body": body}),), (), {}, {}, body.mesh, "", Costs(()))


def mesh_without_axis(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of the other axes."""
    return Mesh((name, size) for name, size in mesh.axes if name != axis)


def scheduled(
    staged: CutStep,
    schedule: str,
    virtual: int = 1,
    costs: Costs | None = None,
    memory: float | None = None,
    mesh: Mesh | None = None,
    axis: str = "pp",
    like: StagedProgram | None = None,
) -> StagedProgram:
    """A cut step with the proved lists of a schedule. `costs` default to those of the cut, in FLOPs.

    `mesh` is the mesh of all ranks. By default its axes are the pipeline's axis and then the axes of the body. The
    stages lie where those of `like` do, if that is given.
    """
    costs = costs or staged.costs
    if memory is not None:
        costs = replace(costs, memory=memory)
    orders = None if like is None else [like.lists.work(c) for c in like.coordinate_range]
    lists = build(staged.pipeline, schedule, staged.body.microbatches, virtual, costs, like=orders)
    return StagedProgram(
        staged.body,
        lists,
        staged.stages,
        tuple(staged.epilogue_of(lists.stages_of(c)) for c in range(len(lists.ranks)) if lists.pipeline.updates),
        staged.bundles,
        {
            microbatch_sum.name: type_of(microbatch_sum.total)
            for microbatch_sum in staged.sums
            if len(staged.sum_stages[microbatch_sum.name]) > 1
        },
        mesh or Mesh(((axis, len(lists.ranks)), *staged.body.mesh.axes)),
        axis,
        costs,
    )
