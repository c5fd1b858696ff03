"""`shardc cost --hardware`: a predicted step as text or plain data, its trace, and a measured profile beside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from shardc.api import Program
from shardc.cli.console import for_terminal
from shardc.cost.prediction import Prediction
from shardc.cost.profile import Profile


def predicted(program: Program, hardware: str, trace: Path | None) -> Prediction:
    """The prediction, whose trace is written where it is asked for."""
    prediction = program.predict(hardware)
    if trace is not None:
        prediction.to_trace(trace)
    return prediction


def show_prediction(prediction: Prediction, profile: Path | None) -> None:
    typer.echo(for_terminal(str(prediction)))
    if profile is not None:
        typer.echo(for_terminal(str(prediction.diff(Profile.load(profile)))))


def prediction_data(prediction: Prediction, profile: Path | None) -> dict[str, Any]:
    """As `--json` writes it."""
    names = ("hardware", "ranks", "step_ms", "tokens", "unit", "tokens_per_s", "mfu", "bubble", "peak_bytes", "idle_ms")
    more = ("gaps_ms", "host_ms", "launches", "model_flops", "rank_flops", "replicated", "coordinate")
    data = {name: getattr(prediction, name) for name in (*names, *more)}
    data |= {"kinds_ms": dict(prediction.kinds_ms), "exposed_ms": [asdict(row) for row in prediction.exposed_ms]}
    if profile is not None:
        diff = prediction.diff(Profile.load(profile))
        data["measured"] = {"step_ms": diff.measured_ms, "calls": [row._asdict() for row in diff.calls]}
    return data
