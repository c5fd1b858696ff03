"""How a kernel's space is cut into programs: four plans, chosen by sizes and by the kernel's reductions.

    tiles  no reductions: a grid of tiles, each of [rows, block] elements
    walk   column reductions only: a few programs for each block of columns step down the rows
    rows   row reductions: whole rows in registers, `chunks` blocks of columns side by side
    loops  rows too long for registers: read once for each dependent reduction, and once more to store

With sums over rows, programs share the rows and write one line of partial sums each. A second kernel adds the lines in
order. If one program sees all rows, as when batch dims have work for all, no second kernel is needed.
`register_pressure`, the values of a row that are live at once, decides between rows and loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from kernels_triton.ir.kernel import Kernel, Ref
from kernels_triton.ir.table import OPS
from kernels_triton.launch import launch, row_schedule
from kernels_triton.launch.launch import Device
from kernels_triton.launch.row_schedule import Schedule, column_chunks, power_of_two
from kernels_triton.transform.independent_outputs import dependencies, independent_outputs, shared_inputs

# Limits in registers, of the 65536 of a multiprocessor, as `register_pressure` counts them (it overestimates: the
# compiler moves loads to their use). With sums over rows one program has all registers and its accumulators stay live.
# The gate saw no spills up to these limits. At Triton 3.6's limit, 3.9 spills 12 registers. With float32 on sm_80, 3.9
# spills 2 registers even at its limit for sm_90.
NEWEST = launch.triton_version() >= (3, 7)
ROW_REGISTERS, ROW_REGISTERS_SUMS, ROW_REGISTERS_SUMS_SM80 = (
    82_000,
    74_000 if NEWEST else 93_000,
    66_000 if NEWEST else 93_000,
)
THREAD_REGISTERS, THREAD_REGISTERS_SUMS = 72, 128


PlanStyle = Literal["tiles", "walk", "rows", "loops"]


@dataclass(frozen=True)
class GridPlan:
    """`programs` share the rows (with sums over rows, or `waves`); otherwise each tile of rows has its own program.
    These are counts for one point of the batch dims, of which there are `batches`. Each of the `parts` (sets of
    independent outputs) has tiles of its own."""

    style: PlanStyle
    schedule: Schedule
    programs: int
    blocks: int = 1  # of columns, for the plans tiles and walk
    batches: int = 1
    parts: tuple[tuple[int, ...], ...] = ()  # the outputs of each part

    @property
    def grid(self) -> tuple[int, ...]:
        first = self.batches * self.blocks
        if self.style == "walk":
            return first, self.programs
        return (self.programs * first, len(self.parts)) if len(self.parts) > 1 else (self.programs * first,)

    @property
    def sums_in_one_program(self) -> bool:
        """Whether one program sees all rows that it sums."""
        return self.programs == 1 and self.style != "loops"


def choose_plan(kernel: Kernel, device: Device) -> GridPlan:
    style = plan_style(kernel)
    guess = guess_schedule(kernel, device)
    schedule = row_schedule.measured_schedule(
        schedule_key(kernel), device.name, kernel.cols, widest_element(kernel), guess
    )
    if style == "rows" and schedule.chunks and schedule.block * schedule.chunks < kernel.cols:
        schedule = guess  # the entry was measured for shorter rows
    return plan_grid(kernel, "loops" if style == "rows" and not schedule.chunks else style, schedule, device)


def plan_style(kernel: Kernel) -> PlanStyle:
    if any(kernel.level[v] for v in live_values(kernel)):
        return "rows"
    return "walk" if column_sums(kernel) else "tiles"


def schedule_key(kernel: Kernel) -> str:
    """The kernel's key in the table of measured schedules: its plan and its register pressure."""
    name = "transposed" if has_transposed_access(kernel) else plan_style(kernel)
    sums = "_sums" if name == "rows" and column_sums(kernel) else ""
    batched = "batched_" if kernel.batch else ""
    return f"fused_{batched}{name}{sums}_{math.ceil(register_pressure(kernel))}"


