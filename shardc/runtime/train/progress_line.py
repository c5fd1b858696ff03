"""The progress line of a run: renewed on a terminal, else about twenty lines on standard error."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardc.runtime.train.metrics import Evaluated, Metrics


class ProgressLine:
    """The progress line of a run."""

    LINES = 20  # over a run, where there is no terminal to renew one on
    EACH = 50  # steps to a line of a run whose length nobody knows

    def __init__(self, completed: int, steps: int | None) -> None:
        self.console, self.steps, self.completed = Console(stderr=True), steps, completed
        self.each = self.EACH if steps is None else max(1, (steps - completed) // self.LINES)
        self.started = time.perf_counter()
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
        self.bar: Progress | None = None
        self.evaluated: Evaluated | None = None  # the last
        self.task = TaskID(0)
        if self.console.is_terminal:
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=self.console)
            self.task = self.bar.add_task("", total=steps, completed=completed)

    def __enter__(self) -> None:
        if self.bar is not None:
            self.bar.start()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, metrics: Metrics) -> None:
        if self.bar is not None:
            self.evaluated = metrics.evaluated or self.evaluated
            shown = replace(metrics, evaluated=self.evaluated)
            self.bar.update(self.task, completed=metrics.step, description=str(shown))
        elif metrics.evaluated is not None or metrics.step % self.each == 0 or metrics.step == self.steps:
            width = len(str(self.steps or metrics.step))
            print(f"step {metrics.step:>{width}}  {metrics}{self._left(metrics.step)}", file=sys.stderr, flush=True)

    def _left(self, step: int) -> str:
        """The time that the remaining steps take, at the pace so far."""
        if self.steps is None or step >= self.steps:
            return ""
        pace = (time.perf_counter() - self.started) / (step - self.completed)
        return f"  {timedelta(seconds=round(pace * (self.steps - step)))} left"
