"""Row schedules. A row kernel sees a tensor as `[rows, cols]`: contiguous columns, and one stride between rows.

`as_rows` makes that view. It copies only if there is no such view (columns that are not contiguous, or leading dims
that do not merge into one stride). A `Schedule` cuts the rows into tiles of `chunks` blocks, each of a power of two of
columns, held in registers together. So 12288 columns are 3 x 4096, and not 16384 with a quarter masked. Rows that do
not fit are looped over. Measured schedules come from a table (kernels_triton.launch.tables); without an entry, sizes
decide.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from kernels_triton.launch import launch, tables

# The most columns of a row that one program holds, by bytes an element. More would spill, as the gate shows.
FORWARD_COLS = {2: 16384, 4: 12288}
BACKWARD_COLS = {2: 12288, 4: 8192}
KEPT_CHUNKS = 12  # the most chunks of 16 bytes that a thread of cross-entropy keeps
RESERVED = 5 << 10  # bytes of shared memory for the exchange between threads in sums
SM90_SHARED = 200 << 10  # bytes of shared memory: sm_90 has more than this for a program, sm_80 has less


@dataclass(frozen=True)
class Schedule:
    """`waves` programs a multiprocessor share all tiles of `rows` rows; 0 gives each tile a program of its own.

    `chunks` 0 means that rows are looped over, `block` columns at a time. `stages`: tiles in flight in a program.
    """

    block: int
    chunks: int = 1
    rows: int = 1
    warps: int = 4
    stages: int = 1
    waves: int = 0
    registers: int = 0  # limit for a thread, so that several programs fit on a multiprocessor
    again: bool = False  # rereads a row from a cache instead of keeping it in registers: higher occupancy

    @property
    def persistent(self) -> dict[str, int]:
        """The constants of a kernel that holds its rows in registers."""
        shape = {"CHUNKS": self.chunks, "BLOCK": self.block, "ROWS": self.rows, "STAGES": self.stages}
        return {**shape, "warps": self.warps}

    def group(self, x: Tensor) -> int:
        """Neighbouring columns that a thread loads at once: 16 bytes."""
        return min(self.block, 16 // x.element_size())

    def programs(self, rows: int, x: Tensor) -> int:
        """The number of programs to launch for `rows` rows."""
        tiles = -(-rows // self.rows)
        return tiles if self.waves == 0 else min(tiles, self.waves * launch.device_of(x).sms)

    def tiles(self, rows: int, cols: int) -> int:
        """The number of programs of a grid of tiles, columns first."""
        return -(-rows // self.rows) * -(-cols // self.block)

    def column_grid(self, rows: int, cols: int, x: Tensor) -> tuple[int, int]:
        """(blocks of columns, programs that share the rows). Neighbouring programs are neighbours in memory."""
        blocks, tiles = -(-cols // self.block), -(-rows // self.rows)
        shared = max(1, self.waves * launch.device_of(x).sms // blocks)
        return blocks, min(tiles, shared) if self.waves else tiles


LOOPED_ROWS = Schedule(2048, 0, rows=4, warps=8, waves=2)  # for a kernel that also sums over rows
# A column that is moved on its own needs an address and a mask; registers hold rows of at most SINGLE_COLS of them.
LOOPED_SINGLE = replace(LOOPED_ROWS, block=1024, rows=2)
SINGLE_COLS = 6144


def moves_single_elements(x: Tensor, cols: int) -> bool:
    """Whether columns are moved one by one: rows are not known to be aligned to 16 bytes."""
    unit = 16 // x.element_size()
    return bool(cols % unit) or (x.dim() > 1 and bool(x.stride(-2) % unit))


def looped_schedule(x: Tensor, cols: int) -> Schedule:
    """A schedule that reads rows twice, for any alignment of the rows."""
    return LOOPED_SINGLE if moves_single_elements(x, cols) else LOOPED_ROWS


def as_rows(x: Tensor) -> Tensor:
    """`[rows, cols]` with contiguous columns: a view if there is one."""
    if x.dim() == 0 or x.numel() == 0:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return x.contiguous().view(-1, x.shape[-1])


def row_stride(x: Tensor | None) -> int:
    """Elements between rows; 0 for None."""
    return 0 if x is None or x.shape[0] <= 1 else x.stride(0)


def leading_dims(shape: Sequence[int], strides: Sequence[int], count: int) -> tuple[tuple[int, int], ...] | None:
    """All dims but the last, merged to `count` pairs of size and stride; None if more remain."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        elif size > 1:
            merged.append((size, stride))
    return None if len(merged) > count else (*[(1, 0)] * (count - len(merged)), *merged)


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def column_chunks(cols: int, largest: int, most: int) -> tuple[int, int]:
    """(block, chunks) that cover `cols` with the least padding, then the fewest chunks; (largest, 0) if no choice
    does."""
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
    block, chunks = (
        column_chunks(cols, 16384, 4) if cols <= FORWARD_COLS[x.element_size()] else (8192 // x.element_size(), 0)
    )
    if not chunks:
        return table_schedule(name, x, cols, Schedule(block, 0, warps=8))
    width = block * chunks
    rows = max(1, min(16, 1024 // width))
    a_thread, most = (32, 16) if x.element_size() == 2 else (16, 32)  # the row stays in registers in its loaded dtype
    return table_schedule(name, x, cols, Schedule(block, chunks, rows, warps=_warps(width * rows, a_thread, most)))


def backward_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For a kernel that also sums over rows: two accumulators a column stay in registers while rows are streamed."""
    size = x.element_size()
    if moves_single_elements(x, cols) and cols > SINGLE_COLS:
        return _trial.get(name, LOOPED_SINGLE)  # tables hold for rows that are moved 16 bytes at a time
    if cols > BACKWARD_COLS[size]:
        return table_schedule(name, x, cols, LOOPED_ROWS)
    block, chunks = column_chunks(cols, 8192, 4)
    width = block * chunks
    rows = max(1, min(32 // size, 4096 // (width * size)))
    warps = _warps(width * rows, 16, 16)
    waves = max(1, 16 // warps)
    # The next rows of x, dy and the residual's gradient are prefetched into shared memory while this row is summed.
    shared = launch.device_of(x).shared_bytes - RESERVED
    deepest = 3 if shared > SM90_SHARED else 2
    stages = max(1, min(deepest, shared // (waves * 3 * width * rows * size)))
    if width > 8192 and stages < 3:  # without all stages, rows of this width spill
        return table_schedule(name, x, cols, LOOPED_ROWS)
    return table_schedule(name, x, cols, Schedule(block, chunks, rows, warps, stages, waves))


def tile_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For pointwise kernels: tiles of 1024 elements, so that a thread loads 16 bytes of each operand."""
    block = min(max(16, power_of_two(cols)), 1024)
    return table_schedule(name, x, cols, Schedule(block, 1, 1024 // block, 4))


def head_schedule(name: str, x: Tensor, heads: int, block: int) -> Schedule:
    """For kernels that rotate heads of `block` pairs each: each of 128 threads loads 16 bytes of either half."""
    size = x.element_size()
    count = max(1, min(256, 2048 // size // block))
    return table_schedule(
        name, x, heads * x.shape[-1], Schedule(block, 1, count, max(1, min(8, count * block * size // 512)))
    )


def column_walk_schedule(name: str, x: Tensor, cols: int, sums: bool) -> Schedule:
    """With sums over rows: a few programs, each of which steps down a block of columns. Without sums: one program a
    tile. Then the op's table entries do not apply, since they were measured with sums."""
    if not sums:
        return tile_schedule(f"{name}_tiles", x, cols)
    block = min(max(16, power_of_two(cols)), 512)
    return table_schedule(name, x, cols, Schedule(block, 1, 2048 // block, 4, 2, 8))


def vocabulary_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For rows that are read once: each row has a small program, and many programs share a multiprocessor."""
    block = min(max(16, power_of_two(cols)), 4096 // x.element_size())
    return table_schedule(name, x, cols, Schedule(block, 0, 1, max(1, min(4, block // 256)), stages=3))


def row_block_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For blocks of a row with a program each: a few loads of 16 bytes a thread."""
    block = min(max(16, power_of_two(cols)), 4096 // x.element_size())
    return table_schedule(name, x, cols, Schedule(block, 1, 1, max(1, min(4, block * x.element_size() // 1024))))


def vocabulary_register_schedule(name: str, x: Tensor, cols: int) -> Schedule:
    """For rows as long as a vocabulary: registers keep as much of a row as fits, 16 bytes a thread and block."""
    block = min(max(32, power_of_two(cols)), 8192 // x.element_size())
    warps = max(1, block * x.element_size() // 512)
    # Streamed columns take registers too. float32 is not unpacked from pairs, so more of it is in flight.
    streaming = KEPT_CHUNKS - (4 if x.element_size() == 2 else 6)
    chunks = max(1, cols // block) if cols // block <= KEPT_CHUNKS else streaming
    return table_schedule(name, x, cols, Schedule(block, chunks, 1, warps, 6, max(1, 16 // warps)))


def _warps(elements: int, a_thread: int, most: int) -> int:
    """The most warps that leave a thread `a_thread` elements, or up to half as many more."""
    return 1 << max(0, min(most, elements // (32 * a_thread)).bit_length() - 1)


_trial: dict[str, Schedule] = {}


@contextmanager
def trying(name: str, schedule: Schedule) -> Generator[None]:
    """Within the context, op `name` runs with this schedule. Schedules are compared this way."""
    _trial[name] = schedule
    try:
        yield
    finally:
        del _trial[name]


def table_schedule(name: str, x: Tensor, cols: int, guess: Schedule) -> Schedule:
    """The measured schedule for this kernel, width and element size; `guess` if there is none."""
    return measured_schedule(name, launch.device_of(x).name, cols, x.element_size(), guess)


def measured_schedule(name: str, device: str, cols: int, element: int, guess: Schedule) -> Schedule:
    """As `table_schedule`, for a device's name and an element size in bytes."""
    if name in _trial:
        return _trial[name]
    for entry in tables.schedules(device).get(name, ()):
        low, high = entry["cols"]
        if low <= cols <= high and entry["bytes"] == element:
            return replace(guess, **entry["schedule"])
    return guess
