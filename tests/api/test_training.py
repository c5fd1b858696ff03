"""A whole training step: optimizer, ZeRO storage, clipping and accumulation, in every layout the single device's.

Models are traced once and distributed many times. Five steps, each simulated on all ranks from the same state as the
single device's, in float64; and the single device's five, in a row, are eager PyTorch's.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from shardc.compiler import driver, pass_pipeline
from shardc.compiler.binding import bind
from shardc.frontend.optimizer import append_updates, initial_state
from shardc.frontend.program_inputs import complete_inputs, model_state
from shardc.frontend.program_optimizers import learning_rates
from shardc.frontend.trace import trace
from shardc.ir.collectives import collectives
from shardc.ir.graph import Graph, info, type_of
from shardc.passes.accumulate import accumulate
from shardc.passes.sharding.store import Store
from shardc.plan.schema import Plan
from shardc.runtime.execute.batch import batch_inputs
from shardc.runtime.execute.microbatches import split
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.in_double import InDouble

ROOT = Path(__file__).parent.parent.parent
STEPS, CLIP = 5, 0.5
LAYOUTS = {
    "dp2": ("dp=2,tp=1", ""),
    "dp2tp2": ("dp=2,tp=2", ""),
    "dp4": ("dp=4,tp=1", ""),
    "dp2tp2_sp": ("dp=2,tp=2", "_sp"),
    "dp3tp2_uneven": ("dp=3,tp=2", ""),
}


def made(model: str) -> tuple[Any, dict[str, Any], torch.optim.Optimizer]:
    """A model, its batch of 16, and its optimizer: weight decay on matrices only."""
    sys.path.insert(0, str(ROOT / "examples"))
    torch.manual_seed(0)
    built, batch = getattr(importlib.import_module(model), model)(batch=16)
    decayed = [p for p in built.parameters() if p.ndim > 1]
    plain = [p for p in built.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}],
        lr=1e-2,
        eps=1e-5,  # a key bias has no gradient but rounding, of which a smaller one would make a step
    )
    return built, batch, optimizer


@lru_cache
def traced(model: str, microbatches: int = 1) -> tuple[Any, Any, Graph, dict[str, float], torch.optim.Optimizer]:
    """The model's joint graph with AdamW's updates at its end, no mesh yet."""
    built, batch, optimizer = made(model)
    found = trace(built, split(batch, microbatches)[0], microbatches=microbatches)
    graph = accumulate(driver.single_device(found, shardc.Mesh(), pass_pipeline.Options()), microbatches)
    fills = append_updates(graph, optimizer, built, clip_grad_norm=CLIP)
    return (built, batch), found, graph, fills, optimizer


@lru_cache
def history(model: str, microbatches: int) -> list[tuple[dict[str, torch.Tensor], dict[Any, torch.Tensor]]]:
    """Inputs and outputs of each step on the single device."""
    (built, batch), _, graph, fills, optimizer = traced(model, microbatches)
    given = {**initial_state(graph, fills, optimizer, built), **learning_rates(optimizer), **model_state(built)}
    names = [p.name for p in graph.inputs if p.role == "input"]
    inputs = complete_inputs(graph, {**given, **batch_inputs(batch, names)}, 0)
    steps: list[tuple[dict[str, torch.Tensor], dict[Any, torch.Tensor]]] = []
    for _ in range(STEPS):
        outputs = run_reference(graph, inputs, dtype=torch.float64)
        steps.append((inputs, outputs))
        new = {port.name: value for port, value in outputs.items() if port.role in ("param", "state", "buffer")}
        inputs = {**inputs, **new}
    return steps


@lru_cache
def distributed(model: str, layout: str, zero: int, microbatches: int = 1) -> Graph:
    mesh_text, suffix = LAYOUTS[layout]
    mesh = shardc.Mesh.parse(mesh_text)
    _, found, graph, *_ = traced(model, microbatches)
    plan = Plan.load(ROOT / "configs" / "plans" / f"{model}{suffix}.yaml")
    body = graph.copy()
    body.mesh = mesh
    options = pass_pipeline.Options(store=Store(zero, ("dp",) if zero else ()))
    return driver.finish_body(driver.distribute(body, bind(plan, found, mesh), options), options)


def pairs() -> list[tuple[str, str, int]]:
    """Every layout with every stage of ZeRO; every model with each of both. Images have no sequence to shard."""
    models = ("resnet", "gpt2", "llama")
    found: list[tuple[str, str, int]] = []
    for at, layout in enumerate(LAYOUTS):
        fit = models[1:] if layout.endswith("_sp") else models
        found += [(fit[(at + zero) % len(fit)], layout, zero) for zero in range(4)]
    return found


SHORT = ("gpt2", "dp2tp2", 3)  # the others are long


@pytest.mark.parametrize(
    ("model", "layout", "zero"),
    [pytest.param(*pair, marks=() if pair == SHORT else pytest.mark.long) for pair in pairs()],
)
def test_five_steps_equal_the_single_device(model: str, layout: str, zero: int) -> None:
    """Of four microbatches each; the first and the last, which start from the single device's state."""
    equal(distributed(model, layout, zero, 4), history(model, 4)[:: STEPS - 1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 3])
def test_without_accumulation(zero: int) -> None:
    equal(distributed("cnn", "dp2tp2", zero), history("cnn", 1)[:: STEPS - 1])


