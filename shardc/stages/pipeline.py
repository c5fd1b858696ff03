"""What schedules, lists and proofs know of a model that was cut into stages: names and bytes, no graph.

A stage is three parts. Each reads values, makes values, and accumulates gradients over the microbatches:

    stage 1     reads           makes          accumulates
    forward     x1              x2, kept1
    dgrad       dx2, kept1      dx1, dkept1
    wgrad       kept1, dkept1                  grads1

A value has one maker and lives once a microbatch. Whoever reads it on another rank is sent it by its maker, once a rank
(to have it forwarded instead, let the stage between read it and make a copy under a new name). What no part makes
(the batch) is there from the start, and never freed; `results` (losses, new buffers) are there at the end.
Gradients that several stages accumulate under one name are those of tied weights: they are summed over those ranks.

What a stage `gathers` lives from a Gather to a Free, once for all microbatches in between: parameters that are stored
as shards. `params1` is read by forward and backward, `params1.f` and `params1.b` by one of them, and what backward is
not to gather anew is `params1.kept`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from shardc.ir.plain import listed, texts_of, whole_of
from shardc.stages.instructions import (
    COMPUTE,
    Backward,
    Compute,
    Dgrad,
    Forward,
    Gather,
    Instruction,
    Recv,
    Send,
    Wgrad,
)

Names = tuple[str, ...]
Value = tuple[str, int | None]  # a name and its microbatch; None for gathered parameters
PartName = Literal["forward", "backward", "dgrad", "wgrad"]
PARTS: tuple[PartName, ...] = ("forward", "dgrad", "wgrad")
PART_OF: dict[type[Compute], PartName] = {Forward: "forward", Backward: "backward", Dgrad: "dgrad", Wgrad: "wgrad"}


@dataclass(frozen=True)
class Part:
    """What one sub-graph of a stage does, seen from outside."""

    reads: Names = ()
    makes: Names = ()
    accumulates: Names = ()
    results: Names = ()


@dataclass(frozen=True)
class Stage:
    """`gathers` names what parts read and no part makes: gathered parameters; `kept` those of them that stay gathered
    while other stages run. `ordered`: each microbatch's forward starts from buffers that the one before it left, such
    as a batch norm's."""

    forward: Part
    dgrad: Part
    wgrad: Part
    gathers: Names = ()
    kept: Names = ()
    ordered: bool = False


@dataclass(frozen=True)
class Pipeline:
    """All stages in order, and the bytes of one microbatch's values (of gradients and parameters: of all).

    `updates`: the step ends with something that runs once, an optimizer above all; `clips`: which needs a sum over all
    ranks, as that of the squares of the gradients.
    """

    stages: tuple[Stage, ...]
    bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    updates: bool = True
    clips: bool = False

    def part(self, instruction: Compute) -> Part:
        return self._parts[instruction.stage][PART_OF[type(instruction)]]

    def parts(self, stage: int) -> Mapping[PartName, Part]:
        """All parts of a stage, and its backward in one."""
        return self._parts[stage]

    def effects(self, instruction: Instruction) -> tuple[list[Value], list[Value]]:
        """The values that an instruction reads on its rank, and those that it puts there."""
        if isinstance(instruction, COMPUTE):
            at, part = instruction.microbatch, self.part(instruction)
            reads: list[Value] = [(name, at) for name in part.reads if name in self.makers]
            reads += [(name, None) for name in part.reads if name in self.gathered]
            return reads, [(name, at) for name in part.makes]
        if isinstance(instruction, Send):
            return [(instruction.value, instruction.microbatch)], []
        if isinstance(instruction, Recv):
            return [], [(instruction.value, instruction.microbatch)]
        return [], [(name, None) for name in instruction.values] if isinstance(instruction, Gather) else []

    def value(self, name: str, microbatch: int) -> Value:
        """What a part that runs on a microbatch reads or makes under a name."""
        return name, None if name in self.gathered else microbatch

    @cached_property
    def gathered(self) -> dict[str, int]:
        """The stage that a gathered value is for."""
        return {name: at for at, stage in enumerate(self.stages) for name in stage.gathers}

    @cached_property
    def makers(self) -> dict[str, int]:
        """The stage that makes a value."""
        return {name: at for at, parts in enumerate(self._split) for part in parts for name in part.makes}

    @cached_property
    def accumulators(self) -> dict[str, tuple[int, ...]]:
        """The stages that accumulate under a name: more than one for tied weights."""
        found: dict[str, list[int]] = {}
        for at, parts in enumerate(self._split):
            for name in dict.fromkeys(name for part in parts for name in part.accumulates):
                found.setdefault(name, []).append(at)
        return {name: tuple(stages) for name, stages in found.items()}

    @cached_property
    def _split(self) -> list[tuple[Part, Part, Part]]:
        return [(stage.forward, stage.dgrad, stage.wgrad) for stage in self.stages]

    @cached_property
    def _parts(self) -> list[dict[PartName, Part]]:
        readers: dict[str, set[tuple[int, int]]] = {}
        for at, parts in enumerate(self._split):
            for which, part in enumerate(parts):
                for name in part.reads:
                    readers.setdefault(name, set()).add((at, which))
        found: list[dict[PartName, Part]] = []
        for at, (forward, dgrad, wgrad) in enumerate(self._split):
            inside = {name for name in dgrad.makes if readers.get(name, set()) == {(at, 2)}}
            found.append({"forward": forward, "backward": _both(dgrad, wgrad, inside), "dgrad": dgrad, "wgrad": wgrad})
        return found


