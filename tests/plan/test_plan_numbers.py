"""Every number of a plan has a range; what is outside, or no number, is refused with its key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardc import Plan
from shardc.ir.diagnostic import ShardcError

NO_NUMBERS = (True, "inf", "1.0", math.nan, math.inf, -math.inf, [1], {"a": 1})
WHOLE = {
    "accumulate": lambda v: {"accumulate": v},
    "seed": lambda v: {"seed": v},
    "microbatches": lambda v: {"pipeline": {"microbatches": v}},
    "stages": lambda v: {"pipeline": {"microbatches": 2, "stages": v}},
    "virtual": lambda v: {"pipeline": {"microbatches": 2, "virtual": v}},
    "growth_interval": lambda v: {"precision": {"compute": "fp16", "growth_interval": v}},
    "ignore": lambda v: {"loss": {"tokens": "labels", "ignore": v}},
    "shift": lambda v: {"loss": {"tokens": "labels", "shift": v}},
    "zero": lambda v: {"storage": {"zero": v, "axes": ["dp"]}},
}
REAL = {
    "clip_grad_norm": lambda v: {"clip_grad_norm": v},
    "norm": lambda v: {"clip_grad_norm": {"norm": v}},
    "loss_scale": lambda v: {"precision": {"compute": "fp16", "loss_scale": v}},
}
BYTES = {
    "memory": lambda v: {"pipeline": {"microbatches": 2, "memory": v}},
    "recompute": lambda v: {"recompute": {"budget": v}},
    "budget": lambda v: {"budget": {"tp": v}},
}
FLAGS = {
    "strict": lambda v: {"strict": v},
    "align": lambda v: {"align": v},
    "returned": lambda v: {"clip_grad_norm": {"norm": 1.0, "returned": v}},
    "collectives": lambda v: {"recompute": {"mode": "full", "collectives": v}},
    "regather": lambda v: {"storage": {"zero": 3, "axes": ["dp"], "regather": v}},
}


def refused(plan: dict[str, Any], key: str) -> None:
    with pytest.raises(ShardcError) as caught:
        Plan.from_dict(plan)
    assert caught.value.code == "SC208"


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("value", [*NO_NUMBERS, 1.5, -(2**80), 2**80], ids=str)
def test_whole_numbers(key: str, value: object) -> None:
    refused(WHOLE[key](value), key)


@pytest.mark.parametrize("key", ["accumulate", "microbatches", "stages", "virtual"])
@pytest.mark.parametrize("value", [0, -1, 10**9])
def test_counts(key: str, value: int) -> None:
    refused(WHOLE[key](value), key)


@pytest.mark.parametrize("key", REAL)
@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, 0, 0.0, 1e300], ids=str)
def test_real_numbers(key: str, value: object) -> None:
    refused(REAL[key](value), key)


@pytest.mark.parametrize("key", BYTES)
@pytest.mark.parametrize("value", [True, -1, "inf", "9" * 400, "1 parsec", 1e30, [1]], ids=lambda v: str(v)[:9])
def test_bytes(key: str, value: object) -> None:
    refused(BYTES[key](value), key)


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes", "true", 0.0], ids=str)
def test_flags(key: str, value: object) -> None:
    refused(FLAGS[key](value), key)


def test_what_is_a_number() -> None:
    for text, norm in (("1e-3", 1e-3), ("1", 1.0), ("{norm: 1e-3}", 1e-3)):
        clipping = Plan.parse(f"clip_grad_norm: {text}").clip_grad_norm
        assert clipping is not None
        assert clipping.norm == norm
    assert Plan.from_dict({"seed": -3}).seed == -3
    assert Plan.from_dict({"pipeline": {"microbatches": 8, "memory": "2 GiB"}}).pipeline is not None


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("**.**x", "a.b.cx", "a.b.c"),
        ("***", "a.b", ""),
        ("**.***", "a.b", "("),
        ("a.**.**", "a.b", "b"),
        ("**[}q", "a[}q", "a"),
        ("a.**", "a.b.c", "ab"),
        ("*.a", "b.a", "b.c.a"),
    ],
)
def test_stars_of_any_number_are_patterns(pattern: str, matching: str, other: str) -> None:
    (annotation,) = Plan.from_dict({"params": {pattern: "-"}}).params.values()
    assert annotation.matches(matching)
    if pattern.strip("*."):
        assert not annotation.matches(other)
