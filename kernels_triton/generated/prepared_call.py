"""The prepared call of a fused kernel in a program: one instruction on one GPU, repeated in every step.

Only addresses change between calls, and buffers of the arena (`ir.arena`) have fixed addresses. The compiled kernels,
their grids, the argument order and the allocations are all known. So a call is written as straight-line Python:

    def call(env):
        x0 = env[4]                                        # an operand whose address changes
        if not x0.is_contiguous():
            x0 = x0.contiguous()
        a0 = x0.data_ptr()
        if a0 & 15 or current() != device:
            return slowly(env)
        stream = stream_of(device)
        run0(64, 1, 1, stream, k0, k1, a0, 139630, 1e-05)  # the C function that Triton compiled
        return results

The first call checks and compiles, through the launcher. So does every call that differs from the prepared one: an
unaligned address, another current device, an active recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kernels_triton.base.inplace import Operand, Place, Scratch
from kernels_triton.generated.launcher import ALIGNMENT, DeviceKernel, launcher
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.launch import fast_launch, launch

SCRATCH_ALIGNMENT = 512  # bytes, as in torch's allocator
Env = list[Any]
Run = Callable[[Sequence[Tensor], str, Mapping[int, Tensor]], list[Tensor]]


@dataclass(frozen=True)
class BufferAddress:
    """A tensor argument of a launch: an offset in bytes into an operand, a result or a scratch buffer."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class LaunchSequence:
    """The launches of a call with their arguments, and the sizes in bytes of its scratch buffers."""

    calls: tuple[tuple[fast_launch.DirectLaunch, tuple[Any, ...]], ...]
    scratch: tuple[int, ...] = ()


FindLaunches = Callable[
    [Kernel, int], LaunchSequence | None
]  # a kernel's launches on a device, after its first run there


def generated_launches(kernel: Kernel, device: int) -> LaunchSequence | None:
    """The launches of a generated kernel on a device; None before its first run there."""
    ready = launcher(kernel).ready.get(device)
    return None if ready is None or not ready.complete else launch_sequence(ready)


def launch_sequence(ready: DeviceKernel) -> LaunchSequence:
    defined = ready.program
    orders = [defined.arguments, defined.finish_arguments][: 1 + bool(defined.finish)]
    calls = tuple(
        (direct_launch, tuple(map(BufferAddress, order)))
        for direct_launch, order in zip(ready.direct_launches, orders, strict=False)
        if direct_launch is not None
    )
    return LaunchSequence(calls, tuple(4 * defined.plan.programs * cols for _, cols in defined.source.partials))


class PreparedKernelCall:
    """Operands are slots, or tensors that are the same in every call. `places` are the destinations of results that are
    written into given memory. `scratch` allocates memory that is never freed. `run` is the call before it is
    prepared."""

    def __init__(
        self,
        run: Run,
        operands: Sequence[Operand],
        line: str,
        places: Mapping[int, Place],
        device: torch.device,
        scratch: Scratch | None = None,
        launch_finder: FindLaunches = generated_launches,
    ) -> None:
        self.run, self.operands, self.line, self.places = run, tuple(operands), line, dict(places)
        self.scratch, self.find_launches = scratch, launch_finder
        index = cast("int | None", device.index)
        self.index = torch.cuda.current_device() if index is None else index
        self.kernel = parse(line)
        self.ready: Callable[[Env], list[Tensor]] | None = None

    def __call__(self, env: Env) -> list[Tensor]:
        if self.ready is not None and not launch.is_recording():
            return self.ready(env)
        return self.slow_path(env)

    def slow_path(self, env: Env) -> list[Tensor]:
        places = {number: place if isinstance(place, Tensor) else place(env) for number, place in self.places.items()}
        inputs = [x if isinstance(x, Tensor) else env[x] for x in self.operands]
        results = self.run(inputs, self.line, places)
        if self.ready is None and reference.lifted_dtype(self.kernel, [x.dtype for x in inputs]) is None:
            sequence = self.find_launches(self.kernel, self.index)
            self.ready = None if sequence is None else self.write_call(sequence)
        return results

    def write_call(self, sequence: LaunchSequence) -> Callable[[Env], list[Tensor]]:
        writer = CallWriter(self.slow_path, self.index)
        for operand in self.operands:
            writer.add_operand(operand)
        writer.add_guard()
        for number, output in enumerate(self.kernel.outputs):
            place = self.places.get(number)
            if place is None:
                writer.add_allocated(
                    fast_launch.allocator(output.shape, output.dtype, torch.device("cuda", self.index))
                )
            else:
                writer.add_placed(place)
        writer.add_scratch(sequence.scratch, self.scratch)
        writer.add_launches(sequence.calls)
        return writer.finish(self.kernel.name)


