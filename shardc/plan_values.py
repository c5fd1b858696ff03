"""The values that a plan is made of: annotations with their lines, bytes with units, storage and recompute.

Each reads what a user writes in its short form or its long one, and refuses the rest with the line it stands on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Placement

Annotations = dict[str, Annotation]
RecomputeMode = Literal["none", "full", "selective", "budget"]


@dataclass(frozen=True)
class Source:
    """Where a plan's values were written: a file with the line of each key, or one line of Python for all of them."""

    name: str | None = None
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])
    text: tuple[str, ...] = ()

    def origin(self, *path: str) -> str | None:
        line = self.lines.get(path)
        return self.name if line is None else f"{self.name}:{line}"

    def quote(self, *path: str) -> str | None:
        line = self.lines.get(path)
        return self.text[line - 1].strip() if line is not None and self.text else None

    def locate(self, diagnostic: Diagnostic, *path: str) -> Diagnostic:
        """The diagnostic, pointing at the key; text that it already quotes, with its caret, stays."""
        quoted = diagnostic.source_text or self.quote(*path)
        return replace(diagnostic, location=self.origin(*path), source_text=quoted)


class Storage(BaseModel):
    """Where parameters and optimizer state lie between steps; see passes/store.py.

    `zero` 1 and 2 shard the optimizer's state and its update over `axes`, 3 the parameters too. `params` says it for
    single ones, as a placement. `regather` false keeps what forward gathered for backward: for all, or by pattern.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    zero: Literal[0, 1, 2, 3] = 0
    axes: tuple[str, ...] = ()
    params: Annotations = {}
    regather: bool | dict[str, bool] = True

    @field_validator("axes", mode="before")
    @classmethod
    def _read_axes(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("params", mode="before")
    @classmethod
    def _read_params(cls, value: Any, info: ValidationInfo) -> Annotations:
        return read_annotations(value, info, ("storage", "params"), None)

    def dumped(self) -> dict[str, object]:
        """As plain data, without what is at its default."""
        data = self.model_dump(exclude_defaults=True, exclude={"params"})
        if "axes" in data:
            data["axes"] = list(self.axes)
        if self.params:
            data["params"] = {pattern: str(one.placement) for pattern, one in self.params.items()}
        return data


class Recomputing(BaseModel):
    """What backward computes again instead of keeping; see passes/recompute.py.

    `budget` is the most bytes of activations a rank may hold; under `collectives` communication is repeated too.
    In short: the mode alone, or the budget alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: RecomputeMode = "none"
    budget: int = 0
    collectives: bool = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Recomputing) or value == {}:
            return value
        said: object = {"mode": value} if isinstance(value, str) else value
        forms = "write full, selective, {budget: 20GiB}, or {mode: full, collectives: true}"
        if not isinstance(said, Mapping):
            raise error("SC208", f"'recompute' should be a mode or a budget, not {said!r}", hint=forms)
        read = dict(cast(Mapping[str, object], said))
        if "budget" in read:
            read = {"mode": "budget", **read, "budget": read_bytes(read["budget"])}
        mode, modes = read.get("mode"), get_args(RecomputeMode)
        if mode not in modes:
            hint = forms if mode is None else did_you_mean(str(mode), modes, "modes")
            raise error("SC208", "'recompute' has no mode" + (f" '{mode}'" if mode else ""), hint=hint)
        if (mode == "budget") != ("budget" in read):
            unfit = "lacks its bytes" if mode == "budget" else f"goes with no budget: '{mode}' knows none"
            raise error("SC208", f"'recompute: {mode}' {unfit}", hint=forms)
        return read

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        if self.mode == "budget":
            more: dict[str, object] = {"collectives": True} if self.collectives else {}
            return {"budget": bytes_text(self.budget), **more}
        return {"mode": self.mode, "collectives": True} if self.collectives else self.mode


def read_annotations(value: Any, info: ValidationInfo, path: tuple[str, ...], mesh: Mesh | None) -> Annotations:
    """A map from patterns to placements, each with the line it was written on; every wrong one is reported."""
    source, name = source_of(info), ".".join(path)
    if not isinstance(value, Mapping):
        hint = f'write {name}: {{"**.weight": "-, tp"}}'
        raise error("SC208", f"'{name}' maps patterns to placements", hint=hint)
    read: Annotations = {}
    problems: list[Diagnostic] = []
    for key, placement in cast(Mapping[object, object], value).items():
        pattern = str(key)
        if isinstance(placement, Annotation):
            read[pattern] = placement
            continue
        try:
            placed = Placement.of(placement, mesh=mesh)
        except ShardcError as wrong:
            for one in wrong.diagnostics:
                problems.append(source.locate(replace(one, tensor=pattern), *path, pattern))
            continue
        read[pattern] = Annotation(pattern, placed, source.origin(*path, pattern))
    if problems:
        raise ShardcError(*problems)
    return read


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_bytes(value: object) -> int:
    """Read 4096, "512 KiB", "2MiB", "1.5GB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if found is None or isinstance(value, bool) or found[2].upper() not in _UNITS:
        raise error("SC208", f"{value!r} is not a number of bytes", hint='write 4096, "512 KiB" or "2 MiB"')
    return round(float(found[1]) * _UNITS[found[2].upper()])


def bytes_text(size: int) -> str:
    """The largest binary unit that divides a size, so that reading it back is exact."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"


def source_of(info: ValidationInfo) -> Source:
    return info.context if isinstance(info.context, Source) else Source()
