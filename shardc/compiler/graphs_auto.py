"""Whether steps are replayed from a CUDA graph under `launch(graphs="auto")`: where they are predicted shorter so.

    30.4 ms issued, 21.0 ms replayed       replayed
    30.4 ms issued, 29.6 ms replayed       issued: within the margin of 5 %

A replayed step does not wait for Python, and its collectives take what they take in graphs; the rest is as it is. What
it copies besides, feeds and results, is not predicted: on an H200 it was 0.3 to 2.1 % of steps.
"""

from __future__ import annotations

from typing import NamedTuple

from shardc.ir.graph import Graph
from shardc.ir.hardware import Hardware
from shardc.partition.prediction import predict
from shardc.partition.staged_program import StagedProgram

AUTO = "auto"
MARGIN = 0.05  # how much shorter a step has to be


class GraphsChoice(NamedTuple):
    """The predicted milliseconds of a step that Python issues, and of one that is replayed."""

    issued_ms: float
    replayed_ms: float

    @property
    def replayed(self) -> bool:
        return self.replayed_ms < (1 - MARGIN) * self.issued_ms

    def __str__(self) -> str:
        chosen, other = ("replayed", "issued") if self.replayed else ("issued", "replayed")
        ms = {"replayed": self.replayed_ms, "issued": self.issued_ms}
        return f"CUDA graphs: steps {chosen}, predicted {ms[chosen]:.2f} ms, {other} {ms[other]:.2f}"


def choose_graphs(staged: StagedProgram, reference: Graph, hardware: Hardware) -> GraphsChoice:
    """The choice for a step of these graphs. `reference` is the same step on one device."""
    issued, replayed = (predict(staged, reference, hardware, replayed=replayed) for replayed in (False, True))
    return GraphsChoice(issued.step_ms, replayed.step_ms)
