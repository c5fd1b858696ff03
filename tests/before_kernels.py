"""The graph that a compile's kernels are made of: what the pass `fuse` is given where it is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import shardc
from shardc.ir.graph import Graph
from shardc.passes.base import Pass


def compiled(
    model: nn.Module, batch: Any, plan: Mapping[str, Any] | shardc.Plan, **options: Any
) -> tuple[shardc.Program, Graph]:
    """A program with kernels, and its graph without."""
    graphs: list[Graph] = []

    def watch(one: Pass, graph: Graph, _: float) -> None:
        if one.name == "merge_updates":
            graphs.append(graph.copy())

    plan = plan if isinstance(plan, shardc.Plan) else shardc.Plan.from_dict(plan)
    program = shardc.compile(model, batch, plan=plan.merge(shardc.Plan.of(fuse=True)), watch=watch, **options)
    (before,) = graphs
    return program, before
