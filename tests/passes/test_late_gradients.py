"""Products that make gradients of weights run behind the collectives that backward waits for, and change no bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from benchmarks.measured_models import SIZES, Decoder, Sizes
from shardc.cost.beside import beside
from shardc.cost.flops import COUNTS
from shardc.cost.memory import memory
from shardc.ir.collectives import KINDS
from shardc.ir.graph import info, op_name
from shardc.ir.overlap_schedule import sums_gradients
from shardc.ir.parse import parse
from shardc.ir.units import UnequalError, Units
from shardc.ir.verify import violations
from shardc.passes.communication import late_gradients
from shardc.passes.communication.late_gradients import LateGradients
from shardc.passes.verify import same_calls
from shardc.runtime.oracle.simulate import simulate
from tests.replanned import replanned

# Slow enough that products of a few rows take as long as their collectives.
SLOW = dict.fromkeys(("bf16_flops_per_second", "fp32_flops_per_second", "fp64_flops_per_second"), 1e10)
OFF: dict[str, Any] = {"late_gradients": False}
COLUMNS = dict.fromkeys(
    ("tok.weight", "head.weight", *(f"**.{name}.weight" for name in ("q", "k", "v", "up"))), "tp, -"
)
SEQUENCE = {"activations": {"blocks.*": "-, tp, -", "tok": "-, tp, -"}}
BATCH = {"inputs": {"tokens": "dp, -", "targets": "dp, -"}}
SMALL = Sizes(2, 16, 4, 4, 32, 8, 24)
GATED = Sizes(2, 16, 4, 2, 32, 8, 24, gated=True)
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": "tp=2"},
    "sequence": {"mesh": "tp=2", **SEQUENCE},
    "dp tp": {"mesh": "dp=2, tp=2", **BATCH, "bucket": True},
    "zero": {"mesh": "dp=2, tp=2", **BATCH, "storage": {"zero": 3, "axes": "dp"}},
    "recompute": {"mesh": "tp=2", "recompute": "full", "accumulate": 2},
    "clip": {"mesh": "dp=2, tp=2", **BATCH, "storage": {"zero": 1, "axes": "dp"}, "clip_grad_norm": 0.1},
    "fuse": {"mesh": "tp=2", "fuse": True, **SEQUENCE},
    "master": {"mesh": "tp=2", "precision": {"compute": "bf16", "master": "fp32"}},
    "microbatches": {"mesh": "dp=2, tp=2", **BATCH, "accumulate": 2},
}


def small(sizes: Sizes, plan: Mapping[str, Any], rows: int = 4) -> shardc.Program:
    torch.manual_seed(0)
    model = Decoder(sizes).to(torch.float32 if "precision" in plan else torch.float64)
    tokens = torch.randint(0, sizes.vocabulary, (rows, sizes.sequence))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    return shardc.compile(
        model,
        batch,
        plan={"params": COLUMNS, "hardware": {**SLOW, "collective_start_seconds": 1e-6}, **plan},
        optimizer=adam,
    )


@cache
def large(name: str, layers: int, *, sequence: bool = False, microbatches: int = 1) -> shardc.Program:
    """Of the sizes that are measured, on tp=4, on the meta device."""
    sizes = replace(SIZES[name], layers=layers)
    with torch.device("meta"):
        model, ids = sizes.model(), torch.zeros(2 if sizes.gated else 4, sizes.sequence, dtype=torch.long)
    plan = {"mesh": "tp=4", "params": COLUMNS, "hardware": "h200-nvlink", "fuse": False, "accumulate": microbatches}
    plan |= SEQUENCE if sequence else {}
    return shardc.compile(model, {"tokens": ids, "targets": ids}, plan=plan)


def bare(program: shardc.Program) -> list[str]:
    """Collectives of backward without a product beside them."""
    return [info(row.node).name for row in beside(program.body) if row.phase == "bwd" and not row.products]


def exposed_ms(program: shardc.Program) -> float:
    return sum(row.exposed_ms for row in program.predict("h200-nvlink").exposed_ms if row.phase == "bwd")


# By model and whether its sequence lies over tp, too: collectives of backward without a product beside them, with the
# order of autograd; and the most of their exposed time that is left.
NAMED = {
    ("llama3-8b-slice", False): (4, 0.02),
    ("llama3-8b-slice", True): (10, 0.2),
    ("gpt-1.3b", False): (2, 0.2),
    ("gpt-6.7b-slice", True): (8, 0.2),
}


@pytest.mark.parametrize(("name", "sequence"), NAMED)
def test_each_collective_of_backward_has_a_product_beside_it(name: str, sequence: bool) -> None:
    late = large(name, 2, sequence=sequence)
    before = replanned(late, overlap=OFF)
    count, left = NAMED[name, sequence]
    assert len(bare(before)) == count
    assert len(bare(late)) <= sequence  # the first has no product before it
    assert exposed_ms(before) > 0.4
    assert exposed_ms(late) <= left * exposed_ms(before)
    assert late.predict("h200-nvlink").step_ms < before.predict("h200-nvlink").step_ms
    assert late.memory().peak <= 1.05 * before.memory().peak
    assert same_calls(before.body, late.body) == []


def test_products_of_several_microbatches_are_put_off() -> None:
    """The sums over microbatches are read behind them, where they are returned and where they are reduced."""
    late = large("llama3-8b-slice", 2, microbatches=2)
    before = replanned(late, overlap=OFF)
    assert len(bare(before)) == 4
    assert not bare(late)
    assert exposed_ms(late) <= 0.05 * exposed_ms(before)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", PLANS)
def test_no_bit_changes(case: str) -> None:
    late = small(GATED if case in ("tp", "sequence", "recompute") else SMALL, PLANS[case])
    before = replanned(late, overlap=False)
    assert [info(n).name for n in late.body.calls()] != [info(n).name for n in before.body.calls()]
    report = late.verify()
    assert report.ok, str(report)
    for one, other in zip(*(results_of(program) for program in (late, before)), strict=True):
        assert torch.equal(one, other)


def results_of(program: shardc.Program) -> list[Tensor]:
    tokens = torch.randint(0, SMALL.vocabulary, (4, SMALL.sequence), generator=torch.Generator().manual_seed(1))
    return flat(simulate(program.body, program.inputs({"tokens": tokens, "targets": tokens.roll(-1, 1)})))


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    return [leaf for item in items for leaf in flat(item)]


@pytest.mark.parametrize("zero", [0, 1])
def test_casts_of_reduced_gradients_hold_up_no_product(zero: int) -> None:
    """Gradients that are reduced in fewer digits than the optimizer reads are widened where it reads them."""
    precision = {"precision": {"compute": "bf16", "master": "fp32", "reduce": "bf16"}}
    storage = {"storage": {"zero": zero, "axes": "dp"}} if zero else {}
    late = small(SMALL, {"mesh": "dp=2", "params": {}, **BATCH, **precision, **storage, "bucket": False})
    before = replanned(late, overlap=OFF)
    found, was = ([row for row in beside(p.body) if row.phase == "bwd"] for p in (late, before))
    assert all(sums_gradients(row.node) for row in found)
    assert sum(not row.products for row in found) < sum(not row.products for row in was) == len(was)
    for one, other in zip(results_of(late), results_of(before), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_an_order_that_takes_no_less_time_is_not_taken(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graph, or of the copy in which casts of reduced gradients run later."""
    precision = {"precision": {"compute": compute, "master": "fp32", "reduce": compute}}
    plan = {"mesh": "dp=2, tp=2", **BATCH, **precision, "bucket": False}
    taken = small(SMALL, plan)
    monkeypatch.setattr(late_gradients, "device_seconds", lambda *_: 1.0)
    not_taken = small(SMALL, plan)
    orders = [_products_and_sums(p) for p in (taken, not_taken, replanned(not_taken, overlap=OFF))]
    assert orders[0] != orders[1] == orders[2]
    assert violations(not_taken.body) == []


