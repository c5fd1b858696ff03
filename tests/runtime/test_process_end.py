"""A rank that is silent and alive is not dead: a call that keeps Python's lock silences its heartbeat."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError
from shardc.runtime.execute import monitor
from shardc.runtime.execute.monitor import Monitor
from shardc.runtime.execute.process_end import ProcessId, _state_and_start, has_ended, this_process

HERE = this_process()
SILENCE = 1.0
OTHER_RANK = """
import ctypes, sys, time
import torch.distributed as dist
from shardc.runtime.execute.monitor import Monitor
class Named:
    def name(self, rank, counter): return str(counter)
    def waits(self, rank, counter): return False
store = dist.TCPStore("localhost", int(sys.argv[1]), is_master=False)
own = Monitor(store, 1, 2, Named())
print("beats", flush=True)
if sys.argv[2] == "keeps the lock":
    ctypes.PyDLL(None).sleep(4)
    own.close()
else:
    time.sleep(60)
"""


class Named:
    def name(self, rank: int, counter: int) -> str:
        return str(counter)

    def waits(self, rank: int, counter: int) -> bool:
        return False


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[ShardcError]:
    """The errors that this process would have ended with."""
    errors: list[ShardcError] = []
    monkeypatch.setattr(monitor, "BEAT", 0.1)
    monkeypatch.setattr(monitor, "SILENCE", SILENCE)
    monkeypatch.setattr(Monitor, "_exit_with", lambda _, failure, terminated: errors.append(failure))
    return errors


@contextmanager
def beside(does: str) -> Iterator[tuple[Monitor, subprocess.Popen[str]]]:
    """A monitor that watches, and a process that is rank 1."""
    store = dist.TCPStore("localhost", 0, is_master=True)
    command = [sys.executable, "-c", OTHER_RANK, str(store.port), does]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "beats\n"
        own = Monitor(store, 0, 2, Named(), fatal=True)
        try:
            yield own, other
        finally:
            with suppress(ProcessLookupError):
                other.kill()
            own._reports_error = False
            own.close()


def test_a_rank_that_keeps_pythons_lock_is_alive(ends: list[ShardcError]) -> None:
    with beside("keeps the lock") as (_, other):
        assert other.wait(60) == 0
        time.sleep(2 * SILENCE)
    assert not ends


def test_a_rank_that_was_killed_is_dead(ends: list[ShardcError]) -> None:
    with beside("sleeps") as (_, other):
        other.kill()
        deadline = time.monotonic() + 30
        while not ends and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ends[0].code == "SC502"
    assert "rank 1 died, without an error of its own" in str(ends[0])


def test_a_rank_that_stands_still_is_late_not_dead(ends: list[ShardcError]) -> None:
    with beside("sleeps") as (own, other):
        other.send_signal(signal.SIGSTOP)
        failure = own.blame(TimeoutError("timed out"))
    assert failure.code == "SC503"
    assert "rank 1 is alive" in str(failure)
    assert not ends


def test_of_a_process_of_another_machine_nothing_is_known() -> None:
    assert HERE is not None
    assert has_ended(HERE._replace(machine="another"), HERE) is None
    assert has_ended(None, HERE) is None
    assert has_ended(HERE, None) is None


def test_a_number_that_another_process_has_got_is_of_one_that_ended() -> None:
    assert HERE is not None
    assert has_ended(HERE, HERE) is False
    assert has_ended(HERE._replace(started="0"), HERE) is True


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    assert HERE is not None
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            state, started = _state_and_start(child)
            if state == "Z":
                break
        assert state == "Z"
        assert has_ended(ProcessId(HERE.machine, child, started), HERE) is True
    finally:
        os.waitpid(child, 0)
