"""What products and attention take on one device, by shape and dtype.

A product is cut into tiles of its result, of which `units` are computed at a time: the last wave may be half empty, a
product with few tiles leaves units idle, and each tile has a start that does not depend on its depth.

    8192 x 4096 by 4096 x 4096, tiles of 128 x 256, 132 units     1024 tiles = 7.76 waves, which take as long as 8
    2048 x 2048                                                    128 tiles: 4 of 132 units are idle
    128 x 4096, depth 4096                                          16 tiles, whose depth is split among more units

Of the tiles (and splits of the depth) that a library has, it takes the quickest. Samples that were measured correct
this: near to one, its own ratio of measured and computed time counts, and at it nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(ge=1e6, le=1e18)]
Delay = Annotated[float, Field(ge=0, le=10)]
Extent = Annotated[int, Field(ge=1, le=2**40)]
Dtype = Literal["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
Tile = tuple[Annotated[int, Field(ge=1, le=2**16)], Annotated[int, Field(ge=1, le=2**16)]]
Sample = tuple[Extent, Extent, Extent, Extent, Annotated[float, Field(gt=0, le=1e6)]]
MOST_SPLITS, LEAST_DEPTH = 16, 256  # parts that a depth is split into, and of each
SEQUENCE = 2048  # keys of an attention of which nobody says how many
PARTIAL_BYTES = 8  # of an element of a partial sum: written and read in float32


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def changed(self, **fields: Any) -> Self:
        """The same with other values, which are not checked. (`model_copy` would take over what is cached, too.)"""
        return self.model_construct(**{name: getattr(self, name) for name in type(self).model_fields} | fields)


class ProductRate(Table):
    """Products of some dtypes. `flops_per_second` is reached where all units are busy with the largest tile, and
    `tiles` are rows and columns with the share of it that smaller ones reach. `start_seconds` pass once,
    `depth_start` is the start of a tile, in steps of its depth. `samples` are batch, rows, columns, depth, seconds."""

    dtypes: tuple[Dtype, ...]
    flops_per_second: Rate
    units: Extent = 1
    tiles: tuple[tuple[Tile, Annotated[float, Field(gt=0, le=1)]], ...] = Field(default=(((1, 1), 1.0),), min_length=1)
    start_seconds: Delay = 0.0
    depth_start: Annotated[int, Field(ge=0, le=2**20)] = 0
    samples: tuple[Sample, ...] = ()

    def seconds(self, batch: int, rows: int, columns: int, depth: int, memory_rate: float) -> float:
        """Of the arithmetic: what is read and written is not in it, but for the sums of a split depth."""
        return self.model_seconds(batch, rows, columns, depth, memory_rate) * self._correction(
            batch, rows, columns, depth, memory_rate
        )

    def model_seconds(self, batch: int, rows: int, columns: int, depth: int, memory_rate: float) -> float:
        """The same without the samples."""
        return self.start_seconds + self._best(batch, rows, columns, depth, memory_rate)[0]

    def slowdown(self, batch: int, rows: int, columns: int, depth: int, memory_rate: float, taken: int) -> float:
        """How many times as long a product takes that has `taken` units less, with the tile chosen for all of them."""
        alone, tiles, round_seconds, partial = self._best(batch, rows, columns, depth, memory_rate)
        left = max(1, self.units - taken)
        return (self.start_seconds + -(-tiles // left) * round_seconds + partial) / (self.start_seconds + alone)

    def _best(
        self, batch: int, rows: int, columns: int, depth: int, memory_rate: float
    ) -> tuple[float, int, float, float]:
        """Of the fastest tile and split: the seconds, the tiles, and the seconds of a round of tiles and of sums."""
        return min(
            timed
            for tile, share in self.tiles
            for timed in self._tiled(tile, share, batch, rows, columns, depth, memory_rate)
        )

    def _tiled(
        self, tile: Tile, share: float, batch: int, rows: int, columns: int, depth: int, memory_rate: float
    ) -> Iterator[tuple[float, int, float, float]]:
        """Of one tile: with the depth whole, and split as long as that leaves units without a tile."""
        tiles, split, rate = batch * -(-rows // tile[0]) * -(-columns // tile[1]), 1, self.flops_per_second * share
        while split == 1 or (split <= MOST_SPLITS and tiles * split < 2 * self.units and depth >= LEAST_DEPTH * split):
            flops = 2 * tile[0] * tile[1] * (depth / split + self.depth_start)  # of a tile
            partial = (0 if split == 1 else PARTIAL_BYTES * split * batch * rows * columns) / memory_rate
            seconds = flops * self.units / rate
            yield -(-tiles * split // self.units) * seconds + partial, tiles * split, seconds, partial
            split *= 2

    def _correction(self, batch: int, rows: int, columns: int, depth: int, memory_rate: float) -> float:
        """Measured over computed time, a mean of the samples' weighted by the inverse square of their distance."""
        if memory_rate not in self._ratios:
            self._ratios[memory_rate] = [
                (_logs(*sample[:4]), math.log(sample[4] / self.model_seconds(*sample[:4], memory_rate)))
                for sample in self.samples
            ]
        total = weights = 0.0
        place = _logs(batch, rows, columns, depth)
        for shape, ratio in self._ratios[memory_rate]:
            distance = sum((a - b) ** 2 for a, b in zip(place, shape, strict=True))
            if distance == 0:
                return math.exp(ratio)
            total, weights = total + ratio / distance, weights + 1 / distance
        return math.exp(total / weights) if weights else 1.0

    @cached_property
    def _ratios(self) -> dict[float, list[tuple[tuple[float, ...], float]]]:
        """Of each sample, its place and the logarithm of measured over computed time, by the memory's rate."""
        return {}


def _logs(batch: int, rows: int, columns: int, depth: int) -> tuple[float, ...]:
    return tuple(map(math.log, (batch, rows, columns, depth)))


class AttentionRate(Table):
    """A fused attention, forward or backward, of some dtypes.

    T = start_seconds + key_seconds * sequence + FLOPs (1 + tile / sequence) (1 + score_width / width) / rate

    `rate` is flops_per_second times the share that heads of that width reach.

    The rate is that of long sequences and many heads. Of a causal one, half of each tile on the diagonal is computed
    for nothing, which is a share of tile / sequence. The last block of rows meets all keys while other units idle,
    which takes time by the keys. Where products do not hide softmax of the scores, as on a CPU, it takes as long as the
    products of a head of `score_width` elements.
    """

    dtypes: tuple[Dtype, ...]
    flops_per_second: Rate
    start_seconds: Delay = 0.0
    key_seconds: Delay = 0.0
    tile: Annotated[int, Field(ge=0, le=2**16)] = 0
    score_width: Annotated[int, Field(ge=0, le=2**16)] = 0
    backward: bool = False
    backend: str = ""
    widths: tuple[tuple[Extent, Annotated[float, Field(gt=0, le=1)]], ...] = ()  # of heads up to so wide, growing

    def seconds(self, flops: float, sequence: int, width: int) -> float:
        sequence = sequence or SEQUENCE
        share = next((share for most, share in self.widths if width <= most), 1.0) if width else 1.0
        scores = self.score_width / width if width else 0.0
        computing = flops * (1 + self.tile / sequence) * (1 + scores) / (self.flops_per_second * share)
        return self.start_seconds + self.key_seconds * sequence + computing
