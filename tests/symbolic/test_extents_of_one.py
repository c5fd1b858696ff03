"""An extent of 1, which torch has no symbol for: a program sampled there is no template for other sizes, nor one
sampled at others for it, and no formula holds there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Plan, ShardcError
from shardc.cost.memory import memory
from shardc.symbolic.stages import KINDS, StageCosts
from tests.symbolic.test_hostile_sizes import LAYOUTS, WIDTH, Net, batch, computes_as_eager
from tests.symbolic.test_instances import fixed

Body = Callable[[Any, Tensor], Tensor]
SYMBOLS = {"B": "x.0", "S": "x.1"}


def tripled(m: Any, x: Tensor) -> Tensor:
    return m.fc(x * 3 if x.shape[1] == 1 else x).square().mean()


def of_one_row(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * (3 if x.shape[0] < 2 else 2)


def told_apart(m: Any, x: Tensor) -> Tensor:
    n: Any = x.shape[1]
    return m.fc(x).square().mean() * (5 if isinstance(n, int) and n == 1 else 2)


def by_truth(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * (2 if x.shape[1] - 1 else 5)


def squeezed(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x).squeeze(1)
    return y.square().mean() * y.dim()


def expanded(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    return (y.expand(-1, 6, -1) if y.shape[1] == 1 else y).square().mean()


def broadcast(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    return (y + m.table[:6] if y.shape[1] in (1, 6) else y).square().mean()


def the_past(m: Any, x: Tensor) -> Tensor:
    past = x[:, :-1]
    return m.fc(x).square().mean() + (past.square().sum() if past.shape[1] else 7.0)


def listed(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.fc(x[:, i]).square().mean() * (i + 1) for i in range(x.shape[1])]).sum()


def odd(m: Any, x: Tensor) -> Tensor:
    return m.fc(x * 2 if x.shape[1] % 2 else x).square().mean()


def padded(m: Any, x: Tensor) -> Tensor:
    return m.fc(F.pad(x, (0, 0, 0, -x.shape[1] % 4))).square().mean()


def counted(m: Any, x: Tensor) -> Tensor:
    return (m.fc(x.reshape(-1, WIDTH)).view(x.shape) * torch.arange(x.shape[1]).to(x.dtype)[:, None]).square().mean()


def causal(m: Any, x: Tensor) -> Tensor:
    q = m.fc(x)[:, None]
    return F.scaled_dot_product_attention(q, x[:, None], x[:, None], is_causal=x.shape[1] > 1).square().mean()


BODIES: list[Body] = [
    *(tripled, of_one_row, told_apart, by_truth, squeezed, expanded, broadcast),
    *(the_past, listed, odd, padded, counted, causal),
]


@pytest.mark.parametrize(
    "start", [(8, 1), *(pytest.param(s, marks=pytest.mark.long) for s in ((1, 6), (8, 16)))], ids=str
)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_is_eagers(body: Body, start: tuple[int, int]) -> None:
    torch.manual_seed(0)
    own = Net(body).double()
    program = shardc.compile(own, batch(*start), plan=Plan.of(**LAYOUTS["dp"], symbols=SYMBOLS))
    for rows, length in [(4, 6), (8, 1), (2, 2), (1, 7), (1, 1), (6, 10)]:
        x = batch(rows, length)
        other = program.resized(x)
        computes_as_eager(other, own, x)
        if rows == 1 or length == 1:
            assert fixed(other), (rows, length)


def test_a_guard_says_so() -> None:
    program = shardc.compile(Net(tripled).double(), batch(8, 1), plan=Plan.of(**LAYOUTS["dp"], symbols=SYMBOLS))
    assert not fixed(program.resized(batch(4, 6)))
    assert "the program holds for S >= 2, and S=1" in fixed(program.resized(batch(4, 1)))


@pytest.mark.parametrize("start", [(8, 1), (8, 12)], ids=str)
def test_formulas(start: tuple[int, int]) -> None:
    """Sampled at 1, those of other sizes; at 1 none."""
    plan = Plan.of(**LAYOUTS["dp"], symbols=SYMBOLS)
    formulas = shardc.compile(Net(tripled).double(), batch(*start), plan=plan).symbolic({"B": (2, 32), "S": (1, 32)})
    assert "S >= 2\n" in f"{formulas.domain}\n"
    with pytest.raises(ShardcError, match=r"S >= 2|is not between"):
        formulas.at(B=8, S=1, dp=2)
    for rows, length in [(6, 10), (8, 31)]:
        own = shardc.compile(Net(tripled).double(), batch(rows, length), plan=plan)
        assert formulas.at(B=rows, S=length, dp=2).peak == memory(own.body).peak


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            x = x @ x.mT @ x
        for layer in self.h:
            x = layer(x).tanh() + x
        return x.square().mean()


@pytest.mark.parametrize("start", [(16, 8), (2, 8), (8, 1)], ids=str)
def test_formulas_of_stages(start: tuple[int, int]) -> None:
    """Microbatches of one row, and rows of one element, lie in memory otherwise, and the model asks for them."""

    def compiled(rows: int, length: int, microbatches: int) -> shardc.Program:
        plan = Plan.of(mesh="pp=2", pipeline={"microbatches": microbatches}, symbols=SYMBOLS)
        with torch.device("meta"):
            return shardc.compile(Stages(), {"x": torch.empty(rows, length, WIDTH)}, plan=plan)

    formulas = compiled(*start, 2).stage_formulas({"B": (2, 64), "S": (1, 32)})
    for rows, length, microbatches in [(16, 8, 4), (6, 3, 3), (10, 3, 5), (32, 16, 2)]:
        costs, own = formulas.at(B=rows, S=length, M=microbatches), compiled(rows, length, microbatches).staged
        for kind in KINDS:
            exact = getattr(StageCosts.of(own), kind)
            assert getattr(costs, kind) == {key: exact[key] for key in getattr(costs, kind)}, kind
    for sizes in [{"B": 5, "S": 8, "M": 5}, {"B": 8, "S": 1, "M": 4}]:
        with pytest.raises(ShardcError, match=r"S >= 2|is not between"):
            formulas.at(sizes)
