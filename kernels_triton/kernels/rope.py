"""Rotary embedding: a program turns HEADS heads of one token, which share their angles. Y may be X.

Halves of a head are read where they lie, each once as itself and once, from the L1 cache, as the other's partner: a
warp then reads and writes whole lines in a row, and not every other one. Angles are to stay in the L2 cache, for the
keys after the queries and for the next layer.
"""

import triton
import triton.language as tl


@triton.jit
def _angles(COS, SIN, at, m, sign):
    cos = tl.load(COS + at, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return cos, tl.load(SIN + at, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32) * sign


@triton.jit
def rope(
    X, COS, SIN, Y, heads, x_batch, x_seq, x_head, y_batch, y_seq, y_head, cos_batch, cos_seq, sign,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    x = X + batch * x_batch + at * x_seq + h.to(tl.int64) * x_head
    y = Y + batch * y_batch + at * y_seq + h.to(tl.int64) * y_head
    if INTERLEAVED:
        # Neighbours are loaded together and taken apart in registers: loads stay wide.
        c = tl.arange(0, BLOCK)[None, :]
        p = tl.arange(0, 2 * BLOCK)[None, :]
        pm = (h < heads) & (p < 2 * HALF)
        pairs = tl.load(x + p, mask=pm, other=0.0).to(tl.float32)
        cos, sin = _angles(COS, SIN, batch * cos_batch + at * cos_seq + c, c < HALF, sign)
        a, b = tl.split(tl.reshape(pairs, (HEADS, BLOCK, 2)))
        out = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * BLOCK))
        tl.store(y + p, out.to(Y.dtype.element_ty), mask=pm)
    else:
        j = tl.arange(0, 2)[None, :, None]
        c = tl.arange(0, BLOCK)[None, None, :]
        m = (h < heads)[:, :, None] & (c < HALF)
        own = tl.load(x[:, :, None] + j * HALF + c, mask=m, other=0.0).to(tl.float32)
        other = tl.load(x[:, :, None] + (1 - j) * HALF + c, mask=m, other=0.0).to(tl.float32)
        cos, sin = _angles(COS, SIN, batch * cos_batch + at * cos_seq + c, c < HALF, sign)
        out = own * cos + other * tl.where(j == 0, -sin, sin)
        if IN_PLACE:  # every thread has read the partners before any overwrites them
            tl.debug_barrier()
        tl.store(y[:, :, None] + j * HALF + c, out.to(Y.dtype.element_ty), mask=m)
    if REST > 0:  # dims that do not turn, where Y is not X
        d = tl.arange(0, REST_BLOCK)[None, :]
        rm = (h < heads) & (d < REST)
        tl.store(y + 2 * HALF + d, tl.load(x + 2 * HALF + d, mask=rm, other=0.0), mask=rm)
