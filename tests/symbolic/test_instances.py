"""One program for batches of many sizes: what it becomes is what compiling gives; what a line fixes is reported."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Plan, Program, ShardcError
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


class Numbers(Net):
    """Its code takes whole numbers alone, so what it asks of sizes is not known."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x.shape[1]) is not int:
            raise TypeError("a whole number")
        return self.mixed(x).square().mean()


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
        pytest.param(Loop, 8, 6, "Eq(S, 8)", "# a loop", marks=pytest.mark.long),
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


class Even(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x).square().sum() / (x.shape[1] // 2 * 2)  # a quotient


class Padded(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 0, 0, x.shape[1] % 4))  # a pad
        return self.mixed(x).square().mean()


class Bits(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x).square().mean() * (1 + (x.shape[1] & 3))  # bits


class Rare(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x).square().mean() * (1 + x.shape[1] // 300)  # a threshold


class Rounded(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x).square().mean() * (math.floor(x.shape[0] / 4) * 4)  # rounded


class Larger(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x).square().mean() * torch.sym_max(x.shape[1], 300)  # the larger


class Half(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x)[:, : x.shape[1] // 2].square().mean()  # a half


class Table(Net):
    """Positions by rows of a table, and a loss that a float divides."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.mixed(x + self.rows(torch.arange(length)))
        return h.square().sum() / (x.shape[0] * length) + h.mean(1).square().sum()


def check_as_eager(program: Program, own: nn.Module, x: dict[str, Tensor]) -> None:
    own.zero_grad()
    loss = own(**x)
    loss.backward()
    step = program.simulate(x)
    close(step.loss, loss.detach())
    for name, parameter in own.named_parameters():
        if parameter.grad is not None:
            close(step.grads[name], parameter.grad)


def close(ours: Tensor, eager: Tensor) -> None:
    torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)


OTHER = [(6, 10), (4, 9), (8, 8), (1, 6), (5, 7)]  # equal to each other and to the width; odd; uneven; one


@pytest.mark.parametrize(
    ("model", "other", "guard"),
    [
        (Even, (4, 9), "Eq(Mod(S, 2), 0)"),
        pytest.param(Padded, (4, 10), "Eq(Mod(S, 4), 0)", marks=pytest.mark.long),
        (Bits, (4, 10), "Eq(S, 16)"),
        (Rare, (2, 303), "Eq(Mod(S, 300), 16)"),
        (Rounded, (6, 16), "Eq(B, 8)"),
        pytest.param(Larger, (2, 303), "Eq(Max(300, S), 300)", marks=pytest.mark.long),
        pytest.param(Half, (4, 9), "Eq(Mod(S, 2), 0)", marks=pytest.mark.long),
    ],
)
def test_sizes_by_quotients_and_remainders(model: type[nn.Module], other: tuple[int, int], guard: str) -> None:
    """All sampled sizes may leave the same remainder: the numbers alone do not tell that others differ."""
    own = model().double()
    program = shardc.compile(own, wide(8, 16), plan=PLAN)
    assert guard in fixed(program.resized(wide(*other)))
    check_as_eager(program, own, wide(*other))


def wide(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": batch(rows, length)["x"].double()}


@pytest.mark.parametrize("model", [Half, *(pytest.param(m, marks=pytest.mark.long) for m in (Net, Table))])
@pytest.mark.parametrize("sample", [(8, 16), pytest.param((8, 8), marks=pytest.mark.long)])
def test_loss_and_gradients_are_of_eager(model: type[nn.Module], sample: tuple[int, int]) -> None:
    own = model().double()
    program = shardc.compile(own, wide(*sample), plan=PLAN)
    for size in OTHER:
        check_as_eager(program, own, wide(*size))


@pytest.mark.parametrize(("symbols", "said"), [
    ({"B": "y.0"}, "the batch has no input 'y'"),
    ({"B": "x.3"}, "x has 3 dims, and no dim 3"),
    ({"dp": "x.0"}, "'dp' is an axis of the mesh"),
    ({"B": ["x.0", "x.1"]}, "dims of one extent differ: x.0 of 8, x.1 of 16"),
    ({"B": "x.0", "T": "x.0"}, "x.0 is 'B' already, and 'T' too"),
    ({"L": "x.0"}, "'L' is the number of equal layers"),
    ({"B": "x"}, "'x' is no dim of an input"),
    ({"B-1": "x.0"}, "'B-1' is no name of an extent"),
    ({"B": []}, "'B' has no dim"),
])  # fmt: skip
def test_wrong_symbols(symbols: dict[str, str | list[str]], said: str) -> None:
    def resized() -> Program:
        plan = Plan.of(mesh="dp=2", inputs={"x": "dp"}, symbols=symbols)
        return shardc.compile(Net(), batch(8, 16), plan=plan).resized(batch(4, 16))

    with pytest.raises(ShardcError, match=re.escape(said)) as caught:
        resized()
    assert caught.value.diagnostics[0].code == "SC208"


EIGHT = [(4, 24), (16, 6), (6, 34), (32, 32), (8, 64), (2, 16), (10, 10), (4, 4)]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", EIGHT[-1:]),
        *(pytest.param(f, EIGHT, marks=pytest.mark.long) for f in ("gpt2", "gpt2_sp", "llama", "llama_sp", "mixtral")),
    ],
)
def test_sizes_of_a_language_model(family: str, sizes: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    build, plan = FAMILIES[family]
    model = build(2)

    def tokens(rows: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(rows + length))
        return {"input_ids": ids, "labels": ids}

    plan = plan.merge(Plan.of(mesh="dp=2, tp=2", symbols=TOKENS))
    program = shardc.compile(model, tokens(8, 16), plan=plan)
    for rows, length in sizes:
        other, own = program.resized(tokens(rows, length)), shardc.compile(model, tokens(rows, length), plan=plan)
        assert not fixed(other)
        assert same(other, own), (rows, length)
    assert program.verify(tokens(6, 10)).ok


def test_what_is_not_known_of_sizes_is_not_assumed() -> None:
    model = Numbers().double()
    program = shardc.compile(model, {"x": torch.randn(4, 6, WIDTH, dtype=torch.float64)}, plan=PLAN)
    with pytest.raises(ShardcError, match="TypeError: a whole number"):
        program.symbolic()
    assert program.verify({"x": torch.randn(4, 7, WIDTH, dtype=torch.float64)}).ok


class Evaluates(Net):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.shape[1] > 10:  # in evaluation
            x = x * 2
        return self.mixed(x).square().mean()


def test_an_evaluation_asks_as_it_evaluates() -> None:
    program = shardc.compile(Evaluates(), batch(8, 16), plan=PLAN, mode="eval")
    assert "# in evaluation" in fixed(program.resized(batch(8, 10)))


class Rows(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:  # rows
            x = x * 2
        return self.mixed(x).square().mean()


def test_forward_asks_of_a_microbatch() -> None:
    own = Rows().double()
    program = shardc.compile(own, wide(16, 16), plan=PLAN.merge(Plan.of(accumulate=4)))
    assert not fixed(program.resized(wide(24, 10)))
    assert "B > 2 (B of a microbatch), and B=2" in fixed(program.resized(wide(8, 10)))
    assert program.verify(wide(8, 10)).ok
