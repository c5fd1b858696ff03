"""What several graphs of a step share has one type in all of them, also where cuts of a dim do not nest.

Of a weight of 6 rows in 2 blocks, whose bias has 3, some values are (2 3) and others (3 2): each call that would need
both keeps the dim whole. A sum over microbatches and its terms may lie in different graphs, with no call between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options, call_passes, kernel_passes
from shardc.ir.graph import type_of, update
from shardc.partition import microbatch_sums
from shardc.partition.staged_program import StagedProgram
from shardc.passes.memory.offload import Offload
from shardc.passes.sharding import atomize
from shardc.passes.verify import PRESERVES, same_interface

APART = {"layers.0.weight": "2*dp, -", "layers.0.bias": "3*dp", "layers.1.weight": "-, 3*dp", "layers.1.bias": "2*dp"}
PLANS: dict[str, dict[str, Any]] = {
    "accumulate": {"mesh": "dp=2", "params": APART, "accumulate": 2},
    "1f1b": {"mesh": "pp=2, dp=2", "params": APART, "pipeline": {"microbatches": 2}},
    "zb-h1, zero-3, offload": {
        "mesh": "pp=2, dp=2",
        "params": APART,
        "pipeline": {"microbatches": 2, "schedule": "zb-h1"},
        "storage": {"zero": 3, "axes": "dp"},
        "offload": {"activations": "all", "least": 1},
    },
    "tied": {
        "mesh": "pp=2, dp=2",
        "params": {"layers.1.bias": "3*dp"},
        "pipeline": {"microbatches": 3, "schedule": "zb-h1"},
        "fuse": True,
    },
}


class Net(nn.Module):
    """Layers of 6 columns. Where they are tied, the second multiplies by the weight of the first as it is, and sees as
    rows what the first sees as columns; between the two the columns are two heads of three."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        if tied:
            self.layers[1].weight = self.layers[0].weight
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        first, second = (cast(nn.Linear, layer) for layer in self.layers)
        x = first(x)
        if not self.tied:
            return second(x).square().mean()
        x = x.unflatten(-1, (2, 3)).transpose(-1, -2).flatten(-2)
        return (x @ second.weight + second.bias).square().mean()


def compiled(case: str) -> shardc.Program:
    torch.manual_seed(0)
    model, plan = Net(tied=case == "tied").double(), PLANS[case]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return shardc.compile(model, {"x": x}, plan=plan, optimizer=optimizer)


@pytest.mark.parametrize("case", PLANS)
def test_what_is_compiled_loads_and_computes_the_step(case: str) -> None:
    program = compiled(case)
    assert {(2, 3), (3, 2)} <= {dim for value in program.body.values() for dim in type_of(value).sizes}
    loaded = shardc.Program.from_json(program.to_json())
    assert loaded.text() == program.text()
    report = loaded.verify()
    assert report.equal, str(report)


@pytest.mark.parametrize("case", ["accumulate", "1f1b"])
def test_sums_that_are_atomized_apart_from_their_terms_are_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomize, "_summed_terms", lambda graph: [])
    with pytest.raises(AssertionError, match=r"^atomize broke .*\nV2 .*\(2 3\), 6\], its term .*\(3 2\), 6\]"):
        compiled(case)


def test_a_cut_that_gives_a_sum_two_types_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch_sums, "is_plain_add", lambda call: call.target is microbatch_sums.ADD)
    with pytest.raises(AssertionError, match=r"^cut broke what the pipeline's graphs share:\n@.*: sum '.*elsewhere"):
        compiled("tied")


def test_graphs_that_are_offloaded_otherwise_than_their_readers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrowed(staged: StagedProgram, _: Offload) -> StagedProgram:
        graph = staged.stages[1].forward.copy()
        for port, value in zip(graph.inputs, graph.placeholders, strict=True):
            if port.role == "value":
                update(value, type=type_of(value).with_dtype(torch.float32))
        stage = replace(staged.stages[1], parts={**staged.stages[1].parts, "forward": graph})
        return replace(staged, stages=(staged.stages[0], stage))

    monkeypatch.setattr(driver, "offload_stages", narrowed)
    with pytest.raises(AssertionError, match=r"^offload broke what .*\n.* is f32\[12, .*elsewhere f64"):
        compiled("zb-h1, zero-3, offload")


def test_passes_over_one_graph_of_several_keep_the_types_that_others_know() -> None:
    for pass_ in (*call_passes(Options()), *kernel_passes(Options())):
        assert same_interface in PRESERVES[pass_.name], pass_.name
