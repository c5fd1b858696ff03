"""`pad: true`: a smaller batch is padded to a shape that a program was compiled for.

    labels          what is added is ignored: the loss is the mean over the other tokens, and stays what it was
    attention_mask  0 in added columns; other inputs repeat their last row and their last column
    tokens [3, 5] for [4, 6]      a b c d e e        labels       v w x y z -
                                  f g h i j j                     u v w x y -
                                  k l m n o o                     t u v w x -
                                  k l m n o o                     - - - - - -

That a model's loss does not see what is added is its own affair: a causal model's real tokens do not, nor do others'
whose mask hides added columns; the statistics of a batch norm, a router that balances its experts, or a mean over
positions do. So it is tried before a program's first padded step (`padding_trial`), in two ways:

    other tokens in the place of what is added       loss, gradients and buffers must be bitwise the same; close, where
                                                     rows are grouped by expert: an expert's sums have another order
    half of the batch, padded and as it is           loss and gradients must be close: of a loss that is divided by the
                                                     size of its batch, and not by its tokens, they are not

Masks of dropout go by an element's place in the batch: with other lengths they are others. Of a model that draws random
numbers the second trial therefore compares evaluated losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shardc.ir.graph import Tokens
from shardc.ir.trees import flatten
from shardc.runtime.execute.batch import Inputs
from shardc.torch_compat import unflatten

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Padding:
    """How batches are padded: labels with what their loss ignores, the mask with zeros."""

    tokens: Tokens
    mask: str | None = None

    def fits(self, shapes: Shapes, into: Shapes) -> bool:
        """Whether a batch of these shapes may be padded to the others. A dim of 1 that is no row may be broadcast."""
        return all(
            len(shape) == len(into[name])
            and all(
                n == m or (n < m and (n > 1 or not d)) for d, (n, m) in enumerate(zip(shape, into[name], strict=True))
            )
            for name, shape in shapes.items()
        )

    def pad(self, tensors: Mapping[str, Tensor], into: Shapes) -> Inputs:
        """The tensors with what is added, in the shapes `into`."""
        return Inputs({name: self._padded(name, t, into.get(name, tuple(t.shape))) for name, t in tensors.items()})

    def varied(self, tensors: Mapping[str, Tensor], padded: Mapping[str, Tensor]) -> Inputs:
        """What was added changed, where neither labels nor a mask say that it is to be ignored."""
        return Inputs({name: self._varied(name, tensors[name], t) for name, t in padded.items()})

    def half(self, tensors: Mapping[str, Tensor], into: Shapes) -> Inputs:
        """The first half of each dim that is padded."""
        return Inputs(
            {
                name: t[tuple(slice(n if n == m else (n + 1) // 2) for n, m in zip(t.shape, into[name], strict=True))]
                for name, t in tensors.items()
            }
        )

    def _padded(self, name: str, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        for dim, size in enumerate(shape):
            more = size - t.shape[dim]
            if not more:
                continue
            last = t.narrow(dim, t.shape[dim] - 1, 1)
            if name == self.tokens.input:
                last = torch.full_like(last, self.tokens.ignore)
            elif name == self.mask and dim:
                last = torch.zeros_like(last)
            t = torch.cat([t, last.expand(*t.shape[:dim], more, *t.shape[dim + 1 :])], dim)
        return t

    def _varied(self, name: str, t: Tensor, padded: Tensor) -> Tensor:
        if name in (self.tokens.input, self.mask) or t.shape == padded.shape:
            return padded
        added = torch.ones_like(padded, dtype=torch.bool)
        added[tuple(map(slice, t.shape))] = False
        if t.dtype == torch.bool:
            return padded ^ added
        if t.is_floating_point() or t.is_complex():
            return torch.where(added, padded.flip(0) * 0.5 + 0.25, padded)
        low, high = t.min(), t.max()  # which the model's tables have
        low = torch.where(low == high, torch.where(high > 0, high - 1, high + 1), low)
        return torch.where(added, torch.where(padded == low, high, low), padded)


def rebuilt(batch: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A batch as its user shaped it, with other tensors in the order of its own."""
    leaves, structure = flatten(dict(cast("Mapping[str, Any]", batch)) if isinstance(batch, Mapping) else batch)
    remaining = iter(tensors.values())
    return unflatten([next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
