"""What all tests share: one thread, so that runs repeat; hypothesis profiles; long tests first; golden files."""

import atexit
import gc
import os
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from tests import library_state, shared_traces

CACHE = type(cache(lambda: None))

os.environ["SHARDC_CACHE"] = "off"  # also of processes that tests start: what is tested is what compiling does

gc.disable()  # until all is imported: little of it is garbage

# One process a core runs tests; more threads would only compete, and sum in another order.
torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=8)
# Each night every property has other examples, and seven times as many.
settings.register_profile("night", deadline=None, max_examples=60)
# `make fuzz`: other examples each time, or those of --hypothesis-seed.
settings.register_profile("fuzz", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", "5000")))
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files with what the code says now")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before `-m "not long"` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Of the N cases of a test that is marked `sampled(n)`, all but N / n (rounded up) are `long`. Under `-k` none is:
    what a word selects is run, or `-k cdist` would pass a wrong rule of cdist."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items if not config.getoption("keyword") else []:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("sampled")
        assert marker is not None
        kept = _spread(of_test, -(-len(of_test) // int(marker.args[0])))
        for item in of_test:
            if item not in kept:
                item.add_marker(pytest.mark.long)
    yield
    _slow_first(items)


def _spread(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of a test's cases that as many as can be of each parameter's values occur: of models x layouts, a few
    cases have every model and every layout. Of cases that serve alike, those that lie evenly among all."""
    values = [{(name, repr(v)) for name, v in case.callspec.params.items()} for case in cases]  # type: ignore[attr-defined]
    kept: list[int] = []
    seen: set[tuple[str, str]] = set()
    while len(kept) < count:
        rest = [i for i in range(len(cases)) if i not in kept]
        even = len(kept) * len(cases) / count
        chosen = max(rest, key=lambda i: (len(values[i] - seen), -abs(i - even)))
        kept.append(chosen)
        seen |= values[chosen]
    return [cases[i] for i in kept]


def _slow_first(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first, whole, for what their tests share: no core ends with a long test alone. Those
    that install an audit hook, which slows down all that follows in the process, come last."""
    slow, audited = ({item.path for item in items if item.get_closest_marker(name)} for name in ("slow", "audited"))
    items.sort(key=lambda item: (item.path in audited, item.path not in slow))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage has to look at it again. Tracing makes thousands of
    objects, nearly all to keep: at 20,000 new ones instead of 700, collections are 2 % of a compile instead of 6 %."""
    shared_traces.install()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    # At the end all of it goes: what is kept then, some libraries take for a leak. After pytest's own last collections.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    shared_traces.switch(item)
    library_state.left_replaced()  # libraries that have been imported since are known from now on


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module's own functions remember goes with it, and what else it leaves is set aside: traces and programs
    that tests share come to millions of objects, which a collection looks at for seconds; so does a compile that
    fails, for caches that remember its tensors. Libraries are left as they were."""
    if nextitem is None or nextitem.path != item.path:
        _forget(item.module)  # type: ignore[attr-defined]
        gc.collect()
        gc.freeze()
        if replaced := library_state.left_replaced():
            pytest.fail(f"{item.path.name} leaves {', '.join(replaced)} replaced in other tests", pytrace=False)


def _forget(module: ModuleType) -> None:
    """Empty the caches of a module's functions, but not of those that it has imported: other modules have them too."""
    for value in list(vars(module).values()):
        if isinstance(value, CACHE) and value.__module__ == module.__name__:
            value.cache_clear()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("placement/too_many_dims.txt", text)` compares text with a file beside the test."""
    folder = Path(str(request.path)).parent

    def compare(name: str, text: str) -> None:
        path = folder / name
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: write it with --update-golden, and read it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: see the diff, then --update-golden"

    return compare
