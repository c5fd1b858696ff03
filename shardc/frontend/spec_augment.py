"""SpecAugment of Hugging Face's models, drawn in each step: their masks of spans come from numpy, once while compiling.

    mask = _compute_mask_indices((B, T), p, length)      spans of `length` of each row, of random starts
    hidden[torch.tensor(mask)] = self.masked_spec_embed

While a model is traced, the function is one of tensors that draws from the same distribution: as many spans a row, of
different starts, each set of starts equally likely.

    starts   the first places of random numbers in order, of the places at which a span ends within the row
    count    floor(p T / length + e), one e in [0, 1) for all rows
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardc.frontend.model_tree import modules_of

NAME = "_compute_mask_indices"


@contextmanager
def drawn_in_each_step(model: nn.Module) -> Generator[None]:
    """Let the modules of Hugging Face's that a model consists of draw their masks as tensors."""
    changed: dict[int, tuple[dict[str, Any], Any]] = {}
    for kind in {type(module) for module in modules_of(model)}:
        names = vars(sys.modules.get(kind.__module__, sys))
        function = names.get(NAME)
        if function is not None and str(getattr(function, "__module__", "")).startswith("transformers."):
            changed.setdefault(id(names), (names, function))
    try:
        for names, _ in changed.values():
            names[NAME] = mask_spans
        yield
    finally:
        for names, function in changed.values():
            names[NAME] = function


def mask_spans(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
) -> Tensor:
    """Random spans of each row of [B, T], true in a mask; rows are as long as `attention_mask` says."""
    rows, size = shape
    if mask_length < 1:
        raise ValueError("`mask_length` has to be bigger than 0.")
    if mask_length > size:
        raise ValueError(f"`mask_length` has to be smaller than `sequence_length`: {mask_length} and {size}")
    share, most = torch.rand([]).to(torch.float64), _most(size, mask_prob, mask_length, min_masks)
    if most == 0:
        return torch.zeros(rows, size, dtype=torch.bool)

    def spans(of: Tensor) -> Tensor:
        count = (mask_prob * of.to(torch.float64) / mask_length + share).to(torch.int64).clamp(min=min_masks)
        count = torch.where(count * mask_length > size, size // mask_length, count)
        return torch.minimum(count, (of - (mask_length - 1)).clamp(min=0))

    whole = torch.full([rows], size)
    sizes = whole if attention_mask is None else attention_mask.detach().sum(-1).to(torch.int64)
    count, places = spans(sizes)[:, None], torch.arange(size)
    scores = torch.rand(rows, size)
    fits = places < (sizes - (mask_length - 1))[:, None]
    starts = torch.where(fits, scores, -1.0).topk(most, dim=1).indices[:, :, None]
    within = (places >= starts) & (places < starts + mask_length)
    mask = (within & (torch.arange(most) < count)[:, :, None]).any(1)
    # Of a row too short for a span the library masks the last place, which is padding, unless no row has one.
    return mask | ((count == 0) & (spans(whole)[:, None] > 0) & (places == size - 1))


def _most(size: int, probability: float, length: int, least: int) -> int:
    """How many spans a row has at most."""
    count = max(int(probability * size / length + 1), least)
    return max(min(count, size // length, size - (length - 1)), 0)
