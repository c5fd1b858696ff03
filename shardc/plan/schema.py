"""A plan says how a model that one does not own is placed: patterns over names, and placements, in Python or YAML.

    mesh: dp=2, tp=2
    params:
      "**.attn.c_attn.weight": "-, 3*tp"
    inputs:
      input_ids: "dp, -"

Every annotation remembers where it was written, because every diagnostic that it leads to cites that line. A key that
no one implements does not exist: an unknown one is an error. Longer than 400 lines: it is the one list of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator

from shardc.ir.annotation import KINDS, Annotation, match
from shardc.ir.caller import caller
from shardc.ir.diagnostic import Diagnostic, ShardcError, did_you_mean, error
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.plan.clipping import Clipping
from shardc.plan.context import Context
from shardc.plan.experts import Experts
from shardc.plan.fuse import Fusing, says_something
from shardc.plan.hardware import HardwareChoice
from shardc.plan.offload import Offloading
from shardc.plan.overlap import Overlapping
from shardc.plan.packaged import PREFIX, plan_path
from shardc.plan.pipeline import Pipelining
from shardc.plan.symbols import Symbols
from shardc.plan.values import (
    Annotations,
    Bucketing,
    Data,
    Dtypes,
    Flag,
    LossOver,
    Nonfinite,
    Padded,
    Recomputing,
    Seed,
    Source,
    Storage,
    bytes_text,
    read_annotations,
    read_bytes,
    read_count,
    source_of,
)

Kind = Literal["params", "inputs", "activations", "outputs"]
TOTAL = "total"
SHOWN = 3  # annotations of a kind, in a plan's repr

__all__ = ["Annotation", "Kind", "Plan", "Storage", "bytes_text", "match", "read_bytes"]


LARGEST = 1_000_000  # values of a plan, aliases written out
TOO_DEEP = "the plan is nested too deeply"


class Plan(BaseModel):
    """What the user asks for. Build one with `Plan.of`, `Plan.load`, `Plan.from_dict` or `Plan.from_hf`.

    The four maps go from a pattern to its annotation. `budget` is the most bytes a rank may send in a step, an axis or
    in `total`; over it, compiling fails. `accumulate` splits a step's batch into so many microbatches, and its loss is
    their mean, unless `loss` weights them by tokens. Under `pad` a smaller batch is padded to a shape compiled for.
    `hardware` is the machine that passes weigh their choices for. `bucket` is up to how many bytes of collectives
    travel as one: by default, and if true, what the hardware says, 25 MiB; if false, and by default of a plan with
    `symbols`, each travels alone. `align: false` leaves 16-bit products of odd sizes as they are; else they are padded
    where that is faster. `overlap: false` leaves calls in the order of autograd; else compute moves behind collectives.
    `fuse` is on where the plan runs on GPUs, unless it says true or false.
    `data` says what ranks are given of a step's batch: all of it, or `per_rank` the part of their data coordinate.
    `nonfinite` says what becomes of a step with a gradient that is no number: by default float16 skips it, and all else
    does not look. Under `strict` whatever could not be honoured is an error. `symbols` names the extents of a batch
    that need not be fixed: see shardc/plan/symbols.py.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    mesh: Mesh | None = None
    params: Annotations = {}
    inputs: Annotations = {}
    activations: Annotations = {}
    outputs: Annotations = {}
    storage: Storage = Storage()
    recompute: Recomputing = Recomputing()
    offload: Offloading = Offloading()
    hardware: HardwareChoice = HardwareChoice()
    align: Flag = True
    overlap: Overlapping = Overlapping()
    bucket: Bucketing = Bucketing()
    fuse: Annotated[Fusing, BeforeValidator(says_something)] = Fusing()
    experts: Experts = Experts()
    context: Context = Context()
    precision: Dtypes | None = None
    nonfinite: Nonfinite | None = None
    accumulate: int = 1
    data: Data = Data()
    pipeline: Pipelining | None = None
    loss: LossOver = LossOver()
    pad: Padded = False
    clip_grad_norm: Clipping | None = None
    strict: Flag = False
    budget: dict[str, int] = {}
    seed: Seed = 0
    symbols: Symbols = Symbols()

    @classmethod
    def of(
        cls,
        *,
        mesh: object = None,
        params: Mapping[str, object] | None = None,
        inputs: Mapping[str, object] | None = None,
        activations: Mapping[str, object] | None = None,
        outputs: Mapping[str, object] | None = None,
        storage: Mapping[str, object] | None = None,
        recompute: str | Mapping[str, object] | None = None,
        offload: str | bool | Mapping[str, object] | None = None,
        hardware: str | Mapping[str, object] | Hardware | None = None,
        align: bool | None = None,
        overlap: bool | Mapping[str, object] | None = None,
        bucket: bool | int | str | Mapping[str, object] | None = None,
        fuse: bool | str | Mapping[str, object] | None = None,
        experts: str | Mapping[str, object] | None = None,
        context: str | Mapping[str, object] | None = None,
        precision: object = None,
        nonfinite: Nonfinite | None = None,
        accumulate: int | None = None,
        data: str | None = None,
        pipeline: Mapping[str, object] | None = None,
        loss: str | Mapping[str, object] | None = None,
        pad: bool | str | None = None,
        clip_grad_norm: float | Mapping[str, object] | None = None,
        strict: bool | None = None,
        budget: Mapping[str, int | str] | None = None,
        seed: int | None = None,
        symbols: Mapping[str, str | Sequence[str]] | None = None,
    ) -> Plan:
        """A plan written in Python; a placement is a P, text, a tuple, or DTensor's list where `mesh` is given."""
        maps = {"params": params, "inputs": inputs, "activations": activations, "outputs": outputs}
        maps |= {"storage": storage, "budget": budget, "pipeline": pipeline}
        written_maps: dict[str, object] = {key: dict(value) for key, value in maps.items() if value is not None}
        values: dict[str, object] = {"mesh": mesh, "recompute": recompute, "fuse": fuse, "experts": experts}
        values |= {"context": context, "hardware": hardware, "align": align, "bucket": bucket, "accumulate": accumulate}
        values |= {"data": data, "precision": precision, "nonfinite": nonfinite, "loss": loss, "pad": pad}
        values |= {"clip_grad_norm": clip_grad_norm, "strict": strict, "seed": seed, "symbols": symbols}
        values |= {"overlap": overlap, "offload": offload}
        # What is not said must not count as said when the plan is merged over another.
        return cls.from_dict({**written_maps, **{key: value for key, value in values.items() if value is not None}})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: Source | None = None) -> Plan:
        """A plan from plain data; without a source, its annotations are of the line of Python that called us."""
        source = source or Source(caller())
        try:
            return cls.model_validate(dict(data), context=source)
        except ValidationError as invalid:
            diagnostics = [diagnostic for problem in invalid.errors() for diagnostic in _diagnostics(problem, source)]
            raise ShardcError(*diagnostics) from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a YAML file, or a plan of ours by name: `shardc:gpt2`."""
        file = plan_path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as cannot:  # ValueError: of UTF-8, or of a path with a NUL byte
            why = getattr(cannot, "strerror", None) or str(cannot)
            why = "not UTF-8 text" if isinstance(cannot, UnicodeDecodeError) else why
            hint = f"give the path of a YAML file, or {PREFIX}gpt2, say: `shardc doctor` lists the plans of ours"
            raise error("SC208", f"cannot read the plan {path}: {why}", hint=hint) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "<plan>") -> Plan:
        """Read YAML text; `plan.dump()` gives it back."""
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            _refuse_large(root, name)
            data: object = None if root is None else yaml.SafeLoader("").construct_document(root)
        except RecursionError:
            raise error("SC208", TOO_DEEP, location=name, hint="a plan is a few levels deep") from None
        except yaml.reader.ReaderError as invalid:
            raise error("SC208", f"not YAML: {invalid.reason}", location=name, hint="a plan is plain text") from None
        except yaml.MarkedYAMLError as invalid:
            mark = invalid.problem_mark
            location = f"{name}:{mark.line + 1}" if mark else name
            quoted = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else None
            hint = "quote patterns and placements"
            message = f"not YAML: {invalid.problem}"
            raise error("SC208", message, location=location, source_text=quoted, hint=hint) from None
        except ShardcError:
            raise
        except Exception as invalid:  # PyYAML reads 2001-99-99 as a date, and raises what Python does
            hint = "quote what is no number, no date and no tag"
            message = f"not YAML: a value cannot be read: {str(invalid)[:100]}"
            raise error("SC208", message, location=name, hint=hint) from None
        if data is None:
            return cls()
        if not isinstance(data, dict):
            raise error(
                "SC208", "a plan is a mapping of keys", location=name, hint=f"keys: {', '.join(cls.model_fields)}"
            )
        lines = tuple(text.splitlines())
        source = Source(name, _key_lines(root, name, lines), lines)
        return cls.from_dict(cast(dict[str, Any], data), source)

    @classmethod
    def from_hf(cls, model: object, axis: str | None = "tp", *, experts: str | None = None) -> Plan:
        """The parameters' placements that Hugging Face's own plans for this model ask for: its `tp_plan` over `axis`,
        its `ep_plan` over `experts`. An axis may be several (`dp.ep`); a plan whose axis is None is not read."""
        from shardc.plan.hugging_face import library_placements

        name = type(model).__name__
        return cls.from_dict({"params": library_placements(model, axis, experts)}, Source(f"plans of {name}"))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What the plan says; of many annotations the first few, as they are written."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in KINDS and value:
                shown = {a.pattern: str(a.placement) for a in list(cast(Annotations, value).values())[:SHOWN]}
                yield name, {**shown, **({"...": f"{len(value) - SHOWN} more"} if len(value) > SHOWN else {})}
            elif name not in KINDS and value != field.default:
                yield name, str(value) if name == "mesh" else value

    def annotations(self, kind: Kind) -> tuple[Annotation, ...]:
        return tuple(cast(Annotations, getattr(self, kind)).values())

    def merge(self, other: Plan) -> Plan:
        """Both plans merged. For a pattern or key that both have, the other plan's value is used."""
        merged: dict[str, object] = {kind: {**getattr(self, kind), **getattr(other, kind)} for kind in KINDS}
        merged["budget"] = {**self.budget, **other.budget}
        remaining = {key: getattr(other, key) for key in other.model_fields_set if key not in merged}
        if other.mesh is None:
            remaining.pop("mesh", None)
        return self.model_copy(update={**merged, **remaining})

    @property
    def microbatches(self) -> int:
        """The number of parts that a step's batch is split into: the pipeline's, or those that are accumulated, and of
        each its halves."""
        return self.overlap.parts * (self.accumulate if self.pipeline is None else self.pipeline.microbatches)

    @property
    def bucket_bytes(self) -> int:
        """The most bytes of collectives that are coalesced into one. Unless `bucket` is said, none are of a plan with
        `symbols`: how full a bucket is depends on sizes, and costs would have no formulas."""
        if self.symbols and "bucket" not in self.model_fields_set:
            return 0
        return self.hardware.value.bucket_bytes if self.bucket.size is None else self.bucket.size

    def over_budget(self, spent: Mapping[str, int], mesh: Mesh) -> tuple[Diagnostic, ...]:
        """An error for each axis, and for the total, on which more bytes a rank are sent in a step than are allowed."""
        diagnostics: list[Diagnostic] = []
        for axis, allowed in self.budget.items():
            # Of the mesh that was compiled for, which need not be the plan's own.
            if (unknown := _budget_axis(axis, mesh)) is not None:
                diagnostics.append(unknown)
                continue
            used = spent.get(axis, 0)
            if used > allowed:
                scope = "in total" if axis == TOTAL else f"on axis '{axis}'"
                message = f"{bytes_text(used)} a rank and step {scope}; the budget is {bytes_text(allowed)}"
                hint = "`shardc explain` names the annotation behind each collective"
                diagnostics.append(Diagnostic("SC213", message, hint=hint))
        return tuple(diagnostics)

    def dump(self) -> str:
        """The plan as YAML, without what is at its default."""
        data: dict[str, object] = {}
        if self.mesh is not None:
            data["mesh"] = str(self.mesh)
        for kind in KINDS:
            if by_pattern := cast(Annotations, getattr(self, kind)):
                data[kind] = {pattern: str(annotation.placement) for pattern, annotation in by_pattern.items()}
        if storage := self.storage.dumped():
            data["storage"] = storage
        if self.recompute.mode != "none":
            data["recompute"] = self.recompute.dumped()
        if (said := self.offload.dumped()) is not None:
            data["offload"] = said
        if self.hardware.value != HardwareChoice().value:
            data["hardware"] = self.hardware.dumped()
        if not self.align:
            data["align"] = False
        if (said := self.overlap.dumped()) is not None:
            data["overlap"] = said
        if self.bucket.size is not None or (self.symbols and self.bucket_bytes):
            data["bucket"] = self.bucket.dumped()
        if self.fuse != Fusing():
            data["fuse"] = self.fuse.dumped()
        if self.experts != Experts():
            data["experts"] = self.experts.dumped()
        if self.context != Context():
            data["context"] = self.context.dumped()
        if self.precision is not None:
            data["precision"] = self.precision.dumped()
        if self.nonfinite is not None:
            data["nonfinite"] = self.nonfinite
        if self.accumulate > 1:
            data["accumulate"] = self.accumulate
        if self.data.per_rank:
            data["data"] = self.data.dumped()
        if self.pipeline is not None:
            data["pipeline"] = self.pipeline.dumped()
        if self.loss.tokens is not None:
            data["loss"] = self.loss.dumped()
        if self.pad:
            data["pad"] = self.pad
        if self.clip_grad_norm is not None:
            data["clip_grad_norm"] = self.clip_grad_norm.dumped()
        if self.strict:
            data["strict"] = True
        if self.budget:
            data["budget"] = {axis: bytes_text(size) for axis, size in self.budget.items()}
        if self.seed:
            data["seed"] = self.seed
        if self.symbols:
            data["symbols"] = self.symbols.dumped()
        return yaml.safe_dump(data, sort_keys=False) if data else ""

    def self_contained(self) -> Plan:
        """The plan for a reader who has none of the files that it names: those of hardware."""
        return self.model_copy(update={"hardware": self.hardware.without_name()})

    @field_validator("mesh", mode="before")
    @classmethod
    def _read_mesh(cls, value: Any) -> Mesh | None:
        if value is None or isinstance(value, Mesh):
            return value
        if isinstance(value, str):
            return Mesh.parse(value)
        if isinstance(value, Mapping):
            return Mesh(cast(Mapping[str, int], value).items())
        if hasattr(value, "mesh_dim_names"):
            return Mesh.from_device_mesh(value)
        raise error("SC210", f"{value!r} is not a mesh", hint='write "dp=2,tp=2"')

    @field_validator(*KINDS, mode="before")
    @classmethod
    def _read_annotations(cls, value: Any, info: ValidationInfo) -> Annotations:
        return read_annotations(value, info, (str(info.field_name),), info.data.get("mesh"))

    @field_validator("accumulate", mode="before")
    @classmethod
    def _read_accumulate(cls, value: Any, info: ValidationInfo) -> int:
        return read_count(value, info, "accumulate")

    @field_validator("budget", mode="before")
    @classmethod
    def _read_budget(cls, value: Any, info: ValidationInfo) -> dict[str, int]:
        if not isinstance(value, Mapping):
            raise error("SC208", "'budget' maps axes to bytes", hint='write budget: {tp: "2MiB", total: "1GiB"}')
        budget = {str(axis): read_bytes(size) for axis, size in cast(Mapping[object, object], value).items()}
        mesh: Mesh | None = info.data.get("mesh")
        for axis in budget:
            if mesh is not None and (unknown := _budget_axis(axis, mesh)) is not None:
                raise ShardcError(source_of(info).locate(unknown, "budget", axis))
        return budget


