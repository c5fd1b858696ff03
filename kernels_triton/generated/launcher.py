"""The launcher of a generated kernel: its plan for a device, its compiled source and its grid. A call allocates and
launches.

    run = launcher(kernel)                 # one for each text; cached
    outputs = run(inputs)                  # fresh, contiguous
    run(inputs, out=buffers)               # into the caller's buffers: views into communication buckets, or an input
                                           # itself where `inplace_pairs` allows it
    step = run.bind(inputs, out=buffers)   # step() repeats the call on the same memory, and checks nothing

The first launch on a device compiles, through Triton's own launcher. Later launches call the compiled kernel directly,
while every pointer has the alignment it had then. Inputs that are not contiguous are copied first.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.diagnostic import error
from kernels_triton.codegen.codegen import KernelSource, generate
from kernels_triton.codegen.schedules import GridPlan, choose_plan, inplace_pairs
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import fast_launch, launch
from kernels_triton.launch.launch import H200, Device
from kernels_triton.transform.broadcast_stores import broadcast_stores
from kernels_triton.transform.simplify import order_rows
from kernels_triton.transform.strength_reduce import strength_reduce

ALIGNMENT = 16
FINISH_WARPS = 4


def source(kernel: Kernel, device: Device = H200) -> str:
    """The kernel as a Triton file for a device: what `shardc compile --emit triton` prints."""
    return generate(transformed(kernel), choose_plan(kernel, device)).text


def transformed(kernel: Kernel) -> Kernel:
    """The kernel from which code is generated: row dims reordered, arithmetic strength-reduced, stores broadcast."""
    return broadcast_stores(strength_reduce(order_rows(kernel)))


@dataclass(frozen=True)
class DefinedKernel:
    """A kernel's source for one kind of device. `main` and `finish` are the names under which `launch.kernel` finds its
    functions."""

    kernel: Kernel
    plan: GridPlan
    source: KernelSource
    main: str
    finish: str
    arguments: tuple[int, ...]  # indices into inputs, outputs and partial sums
    finish_arguments: tuple[int, ...]


@lru_cache(maxsize=4096)
def define_kernel(kernel: Kernel, plan: GridPlan) -> DefinedKernel:
    """Generates and defines the kernel. Triton compiles it at its first launch."""
    generated = generate(transformed(kernel), plan)
    names = [kernel.name, f"{kernel.name}_finish"][: 1 + bool(generated.finish_arguments)]
    keys = [f"fused.{name}.{generated.digest}" for name in names]
    if keys[0] not in launch.generated_kernels:
        path = f"/shardc/generated/{kernel.name}_{generated.digest}.py"
        # Triton reads a kernel's source by its file name, and this file exists in the line cache only.
        linecache.cache[path] = (len(generated.text), None, generated.text.splitlines(keepends=True), path)
        module: dict[str, Any] = {"__name__": f"shardc_generated.{kernel.name}_{generated.digest}", "__file__": path}
        exec(compile(generated.text, path, "exec"), module)
        for key, name in zip(keys, names, strict=True):
            launch.generated_kernels[key] = module[name]
    order = [f"X{number}" for number in range(len(kernel.inputs))] + [
        f"Y{number}" for number in range(len(kernel.outputs))
    ]
    order += [f"P{value}" for value, _ in generated.partials]
    places = [tuple(map(order.index, names)) for names in (generated.arguments, generated.finish_arguments)]
    return DefinedKernel(kernel, plan, generated, keys[0], keys[1] if len(keys) > 1 else "", *places)


@dataclass
class GeneratedLauncher:
    """`ready` has the kernel of each device, with its compiled functions once they are known."""

    kernel: Kernel
    ready: dict[int, DeviceKernel] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        contiguous = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        outputs = self.outputs(contiguous, out)
        self.on_device_of(contiguous[0]).run(contiguous, outputs)
        return outputs

    def bind(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> Callable[[], list[Tensor]]:
        """Runs once. The returned call repeats the launches on the same buffers, with no other cost."""
        contiguous = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        copied = [(x, y) for x, y in zip(inputs, contiguous, strict=True) if x is not y]
        outputs = self.outputs(contiguous, out)
        ready = self.on_device_of(contiguous[0])
        calls = ready.calls(contiguous, outputs)
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
            return [launch.empty(output.shape, output.dtype, inputs[0]) for output in self.kernel.outputs]
        check_out(self.kernel, inputs, out)
        return list(out)

    def on_device_of(self, like: Tensor) -> DeviceKernel:
        index = like.get_device() if like.is_cuda else -1
        device_kernel = self.ready.get(index) if index >= 0 else None  # each recorded launch may be for another device
        if device_kernel is None:
            defined = define_kernel(self.kernel, choose_plan(self.kernel, launch.device_of(like)))
            device_kernel = self.ready[index] = DeviceKernel(defined)
        return device_kernel


PreparedArguments = tuple[int, str, tuple[int, ...], list[Tensor], int, int]


@dataclass
class DeviceKernel:
    """A kernel on one device. `direct_launches` has, for each of its two functions, the launch without Triton's
    launcher."""

    program: DefinedKernel
    direct_launches: list[fast_launch.DirectLaunch | None] = field(default_factory=lambda: [None, None])

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for call in self.calls(inputs, outputs):
            self.launch(*call)

    def calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[PreparedArguments]:
        """The launches: number, name, grid, arguments, warps, registers."""
        defined = self.program
        plan = defined.plan
        buffers = [*inputs, *outputs]
        for _, cols in defined.source.partials:
            buffers.append(launch.empty((plan.programs, cols), torch.float32, inputs[0]))
        main_args, schedule = [buffers[i] for i in defined.arguments], plan.schedule
        calls: list[PreparedArguments] = [(0, defined.main, plan.grid, main_args, schedule.warps, schedule.registers)]
        if defined.finish:
            finish_args = [buffers[i] for i in defined.finish_arguments]
            calls.append((1, defined.finish, (defined.source.finish_blocks,), finish_args, FINISH_WARPS, 0))
        return calls

    def launch(
        self, number: int, name: str, grid: tuple[int, ...], args: list[Tensor], warps: int, registers: int
    ) -> None:
        if not args[0].is_cuda or launch.is_recording():
            launch.run(name, grid, *args, warps=warps, registers=registers)
        elif args[0].get_device() != torch.cuda.current_device():
            with torch.cuda.device(args[0].device):
                self.launch_compiled(number, name, grid, args, warps, registers)
        else:
            self.launch_compiled(number, name, grid, args, warps, registers)

    def launch_compiled(
        self, number: int, name: str, grid: tuple[int, ...], args: list[Tensor], warps: int, registers: int
    ) -> None:
        """All arguments are pointers, so a compiled kernel fits every call whose pointers have the alignment that it
        assumes."""
        addresses = [x.data_ptr() for x in args]
        aligned = not any(address % ALIGNMENT for address in addresses)
        direct_launch = self.direct_launches[number]
        if direct_launch is not None and aligned:
            direct_launch(fast_launch.stream_of()(args[0].get_device()), *addresses)
            return
        x, y, z = (*grid, 1, 1)[:3]
        compiled = launch.Launch(name, (x, y, z), tuple(args), {}, warps, registers)()
        if aligned:
            self.direct_launches[number] = fast_launch.direct_launch(compiled, (x, y, z))

    @property
    def complete(self) -> bool:
        """Whether the call can be repeated without Triton's launcher."""
        return None not in self.direct_launches[: 1 + bool(self.program.finish)]


def check_out(kernel: Kernel, inputs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Checks that outputs are as the kernel writes them, and that they overlap an input only where `inplace_pairs`
    allows it."""
    if len(out) != len(kernel.outputs):
        raise error("SC530", f"{kernel.name}: {len(out)} outputs given, expected {len(kernel.outputs)}")
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in inputs]
    for number, (output, y) in enumerate(zip(kernel.outputs, out, strict=True)):
        if tuple(y.shape) != output.shape or y.dtype != output.dtype or not y.is_contiguous():
            actual = f"{y.dtype} {list(y.shape)}, strides {list(y.stride())}"
            raise error(
                "SC530", f"{kernel.name}: output {number} is {actual}, expected a contiguous {list(output.shape)}"
            )
        first, last = y.data_ptr(), y.data_ptr() + y.nbytes
        for operand, (start, end) in enumerate(spans):
            overlaps = first < end and start < last
            if overlaps and not (first == start and (number, operand) in inplace_pairs(kernel)):
                raise error(
                    "SC530", f"{kernel.name}: output {number} lies over %{operand}, which is read elsewhere too"
                )


@cache
def launcher(kernel: Kernel) -> GeneratedLauncher:
    return GeneratedLauncher(kernel)
