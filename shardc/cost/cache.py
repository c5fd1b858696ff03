"""What of a step's tensors an accelerator's last-level cache still holds: the last ones used, as many as fit.

Of y = -x, again and again, in a cache of 50 MB: with 16 MiB each both stay; with 32 MiB x is gone when it is read next,
and y is written to the cache; of 64 MiB nothing stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Cache:
    """Tensors by the order of their last use. What is larger than `capacity` bytes pushes out all others."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._total = capacity, 0
        self._held: OrderedDict[Hashable, int] = OrderedDict()

    def holds(self, key: Hashable) -> bool:
        return key in self._held

    def use(self, key: Hashable, size: int) -> None:
        """A tensor of so many bytes is read or written."""
        self._total += size - self._held.pop(key, 0)
        self._held[key] = size
        while self._total > self.capacity:
            self._total -= self._held.popitem(last=False)[1]
