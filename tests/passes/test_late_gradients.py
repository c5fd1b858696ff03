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
from shardc.ir.graph import info
from shardc.passes.verify import same_calls
from shardc.runtime.oracle.simulate import simulate
from tests.replanned import replanned

# Slow enough that products of a few rows take as long as their collectives.
SLOW = dict.fromkeys(("bf16_flops_per_second", "fp32_flops_per_second", "fp64_flops_per_second"), 1e10)
OFF: dict[str, Any] = {"late_gradients": False}
COLUMNS = {"tok.weight": "tp, -", "head.weight": "tp, -"}
COLUMNS |= {f"**.{name}.weight": "tp, -" for name in ("q", "k", "v", "up")}
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
def large(name: str, layers: int, *, sequence: bool = False) -> shardc.Program:
    """Of the sizes that are measured, on tp=4, on the meta device."""
    sizes = replace(SIZES[name], layers=layers)
    with torch.device("meta"):
        model, ids = sizes.model(), torch.zeros(2 if sizes.gated else 4, sizes.sequence, dtype=torch.long)
    plan = {"mesh": "tp=4", "params": COLUMNS, "hardware": "h200-nvlink", **(SEQUENCE if sequence else {})}
    return shardc.compile(model, {"tokens": ids, "targets": ids}, plan=plan)


def bare(program: shardc.Program) -> list[str]:
    """Collectives of backward without a product beside them."""
    return [info(row.node).name for row in beside(program.body) if row.phase == "bwd" and not row.products]


def exposed_ms(program: shardc.Program) -> float:
    return sum(row.exposed_ms for row in program.predict("h200-nvlink").exposed_ms if row.phase == "bwd")


# By model and whether its sequence lies over tp, too: collectives of backward without a product beside them, with the
# order of autograd; and the most of their exposed time that is left.
NAMED = {
    ("llama3-8b-slice", False): (4, 0.01),
    ("llama3-8b-slice", True): (10, 0.2),
    ("gpt-1.3b", False): (2, 0.2),
    ("gpt-6.7b-slice", True): (9, 0.2),
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
    return _flat(simulate(program.body, program.inputs({"tokens": tokens, "targets": tokens.roll(-1, 1)})))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    return [leaf for item in items for leaf in _flat(item)]
