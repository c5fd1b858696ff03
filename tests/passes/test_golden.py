"""The whole compiler as text: two small models, as they are on one device and as a rank runs them.

`pytest tests/passes/test_golden.py --update-golden` rewrites them. What each pass does, `test_single_passes.py` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.graph import Graph
from shardc.ir.text import print_graph
from shardc.passes.base import Pass

Golden = Callable[[str, str], None]


class MLP(nn.Module):
    """Column, then row parallel, with a residual and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


class Attention(nn.Module):
    """A fused projection to three heads (over two ranks: uneven), causal attention, and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18, bias=False)
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.reshape(4, 5, 3, 2).transpose(1, 2) for t in self.qkv(x).split(6, 2)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(4, 5, 6)).square().mean()


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "mlp": (
        MLP,
        (4, 5, 8),
        {"params": {"up.weight": "tp, -"}, "inputs": {"x": "dp, -, -"}, "activations": {"norm": "dp, tp, -"}},
    ),
    "attention": (Attention, (4, 5, 6), {"params": {"qkv.weight": "3*tp, -"}, "inputs": {"x": "dp, -, -"}}),
}


SHOWN = ("normalize", "fuse")  # after the first pass, and after the last that makes calls others


@pytest.mark.parametrize("case", CASES)
def test_the_text_before_and_after(case: str, golden: Golden) -> None:
    made, shape, plan = CASES[case]
    texts: dict[str, str] = {}

    def watch(one: Pass, graph: Graph, seconds: float) -> None:
        texts[one.name] = print_graph(graph, comments=False)

    torch.manual_seed(0)
    program = shardc.compile(
        made(), torch.randn(shape), mesh="dp=2, tp=2", plan={**plan, "bucket": True, "fuse": True}, watch=watch
    )
    assert program.verify().ok
    assert next(iter(texts)) == SHOWN[0]
    assert texts[SHOWN[1]] == texts[next(reversed(texts))]
    for name in SHOWN:
        golden(f"golden/{case}/{name}.txt", texts[name])
