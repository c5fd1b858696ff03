"""One tile of a bucket's member, copied from its tensor to the flat tensor (`packed`) or back (`unpacked`).

In a row of the flat tensor, a member of `lead x size x tail` lies as `chunk x LEAD x TAIL`: COLUMNS elements, then
zeros up to WIDTH. If LEAD is 1, both sides are contiguous; otherwise pieces of TAIL are. Element j of row r belongs to
index r * CHUNK + c of the dim that is gathered. Past SIZE there is no element: the flat tensor gets zero, and the
member nothing. All sizes are constants, so a row that is aligned to 16 bytes is moved 16 bytes at a time. If COLUMNS is
no multiple of that and there is one row, the remainder is moved on its own, so that the rest stays aligned.
"""

import triton
import triton.language as tl


@triton.jit
def place(
    row, j,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEAD: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """The index of element j of row r in its member, and whether the member has it."""
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
    """Without X the member already lies in its place, and only the zeros after it are written."""
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
