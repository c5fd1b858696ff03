"""A template ready to run. The first call goes through Triton's launcher, and is remembered: which kernels, on which
grids, and which of their arguments lie where in the inputs, the outputs and the scratch. Later calls allocate, put the
addresses in and launch the compiled kernels, as long as every tensor is aligned as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from kernels_triton import direct, launch
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.prepared import Address, Launches
from kernels_triton.templates.algebra import kind_of
from kernels_triton.templates.match import Match, found, row_stride
from kernels_triton.templates.pattern import BROADCAST
from kernels_triton.templates.run import RUN, Operands

ALIGNMENT = 16


@dataclass(frozen=True)
class Repeat:
    """One launch: a compiled kernel on its grid, and its arguments in order."""

    call: direct.Direct
    arguments: tuple[Any, ...]

    def at(self, addresses: list[int]) -> list[Any]:
        return [addresses[a.buffer] + a.offset if type(a) is Address else a for a in self.arguments]


@dataclass
class Ready:
    """What a call launches on one device; `scratch` are the buffers that it takes beside inputs and outputs."""

    repeats: list[Repeat] = field(default_factory=list[Repeat])
    scratch: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)  # type: ignore[type-arg]

    def run(self, buffers: list[Tensor]) -> None:
        like = buffers[0]
        buffers = buffers + [launch.empty(shape, dtype, like) for shape, dtype in self.scratch]
        at = [x.data_ptr() for x in buffers]
        stream = direct.stream_of()(like.get_device())
        for one in self.repeats:
            one.call(stream, *one.at(at))


@dataclass
class Launcher:
    kernel: Kernel
    match: Match
    ready: dict[int, Ready] = field(default_factory=dict[int, Ready])

    def __call__(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """The results, each in the contiguous tensor that is given for it in `out`, or a fresh one."""
        given = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        outputs = [
            launch.empty(made.shape, made.dtype, given[0]) if to is None else to
            for made, to in zip_longest(self.kernel.outputs, out)
        ]
        like, buffers = given[0], [*given, *outputs]
        ready = self.on(like)
        if not like.is_cuda or launch.listening():
            self.first(given, outputs)
        elif ready is not None and all(x.data_ptr() % ALIGNMENT == 0 for x in buffers):
            if like.get_device() == torch.cuda.current_device():
                ready.run(buffers)
            else:
                with torch.cuda.device(like.device):
                    ready.run(buffers)
        else:
            self.remembered(given, outputs)
        return outputs

    def on(self, like: Tensor) -> Ready | None:
        return self.ready.get(like.get_device()) if like.is_cuda else None

    def first(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """As the template's function launches it."""
        match = self.match
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        for name, at in match.bound.items():
            kind = match.template.operands[name].removesuffix("?")
            if kind == "number" and at is not None:
                numbers[name] = float(at)
            elif at is not None:
                tensors[name] = self._laid(inputs[int(at)], int(at), kind)
        results: dict[str, Tensor] = {}
        for name, made, y in zip(match.results, self.kernel.outputs, outputs, strict=True):
            full = kind_of(self.kernel, made.stores[0].value.index) == "full"
            results[name] = y.view(match.rows, -1)[:, : match.cols] if full else y.view(-1)
        RUN[match.template.name](match.template.name, Operands(self.kernel, match, tensors, numbers), results)

    def _laid(self, x: Tensor, at: int, kind: str) -> Tensor:
        match, walk = self.match, self.kernel.inputs[at].walk
        if kind in BROADCAST:
            return x.as_strided(self.kernel.space, walk.strides, x.storage_offset() + walk.offset)
        if kind != "full":
            return x.view(-1)
        stride = match.cols if len(self.kernel.space) == 1 else row_stride(self.kernel, walk)
        assert stride is not None
        return x.as_strided((match.rows, match.cols), (stride, 1), x.storage_offset() + walk.offset)

    def remembered(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """A first call, kept for the next if everything is aligned, and each address is in one tensor only."""
        launches: list[tuple[launch.Launch, Any]] = []

        def keep(one: launch.Launch) -> None:
            with torch.cuda.device(inputs[0].device):
                launches.append((one, one()))

        with launch.recording(keep):
            self.first(inputs, outputs)
        buffers = [*inputs, *outputs]
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, i) for i, x in enumerate(buffers))
        apart = all(first[1] <= second[0] for first, second in pairwise(spans))
        if not apart or any(x.data_ptr() % ALIGNMENT for x in buffers):
            return
        ready = Ready()

        def place(x: Tensor) -> Address:
            at = x.data_ptr()
            found = next(((i, start) for start, end, i in spans if start <= at < end), None)
            if found is None:  # scratch, which then is a buffer like the others
                home = x.untyped_storage()
                found = (len(buffers) + len(ready.scratch), home.data_ptr())
                spans.append((home.data_ptr(), home.data_ptr() + home.nbytes(), found[0]))
                ready.scratch.append(((home.nbytes() // x.element_size(),), x.dtype))
            return Address(found[0], at - found[1])

        for one, compiled in launches:
            names: list[str] = launch.kernel(one.name).arg_names
            arguments = [*one.args, *[one.constants[name] for name in names[len(one.args) :]]]
            placed = tuple(place(a) if isinstance(a, Tensor) else a for a in arguments)
            ready.repeats.append(Repeat(direct.bound(compiled, one.grid), placed))
        self.ready[inputs[0].get_device()] = ready


@cache
def launcher(kernel: Kernel) -> Launcher:
    match = found(kernel)
    assert match is not None, kernel.name
    return Launcher(kernel, match)


def launches(kernel: Kernel, device: int) -> Launches | None:
    """What a call launches on a device, once it ran there."""
    ready = launcher(kernel).ready.get(device)
    if ready is None:
        return None
    sizes = tuple(math.prod(shape) * dtype.itemsize for shape, dtype in ready.scratch)
    return Launches(tuple((one.call, one.arguments) for one in ready.repeats), sizes)
