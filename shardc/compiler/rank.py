"""`program.rank(r)`: what one rank runs, to be read."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.text import print_graph
from shardc.partition.staged_program import Pipelined
from shardc.schedule.instructions import Instruction


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank of the mesh. Without a pipeline it runs the body, as all do, and its list is empty."""

    mesh: Mesh
    number: int
    body: Graph
    pipelined: Pipelined | None = None

    @classmethod
    def of(cls, mesh: Mesh, number: int, body: Graph, pipelined: Pipelined | None) -> Rank:
        """The rank of this number, if the mesh has it."""
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < mesh.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"there is no rank {number!r}: the mesh ({mesh}) has ranks 0 to {mesh.world_size - 1}"
            raise error("SC210", message, hint="name a rank of the mesh")
        return cls(mesh, number, body, pipelined)

    @property
    def coordinate(self) -> dict[str, int]:
        return self.mesh.coordinate(self.number)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of its pipeline that live here."""
        return () if self.pipelined is None else self.pipelined.lists.stages_of(self._c(self.pipelined))

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return () if self.pipelined is None else self.pipelined.lists.ranks[self._c(self.pipelined)]

    def _c(self, pipelined: Pipelined) -> int:
        return pipelined.coordinates(self.number)[0]

    def text(self, *, comments: bool = True) -> str:
        """Its instruction list and the graphs that this runs; or the body."""
        place = ", ".join(f"{axis}={at}" for axis, at in self.coordinate.items())
        head = f"# rank {self.number} of {self.mesh.world_size}: {place}\n"
        if self.pipelined is None:
            return head + print_graph(self.body, comments=comments)
        return head + self.pipelined.text(self._c(self.pipelined), comments=comments)

    def __str__(self) -> str:
        return self.text()