def _budget_axis(axis: str, mesh: Mesh) -> Diagnostic | None:
    if axis in (*mesh.names, TOTAL):
        return None
    hint = did_you_mean(axis, (*mesh.names, TOTAL), "keys of the budget")
    return Diagnostic("SC201", f"the budget names '{axis}', which is no axis of the mesh ({mesh})", hint=hint)


def _diagnostics(problem: Any, source: Source) -> tuple[Diagnostic, ...]:
    """An error of pydantic as diagnostics: with the key's line, and the nearest key for a typo."""
    path: tuple[str, ...] = tuple(str(part) for part in problem["loc"])
    if path == ("clip_grad_norm", "norm") and path not in source.lines:
        path = path[:1]  # written in short
    ours = problem.get("ctx", {}).get("error")
    if isinstance(ours, ShardcError):
        return tuple(d if d.location else source.locate(d, *path[:1]) for d in ours.diagnostics)
    if problem["type"] == "extra_forbidden":
        section = path[0] if len(path) > 1 else None
        parts: dict[str, type[BaseModel]] = {"storage": Storage, "recompute": Recomputing, "precision": Dtypes}
        parts |= {"fuse": Fusing, "pipeline": Pipelining, "clip_grad_norm": Clipping, "experts": Experts}
        parts |= {"context": Context}
        known = parts.get(section or "", Plan).model_fields
        key = problem["loc"][-1]
        hint = did_you_mean(str(key), known, f"keys of {section or 'a plan'}")
        return (source.locate(Diagnostic("SC208", f"{section or 'a plan'} has no key '{key}'", hint=hint), *path),)
    reason = problem["msg"] if problem["type"] == "literal_error" else problem["msg"].partition(",")[0]
    expected = reason.removeprefix("Input should be ")
    message = f"'{'.'.join(path)}' should be {expected}, not {problem['input']!r}"
    hints = {"strict": "write true or false", "align": "write true or false", "seed": "write a whole number"}
    hints |= {"clip_grad_norm": "write the largest norm, 1.0 say, or leave the key out"}
    hint = {**hints, "nonfinite": "write ignore, skip or raise"}.get(path[0])
    return (source.locate(Diagnostic("SC208", message, hint=hint), *path),)


