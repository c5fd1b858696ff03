"""Activation checkpointing, in all its forms: what is recomputed is computed from what it was computed from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.hostile.harness import Net, case


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6)

    def inner(self, h: Tensor) -> Tensor:
        return self.c(h.tanh()).sin()


@case()
class NonReentrant(Deep):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False)


@case()
class Reentrant(Deep):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=True)


@case()
class Sequence(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sigmoid())

    def between(self, h: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 2, h, use_reentrant=False)


@case()
class Nested(Deep):
    def between(self, h: Tensor) -> Tensor:
        def outer(h: Tensor) -> Tensor:
            return checkpoint(self.inner, h * 2, use_reentrant=False) + h

        return checkpoint(outer, h, use_reentrant=False)


@case()
class ClosureOverAWeight(Net):
    def between(self, h: Tensor) -> Tensor:
        weight = self.b.weight * 2
        return checkpoint(lambda h: (h @ weight).tanh(), h, use_reentrant=False)


@case()
class KeywordsAndTuples(Deep):
    def between(self, h: Tensor) -> Tensor:
        def pair(h: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
            out = self.inner(h)
            return out * scale, out.cos()

        left, right = checkpoint(pair, h, scale=0.5, use_reentrant=False)
        return left * right


@case()
class InPlaceInside(Deep):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: self.inner(h).mul_(2).add_(1), h, use_reentrant=False)


@case()
class WithoutReproducedNumbers(Deep):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False, preserve_rng_state=False)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@case()
class Selective(Deep):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(
            self.inner, h, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(_policy)
        )


@case()
class PenaltyThroughACheckpoint(Deep):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = self.b(checkpoint(self.inner, self.a(x), use_reentrant=False))
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().mean()


@case()
class TiedWeightInside(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False)


@case()
class FrozenInside(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.c.requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False)


@case(random=True)
class DropoutInside(Deep):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: nn.functional.dropout(self.inner(h), 0.5), h, use_reentrant=False)
