"""Sequences whose rows are merged into fewer, as patches are, and spread again: each level is a sequence of its own.

Loss and every gradient are those of eager PyTorch; only the rows that change ranks are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Program
from shardc.ir.graph import type_of
from shardc.passes.type_check import type_faults

WIDTH, VOCAB = 8, 13


class Pyramid(nn.Module):
    """Tokens, what a function makes of them by these layers, and a loss whose rows differ."""

    def __init__(self, function: Callable[[Pyramid, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.tokens, self.head = function, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.fewer = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.taps = nn.Conv1d(WIDTH, WIDTH, 2, 2)

    def attend(self, x: Tensor, layer: int, causal: bool = True, keys: Tensor | None = None) -> Tensor:
        of_keys = self.qkv[layer](x if keys is None else keys).chunk(3, -1)
        heads = (self.qkv[layer](x).chunk(3, -1)[0], *of_keys[1:])
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in heads)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    def merge(self, x: Tensor, layer: int = 0) -> Tensor:
        return self.fewer[layer](x.unflatten(1, (-1, 2)).flatten(2))

    def merge_as_swin(self, x: Tensor, layer: int = 0) -> Tensor:
        return self.fewer[layer](torch.cat([x[:, 0::2], x[:, 1::2]], -1))

    def merge_by_taps(self, x: Tensor) -> Tensor:
        return self.taps(x.mT).mT

    def forward(self, ids: Tensor) -> Tensor:
        y = self.head(self.function(self, torch.tanh(self.tokens(ids))))
        return (y * torch.linspace(0, 1, y.shape[1], dtype=y.dtype)[:, None]).pow(2).mean()


def before(x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def spread(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2)


def by_four(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 4)).mean(2)


Function = Callable[[Pyramid, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "both ways": lambda m, x: m.attend(m.merge(m.merge(x), 1), 0, causal=False),
    "causal": lambda m, x: m.attend(m.merge(m.attend(x, 0)), 1),
    "hourglass": lambda m, x: m.attend(x + spread(m.attend(m.merge(m.attend(x, 0)), 1)), 2),
    "as Swin": lambda m, x: m.attend(m.merge_as_swin(m.merge_as_swin(x), 1), 0),
    "shifts between": lambda m, x: m.merge(before(m.merge(before(x))), 1),
    "sums": lambda m, x: m.merge(m.merge(x.cumsum(1)), 1),
    "spread, and merged by more": lambda m, x: by_four(spread(m.merge(before(x)))) + before(m.merge(m.merge(x), 1)),
    "halves": lambda m, x: m.attend(torch.mul(*x.unflatten(1, (2, -1)).unbind(1)), 0),
    "rows from behind": lambda m, x: m.merge(before(x))[:, -x.shape[1] // 2 :: 2] + before(x)[:, 3::4],
    "picked rows": lambda m, x: m.merge(m.merge(x + x[:, -1:]), 1),
    "a circle": lambda m, x: m.merge(m.merge_by_taps(x.roll(1, 1)), 1),
    "others' keys": lambda m, x: m.attend(x, 0, causal=False, keys=m.merge(m.merge_by_taps(x))),
}


def compiled(name: str, mesh: str, length: int, context: Any) -> Program:
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    plan = {"mesh": mesh, "inputs": {"ids": "-, cp"}, "context": context}
    return shardc.compile(Pyramid(FUNCTIONS[name]).double(), {"ids": ids}, plan=plan)


def exact(program: Program) -> None:
    report = program.verify()
    assert report.ok, str(report)
    assert not type_faults(program.body)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize(("mesh", "length"), [("cp=4", 32), ("cp=4", 36), ("cp=2", 28)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_eager(name: str, mesh: str, length: int, balance: str) -> None:
    program = compiled(name, mesh, length, {"attention": "ring", "balance": balance})
    exact(program)
    kinds = {c.kind for c in program.collectives()} - {"all_reduce", "permute"}
    assert kinds <= ({"all_gather"} if name == "sums" else set())  # of totals
    assert not [d for d in program.diagnostics if d.severity == "warning" and d.code != "SC240"]


@pytest.mark.parametrize("name", ["causal", "hourglass"])
def test_causal_pyramids_are_zigzags(name: str) -> None:
    program = compiled(name, "cp=4", 32, {"attention": "ring"})
    exact(program)
    tokens = program.body.input_nodes()["ids"]
    assert str(type_of(tokens)) == "i64[2, 16|16~cp@cp]"
    assert {c.kind for c in program.collectives()} == {"permute", "all_reduce"}


def test_windows_that_are_shifted_send_the_rows_of_the_shift() -> None:
    """Swin: rows of patches lie over the axis; rolls are moves of few rows, windows lie with a rank."""
    hf = pytest.importorskip("transformers")

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2]}
            self.swin = hf.SwinModel(hf.SwinConfig(**sizes, window_size=4, drop_path_rate=0.0))

        def forward(self, x: Tensor) -> Tensor:
            y = self.swin(x).last_hidden_state
            return (y * torch.linspace(0, 1, y.shape[-1], dtype=y.dtype)).pow(2).mean()

    plan = {"mesh": "cp=2", "inputs": {"x": "-, -, cp, -"}, "context": "ring"}
    program = shardc.compile(Encoder().double(), torch.randn(2, 3, 32, 32).double(), plan=plan)
    exact(program)
    assert {c.kind for c in program.collectives()} == {"permute", "all_reduce"}
