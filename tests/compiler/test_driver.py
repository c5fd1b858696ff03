"""The driver runs, verifies and shows every pass, on a body and on each graph of each stage alike."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.compiler.pass_pipeline import Options, run
from shardc.ir.graph import Graph, info, type_of, update
from shardc.ir.hardware import Hardware
from shardc.passes import gemm_padding
from shardc.passes.base import Pass
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.verify import collectives_in_order, same_interface

PIPELINE = {"pipeline": {"microbatches": 2}, "fuse": True}
SHARDED = {"params": {"0.weight": "tp, -"}, "inputs": {"x": "dp, -"}, "fuse": True}


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def watched(mesh: str, plan: dict[str, Any], optimizer: bool = False) -> dict[str, list[tuple[str, Graph]]]:
    """By pass, the graphs that it left: their names, and copies."""
    seen: dict[str, list[tuple[str, Graph]]] = defaultdict(list)

    def watch(one: Pass, graph: Graph, _: float) -> None:
        seen[one.name].append((graph.name, graph.copy()))

    model = Mlp()
    adam = torch.optim.AdamW(model.parameters()) if optimizer else None
    shardc.compile(model, torch.randn(4, 8), mesh=mesh, plan=plan, optimizer=adam, watch=watch)
    return seen


def test_every_step_of_a_compile_is_watched() -> None:
    seen = watched("dp=2, tp=2", SHARDED | {"accumulate": 2, "bucket": True}, optimizer=True)
    order = list(seen)
    assert order[:9] == [
        *("normalize", "imply_masks", "group_experts", "limit_experts", "quantize", "sum_parts", "accumulate"),
        *("join_loads", "append_updates"),
    ]
    assert order[-15:] == [
        *("align", "overlap", "late_gradients", "sum_products", "decompose", "bucket", "prefetch", "bias_products"),
        *("pick_columns", "cheaper_calls", "merge_updates", "fuse", "join_sums", "offload"),
        "offload_states",
    ]
    assert {len(graphs) for graphs in seen.values()} == {1}
    (_, before), (_, after) = seen["merge_updates"][0], seen["fuse"][0]
    assert traffic(after).kernels < traffic(before).kernels


def test_the_passes_over_stages_are_watched_graph_by_graph() -> None:
    seen = watched("pp=2", PIPELINE, optimizer=True)
    cut, fused = dict(seen["cut"]), dict(seen["fuse"])
    assert cut.keys() == fused.keys() >= {"forward0", "backward0", "forward1", "backward1", "update"}
    for stage in ("backward0", "backward1"):
        assert traffic(fused[stage]).kernels < traffic(cut[stage]).kernels
        assert same_interface(cut[stage], fused[stage]) == []


@pytest.mark.parametrize(("mesh", "plan", "graph"), [("pp=2", PIPELINE, "backward1"), ("dp=2, tp=2", SHARDED, "step")])
def test_a_pass_that_breaks_a_graph_is_caught_there(
    mesh: str, plan: dict[str, Any], graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(given: Graph, hardware: Hardware) -> Graph:
        if given.name != graph:
            return given
        copy = given.copy()
        value = next(v for v in copy.output_values if v.op == "call_function")
        update(value, type=type_of(value).with_dtype(torch.float16))
        return copy

    monkeypatch.setattr(gemm_padding, "align", broken)
    with pytest.raises(AssertionError, match=f"align broke the graph '{graph}'"):
        watched(mesh, plan)


class Idle(Pass):
    name = "idle"

    def run(self, graph: Graph) -> Graph:
        return graph


class Renames(Pass):
    name = "renames"

    def run(self, graph: Graph) -> Graph:
        first, second, *_ = graph.calls()
        update(second, name=info(first).name)
        return graph


def test_what_changes_in_place_after_a_pass_that_changes_nothing_is_verified() -> None:
    (_, body) = watched("dp=2, tp=2", SHARDED)["online_softmax"][0]
    run(body, [Idle(), Idle()], Options())
    with pytest.raises(AssertionError, match="renames broke the graph"):
        run(body, [Idle(), Renames(), Idle()], Options())


def test_a_collective_that_is_added_or_moved_is_seen() -> None:
    (_, before) = watched("dp=2, tp=2", SHARDED)["online_softmax"][0]
    names = [info(node).name for node in before.calls() if "all_reduce" in str(node.target)]
    assert len(names) > 1
    lost = before.copy()
    node = lost.by_name(names[0])
    node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
    lost.fx.erase_node(node)
    assert collectives_in_order(before, before.copy()) == []
    assert collectives_in_order(lost, before) != []
    assert collectives_in_order(before, lost) == []  # what nothing reads may go; that it is read, outputs tell
