"""The values that a plan is made of: annotations with their lines, bytes, storage, recompute and precision.

Each reads what a user writes in its short form or its long one, and refuses the rest with the line it stands on.
Longer than 400 lines: every key of a plan that is no map has its value here, of a screen at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast, get_args

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.mesh import Mesh
from shardc.ir.placement import P, Placement

Annotations = dict[str, Annotation]
RecomputeMode = Literal["none", "full", "selective", "budget"]
Nonfinite = Literal["ignore", "skip", "raise"]


def read_exponent(value: object) -> object:
    """YAML reads 1e-3, without a point, as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value


# Every number of a plan has a range, true is no number, and text is none.
Flag = Annotated[bool, Field(strict=True)]
Length = Annotated[float, BeforeValidator(read_exponent), Field(strict=True, gt=0, le=1e30, allow_inf_nan=False)]
Scale = Annotated[float, BeforeValidator(read_exponent), Field(strict=True, allow_inf_nan=False)]
Padded = Flag | Annotated[str, Field(strict=True, min_length=1)]  # true, or the name of the mask among the inputs
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Label = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Shift = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Interval = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
MOST = 2**16  # microbatches, stages
MOST_BYTES = 2**60


@dataclass(frozen=True)
class Source:
    """The source of a plan's values: a file with the line of each key, or one line of Python for all of them."""

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
    """Where parameters and optimizer state lie between steps; see passes/sharding/store.py.

    `zero` 1 and 2 shard the optimizer's state and its update over `axes`, 3 the parameters too; where parameters are
    computed with in fewer digits than they are stored in, 1 and 2 count those for state. `params` says it for
    single ones, as a placement. `regather` false keeps what forward gathered for backward: for all, or by pattern.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    zero: Literal[0, 1, 2, 3] = 0
    axes: tuple[str, ...] = ()
    params: Annotations = {}
    regather: Flag | dict[str, Flag] = True

    @field_validator("zero", mode="before")
    @classmethod
    def _read_zero(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool | float):
            wrong = Diagnostic("SC208", f"'storage.zero' should be 0, 1, 2 or 3, not {value!r}", hint="write zero: 1")
            raise ShardcError(source_of(info).locate(wrong, "storage", "zero"))
        return value

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
            data["params"] = {pattern: str(annotation.placement) for pattern, annotation in self.params.items()}
        return data


class Recomputing(BaseModel):
    """What backward computes again instead of keeping; see passes/memory/recompute.py.

    `budget` is the most bytes of activations a rank may hold; under `collectives` communication is repeated too.
    In short: the mode alone, or the budget alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: RecomputeMode = "none"
    budget: int = 0
    collectives: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Recomputing) or value == {}:
            return value
        options: object = {"mode": value} if isinstance(value, str) else value
        forms = "write full, selective, {budget: 20GiB}, or {mode: full, collectives: true}"
        if not isinstance(options, Mapping):
            raise error("SC208", f"'recompute' should be a mode or a budget, not {options!r}", hint=forms)
        fields = dict(cast(Mapping[str, object], options))
        if "budget" in fields:
            fields = {"mode": "budget", **fields, "budget": read_bytes(fields["budget"])}
        mode, modes = fields.get("mode"), get_args(RecomputeMode)
        if mode not in modes:
            hint = forms if mode is None else did_you_mean(str(mode), modes, "modes")
            raise error("SC208", "'recompute' has no mode" + (f" '{mode}'" if mode else ""), hint=hint)
        if (mode == "budget") != ("budget" in fields):
            problem = "lacks its bytes" if mode == "budget" else f"goes with no budget: '{mode}' knows none"
            raise error("SC208", f"'recompute: {mode}' {problem}", hint=forms)
        return fields

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        if self.mode == "budget":
            flags: dict[str, object] = {"collectives": True} if self.collectives else {}
            return {"budget": bytes_text(self.budget), **flags}
        return {"mode": self.mode, "collectives": True} if self.collectives else self.mode


@dataclass(frozen=True)
class Written:
    """The location of a key of a plan. All locations compare equal."""

    source: Source = field(default=Source(), compare=False)


