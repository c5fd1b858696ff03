"""What slows a step beside the rates of its calls: collectives, power, ranks that wait for each other, slow functions,
caches that a call before has filled.

Contention(product=1.2)          on a GPU: products take 1.2 times as long while a collective runs
Contention(units=32)             a collective's kernel has 32 of the GPU's units, and products the rest
Contention(cores=0.8)            gloo: threads of a collective of 10 ms take the compute's cores for 8 ms
Meetings(jitter_seconds=1e-4)    ranks that meet after 25 ms of compute wait 1.6 ms for the slower one
Calls(first=...)                 a CPU: a view takes 2 us after another view, and 40 us after a product of 4 MB
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from shardc.ir.curve import Points, seconds_at
from shardc.ir.device_rates import Delay, Table


def _pairs(written: Any) -> Any:
    return tuple(cast(Mapping[Any, Any], written).items()) if isinstance(written, Mapping) else written


Elements = Annotated[tuple[tuple[str, Annotated[float, Field(gt=0, le=1)]], ...], BeforeValidator(_pairs)]
"""ATen ops, and the seconds of an element of their result: a mapping, as files have it, or pairs."""
Slowdown = Annotated[float, Field(ge=1, le=100)]


class Contention(Table):
    """How many times as long work takes that runs beside a collective, and a collective beside such work.

    `units` are those of a GPU that a collective's kernel occupies: tiles of a product are dealt to what is left, so one
    of few tiles loses a whole round of them. Where a table tells the tiles, `units` stand in the place of `product`.

    `cores` is for collectives that the cores of the compute carry out, as gloo's threads do on a CPU: the share of a
    collective's seconds in which compute stands still, even where nobody waits for it. The rest can be hidden. Beside
    work, such a collective takes `switch_seconds` of it besides: its threads are woken, and interrupt others.

    `neighbours`: kernels take so many times as long while the other ranks of a host compute, too, as while these wait,
    for they share memory, caches and a limit of power. Tables are of ranks that all compute.
    """

    product: Slowdown = 1.0
    attention: Slowdown = 1.0
    memory: Slowdown = 1.0
    collective: Slowdown = 1.0
    units: Annotated[int, Field(ge=0, le=2**16)] = 0
    cores: Annotated[float, Field(ge=0, le=1)] = 0.0
    switch_seconds: Delay = 0.0
    neighbours: Slowdown = 1.0

    def pace(self, idle: float) -> float:
        """How many times as long as by the tables kernels take of a rank whose neighbours wait for such a share of its
        time."""
        return 1 - (1 - 1 / self.neighbours) * min(1.0, max(0.0, idle))


class Power(Table):
    """What a limit of power makes of the products' rate over a step: it falls while a device does nothing else, and
    rises again while it does.

    W / most <= seconds of products = W / sustained - relief * (all other seconds of the step)

    W are their seconds at the rate of `products`. A device that does nothing else reaches the share `sustained` of that
    rate, and no device more than `most` of it.
    """

    sustained: Annotated[float, Field(gt=0, le=1)] = 1.0
    relief: Annotated[float, Field(ge=0, le=10)] = 0.0
    most: Annotated[float, Field(ge=1, le=10)] = 1.0

    def factor(self, products: float, others: float) -> float:
        """How many times as long as by the table products take, in a step that has so many seconds of both."""
        if not products:
            return 1.0
        return max(1 / self.most, 1 / self.sustained - self.relief * others / products)


class Meetings(Table):
    """Ranks that reach a collective at different times, although they compute the same: the others wait for the last.

    Interruptions and changes of speed come at random. Of sums of such, the spread grows as the root of the time, and so
    does what a rank waits on average: T = root of (jitter_seconds * seconds of compute since they met last). Where a
    rank keeps a speed for some time, as GPUs do whose clock follows their power, waits first grow as the time itself:
    of an Ornstein-Uhlenbeck process with the time constant `steady_seconds`, T = root of (jitter_seconds * (t - s (1 -
    exp(-t / s)))).
    """

    jitter_seconds: Delay = 0.0
    steady_seconds: Delay = 0.0

    def wait(self, computed: float) -> float:
        """Seconds that a rank waits, on average, after so many of compute."""
        steady = self.steady_seconds
        spread = computed + steady * math.expm1(-computed / steady) if steady else computed
        return math.sqrt(self.jitter_seconds * max(0.0, spread))


class Calls(Table):
    """What a call takes on a CPU beside its work, by the bytes that the last kernel before it moved.

    A kernel that moves more than the caches hold leaves nothing there of the interpreter, the dispatcher and the code
    of other kernels: the next call reads them from memory. `first` are seconds of a call right after it, `later` those
    of one after it and another call that moved nothing, which finds all but its own code. The other tables of such a
    device are measured right after kernels of as many bytes as the last point of `first` has.
    """

    first: Points | None = None
    later: Points | None = None

    def seconds(self, moved: float, *, first: bool = True) -> float:
        """Of a call that moves nothing, `first` after a kernel of so many bytes, or with another such call between."""
        points = self.first if first or self.later is None else self.later
        return seconds_at(points, min(moved, points[-1][0])) if points else 0.0

    def saved(self, moved: float, *, first: bool = True) -> float:
        """What a kernel takes less than in the tables, which have it after one that filled all caches."""
        return max(0.0, self.seconds(float("inf")) - self.seconds(moved, first=first))
