"""Forwards that convert modules, name devices, ask inside checkpoints, or call torch's control flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc import ShardcError

TOKENS = torch.arange(32).reshape(4, 8) % 16
OTHER = (TOKENS * 5 + 3) % 16


class Odd(nn.Module):
    def __init__(self, way: Callable[[Odd, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(16, 6), nn.Linear(6, 6), nn.Linear(6, 16)
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.way(self, tokens, self.table(tokens))
        return F.cross_entropy(self.head(self.body(h).tanh()).flatten(0, 1), tokens.flatten())


def same_dtype(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    m.body = m.body.to(h.dtype)
    return h


def same_device(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return m.to(tokens.device).table(tokens).to(m.head.weight.device) + h


def tensors(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return h.to(torch.float32).to(h).cpu() + h.to("cpu", torch.float32).double()


def bounded(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    if tokens.max() >= 16:
        raise ValueError("there are 16 words")
    return m.body(h)


def by_list(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return m.body(h) * tokens.ge(0).sum(1).tolist()[0]


def finite(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    h = m.body(h).tanh()
    return h if torch.isfinite(h).all() else h.clamp(-1, 1)


def masked(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    x = h.clone()
    x[tokens > 3] = m.body(h[tokens > 3]).tanh()
    return x


def by_shape(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return torch.cond(tokens.shape[0] > 1, lambda x: x * 2, lambda x: x, (h,))  # type: ignore[no-any-return]


def within(block: Callable[..., Tensor], reentrant: bool, m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return checkpoint(partial(block, m), tokens, h, use_reentrant=reentrant)  # type: ignore[no-any-return]


WAYS = {way.__name__: way for way in (same_dtype, same_device, tensors, by_shape)}
WAYS |= {
    f"{block.__name__} in a checkpoint{', reentrant' if reentrant else ''}": partial(within, block, reentrant)
    for block in (bounded, by_list, finite, masked)
    for reentrant in (False, True)
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_eager_training(way: str) -> None:
    torch.manual_seed(0)
    model = Odd(WAYS[way]).double()
    program = shardc.compile(model, TOKENS, mesh="dp=2", plan={"inputs": {"*": "dp"}})
    assert program.verify().ok
    noted = [d for d in program.diagnostics if d.code == "SC128"]
    assert len(noted) == way.startswith(("bounded", "by_list", "finite")), "once a line"
    trainer = program.launch()
    for batch in (TOKENS, OTHER):
        result = trainer.step(batch)
        model.zero_grad()
        model(batch).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(result.grads[name], parameter.grad, rtol=0, atol=1e-12)


def test_a_gpu_that_forward_names_is_the_programs_device() -> None:
    def named(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
        return h.to("cuda:0") + torch.ones(6, device="cuda").double() + m.body(h.cuda())

    def plain(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
        return h + 1 + m.body(h)

    losses: list[Any] = []
    for way in (named, plain):
        torch.manual_seed(0)
        trainer = shardc.compile(Odd(way).double(), TOKENS, mesh="dp=2").launch()
        losses.append(trainer.step(TOKENS).loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-14)


def narrows(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return m.body.to(torch.float64)(h.to(torch.float64)).to(torch.float32)


def chooses(m: Odd, tokens: Tensor, h: Tensor) -> Tensor:
    return torch.cond(tokens.sum() > 3, lambda x: x * 2, lambda x: x, (h,))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "code", "text", "hint"),
    [
        (narrows, "SC104", "m.body.to(torch.float64)", "convert the module before it is compiled"),
        (chooses, "SC101", "torch.cond", "torch.where"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    way: Callable[[Odd, Tensor, Tensor], Tensor], code: str, text: str, hint: str
) -> None:
    with pytest.raises(ShardcError) as caught:
        shardc.compile(Odd(way), TOKENS, mesh="dp=2")
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert text in (found.source_text or "")
    assert hint in (found.hint or "")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Embedding]) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = kind(16, 6, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.words(tokens).square().mean()

    with pytest.raises(ShardcError) as caught:
        shardc.compile(Sparse(), TOKENS, mesh="dp=2")
    (found,) = caught.value.diagnostics
    assert found.code == "SC112"
    assert "self.words(tokens)" in (found.source_text or "")
    assert "sparse=True" in (found.hint or "")