def _products_and_sums(program: shardc.Program) -> list[str]:
    return [info(node).name for node in program.body.calls() if op_name(node.target) in COUNTS.keys() | KINDS.keys()]


def test_with_symbols_the_order_does_not_depend_on_sizes() -> None:
    plan = {"mesh": "tp=2", "symbols": {"B": ["tokens.0", "targets.0"]}, **SEQUENCE}
    orders = [[info(node).name for node in small(GATED, plan, rows).body.calls()] for rows in (4, 64)]
    assert orders[0] == orders[1]
    assert bare(small(GATED, plan)) < bare(small(GATED, {**plan, "overlap": False}))


TWO = """graph @step mesh(tp=2) {
  %v = param "v" : f32[4096, 4096@tp]
  %w = param "w" : f32[4096@tp, 4096]
  %x = input "x" : f32[4096, 4096]
  %y = input "y" : f32[4096, 4096@tp]
bwd:
  %tanh = tanh(%y) {~0: tp} : f32[4096, 4096@tp]
  %dw = shardc.linear_wgrad(%tanh, %x) {~0: tp} : f32[4096@tp, 4096]
  %dx = shardc.linear_dgrad(%tanh, %w) {~0: tp} : f32[4096, 4096] |sum tp
  %dx.sum = shardc.all_reduce(%dx, op="sum", axes=["tp"]) : f32[4096, 4096]
  %exp = exp(%dx.sum) : f32[4096, 4096]
  %dv = shardc.linear_wgrad(%exp, %y) {~0: tp} : f32[4096, 4096@tp]
  return grad "v" = %dv, grad "w" = SCALED
}
"""


