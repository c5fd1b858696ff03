"""Each hostile module trains as eager PyTorch trains it, under every layout, or is refused with the code it names."""

from __future__ import annotations

from itertools import product
from zlib import crc32

import pytest

from tests.hostile import (
    aliasing,
    autocast,
    buffers,
    caches,
    checkpointing,
    custom_ops,
    derivatives,
    expert_loops,
    hooks,
    modes,
    optimizers,
    outputs,
    parameters,
    python_state,
    randomness,
    structure,
)
from tests.hostile.harness import CASES, LAYOUTS, OPTIMIZERS, outcome

THEMES = (
    *(aliasing, autocast, buffers, caches, checkpointing, custom_ops, derivatives, expert_loops, hooks, modes),
    *(optimizers, outputs, parameters, python_state, randomness, structure),
)
EVERY = [two for two in product(OPTIMIZERS, LAYOUTS) if two != ("none", "zero1")]  # which cuts state alone


def drawn(name: str) -> tuple[str, str]:
    """One of the layouts, with one of the optimizers or none: others for others, and the same tomorrow."""
    return EVERY[crc32(name.encode()) % len(EVERY)]


def checked(name: str, optimizer: str, layout: str) -> None:
    case = CASES[name]
    assert outcome(case, layout, optimizer) == (case.code(layout) or case.warned or "right")


@pytest.mark.sampled(34)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_eager(name: str) -> None:
    checked(name, *drawn(name))


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_eager_everywhere(name: str, layout: str) -> None:
    for optimizer in OPTIMIZERS:
        if (optimizer, layout) in EVERY:
            checked(name, optimizer, layout)


def test_there_are_enough() -> None:
    assert len(CASES) >= 120
    assert {drawn(name)[1] for name in CASES} == set(LAYOUTS)
    assert all(theme.__name__ in {case.build.__module__ for case in CASES.values()} for theme in THEMES)
