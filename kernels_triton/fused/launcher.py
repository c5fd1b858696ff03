"""A kernel ready to run: its plan for a device, its source compiled, its grid fixed; a call allocates and launches.

    run = launcher(kernel)                 # one for each text; cached
    outputs = run(inputs)                  # fresh, contiguous
    run(inputs, out=buffers)               # into buffers of yours: views into communication buckets, or (where
                                           # `in_place` says so) an input itself
    step = run.bound(inputs, out=buffers)  # step() repeats it on the same memory, and checks nothing

The first launch on a device compiles, through Triton's own launcher; later ones call the compiled kernel directly, as
long as every pointer is aligned as it was then. Inputs that are not contiguous are copied first.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels_triton import direct, launch
from kernels_triton.fused.codegen import Source, generate
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.schedules import Plan, choose, in_place
from kernels_triton.fused.shorter import shorter
from kernels_triton.fused.simplify import arranged
from kernels_triton.fused.spread import spread
from kernels_triton.launch import H200, Device
from shardc.ir.diagnostic import error

ALIGNMENT = 16
FINISH_WARPS = 4


def source(kernel: Kernel, device: Device = H200) -> str:
    """The kernel as a Triton file, as it would run on the device: what `shardc compile --emit triton` prints."""
    return generate(written(kernel), choose(kernel, device)).text


def written(kernel: Kernel) -> Kernel:
    """As it is generated: dims in the order that suits memory, arithmetic in few instructions, values as they lie."""
    return spread(shorter(arranged(kernel)))


@dataclass(frozen=True)
class Program:
    """A kernel on one kind of device. `main` and `finish` are the names that `launch.kernel` knows."""

    kernel: Kernel
    plan: Plan
    source: Source
    main: str
    finish: str
    arguments: tuple[int, ...]  # places among inputs, outputs and partial sums
    finish_arguments: tuple[int, ...]


@lru_cache(maxsize=4096)
def program(kernel: Kernel, plan: Plan) -> Program:
    """Written and defined, not compiled: Triton compiles a kernel when it is first launched."""
    found = generate(written(kernel), plan)
    names = [kernel.name, f"{kernel.name}_finish"][: 1 + bool(found.finish_arguments)]
    keys = [f"fused.{name}.{found.digest}" for name in names]
    if keys[0] not in launch.generated:
        path = f"/shardc/generated/{kernel.name}_{found.digest}.py"
        # Triton reads a kernel's source by its file's name, and this file is nowhere but here.
        linecache.cache[path] = (len(found.text), None, found.text.splitlines(keepends=True), path)
        module: dict[str, Any] = {"__name__": f"shardc_generated.{kernel.name}_{found.digest}", "__file__": path}
        exec(compile(found.text, path, "exec"), module)
        for key, name in zip(keys, names, strict=True):
            launch.generated[key] = module[name]
    order = [f"X{at}" for at in range(len(kernel.inputs))] + [f"Y{at}" for at in range(len(kernel.outputs))]
    order += [f"P{value}" for value, _ in found.partials]
    places = [tuple(map(order.index, names)) for names in (found.arguments, found.finish_arguments)]
    return Program(kernel, plan, found, keys[0], keys[1] if len(keys) > 1 else "", *places)


@dataclass
class Launcher:
    """`ready`: of each device, the program and, once they are known, its compiled kernels."""

    kernel: Kernel
    ready: dict[int, Ready] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        given = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        outputs = self.outputs(given, out)
        self.on(given[0]).run(given, outputs)
        return outputs

    def bound(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> Callable[[], list[Tensor]]:
        """Run once; the result repeats that on the same buffers, and costs two launches and nothing else."""
        given = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        copied = [(x, y) for x, y in zip(inputs, given, strict=True) if x is not y]
        outputs = self.outputs(given, out)
        ready = self.on(given[0])
        calls = ready.calls(given, outputs)
        for call in calls:
            ready.launch(*call)

        def repeat() -> list[Tensor]:
            for source, copy in copied:
                copy.copy_(source)
            for call in calls:
                ready.launch(*call)
            return outputs

        return repeat

    def outputs(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
        if out is None:
            return [launch.empty(made.shape, made.dtype, inputs[0]) for made in self.kernel.outputs]
        check_out(self.kernel, inputs, out)
        return list(out)

    def on(self, like: Tensor) -> Ready:
        index = like.get_device() if like.is_cuda else -1
        found = self.ready.get(index) if index >= 0 else None  # what is recorded may be for another device each time
        if found is None:
            made = program(self.kernel, choose(self.kernel, launch.device_of(like)))
            found = self.ready[index] = Ready(made)
        return found


Call = tuple[int, str, tuple[int, ...], list[Tensor], int, int]


@dataclass
class Ready:
    """A program on one device; of its two launches, how to repeat each without Triton's launcher."""

    program: Program
    repeats: list[direct.Direct | None] = field(default_factory=lambda: [None, None])

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for call in self.calls(inputs, outputs):
            self.launch(*call)

    def calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Call]:
        """What to launch: number, name, grid, arguments, warps, registers."""
        made = self.program
        plan = made.plan
        buffers = [*inputs, *outputs]
        for _, cols in made.source.partials:
            buffers.append(launch.empty((plan.programs, cols), torch.float32, inputs[0]))
        mains, s = [buffers[i] for i in made.arguments], plan.schedule
        calls: list[Call] = [(0, made.main, plan.grid, mains, s.warps, s.registers)]
        if made.finish:
            finals = [buffers[i] for i in made.finish_arguments]
            calls.append((1, made.finish, (made.source.finish_blocks,), finals, FINISH_WARPS, 0))
        return calls

    def launch(self, at: int, name: str, grid: tuple[int, ...], args: list[Tensor], warps: int, registers: int) -> None:
        if not args[0].is_cuda or launch.listening():
            launch.run(name, grid, *args, warps=warps, registers=registers)
        elif args[0].get_device() != torch.cuda.current_device():
            with torch.cuda.device(args[0].device):
                self.on_device(at, name, grid, args, warps, registers)
        else:
            self.on_device(at, name, grid, args, warps, registers)

    def on_device(
        self, at: int, name: str, grid: tuple[int, ...], args: list[Tensor], warps: int, registers: int
    ) -> None:
        """All arguments are pointers, so a compiled kernel fits every call whose pointers are aligned as it assumes."""
        addresses = [x.data_ptr() for x in args]
        aligned = not any(address % ALIGNMENT for address in addresses)
        repeat = self.repeats[at]
        if repeat is not None and aligned:
            repeat(direct.stream_of()(args[0].get_device()), *addresses)
            return
        x, y, z = (*grid, 1, 1)[:3]
        compiled = launch.Launch(name, (x, y, z), tuple(args), {}, warps, registers)()
        if aligned:
            self.repeats[at] = direct.bound(compiled, (x, y, z))

    @property
    def complete(self) -> bool:
        """Can it be repeated without Triton's launcher?"""
        return None not in self.repeats[: 1 + bool(self.program.finish)]


def check_out(kernel: Kernel, inputs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Outputs as the kernel writes them, and over no input but where each element is read before it is written."""
    if len(out) != len(kernel.outputs):
        raise error("SC530", f"{kernel.name}: {len(out)} outputs given, expected {len(kernel.outputs)}")
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in inputs]
    for at, (made, y) in enumerate(zip(kernel.outputs, out, strict=True)):
        if tuple(y.shape) != made.shape or y.dtype != made.dtype or not y.is_contiguous():
            found = f"{y.dtype} {list(y.shape)}, strides {list(y.stride())}"
            raise error("SC530", f"{kernel.name}: output {at} is {found}, expected a contiguous {list(made.shape)}")
        first, last = y.data_ptr(), y.data_ptr() + y.nbytes
        for source, (start, end) in enumerate(spans):
            over = first < end and start < last
            if over and not (first == start and (at, source) in in_place(kernel)):
                raise error("SC530", f"{kernel.name}: output {at} lies over %{source}, which is read elsewhere too")


@cache
def launcher(kernel: Kernel) -> Launcher:
    return Launcher(kernel)
