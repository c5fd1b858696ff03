"""Which tensors have memory in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardc.ir.diagnostic import error
from shardc.torch_compat import is_fake, storage_of


class Extent(NamedTuple):
    """Where a tensor lies: from its first byte to the one after its last, in a device's memory or in one storage."""

    space: object
    start: int
    end: int

    def contains(self, other: Extent) -> bool:
        return self.space == other.space and self.start <= other.start and other.end <= self.end

    def meets(self, other: Extent) -> bool:
        return self.space == other.space and self.start < other.end and other.start < self.end


def extent_of(t: Tensor) -> Extent | None:
    """Where a tensor lies, by address; of one without data (meta, fake), by its storage. None without elements.

    Addresses see through `torch.from_numpy(t.numpy())` and the like, which have storages of their own.
    """
    storage = storage_of(t)
    if storage is None or not t.numel():
        return None
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    bytes_held = (int(last) + 1) * t.element_size()
    if t.is_meta or is_fake(t):
        start = int(t.storage_offset()) * t.element_size()
        return Extent(storage, start, start + bytes_held)
    return Extent(t.device, t.data_ptr(), t.data_ptr() + bytes_held)


def overlapping(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of names of tensors that have an element in common."""
    by_space: dict[object, list[tuple[Extent, str]]] = {}
    for name, t in tensors.items():
        if (extent := extent_of(t)) is not None:
            by_space.setdefault(extent.space, []).append((extent, name))
    pairs: list[tuple[str, str]] = []
    for extents in by_space.values():
        extents.sort(key=lambda pair: pair[0][1:])
        for i, (first, a) in enumerate(extents):
            for second, b in extents[i + 1 :]:
                if second.start >= first.end:
                    break
                if _share_an_element(tensors[a], first, tensors[b], second):
                    pairs.append((a, b))
    return pairs


def _share_an_element(a: Tensor, first: Extent, b: Tensor, second: Extent) -> bool:
    """Exactly, by marking the elements of one and looking at those of the other: the columns of a matrix interleave."""
    if first.start == second.start:
        return True
    start, end = min(first.start, second.start), max(first.end, second.end)
    if a.element_size() != b.element_size() or (first.start - second.start) % a.element_size():
        return True
    marks = torch.zeros((end - start) // a.element_size(), dtype=torch.bool)

    def of(t: Tensor, extent: Extent) -> Tensor:
        return marks.as_strided(t.shape, t.stride(), (extent.start - start) // t.element_size())

    of(a, first).fill_(True)
    return bool(of(b, second).any())


def refuse_overlap(written: Collection[str], batch: Mapping[str, Tensor]) -> None:
    """Raise ShardcError (SC125) where an input of `written`, changed in place, shares memory with another."""
    for pair in overlapping(batch) if written else ():
        first, second = sorted(pair, key=lambda name: name not in written)
        if first in written:
            message = f"the inputs '{first}' and '{second}' lie in the same memory, and forward changes '{first}'"
            raise error("SC125", message, tensor=second, hint=f"give '{second}' its own memory: .clone()")
