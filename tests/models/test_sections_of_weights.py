"""Unequal sections of a fused weight, beside what else a plan asks for: kernels, buckets, sharded storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import P
from shardc.ir.diagnostic import ShardcError
from shardc.ir.ops.collectives import gather_blocks

SIZES = [32, 16, 16]


class Fused(nn.Module):
    """One product, whose sections `body` makes something of, and another one behind it."""

    def __init__(self, body: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.body, self.w, self.o = body, nn.Linear(16, sum(SIZES)), nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.body(self.w(x))).square().mean()


def one_section(y: Tensor) -> Tensor:
    return y.split(SIZES, -1)[1].tanh()


def scaled(y: Tensor) -> Tensor:
    q, k, v = y.split(SIZES, -1)
    return torch.cat([q.tanh() * 2 + 1, k.sin() * v.sigmoid()], -1)


def of_products(y: Tensor) -> Tensor:
    q, k, v = y.split(SIZES, -1)
    return torch.cat([q, (k.unsqueeze(-1) * v.unsqueeze(-2)).sin().sum(-1)], -1)


def softmax_of_all(y: Tensor) -> Tensor:
    """The softmax's dim is cut in three on the one side, and in two on the other."""
    q, k, v = y.split(SIZES, -1)
    return torch.cat([y.softmax(-1)[..., :32] * q, k * v], -1)


def with_an_empty_one(y: Tensor) -> Tensor:
    q, k, v = y.split([48, 0, 16], -1)
    return torch.cat([q.tanh(), k.reshape(*k.shape[:-1], 0, 8).flatten(-2), v], -1)


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "one section": (one_section, 16),
    "scaled": (scaled, 48),
    "products": (of_products, 48),
    "softmax of all": (softmax_of_all, 48),
    "an empty one": (with_an_empty_one, 64),
}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero 3 in buckets": {"storage": {"zero": 3, "axes": ["dp"]}, "bucket": True, "clip_grad_norm": 0.1},
    "bias in buckets": {"storage": {"zero": 1, "axes": ["dp", "tp"]}, "bucket": True, "accumulate": 2},
    "computed twice": {
        "storage": {"zero": 3, "axes": ["dp"]},
        "recompute": {"mode": "full", "collectives": True},
        "fuse": True,
    },
}


def compiled(form: str, plan: dict[str, Any], mesh: str = "dp=2, tp=2") -> shardc.Program:
    torch.manual_seed(0)
    body, width = FORMS[form]
    model = Fused(body, width).double()
    batch = {"x": torch.randn(4, 6, 16).double()}
    params = {"w.weight": "tp, -", "w.bias": "tp", "o.weight": "-, tp"}
    said = {"params": params, "inputs": {"x": "dp"}, **plan}
    return shardc.compile(model, batch, mesh=mesh, plan=said, optimizer=torch.optim.AdamW(model.parameters(), 0.01))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(20)
def test_as_on_one_device_and_read_back(form: str, plan: str) -> None:
    program = compiled(form, PLANS[plan])
    report = program.verify()
    assert report.ok, str(report)
    again = shardc.Program.from_json(program.to_json())
    assert again.text() == program.text()
    assert again.verify().ok


def test_a_weight_in_blocks_is_stored_over_its_other_dim() -> None:
    """Its gradient is reduce-scattered then; a bias has no other dim, and is gathered block by block."""
    program = compiled("scaled", {"storage": {"zero": 3, "axes": ["dp"]}, "bucket": False})
    types = {name: str(program.body.input_nodes()[name].meta["shardc"].type) for name in ("w.weight", "w.bias")}
    assert types["w.weight"] == "f64[32|16|16@tp, 16@dp]"
    assert types["w.bias"] == "f64[32|16|16@tp.dp]"
    scattered = [c for c in program.collectives() if c.kind == "reduce_scatter" and c.axes == ("dp",)]
    assert {c.payload_bytes for c in scattered} >= {32 * 16 * 8}
    gathered = [node for node in program.body.calls() if node.target is gather_blocks]
    assert {program.body.input_nodes()["w.bias"]} == {node.args[0] for node in gathered}


def test_sizes_that_are_not_those_of_the_dim() -> None:
    with pytest.raises(ShardcError, match=r"of size 64, .* sum up to 48") as refused:
        compiled("scaled", {"params": {"w.weight": "[32, 16]*tp, -"}})
    (wrong,) = refused.value.diagnostics
    assert wrong.code == "SC203"
    assert wrong.hint
    assert "the axis alone" in wrong.hint


def test_sizes_may_be_a_tuple() -> None:
    assert P(((32, 16, 16), "tp"), None) == P(([32, 16, 16], "tp"), None)
    with pytest.raises(ShardcError, match="does not place a dim"):
        P(((32, 16), 3, "tp"))
