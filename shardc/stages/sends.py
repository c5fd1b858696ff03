"""What stages send each other, as a list: which value, from which stage to which, how many bytes, and why.

A value crosses to each coordinate of the pipeline's axis that has a stage which reads it, once a microbatch. Stages of
one coordinate pass values on in memory. So what is sent depends on where the step is cut, and on which stages
live together; a different order of work sends the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.ir.graph import Phase, info
from shardc.stages.instructions import Send
from shardc.stages.pipeline import Pipeline
from shardc.stages.program import Pipelined


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value on its way to one coordinate; `target` is the first of its stages that reads it."""

    value: str
    origin: int  # stages
    target: int
    bytes_per_rank: int  # sent by one rank, of one microbatch
    phase: Phase
    cause: str
    source: str
    times: int  # that it is sent in a step: once a microbatch

    @property
    def name(self) -> str:
        return f"{self.value}.send{self.target}"

    @property
    def bytes_per_step(self) -> int:
        """Sent by one rank of its stage in a step."""
        return self.bytes_per_rank * self.times

    @property
    def cuts(self) -> range:
        """The stages that begin on its way: it crosses into each."""
        return range(min(self.origin, self.target) + 1, max(self.origin, self.target) + 1)


def transfers(program: Pipelined, cause: str = "") -> list[Transfer]:
    """Every transfer of a microbatch, in the order of the lists."""
    lists, nodes = program.lists, {info(node).name: node for node in program.body.fx.nodes if node.op != "output"}
    found: list[Transfer] = []
    for c, listed in enumerate(lists.ranks):
        for i in listed:
            if not isinstance(i, Send) or i.microbatch != 0:
                continue
            origin, there = lists.pipeline.makers[i.value], lists.stages_of(i.peer)
            target = next(stage for stage in there if i.value in reads(lists.pipeline, stage))
            assert origin in lists.stages_of(c), f"{i.value} is sent by rank {c}, which does not make it"
            about = info(nodes[program.members(i.value)[0]])
            found.append(
                Transfer(i.value, origin, target, i.bytes, about.phase, cause, about.source, lists.microbatches)
            )
    return found


def reads(pipeline: Pipeline, stage: int) -> set[str]:
    """All that a stage's parts read."""
    parts = pipeline.stages[stage]
    return {name for part in (parts.forward, parts.dgrad, parts.wgrad) for name in part.reads}


def homes(program: Pipelined) -> dict[int, int]:
    """The coordinate of each stage."""
    return {stage: c for c in range(len(program.lists.ranks)) for stage in program.lists.stages_of(c)}


def sent(pipeline: Pipeline, home: Mapping[int, int]) -> int:
    """Bytes of one microbatch that cross between coordinates, all of them together, by one rank of each."""
    found: set[tuple[str, int]] = set()
    for stage in range(len(pipeline.stages)):
        for name in reads(pipeline, stage):
            maker = pipeline.makers.get(name)
            if maker is not None and home[maker] != home[stage]:
                found.add((name, home[stage]))
    return sum(pipeline.bytes[name] for name, _ in found)
