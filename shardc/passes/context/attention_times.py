"""How long one attention takes beyond a rank's share of its products, by the ways of dividing it.

    products    of the rank that has most, a tile a call: one on the diagonal is a call of its own, and a small one
    sent        all that no computation of the same attention covers; in a ring a transfer and a step run side by side
    memory      parts that are put together (results, gradients; in float32 in a ring), rows packed before a transfer
                and laid out behind it

So a ring pays for its steps even where these cover all transfers: each reads and writes what those before it found.
What other work of the layer covers is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention_rows import ALL_KEYS, forms_of_tiles, reach, tiles_of_ranks
from shardc.ir.ops.attention_sums import wide
from shardc.ir.ops.attention_tiles import Tile, pairs, square, tiles
from shardc.ir.ops.local import Run
from shardc.ir.types import Axes, TensorType
from shardc.passes.context.divided_heads import Heads
from shardc.rules.attention_rows import implied, rows_text

BACKWARD = 2.5  # products of backward for each of forward


class Times:
    """Of one call whose rows lie over axes. Sizes are in elements of a rank's part."""

    def __init__(
        self, mesh: Mesh, hardware: Hardware, args: Mapping[str, Any], o: TensorType, axes: Axes, backward: bool
    ) -> None:
        self.mesh, self.hardware, self.args, self.axes, self.backward = mesh, hardware, args, axes, backward
        self.q, self.k, self.v, self.o = type_of(args["q"]), type_of(args["k"]), type_of(args["v"]), o
        self.window: list[int] = list(args.get("window", ()))
        self.size = mesh.size(axes)
        self.item, self.wide = self.q.dtype.itemsize, wide(self.q.dtype).itemsize

    def share(self, type: TensorType) -> int:
        """Bytes of a rank's part of a value that lies over the axes, or will."""
        parts = self.mesh.size([axis for axis in self.axes if axis not in type.axes])
        return type.local_bytes(self.mesh) // max(1, parts)

    @cached_property
    def keys(self) -> int:
        """Bytes of a rank's keys and values."""
        return self.share(self.k) + self.share(self.v)

    @property
    def countable(self) -> bool:
        """May axes divide the rows of a causal call so?"""
        first, *rest = self.q.dims[-2]
        return {*first.axes} >= {*self.axes} and not any(atom.axes for atom in rest)

    # ------------------------------------------------------------------ products
    def _heads(self) -> int:
        return math.prod(atom.local(self.mesh) for dim in self.q.dims[:-2] for atom in dim)

    def _computed(self, todo: Sequence[Tile], heads: float, backward: bool, contended: bool = False) -> float:
        """Seconds of the calls for these tiles; `contended` beside a transfer."""
        width = self.q.shape[-1] + self.v.shape[-1]
        times = BACKWARD if backward else 1
        return sum(
            self.hardware.attention_seconds(
                round(2 * heads * width * times * pairs(tile, bool(self.window))),
                self.q.dtype,
                backward=backward,
                sequence=tile.keys,
                width=self.q.shape[-1],
                contended=contended,
            )
            for tile in square(todo)
        )

    def _tiles(self, step: int, axes: Axes, find: Callable[..., Sequence[Sequence[Tile]]]) -> Sequence[Sequence[Tile]]:
        """Of the ranks of the axes, in a step: of each, or each form of them."""
        rows, keys = self.q.dims[-2], self.k.dims[-2]
        if not (implied(self.args) and self.countable):
            whole = self.k.shape[-2] if step == ALL_KEYS else -(-self.k.shape[-2] // self.mesh.size(axes))
            return [[Tile(0, -(-self.q.shape[-2] // self.size), 0, whole, False)]]
        lie = "" if self.window else rows_text(keys)
        return find(rows_text(rows), self.axes, step, self.args["causal"], self.mesh, tuple(self.window), lie)

    @cached_property
    def own_share(self) -> float:
        """Seconds of the products of forward and backward, if all ranks had the same and one call for it."""
        of_ranks = self._tiles(ALL_KEYS, self.axes, tiles_of_ranks)
        seen = sum(pairs(tile, bool(self.window)) for tiles in of_ranks for tile in tiles) / len(of_ranks)
        flops = 2 * self._heads() * (self.q.shape[-1] + self.v.shape[-1]) * seen
        rate, sizes = self.hardware.attention_seconds, (self.k.shape[-2], self.q.shape[-1])
        total = rate(round(flops), self.q.dtype, sequence=sizes[0], width=sizes[1])
        if self.backward:
            more = round(BACKWARD * flops)
            total += rate(more, self.q.dtype, backward=True, sequence=sizes[0], width=sizes[1])
        return total

    # ------------------------------------------------------------------ what is sent, and memory
    def _moved(self, kind: str, size: float, axes: Axes) -> float:
        """Seconds of a collective; `size` as `Hardware.collective_seconds` has it."""
        return self.hardware.collective_seconds(kind, size, self.hardware.group_of(self.mesh, axes))

    def _memory(self, size: float) -> float:
        return self.hardware.memory_seconds(size)

    def _put_together(self, todo: Sequence[Tile], backward: bool) -> float:
        """Seconds of writing what more than one call yields into one result."""
        if len(todo) < 2:
            return 0.0
        heads, of_keys = self._heads(), math.prod(a.local(self.mesh) for dim in self.k.dims[:-2] for a in dim)
        width, rows, keys = self.q.shape[-1] + self.v.shape[-1], sum(t.rows for t in todo), sum(t.keys for t in todo)
        of_rows = heads * rows * (self.q.shape[-1] if backward else self.v.shape[-1])
        return self._memory(2 * self.item * (of_rows + (of_keys * keys * width if backward else 0)))

    def all_gather(self) -> float:
        """Keys and values are gathered, in backward again, and their gradients reduce-scattered, a copy each."""
        of_ranks = self._tiles(ALL_KEYS, self.axes, tiles_of_ranks)
        total = 0.0
        for backward in (False, True)[: 1 + self.backward]:
            total += max(self._computed(todo, self._heads(), backward) for todo in of_ranks)
            total += max(self._put_together(todo, backward) for todo in of_ranks)
            for kind in ("all_gather", "reduce_scatter")[: 1 + backward]:
                for type in (self.k, self.v):
                    whole = self.size * self.share(type)
                    total += self._moved(kind, whole, self.axes) + self._memory(2 * whole)
        return total - self.own_share

    def ring(self, axes: Axes, heads: int = 1) -> float:
        """Along these axes, of a rank's heads divided by so many."""
        text = rows_text(self.q.dims[-2])
        parts = dict.fromkeys(range(1, self.mesh.size(axes)), 1.0)
        if self.window:
            rows = int(Blocks.parse(text).local(axes, self.mesh))
            parts = {places: n / rows for places, n in reach(text, axes, self.window, self.mesh).items()}
        count, keys = self._heads() / heads, self.keys / 2  # of a tensor
        sums = keys * self.wide / self.k.dtype.itemsize
        inner = [self._tiles(step, axes, forms_of_tiles) for step in (0, *parts)] if axes == self.axes else None
        even = self.own_share / (1 + BACKWARD * self.backward) / self.mesh.size(axes)

        def step(i: int, backward: bool, contended: bool = False) -> float:
            if inner is None:
                return even * (BACKWARD if backward else 1)
            return max(self._computed(todo, count, backward, contended) for todo in inner[i])

        def sent(of: Sequence[float]) -> float:
            return sum(2 * self._moved("permute", size, axes) for size in of)

        def beside(i: int, backward: bool, memory: float, moved: Sequence[float]) -> float:
            """A step, and what is sent meanwhile, which slows it for as long as it takes."""
            own, transfer = step(i, backward) + self._memory(memory), sent(moved)
            slower = step(i, backward, contended=True) - step(i, backward)
            return max(own, transfer) + slower * min(1.0, transfer / own if own else 0.0)

        shares = list(parts.values())
        found, more = self.item + self.wide, self.item + 2 * self.wide  # of a part: what is read and written
        o, q = self.share(self.o) / self.item, self.share(self.q) / self.item
        total = 0.0
        for i in range(len(shares) + 1):
            memory = o * (more if i else found) if shares else 0.0
            total += beside(i, False, memory, [shares[i] * keys] if i < len(shares) else [])
        if self.backward:
            values = 2 * keys / self.k.dtype.itemsize
            for i, part in enumerate(shares):
                memory = q * (more if i else found) + part * values * (found + (3 * self.wide if i else 0))
                moved = [shares[i + 1] * keys] if i + 1 < len(shares) else []
                total += beside(i + 1, True, memory, [*moved, *([part * sums] if i else [])])
            # Gradients are back at their owner when all else is done.
            total += sent([shares[-1] * sums]) if shares else 0.0
            total += step(0, True) + (self._memory(q * more + values * more) if shares else 0.0)
        return total - self.own_share

    def heads(self, axes: Axes, heads: Heads, products: bool) -> float:
        """q, k, v and the result are sent, in backward their gradients and the result once more, each packed and laid
        out; keys that are not divided are gathered. `products`: with those of the call, which has the rows of all
        ranks."""
        size = self.mesh.size(axes)
        both = 2 if self.backward else 1
        held = size * heads.queries
        turned = [held * self.share(self.q)] * both + [held * self.share(self.o)] * (both + self.backward)
        if not heads.gathers:
            turned += [size * heads.keys * self.share(type) for type in (self.k, self.v)] * both
        total = sum(self._moved("all_to_all", each, axes) + self._memory(4 * each) for each in turned)
        if heads.times > 1:  # heads of keys are copied, and the gradients of copies summed
            total += both * self._memory((1 + size * heads.keys) * self.keys)
        if heads.gathers:
            for kind in ("all_gather", "all_gather", "reduce_scatter")[: 3 if self.backward else 1]:
                whole = size * self.keys / 2
                total += 2 * (self._moved(kind, whole, axes) + self._memory(2 * whole))
        mask = self.args["mask"]
        if isinstance(mask, fx.Node) and {*type_of(mask).axes} & {*axes}:
            whole = size * type_of(mask).local_bytes(self.mesh)
            total += both * self._moved("all_gather", whole, axes)
        if products:
            rows, keys = Run(0, self.q.shape[-2], 0), Run(0, self.k.shape[-2], 0)
            todo = tiles([rows], [keys], self.args["causal"], self.window)
            for backward in (False, True)[: 1 + self.backward]:
                total += self._computed(todo, self._heads() * heads.queries, backward)
                total += self._put_together(todo, backward) / size
            total -= self.own_share
        return total
