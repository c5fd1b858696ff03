"""Real models in stages: compiled once a variant, cut, put under a schedule, and compared with the single device."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor

import shardc
from shardc import schedules
from shardc.compiler import driver
from shardc.partition.cut import CutStep, cut
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.passes.accumulate import Accumulate
from shardc.runtime.oracle.simulate import run_reference
from shardc.runtime.oracle.simulate_stages import simulate_stages
from tests.models.zoo import PLANS, make

# Enough layers for eight stages.
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"batch": 24, "seq": 4, "layers": 3, "vocab": 32, "width": 16},
    "llama": {"batch": 24, "seq": 4, "layers": 4, "vocab": 32, "width": 16, "kv_heads": 4},
    "t5": {"batch": 24, "seq": 4, "layers": 2, "vocab": 32},
    "resnet": {"batch": 24, "size": 16, "blocks": 1},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("", {}),
    "tp2": ("tp=2", {}),
    "dp2": ("dp=2", {}),
    "zero1": ("dp=2", {"storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 0.1}),
}
EACH = tuple(VARIANTS)  # of every model
TOKENS = {"tokens": "labels", "shift": 1}
MORE = {
    "tokens": ("dp=2", {"tokens": TOKENS}),
    "full": ("tp=2", {"recompute": "full"}),
    "zero3": ("dp=2", {"storage": {"zero": 3, "axes": ["dp"]}, "clip_grad_norm": 0.1}),
    "all": ("dp=2", {"tokens": TOKENS, "recompute": "selective", **VARIANTS["zero1"][1]}),
}
VARIANTS |= MORE
SCHEDULES = {name: schedules.default_virtual(name) for name in sorted(schedules.names(), key=schedules.default_virtual)}


class Case(NamedTuple):
    model: str
    variant: str
    microbatches: int
    ranks: int
    schedule: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


PRODUCT = [Case(*one) for one in product(SIZES, EACH, (1, 3, 8), (2, 3, 4), SCHEDULES)]


def step(
    model: Any,
    batch: Any,
    microbatches: int,
    mesh: str = "",
    loss: Any = None,
    optimizer: Any = None,
    tokens: dict[str, Any] | None = None,
    **plan: Any,
) -> shardc.Program:
    """A program whose sums over microbatches are explicit, as a pipeline wants them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "Accumulate", lambda count, **_: Accumulate(count, always=True))
        plan = {"bucket": False, **plan, "accumulate": microbatches, **({"loss": tokens} if tokens else {})}
        return shardc.compile(model, batch, mesh=mesh or shardc.Mesh(), loss=loss, optimizer=optimizer, plan=plan)


@cache
def compiled(
    model: str, variant: str, microbatches: int
) -> tuple[shardc.Program, dict[str, Tensor], dict[Any, Tensor]]:
    """The program, its inputs, and what a single device makes of them."""
    mesh, more = VARIANTS[variant]
    module, batch, loss = make(model, **SIZES[model])
    if "tokens" in more:  # so many labels count as the row says, from none on
        labels = batch["labels"].clone()
        for row in range(len(labels)):
            labels[row, 1 + row % labels.shape[1] :] = -100
        batch = {**batch, "labels": labels}
    plan = {} if not mesh else yaml.safe_load((PLANS / f"{model}.yaml").read_text())
    axis, keep = mesh.partition("=")[0], ("params", "inputs") if mesh else ()
    plan = {key: {k: only(axis, v) for k, v in plan.get(key, {}).items()} for key in keep}
    # Adam divides by the root of squares, which makes much of the rounding of gradients near 0.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-2) if more else None
    program = step(module, batch, microbatches, mesh, loss, optimizer, **plan, **more)
    inputs = program.inputs()
    return program, inputs, run_reference(program.reference, inputs, dtype=torch.float64)


def only(axis: str, placement: str) -> str:
    """A placement for a mesh of one axis: what it says of others is left out."""
    dims = [dim.strip() for dim in placement.split(",")]
    return ", ".join(dim if axis in dim else "-" for dim in dims)


@cache
def staged(model: str, variant: str, microbatches: int, stages: int) -> CutStep:
    return cut(compiled(model, variant, microbatches)[0].body, stages)


@cache
def programmed(case: Case) -> StagedProgram:
    virtual = SCHEDULES[case.schedule]
    return scheduled(staged(case.model, case.variant, case.microbatches, case.ranks * virtual), case.schedule, virtual)


def check(case: Case, seed: int = 0, buffered: bool = False) -> None:
    _, inputs, expected = compiled(case.model, case.variant, case.microbatches)
    agree(programmed(case), inputs, expected, seed, buffered)


def agree(program: StagedProgram, inputs: Any, expected: Any, seed: int = 0, buffered: bool = False) -> None:
    """Every output within 1e-12 of the single device's, whatever order a seed picks."""
    choose = random.Random(seed).randrange
    found = simulate_stages(program, inputs, dtype=torch.float64, choose=choose, buffered=buffered)
    assert found.keys() == expected.keys()
    for port, value in expected.items():
        gap = (value.double() - found[port].double()).abs().max() if value.numel() else torch.tensor(0.0)
        assert gap <= 1e-12 * max(1.0, float(value.double().abs().max())), f"{port.role} {port.name} differs by {gap}"
