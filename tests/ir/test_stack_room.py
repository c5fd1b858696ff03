"""Functions with room for the frames of all that they call: they return, raise and recurse as before."""

import sys

import pytest

from shardc.ir.stack_room import _in_room, with_room


@with_room
def depth(n: int, *, step: int = 1) -> int:
    return 0 if n == 0 else 1 + plain_depth(n - step, step)


def plain_depth(n: int, step: int) -> int:
    return 0 if n <= 0 else 1 + plain_depth(n - step, step)


def test_it_returns_and_raises_as_the_function_does() -> None:
    assert depth(200) == 200
    assert depth(200, step=2) == 100
    assert depth.__name__ == "depth"
    with pytest.raises(TypeError, match="unsupported operand"):
        depth("a")  # type: ignore[arg-type]
    with pytest.raises(RecursionError):
        depth(10 * sys.getrecursionlimit())


def test_its_frame_takes_more_than_a_piece_of_the_stack() -> None:
    """CPython doubles a piece of 16 KiB until the frame fits: what is beyond 1 MiB takes 2."""
    assert _in_room.__code__.co_stacksize * 8 > 1 << 20
    assert with_room(lambda: sum(range(10)))() == 45
