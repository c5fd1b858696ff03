"""The gradient of an embedding: each of its rows is the sum of the rows of tokens with its index, or zeros.

Tokens come sorted by index, so those of one index are a run: STARTS[i] to STARTS[i + 1]. Each row of the gradient is
written once, by one program for a block of columns, so there is no pass that fills it with zeros, and sums have an
order. Or it is added to what is there: then only rows that have tokens are read and written. A run of more than LONG
tokens would keep its program busy while others are done. Such runs are summed by chunks of LONG places first
(`long_runs`), two rows of float32 a chunk: of the run that the chunk begins in, and of the one that begins in the chunk
and goes on behind it.

    places   0        64       128      192            a run from 40 to 170
    chunks   |  --->  |        |        |              parts[0, 1] + parts[1, 0] + parts[2, 0]
"""

import triton
import triton.language as tl


@triton.jit
def _sum(total, GRAD, ORDER, first, end, stride, c, COLS: tl.constexpr, TILE: tl.constexpr):
    """Adds the rows of the tokens at places `first` to `end`."""
    for place in tl.range(first, end, TILE):
        places = place + tl.arange(0, TILE)
        token = tl.load(ORDER + places, mask=places < end, other=0)
        here = (places < end)[:, None] & (c < COLS)[None, :]
        total += tl.sum(tl.load(GRAD + token[:, None] * stride + c[None, :], mask=here, other=0.0).to(tl.float32), 0)
    return total


@triton.jit
def long_runs(
    GRAD, INDEX, ORDER, STARTS, PARTS, tokens, classes, stride,
    COLS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = chunk * LONG, tl.minimum(chunk * LONG + LONG, tokens)
    index, last = tl.load(INDEX + begin).to(tl.int64), tl.load(INDEX + end - 1).to(tl.int64)
    there, last_there = (index >= 0) & (index < classes), (last >= 0) & (last < classes)
    first = tl.load(STARTS + index, mask=there, other=0)
    behind = tl.load(STARTS + index + 1, mask=there, other=0)
    if behind - first > LONG:
        total = _sum(tl.zeros((BLOCK,), tl.float32), GRAD, ORDER, begin, tl.minimum(behind, end), stride, c, COLS, TILE)
        tl.store(PARTS + 2 * chunk * COLS + c, total, mask=c < COLS)
    first = tl.load(STARTS + last, mask=last_there, other=0)
    behind = tl.load(STARTS + last + 1, mask=last_there, other=0)
    if (last != index) & (behind - first > LONG):
        total = _sum(tl.zeros((BLOCK,), tl.float32), GRAD, ORDER, first, end, stride, c, COLS, TILE)
        tl.store(PARTS + (2 * chunk + 1) * COLS + c, total, mask=c < COLS)


@triton.jit
def embedding_rows(
    GRAD, ORDER, STARTS, PARTS, DX, classes, stride, padding,
    COLS: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """A program writes a block of ROWS rows, or adds to them. The row of index `padding` gets zeros."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for number in tl.range(0, ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + number
        if row < classes:
            first = tl.load(STARTS + row)
            end = tl.where(row == padding, first, tl.load(STARTS + row + 1))
            total = tl.zeros((BLOCK,), tl.float32)
            if end - first > LONG:
                chunk = first // LONG
                begins = 2 * chunk + (first != chunk * LONG).to(tl.int64)
                total += tl.load(PARTS + begins * COLS + c, mask=c < COLS, other=0.0)
                for later in tl.range(chunk + 1, (end - 1) // LONG + 1, TILE):
                    chunks = later + tl.arange(0, TILE)
                    here = (chunks <= (end - 1) // LONG)[:, None] & (c < COLS)[None, :]
                    total += tl.sum(tl.load(PARTS + 2 * chunks[:, None] * COLS + c[None, :], mask=here, other=0.0), 0)
            else:
                total = _sum(total, GRAD, ORDER, first, end, stride, c, COLS, TILE)
            if ADD:
                there = (c < COLS) & (end > first)
                total += tl.load(DX + row * COLS + c, mask=there, other=0.0).to(tl.float32)
                tl.store(DX + row * COLS + c, total.to(DX.dtype.element_ty), mask=there)
            else:
                tl.store(DX + row * COLS + c, total.to(DX.dtype.element_ty), mask=c < COLS)
