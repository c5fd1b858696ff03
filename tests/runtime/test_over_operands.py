"""Elementwise results on CPUs lie where a dead operand lay: the numbers are the simulation's, bit by bit."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from benchmarks.gpt import GPT
from shardc.ir.arena import planned
from shardc.ir.graph import info, type_of
from shardc.ir.ops.columns import SUBTRACT_AT, write_subtract_at
from shardc.runtime.execute import over_operands
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context

CPU = torch.device("cpu")


class Hostile(nn.Module):
    """Results that may not lie where an operand does, beside those that may."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 8) / 4), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.w
        kept = y.exp()  # backward reads it
        view = (y * 2).t()
        spread = view + self.b[:, None] * 3  # a transposed operand
        part = (x @ self.w)[:, :4].contiguous() * 2  # half of a product
        twice = (y - 1) * (y - 1)
        late = torch.cos(y)
        seen = late.view(-1)
        late = late * 2  # `seen` looks into the operand
        mean: Any = self.mean
        mean.mul_(0.9).add_(x.mean(0))
        returned = torch.sin(x @ self.w.t())
        loss = (kept + spread.t() * twice).square().mean() + part.sum() + (late.sum() * seen).tanh().mean()
        return loss + (returned * 2).mean(), returned, torch.sigmoid(x * 1)


def hostile(**plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Hostile()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    asked = {"fuse": False, **plan}
    return shardc.compile(
        model, torch.randn(8, 8), mesh="dp=1", plan=asked, optimizer=optimizer, loss=lambda out, _: out[0]
    )


def gpt(**plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = GPT(vocab=64, width=32, heads=4, layers=2, seq=8)
    batch = {name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardc.compile(model, batch, mesh="dp=1", plan={"fuse": False, **plan}, optimizer=optimizer)


def written_over(executor: BodyCode) -> dict[str, fx.Node]:
    return {info(call).name: call for call in executor.routine._over}


def executor_of(program: shardc.Program) -> BodyCode:
    body = program.body
    arena = Arena({body: planned(body)}, CPU, overwrites=True)
    return BodyCode(body, rank_context(program.mesh, 0, None), 0, CPU, arena)  # type: ignore[arg-type]


PLANS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"precision": "bf16", "accumulate": 2}, {"recompute": "full"}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("make", [hostile, gpt])
def test_numbers_are_the_simulations(make: Any, plan: dict[str, Any]) -> None:
    program = make(**plan)
    trainer, executor = program.launch(), executor_of(program)
    assert written_over(executor)
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    for _ in range(3):
        feeds = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)
        rates, result = trainer.rates(), trainer.step(program.sample)
        before = [{name: value.clone() for name, value in feed.items()} for feed in feeds]
        found = executor.run(held | rates, feeds)
        assert all(
            feed[name].equal(value) for feed, old in zip(feeds, before, strict=True) for name, value in old.items()
        )
        (loss,) = (value for port, value in found.items() if port.role == "loss")
        assert loss.equal(torch.as_tensor(result.loss))
        held |= {port.name: value for port, value in found.items() if port.role in ("param", "state", "buffer")}
        assert all(value.equal(held[name]) for name, value in trainer.state.items())


def test_a_result_lies_where_its_operand_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cross-entropy's three copies of the logits one is left, and no call allocates for what writes over."""
    program = gpt()
    over = written_over(executor_of(program))
    logits = [call for call in over.values() if type_of(call).shape == (64, 64)]
    assert [info(call).name for call in logits if call.target is SUBTRACT_AT] == ["d._log_softmax_backward_data"]
    assert len(logits) >= 3
    monkeypatch.setattr(over_operands, "WRITERS", {})
    assert not written_over(executor_of(program))


def test_memory_that_others_look_into_stays() -> None:
    over = written_over(executor_of(hostile()))
    assert {call.target for call in over.values()} >= {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}
    forward = [call for name, call in over.items() if not name.startswith(("d.", "opt."))]
    assert not {call.target for call in forward} & {torch.ops.aten.exp.default, torch.ops.aten.cos.default}  # of `y`
    assert not [call for call in forward if type_of(call).shape == (8, 4)]  # of a part of a product


WRITTEN = [op for op in over_operands.WRITERS if op is not SUBTRACT_AT]


@pytest.mark.parametrize("op", WRITTEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_writer_computes_what_its_op_does(op: Any, dtype: torch.dtype) -> None:
    write, name = over_operands.WRITERS[op]
    tensors = [a.name for a in op._schema.arguments if str(a.type) == "Tensor"]
    x = torch.rand(33, 7, dtype=dtype) + 0.1
    args = [x.clone() for _ in tensors]
    numbers = [
        1.7 for a in op._schema.arguments if a.name in ("other", "exponent", "threshold") and a.name not in tensors
    ]
    if op is torch.ops.aten.where.self:
        args[0] = x > 0.5
    for place in range(1 if op is torch.ops.aten.where.self else 0, len(args)):
        operands = [arg.clone() for arg in args]
        expected = op(*args, *numbers)
        made = write(*operands, *numbers, **{name: operands[place]})
        assert made.data_ptr() == operands[place].data_ptr()
        assert made.equal(expected)
        assert made.stride() == expected.stride()


@pytest.mark.parametrize("columns", [1, 5])
def test_subtract_at_changes_its_values_alone(columns: int) -> None:
    values, amount = torch.randn(4, columns), torch.randn(4, 1)
    column = torch.tensor([[0], [columns], [columns - 1], [-1]])
    expected, kept = SUBTRACT_AT(values, column, amount), amount.clone()
    assert write_subtract_at(values, column, amount, out=values) is values
    assert values.equal(expected)
    assert amount.equal(kept)


def test_a_label_of_the_only_class_leaves_the_amount_alone() -> None:
    """With one class an amount has the shape of the values; only these are written over."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 1))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(x @ self.w, labels) + (x @ self.w).square().mean()

    model, batch = One(), {"x": torch.randn(6, 5), "labels": torch.zeros(6, dtype=torch.int64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = shardc.compile(model, batch, mesh="dp=1", plan={"fuse": False}, optimizer=optimizer)
    trainer, executor = program.launch(), executor_of(program)
    held = {name: value.clone() for name, value in trainer.state.items()}
    feeds = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)
    found = executor.run(held | trainer.rates(), feeds)
    trainer.step(batch)
    assert all(found[port].equal(trainer.state[port.name]) for port in found if port.role == "param")