class FrozenValue(BaseModel):
    """A value of a plan with keys of its own, that knows where it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    _written: Written = PrivateAttr(default=Written())

    def model_post_init(self, context: Any, /) -> None:
        if isinstance(context, Source):
            self._written = Written(context)


class LossOver(FrozenValue):
    """What the loss of a step is the mean over: its microbatches, or their `tokens`; see
    shardc/frontend/token_weights.py.

    Tokens are the elements of that input of the batch which are not `ignore`, without the first `shift` positions.
    """

    tokens: str | None = None
    ignore: Label = -100
    shift: Shift = 0

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, LossOver) or value in ({}, "mean"):
            return {} if value == "mean" else value
        forms = "write mean, or {tokens: labels}; with ignore: -100 and shift: 0, if they are others"
        if not isinstance(value, Mapping) or not isinstance(cast(Mapping[str, object], value).get("tokens"), str):
            raise error(
                "SC208", f"'loss' should be mean, or weighted by the tokens of an input, not {value!r}", hint=forms
            )
        fields = dict(cast(Mapping[str, object], value))
        keys = ("tokens", "ignore", "shift")
        if unknown := [key for key in fields if key not in keys]:
            raise error(
                "SC208", f"'loss' has no key '{unknown[0]}'", hint=did_you_mean(unknown[0], keys, "keys of loss")
            )
        return fields

    def dumped(self) -> dict[str, object]:
        """As plain data, without what is at its default."""
        return self.model_dump(exclude_defaults=True)

    def located(self, diagnostic: Diagnostic) -> Diagnostic:
        """The diagnostic, pointing at the key."""
        return self._written.source.locate(diagnostic, "loss")


class Data(FrozenValue):
    """What a rank is given of a step's batch: the whole of it, or the part of its data coordinate; see
    shardc/runtime/execute/data_parts.py. In short: whole, or per_rank."""

    per_rank: bool = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Data) or value == {}:
            return value
        if value not in ("whole", "per_rank"):
            hint = "write per_rank where each rank loads its own part of a batch, or leave the key out"
            raise error("SC208", f"'data' should be whole or per_rank, not {value!r}", hint=hint)
        return {"per_rank": value == "per_rank"}

    def dumped(self) -> str:
        return "per_rank" if self.per_rank else "whole"

    def located(self, diagnostic: Diagnostic) -> Diagnostic:
        """The diagnostic, pointing at the key."""
        return self._written.source.locate(diagnostic, "data")


class Bucketing(BaseModel):
    """Up to how many bytes of collectives travel as one; see passes/communication/bucket.py. 0: each by itself.

    None, the default: as many as the plan's hardware says. In short: true, which means that, false, or the bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Bucketing) or value == {}:
            return value
        size = cast(Mapping[str, object], value).get("size") if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and (
            unknown := [key for key in cast(Mapping[str, object], value) if key != "size"]
        ):
            hint = did_you_mean(str(unknown[0]), ["size"], "keys of bucket")
            raise error("SC208", f"'bucket' has no key '{unknown[0]}'", hint=hint)
        if isinstance(size, bool):
            return {"size": None if size else 0}
        if not isinstance(size, int | str):
            raise error(
                "SC208", f"'bucket' should be bytes, not {size!r}", hint="write bucket: true, or bucket: 25 MiB"
            )
        return {"size": read_bytes(size)}

    def dumped(self) -> object:
        """As plain data, in its short form."""
        return True if self.size is None else bytes_text(self.size) if self.size else False


DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


FP8_DTYPES: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MOST_HISTORY = 4096


class Linear8(FrozenValue):
    """How products with weights are made of 8-bit floats; see shardc/passes/normalize/quantize.py.

    `scale` is one a tensor or one a row, `gradients` the format of gradients; `history` is of how many steps before
    the largest elements of activations and gradients are, 0 for those of this step. `keep` are patterns over modules
    whose products stay wide. In short: fp8.
    """

    scale: Literal["tensor", "row"] = "tensor"
    gradients: Literal["e5m2", "e4m3"] = "e5m2"
    history: int = 0
    keep: tuple[Annotation, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Linear8):
            return value
        if value == "fp8":
            return {}
        if not isinstance(value, Mapping):
            hint = "write linear: fp8, or linear: {scale: row, keep: [...]}"
            raise error("SC208", f"'precision' has no '{value}' to make linear products in", hint=hint)
        fields = dict(cast(Mapping[str, Any], value))
        if unknown := [key for key in fields if key not in cls.model_fields]:
            hint = did_you_mean(str(unknown[0]), cls.model_fields, "keys of linear")
            raise error("SC208", f"'linear' has no key '{unknown[0]}'", hint=hint)
        for key, choices in {"scale": ("tensor", "row"), "gradients": ("e5m2", "e4m3")}.items():
            if fields.get(key, choices[0]) not in choices:
                message = f"'{key}' of linear should be {' or '.join(choices)}, not {fields[key]!r}"
                raise error("SC208", message, hint=did_you_mean(str(fields[key]), choices, "choices"))
        history = fields.get("history", 0)
        if type(history) is not int or not 0 <= history <= MOST_HISTORY:
            message = f"'history' of linear should be a number of steps from 0 to {MOST_HISTORY}, not {history!r}"
            raise error("SC208", message, hint="write linear: {history: 16}")
        if history and fields.get("scale") == "row":
            message = "'history' of linear is of a whole tensor: rows of one step are not those of the next"
            raise error("SC208", message, hint="leave out 'history', or 'scale: row'")
        return {**fields, "keep": _patterns(fields.get("keep", ()), info, "precision", "linear", "keep")}

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        data: dict[str, object] = self.model_dump(exclude_defaults=True, exclude={"keep"})
        if self.keep:
            data["keep"] = [annotation.pattern for annotation in self.keep]
        return data or "fp8"


def _patterns(value: Any, info: ValidationInfo, *path: str) -> tuple[Annotation, ...]:
    patterns: list[object] = list(value) if isinstance(value, (list, tuple)) else [value]
    origin = source_of(info).origin(*path)
    return tuple(
        pattern if isinstance(pattern, Annotation) else Annotation(str(pattern), P(), origin) for pattern in patterns
    )


