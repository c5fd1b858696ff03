"""A bucket's copies in a program, ready: what `pack` or `unpack` is on one GPU, again and again.

As `fused.prepared`, of which this is the same for another kernel: the first call compiles, later ones are straight
Python that puts addresses into a launch. What is a view of the flat tensor is made without torch's way through it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kernels_triton import direct, launch
from kernels_triton.bucket.kernel import arguments, grid, move, name
from kernels_triton.bucket.layout import WARPS, Layout
from kernels_triton.fused.launcher import ALIGNMENT
from kernels_triton.fused.prepared import Address, Env, Written
from shardc.ir.in_place import Operand, Place


class _Moves:
    """The launches of a layout, compiled by the first run in which every tensor is aligned."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.parts = layout, layout.parts()
        index = cast("int | None", device.index)
        self.index = torch.cuda.current_device() if index is None else index
        self.launches: list[direct.Direct] | None = None

    def run(self, flat: Tensor, xs: Sequence[Tensor | None]) -> None:
        aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in (flat, *xs))
        if launch.listening() or not aligned:
            move(self.layout, flat, xs)
            return
        found: list[direct.Direct] = []
        for own, part in self.parts:
            given = tuple(arguments(self.layout, flat, xs, own))
            one = launch.Launch(name(part), (grid(part), 1, 1), given, {}, WARPS)
            with torch.cuda.device(self.index):
                found.append(direct.bound(one(), one.grid))
        self.launches = found

    def write(self, written: Written, buffers: Mapping[int, int], flat: int) -> None:
        """The launches, as lines. `buffers` are the members', by their places in the layout."""
        assert self.launches is not None
        calls: list[tuple[direct.Direct, list[Any]]] = []
        for one, (own, _) in zip(self.launches, self.parts, strict=True):
            there = [at for at in own if self.layout.members[at].there]
            calls.append((one, [Address(flat), *(Address(buffers[at]) for at in there)]))
        if calls:
            written.launches(calls)


class Copies(ABC):
    """What a call is: at first `slowly`, which compiles; then what `write` makes of what is compiled."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.moves = _Moves(layout, device)
        self.ready: Callable[[Env], Any] | None = None

    def __call__(self, env: Env) -> Any:
        if self.ready is not None and not launch.listening():
            return self.ready(env)
        result = self.slowly(env)
        if self.ready is None and self.moves.launches is not None:
            written = Written(self.slowly, self.moves.index)
            self.ready = self.written(written)
        return result

    @abstractmethod
    def slowly(self, env: Env) -> Any:
        """The call as it is made where nothing is ready."""

    @abstractmethod
    def written(self, written: Written) -> Callable[[Env], Any]:
        """The call as lines of Python, once its launches are compiled."""


class Pack(Copies):
    """`xs` are slots or tensors; None of members that are in their places. Without a `place`, the flat tensor, of
    `dtype`, is allocated."""

    def __init__(
        self,
        layout: Layout,
        xs: Sequence[Operand | None],
        place: Place | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layout, device)
        self.xs, self.place, self.dtype, self.device = tuple(xs), place, dtype, device

    def slowly(self, env: Env) -> Tensor:
        xs = [None if x is None else _contiguous(x, env) for x in self.xs]
        if self.place is None:
            layout = self.moves.layout
            flat = torch.empty(layout.rows * layout.row, dtype=self.dtype, device=self.device)
        else:
            flat = _at(self.place, env)
        self.moves.run(flat, xs)
        return flat

    def written(self, written: Written) -> Callable[[Env], Any]:
        given = [at for at, x in enumerate(self.xs) if x is not None]
        for at in given:
            x = self.xs[at]
            assert x is not None
            written.operand(x)
        written.check()
        if self.place is None:
            layout = self.moves.layout
            size = (layout.rows * layout.row,)
            written.fresh(direct.maker(size, self.dtype, torch.device("cuda", self.moves.index)))
        else:
            written.placed(self.place)
        self.moves.write(written, {at: buffer for buffer, at in enumerate(given)}, len(given))
        return written.done("pack", alone=True)


class Unpack(Copies):
    """`shapes` are the results', `places` where some of them go. In the layout, those are `there` that are copied; of
    the others, those `used` are views, and the rest None."""

    def __init__(
        self,
        layout: Layout,
        flat: Operand,
        shapes: Sequence[Sequence[int]],
        places: Mapping[int, Place],
        used: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layout, device)
        self.flat, self.shapes, self.places, self.used = flat, [tuple(s) for s in shapes], dict(places), set(used)
        self.dtype, self.device = dtype, device
        self.strides = [tuple(math.prod(s[at + 1 :]) for at in range(len(s))) for s in self.shapes]

    def slowly(self, env: Env) -> list[Tensor | None]:
        flat, members = _contiguous(self.flat, env), self.moves.layout.members
        results: list[Tensor | None] = []
        into: list[Tensor | None] = []
        for at, member in enumerate(members):
            y = self.view(flat, at) if at in self.used and not member.there else None
            if member.there:
                y = _at(self.places[at], env) if at in self.places else None
                if y is None or not y.is_contiguous():
                    y = torch.empty(self.shapes[at], dtype=self.dtype, device=self.device)
            results.append(y)
            into.append(y if member.there else None)
        self.moves.run(flat, into)
        told = {at: _at(place, env) for at, place in self.places.items()}
        return [told[at].copy_(y) if y is not None and told.get(at, y) is not y else y for at, y in enumerate(results)]

    def view(self, flat: Tensor, at: int) -> Tensor:
        start = flat.storage_offset() + self.moves.layout.members[at].start
        return flat.as_strided(self.shapes[at], self.strides[at], start)

    def written(self, written: Written) -> Callable[[Env], Any]:
        written.operand(self.flat)
        written.check()
        held = self.flat if isinstance(self.flat, Tensor) and written.fixed(self.flat) else None
        if held is None:
            written.lines.append("start = x0.storage_offset()")
        buffers: dict[int, int] = {}
        for at, member in enumerate(self.moves.layout.members):
            if member.there:
                buffers[at] = len(written.at)
                if at in self.places:
                    written.placed(self.places[at])
                else:
                    made = direct.maker(self.shapes[at], self.dtype, torch.device("cuda", self.moves.index))
                    written.fresh(made)
            elif at not in self.used:
                written.results.append("None")
            elif held is not None:
                written.results.append(written.named("held", self.view(held, at)))
            else:
                shape, strides = written.named("k", self.shapes[at]), written.named("k", self.strides[at])
                result = f"y{len(written.results)}"
                written.lines.append(f"{result} = x0.as_strided({shape}, {strides}, start + {member.start})")
                written.results.append(result)
        self.moves.write(written, buffers, 0)
        return written.done("unpack")


def _at(place: Place, env: Env) -> Tensor:
    return place if isinstance(place, Tensor) else place(env)


def _contiguous(x: Operand, env: Env) -> Tensor:
    found: Tensor = x if isinstance(x, Tensor) else env[x]
    return found.contiguous()
