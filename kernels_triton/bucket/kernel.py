"""The kernel of a bucket's layout: one program for each tile of a member's row, with pointers as arguments.

    @triton.jit
    def pack(FLAT, X0, X1):
        program = tl.program_id(0)
        if program < 96:
            packed(FLAT, X0, program, 0, 589824, ...)
        else:
            packed(FLAT, X1, program - 96, 589824, 768, ...)

A table of members in memory would have to be rewritten, and waited for, whenever a tensor moves. Arguments belong to a
launch, also in a CUDA graph. Everything else about a member is a constant, so each member has suitable loads and
stores. Equal layers share a kernel. bfloat16 and float16 share one too: they are moved as integers.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from kernels_triton.bucket.layout import WARPS, WORDS, BucketLayout, BucketMember
from kernels_triton.launch import launch


@lru_cache(maxsize=1024)
def kernel_source(layout: BucketLayout) -> str:
    """A kernel's source. Every member of the layout has programs."""
    lines: list[str] = []
    last = 0
    ends = [last := last + layout.rows * layout.tiles(member) for member in layout.members]

    def branch(first: int, end: int, indent: str) -> None:
        if end - first == 1:
            lines.append(f"{indent}{_call(layout, first, ends[first - 1] if first else 0)}")
            return
        middle = (first + end) // 2
        lines.append(f"{indent}if program < {ends[middle - 1]}:")
        branch(first, middle, indent + "    ")
        lines.append(f"{indent}else:")
        branch(middle, end, indent + "    ")

    branch(0, len(layout.members), "    ")
    function = "packed" if layout.packs else "unpacked"
    pointers = "".join(f", X{number}" for number, member in enumerate(layout.members) if member.copied)
    return "\n".join([
        f"import triton\nimport triton.language as tl\nfrom kernels_triton.library.kernels.bucket import {function}\n",
        f"\n@triton.jit\ndef {function[:-2]}(FLAT{pointers}):\n    program = tl.program_id(0)",
        *lines,
        "",
    ])  # fmt: skip


def _call(layout: BucketLayout, number: int, first_program: int) -> str:
    member: BucketMember = layout.members[number]
    pointer = f"X{number}" if member.copied else "None"
    numbers = [member.start, member.width, member.columns, member.lead, member.chunk, member.size, member.tail]
    numbers += [layout.rows, layout.row, layout.tiles(member), layout.unit, layout.block]
    long = max(layout.rows * layout.row, member.lead * member.size * member.tail) + layout.block >= 1 << 31
    function = "packed" if layout.packs else "unpacked"
    return f"{function}(FLAT, {pointer}, program - {first_program}, {', '.join(map(str, numbers))}, {long})"


@lru_cache(maxsize=1024)
def define_kernel(layout: BucketLayout) -> str:
    """Defines the kernel without compiling it; the name under which `launch.kernel` finds it."""
    source = kernel_source(layout)
    digest, called = hashlib.sha256(source.encode()).hexdigest()[:16], "pack" if layout.packs else "unpack"
    key = f"bucket.{called}.{digest}"
    if key not in launch.generated_kernels:
        path = f"/shardc/generated/{called}_{digest}.py"
        # Triton reads a kernel's source by its file name, and this file exists in the line cache only.
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        module: dict[str, Any] = {"__name__": f"shardc_generated.{called}_{digest}", "__file__": path}
        exec(compile(source, path, "exec"), module)
        launch.generated_kernels[key] = module[called]
    return key


def grid_size(layout: BucketLayout) -> int:
    return layout.rows * sum(layout.tiles(member) for member in layout.members)


def launch_arguments(
    layout: BucketLayout, flat: Tensor, xs: Sequence[Tensor | None], members: Sequence[int]
) -> list[Tensor]:
    """The arguments of a launch: the flat tensor and the copied members among `own`, all as integers."""
    tensors = [flat]
    for number in members:
        if layout.members[number].copied:
            x = xs[number]
            assert x is not None
            assert x.dtype == flat.dtype
            tensors.append(x)
    return [x.view(WORDS[layout.bytes]) for x in tensors]


def copy_members(layout: BucketLayout, flat: Tensor, xs: Sequence[Tensor | None]) -> None:
    """Copies members to the flat tensor, or out of it. `xs` are the layout's members, contiguous; None for members that
    are not copied."""
    for members, part in layout.launch_layouts():
        launch.run(define_kernel(part), (grid_size(part),), *launch_arguments(layout, flat, xs, members), warps=WARPS)
