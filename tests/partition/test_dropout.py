"""Dropout across stages: every cut and every schedule draws the masks of the single device, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import shardc
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.mesh import Mesh
from shardc.partition.cut import cut
from shardc.partition.staged_program import scheduled
from shardc.runtime.execute.layout import assemble
from shardc.runtime.oracle.simulate import run_reference, simulate
from shardc.runtime.oracle.simulate_stages import simulate_stages
from tests.models.zoo import make
from tests.partition.whole import agree, step

MICROBATCHES = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {},
    "dp=2": {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}},
    "tp=2": {"params": {"**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}},
}
CUTS: list[tuple[int | None, tuple[str, ...]]] = [(2, ()), (None, ("h.1", "h.2", "ln_f")), (6, ())]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("auto", 1)]
Seen = dict[tuple[str, int], Tensor]  # by name and microbatch


@cache
def program(mesh: str, recompute: str = "none") -> shardc.Program:
    model, batch, _ = make("gpt2", dropout=0.3, batch=6, seq=4, layers=3, vocab=32, width=16)
    return step(model, batch, MICROBATCHES, mesh, recompute=recompute, **LAYOUTS[mesh])


def draws(graph: Graph) -> set[str]:
    return {info(node).name for node in graph.calls() if op_name(node.target) == "shardc.random_uniform"}


def whole(node: fx.Node, values: Sequence[Tensor], mesh: Mesh) -> Tensor:
    return assemble(dict(enumerate(values)), type_of(node), mesh)


@cache
def single(mesh: str) -> Seen:
    """What one device draws, microbatch by microbatch."""
    reference = program(mesh).reference
    found: dict[str, list[Tensor]] = defaultdict(list)

    def watch(node: fx.Node, values: Sequence[Tensor]) -> None:
        if op_name(node.target) == "shardc.random_uniform":
            found[info(node).name].append(values[0])

    run_reference(reference, program(mesh).inputs(), observe=watch)
    assert set(found) == draws(reference)
    assert len(found) == 3 * 3 + 1, "of each layer the attention's, its output's and the MLP's; the embedding's"
    assert all(len(each) == MICROBATCHES and not torch.equal(each[0], each[1]) for each in found.values())
    return {(name, k): value for name, each in found.items() for k, value in enumerate(each)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_microbatches_in_turn(mesh: str) -> None:
    body, drawn, counts = program(mesh).body, single(mesh), dict[str, int]()

    def watch(node: fx.Node, values: Sequence[Tensor]) -> None:
        name = info(node).name
        if (name, 0) in drawn:
            k = counts[name] = counts.get(name, -1) + 1
            assert torch.equal(whole(node, values, body.mesh), drawn[name, k])

    simulate(body, program(mesh).inputs(), observe=watch)
    assert set(counts.values()) == {MICROBATCHES - 1}


@pytest.mark.parametrize(("mesh", "recompute"), [("", "none"), ("dp=2", "none"), ("tp=2", "full")])
@pytest.mark.parametrize(("stages", "split"), CUTS)
@pytest.mark.sampled(9)
def test_pipelined(stages: int | None, split: tuple[str, ...], mesh: str, recompute: str) -> None:
    """Also where a stage draws a mask again for its backward, as it does with what it can make of a seed."""
    compiled, drawn = program(mesh, recompute), single(mesh)
    staged = cut(compiled.body, stages, split)
    inputs = compiled.inputs()
    wanted = run_reference(compiled.reference, inputs, dtype=torch.float64)
    again = {f"r.{name}": name for name in draws(compiled.reference)}  # calls that such a call is made of are others
    names = {info(node).name for node in compiled.body.calls()} & again.keys()
    assert len(names) == (3 * 3 if recompute == "full" else 0)
    for schedule, virtual in SCHEDULES:
        if len(staged.stages) % virtual or (virtual == 2 and len(staged.stages) < 4):
            continue
        pipeline = scheduled(staged, schedule, virtual)
        seen: dict[tuple[str, int], int] = defaultdict(int)

        def watch(
            c: int, k: int, node: fx.Node, values: Sequence[Tensor], seen: Any = seen, at: str = schedule
        ) -> None:
            name = again.get(info(node).name, info(node).name)
            if (name, k) in drawn:
                seen[info(node).name, k] += 1
                assert torch.equal(whole(node, values, compiled.body.mesh), drawn[name, k]), (at, name)

        simulate_stages(pipeline, inputs, observe=watch)
        assert seen.keys() == drawn.keys() | {(name, k) for name in names for k in range(MICROBATCHES)}
        agree(pipeline, inputs, wanted, seed=len(schedule))
