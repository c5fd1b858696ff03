"""Masks that transformers leaves out for a batch without padding: asked of the sample batch where it matters.

    create_causal_mask(attention_mask=ones)      traced: a mask; eager: None, and attention is causal by itself
    the same, for attention that is not causal   traced: a mask; eager: None, and each token attends to all

Of the first line, both compute the same. A decoder whose attention is not causal by itself (PaliGemma's, which attends
to a prefix in both directions) computes otherwise for batches without padding than for those with some. There the
library is told what the mask holds, as in eager PyTorch: the answer is part of the program, and each step checks it.

Positions that restart are of several sequences packed in a row, which do not see each other:

    position_ids counted by the model     traced: no values, so maybe packed; eager: not packed, and no mask
    position_ids that are given           whatever they hold, a mask of sequences

Of the first line the library is told so. Within a sequence positions count up by one, so that which of two is the later
is a matter of their places, as it is without packing: masks say that, and stay recognisable as causal, or as windows.
Chunks (Llama 4) count from where a sequence begins; that none reaches further than its size is said by places as well.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn

from shardc import torch_compat

_SKIP, _TRACED = "_ignore_causal_mask_sdpa", "is_tracing"
_FIND, _REMAP = "find_packed_sequence_indices", "remap_positions_for_packed_sequence"
_WINDOW, _CAUSAL = "sliding_window_causal_mask_function", "causal_mask_function"
_CHUNKS, _BOTH = "chunked_causal_mask_function", "and_masks"


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


@contextmanager
def packed_as_eager() -> Generator[None]:
    """While a model is traced, packed sequences are those of positions that it is given."""
    library: Any = sys.modules.get("transformers.masking_utils")
    names = (_FIND, _REMAP, _WINDOW, _CAUSAL, _CHUNKS, _BOTH)
    known: list[Any] = [getattr(library, name, None) for name in names]
    find, remap, window, causal, chunks, both = known
    if find is None:
        yield
        return
    by_distance = [causal]  # masks that depend on nothing but how far two positions are apart
    by_chunks = dict[Any, int]()  # masks of chunks, and the size of each

    def found(position_ids: Tensor) -> Tensor | None:
        return find(position_ids) if _is_given(position_ids) else None

    def windowed(size: int) -> Any:
        by_distance.append(window(size))
        return by_distance[-1]

    def chunked(size: int, left_padding: Tensor) -> Any:
        mask = chunks(size, left_padding)
        by_chunks[mask] = size
        return mask

    def remapped(mask: Any, position_ids: Tensor) -> Any:
        if mask in by_distance:
            return mask
        moved = remap(mask, position_ids)
        return both(window(by_chunks[mask]), moved) if mask in by_chunks and window and both else moved

    patches = {_FIND: found, _REMAP: remapped, _WINDOW: windowed, _CHUNKS: chunked}
    originals = {_FIND: find, _REMAP: remap, _WINDOW: window, _CHUNKS: chunks}
    patches = {name: patch for name, patch in patches.items() if originals[name] is not None}
    try:
        for name, patch in patches.items():
            setattr(library, name, patch)
        yield
    finally:
        for name in patches:
            setattr(library, name, originals[name])


def _is_given(value: Tensor) -> bool:
    """Is a value computed from an input of the trace?"""
    node = torch_compat.node_of(value)
    todo, seen = [node] if node is not None else [], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


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
