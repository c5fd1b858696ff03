"""Methods whose reads are not known are watched while compiling, by code in their place, and stay what they are."""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from shardc.compiler.request import Request
from shardc.frontend.rolled_loops import active
from shardc.frontend.watched_calls import really, stop_watching, watch_calls
from shardc.program_cache.key import Key, key_of
from shardc.program_cache.place import Place
from shardc.program_cache.witness import Witness


class Base:
    def both(self, a: int, /, b: int = 2, *more: int, c: int = 3, **named: int) -> tuple[Any, ...]:
        return a, b, more, c, named


class Other(Base):
    def both(self, a: int, /, b: int = 20, *more: int, c: int = 30, **named: int) -> tuple[Any, ...]:
        return super().both(a, b, *more, c=c, **named)


def counter() -> tuple[Callable[[], int], Callable[[], int]]:
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add, lambda: count


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


async def later(n: int) -> int:
    return n


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def test_a_watched_function_does_what_it_did() -> None:
    add, count = counter()
    functions: Any = (Other.both, add, numbers, later, factorial)
    codes, seen = [function.__code__ for function in functions], list[str]()
    for function in functions:
        watch_calls(function, lambda function=function: seen.append(function.__name__))
    try:
        assert Other().both(1) == (1, 20, (), 30, {})
        assert Other().both(1, 2, 3, c=4, d=5) == (1, 2, (3,), 4, {"d": 5})
        assert (add(), add(), count()) == (1, 2, 2)
        assert [*numbers(3)] == [0, 1, 2]
        with pytest.raises(StopIteration, match="7"):
            later(7).send(None)
        assert factorial(3) == 6
        with pytest.raises(TypeError, match="missing 1 required"):
            Other().both()  # type: ignore[call-arg]
        assert [really(function).__code__ for function in functions] == codes
    finally:
        for function in functions:
            stop_watching(function)
    assert seen == ["both", "both", "add", "add", "numbers", "later", *["factorial"] * 3, "both"]
    assert [function.__code__ for function in functions] == codes
    assert [really(function) for function in functions] == [*functions]
    assert (add(), factorial(4), len(seen)) == (3, 24, 10)


def of(*functions: FunctionType) -> Witness:
    return Witness(Key("", frozenset(), functions))


def test_whoever_reads_its_code_is_given_its_own() -> None:
    code, witness = factorial.__code__, of(factorial, numbers)  # type: ignore[arg-type]
    with witness.watching():
        assert factorial.__code__ is code
        assert str(inspect.signature(numbers)) == "(n: int) -> collections.abc.Iterator[int]"
    assert witness.reason.startswith("factorial is looked at")
    assert factorial.__code__ is code


def test_two_that_watch_one_function_put_its_code_back() -> None:
    code, first, second = factorial.__code__, of(factorial), of(factorial)  # type: ignore[arg-type]
    with first.watching():
        with second.watching():
            assert factorial(3) == 6
        assert factorial(3) == 6
    assert (first.reason.split(",")[0], second.reason.split(",")[0]) == ("factorial is looked at", "factorial is run")
    assert factorial.__code__ is code


def test_another_thread_s_calls_are_its_own() -> None:
    witness, results = of(factorial), list[int]()  # type: ignore[arg-type]
    with witness.watching():
        thread = threading.Thread(target=lambda: results.append(factorial(3)))
        thread.start()
        thread.join()
    assert (results, witness.reason) == ([6], "")


def test_an_error_while_watching_puts_the_code_back() -> None:
    code, witness = factorial.__code__, of(factorial)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), witness.watching():
        assert factorial(1) // 0
    assert factorial.__code__ is code


class Looping(nn.Linear):
    def summed(self, x: torch.Tensor) -> torch.Tensor:
        state = x[0]
        for i in range(len(x)):
            state = state * 0.5 + x[i]
        return state + 0 * time.time()


def test_a_watched_function_whose_loops_are_rewritten_is_watched_on() -> None:
    model = Looping(8, 8)
    key = key_of(Request(model, torch.ones(4, 8), "dp=2"))
    assert Looping.summed in key.unknown
    code, witness = Looping.summed.__code__, Witness(key)
    with witness.watching():
        with active(model):
            assert really(Looping.summed).__code__ is not code
            assert torch.equal(model.summed(torch.ones(2, 8)), torch.full((8,), 1.75))
        assert really(Looping.summed).__code__ is code
    assert "Looping.summed is run" in witness.reason
    assert Looping.summed.__code__ is code


class Asking:
    """`scaled` asks who calls it; `deep` calls itself as often as Python allows."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return (2.0 if sys._getframe(1).f_code.co_name == "compile" else 3.0) * x  # pyright: ignore[reportPrivateUsage]

    def deep(self, x: torch.Tensor, left: int = 450) -> torch.Tensor:
        return 2.0 * x if left == 0 else self.deep(x, left - 1)


@pytest.mark.parametrize("name", ["scaled", "deep"])
def test_what_a_watched_method_ran_in_is_compiled_again(name: str) -> None:
    """It may ask for its caller, or leave Python no room for other code in its place: what counts runs unwatched."""
    compiles: list[bool] = []

    def compile() -> Any:
        function = getattr(Asking, name)
        compiles.append(really(function) is not function)
        return getattr(Asking(), name)(torch.ones(1))

    found = Place(None, witness=of(getattr(Asking, name))).watched(compile)
    assert torch.equal(found, torch.full((1,), 2.0))  # type: ignore[arg-type]
    assert compiles == [True, False]


def test_what_fails_while_nothing_is_watched_is_not_tried_again() -> None:
    compiles: list[int] = []

    def compile() -> Any:
        compiles.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Place(None, witness=of()).watched(compile)
    assert compiles == [1]
