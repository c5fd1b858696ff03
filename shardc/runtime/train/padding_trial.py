"""Tries whether a step on a padded batch is what it is on the batch itself; `padding` says why, and in which two ways.

What is tried changes nothing: the programs of a trial return gradients, and have no optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.ir.diagnostic import ShardcError, error, listed
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.runtime.execute.batch import Inputs
from shardc.runtime.train.padding import Padding, Shapes, rebuilt

HINT = "give the batch a mask that hides what is added, as attention_mask does; or leave pad out: a program a shape"
OF_ROUTERS = (
    "give the batch a mask that hides what is added, as in pad: attention_mask, and as many rows as before, by a "
    "loader's drop_last: a router's loss counts rows that are added; or leave pad out: a program a shape"
)
LOSS, GRADIENT, BUFFER, SCALAR = "the loss", "the gradient of ", "buffer ", "the output "
ELSEWHERE = "a gradient on another rank"
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """What a trial is made with. `results` are the loss, gradients, buffers and scalar outputs of a step on a batch, by
    what they are called, on this rank; `evaluated` are the loss and scalars of an evaluation; `any_rank` is true where
    one rank's flag is."""

    padding: Padding
    body: Graph
    results: Callable[[Any], Results]
    evaluated: Callable[[Any], Results]
    any_rank: Callable[[bool], bool]

    def check(self, batch: Any, tensors: Inputs, padded: Inputs, into: Shapes) -> list[str]:
        """Raise ShardcError (SC548) on all ranks where what is added to a batch is seen, which has tokens that count.

        Returns the names of what cannot be told by this batch: what is not finite, and scalars that are 0, as the
        accuracy of a first step is.
        """
        given = self.results(rebuilt(batch, padded))
        varied = self.results(rebuilt(batch, self.padding.varied(tensors, padded)))
        what = "with other values in the place of what is added, {} would change"
        # A GPU's sums may have any order; and other tokens, of other experts, give those of an expert another.
        exact = all(value.device.type == "cpu" for value in given.values()) and not groups_rows(self.body)
        self._refuse(_differing(given, varied) if exact else _far(given, varied, tolerance(self.body)), what)
        half = self.padding.half(tensors, into)
        try:
            half = half if self.counts(half) else tensors
            alone = self._of(rebuilt(batch, half))
        except ShardcError:  # a model may not take such a length
            half = tensors
            alone = self._of(batch)
        beside = self._of(rebuilt(batch, self.padding.pad(half, into)))
        what = "of a part of the batch, {} would be another than without padding"
        self._refuse(_far(alone, beside, tolerance(self.body)), what)
        untold = [n for n, value in {**given, **alone}.items() if not bool(value.isfinite().all())]
        untold += [n for n, value in alone.items() if n.startswith(SCALAR) and not bool(value)]
        return (untold or [ELSEWHERE]) if self.any_rank(bool(untold)) else []

    def counts(self, tensors: Inputs) -> bool:
        """Whether a token of a batch counts, on any rank; all must call it."""
        tokens = self.padding.tokens
        return self.any_rank(bool((tensors[tokens.input][..., tokens.shift :] != tokens.ignore).any()))

    def _of(self, batch: Any) -> Results:
        """What is compared of a batch, with and without padding. Buffers may be of all rows, where those are added."""
        if not draws(self.body):
            return {name: value for name, value in self.results(batch).items() if not name.startswith(BUFFER)}
        returned = {f"{SCALAR}{port.name}" for port in self.body.outputs if port.role == "output"}
        return {name: value for name, value in self.evaluated(batch).items() if name == LOSS or name in returned}

    def _refuse(self, names: list[str], what: str) -> None:
        if self.any_rank(bool(names)):
            which = listed(names) if names else ELSEWHERE
            message = f"padding would not leave a step what it is: {what.format(which)}"
            raise error("SC548", message, hint=OF_ROUTERS if groups_rows(self.body) else HINT)


def groups_rows(body: Graph) -> bool:
    """Whether a step groups rows by expert."""
    return any(node.target is GROUP_ROWS for node in body.calls())


def draws(body: Graph) -> bool:
    """Whether a step draws random numbers."""
    pairs = zip(body.inputs, body.placeholders, strict=True)
    return any(port.role == "seed" and len(node.users) > 0 for port, node in pairs)


def tolerance(body: Graph) -> float:
    """How far rounding may move loss and gradients, relative to the largest of them."""
    gradients = (type_of(node).dtype for node in body.values() if info(node).phase == "bwd")
    dtypes = {dtype for dtype in gradients if dtype.is_floating_point}  # forward may draw in others
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return min(max(1000 * coarsest, 1e-10), 1e-2)


def _differing(a: Results, b: Results) -> list[str]:
    return [n for n, x in a.items() if not bool(((x == b[n]) | ((x != x) & (b[n] != b[n]))).all())]


def _far(alone: Mapping[str, Tensor], beside: Mapping[str, Tensor], close: float) -> list[str]:
    """The names of what lies apart: gradients by the size of the largest, all else by its own."""
    sizes = {name: float(value.abs().max()) for name, value in alone.items() if value.numel()}
    largest = max((size for name, size in sizes.items() if name.startswith(GRADIENT)), default=0.0)
    sizes |= {name: largest for name in sizes if name.startswith(GRADIENT)}
    gaps = {name: float((alone[name] - beside[name]).abs().max()) for name in sizes}
    return [name for name, size in sizes.items() if math.isfinite(size) and not gaps[name] <= close * size]
