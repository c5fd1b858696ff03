"""`shardc calibrate`: the machine at hand, or measurements that were made elsewhere, as a file of hardware."""

from __future__ import annotations

from pathlib import Path

import typer
import yaml

from shardc.cli import console
from shardc.ir.diagnostic import error
from shardc.runtime.calibrate.calibrate import Machine, calibrate, hardware_text, not_measured
from shardc.runtime.calibrate.rows import read_rows


def run(
    output: Path | None,
    rows: Path | None,
    source: Path | None,
    device: str | None,
    world: int | None,
    seconds: float,
    *,
    as_json: bool,
) -> None:
    """Measure, or read `source`; print the file, or write it to `output`, and the measurements to `rows`."""
    if source is not None:
        measuring = {"--rows": rows, "--device": device, "--world": world}
        if beside := [option for option, value in measuring.items() if value is not None]:
            message = f"{' and '.join(beside)} say how to measure, and --from measures nothing"
            raise error("SC105", message, hint="leave them out, or leave --from out to measure")
        title = ["What is not here is as in default.yaml.", "", f"Written by: shardc calibrate --from {source}"]
        measured = read_rows(source)
        for what in not_measured(measured):
            typer.echo(f"{source} has no measurement of {what}: their rates are the default's", err=True)
        text = hardware_text(measured, title)
    else:
        text = calibrate(Machine.at_hand(device, world, seconds), rows)
    if text is None:
        return
    if output is not None or not as_json:
        console.write(text, output)
    if as_json:
        console.write_json({"hardware": yaml.safe_load(text)})
