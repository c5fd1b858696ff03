"""Every row kernel sees a tensor as rows: `[rows, cols]`, contiguous columns, one stride between rows.

`as_rows` finds that view, and copies only where there is none (columns that are not contiguous, or leading dims that
do not collapse into one stride). `schedule` cuts the rows into tiles: `chunks` blocks of a power of two of columns,
held in registers together, so that 12288 columns are 3 x 4096 and not 16384 with a quarter masked off; rows that do
not fit are looped over. Measured figures come from a table (kernels_triton.tables); sizes decide
where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from kernels_triton import launch, tables

# Columns of a row that one program holds at most, by bytes an element: more would spill (the gate says so).
FORWARD_COLS = {2: 16384, 4: 12288}
BACKWARD_COLS = {2: 12288, 4: 8192}
KEPT_CHUNKS = 12  # of 16 bytes, that a thread of cross-entropy keeps at most
RESERVED = 5 << 10  # of shared memory, for what threads exchange when they sum
NEWER = 200 << 10  # of shared memory a program may have on sm_90, and not on sm_80, whose compiler holds less


@dataclass(frozen=True)
class Schedule:
    """`waves` programs a multiprocessor share all tiles of `rows` rows; 0: each tile has a program of its own.

    `chunks` 0 means that rows are looped over, `block` columns at a time. `stages`: tiles in flight a program.
    """

    block: int
    chunks: int = 1
    rows: int = 1
    warps: int = 4
    stages: int = 1
    waves: int = 0
    registers: int = 0  # a thread, of a kernel of which several programs are to share a multiprocessor
    again: bool = False  # a row is read again, from a cache, rather than kept in registers: more programs fit

    @property
    def persistent(self) -> dict[str, int]:
        """What a kernel takes that holds its rows in registers."""
        shape = {"CHUNKS": self.chunks, "BLOCK": self.block, "ROWS": self.rows, "STAGES": self.stages}
        return {**shape, "warps": self.warps}

    def group(self, x: Tensor) -> int:
        """Neighbouring columns that a thread loads at once: 16 bytes."""
        return min(self.block, 16 // x.element_size())

    def programs(self, rows: int, x: Tensor) -> int:
        """How many programs to launch for so many rows."""
        tiles = -(-rows // self.rows)
        return tiles if self.waves == 0 else min(tiles, self.waves * launch.device_of(x).sms)

    def tiles(self, rows: int, cols: int) -> int:
        """Programs of a grid of tiles, columns first."""
        return -(-rows // self.rows) * -(-cols // self.block)

    def walk(self, rows: int, cols: int, x: Tensor) -> tuple[int, int]:
        """(blocks of columns, programs that share the rows): neighbouring programs are neighbours in memory."""
        blocks, tiles = -(-cols // self.block), -(-rows // self.rows)
        shared = max(1, self.waves * launch.device_of(x).sms // blocks)
        return blocks, min(tiles, shared) if self.waves else tiles


LOOPED = Schedule(2048, 0, rows=4, warps=8, waves=2)  # of a kernel that also sums over rows
# Of columns that are moved one by one, each takes an address and a mask: registers hold rows of so many at the most.
SINGLY = replace(LOOPED, block=1024, rows=2)
SINGLE_COLS = 6144


def singly(x: Tensor, cols: int) -> bool:
    """Are columns moved one by one? No 16 bytes of such rows are known to lie where 16 bytes can be loaded."""
    unit = 16 // x.element_size()
    return bool(cols % unit) or (x.dim() > 1 and bool(x.stride(-2) % unit))


def looped(x: Tensor, cols: int) -> Schedule:
    """For rows that pass twice, wherever they begin."""
    return SINGLY if singly(x, cols) else LOOPED


def as_rows(x: Tensor) -> Tensor:
    """`[rows, cols]` with contiguous columns: a view where one exists."""
    if x.dim() == 0 or x.numel() == 0:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return x.contiguous().view(-1, x.shape[-1])


def row_stride(x: Tensor | None) -> int:
    """Elements between rows; 0 for none."""
    return 0 if x is None or x.shape[0] <= 1 else x.stride(0)


def leading(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """All dims but the last as two: (size of the inner, the outer's stride, the inner's). None if they are more."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    (_, outer), (size, inner) = [(1, 0)] * (2 - len(merged)) + merged
    return size, outer, inner


