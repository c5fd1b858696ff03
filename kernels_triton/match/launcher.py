"""The launcher of a template. The first call uses Triton's launcher, and records the kernels, their grids, and the
position of each argument in the inputs, the outputs and the scratch. Later calls allocate, fill in the addresses and
launch the compiled kernels, while every tensor has the alignment it had.
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

from kernels_triton.generated.prepared_call import BufferAddress, LaunchSequence
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import fast_launch, launch
from kernels_triton.match.algebra import kind_of
from kernels_triton.match.match import Match, match_template, row_stride
from kernels_triton.match.run import RUN, Operands

ALIGNMENT = 16


@dataclass(frozen=True)
class CompiledLaunch:
    """One launch: a compiled kernel on its grid, with its arguments in order."""

    call: fast_launch.DirectLaunch
    arguments: tuple[Any, ...]

    def with_addresses(self, addresses: list[int]) -> list[Any]:
        return [addresses[a.buffer] + a.offset if type(a) is BufferAddress else a for a in self.arguments]


@dataclass
class TemplateLaunches:
    """The launches of a call on one device; `scratch` are its buffers besides inputs and outputs."""

    launches: list[CompiledLaunch] = field(default_factory=list[CompiledLaunch])
    scratch: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)  # type: ignore[type-arg]

    def run(self, buffers: list[Tensor]) -> None:
        like = buffers[0]
        buffers = buffers + [launch.empty(shape, dtype, like) for shape, dtype in self.scratch]
        addresses = [x.data_ptr() for x in buffers]
        stream = fast_launch.stream_of()(like.get_device())
        for compiled_launch in self.launches:
            compiled_launch.call(stream, *compiled_launch.with_addresses(addresses))


@dataclass
class TemplateLauncher:
    kernel: Kernel
    match: Match
    ready: dict[int, TemplateLaunches] = field(default_factory=dict[int, TemplateLaunches])

    def __call__(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """The results, each in the contiguous tensor given for it in `out`, or in a fresh one."""
        contiguous = [x if x.is_contiguous() else x.contiguous() for x in inputs]
        outputs = [
            launch.empty(output.shape, output.dtype, contiguous[0]) if destination is None else destination
            for output, destination in zip_longest(self.kernel.outputs, out)
        ]
        like, buffers = contiguous[0], [*contiguous, *outputs]
        ready = self.launches_on(like)
        if not like.is_cuda or launch.is_recording():
            self.run_template(contiguous, outputs)
        elif ready is not None and all(x.data_ptr() % ALIGNMENT == 0 for x in buffers):
            if like.get_device() == torch.cuda.current_device():
                ready.run(buffers)
            else:
                with torch.cuda.device(like.device):
                    ready.run(buffers)
        else:
            self.run_and_remember(contiguous, outputs)
        return outputs

    def launches_on(self, like: Tensor) -> TemplateLaunches | None:
        return self.ready.get(like.get_device()) if like.is_cuda else None

    def run_template(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Launches through the template's function."""
        match = self.match
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, float] = {}
        for name, operand in match.binding.items():
            kind = match.template.operands[name].removesuffix("?")
            if kind == "number" and operand is not None:
                numbers[name] = float(operand)
            elif operand is not None:
                tensors[name] = self._operand_view(inputs[int(operand)], int(operand), kind)
        results: dict[str, Tensor] = {}
        for name, output, y in zip(match.results, self.kernel.outputs, outputs, strict=True):
            full = kind_of(self.kernel, output.stores[0].value.index) == "full"
            results[name] = y.view(match.rows, -1)[:, : match.cols] if full else y.view(-1)
        RUN[match.template.name](match.template.name, Operands(self.kernel, match, tensors, numbers), results)

    def _operand_view(self, x: Tensor, number: int, kind: str) -> Tensor:
        match, access_map = self.match, self.kernel.inputs[number].access_map
        if kind != "full":
            return x.view(-1)
        stride = match.cols if len(self.kernel.space) == 1 else row_stride(self.kernel, access_map)
        assert stride is not None
        return x.as_strided((match.rows, match.cols), (stride, 1), x.storage_offset() + access_map.offset)

    def run_and_remember(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """A first call. Its launches are kept if everything is aligned and each address lies in only one tensor."""
        launches: list[tuple[launch.Launch, Any]] = []

        def keep(record: launch.Launch) -> None:
            with torch.cuda.device(inputs[0].device):
                launches.append((record, record()))

        with launch.recording(keep):
            self.run_template(inputs, outputs)
        buffers = [*inputs, *outputs]
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, i) for i, x in enumerate(buffers))
        disjoint = all(first[1] <= second[0] for first, second in pairwise(spans))
        if not disjoint or any(x.data_ptr() % ALIGNMENT for x in buffers):
            return
        ready = TemplateLaunches()

        def place(x: Tensor) -> BufferAddress:
            address = x.data_ptr()
            position = next(((i, start) for start, end, i in spans if start <= address < end), None)
            if position is None:  # scratch memory becomes a buffer like the others
                storage = x.untyped_storage()
                position = (len(buffers) + len(ready.scratch), storage.data_ptr())
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), position[0]))
                ready.scratch.append(((storage.nbytes() // x.element_size(),), x.dtype))
            return BufferAddress(position[0], address - position[1])

        for record, compiled in launches:
            names: list[str] = launch.kernel(record.name).arg_names
            arguments = [*record.args, *[record.constants[name] for name in names[len(record.args) :]]]
            placed = tuple(place(a) if isinstance(a, Tensor) else a for a in arguments)
            ready.launches.append(CompiledLaunch(fast_launch.direct_launch(compiled, record.grid), placed))
        self.ready[inputs[0].get_device()] = ready


@cache
def launcher(kernel: Kernel) -> TemplateLauncher:
    match = match_template(kernel)
    assert match is not None, kernel.name
    return TemplateLauncher(kernel, match)


def template_launches(kernel: Kernel, device: int) -> LaunchSequence | None:
    """The launches of a call on a device; None before its first run there."""
    ready = launcher(kernel).ready.get(device)
    if ready is None:
        return None
    sizes = tuple(math.prod(shape) * dtype.itemsize for shape, dtype in ready.scratch)
    return LaunchSequence(
        tuple((launch_record.call, launch_record.arguments) for launch_record in ready.launches), sizes
    )
