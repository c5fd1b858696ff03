"""torch's pipeline runtime: what one queue of transfers a rank does to a schedule."""

import pytest

from benchmarks.torch_pipeline import Work, step_seconds


def unit(work: Work) -> float:
    return 2.0 if work.backward else 1.0


def works(text: str) -> list[Work]:
    """`0F1`: forward of stage 0 for microbatch 1."""
    return [Work(item[1] == "B", int(item[0]), int(item[2])) for item in text.split()]


def test_a_chain_of_stages_adds_up() -> None:
    orders = [works("0F0 0B0"), works("1F0 1B0")]
    assert step_seconds(orders, unit, 0.25) == pytest.approx(2 * 1 + 2 * 2 + 2 * 0.25)


def test_what_is_on_one_rank_is_not_sent() -> None:
    assert step_seconds([works("0F0 1F0 1B0 0B0")], unit, 100.0) == pytest.approx(6.0)


def test_a_receive_that_waits_holds_up_what_is_sent_behind_it() -> None:
    """The first rank's receive of a gradient is listed where the second's turn comes, in front of its send of 0F1: so
    that leaves when 1B0 is done, and 1F1 begins then, not before 1B0 as it could."""
    orders = [works("0F0 0F1 0B0 0B1"), works("1F0 1B0 1F1 1B1")]
    slow = {Work(False, 0, 1): 5.0}

    def seconds(work: Work) -> float:
        return slow.get(work, unit(work))

    # 0F0 to 1, 1F0 to 2, 1B0 to 4; 0F1 to 6; 1F1 to 7, 1B1 to 9, 0B1 to 11: the queue is free by then.
    assert step_seconds(orders, seconds, 0.0) == pytest.approx(11.0)
    # With a slow 1B0 0F1 is done at 2, but leaves when the gradient has arrived, at 12; 1F1 13, 1B1 15, 0B1 17.
    slow = {Work(True, 1, 0): 10.0}
    assert step_seconds(orders, seconds, 0.0) == pytest.approx(17.0)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    with pytest.raises(AssertionError, match="waits for itself"):
        step_seconds([works("0B0 0F0"), works("1F0 1B0")], unit, 0.0)
