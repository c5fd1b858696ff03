"""Masks that transformers leaves out for a batch without padding: asked of the sample batch where it matters.

    create_causal_mask(attention_mask=ones)      traced: a mask; eager: None, and attention is causal by itself
    the same, for attention that is not causal   traced: a mask; eager: None, and each token attends to all

Of the first line, both compute the same. A decoder whose attention is not causal by itself (PaliGemma's, which attends
to a prefix in both directions) computes otherwise for batches without padding than for those with some. There the
library is told what the mask holds, as in eager PyTorch: the answer is part of the program, and each step checks it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

_SKIP, _TRACED = "_ignore_causal_mask_sdpa", "is_tracing"


@contextmanager
def masks_as_eager(model: nn.Module) -> Generator[None]:
    """Nothing where transformers is not loaded, or has other names for this."""
    library: Any = sys.modules.get("transformers.masking_utils")
    skips: Any = getattr(library, _SKIP, None)
    traced: Any = getattr(library, _TRACED, None)
    modules = {id(module) for module in model.modules()}

    def skips_as_eager(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        asking = _asking(sys._getframe(1), modules)  # pyright: ignore[reportPrivateUsage]
        if padding_mask is None or asking is None or not _attends_both_ways(asking):
            return skips(padding_mask, *args, **kwargs)
        setattr(library, _TRACED, lambda *_: False)  # pyright: ignore[reportUnknownLambdaType]
        try:
            return skips(padding_mask, *args, **kwargs)
        finally:
            setattr(library, _TRACED, traced)

    if skips is None or traced is None:
        yield
        return
    setattr(library, _SKIP, skips_as_eager)
    try:
        yield
    finally:
        setattr(library, _SKIP, skips)


def _asking(frame: FrameType | None, modules: set[int]) -> nn.Module | None:
    """The innermost module of the model whose method is running."""
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module) and id(holder) in modules:
            return holder
        frame = frame.f_back
    return None


def _attends_both_ways(module: nn.Module) -> bool:
    """Has a module attention inside, and none that is causal by itself?"""
    flags = [flag for inner in module.modules() if isinstance(flag := getattr(inner, "is_causal", None), bool)]
    return bool(flags) and not any(flags)
