"""Signals while the loop runs: when they are raised, and that processes which it forks die of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from shardc.runtime.execute.signal_wakeup import SignalWakeup
from shardc.runtime.train.interruptions import Interruptions

RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As a fresh process has them."""
    before = {number: signal.getsignal(number) for number in RAISED}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", RAISED)
def test_a_signal_waits_for_the_step_and_a_second_does_not(number: signal.Signals) -> None:
    sent: list[int] = []

    def step(interruptions: Interruptions, signals: int) -> None:
        with interruptions.later():
            for count in range(signals):
                signal.raise_signal(number)
                sent.append(count)

    with Interruptions() as interruptions:
        with pytest.raises(RAISED[number]):
            step(interruptions, 1)
        assert sent == [0]
        with pytest.raises(RAISED[number]):
            signal.raise_signal(number)  # between steps
        with pytest.raises(RAISED[number]):
            step(interruptions, 3)
        assert sent == [0, 0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", RAISED)
def test_of_a_jobs_ranks_a_signal_waits_for_the_others(number: signal.Signals) -> None:
    with Interruptions(together=True) as interruptions:
        signal.raise_signal(number)
        with interruptions.later():
            assert interruptions.came == number
        with pytest.raises(RAISED[number]):
            signal.raise_signal(number)
        with pytest.raises(RAISED[number]) as caught:
            interruptions.end(number)
        assert interruptions.came == 0
    if number == signal.SIGTERM:
        assert caught.value.code == 128 + signal.SIGTERM


def test_a_monitor_s_handler_is_taken_over_and_still_told() -> None:
    bell = SignalWakeup()
    try:
        with Interruptions(together=True) as interruptions:
            signal.raise_signal(signal.SIGTERM)
            assert interruptions.came == signal.SIGTERM
            assert bell.wait(5.0) == bytes([signal.SIGTERM])
    finally:
        bell.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_dies_of_a_signal_and_its_parent_does_not_hear_of_it() -> None:
    bell = SignalWakeup()
    runs, says = os.pipe()
    try:
        with Interruptions(together=True) as interruptions:
            child = os.fork()
            if child == 0:  # a data loader's worker
                os.write(says, b"x")
                time.sleep(30)
                os._exit(0)
            os.read(runs, 1)  # Python forgets what comes before a fork is done
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status)
            assert os.WTERMSIG(status) == signal.SIGTERM
            assert interruptions.came == 0
            assert bell.wait(0.2) == b""
    finally:
        os.close(runs)
        os.close(says)
        bell.close()
