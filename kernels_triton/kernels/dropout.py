"""`residual + dropout(x + bias)`, its mask a function of (seed, op, global element index) and of no layout.

The numbers are those of `shardc::random_uniform`: Philox4x32-10 with the counter (index low, op, index high, 0), the
first word, read as Triton's `tl.rand` reads it; an element stays where its number is at least p. Ten rounds an element
cost more than its memory traffic, so forward keeps the mask, one bit an element, and backward reads that.
"""

import triton
import triton.language as tl


@triton.jit
def philox_uniform(seed, op_id, index):
    """float32 in [0, 1) for int64 element indices.

    Written out rather than `tl.philox`, whose high and low halves of a product are two multiplications; of a 64-bit
    product the compiler makes one (IMAD.WIDE), and multiplications are what the time goes into.
    """
    c0 = index.to(tl.uint32)
    c2 = (index >> 32).to(tl.uint32)
    c1 = (c0 * 0 + op_id).to(tl.uint32)
    c3 = c0 * 0
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return tl.uint_to_uniform_float(c0)


@triton.jit
def dropout_forward(
    X, B, RES, Y, KEEP, SEED, OFFSET, op_id, rows, x_stride, res_stride, p, scale,
    outer_stride, inner_stride, col_stride,
    INNER: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row r is element (r // INNER, r % INNER) of the two leading dims, whose global strides are given."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(COLS, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    r = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    m = (r < rows) & (c < COLS)
    r = r.to(tl.int64)
    first = tl.load(OFFSET) + (r // INNER) * outer_stride + (r % INNER) * inner_stride
    keep = philox_uniform(tl.load(SEED), op_id, first + c.to(tl.int64) * col_stride) >= p
    x = tl.load(X + r * x_stride + c, mask=m, other=0.0).to(tl.float32)
    if B is not None:
        x += tl.load(B + c, mask=c < COLS, other=0.0).to(tl.float32)
    y = tl.where(keep, x * scale, 0.0)
    if RES is not None:
        y += tl.load(RES + r * res_stride + c, mask=m, other=0.0).to(tl.float32)
    tl.store(Y + r * COLS + c, y.to(Y.dtype.element_ty), mask=m)
    # Eight columns a byte, the first in the lowest bit.
    bits = tl.reshape((keep & m).to(tl.int32), (ROWS, BLOCK // 8, 8)) << tl.arange(0, 8)[None, None, :]
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
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    width: tl.constexpr = (COLS + 7) // 8
    b = tl.program_id(1) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
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
        tl.store(DB + tl.program_id(0) * COLS + c, tl.sum(total, 0, keep_dims=True), mask=c < COLS)
