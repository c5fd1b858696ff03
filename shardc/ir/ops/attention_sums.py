"""Results of attention that come in parts, a tile of rows and keys at a time, put together in one tensor.

    Softmax    o and lse: of two parts of the keys, the softmax over both
    Sum        gradients

Parts of the keys merge by the log of each row's sum, as in FlashAttention (Dao et al., 2022) and ring attention (Liu
et al., 2023).

A part that is the first one of its rows is copied, or joined with what steps before it have found as it is written, so
nothing is filled beforehand and nothing read twice. A result is in the dtype that is asked for where at most two parts
meet, which are rounded once then, and else wide until it is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Span = tuple[int, int]  # where it begins, and how long it is


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of a dtype are in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Untouched:
    """The rows of a result that have no part yet."""

    def __init__(self, extent: int) -> None:
        self.spans: list[Span] = [(0, extent)] if extent else []

    def take(self, start: int, extent: int) -> Iterator[tuple[int, int, bool]]:
        """Pieces of a span, and whether each is the first there; all of them have a part then."""
        end, at, left = start + extent, start, list[Span]()
        for first, length in self.spans:
            last = first + length
            low, high = max(first, start), min(last, end)
            if low >= high:
                left.append((first, length))
                continue
            if at < low:
                yield at, low - at, False
            yield low, high - low, True
            at = high
            left += [(a, b - a) for a, b in ((first, low), (high, last)) if a < b]
        if at < end:
            yield at, end - at, False
        self.spans = left


def _most_parts(spans: Sequence[Span]) -> int:
    """An upper bound of how many meet anywhere."""
    return max((sum(a < b + n and b < a + m for b, n in spans) for a, m in spans), default=0)


def _total(result: Tensor, spans: Sequence[Span], so_far: Tensor | None) -> Tensor:
    """Where parts are put together: the result, or where that would round them again and again, a wide one like it."""
    most = _most_parts(spans) + (so_far is not None)
    dtype = result.dtype if most <= 2 else wide(result.dtype)
    return result if dtype == result.dtype else torch.empty_like(result, dtype=dtype)


class Softmax:
    """o [..., S, D] and lse [..., S] of parts of the keys, which lie in `spans` of the rows."""

    def __init__(
        self, o: Tensor, lse: Tensor, before: Tensor | None, lse_before: Tensor | None, spans: Sequence[Span]
    ) -> None:
        self.result, self.lse = o, lse
        self.before, self.lse_before = before, lse_before
        self.o = _total(o, spans, before)
        self.untouched = _Untouched(o.shape[-2])

    def add(self, start: int, part: Tensor, its_lse: Tensor) -> None:
        for at, length, first in self.untouched.take(start, part.shape[-2]):
            of_part, its = part.narrow(-2, at - start, length), its_lse.narrow(-1, at - start, length)
            into, sums = self.o.narrow(-2, at, length), self.lse.narrow(-1, at, length)
            if not first:
                _merge(into, sums, into, sums, of_part, its)
            elif self.before is None or self.lse_before is None:
                into.copy_(of_part)
                sums.copy_(its)
            else:
                known = self.before.narrow(-2, at, length), self.lse_before.narrow(-1, at, length)
                _merge(into, sums, *known, of_part, its)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Rows without a part are what they were before, or nothing."""
        for at, length in self.untouched.spans:
            into, sums = self.o.narrow(-2, at, length), self.lse.narrow(-1, at, length)
            if self.before is None or self.lse_before is None:
                into.zero_()
                sums.fill_(float("-inf"))
            else:
                into.copy_(self.before.narrow(-2, at, length))
                sums.copy_(self.lse_before.narrow(-1, at, length))
        return self.result if self.o is self.result else self.result.copy_(self.o), self.lse


def _merge(into: Tensor, sums: Tensor, o: Tensor, lse: Tensor, part: Tensor, its_lse: Tensor) -> None:
    """Of two parts of the keys, the softmax over both; the first ones may be in its place."""
    both = torch.logaddexp(lse, its_lse)
    weight = (its_lse - both.masked_fill(both == float("-inf"), 0.0)).exp().unsqueeze(-1)
    dtype = wide(into.dtype)
    if into.dtype == dtype:
        torch.lerp(o.to(dtype), part.to(dtype), weight, out=into)
    else:
        into.copy_(torch.lerp(o.to(dtype), part.to(dtype), weight))
    sums.copy_(both)


class Sum:
    """A gradient [..., S, D] of parts, which lie in `spans` of its rows."""

    def __init__(self, result: Tensor, so_far: Tensor | None, spans: Sequence[Span]) -> None:
        self.result, self.so_far = result, so_far
        self.total = _total(result, spans, so_far)
        self.untouched = _Untouched(result.shape[-2])

    def add(self, start: int, part: Tensor) -> None:
        for at, length, first in self.untouched.take(start, part.shape[-2]):
            its, into = part.narrow(-2, at - start, length), self.total.narrow(-2, at, length)
            if not first:
                into.add_(its)
            elif self.so_far is None:
                into.copy_(its)
            else:
                torch.add(self.so_far.narrow(-2, at, length), its, out=into)

    def finish(self) -> Tensor:
        """Rows without a part are what they were before, or 0."""
        for at, length in self.untouched.spans:
            into = self.total.narrow(-2, at, length)
            if self.so_far is None:
                into.zero_()
            else:
                into.copy_(self.so_far.narrow(-2, at, length))
        return self.result if self.total is self.result else self.result.copy_(self.total)
