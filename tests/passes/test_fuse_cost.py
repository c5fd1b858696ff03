"""What fusing costs, in calls of its own functions: work grows with a traced model's length, and no faster."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch

import shardc
from benchmarks.fusion_census import CALLS_OF_BLOCK, traced
from shardc.ir.graph import Graph
from shardc.passes.fuse import fuse
from shardc.passes.fuse.again import _Again  # pyright: ignore[reportPrivateUsage]
from shardc.passes.fuse.clusters import _Merging  # pyright: ignore[reportPrivateUsage]

PARTS = {name: import_module(f"shardc.passes.fuse.{name}") for name in ("again", "clusters", "kernels", "scene")}


def counted(graph: Graph) -> Counter[str]:
    """How often what takes the time is called, and over how many operations `space` and `demand` look."""
    found: Counter[str] = Counter()

    def watched(name: str, function: Any, size: bool = False) -> Any:
        def call(*args: Any) -> Any:
            found[name] += len(args[0]) if size else 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for part in PARTS.values():
            for name in {"space", "demand"} & vars(part).keys():
                patch.setattr(part, name, watched(name, getattr(part, name), size=True))
        unfold = _Again._unfold  # pyright: ignore[reportPrivateUsage]
        patch.setattr(_Again, "_unfold", watched("unfold", unfold))
        patch.setattr(_Merging, "push", watched("push", _Merging.push))
        patch.setattr(_Merging, "joined", watched("joined", _Merging.joined))
        fuse(graph)
    return found


@pytest.mark.long
def test_twice_the_blocks_are_twice_the_work() -> None:
    torch.manual_seed(0)
    graphs = [traced(blocks * CALLS_OF_BLOCK) for blocks in (20, 40)]
    small, large = map(counted, graphs)
    assert set(small) == {"space", "demand", "unfold", "push", "joined"}
    for name, count in large.items():
        assert count <= 2.1 * small[name], (name, small[name], count)
    assert large["unfold"] <= 2 * sum(1 for _ in graphs[1].calls())


def test_chains_that_join_are_looked_at_once() -> None:
    """A value that a chain reads in two ways, each of them made of one: 2^12 ways lead to the first."""

    def twelve(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.neg() + x.abs()
        return x

    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = twelve(x @ self.weight)
            return (made @ self.weight + made).sum()

    body = shardc.compile(Joined(), (torch.ones(8, 8),), mesh="dp=1").body
    calls = sum(1 for _ in body.calls())
    assert counted(body)["unfold"] <= 4 * calls