def _order(text: str, growth: float = 1.0) -> list[str]:
    return [info(node).name for node in LateGradients(growth=growth).run(parse(text)).calls()]


def test_a_gradient_that_backward_reads_is_not_put_off() -> None:
    free = TWO.replace("SCALED", "%dw")
    assert _order(free).index("dw") > _order(free).index("dx.sum")
    square = "  %square = mul.Tensor(%dw, %dw) {~0: tp} : f32[4096@tp, 4096]\n"
    square += "  %more = shardc.linear_dgrad(%y, %square) {~0: tp} : f32[4096, 4096] |sum tp\n"
    square += '  %more.sum = shardc.all_reduce(%more, op="sum", axes=["tp"]) : f32[4096, 4096]\n'
    read = free.replace("  %dv = ", f"{square}  %dv = ").replace("(%exp, %y)", "(%more.sum, %y)")
    assert _order(read) == [info(node).name for node in parse(read).calls()]


def test_what_is_held_is_bounded() -> None:
    """The operand of the product that is put off would be held beside the sum."""
    text = TWO.replace("SCALED", "%dw")
    graph = parse(text)
    order = [info(node).name for node in graph.calls()]
    assert _order(text, growth=-0.5) == order
    assert _order(text, growth=1.0) != order
    assert memory(LateGradients(growth=0.05).run(parse(text))).peak <= 1.05 * memory(graph).peak


def test_few_layers_do_not_decide_between_orders_that_take_about_as_long() -> None:
    short, whole = (parse(TWO.replace("SCALED", "%dw")) for _ in range(2))
    short.units = (Units("layers", 1, 2, 30),)
    is_less = late_gradients._is_less  # pyright: ignore[reportPrivateUsage]
    assert is_less(whole, 0.9995, 1.0)
    assert not is_less(whole, 1.0 - 1e-12, 1.0), "what is rounded is no gain"
    assert is_less(short, 0.99, 1.0)
    assert not is_less(short, 1.0, 1.0)
    for later in (0.9995, 1.0005):
        with pytest.raises(UnequalError):
            is_less(short, later, 1.0)
