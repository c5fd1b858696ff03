"""Which keys a row of attention sees by where they are: windows that look back and ahead, and chunks.

A window says of `key - row` that it is from `first` to `last`. With chunks of so many positions, a row sees those of
its own chunk, and of so many chunks before it (`earlier`) and behind it (`later`). Calls of attention have it as a
list, whose last numbers may be left out where they are 0:

    [-4, 0]              the row itself and four before it       [-4, 4]        and four behind it
    [-7, 0, 8]           what is before it in its chunk of 8     [-7, 7, 8]     all of its chunk
    [-7, 0, 8, 3]        chunks that end 3 positions sooner: [0, 5), [5, 13), ..
    [-99, 99, 8, 0, 2]   its chunk, and the two before it

Positions count from 0, and no key is before 0 or behind the end, so windows are as wide as need be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """What a row sees."""

    first: int
    last: int
    chunk: int = 0
    shift: int = 0
    earlier: int = 0
    later: int = 0

    @property
    def said(self) -> list[int]:
        """As an argument of a call."""
        numbers = list(self)
        while len(numbers) > 2 and not numbers[-1]:
            numbers.pop()
        return numbers

    def chunk_of(self, position: int) -> int:
        return (position + self.shift) // self.chunk

    def keys(self, start: int, end: int) -> tuple[int, int]:
        """From which key to which, that one not included, rows [start, end) see any."""
        low, high = start + self.first, end + self.last
        if self.chunk:
            low = max(low, (self.chunk_of(start) - self.earlier) * self.chunk - self.shift)
            high = min(high, (self.chunk_of(end - 1) + self.later + 1) * self.chunk - self.shift)
        return low, high

    def cuts(self, start: int, end: int, least: int) -> list[int]:
        """Where chunks end between rows `start` and `end`, of several chunks if one has fewer than `least`."""
        if not self.chunk:
            return []
        step = self.chunk * max(1, least // self.chunk)
        first = -(-(start + 1 + self.shift) // step) * step - self.shift
        return list(range(first, end, step))

    def in_chunk(self, start: int, end: int) -> Window:
        """What is left to say of rows [start, end) and keys that some of them see: if they are of one chunk, nothing of
        chunks."""
        if not self.chunk or self.chunk_of(start) == self.chunk_of(end - 1):
            return Window(self.first, self.last)
        return self

    def of_rows(self, start: int) -> Window:
        """The same, where positions count from a row."""
        return self._replace(shift=(self.shift + start) % self.chunk) if self.chunk else self

    def mask(self, rows: int, keys: int, offset: int, device: torch.device) -> Tensor:
        """Which keys each row sees, if the first row is 0 and the first key `offset` before it: bool [rows, keys]."""
        i = torch.arange(rows, device=device)[:, None]
        j = torch.arange(-offset, keys - offset, device=device)
        seen = (j - i >= self.first) & (j - i <= self.last)
        if self.chunk:
            row, key = ((x + self.shift).div(self.chunk, rounding_mode="floor") for x in (i, j))
            seen &= (key >= row - self.earlier) & (key <= row + self.later)
        return seen

    def pairs(self, rows: int, keys: int, offset: int) -> int:
        """How many of these rows and keys see each other."""
        return _pairs(self, rows, keys, offset)

    def __str__(self) -> str:
        """What rows see, in words."""
        if self.first > 0 or self.last < 0:
            said = f"keys from {self.first:+d} to {self.last:+d} of their own place"
        elif self.last:
            said = f"the {-self.first} before and the {self.last} behind their own"
        else:
            said = f"the {1 - self.first} up to their own"
        if not self.chunk:
            return said
        chunks = [f"{n} {word}" for n, word in ((self.earlier, "before it"), (self.later, "behind it")) if n]
        return " and ".join([f"{said}, in chunks of {self.chunk}", *chunks])


def window_of(said: Sequence[int]) -> Window | None:
    """What a call says; None where it says nothing."""
    return Window(*said) if said else None


def window_fault(said: Sequence[int]) -> str:
    """Why numbers are no window; nothing of one, and where there are none."""
    if not said:
        return ""
    if not 2 <= len(said) <= len(Window._fields):
        return f"has a window of {len(said)} numbers"
    window = Window(*said)
    chunks = window.chunk > 0 and 0 <= window.shift < window.chunk and -window.earlier <= window.later
    if window.first > window.last or not (chunks or window == Window(window.first, window.last)):
        return f"has {list(said)} as its window, in which no row sees a key"
    return ""


@lru_cache(maxsize=8192)
def _pairs(window: Window, rows: int, keys: int, offset: int) -> int:
    if not window.chunk and rows == keys and not offset:  # by distances: row 0 has key 0
        first, last = max(window.first, 1 - rows), min(window.last, rows - 1)
        return max(0, _distances(rows, last) - _distances(rows, first - 1))
    if window.chunk and rows == keys and not (offset or window.earlier or window.later):
        ends = [0, *window.cuts(0, rows, 1), rows]
        return sum(_pairs(Window(window.first, window.last), b - a, b - a, 0) for a, b in pairwise(ends))
    spans = (window.keys(i, i + 1) for i in range(rows))
    return sum(max(0, min(high + offset, keys) - max(low + offset, 0)) for low, high in spans)


def _distances(n: int, last: int) -> int:
    """Pairs of n rows and n keys of which `key - row` is from 1 - n to `last`."""
    below = min(last, 0) + n  # of each of -n + 1 .. min(last, 0): 1, 2, .. pairs
    above = max(last, 0)  # of each of 1 .. last: n - 1, n - 2, ..
    return below * (below + 1) // 2 + above * n - above * (above + 1) // 2
