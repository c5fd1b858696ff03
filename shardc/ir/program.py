"""A compiled program as plain data: one body that every rank runs, the single-device graph it must agree with, and why.

A program file is JSON: a version, a SHA-256 of the canonical content, and the content. It holds no code: loading one
looks ops up by name and executes nothing, and what is read is checked (`Program.refuse_false`). A file that was cut
short, altered, or written by another version is refused (SC401, SC402, SC403). The checksum guards against accidents;
it is no signature.

    {
    "format": "shardc-program",
    "version": 3,
    "sha256": "...",
    "content": {...}                    one line, so that the last line says whether the file is whole
    }
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypedDict

import torch

from shardc.ir.collectives import Collective, collectives
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.files import unwritable
from shardc.ir.graph import Graph, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.plain import (
    Plain,
    diagnostic_from_plain,
    diagnostic_to_plain,
    fields_known,
    graph_from_plain,
    graph_to_plain,
    listed,
    mesh_from_plain,
    mesh_to_plain,
    tensor_from_plain,
    tensor_to_plain,
    texts_of,
)
from shardc.ir.text import print_graph
from shardc.ir.verify import violations

FORMAT = "shardc-program"
CONSTANT = "_constant."  # prefix of the tensors that a program has for its own: each program numbers them anew
VERSION = 3
AnnotationLine = tuple[str, str, str, str]  # kind, name or pattern, placement text, origin ("plan.yaml:9" or "")


class PlanRecord(TypedDict, total=False):
    """What a program knows of its plan, and of what else it was compiled with: plain data, which its file has as it is.

    A program that `compile` made has the first four (of an earlier version no `hardware`, which is then the default);
    the others where they say something.
    """

    text: str  # the plan, as YAML
    seed: int
    batch: Mapping[str, Any]  # of `runtime.execute.batch.describe_sample`
    hardware: Mapping[str, Any]  # the quantities and tables of `ir.hardware.Hardware` that passes weighed by
    cut: str  # where the plan says how its pipeline is cut: "plan.yaml:9"
    split: Sequence[str]  # of a step of several microbatches: the inputs that are split into them
    data: str  # "per_rank" where ranks bring parts of a batch
    by_row: Sequence[str]  # of a step of several microbatches: the model's outputs that have rows of the batch
    mode: str  # "eval" of a program for evaluation; one that trains does not say it
    precision: str
    fills: Mapping[str, float]  # the optimizer's state before the first step, by name
    nonfinite: str | None
    clip_grad_norm: float | None
    optimizer: str
    rates: Mapping[str, float]  # each parameter group's learning rate
    state: Sequence[Sequence[str]]  # of `frontend.saved_state`: the model's state_dict
    dispatch: Sequence[Sequence[Any]]  # of `passes.sharding.dispatch.Choice`, a layer
    context: Sequence[Sequence[Any]]  # of `passes.context.divide_attention.Divided`, a layer
    experts: Sequence[Sequence[Any]]  # of `passes.sharding.dispatch.layers_of_experts`
    fused_on: str  # where the plan leaves `fuse` open, and it is on: the GPU, in words
    decompose: Sequence[Any]  # of `compiler.decompose_auto.DecomposeChoice`, where the plan left it to a prediction
    halves: Sequence[Any]  # of `compiler.split_auto.SplitChoice`, likewise of halves of a batch
    traffic: Sequence[Sequence[int]]  # kernels and bytes that move data, before and after fusion


class ParameterBytes(NamedTuple):
    per_rank: int
    whole: int  # of the model


@dataclass(frozen=True, eq=False)
class Program:
    """What `compile` returns, without the means to run it."""

    body: Graph  # localized: arguments are per-rank, types say which global tensor a value is a shard of
    reference: Graph  # normalised, on one device
    mesh: Mesh
    diagnostics: tuple[Diagnostic, ...] = ()
    annotations: tuple[AnnotationLine, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # by their input port's name
    plan: PlanRecord = field(default_factory=PlanRecord)

    saved: ClassVar[tuple[str, ...]] = (
        *("body", "reference", "mesh", "diagnostics", "annotations", "constants", "plan"),
        "pipelined",  # of a program that has one
    )

    def text(self) -> str:
        """The body as text; `shardc.ir.parse` reads it back."""
        return print_graph(self.body)

    def collectives(self) -> list[Collective]:
        """All communication, in program order."""
        return collectives(self.body)

    def parameter_bytes(self) -> ParameterBytes:
        """Memory for parameters: what one rank stores, padding included, and the whole model's."""
        types = [
            type_of(value)
            for port, value in zip(self.body.inputs, self.body.placeholders, strict=True)
            if port.role == "param"
        ]
        return ParameterBytes(
            sum(t.local_bytes(self.mesh) for t in types), sum(t.numel() * t.dtype.itemsize for t in types)
        )

    # ------------------------------------------------------------------ files
    def to_plain(self) -> Plain:
        return {
            "body": graph_to_plain(self.body),
            "reference": graph_to_plain(self.reference),
            "mesh": mesh_to_plain(self.mesh),
            "diagnostics": [diagnostic_to_plain(d) for d in self.diagnostics],
            "annotations": [list(line) for line in self.annotations],
            "constants": {name: tensor_to_plain(t) for name, t in self.constants.items()},
            # As it will be read: tuples become lists and keys strings before the checksum is taken, not after.
            "plan": json.loads(json.dumps(dict(self.plan))),
        }

    @classmethod
    def fields_of(cls, content: Plain, read: Callable[[Any], Graph] = graph_from_plain) -> dict[str, Any]:
        """What `to_plain` gave, as the fields of a program; other keys are for another kind of program to read. `read`
        makes the body and the reference."""
        return {
            "body": read(content.pop("body")),
            "reference": read(content.pop("reference")),
            "mesh": mesh_from_plain(content.pop("mesh")),
            "diagnostics": tuple(diagnostic_from_plain(d) for d in listed(content.pop("diagnostics"))),
            "annotations": tuple(_annotation(line) for line in listed(content.pop("annotations"))),
            "constants": {name: tensor_from_plain(t) for name, t in content.pop("constants").items()},
            "plan": content.pop("plan"),
            **content,
        }

    def refuse_false(self) -> None:
        """Raise ShardcError with what is wrong with a program that was read."""
        refuse_unsound({"body": self.body, "reference": self.reference})

    def to_json(self) -> str:
        content = _canonical(self.to_plain())
        head = {"format": FORMAT, "version": VERSION, "sha256": _checksum(content)}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        return "{\n" + ",\n".join([*lines, f'"content": {content}']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "<json>") -> Self:
        """The program of a file's text; `origin` names the file in errors."""
        content = _content(text, origin)
        try:
            fields = cls.fields_of(content)
            fields_known(fields, cls.saved)
            program = cls(**fields)
            program.refuse_false()
            return program
        except ShardcError as wrong:
            raise ShardcError(*(replace(d, location=d.location or origin) for d in wrong.diagnostics)) from None
        except Exception as wrong:  # whatever a forged file trips over: its checksum is right, what it says is not
            what = f"{type(wrong).__name__}: {wrong}"
            raise error("SC402", f"the content is no program ({what})", location=origin, hint=_COMPILE) from wrong

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all: readers never see half a program.

        Raises ShardcError (SC409) where no file can be written.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException as wrong:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(wrong, OSError):
                raise unwritable(path, wrong) from None
            raise

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise error("SC401", "this is no program file", location=str(path), hint=_COMPILE) from None
        return cls.from_json(text, str(path))


