"""A model cut into stages, as schedules, lists and proofs see it: names and bytes of values, without graphs.

A stage has three parts. Each part reads values, makes values, and accumulates gradients over the microbatches:

    stage 1     reads           makes          accumulates
    forward     x1              x2, kept1
    dgrad       dx2, kept1      dx1, dkept1
    wgrad       kept1, dkept1                  grads1

A value has one producer and exists once for each microbatch. The producer's rank sends it once to every other rank that
reads it. (To relay a value through a stage in between, let that stage read it and make a copy under a new name.)
Values that no part makes are the batch: they exist from the start and are never freed. `results` (losses, new buffers)
exist at the end. Gradients that several stages accumulate under one name belong to tied weights: they are summed over
the ranks of those stages.

`gathers` names parameters that are stored as shards. Their gathered values live from a Gather to a Free, for all
microbatches in between. `params1` is read by forward and backward, `params1.f` by forward only, `params1.b` by backward
only. `params1.kept` stays gathered until backward, which does not gather it a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from shardc.ir.plain import listed, texts_of, whole_of
from shardc.schedule.instructions import (
    COMPUTE,
    Backward,
    Compute,
    Dgrad,
    Forward,
    Gather,
    Instruction,
    Recv,
    RunBody,
    Send,
    Wgrad,
)

Names = tuple[str, ...]
ValueKey = tuple[str, int | None]  # a name and its microbatch; None for gathered parameters
PartName = Literal["forward", "backward", "dgrad", "wgrad", "body"]
PARTS: tuple[PartName, ...] = ("forward", "dgrad", "wgrad")
PART_OF: dict[type[Compute | RunBody], PartName] = {
    Forward: "forward",
    Backward: "backward",
    Dgrad: "dgrad",
    Wgrad: "wgrad",
    RunBody: "body",  # of a step in one stage, the only one
}


@dataclass(frozen=True)
class StagePart:
    """The interface of one subgraph of a stage."""

    reads: Names = ()
    makes: Names = ()
    accumulates: Names = ()
    results: Names = ()


@dataclass(frozen=True)
class Stage:
    """`gathers` names the gathered parameters that the parts read. `kept` names those of them that stay gathered while
    other stages run. `ordered`: each microbatch's forward reads buffers that the previous microbatch's forward wrote,
    such as a batch norm's."""

    forward: StagePart
    dgrad: StagePart
    wgrad: StagePart
    gathers: Names = ()
    kept: Names = ()
    ordered: bool = False


@dataclass(frozen=True)
class Pipeline:
    """All stages in order, and the bytes of each value: of one microbatch, or in total for gradients and parameters.

    `updates`: the step ends with an epilogue that runs once, such as an optimizer. `clips`: the epilogue needs a sum
    over all ranks, such as the squared norm of the gradients. `trains`: stages have a backward; those of a program for
    evaluation have their forward alone.
    """

    stages: tuple[Stage, ...]
    bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    updates: bool = True
    clips: bool = False
    trains: bool = True

    def part(self, instruction: Compute) -> StagePart:
        return self._parts_by_name[instruction.stage][PART_OF[type(instruction)]]

    def parts(self, stage: int) -> Mapping[PartName, StagePart]:
        """All parts of a stage, and its backward in one."""
        return self._parts_by_name[stage]

    def effects(self, instruction: Instruction) -> tuple[list[ValueKey], list[ValueKey]]:
        """The values that an instruction reads on its rank, and those that it puts there."""
        if isinstance(instruction, COMPUTE):
            microbatch, part = instruction.microbatch, self.part(instruction)
            reads: list[ValueKey] = [(name, microbatch) for name in part.reads if name in self.producers]
            reads += [(name, None) for name in part.reads if name in self.gather_stages]
            return reads, [(name, microbatch) for name in part.makes]
        if isinstance(instruction, Send):
            return [(instruction.value, instruction.microbatch)], []
        if isinstance(instruction, Recv):
            return [], [(instruction.value, instruction.microbatch)]
        return [], [(name, None) for name in instruction.values] if isinstance(instruction, Gather) else []

    def value_key(self, name: str, microbatch: int) -> ValueKey:
        """The key of a value that a part reads or makes under this name when it runs on a microbatch."""
        return name, None if name in self.gather_stages else microbatch

    @cached_property
    def gather_stages(self) -> dict[str, int]:
        """By gathered value: the stage that reads it."""
        return {name: index for index, stage in enumerate(self.stages) for name in stage.gathers}

    @cached_property
    def producers(self) -> dict[str, int]:
        """By value: the stage that makes it."""
        return {name: index for index, parts in enumerate(self._stage_parts) for part in parts for name in part.makes}

    @cached_property
    def accumulators(self) -> dict[str, tuple[int, ...]]:
        """By name of a gradient: the stages that accumulate it. Tied weights have more than one."""
        stages_of: dict[str, list[int]] = {}
        for index, parts in enumerate(self._stage_parts):
            for name in dict.fromkeys(name for part in parts for name in part.accumulates):
                stages_of.setdefault(name, []).append(index)
        return {name: tuple(stages) for name, stages in stages_of.items()}

    @cached_property
    def _stage_parts(self) -> list[tuple[StagePart, StagePart, StagePart]]:
        return [(stage.forward, stage.dgrad, stage.wgrad) for stage in self.stages]

    @cached_property
    def _parts_by_name(self) -> list[dict[PartName, StagePart]]:
        readers: dict[str, set[tuple[int, int]]] = {}
        for index, parts in enumerate(self._stage_parts):
            for which, part in enumerate(parts):
                for name in part.reads:
                    readers.setdefault(name, set()).add((index, which))
        tables: list[dict[PartName, StagePart]] = []
        for index, (forward, dgrad, wgrad) in enumerate(self._stage_parts):
            internal = {name for name in dgrad.makes if readers.get(name, set()) == {(index, 2)}}
            tables.append(
                {
                    "forward": forward,
                    "backward": _whole_backward(dgrad, wgrad, internal),
                    "dgrad": dgrad,
                    "wgrad": wgrad,
                }
            )
        return tables


