"""Every rule tells the truth: for any shapes, split and mesh, shards put together equal the whole.

Nothing here is about one op. A new rule is tested as soon as it is registered: from its text, whose
factors get random sizes, or from its examples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.ir.mesh import Mesh
from shardc.ir.types import Axes
from shardc.rules import all_rules
from shardc.rules.notation import _parse
from shardc.rules.projection import project
from shardc.rules.registry import Example, OpRule
from tests.rules.harness import Trial, call_of, pending_choices, splittable

RULES = sorted(all_rules(), key=lambda entry: str(entry.op))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-1}
AXES = ("a", "b", "p")  # `p` is the one on which operands are pending


def runs(entry: OpRule) -> int:
    """Pointwise ops share one rule, so a few draws do; the profile scales both."""
    share = 0.06 if entry.kind == "pointwise" else 0.3
    return max(4, int(settings.default.max_examples * share))  # type: ignore[union-attr]


@st.composite
def from_text(draw: st.DrawFn, entry: OpRule) -> Example:
    """Shapes for the operands of a rule that is text: a size for every name, the same leading dims for every `...`."""
    terms, _ = _parse(entry.defaults.text)
    lead = tuple(draw(st.lists(st.integers(1, 5), max_size=2)))
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        if name.isdigit():
            return int(name)
        return sizes.setdefault(name, draw(st.integers(1, 7)))

    shapes: list[tuple[int, ...]] = []
    for term in terms:
        shape: list[int] = []
        for dim in term:
            if dim == ("...",):
                shape += lead
            else:
                product = 1
                for name in dim:
                    product *= size(name)
                shape.append(product)
        shapes.append(tuple(shape))
    return Example(tuple(shapes), {}, {})


@st.composite
def resized(draw: st.DrawFn, entry: OpRule, example: Example) -> Example:
    """A pointwise example with other sizes: equal ones stay equal, ones stay one."""
    sizes: dict[int, int] = {1: 1}

    def change(argument: Any, value: Any) -> Any:
        if "Tensor" not in str(argument.type) or not isinstance(value, tuple):
            return value
        return tuple(sizes[n] if n in sizes else sizes.setdefault(n, draw(st.integers(2, 7))) for n in value)

    args = tuple(change(a, v) for a, v in zip(entry.op._schema.arguments, example.args, strict=False))
    return Example(args, example.kwargs, example.ints, example.bools)


@st.composite
def examples_of(draw: st.DrawFn, entry: OpRule) -> Example:
    if not entry.examples:
        return draw(from_text(entry))
    example = draw(st.sampled_from(entry.examples))
    return draw(resized(entry, example)) if entry.kind == "pointwise" and draw(st.booleans()) else example


def divisors(size: int) -> list[int]:
    return [n for n in range(2, size) if size % n == 0]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    return Mesh([(axis, draw(st.sampled_from((2, 3)))) for axis in AXES[:2]] + [("p", 2)])


@st.composite
def splits(draw: st.DrawFn, pieces: list[int]) -> dict[int, Axes]:
    """One or two pieces over an axis each, or one over both; none at all, now and then."""
    if not pieces or draw(st.integers(0, 9)) == 0:
        return {}
    first = draw(st.sampled_from(pieces))
    match draw(st.integers(0, 3)):
        case 0 | 1:
            return {first: ("a",)}
        case 2:
            return {first: draw(st.sampled_from([("a", "b"), ("b", "a")]))}
        case _:
            rest = [p for p in pieces if p != first]
            return {first: ("a",), draw(st.sampled_from(rest)): ("b",)} if rest else {first: ("b",)}


def trial_of(data: st.DataObject, entry: OpRule, dtype: torch.dtype) -> Trial:
    example = data.draw(examples_of(entry), label="example")
    trial = Trial(call_of(entry, example, data.draw(st.integers(0, 99), label="seed"), dtype), data.draw(meshes(), label="mesh"))
    whole = data.draw(st.booleans(), label="one atom a factor")

    def cut(factor: str, size: int) -> tuple[int, ...]:
        options = divisors(size)
        if whole or not options:
            return (size,)
        major = data.draw(st.sampled_from(options), label=f"atoms of {factor}")
        return (major, size // major)

    trial.refine(cut)
    return trial


@pytest.mark.parametrize("entry", RULES, ids=lambda entry: str(entry.op))
def test_shards_put_together_equal_the_whole(entry: OpRule) -> None:
    @settings(max_examples=runs(entry))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        trial = trial_of(data, entry, torch.float64)
        projection = project(trial.node)
        split = data.draw(splits(splittable(trial, projection)), label="split")
        trial.agree(split, {}, data.draw(st.booleans(), label="padding is 0"), 1, TOLERANCE[torch.float64])

    check()


LINEAR = [e for e in RULES if e.function is not None or e.defaults.linear]


@pytest.mark.parametrize("entry", LINEAR, ids=lambda entry: str(entry.op))
def test_pending_sums_pass_through_linear_operands(entry: OpRule) -> None:
    @settings(max_examples=runs(entry))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        trial = trial_of(data, entry, torch.float64)
        projection = project(trial.node)
        choices = pending_choices(trial, projection)
        if not choices:
            return
        pending = data.draw(st.sampled_from(choices), label="pending")
        split = data.draw(splits(splittable(trial, projection)), label="split")
        trial.agree(split, {"p": pending}, data.draw(st.booleans(), label="padding is 0"), 1, 1e-11)

    check()
