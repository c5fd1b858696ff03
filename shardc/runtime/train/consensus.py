"""What all ranks of a job decide together after a step: whether training goes on, or why it ends.

    each rank brings     nothing, a stop, a signal that it got, or the error of a callback
    any rank's stop      stops all
    any rank's signal    interrupts all
    any rank's error     ends all: that rank with the error itself, the others with one that quotes it (SC502)

So all end after the same step, where a checkpoint can be saved. It takes one all-reduce of three integers on CPUs, in a
group of its own: a rank that fails may do so while the others are in any other collective.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.execute.monitor import Monitor

PATIENCE = timedelta(seconds=10)  # of a rank that failed, with the others
GRACE = 300.0  # seconds between SIGTERM and the end of the process: launchers that wait less kill it themselves


class Consensus:
    """The decisions of one rank with the others; without a group it is alone."""

    def __init__(self, group: Any = None, rank: int = 0, monitor: Monitor | None = None, store: Any = None) -> None:
        self._group, self._rank, self._monitor, self._store = group, rank, monitor, store
        self._ends = 0  # that were announced
        self.lost = False  # the others did not come to hear of a failure

    @property
    def alone(self) -> bool:
        return self._group is None

    def await_decision(self) -> None:
        """From now on a SIGTERM leaves the process the time to decide and to save."""
        if self._monitor is not None:
            self._monitor.grace = GRACE

    def decide(self, stop: bool = False, signal: int = 0, failure: Exception | None = None) -> tuple[bool, int]:
        """Whether any rank stops, and a signal that any got, or 0; all ranks must call it.

        Raises the failure that this rank brings; where another brings one, ShardcError (SC502).
        """
        if self._group is not None and failure is None:
            stop, signal = self._agreed(stop, signal)
        elif self._group is not None:
            self._tell(failure)
        if failure is not None:
            raise failure
        return stop, signal

    def together(self, step: int) -> bool:
        """Whether all ranks end after this step, and call this within the patience.

        Through the store: a collective that the others do not come to would keep this process from its end.
        """
        if self._group is None:
            return True
        self._ends += 1
        ranks = range(dist.get_world_size(self._group))
        keys = [f"{self._ends}/{rank}" for rank in ranks]
        deadline = time.monotonic() + PATIENCE.total_seconds()
        try:
            self._store.set(keys[self._rank], str(step))
            while not self._store.check(keys):  # its `wait` prints a warning where it fails
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            return {self._store.get(key) for key in keys} == {str(step).encode()}
        except (RuntimeError, dist.DistError):
            return False

    def _agreed(self, stop: bool, signal: int) -> tuple[bool, int]:
        try:
            any_stop, any_signal, failed = self._largest([stop, signal, 0], None)
            if failed:
                raise _failed(failed - 1, self._reasons("")[failed - 1])
        except ShardcError:
            raise
        except Exception as lost:
            raise lost if self._monitor is None else self._monitor.blame(lost) from lost
        return bool(any_stop), any_signal

    def _tell(self, failure: BaseException | None) -> None:
        """Tell the others of a failure, unless they are elsewhere."""
        try:
            self._largest([0, 0, self._rank + 1], PATIENCE)
            self._reasons(f"{type(failure).__name__}: {failure}")
        except Exception:  # what this rank failed of is there to say
            self.lost = True

    def _largest(self, values: list[int], limit: timedelta | None) -> list[int]:
        largest = torch.tensor(values)
        work: Any = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait(*([] if limit is None else [limit]))
        return largest.tolist()

    def _reasons(self, own: str) -> list[str]:
        reasons = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(reasons, own, group=self._group)
        return reasons


def _failed(rank: int, reason: str) -> ShardcError:
    message = f"rank {rank} failed after a step, of an error of its own: {reason}"
    return error("SC502", message, hint=f"the last output of rank {rank} has the traceback")
