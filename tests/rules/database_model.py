"""The model of one call. It is a module of its own, so that little is reachable from it: a compile looks through all
that a model's functions can reach, and from the database's functions that is most of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, arange, float64, nn
from torch.utils._pytree import tree_leaves, tree_unflatten


class Called(nn.Module):
    """A weighted sum of what one call returns; tensors among the arguments are `x0`, `x1`, ... by their position."""

    first: nn.Parameter | None

    def __init__(self, op: Callable[..., Any], leaves: Sequence[Any], spec: Any, first: int) -> None:
        super().__init__()
        self.kept = [op, tree_unflatten, spec, tree_leaves].__getitem__  # out of a compile's sight
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.position = first
        self.first = None

    def forward(self, unit: Tensor, **tensors: Tensor) -> Tensor:
        leaves = [tensors.get(f"x{i}", leaf) for i, leaf in enumerate(self.leaves)]
        if self.first is not None:
            leaves[self.position] = self.first * unit  # a reader that can be split: the call itself may need it whole
        args, kwargs = self.kept(1)(leaves, self.kept(2))
        results = [t for t in self.kept(3)(self.kept(0)(*args, **kwargs)) if isinstance(t, Tensor)]
        return sum((weighted(t) for t in results), start=unit)  # type: ignore[return-value]


def weighted(t: Tensor) -> Tensor:
    """Of complex numbers both parts; what is not finite counts as a number."""
    if t.is_complex():
        return weighted(t.real) + 0.7 * weighted(t.imag)
    weights = arange(1, t.numel() + 1, dtype=float64).mul(0.37).cos().view(t.shape)
    return (t.to(weights.dtype).nan_to_num(0.3, 0.7, -0.9) * weights).sum()
