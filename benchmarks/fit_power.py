"""The limit of power (`ir.hardware.Power`) that steps of one GPU come to, by least squares of relative errors.

Eager runs as `benchmarks.predicted_steps` mirrors them, without an optimizer (torch's AdamW is no program of ours), and
our own recorded steps of one GPU whose every kernel was faster than Python (`benchmarks.own_steps`). Each program is
predicted once without a limit; the seconds of its products and of all else are what the limit is a function of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from benchmarks import own_steps, predicted_steps
from shardc.cost.prediction import Prediction
from shardc.ir.hardware import Hardware
from shardc.ir.slowdowns import Power

SUSTAINED = [round(0.85 + 0.001 * n, 3) for n in range(151)]
RELIEF = [round(0.005 * n, 3) for n in range(201)]


class OneGpuStep(NamedTuple):
    """A measured step, and the seconds of a program of it at the rate of `products`."""

    name: str
    measured: float
    products: float
    others: float

    def predicted(self, power: Power) -> float:
        return self.others + self.products * power.factor(self.products, self.others)


def unlimited(hardware: Hardware) -> Hardware:
    return dataclasses.replace(hardware, tables=hardware.tables.changed(power=Power()))


def steps(hardware: Hardware) -> Iterator[OneGpuStep]:
    """Of every run that the limit is fitted to."""
    machine = unlimited(hardware)
    eager = machine.changed({"call_seconds": 0.0})
    for row in predicted_steps.rows():
        if row["gpus"] == 1 and not row.get("opt") and not predicted_steps.why_left_out(row):
            run = predicted_steps.mirrored(row)
            yield _step(run.name, row["step_ms"], predicted_steps.compiled(run).predict(eager))
    for row in own_rows():
        yield _step(own_steps.name(row), row["step_ms"], own_steps.compiled(row).predict(machine))


def own_rows() -> list[own_steps.Row]:
    """Our own steps that are in the fit: of one GPU of this machine, which does not wait for Python."""
    rows = (row for row in own_steps.rows() if row["gpus"] == 1 and "hardware" not in row)
    return [row for row in rows if own_steps.bound_by_the_gpu(row)]


def _step(name: str, measured_ms: float, found: Prediction) -> OneGpuStep:
    products = found.kinds_ms["product"]
    return OneGpuStep(name, measured_ms * 1e-3, products * 1e-3, (found.step_ms - products) * 1e-3)


def fitted(measured: Sequence[OneGpuStep], most: float) -> Power:
    """The least sum of squares of relative errors; `most` is given."""
    candidates = (Power(sustained=s, relief=r, most=most) for s, r in product(SUSTAINED, RELIEF))
    return min(candidates, key=lambda power: sum((one.predicted(power) / one.measured - 1) ** 2 for one in measured))
