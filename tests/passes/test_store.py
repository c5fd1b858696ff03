"""Where parameters lie between steps: what placing them costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.passes.sharding import seed
from shardc.passes.sharding.atom_classes import Classes


def _walks(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a compile with annotated storage walks the whole graph for its classes of atoms."""
    walks: list[Any] = []

    def counted(graph: Any) -> Classes:
        walks.append(graph)
        return Classes(graph)

    monkeypatch.setattr(seed, "Classes", counted)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    plan = {"inputs": {"*": "dp"}, "storage": {"params": {"**.*": "dp"}}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    program = shardc.compile(
        model, torch.randn(8, 8), mesh="dp=2", plan=plan, optimizer=optimizer, loss=lambda y, _: y.square().mean()
    )
    assert all(program.body.stored[node] for node in program.body.stored)
    assert len(program.body.stored) == 2 * layers
    return len(walks)


def test_annotated_storage_walks_the_graph_once_for_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _walks(1, monkeypatch) == _walks(6, monkeypatch) == 2  # of the placements, and of the storage