class CallWriter:
    """A call as lines of Python. `names` are the objects that the lines refer to; `addresses` has the expression of
    each buffer's address."""

    def __init__(self, slowly: Callable[[Env], list[Tensor]], index: int) -> None:
        self.names: dict[str, Any] = {
            "slowly": slowly,
            "current": fast_launch.current_device(),
            "stream_of": fast_launch.stream_of(),
        }
        self.index, self.lines = index, list[str]()
        self.addresses: list[str] = []
        self.unchecked_addresses: list[str] = []
        self.results: list[str] = []

    def bind(self, kind: str, value: Any) -> str:
        name = f"{kind}{len(self.names)}"
        self.names[name] = value
        return name

    def has_fixed_address(self, x: Tensor) -> bool:
        """Whether a tensor's address is a constant."""
        return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0

    def add_operand(self, x: Operand) -> None:
        if isinstance(x, Tensor) and self.has_fixed_address(x):
            self.addresses.append(str(x.data_ptr()))
            self.bind("held", x)
            return
        name, address = f"x{len(self.addresses)}", f"a{len(self.addresses)}"
        source = self.bind("held", x) if isinstance(x, Tensor) else f"env[{x}]"
        self.lines += [f"{name} = {source}", f"if not {name}.is_contiguous():", f"    {name} = {name}.contiguous()"]
        self.lines.append(f"{address} = {name}.data_ptr()")
        self.addresses.append(address)
        self.unchecked_addresses.append(address)

    def add_guard(self) -> None:
        unaligned = (
            f"({' | '.join(self.unchecked_addresses)}) & {ALIGNMENT - 1} or " if self.unchecked_addresses else ""
        )
        self.lines += [f"if {unaligned}current() != {self.index}:", "    return slowly(env)"]

    def add_allocated(self, make: Callable[[], Tensor]) -> None:
        """A result that the call allocates."""
        name, address = f"y{len(self.results)}", f"b{len(self.results)}"
        self.lines += [f"{name} = {self.bind('make', make)}()", f"{address} = {name}.data_ptr()"]
        self.addresses.append(address)
        self.results.append(name)

    def add_placed(self, place: Place) -> None:
        """A result that is written into given memory."""
        if isinstance(place, Tensor) and self.has_fixed_address(place):
            self.addresses.append(str(place.data_ptr()))
            self.results.append(self.bind("held", place))
            return
        name, address = f"y{len(self.results)}", f"b{len(self.results)}"
        source = self.bind("held", place) if isinstance(place, Tensor) else f"{self.bind('place', place)}(env)"
        self.lines += [f"{name} = {source}", f"{address} = {name}.data_ptr()"]
        self.lines += [f"if {address} & {ALIGNMENT - 1} or not {name}.is_contiguous():", "    return slowly(env)"]
        self.addresses.append(address)
        self.results.append(name)

    def add_scratch(self, sizes: Sequence[int], lasting: Scratch | None) -> None:
        """One buffer for all scratch memory; each part is aligned as a tensor of its own would be."""
        starts, size = list[int](), 0
        for extent in sizes:
            starts.append(size)
            size += -(-extent // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        if size and lasting is not None:
            buffer = lasting(size)
            self.bind("held", buffer)
            self.addresses += [str(buffer.data_ptr() + start) for start in starts]
        elif size:
            maker = fast_launch.allocator((size,), torch.uint8, torch.device("cuda", self.index))
            self.lines += [f"buffer = {self.bind('make', maker)}()", "scratch = buffer.data_ptr()"]
            self.addresses += [f"scratch + {start}" for start in starts]

    def add_launches(self, calls: Sequence[tuple[fast_launch.DirectLaunch, Sequence[Any]]]) -> None:
        self.lines.append(f"stream = stream_of({self.index})")
        for direct, arguments in calls:
            texts = [self.argument_text(a) for a in arguments]
            if direct.arguments_as_tuple:
                texts = [f"({''.join(f'{a}, ' for a in texts)})"]
            call_arguments = [
                *map(self.argument_text, direct.before),
                "stream",
                *map(self.argument_text, direct.after),
                *texts,
            ]
            self.lines.append(f"{self.bind('run', direct.call)}({', '.join(call_arguments)})")

    def argument_text(self, value: Any) -> str:
        if isinstance(value, BufferAddress):
            address, offset = self.addresses[value.buffer], value.offset
            is_constant = address.isdecimal()
            return str(int(address) + offset) if is_constant else f"{address} + {offset}" if offset else address
        return repr(value) if value is None or type(value) in (bool, int) else self.bind("k", value)

    def finish(self, name: str, alone: bool = False) -> Callable[[Env], Any]:
        """The call. It returns the list of all results; with `alone`, the only result."""
        if alone:
            self.lines.append(f"return {self.results[0]}")
        elif all(result in self.names for result in self.results):
            self.lines.append(f"return {self.bind('results', [self.names[result] for result in self.results])}")
        else:
            self.lines.append(f"return [{', '.join(self.results)}]")
        text = "\n".join(["def call(env):", *(f"    {line}" for line in self.lines), ""])
        exec(compile(text, f"<prepared {name}>", "exec"), self.names)
        return self.names["call"]