def _whole_backward(dgrad: StagePart, wgrad: StagePart, internal: set[str]) -> StagePart:
    """Dgrad and wgrad as one part. Values that only pass between them (`internal`) are left out."""
    reads = dict.fromkeys(name for name in (*dgrad.reads, *wgrad.reads) if name not in dgrad.makes)
    makes = tuple(name for name in (*dgrad.makes, *wgrad.makes) if name not in internal)
    accumulates = dict.fromkeys(dgrad.accumulates + wgrad.accumulates)
    return StagePart(tuple(reads), makes, tuple(accumulates), dgrad.results + wgrad.results)


def chain_pipeline(
    stages: int, crossing: int = 1, kept: int = 1, tied: bool = False, gathers: bool = False, clips: bool = False
) -> Pipeline:
    """A model in which each stage feeds only the next. Searches rank schedules on it before a graph exists.

    `tied`: the last stage shares a weight with the first, as a language model's head does with its embedding.
    """
    chain_stages: list[Stage] = []
    for index in range(stages):
        first, last = index == 0, index == stages - 1
        shared = ("tied",) if tied and (first or last) else ()
        params = (f"params{index}",) if gathers else ()
        chain_stages.append(
            Stage(
                StagePart(
                    (f"x{index}", *params),
                    (f"kept{index}",) if last else (f"x{index + 1}", f"kept{index}"),
                    (),
                    ("loss",) if last else (),
                ),
                StagePart(
                    (f"kept{index}", *params) if last else (f"dx{index + 1}", f"kept{index}", *params),
                    (f"dkept{index}",) if first else (f"dx{index}", f"dkept{index}"),
                ),
                StagePart((f"kept{index}", f"dkept{index}"), (), (f"grads{index}", *shared)),
                params,
            )
        )
    sizes = {f"{name}{s}": crossing for s in range(1, stages) for name in ("x", "dx")}
    sizes |= {f"{name}{s}": kept for s in range(stages) for name in ("kept", "dkept", "grads", "params")}
    return Pipeline(tuple(chain_stages), sizes | {"tied": kept}, clips=clips)


# ---------------------------------------------------------------------- plain data
def pipeline_to_plain(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "stages": [asdict(stage) for stage in pipeline.stages],
        "bytes": dict(pipeline.bytes),
        "updates": pipeline.updates,
        "clips": pipeline.clips,
        **({} if pipeline.trains else {"trains": False}),
    }


def pipeline_from_plain(data: Mapping[str, Any]) -> Pipeline:
    """ValueError, KeyError for what `pipeline_to_plain` does not write."""
    stages = tuple(
        Stage(
            **{part: _part(s[part]) for part in PARTS},
            gathers=texts_of(s["gathers"]),
            kept=texts_of(s["kept"]),
            ordered=_flag(s["ordered"]),
        )
        for s in listed(data["stages"])
    )
    sizes = {name: whole_of(size) for name, size in data["bytes"].items()}
    return Pipeline(stages, sizes, _flag(data["updates"]), _flag(data["clips"]), _flag(data.get("trains", True)))


def _part(data: Mapping[str, Any]) -> StagePart:
    return StagePart(**{name: texts_of(names) for name, names in data.items()})


def _flag(data: Any) -> bool:
    if not isinstance(data, bool):
        raise ValueError(f"{str(data)[:40]!r} is neither true nor false")
    return data