def plan_grid(kernel: Kernel, style: PlanStyle, schedule: Schedule, device: Device) -> GridPlan:
    """The plan of a schedule: the number of programs. A tile is never larger than the space. Along a dim of size 1, a
    value has one element in the program too."""
    largest = power_of_two(kernel.rows), power_of_two(kernel.cols)
    schedule = replace(schedule, rows=min(schedule.rows, largest[0]), block=min(schedule.block, largest[1]))
    assert style != "rows" or schedule.block * schedule.chunks >= kernel.cols, "a row's last columns would be left out"
    tiles, blocks = -(-kernel.rows // schedule.rows), 1
    if style in ("tiles", "walk"):
        blocks = -(-kernel.cols // schedule.block)
    if style == "tiles":
        return GridPlan(style, schedule, tiles, blocks, kernel.batches, independent_outputs(kernel))
    if not (schedule.waves or column_sums(kernel)):
        return GridPlan(style, schedule, tiles, blocks, kernel.batches)
    programs = max(1, max(1, schedule.waves) * device.sms // (blocks * kernel.batches))
    if sums := len(column_sums(kernel)):  # their lines are written and read back, so their number is limited
        lines = max(device.sms, kernel.bytes_moved // (32 * kernel.cols * sums))
        programs = min(programs, max(1, lines // kernel.batches))
    return GridPlan(style, schedule, min(tiles, programs), blocks, kernel.batches)


def column_sums(kernel: Kernel) -> tuple[int, ...]:
    """The values that are sums over rows, each once."""
    alive = live_values(kernel)
    steps = enumerate(kernel.steps, len(kernel.inputs))
    return tuple(v for v, step in steps if OPS[step.op].reduces == "col" and v in alive)


@cache
def live_values(kernel: Kernel) -> frozenset[int]:
    """The values that some output depends on."""
    return dependencies(kernel, (store.value.index for output in kernel.outputs for store in output.stores))


def widest_element(kernel: Kernel) -> int:
    """The element size in bytes of the widest full-size input: it decides how many elements a thread loads."""
    sizes = [
        tensor.dtype.itemsize for number, tensor in enumerate(kernel.inputs) if kernel.kind(number) in ("full", "col")
    ]
    return max(2, min(4, max(sizes, default=4)))


def register_pressure(kernel: Kernel) -> float:
    """The most column values that are live at once in straight-line code, in registers an element."""
    alive = live_values(kernel)
    last: dict[int, int] = {}
    for value in sorted(alive):
        for read in kernel.values_read(value):
            last[read] = value
    wide = [v for v in alive if kernel.varies[v][-1] and not kernel.in_epilogue[v]]
    registers_of = {v: kernel.inputs[v].dtype.itemsize / 4 for v in wide if v < len(kernel.inputs)}
    most = now = sum(registers_of.values())
    for value in range(len(kernel.inputs), len(kernel.varies)):
        if value not in alive or kernel.in_epilogue[value]:
            continue
        for read in set(kernel.values_read(value)):
            if read < len(kernel.inputs) and read in registers_of and registers_of[read] < 1.0:
                now += 1.0 - registers_of[read]
                registers_of[read] = 1.0
        if value in wide:
            registers_of[value] = 1.0
            now += 1.0
        most = max(most, now)
        for read in set(kernel.values_read(value)):
            if last.get(read) == value:
                now -= registers_of.pop(read, 0.0)
        if last.get(value) is None:
            now -= registers_of.pop(value, 0.0)
    sums = sum(1 for v in column_sums(kernel) if kernel.varies[v][-1])
    return max(1.0, most) + sums


def has_transposed_access(kernel: Kernel) -> bool:
    """Whether some tensor is contiguous along rows and not along columns."""
    maps = [i.access_map for i in kernel.inputs] + [s.access_map for o in kernel.outputs for s in o.stores]
    return any(
        access_map.strides[-1] not in (0, 1) and 1 in access_map.strides[kernel.batch : -1] for access_map in maps
    )


def guess_schedule(kernel: Kernel, device: Device) -> Schedule:
    """A schedule from sizes alone. `chunks` is 0 if rows are too long for registers."""
    cols, live, sums, style = kernel.cols, register_pressure(kernel), bool(column_sums(kernel)), plan_style(kernel)
    if style == "tiles":
        if has_transposed_access(kernel):
            return Schedule(min(64, power_of_two(cols)), 1, min(64, power_of_two(kernel.rows)), 4)
        block = min(power_of_two(cols), 1024)
        # An output with several stores has one tile for each.
        tile = 1024 // min(4, power_of_two(max(len(output.stores) for output in kernel.outputs)))
        high = max(1, min(tile // block, power_of_two(kernel.rows)))
        return Schedule(
            block, 1, high, max(1, min(4, block * high // 256))
        )  # a thread then loads 16 bytes of 16-bit values
    if style == "walk":
        block = min(power_of_two(cols), 1024)
        tile = 2048 if live <= 6 else 1024
        high = max(1, min(tile // block, power_of_two(kernel.rows)))
        # With batch dims a program may have few elements; then it gets few threads.
        return Schedule(block, 1, high, max(1, min(4, block * high // 512)) if kernel.batch else 4, 3, 6)
    block, chunks = column_chunks(cols, 16384, 4)
    width = block * chunks
    most = ROW_REGISTERS_SUMS if sums else ROW_REGISTERS
    if sums and widest_element(kernel) == 4 and device.shared_bytes < row_schedule.SM90_SHARED:
        most = ROW_REGISTERS_SUMS_SM80
    if not chunks or width * live > most:
        if sums:
            return Schedule(2048, 0, min(2, power_of_two(kernel.rows)), 8, waves=2)
        return Schedule(2048, 0, 1, 8)
    tile = max(1, min(max(16, 256 // width), (2048 if sums else 1024) // width))
    light = bool(kernel.batch) and live <= 2.5  # many short programs with little latency to hide
    if light:
        tile = max(1, (2048 if width <= 64 else 4096) // width)
    while (
        has_transposed_access(kernel) and tile < 16 and width * tile * 2 * live <= most
    ):  # 16 contiguous elements are 32 bytes
        tile *= 2
    tile = min(tile, power_of_two(kernel.rows))
    elements = width * tile
    a_thread = 32 if live <= 2.5 and not sums and widest_element(kernel) == 2 else 16
    warps = max(1, min(16, elements // (32 * a_thread)))
    # Up to 8 warps cost little. Beyond 8, the exchange for a row reduction costs more than registers.
    while warps < 16 and elements // (32 * warps) * live > (
        THREAD_REGISTERS if not sums else THREAD_REGISTERS_SUMS if warps >= 8 else 96
    ):
        warps *= 2
    warps = power_of_two(warps)
    if not sums:
        # Two programs fit on a multiprocessor; to fit three, the compiler would spill.
        two = 64 if warps == 16 and 32 < elements // (32 * warps) * live <= 48 else 0
        return Schedule(block, chunks, tile, warps, registers=two)
    waves = max(1, 16 // warps)
    if light or (kernel.batch and width <= 256):
        return Schedule(block, chunks, tile, warps, 1, max(8, waves))
    # The next rows are prefetched into shared memory while this tile is summed.
    a_row = sum(i.dtype.itemsize for number, i in enumerate(kernel.inputs) if kernel.kind(number) == "full") * elements
    stages = max(1, min(3, (device.shared_bytes - row_schedule.RESERVED) // (waves * max(1, a_row))))
    return Schedule(block, chunks, tile, warps, stages, waves)


@cache
def inplace_pairs(kernel: Kernel) -> frozenset[tuple[int, int]]:
    """(output, input): an output that may overwrite an input, because each element is read where it is written.

    Both have the same access map, and each stored element is computed from the element that it replaces, so the store
    waits for the load. Each point of the space must have an element of its own: an element that several programs read
    must not be written.
    """
    pairs: set[tuple[int, int]] = set()
    for number, output in enumerate(kernel.outputs):
        for store in output.stores:
            if not all(s or n == 1 for s, n in zip(store.access_map.strides, kernel.space, strict=True)):
                continue
            sources = _pointwise_sources(kernel, store.value)
            for operand, tensor in enumerate(kernel.inputs):
                matches = (
                    tensor.access_map == store.access_map
                    and tensor.dtype == output.dtype
                    and tensor.shape == output.shape
                )
                if matches and operand in sources and operand not in shared_inputs(kernel):
                    pairs.add((number, operand))
    return frozenset(pairs)


def _pointwise_sources(kernel: Kernel, value: Ref) -> set[int]:
    """The values from whose own element `value`'s element is computed, with no reduction between."""
    reached, todo = set[int](), [value.index]
    while todo:
        current = todo.pop()
        if current in reached:
            continue
        reached.add(current)
        step = kernel.step(current)
        if step is not None and not OPS[step.op].reduces:
            todo += kernel.values_read(current)
    return reached
