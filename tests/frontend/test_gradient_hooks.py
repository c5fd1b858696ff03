"""Hooks on parameters are part of a program where they are functions of tensors, and refused where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from tests.trained import MESH, PLAN, assert_trains_as_eager, batches, made

DATA = batches(4, 6)


class Net(nn.Module):
    def __init__(self, hook: Callable[[Any], object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)
        hook(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square().mean()


def halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 0.5


def clamped(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01)


def tie(m: Any) -> None:
    m.b = nn.Linear(6, 6)
    m.b.weight = m.a.weight
    m.a.weight.register_hook(lambda g: g * 2)


HOOKS: dict[str, Callable[[Any], object]] = {
    "scales": lambda m: m.a.weight.register_hook(lambda g: g * 3),
    "not linear": lambda m: m.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "two in a row": lambda m: (m.a.bias.register_hook(lambda g: g + 1), m.a.bias.register_hook(lambda g: g * 2)),
    "reads parameters": lambda m: m.a.weight.register_hook(lambda g: g + 0.1 * m.a.weight + m.b.weight.sum()),
    "returns nothing": lambda m: m.a.weight.register_hook(lambda g: None),
    "a tied parameter": tie,
    "after accumulation": lambda m: m.a.weight.register_post_accumulate_grad_hook(halved),
    "after it, in place": lambda m: m.b.weight.register_post_accumulate_grad_hook(clamped),
    "without a gradient": lambda m: m.a.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_act_as_in_eager_training(name: str) -> None:
    assert_trains_as_eager(lambda: Net(HOOKS[name]), DATA)


@pytest.mark.parametrize("plan", [{"accumulate": 2}, {"storage": {"zero": 2, "axes": ["dp"]}}])
def test_hooks_act_on_each_microbatch_or_shard(plan: dict[str, Any]) -> None:
    """A gradient that is not yet summed over ranks is, before a hook that is not linear sees it."""
    build = lambda: Net(HOOKS["not linear"])  # noqa: E731
    found, data = {}, DATA[:2]
    model, twin = made(build), made(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = shardc.compile(model, data[0], mesh=MESH, plan=PLAN | plan, optimizer=optimizer).launch()
    eager = torch.optim.SGD(twin.parameters(), lr=0.1)
    for x in data:
        trainer.step(x)
        eager.zero_grad()
        parts = x.chunk(plan.get("accumulate", 1))
        for part in parts:
            (twin(part) / len(parts)).backward()
        eager.step()
    found = trainer.state_dict()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-11, atol=1e-12)


# ------------------------------------------------------------------ refused
def makes_the_step(m: Any) -> None:
    optimizer = torch.optim.SGD([m.a.weight], lr=0.1)
    m.a.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())


def waits_for_all(m: Any) -> None:
    torch.autograd.graph.register_multi_grad_hook([m.a.weight, m.b.weight], lambda grads: None)


def looks_at_values(m: Any) -> None:
    m.a.weight.register_hook(lambda g: g * 0 if g.norm() > 1 else g)


@pytest.mark.parametrize(
    ("hook", "plan", "code"),
    [
        (HOOKS["after accumulation"], {"accumulate": 2}, "SC122"),
        (waits_for_all, {}, "SC122"),
        (makes_the_step, {}, "SC104"),
        (looks_at_values, {}, "SC101"),
    ],
)
def test_what_a_program_cannot_do_is_refused(hook: Callable[[Any], object], plan: dict[str, Any], code: str) -> None:
    with pytest.raises(ShardcError) as failure:
        shardc.compile(made(lambda: Net(hook)), DATA[0], mesh=MESH, plan=PLAN | plan)
    assert [d.code for d in failure.value.diagnostics] == [code]


def test_hooks_that_keep_tensors_are_given_them_back() -> None:
    """What a hook has put aside while it was traced is gone: no fake tensor is left in Python."""
    seen: list[Tensor] = []
    model = made(lambda: Net(lambda m: m.a.weight.register_hook(seen.append)))
    shardc.compile(model, DATA[0], mesh=MESH)
    assert seen == []