def _both(dgrad: Part, wgrad: Part, inside: set[str]) -> Part:
    """Dgrad and wgrad as one part: what only passes between them does not show."""
    reads = dict.fromkeys(name for name in (*dgrad.reads, *wgrad.reads) if name not in dgrad.makes)
    makes = tuple(name for name in (*dgrad.makes, *wgrad.makes) if name not in inside)
    accumulates = dict.fromkeys(dgrad.accumulates + wgrad.accumulates)
    return Part(tuple(reads), makes, tuple(accumulates), dgrad.results + wgrad.results)


def chain(
    stages: int, crossing: int = 1, kept: int = 1, tied: bool = False, gathers: bool = False, clips: bool = False
) -> Pipeline:
    """A model whose stages only feed the next: what a schedule is judged on before there is a graph.

    `tied`: the last stage shares a weight with the first, as a language model's head does with its embedding.
    """
    made: list[Stage] = []
    for s in range(stages):
        first, last = s == 0, s == stages - 1
        shared = ("tied",) if tied and (first or last) else ()
        params = (f"params{s}",) if gathers else ()
        made.append(
            Stage(
                Part(
                    (f"x{s}", *params),
                    (f"kept{s}",) if last else (f"x{s + 1}", f"kept{s}"),
                    (),
                    ("loss",) if last else (),
                ),
                Part(
                    (f"kept{s}", *params) if last else (f"dx{s + 1}", f"kept{s}", *params),
                    (f"dkept{s}",) if first else (f"dx{s}", f"dkept{s}"),
                ),
                Part((f"kept{s}", f"dkept{s}"), (), (f"grads{s}", *shared)),
                params,
            )
        )
    sizes = {f"{name}{s}": crossing for s in range(1, stages) for name in ("x", "dx")}
    sizes |= {f"{name}{s}": kept for s in range(stages) for name in ("kept", "dkept", "grads", "params")}
    return Pipeline(tuple(made), sizes | {"tied": kept}, clips=clips)


# ---------------------------------------------------------------------- plain data
def pipeline_to_plain(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "stages": [asdict(stage) for stage in pipeline.stages],
        "bytes": dict(pipeline.bytes),
        "updates": pipeline.updates,
        "clips": pipeline.clips,
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
    return Pipeline(stages, sizes, _flag(data["updates"]), _flag(data["clips"]))


def _part(data: Mapping[str, Any]) -> Part:
    return Part(**{name: texts_of(names) for name, names in data.items()})


def _flag(data: Any) -> bool:
    if not isinstance(data, bool):
        raise ValueError(f"{str(data)[:40]!r} is neither true nor false")
    return data
