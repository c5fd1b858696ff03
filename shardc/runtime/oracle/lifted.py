"""Moves the user's tensors temporarily to another dtype and to memory of their own, and restores them.

with Lifted(tensors, torch.float64):      # the same objects: hooks, ties and views of one another stay
    ...                                   # whatever is written here is gone afterwards
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardc.torch_compat import flatten, storage_of, unflatten


class Lifted:
    """Gives tensors copies of their data while entered: floats in `dtype` (None: in their own), on the CPU.

    Tensors that share memory share the copy, so that a write to one is seen by the others. What is not strided (sparse,
    quantised, on the meta device) is left alone.
    """

    def __init__(self, tensors: Iterable[Tensor], dtype: torch.dtype | None) -> None:
        unique = {id(t): t for t in tensors}
        self._tensors = [t for t in unique.values() if _is_plain(t)]
        self._dtype = dtype
        self._before: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []

    def __enter__(self) -> None:
        copies = copied([t.data for t in self._tensors], self._dtype)
        for tensor, copy in zip(self._tensors, copies, strict=True):
            original = (tensor, tensor.data, tensor.grad if tensor.is_leaf else None, tensor.requires_grad)
            if tensor.is_leaf:
                tensor.grad = None
            with suppress(RuntimeError):  # a tensor made for inference keeps its data
                tensor.data = copy
            self._before.append(original)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _put_back(self) -> None:
        for tensor, data, grad, trained in reversed(self._before):
            if tensor.is_leaf:
                tensor.grad = None
            with suppress(RuntimeError):
                tensor.data = data
            if tensor.is_leaf:
                tensor.requires_grad_(trained)
                tensor.grad = grad


def copied(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Copies on the CPU, detached: of tensors that share memory, views of one copy.

    Floats are cast to `dtype`, complex numbers then to the wider kind; with None all stay as they are.
    """
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        memory = storage_of(tensor)
        groups.setdefault(i if memory is None else memory, []).append(i)
    copies: list[Tensor] = [t.detach() for t in tensors]
    for members in groups.values():
        dtypes = {tensors[i].dtype for i in members}
        wide_dtype = _widened(dtypes.pop(), dtype) if len(dtypes) == 1 else None
        first = tensors[members[0]]
        if len(members) == 1 or wide_dtype is None:  # memory that is read as several dtypes: nothing may change
            for i in members:
                kind = tensors[i].dtype if wide_dtype is None else wide_dtype
                copies[i] = tensors[i].detach().to("cpu", kind, copy=True)
            continue
        size = first.untyped_storage().nbytes() // first.element_size()
        whole = first.detach().as_strided((size,), (1,), 0).to("cpu", wide_dtype, copy=True)
        for i in members:
            copies[i] = whole.as_strided(tensors[i].shape, tensors[i].stride(), tensors[i].storage_offset())
    return copies


def copied_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """A batch of copies. Writes to them do not reach the caller's tensors."""
    leaves, structure = flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _is_plain(leaf)]
    for i, copy in zip(places, copied([leaves[i] for i in places], dtype), strict=True):
        leaves[i] = copy.requires_grad_(leaves[i].requires_grad)
    return unflatten(leaves, structure)


def _widened(original: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return original
    return dtype if original.is_floating_point else torch.complex128 if original.is_complex else original


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested
