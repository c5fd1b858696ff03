"""Rotary embedding: a program rotates ROWS heads, neighbours in memory, of one token or of several. Y may be X.

A thread reads both halves of its elements, each once. Programs follow the order of memory, and tiles are full for any
number of heads a token: 96 heads are six tiles of 16. The heads of a token read its angles from the caches, where the
angles should stay for the keys after the queries, and for the next layer.
"""

import triton
import triton.language as tl


@triton.jit
def _angles(COS, SIN, at, m, sign):
    cos = tl.load(COS + at, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return cos, tl.load(SIN + at, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32) * sign


@triton.jit
def rope(
    X, COS, SIN, Y, rows, x_batch, x_seq, x_head, y_batch, y_seq, y_head, cos_batch, sign,
    COUNT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token, which has COUNT heads. SHARED: Y is X, and threads may read what others write."""
    batch = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at, h = (r // COUNT).to(tl.int64), (r % COUNT).to(tl.int64)
    x = X + batch * x_batch + at * x_seq + h * x_head
    y = Y + batch * y_batch + at * y_seq + h * y_head
    c = tl.arange(0, BLOCK)
    if INTERLEAVED and BLOCK >= 4:  # a thread loads exactly the angles of its 16 bytes of pairs: no exchange
        c = tl.max_contiguous(c, [64 // X.dtype.element_ty.primitive_bitwidth])
    c = c[None, :]
    m = (r < rows) & (c < HALF)
    angles = batch * cos_batch + at * HALF + c
    if INTERLEAVED:
        # Neighbours are loaded together and separated in registers, so that loads stay wide.
        p = tl.arange(0, 2 * BLOCK)[None, :]
        pm = (r < rows) & (p < 2 * HALF)
        pairs = tl.load(x + p, mask=pm, other=0.0).to(tl.float32)
        cos, sin = _angles(COS, SIN, angles, m, sign)
        a, b = tl.split(tl.reshape(pairs, (ROWS, BLOCK, 2)))
        out = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, 2 * BLOCK))
        if SHARED:
            tl.debug_barrier()
        tl.store(y + p, out.to(Y.dtype.element_ty), mask=pm)
    else:
        a = tl.load(x + c, mask=m, other=0.0).to(tl.float32)
        b = tl.load(x + HALF + c, mask=m, other=0.0).to(tl.float32)
        cos, sin = _angles(COS, SIN, angles, m, sign)
        if SHARED:
            tl.debug_barrier()
        tl.store(y + c, (a * cos - b * sin).to(Y.dtype.element_ty), mask=m)
        tl.store(y + HALF + c, (b * cos + a * sin).to(Y.dtype.element_ty), mask=m)
    if REST > 0:  # dims that are not rotated, if Y is not X
        d = tl.arange(0, REST_BLOCK)[None, :]
        rm = (r < rows) & (d < REST)
        tl.store(y + 2 * HALF + d, tl.load(x + 2 * HALF + d, mask=rm, other=0.0), mask=rm)
