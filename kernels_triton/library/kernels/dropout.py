"""`residual + dropout(x + bias)`. The mask is a function of (seed, op, global element index), and of no layout.

The numbers are those of `shardc::random_uniform`: four neighbours have the four words of one Philox4x32-10, and an
element is kept if its number is at least p. A Philox is 40 instructions. Half of them are multiplications at a quarter
of the usual rate, so little time is left beside the memory traffic. So p is passed as the least word that is kept (no
conversion to float), rounds that depend on constants only are computed once a tile, and forward keeps the mask, one bit
an element, for backward. Tiles are [ROWS, BLOCK / 8, 8]: one thread has a byte of the mask, and all words of a counter.
"""

import triton
import triton.language as tl

from kernels_triton.library.kernels.philox import at_least, shifted_word, strided_word, word_of, zero


@triton.jit
def dropout_forward(
    X, B, RES, Y, KEEP, SEED, OFFSET, op_id, rows, x_stride, res_stride, least, scale,
    outer_stride, inner_stride,
    COL_STRIDE: tl.constexpr, INNER: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row r is element (r // INNER, r % INNER) of the two leading dims, whose global strides are given. Without OFFSET
    the first element is number 0."""
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
    first = (r // INNER) * outer_stride + (r % INNER) * inner_stride + start.to(tl.int64) * COL_STRIDE
    # The tile's smallest and largest index: in most tiles all counters share the high word.
    low = tl.min(first)
    high = tl.max(first) + (BLOCK - 1) * COL_STRIDE
    aligned = ((tl.zeros((), tl.int64) + (outer_stride | inner_stride)) & 3) == 0
    if OFFSET is not None:
        offset = tl.load(OFFSET)
        first += offset
        low += offset
        high += offset
        aligned = aligned & ((offset & 3) == 0)
    at = tl.arange(0, 8)[None, None, :] + zero(loaded)
    group = tl.arange(0, BLOCK // 8)[None, :, None] * 2 + (at >> 2)
    if COL_STRIDE != 1:
        word = strided_word(seed, op_id, first + (group * 4 + (at & 3)).to(tl.int64) * COL_STRIDE)
    elif aligned & ((low >> 34) == (high >> 34)):
        word = word_of(seed, op_id, (first >> 2).to(tl.uint32) + group, (low >> 34).to(tl.uint32), at)
    else:
        word = shifted_word(seed, op_id, first, group, at)
    keep = at_least(word, least)
    y = tl.where(keep, x, 0.0) * scale
    if RES is not None:
        y += residual
    tl.store(Y + r * COLS + c, y.to(Y.dtype.element_ty), mask=m)
    # Eight columns a byte, the first in the lowest bit.
    if COLS % 8 != 0:
        keep = keep & cm
    bits = tl.where(keep, 1 << tl.arange(0, 8)[None, None, :], 0)
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
        tl.store(DB + program.to(tl.int64) * COLS + c, tl.sum(total, 0, keep_dims=True), mask=c < COLS)