def equal(body: Graph, steps: list[tuple[dict[str, torch.Tensor], dict[Any, torch.Tensor]]]) -> None:
    for inputs, expected in steps:
        found = simulate(body, inputs, dtype=torch.float64)
        for port, want in expected.items():
            gap = float((found[port] - want).abs().max()) / max(float(want.abs().max()), 1e-6)
            assert gap < 1e-11, f"{port.role} {port.name} differs by {gap:.1e}"


@pytest.mark.parametrize(
    ("model", "microbatches"),
    [
        pytest.param(model, count, marks=() if (model, count) == ("gpt2", 4) else pytest.mark.long)
        for model in ("gpt2", "llama", "resnet")
        for count in (1, 4)
    ],
)
def test_the_single_device_is_eager_training(model: str, microbatches: int) -> None:
    """Five steps in a row, with torch's own accumulation, clipping and AdamW, in float64."""
    built, batch, optimizer = made(model)
    built.double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in split(batch, microbatches):
            with InDouble():
                loss = built(**part).loss
            (loss / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(built.parameters(), CLIP)
        optimizer.step()
    (_, outputs) = history(model, microbatches)[-1]
    wanted = dict(built.named_parameters())
    for port, found in outputs.items():
        if port.role == "param":
            gap = float((found - wanted[port.name]).detach().abs().max())
            assert gap <= 1e-11, f"{port.name} differs by {gap:.1e}"


@pytest.mark.long  # `partition/test_reduces.py` and `test_accumulate.py` count reductions
def test_accumulation_reduces_once() -> None:
    """Four microbatches of a quarter move, over dp, what one of the whole batch moves."""
    one, four = (collectives(distributed("llama", "dp2tp2", 1, k)) for k in (1, 4))
    # Of the scalars, labels that count are counted over dp in each.
    over = [[c for c in found if c.axes == ("dp",) and c.payload_bytes > 8] for found in (one, four)]
    moved = [Counter((c.kind, c.bytes_per_step) for c in found) for found in over]
    assert moved[0] == moved[1]
    assert all(c.times == 1 for c in over[1])
    within = [sum(c.times for c in found if c.axes == ("tp",) and c.phase != "opt") for found in (one, four)]
    assert within[1] == 4 * within[0]


def test_bytes_of_zero() -> None:
    """ZeRO-1 and 2 send what data parallelism sends; ZeRO-3 half as much again, less the embedding's second gather."""
    sizes = {
        port.name: math.prod(type_of(node).shape) * 4
        for port, node in zip(*_inputs(distributed("llama", "dp2", 0)), strict=True)
        if port.role == "param"
    }
    moved = {
        zero: [c for c in collectives(distributed("llama", "dp2", zero)) if c.payload_bytes > 8] for zero in range(4)
    }
    sent = {zero: sum(c.bytes_per_rank for c in found) for zero, found in moved.items()}
    whole = sum(sizes.values())
    assert sent[0] == whole  # an all-reduce: 2 (k - 1) / k of it, k = 2
    assert sent[1] == sent[2] == whole
    # Backward gathers every parameter again but the embedding, whose gradient does not read it.
    assert sent[3] == 1.5 * whole - sizes["model.embed_tokens.weight"] / 2
    kinds = Counter((c.kind, c.phase) for c in moved[3])
    assert kinds == {
        ("all_gather", "fwd"): len(sizes),
        ("all_gather", "bwd"): len(sizes) - 1,
        ("reduce_scatter", "bwd"): len(sizes),
    }


def _inputs(graph: Graph) -> tuple[Any, Any]:
    return graph.inputs, graph.placeholders


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [1, 3])
def test_stored_bytes_are_shares(zero: int) -> None:
    """State is 1/dp of itself, and under ZeRO-3 parameters too."""
    whole, shared = distributed("llama", "dp4", 0), distributed("llama", "dp4", zero)

    def stored(graph: Graph, role: str) -> int:
        pairs = zip(graph.inputs, graph.placeholders, strict=True)
        return sum(type_of(n).local_bytes(graph.mesh) for p, n in pairs if p.role == role and type_of(n).ndim)

    assert stored(shared, "state") * 4 == stored(whole, "state")
    assert stored(shared, "param") * (4 if zero == 3 else 1) == stored(whole, "param")


def test_reductions_stand_where_backward_makes_gradients() -> None:
    """A gradient is reduced before the optimizer's first instruction, so that it can overlap with backward."""
    body = distributed("llama", "dp2tp2", 2)
    phases = [info(n).phase for n in body.calls()]
    first = phases.index("opt")
    late = [c for c in body.calls() if "reduce_scatter" in str(c.target)]
    order = {n: i for i, n in enumerate(body.calls())}
    assert late
    assert all(order[n] < first for n in late)


@pytest.mark.long  # `tests/runtime/test_lr_schedule.py` trains with schedulers
def test_learning_rate_is_an_input() -> None:
    """A scheduler changes the step without compiling again."""
    (built, batch), *_ = traced("llama")
    optimizer = torch.optim.SGD(built.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    program = shardc.compile(built, batch, plan=ROOT / "configs" / "plans" / "llama.yaml", optimizer=optimizer)
    trainer = program.launch()
    before = {name: value.clone() for name, value in trainer.state.items()}
    trainer.step(batch)
    after = {name: value.clone() for name, value in trainer.state.items()}
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    optimizer.step()
    scheduler.step()  # the rate is 0 from here on
    trainer.step(batch)
    assert torch.equal(trainer.state["lm_head.weight"], after["lm_head.weight"])
