"""A pipelined program as `runtime.oracle.verify` compares it: its lists simulated, every value traced back to its rank.

When an output differs, every call of every stage is compared with its namesake on the single device, in the order in
which the lists run them. If none differs, the body is asked that the stages were cut from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, info, type_of
from shardc.ir.mesh import Mesh
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.oracle.report import Mismatch
from shardc.runtime.oracle.simulate_stages import Choose, first, simulate_stages
from shardc.runtime.oracle.verify import Body, Consumed, Namesakes, Returned


def in_order(seed: int | None) -> Choose:
    """Who goes next, of those that can: the first, or whoever a seed picks."""
    return first if seed is None else random.Random(seed).randrange


@dataclass(frozen=True)
class Stages:
    """All ranks of a pipelined program. `order` seeds the choice among the interleavings that its lists allow."""

    program: StagedProgram
    order: int | None = None

    @property
    def mesh(self) -> Mesh:
        return self.program.body.mesh

    @property
    def ranks(self) -> int:
        return self.program.mesh.world_size

    def run(
        self, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, returned: Returned
    ) -> dict[Port, torch.Tensor]:
        consumed = Consumed(self.program.body)
        named = {info(node).name: node for node in self.program.body.gradients.values()}

        def watch(_: int, at: int, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            known = named.get(info(node).name)
            if at < 0 and known is not None and type_of(known) == type_of(node):
                consumed(known, values)

        outputs = simulate_stages(
            self.program,
            inputs,
            dtype=dtype,
            choose=in_order(self.order),
            buffered=self.order is not None,
            returned=returned,
            observe=watch,
        )
        return consumed.found(inputs) | outputs

    def first_mismatch(
        self, reference: Graph, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype, floor: float
    ) -> Mismatch | None:
        """The first value that a stage makes wrong, with the ranks of the whole mesh that do."""
        graphs = [stage[part] for stage in self.program.stages for part in ("forward", "dgrad", "wgrad")]
        graphs += [graph for stage in self.program.stages for graph in stage.gathers.values()]
        graphs += [stage.reduce for stage in self.program.stages if stage.reduce is not None]
        graphs += [graph for finish in self.program.epilogues for graph in (finish.norm, finish.update)]
        names = {info(node).name for graph in graphs for node in graph.values()}
        namesakes = Namesakes.of(reference, inputs, dtype, floor, names)
        found: list[Mismatch] = []

        def compare(c: int, at: int, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
            if found:
                return
            once = at < 0 or len(namesakes.wanted.get(info(node).name, ())) == 1
            wrong = namesakes.differs(node, values, 0 if once else at, self.mesh)
            if wrong is not None:
                found.append(replace(wrong, ranks=tuple(self.program.rank_of(c, i) for i in wrong.ranks)))

        simulate_stages(self.program, inputs, dtype=dtype, choose=in_order(self.order), observe=compare)
        return found[0] if found else Body(self.program.body).first_mismatch(reference, inputs, dtype, floor)
