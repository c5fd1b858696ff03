"""How a kernel's space is cut into programs: four plans, chosen by sizes and by what the kernel reduces.

    tiles  no reductions: a grid of tiles, each of [rows, block] elements
    walk   sums over rows only: a few programs for each block of columns walk down the rows
    rows   reductions of rows: whole rows in registers, `chunks` blocks of columns side by side
    loops  rows too long for that: read once for each reduction that waits for another, and once more

With sums over rows, programs share the rows and write one line of partial sums each; a second kernel adds the lines,
in order. One program alone, as where batch dims have work for all, needs no second. What decides between rows and
loops is `pressure`, the values of a row that are alive at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from kernels_triton import launch, rows
from kernels_triton.fused.apart import apart, closure, shared
from kernels_triton.fused.kernel import Kernel, Ref
from kernels_triton.fused.table import OPS
from kernels_triton.launch import Device
from kernels_triton.rows import Schedule, cut, power_of_two

# Of 65536 registers a multiprocessor, by `pressure` (which counts high: the compiler moves loads to their use). With
# sums over rows one program has them all, and its accumulators stay; the gate saw no spills up to these. Of what
# Triton 3.6 holds at most, 3.9 spills 12 registers; of float32 for sm_80, 2 even of what it can hold on sm_90.
NEWEST = launch.triton_version() >= (3, 7)
RESIDENT, RESIDENT_SUMS, RESIDENT_SUMS_SM80 = 82_000, 74_000 if NEWEST else 93_000, 66_000 if NEWEST else 93_000
A_THREAD, A_THREAD_SUMS = 72, 128


Style = Literal["tiles", "walk", "rows", "loops"]


@dataclass(frozen=True)
class Plan:
    """`programs` share the rows (with sums over rows, or `waves`), else each tile of rows has its own. All is of one
    point of the batch dims, of which there are `batches`. Tiles of `parts` that have nothing in common are apart."""

    style: Style
    schedule: Schedule
    programs: int
    blocks: int = 1  # of columns, for tiles and walk
    batches: int = 1
    parts: tuple[tuple[int, ...], ...] = ()  # their outputs

    @property
    def grid(self) -> tuple[int, ...]:
        first = self.batches * self.blocks
        if self.style == "walk":
            return first, self.programs
        return (self.programs * first, len(self.parts)) if len(self.parts) > 1 else (self.programs * first,)

    @property
    def alone(self) -> bool:
        """Does a program see all rows of what it sums?"""
        return self.programs == 1 and self.style != "loops"


def choose(kernel: Kernel, device: Device) -> Plan:
    style = style_of(kernel)
    guess = guessed(kernel, device)
    schedule = rows.measured(entry(kernel), device.name, kernel.cols, widest(kernel), guess)
    if style == "rows" and schedule.chunks and schedule.block * schedule.chunks < kernel.cols:
        schedule = guess  # measured for shorter rows
    return planned(kernel, "loops" if style == "rows" and not schedule.chunks else style, schedule, device)


def style_of(kernel: Kernel) -> Style:
    if any(kernel.level[v] for v in needed(kernel)):
        return "rows"
    return "walk" if column_sums(kernel) else "tiles"


def entry(kernel: Kernel) -> str:
    """The name of the kernel's kind in the table of measured schedules: what it does, and how much of it is alive."""
    name = "transposed" if transposed(kernel) else style_of(kernel)
    sums = "_sums" if name == "rows" and column_sums(kernel) else ""
    batched = "batched_" if kernel.batch else ""
    return f"fused_{batched}{name}{sums}_{math.ceil(pressure(kernel))}"


