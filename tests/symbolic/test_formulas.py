"""Formulas equal what compiling at the sizes says, exactly; and those of tensor parallelism are Megatron-LM's."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import sympy
import torch

import shardc
from shardc import Program, ShardcError
from shardc.ir.ops.buckets import PACK
from shardc.plan.schema import Plan
from shardc.symbolic.expression import Expression
from shardc.symbolic.formulas import Formulas
from shardc.symbolic.layers import Candidate, pruned
from tests.symbolic.families import FAMILIES, HIDDEN, POSITIONS, compiled

LAYERS = 5
# Where gradients are made layers late, peaks of few layers are other ones: the layers that are compiled, and those that
# peaks are formulas for. Of GPT-2 under sequence parallelism other products run late from layer to layer.
MORE_LAYERS = {"llama": (9, "from 7"), "llama_sp": (9, "from 7"), "gpt2_sp": (5, "of 5")}
OWN = {"B": 4, "S": 6, "dp": 2, "tp": 2}  # what formulas are derived from: sizes that divide those of the models
PARTS, OF_A_PART = 20, 10  # random sizes of each family: parts run on as many cores
B, S, dp, tp, L = sympy.symbols("B S dp tp L", integer=True, positive=True)
A = B / dp * S * HIDDEN * 4  # one activation of the residual stream


@cache
def formulas(family: str, layers: int = LAYERS) -> Formulas:
    return compiled(family, layers, **OWN).symbolic()


def points(own: Formulas, seed: str, count: int, layers: tuple[int, int] = (2, 7)) -> list[dict[str, int]]:
    """Random sizes for which the formulas hold."""
    chosen, domain = random.Random(seed), own.domain
    found: list[dict[str, int]] = []
    while len(found) < count:
        point = {name: chosen.randint(*ends) for name, ends in domain.ranges.items()}
        point |= {axis: chosen.choice(sizes) for axis, sizes in domain.axes.items()} | {"L": chosen.randint(*layers)}
        try:
            domain.check(point)
        except ShardcError:
            continue
        found.append(point)
    return found


def of_program(program: Program) -> tuple[dict[Any, int], dict[str, int], int, int]:
    moved: Counter[Any] = Counter()
    for c in program.collectives():
        moved[c.phase, c.axes, c.kind] += c.bytes_per_step
    flops, memory = program.flops(), program.memory()
    return dict(moved), {p: flops.of_phase(p) for p in ("fwd", "bwd")}, memory.peak, memory.stored


def check(family: str, own: Formulas, sizes: list[dict[str, int]]) -> None:
    """Bytes, FLOPs and memory are those of compiles; no peak is given where layers are too few to know it."""
    for point in sizes:
        moved, flops, peak, stored = of_program(compiled(family, point["L"], **without_layers(point)))
        costs = own.at(point)
        assert dict(costs.bytes) == moved, point
        assert dict(costs.flops) == flops, point
        assert costs.stored == stored, point
        known = own.memory_layers in (0, point["L"]) and point["L"] >= own.memory_from
        assert costs.peak == (peak if known else None), point


def without_layers(point: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in point.items() if name != "L"}


def test_equal_to_compiles() -> None:
    own = formulas("gpt2")
    check("gpt2", own, points(own, "gpt2", 1))


def test_own_sizes_are_of_the_domain() -> None:
    """Those too that divide sizes of the model, which the other compiles avoid."""
    moved, flops, peak, stored = of_program(compiled("gpt2", LAYERS, **OWN))
    costs = formulas("gpt2").at(OWN | {"L": LAYERS})
    assert (dict(costs.bytes), dict(costs.flops), costs.peak, costs.stored) == (moved, flops, peak, stored)
    assert {name: low for name, (low, _) in formulas("gpt2").domain.ranges.items()} == {"B": 4, "S": 5}


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_many_compiles(family: str, part: int) -> None:
    layers, known = MORE_LAYERS.get(family, (LAYERS, "from 2"))
    own = formulas(family, layers)
    assert set(own.domain.axes) == {"dp", "tp"}
    assert known == (f"of {own.memory_layers}" if own.memory_layers else f"from {own.memory_from}")
    check(family, own, points(own, f"{family} {part}", OF_A_PART, (2, layers + 2)))


@pytest.mark.long
def test_memory_of_layers_that_overlap_otherwise() -> None:
    """Of GPT-2 under sequence parallelism, peaks are those of as many layers as were compiled."""
    own = formulas("gpt2_sp")
    assert own.memory_layers == LAYERS
    check("gpt2_sp", own, points(own, "gpt2_sp", 8, (LAYERS, LAYERS)))


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f == "gpt2" else pytest.mark.long)
                                    for f in ("gpt2", "gpt2_sp", "llama", "llama_sp")])  # fmt: skip
def test_megatron(family: str) -> None:
    """The table of docs/guides/communication.md, over tp."""
    moved = {key: form for key, form in formulas(family).bytes.items() if key[1] == ("tp",)}
    share, tokens = (tp - 1) / tp, B / dp * S * 4
    reduced, entropy = 2 * share * A, 3 * tp * tokens * share
    expected = {
        ("fwd", ("tp",), "all_reduce"): (2 * L + 1) * reduced,
        ("fwd", ("tp",), "all_gather"): entropy,
        ("bwd", ("tp",), "all_reduce"): (2 * L + 1) * reduced,
    }
    if family.endswith("_sp"):
        once = (2 * L + 1) * share * A
        expected = {
            ("fwd", ("tp",), "reduce_scatter"): once,
            ("fwd", ("tp",), "all_gather"): once + entropy,
            ("bwd", ("tp",), "reduce_scatter"): once,
            ("bwd", ("tp",), "all_gather"): 2 * once,
        }
    if family == "gpt2_sp":  # each rank looks up its own positions: the gradient of their table is summed
        expected["bwd", ("tp",), "all_reduce"] = 2 * share * POSITIONS * HIDDEN * 4
    assert moved.keys() >= expected.keys()
    for key, form in expected.items():
        assert sympy.simplify(moved[key] - form) == 0, (key, moved[key])
    assert moved.keys() == expected.keys()


def test_closed_forms_give_the_numbers() -> None:
    own = formulas("gpt2")
    moved = {key: own.lambdify(form) for key, form in own.bytes.items()}
    flops = {phase: own.lambdify(form) for phase, form in own.flops.items()}
    peak = own.lambdify(own.peak)
    for point in points(own, "closed", 3):
        point["L"] += 1
        costs = own.at(point)
        assert {key: function(**point) for key, function in moved.items()} == costs.bytes
        assert {phase: function(**point) for phase, function in flops.items()} == costs.flops
        assert peak(**point) == costs.peak


@pytest.mark.parametrize(("wrong", "said"), [
    ({"B": 6, "dp": 4}, "B = 6 does not divide by dp = 4"),
    ({"S": 100_000}, "S=100000 is not between"),
    ({"tp": 3}, "tp=3 is not among"),
    ({"tp": 1}, "tp=1 is not among"),
    ({"L": 1}, "L=1 is less than 2"),
    ({"T": 4}, "'T' is no symbol here"),
    ({"B": 5, "dp": 5}, "leaves a rank one element"),
])  # fmt: skip
def test_outside_of_the_domain(wrong: dict[str, int], said: str) -> None:
    point = {"B": 8, "S": 16, "dp": 2, "tp": 2, "L": 4}
    assert formulas("gpt2").at(point).total_bytes > 0
    with pytest.raises(ShardcError, match=said):
        formulas("gpt2").at(point | wrong)
    with pytest.raises(ShardcError, match="'S' is not given"):
        formulas("gpt2").at(B=8, dp=2, tp=2, L=4)


def test_what_is_least_of_many_layers_is_the_peak_of_few() -> None:
    """10 + L is more than 5 * L of two layers, though not of five, which another peak needs."""

    def constant(n: int) -> Expression:
        return Expression.constant((), n)

    flat, steep = Candidate(constant(10), constant(1), 2), Candidate(constant(0), constant(5), 2)
    late = Candidate(constant(100), constant(0), 5)
    assert flat in pruned([flat, steep, late], {}, [{}])
    assert pruned([steep, Candidate(constant(5), constant(2), 2)], {}, [{}]) == [steep]


def test_text() -> None:
    text = str(formulas("gpt2"))
    assert "2*L + 1  all_reduce (sum)  128*B*S/dp" in text
    assert "dp | B" in text
    assert "L: layers of transformer.h, 2 or more" in text


@pytest.mark.parametrize(
    ("more", "packs"), [({}, 0), ({"bucket": True}, 1), ({"bucket": "1MiB"}, 1), ({"bucket": False}, 0)]
)
def test_collectives_in_buckets_have_no_formulas(more: dict[str, Any], packs: int) -> None:
    data = {"mesh": "dp=2", "inputs": {"input": "dp, -"}, "symbols": {"B": "input.0"}, **more}
    model, x = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), torch.randn(4, 4)
    program = shardc.compile(model, x, plan=data, loss=lambda y, _: y.square().sum())
    assert len(program.body.calls_of(PACK)) == packs
    plan = Plan.from_dict(data)
    for same in (Plan.parse(plan.dump()), Plan().merge(plan), plan.merge(Plan.of(strict=True)), Plan.of(**data)):
        assert same.bucket_bytes == plan.bucket_bytes
    if not packs:
        assert program.symbolic().bytes
        return
    with pytest.raises(ShardcError, match="that travel in buckets have no formulas") as refused:
        program.symbolic()
    assert refused.value.code == "SC232"


def test_without_symbols() -> None:
    plan = {"mesh": "dp=2", "inputs": {"input": "dp, -"}}
    program = shardc.compile(torch.nn.Linear(4, 4), torch.randn(4, 4), plan=plan, loss=lambda y, _: y.sum())
    with pytest.raises(ShardcError, match="the plan names no extents"):
        program.symbolic()
