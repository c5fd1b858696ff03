"""Measures the calls of a step: a monitor that takes the time whenever a rank comes to its next call.

    counter 1 at 0.0 ms, counter 2 at 0.4 ms        call 1 took 0.4 ms, what Python needs for it included

On a CPU times are those of its clock. On a GPU they are events in the compute stream, which count how long that stream
waits for a collective as the collective's. They add no waits to the step, but a launch a call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardc.cost.profile import CallTime, Profile
from shardc.ir.graph import info
from shardc.ir.microbatch import calls_as_run, in_microbatch
from shardc.partition.program_counter import STRIDE, graphs_of, runner_of
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.measured_timeline import timing_event
from shardc.runtime.execute.monitor import RunMonitor
from shardc.schedule.instructions import RunBody


class CallRecorder:
    """Stands in the place of a rank's monitor, to which it hands on what the executor tells it."""

    def __init__(self, monitor: RunMonitor, device: torch.device) -> None:
        self._monitor, self._device = monitor, device
        self._marks: list[tuple[int, Any]] = []  # the counter, and when it came

    @property
    def counter(self) -> int:
        return self._monitor.counter

    @counter.setter
    def counter(self, counter: int) -> None:
        self._marks.append((counter, self._now()))
        self._monitor.counter = counter

    def blame(self, failure: BaseException) -> Exception:
        return self._monitor.blame(failure)

    def report_own_failure(self, why: str) -> None:
        self._monitor.report_own_failure(why)

    def stop(self) -> None:
        """The step has ended."""
        self._marks.append((-1, self._now()))

    def profile(self, program: StagedProgram, rank: int) -> Profile:
        """What was recorded of one step, of the rank whose monitor this is."""
        c, _ = program.coordinates(rank)
        names, sums = _call_names(program, c), dict[tuple[str, str], float]()
        seconds = self._seconds()
        for (counter, _), spent in zip(self._marks, seconds, strict=False):
            key = names.get(counter, ("", "the loss, passed on to all stages"))
            sums[key] = sums.get(key, 0.0) + spent * 1e3
        runs = Counter(names.values())
        if not program.axis:
            repeated = in_microbatch(program.body)
            runs.update({key: program.body.microbatches - 1 for key in _names_of(repeated) if key in runs})
        calls = (CallTime(*key, runs.get(key, 1), spent) for key, spent in sums.items())
        return Profile(self._device.type, rank, sum(seconds) * 1e3, tuple(calls))

    def _now(self) -> Any:
        return timing_event() if self._device.type == "cuda" else time.perf_counter()

    def _seconds(self) -> list[float]:
        """From each mark to the next."""
        times = [time for _, time in self._marks]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [first.elapsed_time(second) / 1e3 for first, second in pairwise(times)]
        return [second - first for first, second in pairwise(times)]


def _names_of(nodes: Iterable[fx.Node]) -> list[tuple[str, str]]:
    return [("", info(node).name) for node in nodes]


def _call_names(program: StagedProgram, c: int) -> dict[int, tuple[str, str]]:
    """By program counter: the instruction that runs a call, and the call; "" for the instruction itself."""
    names: dict[int, tuple[str, str]] = {}
    for index, instruction in enumerate(program.lists.ranks[c]):
        runner, counter = runner_of(instruction), index * STRIDE
        if not isinstance(instruction, RunBody):
            names[counter] = runner, ""
        calls = (node for graph in graphs_of(program, c, instruction) for node in calls_as_run(graph))
        for number, node in enumerate(calls, 1):
            names[counter + number] = runner, info(node).name
    return names