def _key_lines(root: Any, name: str, text: tuple[str, ...]) -> dict[tuple[str, ...], int]:
    """The line of every key, by its path; YAML itself would let the second of two equal keys win in silence."""
    lines: dict[tuple[str, ...], int] = {}

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            keys, line = (*path, str(key.value)), key.start_mark.line + 1
            if keys in lines:
                message = f"'{key.value}' is written twice, first in line {lines[keys]}"
                location = f"{name}:{line}"
                raise error("SC208", message, location=location, source_text=text[line - 1], hint="keep one of them")
            lines[keys] = line
            visit(value, keys)

    visit(root, ())
    return lines


def _refuse_large(root: yaml.Node | None, name: str) -> None:
    """Raise ShardcError (SC208) where anchors contain themselves, or stand for more than a plan has."""
    sizes: dict[int, int] = {}  # of nodes, by id; 0 of those that are being counted

    def size(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if sizes.get(id(node)) == 0:
            raise error("SC208", "an anchor contains itself", location=name, hint="write out what is meant")
        if id(node) not in sizes:
            sizes[id(node)] = 0
            parts = [part for value in node.value for part in (value if isinstance(value, tuple) else (value,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    if size(root) > LARGEST:
        raise error("SC208", f"the plan has more than {LARGEST:,} values", location=name, hint="write fewer aliases")
