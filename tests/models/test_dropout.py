"""Dropout on: every layout draws the same masks, bit for bit, and none is stale, shared or biased."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import shardc
from shardc.api import Program
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.mesh import Mesh
from shardc.runtime.execute.layout import assemble
from shardc.runtime.oracle.simulate import run_reference, simulate
from tests.models.zoo import PLANS, make

P = 0.1
LAYOUTS = [
    ("gpt2", "dp=2, tp=1"),
    ("gpt2", "dp=1, tp=2"),
    ("gpt2", "dp=2, tp=2"),
    ("gpt2", "dp=2, tp=4"),
    ("gpt2_sp", "dp=2, tp=2"),
]
layouts = pytest.mark.parametrize(("plan", "mesh"), LAYOUTS)


@cache
def compiled(plan: str, mesh: str, batch: int, heads: int) -> Program:
    model, sample, _ = make("gpt2", dropout=P, batch=batch, heads=heads, width=8 * heads, vocab=61, layers=1)
    return shardc.compile(model, sample, plan=PLANS / f"{plan}.yaml", mesh=mesh)


def draws(graph: Graph) -> list[str]:
    """The names of the uniform numbers of every dropout."""
    return [info(n).name for n in graph.calls() if op_name(n.target) == "shardc.random_uniform"]


def values(program: Program, names: set[str], distributed: bool, **inputs: Any) -> dict[str, Tensor]:
    """Whole tensors by name, as one run computes them in float32."""
    graph = program.body if distributed else program.reference
    mesh = program.mesh if distributed else Mesh()
    found: dict[str, Tensor] = {}

    def watch(node: fx.Node, ranks: Any) -> None:
        if info(node).name in names:
            found[info(node).name] = assemble(dict(enumerate(ranks)), type_of(node), mesh)

    run = simulate if distributed else run_reference
    run(graph, program.inputs() | inputs, observe=watch)
    return found


@pytest.mark.sampled(20)
@layouts
@pytest.mark.parametrize(("batch", "heads"), [(8, 4), (3, 6)])
def test_masks_are_the_same_for_every_layout(plan: str, mesh: str, batch: int, heads: int) -> None:
    program = compiled(plan, mesh, batch, heads)
    names = set(draws(program.reference))
    assert len(names) == 4, "the embedding's, the attention's, its output's and the MLP's"
    one, many = values(program, names, distributed=False), values(program, names, distributed=True)
    assert one.keys() == many.keys() == names
    for name in names:
        assert torch.equal(one[name], many[name]), name


@pytest.mark.sampled(12)
@layouts
def test_what_a_dropout_yields_is_the_same(plan: str, mesh: str) -> None:
    program = compiled(plan, mesh, 8, 4)
    # Up to here a rank adds zeros to embeddings, and scales them: nothing is rounded otherwise than on one device.
    name = info(program.reference.activations["transformer.drop"]).name
    one, many = values(program, {name}, distributed=False), values(program, {name}, distributed=True)
    assert torch.equal(one[name], many[name])
    assert (one[name] == 0).float().mean() > P / 2
    report = program.verify()
    assert report.ok, str(report)


@pytest.mark.sampled(10)
@layouts
def test_no_communication_for_masks(plan: str, mesh: str) -> None:
    still = shardc.compile(*make("gpt2", vocab=61, layers=1, width=32)[:2], plan=PLANS / f"{plan}.yaml", mesh=mesh)
    assert [(c.kind, c.axes, c.phase) for c in compiled(plan, mesh, 8, 4).collectives()] == [
        (c.kind, c.axes, c.phase) for c in still.collectives()
    ]


def test_statistics() -> None:
    program = compiled(*LAYOUTS[2], 8, 4)
    names = set(draws(program.reference))
    found = values(program, names, distributed=True)
    kept = torch.cat([(u >= P).flatten().double() for u in found.values()])
    # The mean of n draws lies within 5 standard deviations.
    assert abs(float(kept.mean()) - (1 - P)) < 5 * (P * (1 - P) / kept.numel()) ** 0.5
    for u in found.values():
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        rows = u.reshape(u.shape[0], -1)
        assert len({tuple(row.tolist()) for row in rows}) == rows.shape[0], "no two ranks drew the same numbers"
    same_shape = [u for u in found.values() if u.ndim == 3]
    assert all(not torch.equal(a, b) for i, a in enumerate(same_shape) for b in same_shape[:i])


def test_a_seed_is_a_step() -> None:
    program = compiled(*LAYOUTS[2], 8, 4)
    (name, *_) = draws(program.reference)
    first, again, other = (
        values(program, {name}, distributed=True, seed=torch.tensor(seed))[name] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
