"""One token of each row, drawn from its scores by random numbers that no layout changes.

A row's number is Philox of the counter (row, position) and a key made of the seed: it depends neither on the mesh, nor
on the padding, nor on what the other rows are. It picks the first token whose cumulated probability is larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.random import philox
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.ops.streams import token_key

_LOW = 0xFFFFFFFF


def uniforms(seed: int, rows: Tensor, positions: Tensor) -> Tensor:
    """A float64 in [0, 1) for each row at its position, 53 bits of it random."""
    key = token_key(seed)
    words = [torch.full_like(rows, word) for word in (key & _LOW, (key >> 32) & _LOW)]
    zeros = torch.zeros_like(rows)
    high, low, *_ = philox((rows.clone(), positions.clone(), zeros, zeros.clone()), (words[0], words[1]))
    return ((high >> 5) * 2.0**26 + (low >> 6)).double() * 2.0**-53


def draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row that its number picks from the softmax of its scores."""
    bounds = torch.softmax(scores.double(), -1).cumsum(-1)
    picked = (bounds <= (numbers.to(scores.device) * bounds[:, -1])[:, None]).sum(-1)
    last = (bounds < bounds[:, -1:]).sum(-1)  # the last token that has a probability
    return torch.minimum(picked, last)


def not_a_number(prompt: int, number: int) -> ShardcError:
    """The error where the scores of a prompt's new token choose none."""
    message = f"the scores of new token {number} of prompt {prompt} are NaN, so none can be chosen"
    hint = "look at the weights and at trainer.predict(batch); remove_invalid_values=True reads NaN as 0"
    return error("SC509", message, hint=hint)