def refuse_unsound(graphs: Mapping[str, Graph]) -> None:
    """Raise ShardcError (SC402) with what is wrong with graphs that were read: each must be as passes leave theirs."""
    faults = [f"{name}: {line}" for name, graph in graphs.items() for line in violations(graph)]
    if faults:
        raise error("SC402", "the content is no program", cause="\n".join(faults[:SHOWN]), hint=_COMPILE)


SHOWN = 10  # of what is wrong
_COMPILE = "write the file anew: compile the program, then save it"


def _content(text: str, origin: str) -> Plain:
    """The content of a file that is whole, unaltered, and of this version."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        if not text.startswith(f'{{\n"format": "{FORMAT}"'):
            raise error("SC401", "this is no program file", location=origin, hint=_COMPILE) from None
        if not text.rstrip().endswith("\n}"):
            message = f"the program file ends early, after {len(text)} characters"
            raise error("SC401", message, location=origin, hint="copy it again, or " + _COMPILE) from None
        raise error("SC402", "the program file is damaged: it is no JSON", location=origin, hint=_COMPILE) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise error("SC401", "this is no program file", location=origin, hint=_COMPILE)
    if data.get("version") != VERSION:
        message = f"the program file has version {data.get('version')}, this shardc reads version {VERSION}"
        raise error("SC403", message, location=origin, hint=_COMPILE)
    content: Any = data.get("content")
    try:
        intact = isinstance(content, dict) and data.get("sha256") == _checksum(_canonical(content))
    except (ValueError, RecursionError):  # nested too deep, or text that is no Unicode
        intact = False
    if not intact:
        message = "the program file was altered after it was written: its checksum differs"
        raise error("SC402", message, location=origin, hint=_COMPILE)
    return content


def _annotation(data: Any) -> AnnotationLine:
    kind, name, placement, origin = texts_of(data)
    return kind, name, placement, origin


def _canonical(content: Plain) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8")).hexdigest()
