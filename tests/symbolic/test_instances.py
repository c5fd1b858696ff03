"""One program for batches of many sizes: what it becomes is what compiling gives; what a line fixes is reported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Plan, Program
from shardc.ir.plain import graph_to_plain
from tests.symbolic.families import FAMILIES, TOKENS

WIDTH = 8
PLAN = Plan.of(
    mesh="dp=2, tp=2",
    params={"qkv.weight": "3*tp", "up.weight": "tp"},
    inputs={"x": "dp"},
    symbols={"B": "x.0", "S": "x.1"},
)


class Net(nn.Module):
    """Attention over learned positions, and a loss that divides by sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(97, WIDTH))
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(nn.functional.gelu(self.up(x + h)))

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[0], x.shape[1]
        h = self.mixed(x + self.table[:length])
        h = torch.cat([h, x[:, : length - 1]], 1)
        return h.square().sum() / (rows * (2 * length - 1)) + h.mean() * length**-0.5


class Branch(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 10:  # a branch
            x = x * 2
        return self.mixed(x).square().mean()


class Loop(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0] * 0
        for t in range(x.shape[1]):  # a loop
            state = self.up(state.tanh() + x[:, t])[:, :WIDTH]
        return state.square().mean()


class Remainder(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale = 3.0 if x.shape[1] % 3 == 0 else 1.0  # a remainder
        return (self.mixed(x) * scale).square().mean()


def batch(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(97 * rows + length))}


def compiled(model: nn.Module, rows: int, length: int) -> Program:
    return shardc.compile(model, batch(rows, length), plan=PLAN)


def fixed(program: Program) -> str:
    """Why a program was compiled for its size; "" of an instance."""
    return next((str(d) for d in program.diagnostics if d.code == "SC232"), "")


def same(one: Program, other: Program) -> bool:
    return all(graph_to_plain(getattr(one, g)) == graph_to_plain(getattr(other, g)) for g in ("body", "reference"))


@pytest.mark.parametrize(
    ("model", "within", "beyond", "said", "line"),
    [
        (Branch, 12, 10, "S > 10", "# a branch"),
        (Loop, 8, 6, "Eq(S, 8)", "# a loop"),
        (Remainder, 9, 10, "Mod(S, 3)", "# a remainder"),
    ],
)
def test_guards(model: type[nn.Module], within: int, beyond: int, said: str, line: str) -> None:
    own = model()
    program = compiled(own, 8, within)
    other = program.resized(batch(4, beyond))
    why = fixed(other)
    assert said in why
    assert "test_instances.py:" in why
    assert line in why
    assert same(other, compiled(own, 4, beyond))
    assert program.verify(batch(4, beyond)).ok


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(f, marks=pytest.mark.long) for f in ("gpt2_sp", "llama", "llama_sp", "mixtral"))]
)
def test_eight_sizes_of_a_language_model(family: str) -> None:
    torch.manual_seed(0)
    build, plan = FAMILIES[family]
    model = build(2)

    def tokens(rows: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(rows + length))
        return {"input_ids": ids, "labels": ids}

    plan = plan.merge(Plan.of(mesh="dp=2, tp=2", symbols=TOKENS))
    program = shardc.compile(model, tokens(8, 16), plan=plan)
    for rows, length in [(4, 24), (16, 6), (6, 34), (32, 32), (8, 64), (2, 16), (10, 10), (4, 4)]:
        other, own = program.resized(tokens(rows, length)), shardc.compile(model, tokens(rows, length), plan=plan)
        assert not fixed(other)
        assert same(other, own), (rows, length)
    assert program.verify(tokens(6, 10)).ok
