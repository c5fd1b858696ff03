"""A lockfile: what a program costs, as text to commit, and to tell what a change of the model made worse.

    lock = program.lock()                       write(lock.text()) to shardc.lock, and commit it
    report = program.check(Lock.read("shardc.lock"))
    assert report.ok, report                    in CI: `shardc lock TARGET --plan FILE --check`

The text is TOML, sorted, one fact a line, each with its whole key, so that a line of a diff says what it is about:

    collectives.forward.tp.all_reduce.bytes = 65536         sent by a rank in a step; transfers of a pipeline are `send`
    collectives.forward.tp.all_reduce.count = 4
    flops.forward = 1441792
    kernels.launches = 212                                  calls that move data, fused or not, beside products
    memory.at_peak.activations = 547204                     of the rank that holds most, at its peak, by category
    memory.peak = 980992
    of.figures.memory_bytes_per_second = 4000000000000.0    of the hardware of a predicted step; of tables digests
    of.mesh = "dp=2, tp=2"                                  what the program was compiled of: another is refused
    where.collectives.forward.tp.all_reduce."h.*.mlp.c_proj".count = 2

Facts of `where` say in which modules the others arise; layers of a list are one. They have no verdict of their own: a
module that is renamed, or work that moves from one to another, makes nothing worse. There are no paths and no times,
and facts do not depend on the order of a model's modules or statements, unless memory at the peak does.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels_triton.match.op import KERNELS, OPS
from shardc.cost.flops import node_flops
from shardc.cost.memory import PHASES
from shardc.cost.prediction import Prediction
from shardc.explain.transfer import cause_of
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import error
from shardc.ir.files import write_text
from shardc.ir.graph import info, op_name, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.layers import in_every_layer
from shardc.ir.microbatch import in_microbatch
from shardc.ir.program import Program
from shardc.ir.version import VERSION
from shardc.partition.memory import memory
from shardc.partition.rank_costs import graphs_by_name, rank_flops
from shardc.partition.staged_program import StagedProgram
from shardc.partition.transfer_report import report_transfers
from shardc.passes.fusion.analysis.traffic import bytes_by_call

FORMAT = "shardc-lock"
FORMAT_VERSION = 1
Key = tuple[str, ...]
Value = int | float | str
AMOUNTS = ("collectives", "flops", "kernels", "memory", "prediction")  # first segments of what has a verdict
ENTIRE_MODEL = "(model)"  # where a call comes from no module
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = "# What a step costs: `shardc lock` writes this file, `shardc lock --check` compares with it. Commit it.\n"
_REWRITE = "write the file anew: run `shardc lock` with the same arguments, without --check"


class Reason(NamedTuple):
    """Why there is something in a module: a value ("" for several), its line in the model, and the annotation that led
    to it."""

    value: str
    source: str
    cause: str

    @property
    def in_every_layer(self) -> tuple[str, str]:
        """What it has in common with those of equal layers."""
        return self.source, in_every_layer(self.cause)


@dataclass(frozen=True)
class Lock:
    """`facts` by key. `reasons` of facts of `where`, one for each line and cause, are a program's; a file has none."""

    facts: Mapping[Key, Value]
    reasons: Mapping[Key, Sequence[Reason]] = field(
        default_factory=dict[Key, Sequence[Reason]], compare=False, repr=False
    )

    def amounts(self) -> dict[Key, float]:
        """What has a verdict. The parts of memory at the peak have none: one may grow while another shrinks."""
        return {
            path: value
            for path, value in self.facts.items()
            if path[0] in AMOUNTS and path[:2] != ("memory", "at_peak") and not isinstance(value, str)
        }

    def places(self, of: Key) -> dict[Key, float]:
        """What an amount comes from, module by module, by the keys of these facts."""
        return {
            path: value
            for path, value in self.facts.items()
            if path[0] == "where" and (*path[1:-2], path[-1]) == of and not isinstance(value, str)
        }

    def text(self) -> str:
        """The file: TOML, which `parse` reads."""
        lines = [f"{'.'.join(map(_key, path))} = {_value(self.facts[path])}" for path in sorted(self.facts)]
        return _HEAD + "\n".join(lines) + "\n"

    def write(self, path: str | Path) -> None:
        """Raises ShardcError (SC409) where the file cannot be written."""
        write_text(path, self.text())

    @property
    def predicted_on(self) -> str | None:
        """The hardware that a prediction is of; None without one."""
        return str(name) if (name := self.facts.get(("of", "predicted_on"))) is not None else None

    @classmethod
    def parse(cls, text: str, origin: str = "<text>") -> Lock:
        """Raises ShardcError: SC411 for what is no lockfile, SC412 for one of another format."""
        try:
            facts = dict(_flat(tomllib.loads(text)))
        except (ValueError, RecursionError) as wrong:
            message = f"this is no lockfile: {wrong}"
            raise error("SC411", message, location=origin, hint=_REWRITE) from None
        if facts.get(("format",)) != FORMAT:
            raise error("SC411", "this is no lockfile: it names another format", location=origin, hint=_REWRITE)
        if (version := facts.get(("version",))) != FORMAT_VERSION:
            message = f"the lockfile has version {version} of its format, this shardc reads version {FORMAT_VERSION}"
            raise error("SC412", message, location=origin, hint=_REWRITE)
        for path, value in facts.items():
            if path[0] in (*AMOUNTS, "where") and (isinstance(value, str) or not 0 <= value < float("inf")):
                message = f"'{'.'.join(path)}' of the lockfile should be a number from 0, not {value!r}"
                raise error("SC411", message, location=origin, hint=_REWRITE)
        return cls(facts)

    @classmethod
    def read(cls, path: str | Path) -> Lock:
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise error("SC411", "there is no lockfile", location=str(path), hint=_REWRITE) from None
        except (OSError, ValueError) as wrong:
            message = f"the lockfile cannot be read: {getattr(wrong, 'strerror', None) or wrong}"
            raise error("SC411", message, location=str(path), hint=_REWRITE) from None
        return cls.parse(text, str(path))


