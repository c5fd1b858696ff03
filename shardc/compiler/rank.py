"""`program.rank(r)`: what one rank runs, to be read."""

from __future__ import annotations

from dataclasses import dataclass

from shardc.ir.diagnostic import error
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import Instruction


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank of the mesh, with the stages and instructions of its coordinate on the pipeline's axis."""

    number: int
    program: StagedProgram

    @classmethod
    def of(cls, number: int, program: StagedProgram) -> Rank:
        """The rank of this number, if the mesh has it."""
        mesh = program.mesh
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < mesh.world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"there is no rank {number!r}: the mesh ({mesh}) has ranks 0 to {mesh.world_size - 1}"
            raise error("SC210", message, hint="name a rank of the mesh")
        return cls(number, program)

    def __repr__(self) -> str:
        coordinate = ", ".join(f"{axis}={index}" for axis, index in self.coordinate.items())
        return f"Rank({self.number}: {coordinate}; {len(self.instructions)} instructions)"

    @property
    def coordinate(self) -> dict[str, int]:
        return self.program.mesh.coordinate(self.number)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that live here."""
        return self.program.lists.stages_of(self._c)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.program.lists.ranks[self._c]

    @property
    def _c(self) -> int:
        return self.program.coordinates(self.number)[0]

    def text(self, *, comments: bool = True) -> str:
        """Its instruction list and the graphs that this runs; or the body."""
        coordinate = ", ".join(f"{axis}={index}" for axis, index in self.coordinate.items())
        head = f"# rank {self.number} of {self.program.mesh.world_size}: {coordinate}\n"
        return head + self.program.text(self._c, comments=comments)

    def __str__(self) -> str:
        return self.text()
