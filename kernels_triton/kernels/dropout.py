"""`residual + dropout(x + bias)`, its mask a function of (seed, op, global element index) and of no layout.

The numbers are those of `shardc::random_uniform`: Philox4x32-10 with the counter (index low, op, index high, 0), the
first word, read as Triton's `tl.rand` reads it; an element stays where its number is at least p. That is 34
instructions an element, more than its memory traffic leaves time for, so nothing else is spent: p comes as the least
word that stays (no conversion to float), what the rounds compute of constants alone they compute once a tile, and
forward keeps the mask, one bit an element, for backward to read. Tiles are [ROWS, BLOCK / 8, 8]: a byte of the mask is
of one thread.
"""

import triton
import triton.language as tl

from kernels_triton.kernels.philox import philox


@triton.jit
def _zero(x):
    """What is above the bits of x."""
    if x.dtype == tl.float32:
        zero = (x.to(tl.uint32, bitcast=True).to(tl.uint64) >> 32).to(tl.uint32)
    else:
        zero = x.to(tl.uint16, bitcast=True).to(tl.uint32) >> 16
    return zero


@triton.jit
def dropout_forward(
    X, B, RES, Y, KEEP, SEED, OFFSET, op_id, rows, x_stride, res_stride, least, scale,
    outer_stride, inner_stride, col_stride,
    INNER: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row r is element (r // INNER, r % INNER) of the two leading dims, whose global strides are given. Without OFFSET
    the first element is number 0; without KEEP the mask is not stored."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(COLS, BLOCK)
    start = (pid % blocks) * BLOCK
    c = start + tl.arange(0, BLOCK // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    r = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None, None]
    cm = c < COLS
    m = (r < rows) & cm
    r = r.to(tl.int64)
    loaded = tl.load(X + r * x_stride + c, mask=m, other=0.0)
    x = loaded.to(tl.float32)
    if B is not None:
        x += tl.load(B + c, mask=cm, other=0.0).to(tl.float32)
    if RES is not None:
        residual = tl.load(RES + r * res_stride + c, mask=m, other=0.0).to(tl.float32)
    seed = tl.load(SEED)
    op_word = (tl.zeros((), tl.int64) + op_id).to(tl.uint32)
    first = (r // INNER) * outer_stride + (r % INNER) * inner_stride + start * col_stride
    if OFFSET is not None:
        first += tl.load(OFFSET)
    # Plus 0: numbers that do not come of what was loaded would be made by other threads, and exchanged.
    steps = (c - start).to(tl.uint32) + _zero(loaded)
    # The tile's indices, if they share their high word: the smallest and the largest.
    low = tl.min(first)
    high = tl.max(first) + (BLOCK - 1) * col_stride
    if (low >> 32) == (high >> 32):
        index = first.to(tl.uint32) + steps * (tl.zeros((), tl.int64) + col_stride).to(tl.uint32)
        word = philox(index, op_word, (low >> 32).to(tl.uint32), tl.zeros((), tl.uint32), seed)
    else:
        wide = first + steps.to(tl.int64) * col_stride
        word = philox(wide.to(tl.uint32), op_word, (wide >> 32).to(tl.uint32), tl.zeros((), tl.uint32), seed)
    # Signed, folded to 31 bits: -1 - word where negative.
    word ^= (word.to(tl.int32) >> 31).to(tl.uint32)
    keep = word >= (tl.zeros((), tl.int64) + least).to(tl.uint32)
    y = tl.where(keep, x * scale, 0.0)
    if RES is not None:
        y += residual
    tl.store(Y + r * COLS + c, y.to(Y.dtype.element_ty), mask=m)
    if KEEP is not None:
        # Eight columns a byte, the first in the lowest bit.
        bits = tl.where(keep & m, 1 << tl.arange(0, 8)[None, None, :], 0)
        byte = (pid % blocks) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
        width: tl.constexpr = (COLS + 7) // 8
        rb = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        at = KEEP + rb.to(tl.int64) * width + byte
        tl.store(at, tl.sum(bits, 2).to(tl.uint8), mask=(rb < rows) & (byte < width))


@triton.jit
def dropout_backward(
    DY, KEEP, DX, DB, rows, dy_stride, scale,
    COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    program = tl.program_id(0) // blocks
    c = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    width: tl.constexpr = (COLS + 7) // 8
    b = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for t in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0) // blocks, num_stages=STAGES):
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        m = (r < rows) & (c < COLS)
        r = r.to(tl.int64)
        byte = tl.load(KEEP + r * width + b, mask=(r < rows) & (b < width), other=0).to(tl.int32)
        bits = (tl.expand_dims(byte, 2) >> tl.arange(0, 8)[None, None, :]) & 1
        dy = tl.load(DY + r * dy_stride + c, mask=m, other=0.0).to(tl.float32)
        dx = tl.where(tl.reshape(bits, (ROWS, BLOCK)) != 0, dy * scale, 0.0)
        tl.store(DX + r * COLS + c, dx.to(DX.dtype.element_ty), mask=m)
        if DB is not None:
            total += dx
    if DB is not None:
        tl.store(DB + program * COLS + c, tl.sum(total, 0, keep_dims=True), mask=c < COLS)