def lock_of(
    program: Program, staged: StagedProgram, predicted: Prediction | None = None, hardware: Hardware = DEFAULT
) -> Lock:
    """The lock of a program, whose stages are `staged`, and what is predicted of it on the hardware."""
    gathered = _Facts()
    gathered.about(program)
    gathered.communication(program, staged)
    gathered.kernels(staged)
    gathered.memory(staged)
    gathered.flops(program, staged)
    if predicted is not None:
        gathered.prediction(predicted)
        gathered.figures(hardware)
    return Lock(gathered.facts, gathered.reasons)


class _Facts:
    """Facts as they are added up."""

    def __init__(self) -> None:
        self.facts: dict[Key, Value] = {("format",): FORMAT, ("version",): FORMAT_VERSION}
        self.reasons: dict[Key, list[Reason]] = {}

    def add(self, path: Key, count: int, module: str, reason: Reason) -> None:
        """To an amount, and to what a module has of it."""
        self.facts[path] = int(self.facts.get(path, 0)) + count
        self.part(path, count, module, reason)

    def part(self, path: Key, count: int, module: str, reason: Reason) -> None:
        where = ("where", *path[:-1], in_every_layer(module) or ENTIRE_MODEL, path[-1])
        self.facts[where] = int(self.facts.get(where, 0)) + count
        known = self.reasons.setdefault(where, [])
        if all(reason.in_every_layer != other.in_every_layer for other in known):
            known.append(reason)

    def about(self, program: Program) -> None:
        versions = {"shardc": VERSION, "torch": torch.__version__.partition("+")[0]}
        self.facts |= {("of", name): version for name, version in versions.items()}
        self.facts["of", "mesh"] = str(program.mesh)
        self.facts["of", "mode"] = "eval" if program.plan.get("mode") == "eval" else "train"
        self.facts["of", "optimizer"] = program.plan.get("optimizer", "")
        self.facts["of", "plan"] = _digest(program.plan.get("text", ""))
        quantities = program.plan.get("hardware", {})
        self.facts["of", "hardware"] = _digest(json.dumps({**quantities}, sort_keys=True))
        for port, value in zip(program.reference.inputs, program.reference.placeholders, strict=True):
            if port.role == "input":
                type, shape = type_of(value), list(type_of(value).shape)
                if port.name in program.plan.get("split", ()):  # of the batch, not of a microbatch
                    shape[0] *= program.reference.microbatches
                shape = ", ".join(map(str, shape))
                self.facts["of", "batch", port.name] = f"{str(type.dtype).removeprefix('torch.')}[{shape}]"

    def communication(self, program: Program, staged: StagedProgram) -> None:
        for c in collectives(program.body):
            path, reason = (PHASES[c.phase], ".".join(c.axes), c.kind), Reason(c.value, c.source, c.cause)
            self.add(("collectives", *path, "count"), c.times, c.fqn, reason)
            self.add(("collectives", *path, "bytes"), c.bytes_per_step, c.fqn, reason)
        for t in report_transfers(staged, cause_of(program.plan)) if staged.axis else ():
            path, module = (PHASES[t.phase], staged.axis, "send"), t.value.rpartition(".")[0].removeprefix("d.")
            reason = Reason(t.name, t.source, t.cause)
            self.add(("collectives", *path, "count"), t.times, module, reason)
            self.add(("collectives", *path, "bytes"), t.bytes_per_step, module, reason)

    def kernels(self, staged: StagedProgram) -> None:
        self.facts |= {("kernels", name): 0 for name in ("bytes", "launches", "unfused")}
        for graph in graphs_by_name(staged).values():
            for node, size in bytes_by_call(graph).items():
                about = info(node)
                reason = Reason(about.name, about.source, "")
                self.add(("kernels", "bytes"), size, about.fqn, reason)
                self.add(("kernels", "launches"), 1, about.fqn, reason)
                if node.target in KERNELS:
                    op = op_name(node.target).removeprefix("shardc.") if node.target in OPS.values() else "generated"
                    self.part(("kernels", "fused", op), 1, about.fqn, reason)
                else:
                    self.add(("kernels", "unfused"), 1, about.fqn, reason)

    def memory(self, staged: StagedProgram) -> None:
        report = memory(staged)
        self.facts["memory", "peak"], self.facts["memory", "stored"] = report.peak, report.stored
        for row in report.of_rank(report.fullest.ranks[0]):
            if row.bytes:
                self.facts["memory", "at_peak", row.category] = row.bytes
        for value in report.live:
            reason = Reason(value.name, value.source, value.category)
            self.part(("memory", "peak"), value.bytes, value.fqn or value.name.rpartition(".")[0], reason)

    def flops(self, program: Program, staged: StagedProgram) -> None:
        fullest = max((rank_flops(staged, c) for c in staged.coordinate_range), key=lambda counts: counts.total)
        for phase, name in PHASES.items():
            if count := fullest.of_phase(phase):
                self.facts["flops", name] = count
        repeated, body = in_microbatch(program.body), program.body
        for node in body.calls():
            if count := node_flops(body, node) * (body.microbatches if node in repeated else 1):
                about = info(node)
                self.part(("flops", PHASES[about.phase]), count, about.fqn, Reason(about.name, about.source, ""))

    def prediction(self, predicted: Prediction) -> None:
        """The places of a step's time are kinds of calls; those of time that is exposed, kinds of collectives."""
        self.facts["of", "predicted_on"] = predicted.hardware
        self.facts["prediction", "step_ms"] = _rounded(predicted.step_ms)
        self.facts["prediction", "exposed_ms"] = _rounded(predicted.exposed_total_ms)
        for kind, ms in predicted.kinds_ms.items():
            self.facts["where", "prediction", kind, "step_ms"] = _rounded(ms)
        for row in predicted.exposed_ms:
            where = ("where", "prediction", f"{row.what}, {PHASES[row.phase]}", "exposed_ms")
            self.facts[where] = _rounded(float(self.facts.get(where, 0.0)) + row.exposed_ms)
            self.reasons.setdefault(where, []).append(Reason("", row.source, row.cause))

    def figures(self, hardware: Hardware) -> None:
        """What the hardware is said to be, quantity by quantity; of tables a digest."""
        for name, value in hardware.quantities().items():
            known = isinstance(value, int | float)
            self.facts["of", "figures", name] = value if known else _digest(json.dumps(value, sort_keys=True))


def _rounded(ms: float) -> float:
    """To four digits: what a prediction is to be compared by."""
    return float(f"{ms:.4g}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _key(segment: str) -> str:
    return segment if _BARE.fullmatch(segment) else _quoted(segment)


def _value(value: Value) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _flat(table: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Value]]:
    """The facts of a TOML table. Raises ValueError for what no lockfile holds."""
    items: Iterable[tuple[str, Any]] = table.items()
    for name, value in items:
        if isinstance(value, dict):
            yield from _flat(value, (*prefix, name))
        elif isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"'{'.'.join((*prefix, name))}' is {value!r}")
        else:
            yield (*prefix, name), value
