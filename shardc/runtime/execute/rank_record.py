"""What a rank publishes of itself at every beat, and what that says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardc.runtime.execute.process_end import ProcessId, has_ended

PATIENCE = 20  # silences, after which a rank of another machine counts as dead though nothing has failed


@dataclass(frozen=True)
class Record:
    """The last published state of a rank. `own_error` is the error that it failed of, unless a collective's."""

    beat: int = -1
    step: int = 0
    counter: int = 0  # index of the instruction
    failed: bool = False
    own_error: str = ""
    closed: bool = False  # it finished its work and closed its monitor
    terminated: bool = False  # it got SIGTERM, and so did not fail by itself
    blamed: int = -1  # the rank that it found dead, so that ranks that fail later need not detect it a second time
    program: int = 0  # which of the job's programs the counter is of: the job's own, then those beside it
    begun: int = 0  # the runs of programs that it began, of any
    replays: bool = False  # the step is a replay of a CUDA graph, which has no counter
    process: Sequence[Any] | None = None  # a `ProcessId`; None where the kernel does not tell whether it has ended

    @property
    def explains_failure(self) -> bool:
        """Whether it explains the failure of another rank."""
        return bool(self.own_error) or self.blamed >= 0

    def has_ended(self, here: ProcessId | None) -> bool | None:
        """Whether the rank's process has ended, as a process `here` can know; None if it cannot."""
        return has_ended(ProcessId(*self.process) if self.process else None, here)

    def is_dead(self, here: ProcessId | None, seconds: float, silence: float) -> bool:
        """Whether a rank whose last beat is so many seconds old is dead, though nothing has failed so far."""
        if seconds <= silence or self.closed or self.failed or self.terminated:
            return False
        ended = self.has_ended(here)
        return seconds > PATIENCE * silence if ended is None else ended
