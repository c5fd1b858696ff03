"""The prepared call of a bucket's copies in a program: `pack` or `unpack` on one GPU, repeated in every step.

As `generated.prepared_call`, for another kernel: the first call compiles, and later calls are straight-line Python that
passes addresses to a launch. Views of the flat tensor are created without torch's dispatcher.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kernels_triton.base.inplace import Operand, Place
from kernels_triton.bucket.kernel import copy_members, define_kernel, grid_size, launch_arguments
from kernels_triton.bucket.layout import WARPS, BucketLayout
from kernels_triton.generated.launcher import ALIGNMENT
from kernels_triton.generated.prepared_call import BufferAddress, CallWriter, Env
from kernels_triton.launch import fast_launch, launch


class _BucketLaunches:
    """The launches of a layout. The first run with all tensors aligned compiles them."""

    def __init__(self, layout: BucketLayout, device: torch.device) -> None:
        self.layout, self.launch_layouts = layout, layout.launch_layouts()
        index = cast("int | None", device.index)
        self.index = torch.cuda.current_device() if index is None else index
        self.launches: list[fast_launch.DirectLaunch] | None = None

    def run(self, flat: Tensor, xs: Sequence[Tensor | None]) -> None:
        aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in (flat, *xs))
        if launch.is_recording() or not aligned:
            copy_members(self.layout, flat, xs)
            return
        compiled: list[fast_launch.DirectLaunch] = []
        for members, part in self.launch_layouts:
            tensors = tuple(launch_arguments(self.layout, flat, xs, members))
            record = launch.Launch(define_kernel(part), (grid_size(part), 1, 1), tensors, {}, WARPS)
            with torch.cuda.device(self.index):
                compiled.append(fast_launch.direct_launch(record(), record.grid))
        self.launches = compiled

    def add_launches(self, writer: CallWriter, buffers: Mapping[int, int], flat: int) -> None:
        """The launches, as lines. `buffers` maps members, by their index in the layout, to buffers."""
        assert self.launches is not None
        calls: list[tuple[fast_launch.DirectLaunch, list[Any]]] = []
        for compiled, (members, _) in zip(self.launches, self.launch_layouts, strict=True):
            copied = [number for number in members if self.layout.members[number].copied]
            calls.append((compiled, [BufferAddress(flat), *(BufferAddress(buffers[number]) for number in copied)]))
        if calls:
            writer.add_launches(calls)


class PreparedCopy(ABC):
    """A copy that first runs the `slow_path`, which compiles, and then the call from `write_call`."""

    def __init__(self, layout: BucketLayout, device: torch.device) -> None:
        self.moves = _BucketLaunches(layout, device)
        self.ready: Callable[[Env], Any] | None = None

    def __call__(self, env: Env) -> Any:
        if self.ready is not None and not launch.is_recording():
            return self.ready(env)
        result = self.slow_path(env)
        if self.ready is None and self.moves.launches is not None:
            writer = CallWriter(self.slow_path, self.moves.index)
            self.ready = self.write_call(writer)
        return result

    @abstractmethod
    def slow_path(self, env: Env) -> Any:
        """The call before it is prepared."""

    @abstractmethod
    def write_call(self, writer: CallWriter) -> Callable[[Env], Any]:
        """The call as lines of Python, after its launches are compiled."""


class PreparedPack(PreparedCopy):
    """`xs` are slots or tensors; None for members that already lie in their places. Without a `place`, the flat tensor,
    of `dtype`, is allocated."""

    def __init__(
        self,
        layout: BucketLayout,
        xs: Sequence[Operand | None],
        place: Place | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layout, device)
        self.xs, self.place, self.dtype, self.device = tuple(xs), place, dtype, device

    def slow_path(self, env: Env) -> Tensor:
        xs = [None if x is None else _contiguous(x, env) for x in self.xs]
        if self.place is None:
            layout = self.moves.layout
            flat = torch.empty(layout.rows * layout.row, dtype=self.dtype, device=self.device)
        else:
            flat = _destination(self.place, env)
        self.moves.run(flat, xs)
        return flat

    def write_call(self, writer: CallWriter) -> Callable[[Env], Any]:
        present = [number for number, x in enumerate(self.xs) if x is not None]
        for number in present:
            x = self.xs[number]
            assert x is not None
            writer.add_operand(x)
        writer.add_guard()
        if self.place is None:
            layout = self.moves.layout
            size = (layout.rows * layout.row,)
            writer.add_allocated(fast_launch.allocator(size, self.dtype, torch.device("cuda", self.moves.index)))
        else:
            writer.add_placed(self.place)
        self.moves.add_launches(writer, {number: buffer for buffer, number in enumerate(present)}, len(present))
        return writer.finish("pack", alone=True)


class PreparedUnpack(PreparedCopy):
    """`shapes` are those of the results, `places` the destinations of some results. The layout marks the members that
    are copied. Other members are views if they are in `used`, otherwise None."""

    def __init__(
        self,
        layout: BucketLayout,
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
        self.strides = [tuple(math.prod(s[dim + 1 :]) for dim in range(len(s))) for s in self.shapes]

    def slow_path(self, env: Env) -> list[Tensor | None]:
        flat, members = _contiguous(self.flat, env), self.moves.layout.members
        results: list[Tensor | None] = []
        copies: list[Tensor | None] = []
        for number, member in enumerate(members):
            y = self.member_view(flat, number) if number in self.used and not member.copied else None
            if member.copied:
                y = _destination(self.places[number], env) if number in self.places else None
                if y is None or not y.is_contiguous():
                    y = torch.empty(self.shapes[number], dtype=self.dtype, device=self.device)
            results.append(y)
            copies.append(y if member.copied else None)
        self.moves.run(flat, copies)
        destinations = {number: _destination(place, env) for number, place in self.places.items()}
        return [
            destinations[number].copy_(y) if y is not None and destinations.get(number, y) is not y else y
            for number, y in enumerate(results)
        ]

    def member_view(self, flat: Tensor, number: int) -> Tensor:
        start = flat.storage_offset() + self.moves.layout.members[number].start
        return flat.as_strided(self.shapes[number], self.strides[number], start)

    def write_call(self, writer: CallWriter) -> Callable[[Env], Any]:
        writer.add_operand(self.flat)
        writer.add_guard()
        flat_tensor = self.flat if isinstance(self.flat, Tensor) and writer.has_fixed_address(self.flat) else None
        if flat_tensor is None:
            writer.lines.append("start = x0.storage_offset()")
        buffers: dict[int, int] = {}
        for number, member in enumerate(self.moves.layout.members):
            if member.copied:
                buffers[number] = len(writer.addresses)
                if number in self.places:
                    writer.add_placed(self.places[number])
                else:
                    allocate = fast_launch.allocator(
                        self.shapes[number], self.dtype, torch.device("cuda", self.moves.index)
                    )
                    writer.add_allocated(allocate)
            elif number not in self.used:
                writer.results.append("None")
            elif flat_tensor is not None:
                writer.results.append(writer.bind("held", self.member_view(flat_tensor, number)))
            else:
                shape, strides = writer.bind("k", self.shapes[number]), writer.bind("k", self.strides[number])
                result = f"y{len(writer.results)}"
                writer.lines.append(f"{result} = x0.as_strided({shape}, {strides}, start + {member.start})")
                writer.results.append(result)
        self.moves.add_launches(writer, buffers, 0)
        return writer.finish("unpack")


def _destination(place: Place, env: Env) -> Tensor:
    return place if isinstance(place, Tensor) else place(env)


def _contiguous(x: Operand, env: Env) -> Tensor:
    tensor: Tensor = x if isinstance(x, Tensor) else env[x]
    return tensor.contiguous()
