"""The plan's `pipeline`: along which axis a step is cut into stages, where, and by which schedule they run.

    pipeline: {axis: pp, schedule: 1f1b, microbatches: 8}                          as many stages as the axis has ranks
    pipeline: {schedule: zb-v, microbatches: 8}                                    and two a rank, in a V
    pipeline: {schedule: interleaved, virtual: 2, split: [h.3, h.6, h.9], ...}     cut where these modules begin

What a plan leaves open is settled when it meets a mesh: `Pipelining.on`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from pydantic import (
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.mesh import Mesh
from shardc.plan.values import FrozenValue, bytes_text, read_bytes, read_count, source_of
from shardc.schedule import schedules


class Layout(NamedTuple):
    """The number of stages, and the number of stages on each rank."""

    stages: int
    virtual: int


class Pipelining(FrozenValue):
    """A step of `microbatches` in `stages` along `axis`; `virtual` counts the stages of one rank.

    `split` names the modules that begin a stage, in the order of forward; without, stages are cut to equal cost.
    `memory` is the most bytes of activations that a rank may hold: `auto` and `greedy` look for a schedule within it,
    under any other it is checked.
    """

    axis: str = "pp"
    schedule: str = "1f1b"
    microbatches: int
    stages: int | None = None
    virtual: int | None = None
    split: tuple[str, ...] = ()
    memory: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        form = "write pipeline: {axis: pp, schedule: 1f1b, microbatches: 8}"
        if isinstance(value, Pipelining):
            return value
        if not isinstance(value, Mapping):
            raise error("SC208", f"'pipeline' should be a mapping, not {value!r}", hint=form)
        if "microbatches" not in value:
            raise error("SC208", "'pipeline' does not say how many microbatches a step has", hint=form)
        return cast(Any, value)

    @field_validator("microbatches", "stages", "virtual", mode="before")
    @classmethod
    def _read_count(cls, value: Any, info: ValidationInfo) -> int | None:
        key = str(info.field_name)
        return None if value is None and key != "microbatches" else read_count(value, info, "pipeline", key)

    @field_validator("split", mode="before")
    @classmethod
    def _read_split(cls, value: Any, info: ValidationInfo) -> tuple[str, ...]:
        names: tuple[object, ...] = tuple(cast(Any, value)) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(name, str) for name in names):
            message = f"'pipeline.split' should be the modules that begin a stage, by name, not {value!r}"
            wrong = Diagnostic("SC208", message, hint="write split: [h.3, h.6], in the order of forward")
            raise ShardcError(source_of(info).locate(wrong, "pipeline", "split"))
        return cast(tuple[str, ...], names)

    @field_validator("memory", mode="before")
    @classmethod
    def _read_memory(cls, value: Any, info: ValidationInfo) -> int | None:
        try:
            return None if value is None else read_bytes(value)
        except ShardcError as wrong:
            raise ShardcError(*(source_of(info).locate(d, "pipeline", "memory") for d in wrong.diagnostics)) from None

    def located(self, diagnostic: Diagnostic, *keys: str) -> Diagnostic:
        """The diagnostic, at the line of the first of these keys that was written."""
        return self._written.source.locate(diagnostic, *self._path(keys))

    def place(self, *keys: str) -> str | None:
        """The line of the first of these keys that was written, or its own."""
        return self._written.source.origin(*self._path(keys))

    def _path(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        paths = [("pipeline", key) for key in keys]
        return next((path for path in paths if path in self._written.source.lines), ("pipeline",))

    def on(self, mesh: Mesh) -> Layout:
        """The stages, and how many of them each rank of the axis has.

        Schedules are looked up here, and not when the plan is read: one may be registered in between.
        """
        if self.schedule not in schedules.names():
            hint = did_you_mean(self.schedule, schedules.names(), "schedules")
            unknown = Diagnostic("SC220", f"there is no schedule named '{self.schedule}'", hint=hint)
            raise ShardcError(self.located(unknown, "schedule"))
        if self.axis not in mesh.names:
            message = f"the pipeline's axis '{self.axis}' is none of the mesh ({mesh})"
            add = ", ".join(filter(None, (f"{self.axis}=2", str(mesh))))
            like = next((name for name in mesh.names if name.startswith(("pp", "pipe", "stage"))), None)
            hint = f"write mesh: {add}" + (f", or pipeline: {{axis: {like}}}" if like else "")
            raise ShardcError(self.located(Diagnostic("SC201", message, hint=hint), "axis"))
        ranks = mesh.size(self.axis)
        stages = self.stages if self.stages is not None else len(self.split) + 1 if self.split else None
        virtual = self.virtual
        if virtual is None:
            divides = stages is not None and stages % ranks == 0
            virtual = stages // ranks if stages is not None and divides else schedules.default_virtual(self.schedule)
        if stages is None:
            stages = ranks * virtual
        if stages != ranks * virtual:
            stages_per_rank = "one stage" if virtual == 1 else f"{virtual} stages"
            message = f"{stages} stages do not go on {ranks} ranks of axis '{self.axis}' with {stages_per_rank} on each"
            hint = f"make it {ranks * virtual} stages, or virtual: N with stages = {ranks} x N"
            keys = ("virtual", "stages", "split")
            raise ShardcError(self.located(Diagnostic("SC220", message, hint=hint), *keys))
        return Layout(stages, virtual)

    def dumped(self) -> dict[str, object]:
        """As plain data, without what is at its default."""
        data = self.model_dump(exclude_defaults=True)
        if self.split:
            data["split"] = list(self.split)
        if self.memory is not None:
            data["memory"] = bytes_text(self.memory)
        return data
