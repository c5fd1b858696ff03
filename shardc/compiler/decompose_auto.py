"""Whether products are decomposed where a plan says `overlap: {decompose: auto}`: where a step is predicted faster so.

    48.7 ms whole, 43.1 ms piece by piece       decomposed
    48.7 ms whole, 48.2 ms piece by piece       whole: within the margin of 2 %, which a prediction does not tell apart

The step is finished both ways, from the same graphs, and predicted on the plan's hardware. A program without a product
to decompose is finished once. Products stay whole where devices do not run them piece by piece
(`runtime.execute.decomposed_products`): on hardware that is no GPU, in groups that span hosts, and of float64. So do
those of evaluations, of programs with `symbols`, whose sizes a prediction would need, and where the peak of memory
would rise by more than 5 %. What compute would wait less for the host does not count as saved: how long torch takes to
issue a decomposed product is in no table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from shardc.cost.prediction import Prediction
from shardc.ir.graph import Graph, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.decomposed import DECOMPOSED
from shardc.ir.schema import given
from shardc.partition.prediction import predict
from shardc.partition.staged_program import StagedProgram
from shardc.passes.communication.decompose import Decompose

MARGIN = 0.02  # how much shorter a step has to be
MORE_MEMORY = 0.05  # how much higher its peak may be
WORDS = {True: "piece by piece", False: "whole"}


class DecomposeChoice(NamedTuple):
    """What was chosen, and the predicted milliseconds of a step with whole products and with decomposed ones."""

    decomposed: bool
    whole_ms: float
    decomposed_ms: float

    def __str__(self) -> str:
        chosen, other = self.whole_ms, self.decomposed_ms
        chosen, other = (other, chosen) if self.decomposed else (chosen, other)
        off = "; off by overlap: {decompose: false}" if self.decomposed else ""
        said = f"predicted {chosen:.2f} ms a step, {WORDS[not self.decomposed]} {other:.2f}"
        return f"products and their collectives: {WORDS[self.decomposed]}, {said}{off}"


def can_decompose(staged: StagedProgram, hardware: Hardware, mesh: Mesh) -> bool:
    """Whether products would run piece by piece, all of them: with `auto` there is something to choose."""
    if hardware.device != "gpu" or staged.body.is_forward_only:
        return False
    calls = [(graph, call) for graph in _decomposed(staged.graphs()) for call in graph.calls()]
    calls = [(graph, call) for graph, call in calls if call.target in DECOMPOSED]
    for graph, call in calls:
        args = given(call)
        _, *outer = hardware.group_of(mesh, graph.mesh.resolve(args["axes"])).extents
        if type_of(args["x"]).dtype == torch.float64 or any(extent > 1 for extent in outer):
            return False
    return bool(calls)


def _decomposed(graphs: Iterable[Graph]) -> Iterable[Graph]:
    return (Decompose(True).run(graph) for graph in graphs)


def choose(whole: StagedProgram, decomposed: StagedProgram, reference: Graph, hardware: Hardware) -> DecomposeChoice:
    """The choice between two finished steps. `reference` is that of both."""
    before, after = (predict(step, reference, hardware) for step in (whole, decomposed))
    return DecomposeChoice(pays(before, after), before.step_ms, after.step_ms)


def pays(before: Prediction, after: Prediction) -> bool:
    """Whether a step is shorter than another by more than the margin, what the host takes left out, and fits."""
    saved, saved_by_host = before.step_ms - after.step_ms, before.idle_ms - after.idle_ms
    faster = min(saved, saved - saved_by_host) > MARGIN * before.step_ms
    return faster and after.peak_bytes <= (1 + MORE_MEMORY) * before.peak_bytes
