"""A fused call of a program, ready: what one instruction does on one GPU, again and again.

Everything is known but addresses: the compiled kernels and their grids, which argument is where, what is allocated. A
call reads its operands' addresses, allocates its results and launches. The first one checks and compiles, through the
launcher; so does any call that is not like the others (an address that is not aligned, another current device, a
recorder that listens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from kernels_triton import direct, launch
from kernels_triton.fused import reference
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.launcher import ALIGNMENT, Ready, launcher
from kernels_triton.fused.text import parse

APART = 512  # bytes: as torch's allocator aligns
Env = list[Any]
Place = Callable[[Env], Tensor]
Run = Callable[[Sequence[Tensor], str, Mapping[int, Tensor]], list[Tensor]]
Arguments = Callable[[list[int]], Sequence[Any]]  # of the addresses of operands, results and scratch, in this order


@dataclass(frozen=True)
class Launches:
    """What a call launches, and the scratch that it takes beside operands and results, in bytes."""

    calls: tuple[tuple[direct.Direct, Arguments], ...]
    scratch: tuple[int, ...] = ()


Found = Callable[[Kernel, int], Launches | None]  # of a kernel, on a device by number, once it ran there


def launches(kernel: Kernel, device: int) -> Launches | None:
    """Those of a generated kernel."""
    ready = launcher(kernel).ready.get(device)
    return None if ready is None or not ready.complete else launches_of(ready)


def launches_of(ready: Ready) -> Launches:
    made = ready.program
    orders = [made.arguments, made.finish_arguments][: 1 + bool(made.finish)]
    calls = tuple((repeat, picked(order)) for repeat, order in zip(ready.repeats, orders, strict=False) if repeat)
    return Launches(calls, tuple(4 * made.plan.programs * cols for _, cols in made.source.partials))


def picked(order: Sequence[int]) -> Arguments:
    if len(order) == 1:
        (only,) = order
        return lambda at: (at[only],)
    return itemgetter(*order)


class Prepared:
    """`slots` of the operands; `places` of the results that are written where they are told; `run` is the call as it
    is made where nothing is ready."""

    def __init__(
        self,
        run: Run,
        slots: Sequence[int],
        line: str,
        places: Mapping[int, Place],
        device: torch.device,
        found: Found = launches,
    ) -> None:
        self.run, self.slots, self.line, self.places, self.found = run, tuple(slots), line, dict(places), found
        index = cast("int | None", device.index)
        self.index = torch.cuda.current_device() if index is None else index
        self.kernel = parse(line)
        self.ready: Callable[[Env], list[Tensor]] | None = None

    def __call__(self, env: Env) -> list[Tensor]:
        if self.ready is not None and not launch.listening():
            return self.ready(env)
        return self.slowly(env)

    def slowly(self, env: Env) -> list[Tensor]:
        places = {at: place(env) for at, place in self.places.items()}
        inputs = [env[s] for s in self.slots]
        results = self.run(inputs, self.line, places)
        if self.ready is None and reference.lifted(self.kernel, [x.dtype for x in inputs]) is None:
            found = self.found(self.kernel, self.index)
            self.ready = None if found is None else self.bound(found)
        return results

    def bound(self, found: Launches) -> Callable[[Env], list[Tensor]]:
        places, slots, index, low = self.places, self.slots, self.index, ALIGNMENT - 1
        device = torch.device("cuda", index)
        count, last = len(slots), len(slots) + len(self.kernel.outputs)
        makers = [
            None if at in places else direct.maker(one.shape, one.dtype, device)
            for at, one in enumerate(self.kernel.outputs)
        ]
        held = [count + at for at in places]
        # Scratch is one buffer; each part of it begins where a tensor of its own would be aligned.
        starts, size = list[int](), 0
        for extent in found.scratch:
            starts.append(size)
            size += -(-extent // APART) * APART
        scratch = direct.maker((size,), torch.uint8, device) if size else None
        current, stream_of, slowly, calls = torch.cuda.current_device, direct.stream_of(), self.slowly, found.calls

        def call(env: Env) -> list[Tensor]:
            tensors = [x if (x := env[s]).is_contiguous() else x.contiguous() for s in slots]
            for at, make in enumerate(makers):
                tensors.append(places[at](env) if make is None else make())
            addresses = [x.data_ptr() for x in tensors]
            bits = 0
            for address in addresses:
                bits |= address
            if bits & low or current() != index:
                return slowly(env)
            for at in held:
                if not tensors[at].is_contiguous():
                    return slowly(env)
            if scratch is not None:
                buffer = scratch()
                first = buffer.data_ptr()
                addresses += [first + start for start in starts]
            stream = stream_of(index)
            for run, arguments in calls:
                run(stream, *arguments(addresses))
            return tensors[count:last]

        return call
