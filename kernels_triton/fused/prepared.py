"""A fused call of a program, ready: what one instruction does on one GPU, again and again.

Everything is known but addresses, and of what has a place for good (`ir.arena`) these too: the compiled kernels and
their grids, which argument is where, what is allocated. So a call is written out as straight Python:

    def call(env):
        x0 = env[4]                                        # an operand that is elsewhere in each run
        if not x0.is_contiguous():
            x0 = x0.contiguous()
        a0 = x0.data_ptr()
        if a0 & 15 or current() != device:
            return slowly(env)
        stream = stream_of(device)
        run0(64, 1, 1, stream, k0, k1, a0, 139630, 1e-05)  # the C function that Triton compiled
        return results

The first call checks and compiles, through the launcher; so does any that is not like the others (an address that is
not aligned, another current device, a recorder that listens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kernels_triton import direct, launch
from kernels_triton.fused import reference
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.launcher import ALIGNMENT, Ready, launcher
from kernels_triton.fused.text import parse
from shardc.ir.in_place import Operand, Place, Scratch

APART = 512  # bytes: as torch's allocator aligns
Env = list[Any]
Run = Callable[[Sequence[Tensor], str, Mapping[int, Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Address:
    """An argument of a launch that is a tensor: so many bytes into an operand, a result or a scratch buffer."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Launches:
    """What a call launches, with which arguments, and the bytes of scratch that it takes besides."""

    calls: tuple[tuple[direct.Direct, tuple[Any, ...]], ...]
    scratch: tuple[int, ...] = ()


Found = Callable[[Kernel, int], Launches | None]  # of a kernel, on a device by number, once it ran there


def launches(kernel: Kernel, device: int) -> Launches | None:
    """Those of a generated kernel."""
    ready = launcher(kernel).ready.get(device)
    return None if ready is None or not ready.complete else launches_of(ready)


def launches_of(ready: Ready) -> Launches:
    made = ready.program
    orders = [made.arguments, made.finish_arguments][: 1 + bool(made.finish)]
    calls = tuple(
        (repeat, tuple(map(Address, order)))
        for repeat, order in zip(ready.repeats, orders, strict=False)
        if repeat is not None
    )
    return Launches(calls, tuple(4 * made.plan.programs * cols for _, cols in made.source.partials))


class Prepared:
    """Operands are slots or tensors, which are the same in every call; so are the `places` of the results that are
    written where they are told. `scratch` hands out memory for good; `run` is the call as it is made where nothing is
    ready."""

    def __init__(
        self,
        run: Run,
        operands: Sequence[Operand],
        line: str,
        places: Mapping[int, Place],
        device: torch.device,
        scratch: Scratch | None = None,
        found: Found = launches,
    ) -> None:
        self.run, self.operands, self.line, self.places = run, tuple(operands), line, dict(places)
        self.scratch, self.found = scratch, found
        index = cast("int | None", device.index)
        self.index = torch.cuda.current_device() if index is None else index
        self.kernel = parse(line)
        self.ready: Callable[[Env], list[Tensor]] | None = None

    def __call__(self, env: Env) -> list[Tensor]:
        if self.ready is not None and not launch.listening():
            return self.ready(env)
        return self.slowly(env)

    def slowly(self, env: Env) -> list[Tensor]:
        places = {at: place if isinstance(place, Tensor) else place(env) for at, place in self.places.items()}
        inputs = [x if isinstance(x, Tensor) else env[x] for x in self.operands]
        results = self.run(inputs, self.line, places)
        if self.ready is None and reference.lifted(self.kernel, [x.dtype for x in inputs]) is None:
            found = self.found(self.kernel, self.index)
            self.ready = None if found is None else self.bound(found)
        return results

    def bound(self, found: Launches) -> Callable[[Env], list[Tensor]]:
        written = Written(self.slowly, self.index)
        for operand in self.operands:
            written.operand(operand)
        written.check()
        for at, made in enumerate(self.kernel.outputs):
            place = self.places.get(at)
            if place is None:
                written.fresh(direct.maker(made.shape, made.dtype, torch.device("cuda", self.index)))
            else:
                written.placed(place)
        written.scratch(found.scratch, self.scratch)
        written.launches(found.calls)
        return written.done(self.kernel.name)