def leading_three(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """All dims but the last as three, (size, stride) each; None if they are more."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        elif size > 1:
            merged.append((size, stride))
    return None if len(merged) > 3 else (*[(1, 0)] * (3 - len(merged)), *merged)


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cut(cols: int, largest: int, most: int) -> tuple[int, int]:
    """(block, chunks) covering `cols` with the least padding, then the fewest chunks; (largest, 0) if none does."""
    smallest = min(power_of_two(cols), 1024)
    options = [
        (block * chunks, chunks, block)
        for chunks in range(1, most + 1)
        for block in [max(smallest, power_of_two(-(-cols // chunks)))]
        if block <= largest and block * chunks >= cols
    ]
    if not options:
        return largest, 0
    _, chunks, block = min(options)
    return block, chunks


def forward_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For a kernel that holds one or two values a column."""
    block, chunks = cut(cols, 16384, 4) if cols <= FORWARD_COLS[x.element_size()] else (8192 // x.element_size(), 0)
    if not chunks:
        return tabled(name, x, cols, Schedule(block, 0, warps=8))
    width = block * chunks
    rows = max(1, min(16, 1024 // width))
    a_thread, most = (32, 16) if x.element_size() == 2 else (16, 32)  # the row stays in registers, as it was loaded
    return tabled(name, x, cols, Schedule(block, chunks, rows, warps=_warps(width * rows, a_thread, most)))


def backward_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For a kernel that also sums over rows: two accumulators a column stay in registers as rows stream by."""
    size = x.element_size()
    if singly(x, cols) and cols > SINGLE_COLS:
        return _trial.get(name, SINGLY)  # tables are of rows that are moved 16 bytes at a time
    if cols > BACKWARD_COLS[size]:
        return tabled(name, x, cols, LOOPED)
    block, chunks = cut(cols, 8192, 4)
    width = block * chunks
    rows = max(1, min(32 // size, 4096 // (width * size)))
    warps = _warps(width * rows, 16, 16)
    waves = max(1, 16 // warps)
    # Rows ahead are fetched into shared memory while this one is summed: x, dy and the residual's gradient.
    shared = launch.device_of(x).shared_bytes - RESERVED
    deepest = 3 if shared > NEWER else 2
    stages = max(1, min(deepest, shared // (waves * 3 * width * rows * size)))
    if width > 8192 and stages < 3:  # without the full pipeline, rows this wide spill
        return tabled(name, x, cols, LOOPED)
    return tabled(name, x, cols, Schedule(block, chunks, rows, warps, stages, waves))


def tile_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For pointwise kernels: tiles of 1024 elements, so that a thread loads 16 bytes of each operand."""
    block = min(max(16, power_of_two(cols)), 1024)
    return tabled(name, x, cols, Schedule(block, 1, 1024 // block, 4))


def head_schedule(name: str, x: Tensor, heads: int, block: int) -> Schedule:
    """For kernels that turn heads, `block` pairs each: a thread of 128 loads 16 bytes of either half."""
    size = x.element_size()
    count = max(1, min(256, 2048 // size // block))
    return tabled(name, x, heads * x.shape[-1], Schedule(block, 1, count, max(1, min(8, count * block * size // 512))))


def walking_schedule(name: str, x: Tensor, cols: int, sums: bool) -> Schedule:
    """With sums over rows few programs, each of which walks down a block of columns; else a program a tile, and
    nothing of what a table has of the op, which was measured with sums."""
    if not sums:
        return tile_schedule(f"{name}_tiles", x, cols)
    block = min(max(16, power_of_two(cols)), 512)
    return tabled(name, x, cols, Schedule(block, 1, 2048 // block, 4, 2, 8))


def vocabulary_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For rows that are read once: each has a small program, of which many share a multiprocessor."""
    block = min(max(16, power_of_two(cols)), 4096 // x.element_size())
    return tabled(name, x, cols, Schedule(block, 0, 1, max(1, min(4, block // 256)), stages=3))


def flat_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For blocks of a row that have a program each: a few loads of 16 bytes a thread."""
    block = min(max(16, power_of_two(cols)), 4096 // x.element_size())
    return tabled(name, x, cols, Schedule(block, 1, 1, max(1, min(4, block * x.element_size() // 1024))))


def kept_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For rows as long as a vocabulary, of which registers keep what they can: 16 bytes a thread and block."""
    block = min(max(32, power_of_two(cols)), 8192 // x.element_size())
    warps = max(1, block * x.element_size() // 512)
    # What is streamed takes registers too; of float32, which is not unpacked from pairs, more is in flight.
    streaming = KEPT_CHUNKS - (4 if x.element_size() == 2 else 6)
    chunks = max(1, cols // block) if cols // block <= KEPT_CHUNKS else streaming
    return tabled(name, x, cols, Schedule(block, chunks, 1, warps, 6, max(1, 16 // warps)))


def _warps(elements: int, a_thread: int, most: int) -> int:
    """The most that leave a thread so many elements, or up to half as many more."""
    return 1 << max(0, min(most, elements // (32 * a_thread)).bit_length() - 1)


_trial: dict[str, Schedule] = {}


@contextmanager
def trying(name: str, schedule: Schedule) -> Generator[None]:
    """Within, the op `name` runs with this schedule: how schedules are compared."""
    _trial[name] = schedule
    try:
        yield
    finally:
        del _trial[name]


def tabled(name: str, x: Tensor, cols: int, guess: Schedule) -> Schedule:
    """The measured schedule for this kernel, width and element size; the guess where there is none."""
    return measured(name, launch.device_of(x).name, cols, x.element_size(), guess)


def measured(name: str, device: str, cols: int, element: int, guess: Schedule) -> Schedule:
    """As `tabled`, for a device by name and elements of so many bytes."""
    if name in _trial:
        return _trial[name]
    for entry in tables.schedules(device).get(name, ()):
        low, high = entry["cols"]
        if low <= cols <= high and entry["bytes"] == element:
            return replace(guess, **entry["schedule"])
    return guess
