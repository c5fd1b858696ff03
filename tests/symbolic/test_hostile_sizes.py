"""Models whose code goes by sizes: at other sizes each gives eager's loss and gradients, or is compiled, and the line
that fixes a size is said."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc import Plan, ShardcError
from tests.symbolic.test_instances import fixed

WIDTH = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": "dp=2", "inputs": {"x": "dp"}},
    "tp": {"mesh": "tp=2", "params": {"fc.weight": "tp, -"}, "inputs": {"x": "-"}},
    "sp": {"mesh": "dp=2, tp=2", "params": {"fc.weight": "tp, -"}, "inputs": {"x": "dp, tp, -"}},
}
Body = Callable[[nn.Module, Tensor], Tensor]
CASES: list[tuple[Body, str]] = []  # and what is said; "" where one program is for all


def case(said: str = "") -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        CASES.append((body, said))
        return body

    return add


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.fc, self.table, self.body = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(64, WIDTH)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@case("S > 8")
def branch(m: Any, x: Tensor) -> Tensor:
    return m.fc(x * 2 if x.shape[1] > 8 else x).square().mean()


@case("PythonMod(-S, 4)")
def whole_windows(m: Any, x: Tensor) -> Tensor:
    extra = -x.shape[1] % 4
    return m.fc(F.pad(x, (0, 0, 0, extra))).square().sum()


@case("Mod(S, 4)")
def whole_windows_or_not(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] % 4:
        x = x[:, : x.shape[1] // 4 * 4]
    return m.fc(x).square().sum()


@case()
def one_row(m: Any, x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        x = x.expand(2, -1, -1)
    return m.fc(x).square().mean()


@case("Eq(B, 8)")
def reshaped(m: Any, x: Tensor) -> Tensor:
    return m.fc(x.reshape(-1, WIDTH)).view(*x.shape).square().sum() / x.shape[:-1].numel()


@case("a size is fixed by %")
def the_smaller(m: Any, x: Tensor) -> Tensor:
    return m.fc(x[:, : min(x.shape[1], 12)]).square().mean()


@case("S")
def the_larger(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * max(x.shape[1], 10)


@case("S")
def rounded_up(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * math.ceil(x.shape[1] / 4)


@case("Eq(S, 16)")
def a_float(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().sum() / float(x.shape[1])


@case("S")
def a_root(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * math.log(x.shape[1])


@case("Eq(S, 16)")
def a_loop(m: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(1, x.shape[1]):
        h = m.fc(h).tanh() + x[:, t] * t
    return h.square().mean()


@case("a size is fixed")
def positions(m: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    return (m.fc(x + m.table[places]) * (places + 1)[:, None].to(x.dtype)).square().mean()


@case()
def a_mask(m: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (m.fc(x) @ x.transpose(1, 2) / length**0.5).masked_fill(~mask, -1e9)
    return (scores.softmax(-1) @ x).square().mean()


@case()
def a_product(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bsi,bti->bst", m.fc(x), x).square().sum() / (x.numel() * x.shape[1])


@case("Mod(S, 2)")
def two_halves(m: Any, x: Tensor) -> Tensor:
    first, second = torch.split(m.fc(x), [x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1)
    return first.square().sum() + second.sum()


@case("unhashable type")
def by_key(m: Any, x: Tensor) -> Tensor:
    scale = {16: 3.0, 9: 5.0}.get(x.shape[1], 1.0)
    return m.fc(x).square().mean() * scale


@case("S")
def by_set(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * (3.0 if x.shape[1] in (9, 10, 11) else 1.0)


@case("S")
def a_number(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * (int(x.shape[1]) // 2)


@case("takes another way")
def told_apart(m: Any, x: Tensor) -> Tensor:
    length: Any = x.shape[1]
    kept = length // 2 * 2 if isinstance(length, int) else length  # told apart
    return m.fc(x[:, :kept]).square().sum()


@case("takes another way")
def tried(m: Any, x: Tensor) -> Tensor:
    scale = 1.0
    with contextlib.suppress(TypeError):
        scale = {9: 2.0}.get(hash((x.shape[1],)) and int.__index__(x.shape[1]), 1.0)
    return m.fc(x).square().mean() * scale


@case("S")
def by_text(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * len(f"{x.shape[1]}")


@case("S")
def by_bits(m: Any, x: Tensor) -> Tensor:
    return m.fc(x).square().mean() * (x.shape[1].bit_length() if hasattr(x.shape[1], "bit_length") else 1)


@case("Eq(B, 8)")
def by_length(m: Any, x: Tensor) -> Tensor:
    return sum(m.fc(row).square().sum() for row in x.unbind(-1)[0].unbind(0)[:0]) + m.fc(x).square().sum() / len(x)


@case()
def rolled(m: Any, x: Tensor) -> Tensor:
    return (m.fc(x.roll(1, 1)) * x.flip(1)).square().mean() + x.new_ones(x.shape[1]).sum() * m.fc(x).mean()


def computes_as_eager(program: shardc.Program, model: nn.Module, x: dict[str, Tensor]) -> None:
    """The loss and the gradients of one step."""
    model.zero_grad()
    loss = model(**x)
    loss.backward()
    step = program.simulate()
    torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(step.grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("body", "said"), CASES, ids=[body.__name__ for body, _ in CASES])
@pytest.mark.parametrize("layout", ["dp", *(pytest.param(name, marks=pytest.mark.long) for name in ("tp", "sp"))])
def test_as_eager(body: Body, said: str, layout: str) -> None:
    torch.manual_seed(0)
    own = Net(body).double()
    plan = Plan.of(**LAYOUTS[layout], symbols={"B": "x.0", "S": "x.1"})
    program = shardc.compile(own, batch(8, 16), plan=plan)
    reasons = list[str]()
    for rows, length in [(4, 9), (6, 10), (2, 7), (16, 16), (8, 33), (5, 12), (1, 16)]:
        x = batch(rows, length)
        other = program.resized(x)
        reasons.append(fixed(other))
        computes_as_eager(other, own, x)
    if layout == "sp" and body in (told_apart, tried):  # of odd lengths alone another way, which tp does not divide
        assert "S/2 is 9/2" in reasons[0], reasons
    elif said:
        assert any(said in why and cites(why, body) for why in reasons), reasons
    elif layout == "dp":
        assert not any(reasons[:2]), reasons  # one row, or rows that do not divide, may be compiled


def cites(why: str, body: Body) -> bool:
    """Is the line one of the body's?"""
    lines, first = inspect.getsourcelines(body)
    numbers = re.findall(r"test_hostile_sizes\.py:(\d+)", why)
    return any(first <= int(number) < first + len(lines) for number in numbers)


def test_no_formulas_where_numbers_go_another_way() -> None:
    """At the sizes that are compiled, which are even, they would all fit."""
    plan = Plan.of(**LAYOUTS["dp"], symbols={"B": "x.0", "S": "x.1"})
    program = shardc.compile(Net(told_apart).double(), batch(8, 16), plan=plan)
    with pytest.raises(ShardcError, match="takes another way for B=9, S=17"):
        program.symbolic()


def batch(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(97 * rows + length)
    return {"x": torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)}
