"""What forward asks of buffers is answered by the model's, if no step changes them; which columns a mask chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError

Asked = Callable[["Asks", Tensor, Tensor], Tensor]
BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
BATCH["k"] = torch.arange(6).expand(4, 6).contiguous()
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {"inputs": {"x": "dp"}}),
    "tp2": ("tp=2", {"params": {"a.weight": "tp, -"}}),
    "zero3 fuse": ("dp=2", {"inputs": {"x": "dp"}, "storage": {"zero": 3, "axes": ["dp"]}, "fuse": True}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 2, "stages": 2}}),
}


class Asks(nn.Module):
    rate: Tensor
    count: Tensor
    on: Tensor

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.asked = nn.Linear(6, 6), nn.Linear(6, 6), asked
        self.register_buffer("rate", torch.tensor(0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("on", torch.tensor([True, False, True, True, False, True]))
        self.double()

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.asked(self, self.b(self.a(x).tanh()), k).square().mean()


def joined_and_split(m: Asks, h: Tensor, k: Tensor) -> Tensor:
    """A mask that was packed with what depends on weights, as a cache of keys holds it."""
    packed = torch.cat([h, (k > 2).to(h.dtype)], -1)
    states, valid = packed.split([6, 6], -1)
    return states[:, valid.bool().any(0)]


ANSWERED: dict[str, Asked] = {
    "if": lambda m, h, k: h * 2 if m.rate < 1 else h,
    "if of one": lambda m, h, k: h * 2 if m.rate * torch.ones(3).sum() < 1 else h,
    "item": lambda m, h, k: h * m.rate.item(),
    "list": lambda m, h, k: h[:, [i for i, on in enumerate(m.on.tolist()) if on]],
    "columns by a buffer": lambda m, h, k: h[:, m.on],
    "columns by the batch": lambda m, h, k: h[:, k[0] > 2],
    "columns of a middle dim": lambda m, h, k: h.view(-1, 2, 3)[:, m.on[:2], :],
    "no columns": lambda m, h, k: h + h[:, k[0] > 9].sum(),
    "packed": joined_and_split,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ANSWERED)
def test_is_answered(name: str, plan: str) -> None:
    model = Asks(ANSWERED[name])
    mesh, options = PLANS[plan]
    program = shardc.compile(model, BATCH, mesh=mesh, plan=options)
    report = program.verify()
    assert report.ok, report
    assert report.eager_error is not None
    assert report.eager_error < 1e-12
    other = BATCH | {"x": BATCH["x"] * 2}
    assert torch.allclose(program.launch().step(other).loss, model(**other), rtol=1e-12)


def test_another_answer_of_the_batch_is_refused() -> None:
    program = shardc.compile(Asks(ANSWERED["columns by the batch"]), BATCH, mesh="dp=2")
    assert "SC128" in [d.code for d in program.diagnostics]
    trainer = program.launch()
    with pytest.raises(ShardcError, match="SC512"):
        trainer.step(BATCH | {"k": BATCH["k"] + 1})
    assert torch.isfinite(trainer.step(BATCH).loss)


def test_another_answer_of_a_buffer_is_refused() -> None:
    """Which the user changed after compiling."""
    model = Asks(ANSWERED["if"])
    program = shardc.compile(model, BATCH, mesh="dp=2", plan=PLANS["dp2"][1])
    model.rate.fill_(2.0)
    with pytest.raises(ShardcError, match="SC512"):
        program.launch().step(BATCH)


def counted_first(m: Asks, h: Tensor, k: Tensor) -> Tensor:
    m.count += 1
    return h if m.count < 3 else h * 2


def counted_later(m: Asks, h: Tensor, k: Tensor) -> Tensor:
    h = h if m.count < 3 else h * 2
    m.count += 1
    return h


def replaced(m: Asks, h: Tensor, k: Tensor) -> Tensor:
    h = h if m.count < 3 else h * 2
    m.count = m.count + 1
    return h


def counted_by_a_view(m: Asks, h: Tensor, k: Tensor) -> Tensor:
    h = h if m.count < 3 else h * 2
    m.count.view(1).add_(1)
    return h


@pytest.mark.parametrize("asked", [counted_first, counted_later, replaced, counted_by_a_view])
def test_a_buffer_that_steps_change_is_refused(asked: Asked) -> None:
    with pytest.raises(ShardcError, match="SC101") as refused:
        shardc.compile(Asks(asked), BATCH, mesh="dp=2", plan=PLANS["dp2"][1])
    assert "buffer 'count', which it changes in each step" in str(refused.value)


@pytest.mark.parametrize("asked", [lambda m, h, k: h[:, h[0] > 0], lambda m, h, k: h[:, m.a.bias > 0]])
def test_a_mask_of_what_steps_compute_is_refused(asked: Asked) -> None:
    with pytest.raises(ShardcError, match="SC101"):
        shardc.compile(Asks(asked), BATCH, mesh="dp=2", plan=PLANS["dp2"][1])


def test_an_empty_tensor_joins_any_other() -> None:
    """As a cache of keys is before its first update."""
    program = shardc.compile(Asks(lambda m, h, k: torch.cat([torch.tensor([]), h], -1)), BATCH, mesh="dp=2")
    assert program.verify().ok


def test_distributions_do_not_ask() -> None:
    """Whether their arguments are valid is only a check; the default is as it was afterwards."""
    before = torch.distributions.Distribution._validate_args

    def asked(m: Asks, h: Tensor, k: Tensor) -> Tensor:
        kl = torch.distributions.kl_divergence(torch.distributions.Normal(h, h.exp()), torch.distributions.Normal(0, 1))
        return kl + torch.distributions.Categorical(logits=h).entropy()[:, None]

    report = shardc.compile(Asks(asked), BATCH, mesh="dp=2", plan=PLANS["dp2"][1]).verify()
    assert report.ok, report
    assert torch.distributions.Distribution._validate_args is before
