"""What fusing costs, in calls of its own functions: work grows with a traced model's length, and no faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardc
from benchmarks.compile_time import function_calls
from benchmarks.fusion_census import CALLS_OF_BLOCK, traced
from shardc.ir.graph import Graph
from shardc.passes.fusion.analysis import iteration_space, space_cache
from shardc.passes.fusion.clustering import clustering, fusion_graph, rematerialize
from shardc.passes.fusion.clustering.clustering import _Merger  # pyright: ignore[reportPrivateUsage]
from shardc.passes.fusion.clustering.rematerialize import _Rematerializer  # pyright: ignore[reportPrivateUsage]
from shardc.passes.fusion.emit import kernel_builder
from shardc.passes.fusion.fuse import fuse
from tests.passes.fuse_graphs import chains

MODULES = [iteration_space, space_cache, rematerialize, clustering, kernel_builder, fusion_graph]


def counted(graph: Graph) -> Counter[str]:
    """Counts calls of the expensive functions, and the operations that `find_space` and `space_constraint` visit."""
    counts: Counter[str] = Counter()

    def watched(name: str, function: Any, size: bool = False) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += len(args[0]) if size else 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name in {"find_space", "space_constraint"} & vars(module).keys():
                patch.setattr(module, name, watched(name, getattr(module, name), size=True))
        expand = _Rematerializer._expand  # pyright: ignore[reportPrivateUsage]
        patch.setattr(_Rematerializer, "_expand", watched("expand", expand))
        patch.setattr(_Merger, "_score", watched("score", _Merger._score))  # pyright: ignore[reportPrivateUsage]
        patch.setattr(_Merger, "merged", watched("merged", _Merger.merged))
        fuse(graph)
    return counts


@pytest.mark.long
def test_twice_the_blocks_are_twice_the_work() -> None:
    torch.manual_seed(0)
    graphs = [traced(blocks * CALLS_OF_BLOCK) for blocks in (20, 40)]
    small, large = map(counted, graphs)
    assert set(small) == {"find_space", "space_constraint", "expand", "score", "merged"}
    for name, count in large.items():
        assert count <= 2.1 * small[name], (name, small[name], count)
    assert large["expand"] <= 2 * sum(1 for _ in graphs[1].calls())


@pytest.mark.parametrize(
    ("graph", "python", "c"), [(lambda n: chains(n), 130, 140), pytest.param(traced, 285, 260, marks=pytest.mark.long)]
)
def test_the_functions_that_fusing_calls(graph: Callable[[int], Graph], python: int, c: int) -> None:
    """For each call of the graph; seconds vary, and this does not."""
    small, large = graph(600), graph(1200)
    for body in (small, large):
        fuse(body)  # what torch is asked once
    counts = [function_calls(lambda body=body: fuse(body)) for body in (small, large)]
    calls = [sum(1 for _ in body.calls()) for body in (small, large)]
    for before, after, most in zip(*counts, (python, c), strict=True):
        assert after <= most * calls[1]
        assert after / calls[1] <= 1.1 * before / calls[0]


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
    assert counted(body)["expand"] <= 4 * calls
