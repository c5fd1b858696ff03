"""Every kind of place in which Python keeps state: a change is seen, and put back where that can be."""

from __future__ import annotations

import functools
import gc
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend.python_state import Snapshot
from shardc.ir.diagnostic import ShardcError
from shardc.torch_compat import is_fake
from tests.trained import MESH

pytestmark = pytest.mark.slow  # first in its process: each refusal looks at all objects, and these grow more
X = torch.ones(2, 3)
COUNTS = {"calls": 0}
TABLES: dict[int, Tensor] = {}


@dataclass(slots=True)
class Slots:
    count: int = 0


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


def helper(x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return x * COUNTS["calls"]


def remembers(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 (what is tested)
    seen.append(1)
    return x * len(seen)


class Base(nn.Module):
    calls: ClassVar[int] = 0
    log: ClassVar[list[int]] = []

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.act = nn.Parameter(torch.ones(3, 3)), act
        self.slots, self.array = Slots(), np.ones(3)
        self.count, self.cycle = itertools.count(1), itertools.cycle([1, 2, 3])

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x @ self.w).sum()


def on_the_class(m: Any, h: Tensor) -> Tensor:
    type(m).calls += 1
    return h * type(m).calls


def in_the_classes_list(m: Any, h: Tensor) -> Tensor:
    m.log.append(1)
    return h * len(m.log)


def in_slots(m: Any, h: Tensor) -> Tensor:
    m.slots.count += 1
    return h * m.slots.count


def in_an_array(m: Any, h: Tensor) -> Tensor:
    m.array *= 2
    return h * float(m.array[0])


CARRIED = {
    "a class": on_the_class,
    "a class's list": in_the_classes_list,
    "slots": in_slots,
    "numpy": in_an_array,
    "a global": lambda m, h: helper(h),
    "a default": lambda m, h: remembers(h),
    "a count": lambda m, h: h * next(m.count),
    "a cycle": lambda m, h: h * next(m.cycle),
}
NO_WAY_BACK = ("a count", "a cycle")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CARRIED)
def test_what_steps_would_hand_on_is_said(name: str) -> None:
    model = Base(CARRIED[name])
    before = Snapshot(model)
    program = shardc.compile(model, X, mesh=MESH)
    assert "SC109" in [d.code for d in program.diagnostics]
    if name not in NO_WAY_BACK:
        assert before.changes() == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "keep", [lambda n: table(n), lambda n: TABLES.setdefault(n, torch.linspace(0, 1, n))], ids=["lru_cache", "dict"]
)
def test_caches_hold_nothing_of_a_trace(keep: Callable[[int], Tensor]) -> None:
    """A table that is made once is no state that steps hand on, and what a trace made of it is gone."""
    model = Base(lambda m, h: h * keep(3))
    program = shardc.compile(model, X, mesh=MESH)
    assert "SC109" not in [d.code for d in program.diagnostics]
    assert not is_fake(keep(3))
    assert program.launch().step(X).loss == model(X)


@pytest.fixture(params=[False, True], ids=["", "set_aside"])
def set_aside(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """To be called before a compile: all objects are, or none is, set aside by `gc.freeze` as servers do it."""
    were_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield gc.freeze if request.param else lambda: None
    gc.unfreeze()
    if were_frozen:
        gc.freeze()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("refused", [False, True])
def test_caches_that_nothing_leads_to(size: int | None, refused: bool, set_aside: Callable[[], None]) -> None:
    """A cache in a place that no snapshot knows forgets what a trace left in it, also of one that was refused."""

    @functools.lru_cache(maxsize=size)
    def tables(n: int) -> tuple[Tensor, dict[str, list[Tensor]]]:
        return torch.linspace(0, 1, n), {"more": [torch.ones(n)]}

    hidden = types.SimpleNamespace(deep=[[[[[[tables]]]]]])

    def act(_m: Any, h: Tensor) -> Tensor:
        first, rest = hidden.deep[0][0][0][0][0][0](3)
        return h * first * rest["more"][0] * (float(h.sum()) if refused else 1)

    model = Base(act)
    set_aside()
    if refused:
        with pytest.raises(ShardcError, match="SC101"):
            shardc.compile(model, X, mesh=MESH)
    else:
        assert shardc.compile(model, X, mesh=MESH).launch().step(X).loss == model(X)
    assert not any(is_fake(t) for t in (tables(3)[0], *tables(3)[1]["more"]))
    assert model(X).item() == act(model, X @ model.w).sum().item()


def test_a_cache_keeps_what_it_had() -> None:
    """What an unbounded one had is there afterwards: another call may give something else."""

    @functools.cache
    def drawn(n: int) -> Tensor:
        return torch.rand(n)

    before = drawn(2)
    model = Base(lambda _m, h: h * drawn(2).sum() + drawn(3).sum())
    program = shardc.compile(model, X, mesh=MESH)
    assert "SC109" in [d.code for d in program.diagnostics]  # of rand(3)
    assert drawn(2) is before
    assert drawn.cache_info().currsize == 1
    assert not is_fake(drawn(3))


def test_a_place_that_nothing_leads_to(set_aside: Callable[[], None]) -> None:
    """What cannot be taken back would be met by the model's next call outside of a program."""
    kept = types.SimpleNamespace(deep=[[[[[[]]]]]])
    set_aside()

    def keep(_m: Any, h: Tensor) -> Tensor:
        kept.deep[0][0][0][0][0].append(h)
        return h

    with pytest.raises(ShardcError, match="SC109"):
        shardc.compile(Base(keep), X, mesh=MESH)


def test_functions_made_by_exec_belong_to_no_package() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w).sum()

    graph = torch.fx.symbolic_trace(Inner())
    assert type(graph).forward.__module__ is None
    shardc.compile(graph, X, mesh=MESH).verify()