class Written:
    """A call as lines of Python; `names` is what they refer to, `at` the address of each buffer, as written."""

    def __init__(self, slowly: Callable[[Env], list[Tensor]], index: int) -> None:
        self.names: dict[str, Any] = {
            "slowly": slowly,
            "current": direct.current_device(),
            "stream_of": direct.stream_of(),
        }
        self.index, self.lines = index, list[str]()
        self.at: list[str] = []
        self.checked: list[str] = []
        self.results: list[str] = []

    def named(self, kind: str, value: Any) -> str:
        name = f"{kind}{len(self.names)}"
        self.names[name] = value
        return name

    def fixed(self, x: Tensor) -> bool:
        """Is its address known for good?"""
        return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0

    def operand(self, x: Operand) -> None:
        if isinstance(x, Tensor) and self.fixed(x):
            self.at.append(str(x.data_ptr()))
            self.named("held", x)
            return
        name, address = f"x{len(self.at)}", f"a{len(self.at)}"
        source = self.named("held", x) if isinstance(x, Tensor) else f"env[{x}]"
        self.lines += [f"{name} = {source}", f"if not {name}.is_contiguous():", f"    {name} = {name}.contiguous()"]
        self.lines.append(f"{address} = {name}.data_ptr()")
        self.at.append(address)
        self.checked.append(address)

    def check(self) -> None:
        odd = f"({' | '.join(self.checked)}) & {ALIGNMENT - 1} or " if self.checked else ""
        self.lines += [f"if {odd}current() != {self.index}:", "    return slowly(env)"]

    def fresh(self, make: Callable[[], Tensor]) -> None:
        """A result that is allocated."""
        name, address = f"y{len(self.results)}", f"b{len(self.results)}"
        self.lines += [f"{name} = {self.named('make', make)}()", f"{address} = {name}.data_ptr()"]
        self.at.append(address)
        self.results.append(name)

    def placed(self, place: Place) -> None:
        """A result that goes where it is told."""
        if isinstance(place, Tensor) and self.fixed(place):
            self.at.append(str(place.data_ptr()))
            self.results.append(self.named("held", place))
            return
        name, address = f"y{len(self.results)}", f"b{len(self.results)}"
        source = self.named("held", place) if isinstance(place, Tensor) else f"{self.named('place', place)}(env)"
        self.lines += [f"{name} = {source}", f"{address} = {name}.data_ptr()"]
        self.lines += [f"if {address} & {ALIGNMENT - 1} or not {name}.is_contiguous():", "    return slowly(env)"]
        self.at.append(address)
        self.results.append(name)

    def scratch(self, sizes: Sequence[int], lasting: Scratch | None) -> None:
        """One buffer for all; each part of it begins where a tensor of its own would be aligned."""
        starts, size = list[int](), 0
        for extent in sizes:
            starts.append(size)
            size += -(-extent // APART) * APART
        if size and lasting is not None:
            buffer = lasting(size)
            self.named("held", buffer)
            self.at += [str(buffer.data_ptr() + start) for start in starts]
        elif size:
            maker = direct.maker((size,), torch.uint8, torch.device("cuda", self.index))
            self.lines += [f"buffer = {self.named('make', maker)}()", "scratch = buffer.data_ptr()"]
            self.at += [f"scratch + {start}" for start in starts]

    def launches(self, calls: Sequence[tuple[direct.Direct, Sequence[Any]]]) -> None:
        self.lines.append(f"stream = stream_of({self.index})")
        for one, arguments in calls:
            own = [self.argument(a) for a in arguments]
            if one.together:
                own = [f"({''.join(f'{a}, ' for a in own)})"]
            given = [*map(self.argument, one.before), "stream", *map(self.argument, one.after), *own]
            self.lines.append(f"{self.named('run', one.call)}({', '.join(given)})")

    def argument(self, value: Any) -> str:
        if isinstance(value, Address):
            address, offset = self.at[value.buffer], value.offset
            known = address.isdecimal()
            return str(int(address) + offset) if known else f"{address} + {offset}" if offset else address
        return repr(value) if value is None or type(value) in (bool, int) else self.named("k", value)

    def done(self, name: str, alone: bool = False) -> Callable[[Env], Any]:
        """The call, which returns all results; `alone`: the only one."""
        if alone:
            self.lines.append(f"return {self.results[0]}")
        elif all(one in self.names for one in self.results):
            self.lines.append(f"return {self.named('results', [self.names[one] for one in self.results])}")
        else:
            self.lines.append(f"return [{', '.join(self.results)}]")
        text = "\n".join(["def call(env):", *(f"    {line}" for line in self.lines), ""])
        exec(compile(text, f"<prepared {name}>", "exec"), self.names)
        return self.names["call"]