def planned(kernel: Kernel, style: Style, schedule: Schedule, device: Device) -> Plan:
    """The plan of a schedule: how many programs there are. No tile is larger than the space needs: along a dim of
    size 1 a value has one element in the program as well."""
    most = power_of_two(kernel.rows), power_of_two(kernel.cols)
    schedule = replace(schedule, rows=min(schedule.rows, most[0]), block=min(schedule.block, most[1]))
    assert style != "rows" or schedule.block * schedule.chunks >= kernel.cols, "a row's last columns would be left out"
    tiles, blocks = -(-kernel.rows // schedule.rows), 1
    if style in ("tiles", "walk"):
        blocks = -(-kernel.cols // schedule.block)
    if style == "tiles":
        return Plan(style, schedule, tiles, blocks, kernel.batches, apart(kernel))
    if not (schedule.waves or column_sums(kernel)):
        return Plan(style, schedule, tiles, blocks, kernel.batches)
    shared = max(1, max(1, schedule.waves) * device.sms // (blocks * kernel.batches))
    if sums := len(column_sums(kernel)):  # their lines are written and read again: no more of them than worth while
        lines = max(device.sms, kernel.bytes_moved // (32 * kernel.cols * sums))
        shared = min(shared, max(1, lines // kernel.batches))
    return Plan(style, schedule, min(tiles, shared), blocks, kernel.batches)


def column_sums(kernel: Kernel) -> tuple[int, ...]:
    """The values that are sums over rows, each once."""
    alive = needed(kernel)
    steps = enumerate(kernel.steps, len(kernel.inputs))
    return tuple(v for v, step in steps if OPS[step.op].reduces == "col" and v in alive)


@cache
def needed(kernel: Kernel) -> frozenset[int]:
    """The values that some output depends on."""
    return closure(kernel, (store.value.index for made in kernel.outputs for store in made.stores))


def widest(kernel: Kernel) -> int:
    """Bytes of an element of the full-size inputs: the commonest case decides how many a thread loads."""
    sizes = [given.dtype.itemsize for at, given in enumerate(kernel.inputs) if kernel.kind(at) in ("full", "col")]
    return max(2, min(4, max(sizes, default=4)))


def pressure(kernel: Kernel) -> float:
    """The most values of a column that are alive at once in straight-line code, in registers an element."""
    alive = needed(kernel)
    last: dict[int, int] = {}
    for value in sorted(alive):
        for read in kernel.values_read(value):
            last[read] = value
    wide = [v for v in alive if kernel.varies[v][-1] and not kernel.late[v]]
    held = {v: kernel.inputs[v].dtype.itemsize / 4 for v in wide if v < len(kernel.inputs)}
    most = now = sum(held.values())
    for value in range(len(kernel.inputs), len(kernel.varies)):
        if value not in alive or kernel.late[value]:
            continue
        for read in set(kernel.values_read(value)):
            if read < len(kernel.inputs) and read in held and held[read] < 1.0:
                now += 1.0 - held[read]
                held[read] = 1.0
        if value in wide:
            held[value] = 1.0
            now += 1.0
        most = max(most, now)
        for read in set(kernel.values_read(value)):
            if last.get(read) == value:
                now -= held.pop(read, 0.0)
        if last.get(value) is None:
            now -= held.pop(value, 0.0)
    sums = sum(1 for v in column_sums(kernel) if kernel.varies[v][-1])
    return max(1.0, most) + sums


def transposed(kernel: Kernel) -> bool:
    """Whether some tensor is contiguous along rows and not along columns."""
    walks = [i.walk for i in kernel.inputs] + [s.walk for o in kernel.outputs for s in o.stores]
    return any(w.strides[-1] not in (0, 1) and 1 in w.strides[kernel.batch : -1] for w in walks)


def guessed(kernel: Kernel, device: Device) -> Schedule:
    """By sizes alone; chunks 0 where rows are too long for registers."""
    cols, live, sums, style = kernel.cols, pressure(kernel), bool(column_sums(kernel)), style_of(kernel)
    if style == "tiles":
        if transposed(kernel):
            return Schedule(min(64, power_of_two(cols)), 1, min(64, power_of_two(kernel.rows)), 4)
        block = min(power_of_two(cols), 1024)
        # An output that is stored in parts has a tile of each.
        tile = 1024 // min(4, power_of_two(max(len(made.stores) for made in kernel.outputs)))
        high = max(1, min(tile // block, power_of_two(kernel.rows)))
        return Schedule(block, 1, high, max(1, min(4, block * high // 256)))  # a thread has 16 bytes of 16-bit values
    if style == "walk":
        block = min(power_of_two(cols), 1024)
        tile = 2048 if live <= 6 else 1024
        high = max(1, min(tile // block, power_of_two(kernel.rows)))
        # A program of a point of the batch dims may have few elements: then it has few threads.
        return Schedule(block, 1, high, max(1, min(4, block * high // 512)) if kernel.batch else 4, 3, 6)
    block, chunks = cut(cols, 16384, 4)
    width = block * chunks
    most = RESIDENT_SUMS if sums else RESIDENT
    if sums and widest(kernel) == 4 and device.shared_bytes < rows.NEWER:
        most = RESIDENT_SUMS_SM80
    if not chunks or width * live > most:
        if sums:
            return Schedule(2048, 0, min(2, power_of_two(kernel.rows)), 8, waves=2)
        return Schedule(2048, 0, 1, 8)
    tile = max(1, min(max(16, 256 // width), (2048 if sums else 1024) // width))
    light = bool(kernel.batch) and live <= 2.5  # programs are many and short, and wait for little
    if light:
        tile = max(1, (2048 if width <= 64 else 4096) // width)
    while transposed(kernel) and tile < 16 and width * tile * 2 * live <= most:  # 16 elements in a row are 32 bytes
        tile *= 2
    tile = min(tile, power_of_two(kernel.rows))
    elements = width * tile
    a_thread = 32 if live <= 2.5 and not sums and widest(kernel) == 2 else 16
    warps = max(1, min(16, elements // (32 * a_thread)))
    # Up to 8 warps cost little; past that, what they exchange to reduce a row costs more than registers.
    while warps < 16 and elements // (32 * warps) * live > (
        A_THREAD if not sums else A_THREAD_SUMS if warps >= 8 else 96
    ):
        warps *= 2
    warps = power_of_two(warps)
    if not sums:
        # Two programs fit on a multiprocessor; for three, the compiler would spill.
        two = 64 if warps == 16 and 32 < elements // (32 * warps) * live <= 48 else 0
        return Schedule(block, chunks, tile, warps, registers=two)
    waves = max(1, 16 // warps)
    if light or (kernel.batch and width <= 256):
        return Schedule(block, chunks, tile, warps, 1, max(8, waves))
    # Rows ahead are fetched into shared memory while these are summed.
    a_row = sum(i.dtype.itemsize for at, i in enumerate(kernel.inputs) if kernel.kind(at) == "full") * elements
    stages = max(1, min(3, (device.shared_bytes - rows.RESERVED) // (waves * max(1, a_row))))
    return Schedule(block, chunks, tile, warps, stages, waves)


@cache
def in_place(kernel: Kernel) -> frozenset[tuple[int, int]]:
    """(output, input): an output that may be written over an input, as each element is read where it is written.

    It must be walked as the input is, and be computed from the very element: the store then waits for the load. Each
    point of the space must have an element of its own: what several programs read, none may write.
    """
    found: set[tuple[int, int]] = set()
    for at, made in enumerate(kernel.outputs):
        for store in made.stores:
            if not all(s or n == 1 for s, n in zip(store.walk.strides, kernel.space, strict=True)):
                continue
            used = _pointwise(kernel, store.value)
            for source, given in enumerate(kernel.inputs):
                same = given.walk == store.walk and given.dtype == made.dtype and given.shape == made.shape
                if same and source in used and source not in shared(kernel):
                    found.add((at, source))
    return frozenset(found)


def _pointwise(kernel: Kernel, value: Ref) -> set[int]:
    """Values whose own element `value`'s element is computed from, no reduction between."""
    found, todo = set[int](), [value.index]
    while todo:
        at = todo.pop()
        if at in found:
            continue
        found.add(at)
        step = kernel.step(at)
        if step is not None and not OPS[step.op].reduces:
            todo += kernel.values_read(at)
    return found