class Dtypes(BaseModel):
    """What a step is computed in, what parameters are stored in, gradients reduced in; see
    shardc/frontend/precision.py.

    `keep` are patterns over modules, parameters and inputs that stay in `master`. float16 starts with `loss_scale`,
    which doubles after `growth_interval` steps without an overflow. `linear` says that products with weights are of
    8-bit floats. In short: `compute` alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    compute: str
    linear: Linear8 | None = None
    master: str = "fp32"
    reduce: str = "fp32"
    keep: tuple[Annotation, ...] = ()
    loss_scale: Scale = 2.0**16
    growth_interval: Interval = 2000

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, Dtypes):
            return value
        options: object = value if isinstance(value, Mapping) else {"compute": value}
        fields = dict(cast(Mapping[str, object], options))
        if "linear" in fields:
            fields.setdefault("compute", "bf16")
        if "compute" not in fields:
            hint = "write precision: bf16, or precision: {compute: bf16, master: fp32}"
            raise error("SC208", "'precision' does not say what to compute in", hint=hint)
        return fields

    @field_validator("compute", "master", "reduce", mode="before")
    @classmethod
    def _read_dtype(cls, value: Any, info: ValidationInfo) -> str:
        # A torch.dtype, or its name, is as good as ours.
        names = {str(dtype): name for name, dtype in DTYPES.items()}
        name = names.get(str(value), names.get(f"torch.{value}", str(value)))
        if name not in DTYPES:
            message = f"'precision' has no dtype '{value}' to {info.field_name} in"
            raise error("SC208", message, hint=did_you_mean(name, DTYPES, "dtypes"))
        return name

    @field_validator("keep", mode="before")
    @classmethod
    def _read_keep(cls, value: Any, info: ValidationInfo) -> tuple[Annotation, ...]:
        return _patterns(value, info, "precision", "keep")

    @model_validator(mode="after")
    def _check(self) -> Dtypes:
        scaling = self.model_fields_set & {"loss_scale", "growth_interval"}
        if self.master != "fp32" and (self.master != self.compute or self.master == "fp16"):
            message = f"parameters in {self.master} cannot be updated while {self.compute} is computed in"
            raise error("SC208", message, hint="write master: fp32; bf16 alone may do with master: bf16")
        if self.reduce not in ("fp32", self.compute):
            hint = f"write reduce: fp32, or reduce: {self.compute}, which is what gradients are made in"
            raise error("SC208", f"gradients made in {self.compute} cannot be reduced in {self.reduce}", hint=hint)
        if scaling and self.compute != "fp16":
            hint = "leave it out: its exponents reach as far as those of fp32"
            raise error("SC208", f"{self.compute} needs no {min(scaling)}", hint=hint)
        if not 1 <= self.loss_scale <= 2**32 or math.frexp(self.loss_scale)[0] != 0.5:
            hint = f"write loss_scale: {2 ** round(math.log2(min(max(self.loss_scale, 1), 2**32)))}"
            raise error("SC208", f"the loss_scale {self.loss_scale:g} is no power of two from 1 to 2**32", hint=hint)
        return self

    def dumped(self) -> object:
        """As plain data, in its short form if it has one."""
        data = self.model_dump(exclude_defaults=True, exclude={"keep", "linear"})
        if self.linear is not None:
            data["linear"] = self.linear.dumped()
        if self.keep:
            data["keep"] = [annotation.pattern for annotation in self.keep]
        return self.compute if data.keys() == {"compute"} else data


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
            for diagnostic in wrong.diagnostics:
                problems.append(source.locate(replace(diagnostic, tensor=pattern), *path, pattern))
            continue
        read[pattern] = Annotation(pattern, placed, source.origin(*path, pattern))
    if problems:
        raise ShardcError(*problems)
    return read


def read_count(value: object, info: ValidationInfo, *path: str) -> int:
    """Read a whole number from 1 to MOST. YAML's true is not accepted."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        upper_bound = f" to {MOST}" if isinstance(value, int) and value > MOST else ""
        message = f"'{'.'.join(path)}' should be a whole number from 1{upper_bound}, not {value!r}"
        wrong = Diagnostic("SC208", message, hint=f"write {path[-1]}: 4, say")
        raise ShardcError(source_of(info).locate(wrong, *path))
    return value


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_bytes(value: object) -> int:
    """Read 4096, "512 KiB", "2MiB", "1.5GB"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or isinstance(value, bool) or match[2].upper() not in _UNITS:
        raise error("SC208", f"{value!r} is not a number of bytes", hint='write 4096, "512 KiB" or "2 MiB"')
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > MOST_BYTES:
        raise error("SC208", f"{match[0].strip()[:40]} is more bytes than there are", hint="a rank has some GiB")
    return round(size)


def bytes_text(size: int) -> str:
    """The largest binary unit that divides a size, so that reading it back is exact."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"


def source_of(info: ValidationInfo) -> Source:
    return info.context if isinstance(info.context, Source) else Source()
