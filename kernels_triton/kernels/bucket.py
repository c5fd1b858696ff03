"""A tile of one member of a bucket, from its tensor to the flat one (`packed`) or back (`unpacked`).

In a row of the flat tensor a member of `lead x size x tail` lies as `chunk x LEAD x TAIL`: COLUMNS elements, and zeros
up to WIDTH. Where LEAD is 1 both sides are contiguous; elsewhere pieces of TAIL are. Element j of row r is of the dim
that is put together number r * CHUNK + c, and beyond SIZE there is none: zero in the flat tensor, and nothing in the
member. All sizes are constants, so a row that begins with 16 bytes is moved 16 bytes at a time; where COLUMNS is
no multiple of that and there is one row, what is left over is moved by itself, so that the rest still is.
"""

import triton
import triton.language as tl


@triton.jit
def place(
    row, j,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEAD: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Where in its member element j of a row is, and whether it is there."""
    m = j < COLUMNS
    if LEAD == 1:
        at = row * COLUMNS + j
        if ROWS * CHUNK != SIZE:
            m &= at < SIZE * TAIL
    else:
        piece = j // TAIL
        c = row * CHUNK + piece // LEAD
        at = ((piece % LEAD) * SIZE + c) * TAIL + j % TAIL
        if ROWS * CHUNK != SIZE:
            m &= c < SIZE
    return at, m


@triton.jit
def packed(
    FLAT, X, program,
    START: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LEAD: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, TILES: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Without X, a member that is in its place, only the zeros behind it are written."""
    if LONG:
        program = program.to(tl.int64)
    row, tile = program // TILES, program % TILES
    APART: tl.constexpr = ROWS == 1 and LEAD == 1 and COLUMNS != WIDTH
    whole = COLUMNS // UNIT * UNIT
    if X is not None:
        j = tile * BLOCK + tl.arange(0, BLOCK)
        at, there = place(row, j, ROWS, COLUMNS, LEAD, CHUNK, SIZE, TAIL)
        written = j < WIDTH
        if APART:
            written = j < whole
            there = written
        x = tl.load(X + at, mask=there, other=0)
        tl.store(FLAT + row * ROW + START + j, x, mask=written)
    if APART or X is None:  # noqa: SIM102  (a constant: what it is false for is not compiled)
        if tile == TILES - 1:
            k = whole + tl.arange(0, UNIT)
            if X is None:
                tl.store(FLAT + row * ROW + START + k, tl.zeros([UNIT], FLAT.dtype.element_ty), mask=k >= COLUMNS)
            else:
                rest = tl.load(X + k, mask=k < COLUMNS, other=0)
                tl.store(FLAT + START + k, rest)


@triton.jit
def unpacked(
    FLAT, X, program,
    START: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, LEAD: tl.constexpr, CHUNK: tl.constexpr,
    SIZE: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, TILES: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    if LONG:
        program = program.to(tl.int64)
    row, tile = program // TILES, program % TILES
    APART: tl.constexpr = ROWS == 1 and LEAD == 1 and COLUMNS != WIDTH
    whole = COLUMNS // UNIT * UNIT
    j = tile * BLOCK + tl.arange(0, BLOCK)
    at, there = place(row, j, ROWS, COLUMNS, LEAD, CHUNK, SIZE, TAIL)
    if APART:
        there = j < whole
    x = tl.load(FLAT + row * ROW + START + j, mask=there, other=0)
    tl.store(X + at, x, mask=there)
    if APART:  # noqa: SIM102
        if tile == TILES - 1:
            k = whole + tl.arange(0, UNIT)
            rest = tl.load(FLAT + START + k)
            tl.store(X + k, rest, mask=k < COLUMNS)
