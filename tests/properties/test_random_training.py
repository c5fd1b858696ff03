"""Whole training steps at random: a real model under a random plan, with whatever of training a plan can ask for.

Storage over random axes, accumulation, halves, clipping, recomputation, precision, buckets, kernels, and an optimizer,
are drawn together; the step (loss, new parameters and state) is the single device's, and so are the loss and gradients
eager PyTorch's.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.passes.fusion.analysis import iteration_space
from tests.compiler.test_split_auto import SLOW_DEVICE
from tests.properties.check import LEGITIMATE
from tests.properties.plans import fusions, meshes, plans
from tests.properties.test_random_plans import MODELS

pytest.importorskip("transformers")

EXAMPLES = max(2, settings().max_examples // 20)
OPTIMIZERS = {
    "none": None,
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, eps=1e-4),
}
UNFIT = {"SC221", "SC202"}  # a model that no cut into so many stages suits; what is excluded is not in it
PRECISIONS = (
    "fp32",
    "bf16",
    "fp16",
    {"compute": "bf16", "reduce": "bf16"},
    {"compute": "bf16", "master": "fp32", "reduce": "fp32"},
)


@cache
def model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def batch_of(name: str, microbatches: int) -> dict[str, Tensor]:
    """As many copies of the model's batch, one behind the other, each rolled a little further."""
    _, batch = model(name)
    return {key: torch.cat([x.roll(k, 0) for k in range(microbatches)]) for key, x in batch.items()}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Mesh, dict[str, Any], str, int]:
    name, mesh = draw(st.sampled_from(("gpt2", "llama", "resnet"))), draw(meshes)
    built, batch = model(name)
    shapes = {
        "params": {key: tuple(p.shape) for key, p in built.named_parameters()},
        "inputs": {key: tuple(x.shape) for key, x in batch.items()},
    }
    plan: dict[str, Any] = draw(plans(shapes, mesh))
    axes = draw(st.lists(st.sampled_from(mesh.names), unique=True, max_size=2))
    if axes:
        plan["storage"] = {
            "zero": draw(st.sampled_from((1, 2, 3))), "axes": axes, "regather": draw(st.booleans())
        }  # fmt: skip
    plan["accumulate"] = draw(st.sampled_from((1, 2, 3)))
    decompose = draw(st.sampled_from((False, True, "auto")))
    plan["overlap"] = {"split": draw(st.sampled_from((1, "auto", 2))), "decompose": decompose}
    if "auto" in plan["overlap"].values():  # on a GPU whose collectives may take longer than products
        plan["hardware"] = SLOW_DEVICE
    plan["fuse"] = draw(fusions)
    plan["bucket"] = draw(st.sampled_from((False, True, 2000)))
    plan["recompute"] = draw(st.sampled_from(("none", "full", "selective", {"budget": 4096})))
    amounts = ({"activations": "all"}, {"activations": 2000, "optimizer": "all"})
    plan["offload"] = draw(st.sampled_from(("none", *({**said, "least": 16} for said in amounts))))
    plan["precision"] = draw(st.sampled_from(PRECISIONS))
    if draw(st.booleans()):
        plan["clip_grad_norm"] = draw(st.sampled_from((0.1, 10.0)))
    if draw(st.integers(0, 3)) == 3:
        mesh = Mesh((("pp", 2), *mesh.axes))
        schedule, micro = draw(st.sampled_from((("gpipe", 2), ("1f1b", 3), ("interleaved", 2), ("zb-h1", 2))))
        plan["pipeline"] = {"axis": "pp", "schedule": schedule, "microbatches": micro}
        plan["accumulate"] = 1
    widest = draw(
        st.sampled_from((iteration_space.MAX_SPLIT_COLUMNS, 32))
    )  # in models so small a sum is else never made in parts
    return name, mesh, plan, draw(st.sampled_from(list(OPTIMIZERS))), widest


@pytest.mark.slow
@given(cases())
@settings(
    max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], deadline=None
)
def test_a_random_step_equals_the_single_device(case: tuple[str, Mesh, dict[str, Any], str, int]) -> None:
    name, mesh, plan, kind, widest = case
    note(f"{name}\nmesh {mesh}\n{plan}\n{kind}\nwidest {widest}")
    built, _ = model(name)
    make = OPTIMIZERS[kind]
    if make is None:
        plan |= (
            {"clip_grad_norm": {"norm": plan["clip_grad_norm"], "returned": True}} if "clip_grad_norm" in plan else {}
        )
    decayed = [p for p in built.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in built.parameters() if p.ndim < 2]}]
    optimizer = None if make is None else make(groups)
    try:
        with patch.object(iteration_space, "MAX_SPLIT_COLUMNS", widest):
            count = plan.get("pipeline", {}).get("microbatches", plan["accumulate"]) * (
                1 if plan["overlap"]["split"] == 1 else 2
            )
            batch = batch_of(name, count)
            program = shardc.compile(built, batch, mesh=mesh, plan=plan, optimizer=optimizer)
    except ShardcError as refused:
        codes = sorted({d.code for d in refused.diagnostics})
        if not (LEGITIMATE | UNFIT).issuperset(codes):
            raise
        event(f"refused: {', '.join(codes)}")
        assume(False)
        return
    event(f"{name}, {kind}, {plan['precision']}")
    report = program.verify()
    assert report.ok, f"{report}\n\n{program.text()}"
