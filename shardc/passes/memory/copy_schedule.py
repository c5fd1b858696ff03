"""When copies between a rank and its host are waited for, and when copies back begin: places in a list of calls.

    call            0    1    2    3    4   ...   20   21   22   23
    %x made here    x
    its copy        begin ------> end                                 may be freed from call 3 on
    its copy back                                 begin ------> end   read by call 23

Copies of one direction run one after another, at the host's rate, from the times at which calls begin. A copy to the
host is waited for when it is predicted to have ended; a copy back begins as late as lets it end before it is read. Both
hold memory of the accelerator meanwhile: together, those of one direction that are under way hold no more than a bound,
or are a single one. Positions never decrease along a list of copies, so each direction is first in, first out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Copy:
    """`at` is the call before which a copy to the host begins, or a copy back must have ended."""

    bytes: int
    at: int


@dataclass(frozen=True)
class Clock:
    """When each call begins, in seconds, and how long a copy takes a byte."""

    begins: Sequence[float]  # one entry more than calls: the last is the end
    byte_seconds: float

    @classmethod
    def of(cls, seconds: Sequence[float], bytes_per_second: float) -> Clock:
        return cls([0.0, *accumulate(seconds)], 1 / bytes_per_second)


def ends_of_offloads(copies: Sequence[Copy], clock: Clock, bound: int, last: int) -> list[int]:
    """The calls before which copies to the host are waited for, at the latest before call `last`. Copies are in the
    order in which they begin."""
    ends: list[int] = []
    free = 0.0
    for copy in copies:
        free = max(free, clock.begins[copy.at]) + copy.bytes * clock.byte_seconds
        ends.append(max(copy.at, min(last, bisect_left(clock.begins, free))))
    # What is under way when the next one begins, with it.
    for index in range(len(copies)):
        under_way = copies[index].bytes
        for earlier in range(index - 1, -1, -1):
            if ends[earlier] <= copies[index].at:
                break
            under_way += copies[earlier].bytes
            if under_way > bound:
                for each in range(earlier + 1):
                    ends[each] = min(ends[each], copies[index].at)
                break
    return ends


def begins_of_fetches(copies: Sequence[Copy], clock: Clock, bound: int, first: int) -> list[int]:
    """The calls before which copies back begin, none before call `first`. Copies are in the order in which they are
    read."""
    begins = [0] * len(copies)
    free = clock.begins[-1]
    for index in range(len(copies) - 1, -1, -1):
        copy = copies[index]
        free = min(free, clock.begins[copy.at]) - copy.bytes * clock.byte_seconds
        begins[index] = min(copy.at, max(first, bisect_right(clock.begins, free) - 1))
    oldest, under_way = 0, 0
    for index, copy in enumerate(copies):
        under_way += copy.bytes
        while under_way > bound and oldest < index:  # the oldest must have ended
            begins[index] = max(begins[index], copies[oldest].at)
            under_way -= copies[oldest].bytes
            oldest += 1
        if index:
            begins[index] = max(begins[index], begins[index - 1])
    return begins
