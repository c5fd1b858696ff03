"""In-place ops on what nothing else sees are made functional where they stand; all others take another trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.frontend import trace as tracing


class InPlace(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.lin = form, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.form)(self.lin(x))

    def divided(self, y: Tensor) -> Tensor:
        top = torch.topk(y.softmax(-1), 3, -1).values
        before = top * 2
        top /= top.sum(-1, keepdim=True)
        return top + before

    def twice(self, y: Tensor) -> Tensor:
        z = y.exp()
        w = z * 3
        w.mul_(2).add_(z)
        return w * z

    def permutation(self, y: Tensor) -> Tensor:
        order = torch.argsort(y.detach().sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(6)
        return y[:, order].tanh()[:, back]

    def filled(self, y: Tensor) -> Tensor:
        z = y.exp()
        z = z + 1
        z.clamp_(max=1.5)
        return z * y

    # -------------------------------------------------------------- traced again
    def seen_by_a_view(self, y: Tensor) -> Tensor:
        z = y * 2
        first = z[:, :3]
        z.add_(1)
        return first.sum() + z

    def through_a_view(self, y: Tensor) -> Tensor:
        z = y * 2
        z[:, 1] = y[:, 2]
        return z * y

    def of_another_dtype(self, y: Tensor) -> Tensor:
        z = torch.zeros(4, 6, dtype=torch.bfloat16)
        z.add_(y.detach())
        return z.to(y.dtype) * y


LOCAL = ("divided", "twice", "permutation", "filled")
TRACED_AGAIN = ("seen_by_a_view", "through_a_view", "of_another_dtype")


@pytest.mark.parametrize("form", [*LOCAL, *TRACED_AGAIN])
def test_in_place(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []
    retrace = tracing._without_mutation  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(tracing, "_without_mutation", lambda *args: again.append(1) or retrace(*args))
    torch.manual_seed(0)
    model, batch = InPlace(form), torch.randn(4, 6)
    program = shardc.compile(
        model, batch, mesh="dp=2", plan={"inputs": {"*": "dp, -"}}, loss=lambda y, _: y.square().mean()
    )
    assert len(again) == (form in TRACED_AGAIN)
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < (1e-2 if form == "of_another_dtype" else 1e-12)  # bfloat16 rounds
