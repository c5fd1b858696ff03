"""From one placement of a tensor to another, as a sequence of single steps, one collective each.

    slice           an atom takes one more axis; every rank keeps its part; free
    reduce_scatter  the same, on a pending sum
    all_reduce      a pending sum is resolved in place
    all_gather      an atom gives up its minor axis
    all_to_all      an axis moves from one atom to another
    permute         an atom exchanges its axis for another of the same size, or the order of its two minor axes

Of two ways the one that takes less time is chosen: by the bytes that a rank sends, and for each collective as many more
as a link would send in the time that a collective takes to begin. So a small tensor moves in few steps.

Reductions come first, while the tensor is large in ranks and small in each; gathers last. Each step
touches an atom's minor-most axis only, which keeps unevenly padded layouts exact. An atom of blocks of which some are
whole on every rank is only sliced and gathered, and one that an axis reverses is not permuted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardc.ir.blocks import Blocks
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class Step:
    """One collective: `source` and `target` are flat atoms (-1 where the step has none)."""

    kind: str
    axis: str
    before: TensorType
    after: TensorType
    source: int = -1
    target: int = -1
    reduction: str = "sum"
    to_axis: str = ""  # of a permute


def plan(
    before: TensorType, after: TensorType, mesh: Mesh, hardware: Hardware = DEFAULT
) -> tuple[list[Step], float] | None:
    """The steps and their cost in bytes over a link inside a node, starts included.

    None when `after` is pending where `before` is not (never made up)."""
    if not set(after.partial) <= set(before.partial):
        return None
    if before == after:
        return [], 0.0
    cheapest = _Planner(before, after, mesh, hardware).run()
    if before.partial and after.axes & before.partial_axes:
        # Something in the way of a reduce-scatter may cost more to move while it is pending than an all-reduce.
        cheapest = min(
            cheapest, _Planner(before, after, mesh, hardware, eager=True).run(), key=lambda steps_cost: steps_cost[1]
        )
    return cheapest


class _Planner:
    def __init__(
        self, before: TensorType, after: TensorType, mesh: Mesh, hardware: Hardware, eager: bool = False
    ) -> None:
        self.eager = eager  # resolve a pending reduction at once where it cannot be scattered at once
        self.type = before
        self.now = list(before.placement)
        self.want = list(after.placement)
        self.pending = dict(before.partial)
        self.keep = dict(after.partial)
        self.mesh, self.hardware = mesh, hardware
        self.steps: list[Step] = []
        self.cost = 0.0

    def run(self) -> tuple[list[Step], float]:
        while self._extend() or self._reduce() or self._shrink():
            pass
        assert (self.now, self.pending) == (self.want, self.keep), "a reshard came to a halt before its target"
        return self.steps, self.cost

    def _emit(self, kind: str, axis: str, size: int, **fields: object) -> None:
        """A step that moves so many bytes, as `Hardware.collective_seconds` counts them."""
        result_type = self.type.place(self.now, self.pending.items())
        self.steps.append(Step(kind, axis, self.type, result_type, **fields))  # type: ignore[arg-type]
        self.type = result_type
        if kind != "slice":
            # The group of a permute is along both axes.
            axes = tuple(filter(None, (axis, self.steps[-1].to_axis)))
            group = self.hardware.group_of(self.mesh, axes)
            # An axis of one rank moves nothing, and is a call all the same.
            seconds = self.hardware.collective_seconds(kind, size, group) or self.hardware.collective_start_seconds
            self.cost += round(seconds * self.hardware.link_bytes_per_second, 3)

    def _bytes(self) -> int:
        return self.type.local_bytes(self.mesh)

    def _extend(self) -> bool:
        """Give an atom the next axis that it wants, if no other atom holds it."""
        for i, want in enumerate(self.want):
            now = self.now[i]
            if len(now) < len(want) and now == want[: len(now)]:
                axis = want[len(now)]
                if any(axis in axes for axes in self.now):
                    continue
                if axis in self.pending and self._copied(i):
                    return self._resolve(axis)
                self.now[i] = (*now, axis)
                if axis in self.pending:
                    reduction = self.pending.pop(axis)
                    self._emit("reduce_scatter", axis, self._bytes(), target=i, reduction=reduction)
                else:
                    self._emit("slice", axis, 0, target=i)
                return True
        return False

    def _reduce(self) -> bool:
        """Resolve a pending reduction whose axis no atom will take."""
        target_axes = set[str]() if self.eager else {axis for axes in self.want for axis in axes}
        for axis in list(self.pending):
            if axis not in self.keep and axis not in target_axes:
                return self._resolve(axis)
        return False

    def _resolve(self, axis: str) -> bool:
        reduction = self.pending.pop(axis)
        self._emit("all_reduce", axis, self._bytes(), reduction=reduction)
        return True

    def _of_blocks(self, atom: int) -> bool:
        """Its shards are not chunks side by side."""
        return isinstance(self.type.atoms[atom].size, Blocks)

    def _reversed(self, atom: int) -> bool:
        """Which rank has what of it depends on the axis."""
        size = self.type.atoms[atom].size
        return isinstance(size, Blocks) and bool(size.zigzag)

    def _copied(self, atom: int) -> bool:
        """Some of it is on every rank: it is gathered and sliced, and in no other step."""
        size = self.type.atoms[atom].size
        return isinstance(size, Blocks) and size.copied

    def _shrink(self) -> bool:
        """Take an axis away that is in the way: move it where it is wanted, or gather."""
        for i, now in enumerate(self.now):
            if not now or now == self.want[i][: len(now)]:
                continue
            if self._permute(i) or self._swap(i):
                return True
            axis = now[-1]
            home = next((j for j, axes in enumerate(self.want) if axis in axes), None)
            self.now[i] = now[:-1]
            if (
                home is not None
                and home != i
                and not (self._of_blocks(i) and self._of_blocks(home))
                and not (self._copied(i) or self._copied(home))
                and self.now[home] == self.want[home][: self.want[home].index(axis)]
            ):
                self.now[home] = (*self.now[home], axis)
                self._emit("all_to_all", axis, self._bytes(), source=i, target=home)
            else:
                self._emit("all_gather", axis, self._bytes() * self.mesh.size(axis), source=i)
            return True
        return False

    def _permute(self, i: int) -> bool:
        """a -> b on one atom, |a| = |b|: every rank sends its shard to one other."""
        now, want = self.now[i], self.want[i]
        if self._reversed(i) or len(now) != 1 or len(want) != 1 or self.mesh.size(now) != self.mesh.size(want):
            return False
        if any(want[0] in axes for axes in self.now) or want[0] in self.pending:
            return False
        self.now[i] = want
        self._emit("permute", now[0], self._bytes(), source=i, target=i, to_axis=want[0])
        return True

    def _swap(self, i: int) -> bool:
        """a.b -> b.a on one atom that both divide: the same chunks, each on one other rank."""
        now, want = self.now[i], self.want[i]
        (*major, a, b) = now if len(now) > 1 else (*now, "", "")
        if len(now) < 2 or want[: len(now)] != (*major, b, a) or self.type.atoms[i].uneven(self.mesh):
            return False
        if self._reversed(i):
            return False
        self.now[i] = (*major, b, a)
        self._emit("permute", a, self._bytes(), source=i, target=i, to_axis=b)
        return True


def even(type: TensorType, atom: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether an atom divides by the axes with nothing left over."""
    return type.atoms[atom].size % math.prod(mesh.size(a) for a in axes) == 0
