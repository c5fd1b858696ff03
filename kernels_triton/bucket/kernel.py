"""The kernel of a bucket's layout: one program a tile of a member's row, and the pointers as arguments.

    @triton.jit
    def pack(FLAT, X0, X1):
        program = tl.program_id(0)
        if program < 96:
            packed(FLAT, X0, program, 0, 589824, ...)
        else:
            packed(FLAT, X1, program - 96, 589824, 768, ...)

A table of members in memory would have to be written anew, and waited for, whenever a tensor is elsewhere; arguments
belong to a launch, in a CUDA graph too. All else about a member is a constant, so each has the loads and stores that
suit it. Layers that are alike share a kernel. bfloat16 and float16 are moved by the same one: as integers.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from kernels_triton import launch
from kernels_triton.bucket.layout import WARPS, WORDS, Layout, Member


@lru_cache(maxsize=1024)
def text(layout: Layout) -> str:
    """A kernel's source. The layout has members, and each of them something to do."""
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
    pointers = "".join(f", X{at}" for at, member in enumerate(layout.members) if member.there)
    return "\n".join([
        f"import triton\nimport triton.language as tl\nfrom kernels_triton.kernels.bucket import {function}\n",
        f"\n@triton.jit\ndef {function[:-2]}(FLAT{pointers}):\n    program = tl.program_id(0)",
        *lines,
        "",
    ])  # fmt: skip


def _call(layout: Layout, at: int, before: int) -> str:
    one: Member = layout.members[at]
    given = f"X{at}" if one.there else "None"
    numbers = [one.start, one.width, one.columns, one.lead, one.chunk, one.size, one.tail]
    numbers += [layout.rows, layout.row, layout.tiles(one), layout.unit, layout.block]
    long = max(layout.rows * layout.row, one.lead * one.size * one.tail) + layout.block >= 1 << 31
    function = "packed" if layout.packs else "unpacked"
    return f"{function}(FLAT, {given}, program - {before}, {', '.join(map(str, numbers))}, {long})"


@lru_cache(maxsize=1024)
def name(layout: Layout) -> str:
    """What `launch.kernel` knows the kernel by: it is written and defined, not compiled."""
    source = text(layout)
    digest, called = hashlib.sha256(source.encode()).hexdigest()[:16], "pack" if layout.packs else "unpack"
    key = f"bucket.{called}.{digest}"
    if key not in launch.generated:
        path = f"/shardc/generated/{called}_{digest}.py"
        # Triton reads a kernel's source by its file's name, and this file is nowhere but here.
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        module: dict[str, Any] = {"__name__": f"shardc_generated.{called}_{digest}", "__file__": path}
        exec(compile(source, path, "exec"), module)
        launch.generated[key] = module[called]
    return key


def grid(layout: Layout) -> int:
    return layout.rows * sum(layout.tiles(member) for member in layout.members)


def arguments(layout: Layout, flat: Tensor, xs: Sequence[Tensor | None], own: Sequence[int]) -> list[Tensor]:
    """Of a launch: the flat tensor and those of the members `own` that are copied, as what is moved."""
    given = [flat]
    for at in own:
        if layout.members[at].there:
            x = xs[at]
            assert x is not None
            assert x.dtype == flat.dtype
            given.append(x)
    return [x.view(WORDS[layout.bytes]) for x in given]


def move(layout: Layout, flat: Tensor, xs: Sequence[Tensor | None]) -> None:
    """Copy members to the flat tensor, or out of it. `xs` are the layout's, contiguous; None if not to be copied."""
    for own, part in layout.parts():
        launch.run(name(part), (grid(part),), *arguments(layout, flat, xs, own), warps=WARPS)
