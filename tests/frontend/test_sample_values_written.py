"""Questions about tensors that forward writes to, and answers that are tensors: as eager PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError

TOKENS = torch.arange(32).reshape(4, 8) % 16
FEWER = TOKENS.clamp(max=9)


class Asks(nn.Module):
    def __init__(self, asked: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.last, self.asked = nn.Embedding(16, 6), nn.Linear(6, 6), asked

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.asked(tokens, self.table(tokens)).tanh()).square().mean()


def asked_on_two_paths(tokens: Tensor, h: Tensor) -> Tensor:
    t = torch.zeros(2, dtype=torch.long)
    t[0] = tokens.max()
    return h * int(t.sum() + t.max())


def written_in_a_part(tokens: Tensor, h: Tensor) -> Tensor:
    t = torch.zeros(4, dtype=torch.long)
    first, _ = t.split(2)
    first += tokens.max()
    return h * int(t.sum())


def written_between(tokens: Tensor, h: Tensor) -> Tensor:
    t = tokens.ge(0).long()
    before = t.tolist()[0][0]
    t.view(-1)[:1].add_(tokens.max())
    return h * (t.tolist()[0][0] - before)


DEPEND = (asked_on_two_paths, written_in_a_part, written_between)


def copied_by_mask(tokens: Tensor, h: Tensor) -> Tensor:
    chosen = h[tokens >= 0]
    chosen *= 2
    return chosen.reshape(h.shape) + h


def part_of_columns(tokens: Tensor, h: Tensor) -> Tensor:
    columns = tokens.clone()
    columns.unbind(1)[0].add_(100)
    return h * int(columns.max() >= 100)


def small_integers(tokens: Tensor, h: Tensor) -> Tensor:
    number = tokens.min().to(torch.uint8) + 200
    return h * (torch.tensor([number, number]) + 100)[0]


def long_integers(tokens: Tensor, h: Tensor) -> Tensor:
    number = tokens.min().to(torch.uint8) + 200
    return h * (torch.tensor([number, number], dtype=torch.long) + 100)[0]


def not_finite_by_a_write(tokens: Tensor, h: Tensor) -> Tensor:
    finite = torch.isfinite(h)
    finite[0] = False
    return h if finite.all() else h * 2


def test_a_truth_value_that_is_written_to_is_refused() -> None:
    with pytest.raises(ShardcError) as caught:
        shardc.compile(Asks(not_finite_by_a_write), TOKENS, mesh="dp=2")
    assert caught.value.code == "SC101"


def by_a_mask_that_is_broadcast(tokens: Tensor, h: Tensor) -> Tensor:
    square = h[:, :4].sum(2)
    return h * torch.masked_select(square, tokens[0, :4] >= 0).shape[0] + square.masked_select(tokens[0, :4] > 1).sum()


COPIES = (copied_by_mask, part_of_columns, small_integers, long_integers, by_a_mask_that_is_broadcast)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked", [*DEPEND, *COPIES])
def test_a_step_is_that_of_eager_training(asked: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Asks(asked).double()
    program = shardc.compile(model, TOKENS, mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert program.verify().ok
    result = program.launch().step(TOKENS)
    model(TOKENS).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(result.grads[name], parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("asked", DEPEND)
def test_what_was_written_is_checked_in_every_step(asked: Callable[[Tensor, Tensor], Tensor]) -> None:
    trainer = shardc.compile(Asks(asked), TOKENS, mesh="dp=2", plan={"inputs": {"*": "dp"}}).launch()
    trainer.step(TOKENS)
    with pytest.raises(ShardcError) as caught:
        trainer.step(FEWER)
    assert caught.value.code == "SC512"


def test_a_drawn_number_that_a_view_changes_is_refused() -> None:
    def changed(tokens: Tensor, h: Tensor) -> Tensor:
        number = torch.rand([])
        number.view(1).sub_(1)
        return h if number < 0.0 else h * 3

    with pytest.raises(ShardcError) as caught:
        shardc.compile(Asks(changed), TOKENS, mesh="dp=2")
    assert caught.value.code == "SC101"
