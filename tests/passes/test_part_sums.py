"""Backward of a fused weight with a bias, as that of q, k and v: the gradients are joined and summed by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from benchmarks.gpt import GPT
from examples.gpt2 import gpt2
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.verify import violations
from shardc.passes.fusion import fuse as pass_
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.clustering.part_sums import part_sums, split_part_sums

Made = tuple[nn.Module, dict[str, Tensor]]


def gpt() -> Made:
    torch.manual_seed(0)
    batch = {name: torch.randint(64, (8, 16)) for name in ("input_ids", "labels")}
    return GPT(vocab=64, width=32, heads=4, layers=2, seq=16), batch


def turned() -> Made:
    return gpt2(batch=8, seq=16, layers=2, vocab=64, heads=4, width=32)


DP = {"inputs": {"*": "dp, -"}}
TP = {"params": {"**.qkv.weight": "3*tp, -", "**.up.weight": "tp, -"}}
LAYOUTS: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    "alone": (gpt, "dp=1", {}),
    "tp": (gpt, "dp=2,tp=2", {**TP, **DP}),
    "sp": (gpt, "dp=2,tp=2", {**TP, **DP, "activations": {"blocks.0": "dp, tp, -"}}),
    "accumulate": (gpt, "dp=2", {**DP, "accumulate": 2}),
    "zero3": (gpt, "dp=2", {**DP, "storage": {"zero": 3, "axes": ["dp"]}, "recompute": "full", "bucket": "1MiB"}),
    "turned": (turned, "dp=1", {}),
    "turned-tp": (turned, "dp=2,tp=2", {"params": {"**.attn.c_attn.weight": "-, 3*tp"}, **DP}),
}


def compiled(layout: str, precision: str | None = "bf16", **more: Any) -> shardc.Program:
    make, mesh, plan = LAYOUTS[layout]
    model, batch = make()
    asked = {"fuse": True, "precision": precision, **plan, **more}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return shardc.compile(model, batch, mesh=mesh, plan=asked, optimizer=optimizer)


def joining(body: Graph) -> list[str]:
    """The kernels that join parts and sum them."""
    kernels = [str(call.args[1]) for call in body.calls() if op_name(call.target) == "shardc.fused"]
    return [text for text in kernels if text.startswith("fused_cat_") and text.count("csum(") == 3]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_kernel_a_layer(layout: str, precision: str | None) -> None:
    program = compiled(layout, precision)
    assert len(joining(program.body)) == 2
    assert not program.body.calls_of(torch.ops.aten.cat.default)
    report = program.verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


@pytest.mark.parametrize("layout", ["alone", "tp", "turned"])
def test_what_was_joined_is_not_read_again(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiled(layout, fuse=False).body
    found = part_sums(plain)
    assert len(found) == 2
    after = traffic(compiled(layout).body)
    for name in ("split_part_sums", "part_sums"):
        monkeypatch.setattr(pass_, name, lambda *_: [])
    before = traffic(compiled(layout).body)
    joined = sum(type_of(each.cat).local_bytes(plain.mesh) for each in found)
    columns = sum(type_of(each.cat).local_shape(plain.mesh)[-1] for each in found)
    # A sum may be written in float32, and read so, where the optimizer's kernel cast it.
    assert joined - 4 * columns <= before.bytes - after.bytes <= joined
    assert before.kernels - after.kernels == 2


@pytest.mark.parametrize("layout", ["tp", "sp", "turned-tp"])
def test_the_sums_are_of_what_each_rank_has(layout: str) -> None:
    """Also before kernels are made of them: calls that stay are right by the rules."""
    body = compiled(layout, fuse=False).body
    names = [info(each.result).name for each in part_sums(body)]
    split_part_sums(body)
    assert not violations(body)
    assert not part_sums(body)
    left = {info(node).name: op_name(node.target) for node in body.calls()}
    assert {left[name] for name in names} == {"cat"}


@pytest.mark.parametrize("exclude", ["cat", "sum.dim_IntList", "d.blocks.0.cat", "d.blocks.0.qkv.sum"])
def test_what_a_plan_excludes_stays(exclude: str) -> None:
    body = compiled("alone", fuse={"exclude": [exclude]}).body
    assert len(joining(body)) == (1 if exclude.startswith("d.") else 0)
    assert "d.blocks.0.qkv.sum" in {info(value).name for value in body.values()}


class Hostile(nn.Module):
    """Parts that are two, unequal, joined in rows, read once more, repeated or summed in part."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.uneven = nn.Linear(8, 8), nn.Linear(8, 12)
        self.alike, self.rows = nn.Linear(8, 12), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.two(x).chunk(2, -1)
        c, d, e = self.uneven(x).split([2, 4, 6], -1)
        f, g, h = self.alike(x).chunk(3, -1)
        i, j, k = self.rows(x).chunk(3, 1)
        joined = torch.cat([f, f, g], -1)
        total = (a * b).sum() + (c.sum(-1) * d.sum(-1) * e.sum(-1)).mean() + (f * g * h).mean() + (i * j * k).mean()
        return total + (joined.sum((0, 1)) ** 2).mean() + (joined.sum(0) ** 2).mean() + joined.sin().mean()


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize("plan", [{}, {"inputs": {"x": "tp, -, -"}}, {"params": {"alike.weight": "3*tp, -"}}])
def test_other_parts(plan: dict[str, Any], precision: str | None) -> None:
    torch.manual_seed(0)
    model = Hostile()
    batch = {"x": torch.randn(4, 6, 8)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    asked = {"fuse": True, "precision": precision, **plan}
    report = shardc.compile(model, batch, mesh="tp=2", plan=asked, optimizer=optimizer).verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12
