"""A program that nobody has any more goes, with its graphs: a process compiles again and again, for batches of new
shapes and for plans that are tried."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx

import shardc
from examples.llama import llama
from shardc.ir.graph import info

TP: dict[str, Any] = {"params": {"**.q_proj.weight": "tp, -"}, "inputs": {"*": "dp, -"}}
PIPELINE: dict[str, Any] = {"pipeline": {"axis": "pp", "microbatches": 4}}


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [("dp=2, tp=2", TP), ("dp=2, tp=2", {**TP, "fuse": True, "precision": "bf16"}), ("pp=2", PIPELINE)],
    ids=["tp", "fused", "pipeline"],
)
def test_nothing_keeps_a_graph(mesh: str, plan: dict[str, Any]) -> None:
    graphs = _compiled(mesh, plan)
    assert len(graphs) > 1
    gc.collect()
    assert [name for name, graph in graphs if graph() is not None] == []


def test_nothing_keeps_the_graph_of_a_trainer() -> None:
    model, batch = llama()
    program = shardc.compile(model, batch, mesh="dp=2, tp=2", plan=TP, optimizer=torch.optim.AdamW(model.parameters()))
    trainer = program.launch()
    trainer.step(batch)
    graphs = weakref.ref(program.body.fx), weakref.ref(program.reference.fx)
    del program, trainer
    gc.collect()
    gc.collect()  # of what has finalizers, the rest goes the next time
    assert [graph() for graph in graphs] == [None, None]


def _compiled(mesh: str, plan: dict[str, Any]) -> list[tuple[str, weakref.ref[fx.Graph]]]:
    """The graphs that a compile has made, by the pass behind which they were seen."""
    seen: list[tuple[str, weakref.ref[fx.Graph]]] = []
    model, batch = llama()
    program = shardc.compile(
        model,
        batch,
        mesh=mesh,
        plan=plan,
        optimizer=torch.optim.AdamW(model.parameters()),
        watch=lambda one, graph, _seconds: seen.append((one.name, weakref.ref(graph.fx))),
    )
    assert all(info(node).name for node in program.body.calls())
    return seen
