"""Cuts a program as another of the same model was cut, so that its stages read what the ranks of the other's hold.

    training    wte h.0 | h.1 ln_f head loss        cut by the costs of forward and backward
    evaluation  wte h.0 | h.1 ln_f head             cut by name, not anew: its balance could be another

A unit of the program lies where the other's calls of the same name lie, or else those of the same module. Stages are in
order, so of several that are possible it is the first that is no earlier than the unit before. A stage may get nothing:
of one that only computed the loss, a program without a loss has no call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardc.ir.graph import Graph, info
from shardc.partition.step_analysis import CutUnit, StepAnalysis


@dataclass(frozen=True)
class StageNames:
    """Where the forward calls of a program in stages lie, by their names and by their modules."""

    count: int
    by_name: Mapping[str, frozenset[int]]
    by_module: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, forwards: Iterable[Graph]) -> StageNames:
        """Those of the forward graphs of all stages, in order."""
        names: dict[str, set[int]] = {}
        modules: dict[str, set[int]] = {}
        count = 0
        for stage, graph in enumerate(forwards):
            count += 1
            for call in graph.calls():
                names.setdefault(info(call).name, set()).add(stage)
                modules.setdefault(info(call).fqn, set()).add(stage)
        return cls(count, *({key: frozenset(found) for key, found in of.items()} for of in (names, modules)))

    def starts(self, analysis: StepAnalysis) -> tuple[int, ...]:
        """The first unit of each stage; of one without units, that of the next."""
        stage_of: list[int] = []
        for unit in analysis.units:
            before = stage_of[-1] if stage_of else 0
            possible = [stage for stage in self._candidates(unit) if stage >= before]
            stage_of.append(min(possible, default=before))
        count = len(stage_of)
        return tuple(
            0 if not stage else next((i for i, other in enumerate(stage_of) if other >= stage), count)
            for stage in range(self.count)
        )

    def _candidates(self, unit: CutUnit) -> frozenset[int]:
        """The stages that a call of the unit lies in; a name that several have, of a replicable call, says nothing."""
        for call in unit.calls:
            stages = self.by_name.get(info(call).name, frozenset())
            if len(stages) == 1:
                return stages
        return frozenset[int]().union(*(self.by_module.get(info(call).fqn, frozenset()) for call in unit.calls))
