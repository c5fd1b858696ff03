"""Every rule tells the truth: for any shapes, split and mesh, shards put together equal the whole.

Nothing here is about one op. A new rule is tested as soon as it is registered: from its text, whose
factors get random sizes, or from its examples.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardc.ir.mesh import Mesh
from shardc.ir.types import Axes
from shardc.rules import all_rules, example, registry
from shardc.rules.notation import Notation, RuleError, _parse
from shardc.rules.projection import project
from shardc.rules.registry import Example, OpRule
from tests.rules.harness import Trial, call_of, pending_choices, splittable

aten = torch.ops.aten
# Of rows in the order of their experts each rank has its own: tests/rules/test_experts.py puts them together.
RULES = sorted((entry for entry in all_rules() if not entry.ragged), key=lambda entry: str(entry.op))
PHASES: tuple[Phase, ...] = tuple(Phase)  # of each search for a counterexample
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-1}
AXES = ("a", "b", "p")  # `p` is the one on which operands are pending


def runs(entry: OpRule) -> int:
    """Pointwise ops share one rule, so a few draws do; the profile scales both."""
    share = 0.06 if entry.kind == "pointwise" else 0.3
    return max(4, int(max(60, settings().max_examples) * share))


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
    trial = Trial(
        call_of(entry, example, data.draw(st.integers(0, 99), label="seed"), dtype), data.draw(meshes(), label="mesh")
    )
    whole = data.draw(st.booleans(), label="one atom a factor")

    def cut(factor: str, size: int) -> tuple[int, ...]:
        options = divisors(size)
        if whole or not options:
            return (size,)
        major = data.draw(st.sampled_from(options), label=f"atoms of {factor}")
        return (major, size // major)

    trial.refine(cut)
    return trial


@pytest.mark.sampled(8)
@pytest.mark.parametrize("entry", RULES, ids=lambda entry: str(entry.op))
def test_shards_put_together_equal_the_whole(entry: OpRule) -> None:
    @settings(max_examples=runs(entry), phases=PHASES)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        trial = trial_of(data, entry, torch.float64)
        projection = project(trial.node)
        split = data.draw(splits(splittable(trial, projection)), label="split")
        trial.agree(split, {}, data.draw(st.booleans(), label="padding is 0"), 1, TOLERANCE[torch.float64])

    check()


LINEAR = [e for e in RULES if e.function is not None or e.defaults.linear]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("entry", LINEAR, ids=lambda entry: str(entry.op))
def test_pending_sums_pass_through_linear_operands(entry: OpRule) -> None:
    @settings(max_examples=runs(entry), phases=PHASES)
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


def in_other_precision(entry: OpRule) -> bool:
    """Ops whose results change by rounding only: no steps, no orders, and no example that fixes a dtype."""
    return entry.kind == "compute" and bool(entry.defaults.linear or entry.defaults.sum) and entry.function is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entry", [e for e in RULES if in_other_precision(e)], ids=lambda entry: str(entry.op))
def test_shards_agree_in_training_precision(entry: OpRule, dtype: torch.dtype) -> None:
    @settings(max_examples=max(3, runs(entry) // 4))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        trial = trial_of(data, entry, dtype)
        projection = project(trial.node)
        split = data.draw(splits(splittable(trial, projection)), label="split")
        trial.agree(split, {}, False, 1, TOLERANCE[dtype])

    check()


# ------------------------------------------------------------------------------------------ what a rule must bring
@pytest.mark.parametrize("entry", RULES, ids=lambda entry: str(entry.op))
def test_a_rule_can_be_tried(entry: OpRule) -> None:
    needed = [a for a in entry.op._schema.arguments if "Tensor" not in str(a.type) and not a.has_default_value()]
    optional = [a for a in needed if "Optional" not in str(a.type)]
    if entry.function is not None or optional:
        assert entry.examples, f"{entry.op}: give its rule examples; nothing tests it without"


class _Wrong:
    """Registers a rule for as long as a test runs, in place of the one there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, op: Any, notation: Notation, *examples: Example, **options: Any) -> OpRule:
        entry = OpRule(op, notation, None, examples, **options)
        self.monkeypatch.setitem(registry._RULES, op, entry)
        self.monkeypatch.setattr(registry, "_FITTED", {})
        return entry


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> _Wrong:
    """What is caught need not be made small: shrinking takes most of the time."""
    monkeypatch.setattr(sys.modules[__name__], "PHASES", (Phase.generate,))
    return _Wrong(monkeypatch)


WRONG = {
    "a mean is no sum": (aten.mean.dim, Notation("a b -> a", sum="b"), [example((4, 6), (1,))]),
    "a scan is not free": (aten.cumsum.default, Notation("a b -> a b"), [example((4, 6), 1)]),
    "an index counts from the start": (aten.argmax.default, Notation("a b -> a", max="b"), [example((4, 6), 1)]),
    "a view keeps its order": (aten.view.default, Notation("(a b) -> (b a)"), [example((12,), (12,))]),
    "a whole section is cut": (aten.select.int, Notation("a b -> a", sum="b"), [example((4, 6), 1, 0)]),
    "the diagonal is global": (aten.tril.default, Notation("m n -> m n"), [example((4, 6))]),
    "padding is in a product's sum": (aten.prod.dim_int, Notation("a b -> a", sum="b"), [example((4, 5), 1)]),
    "a size is global": (aten.full.default, Notation("-> a b"), [example((4, 6), 1.5)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str, wrong: _Wrong) -> None:
    op, notation, examples = WRONG[name]
    with pytest.raises((AssertionError, RuntimeError, RuleError, BaseExceptionGroup)):
        test_shards_put_together_equal_the_whole(wrong(op, notation, *examples))


WRONGLY_LINEAR = {
    "adding a number": (aten.add.Scalar, Notation("... -> ...", linear="joint"), [example((4, 6), 1)]),
    "the other branch of a where": (
        aten.where.self,
        Notation("..., ..., ... -> ...", linear=(1,)),
        [example((4, 6), (4, 6), (4, 6), bools=("condition",))],
    ),
    "both factors at once": (aten.mul.Tensor, Notation("..., ... -> ...", linear="joint"), []),
    "a divisor": (aten.div.Tensor, Notation("..., ... -> ...", linear="each"), []),
    "a square": (aten.square.default, Notation("... -> ...", linear="joint"), []),
}


@pytest.mark.parametrize("name", WRONGLY_LINEAR)
def test_a_wrong_claim_of_linearity_is_caught(name: str, wrong: _Wrong) -> None:
    op, notation, examples = WRONGLY_LINEAR[name]
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        test_pending_sums_pass_through_linear_operands(wrong(op, notation, *examples))
