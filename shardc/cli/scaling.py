"""`shardc cost` with --scaling, --bottlenecks or --node-mtbf: what is predicted of a step, and why it is no better."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import typer

from shardc.cli.commands import Asked, compiled
from shardc.cli.console import diagnose, for_terminal, progress, write_json
from shardc.cost.failures import FailureCost
from shardc.explain.bottleneck import Bottlenecks
from shardc.explain.scaling import Scaling
from shardc.ir.diagnostic import error

SIZES = re.compile(r"(\w+)=(\d+(?:,\d+)*)")


@dataclass(frozen=True)
class Question:
    """The options, as they are written."""

    hardware: str | None
    scaling: str | None
    bottlenecks: bool
    memory_limit: str | None
    node_mtbf: float | None
    restart_mesh: str | None
    beside: tuple[str, ...] = ()  # options that answer something else

    @property
    def asked(self) -> bool:
        return self.given("scaling", "bottlenecks", "node_mtbf", "memory_limit", "restart_mesh")

    def given(self, *names: str) -> bool:
        values = [getattr(self, name) for name in names]
        return any(value is not None and value is not False for value in values)


def answer(asked: Asked, question: Question, *, as_json: bool) -> None:
    for option, needs in (("memory_limit", "bottlenecks"), ("restart_mesh", "node_mtbf")):
        if question.given(option) and not question.given(needs):
            option, needs = (f"--{name.replace('_', '-')}" for name in (option, needs))
            raise error("SC105", f"{option} says nothing without {needs}", hint=f"write {needs} beside it")
    if question.beside:
        message = f"{' and '.join(question.beside)} go with none of --scaling, --bottlenecks and --node-mtbf"
        raise error("SC105", message, hint="ask for them in a command of their own")
    axis, sizes = _sizes(question.scaling) if question.scaling is not None else ("", [])
    program, _ = compiled(asked, meta=True)
    diagnose(program.diagnostics)
    answers: dict[str, Any] = {}
    texts: list[str] = []
    with progress("predicting"):
        if axis:
            scaled = program.scaling(axis, sizes, question.hardware)
            answers["scaling"] = _scaling(scaled)
            texts.append(str(scaled))
        if question.bottlenecks:
            found = program.bottlenecks(question.hardware, memory=question.memory_limit)
            answers["bottlenecks"] = _bottlenecks(found)
            texts.append(for_terminal(str(found)))
        if question.node_mtbf is not None:
            restarted = None
            if question.restart_mesh is not None:
                restarted, _ = compiled(replace(asked, mesh=question.restart_mesh), meta=True)
            cost = program.failures(question.node_mtbf, question.hardware, restarted=restarted)
            answers["failures"] = _failures(cost)
            texts.append(for_terminal(str(cost)))
    if as_json:
        write_json(answers)
    else:
        typer.echo("\n\n".join(texts))


def _sizes(text: str) -> tuple[str, list[int]]:
    match = SIZES.fullmatch(text.replace(" ", ""))
    if match is None:
        raise error("SC105", f"--scaling {text} names no sizes of an axis", hint="write --scaling tp=1,2,4,8")
    return match[1], [int(size) for size in match[2].split(",")]


def _scaling(scaled: Scaling) -> dict[str, Any]:
    rows = [
        {
            "size": row.size,
            "ranks": row.parts.ranks,
            "step_ms": row.parts.step_ms,
            "ideal_ms": row.ideal_ms,
            "lost_ms": row.lost_ms,
            "shares_ms": dict(row.shares),
        }
        for row in scaled.rows
    ]
    return {"axis": scaled.axis, "hardware": scaled.hardware, "rows": rows}


def _bottlenecks(found: Bottlenecks) -> dict[str, Any]:
    held = {"peak_bytes": found.predicted.peak_bytes, "memory_limit": found.memory, "fits": found.fits}
    return {"step_ms": found.predicted.step_ms, **held, "causes": [asdict(cause) for cause in found.causes]}


def _failures(cost: FailureCost) -> dict[str, Any]:
    return {
        "nodes": cost.nodes,
        "mtbf_seconds": cost.mtbf_seconds,
        "interval_seconds": cost.interval_seconds,
        "goodput": cost.goodput,
        "lost": cost.shares,
        **asdict(cost.recovery),
    }
