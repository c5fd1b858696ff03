"""A replayed step that does not end: the monitor's thread notices, and names the rank and the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.execute.monitor import Monitor

LIMIT = 0.2  # seconds
NAMES = ["%fc.mm (mlp.py:5)", "%act (mlp.py:6)"]


class Named:
    def name(self, rank: int, counter: int) -> str:
        return NAMES[counter]

    def waits(self, rank: int, counter: int) -> bool:
        return False


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[ShardcError]:
    """The errors that a process would have ended with."""
    errors: list[ShardcError] = []
    monkeypatch.setattr(Monitor, "_exit_with", lambda _, failure, terminated: errors.append(failure))
    return errors


@contextmanager
def two_ranks(other_step: int, *, other_replays: bool = False) -> Iterator[tuple[Monitor, Monitor]]:
    store = dist.HashStore()
    own, other = (Monitor(store, rank, 2, Named(), replay_limit=LIMIT) for rank in range(2))
    try:
        other.begin(other_step)
        other.counter = 1
        if other_replays:
            other.replays(lambda: True)
        other._publish()
        own.begin(7)
        yield own, other
    finally:
        for monitor in (own, other):
            monitor._reports_error = False
            monitor.close()


def wait_for(errors: list[ShardcError]) -> str:
    deadline = time.monotonic() + 20
    while not errors and time.monotonic() < deadline:
        time.sleep(0.05)
    return str(errors[0])


def test_a_replay_names_the_rank_that_is_late(ends: list[ShardcError]) -> None:
    with two_ranks(other_step=6) as (own, _):
        own.replays(lambda: False)
        text = wait_for(ends)
    assert ends[0].code == "SC503"
    assert "rank 1 did not come to the replay of step 7 in time; rank 0 waited for it" in text
    assert "rank 1 is alive, at instruction %act (mlp.py:6) of step 6" in text


def test_a_replay_that_all_ranks_have_begun_names_its_step(ends: list[ShardcError]) -> None:
    with two_ranks(other_step=7, other_replays=True) as (own, _):
        own.replays(lambda: False)
        text = wait_for(ends)
    assert ends[0].code == "SC503"
    assert "the replay of step 7 on rank 0 did not end in time; all ranks have begun it" in text


def test_replays_that_end_are_no_errors(ends: list[ShardcError]) -> None:
    """However long ago they began; and the next one has its own time."""
    with two_ranks(other_step=7) as (own, _):
        own.replays(lambda: True)
        time.sleep(1.5)
        assert own._replay is None
        slow = [False, True]
        own._replay_limit = 1e9
        own.replays(lambda: slow.pop(0) if slow else True)
        time.sleep(1.5)
    assert not ends


def test_a_dead_rank_is_named_with_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.runtime.execute.monitor.SILENCE", 1.0)
    monkeypatch.setattr("shardc.runtime.execute.monitor.this_process", lambda: None)  # both ranks are this process
    with two_ranks(other_step=7, other_replays=True) as (own, other):
        other._bell.stop()
        other._thread.join()
        other._publish()
        own.replays(lambda: True)
        failure = own.blame(RuntimeError("Connection closed by peer"))
    assert failure.code == "SC502"
    assert "rank 1 died, without an error of its own; rank 0 was waiting for it in the replay of step 7" in str(failure)
    assert "rank 1 last said that it was at the replay of step 7" in str(failure)


def test_the_step_after_a_replay_counts_instructions_again() -> None:
    with two_ranks(other_step=7) as (own, _):
        own.replays(lambda: True)
        assert own._current_instruction() == "the replay of step 7"
        own.begin(8)
        assert own._current_instruction() == "instruction %fc.mm (mlp.py:5) of step 8"
