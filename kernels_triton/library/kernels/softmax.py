"""Softmax of rows, scaled, with an additive or boolean mask and a causal edge; forward and backward.

Row r is query `r % QUERIES` of head `r // QUERIES % HEADS`; causal keeps column c where `c <= query + COLS - QUERIES`.
Columns past the edge are not read, neither in forward nor in backward. The edge of a load is rounded up to 16 columns,
because a mask that may end anywhere would make every load scalar. The exact edge is applied in registers. A fully
masked row is all zeros, as in torch's attention. Backward: `dx = scale * y * (dy - sum(dy * y))`.

Long causal rows compute only the blocks up to the edge, with separate code for each number of blocks. Columns past
these are stored as zeros at once. The longest rows come first, so that short rows fill the end.
"""

import triton
import triton.language as tl


@triton.jit
def _read(X, r, x_stride, c, m, scale, MASK, mask_row, edge, CAUSAL: tl.constexpr):
    """A block of logits, scaled and masked; minus infinity in masked columns."""
    if CAUSAL:
        m = m & (c < (edge // 16 + 1) * 16)
    x = tl.load(X + r * x_stride + c, mask=m, other=0.0).to(tl.float32) * scale
    if MASK is not None:
        mask = tl.load(MASK + mask_row + c, mask=m, other=0)
        if MASK.dtype.element_ty == tl.int8:
            x = tl.where(mask != 0, x, float("-inf"))
        else:
            x += mask.to(tl.float32)
    if CAUSAL:
        m = m & (c <= edge)
    return tl.where(m, x, float("-inf"))


@triton.jit
def _mask_row(r, QUERIES: tl.constexpr, HEADS: tl.constexpr, batch_stride, head_stride, query_stride):
    group = r // QUERIES
    return (group // HEADS) * batch_stride + (group % HEADS) * head_stride + (r % QUERIES) * query_stride


@triton.jit
def _exponentials(xs, CHUNKS: tl.constexpr, DIM: tl.constexpr):
    """exp(x - maximum) for all chunks of a row, which lies along DIM, and the reciprocal of their sum."""
    tops = xs[0]
    for i in tl.static_range(1, CHUNKS):
        tops = tl.maximum(tops, xs[i])
    top = tl.max(tops, DIM, keep_dims=True)
    top = tl.where(top == float("-inf"), 0.0, top)
    es = ()
    for i in tl.static_range(CHUNKS):
        e = tl.exp(xs[i] - top)
        es = es + (e,)
        if i == 0:
            totals = e
        else:
            totals += e
    total = tl.sum(totals, DIM, keep_dims=True)
    inverse = 1.0 / total
    inverse = tl.where(total == 0.0, 0.0, inverse)
    return es, inverse


@triton.jit
def _forward_tile(
    t, X, MASK, Y, rows, x_stride, scale, batch_stride, head_stride, query_stride,
    COLS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The t-th ROWS rows."""
    c = tl.arange(0, BLOCK)[None, :]
    r = t * ROWS + tl.arange(0, ROWS)[:, None]
    rm = r < rows
    edge = r % QUERIES + (COLS - QUERIES)
    r = r.to(tl.int64)
    mask_row = r * 0
    if MASK is not None:
        mask_row = _mask_row(r, QUERIES, HEADS, batch_stride, head_stride, query_stride)
    xs = ()
    for i in tl.static_range(CHUNKS):
        m = rm & (i * BLOCK + c < COLS)
        x = _read(X, r, x_stride, i * BLOCK + c, m, scale, MASK, mask_row, edge, CAUSAL)
        xs = xs + (x,)
    es, inverse = _exponentials(xs, CHUNKS, 1)
    for i in tl.static_range(CHUNKS):
        m = rm & (i * BLOCK + c < COLS)
        tl.store(Y + r * COLS + i * BLOCK + c, (es[i] * inverse).to(Y.dtype.element_ty), mask=m)


@triton.jit
def softmax_forward(
    X, MASK, Y, rows, x_stride, scale, batch_stride, head_stride, query_stride,
    COLS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """ONCE: a program has one tile, and no loop."""
    if ONCE:
        _forward_tile(
            tl.program_id(0), X, MASK, Y, rows, x_stride, scale, batch_stride, head_stride, query_stride,
            COLS, QUERIES, HEADS, CAUSAL, CHUNKS, BLOCK, ROWS,
        )  # fmt: skip
    else:
        for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _forward_tile(
                t, X, MASK, Y, rows, x_stride, scale, batch_stride, head_stride, query_stride,
                COLS, QUERIES, HEADS, CAUSAL, CHUNKS, BLOCK, ROWS,
            )  # fmt: skip


@triton.jit
def _descending(row, QUERIES: tl.constexpr):
    """A program's row: the last query of each head first."""
    query = row % QUERIES
    return row - query + (QUERIES - 1 - query)


@triton.jit
def _seen_forward(
    X, Y, r, x_stride, scale, MASK, mask_row, edge,
    COLS: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row whose edge lies in the last of its first SEEN blocks."""
    c = tl.arange(0, BLOCK)
    xs = ()
    for i in tl.static_range(SEEN):
        x = _read(X, r, x_stride, i * BLOCK + c, i * BLOCK + c < COLS, scale, MASK, mask_row, edge, i == SEEN - 1)
        xs = xs + (x,)
    es, inverse = _exponentials(xs, SEEN, 0)
    for i in tl.static_range(SEEN):
        tl.store(Y + r * COLS + i * BLOCK + c, (es[i] * inverse).to(Y.dtype.element_ty), mask=i * BLOCK + c < COLS)


@triton.jit
def causal_forward(
    X, MASK, Y, x_stride, scale, batch_stride, head_stride, query_stride,
    COLS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    r = _descending(tl.program_id(0), QUERIES)
    edge = r % QUERIES + (COLS - QUERIES)
    r = r.to(tl.int64)
    mask_row = r * 0
    if MASK is not None:
        mask_row = _mask_row(r, QUERIES, HEADS, batch_stride, head_stride, query_stride)
    seen = tl.maximum(edge, 0) // BLOCK + 1
    c = tl.arange(0, BLOCK)
    for i in tl.static_range(1, CHUNKS):
        if i >= seen:
            tl.store(Y + r * COLS + i * BLOCK + c, tl.zeros((BLOCK,), Y.dtype.element_ty), mask=i * BLOCK + c < COLS)
    for k in tl.static_range(1, CHUNKS + 1):
        if seen == k:
            _seen_forward(X, Y, r, x_stride, scale, MASK, mask_row, edge, COLS, k, BLOCK)


@triton.jit
def softmax_forward_looped(
    X, MASK, Y, rows, x_stride, scale, batch_stride, head_stride, query_stride,
    COLS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: maximum and sum in one pass, then the row again."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    edge = (r % QUERIES).to(tl.int32) + (COLS - QUERIES)
    mask_row = r * 0
    if MASK is not None:
        mask_row = _mask_row(r, QUERIES, HEADS, batch_stride, head_stride, query_stride)
    end = COLS
    if CAUSAL:
        end = tl.minimum(COLS, tl.maximum(edge + 1, 0))
    top = float("-inf")
    total = 0.0
    for start in tl.range(0, end, BLOCK):
        x = _read(X, r, x_stride, start + c, start + c < COLS, scale, MASK, mask_row, edge, CAUSAL)
        now = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe), 0)
        top = now
    inverse = 1.0 / total
    top = tl.where(top == float("-inf"), 0.0, top)
    inverse = tl.where(total == 0.0, 0.0, inverse)
    for start in tl.range(0, COLS, BLOCK):
        x = _read(X, r, x_stride, start + c, start + c < COLS, scale, MASK, mask_row, edge, CAUSAL)
        y = tl.exp(x - top) * inverse
        tl.store(Y + r * COLS + start + c, y.to(Y.dtype.element_ty), mask=start + c < COLS)


@triton.jit
def _backward_tile(
    t, DY, Y, DX, rows, dy_stride, y_stride, scale, COLS: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The t-th ROWS rows. AGAIN: they are reread for the gradient, from a cache."""
    kept: tl.constexpr = "evict_last" if AGAIN else ""
    c = tl.arange(0, BLOCK)[None, :]
    r = t * ROWS + tl.arange(0, ROWS)[:, None]
    rm = r < rows
    edge = r % QUERIES + (COLS - QUERIES)
    r = r.to(tl.int64)
    ys = ()
    gs = ()
    for i in tl.static_range(CHUNKS):
        m = rm & (i * BLOCK + c < COLS)
        if CAUSAL:
            m = m & (i * BLOCK + c < (edge // 16 + 1) * 16)
        y = tl.load(Y + r * y_stride + i * BLOCK + c, mask=m, other=0.0, eviction_policy=kept)
        g = tl.load(DY + r * dy_stride + i * BLOCK + c, mask=m, other=0.0, eviction_policy=kept)
        if CAUSAL:
            g = tl.where(i * BLOCK + c <= edge, g, 0.0)
            y = tl.where(i * BLOCK + c <= edge, y, 0.0)
        ys = ys + (y,)
        gs = gs + (g,)
        if i == 0:
            dots = y.to(tl.float32) * g.to(tl.float32)
        else:
            dots += y.to(tl.float32) * g.to(tl.float32)
    dot = tl.sum(dots, 1, keep_dims=True)
    for i in tl.static_range(CHUNKS):
        if AGAIN:
            m = rm & (i * BLOCK + c < COLS)
            y = tl.load(Y + r * y_stride + i * BLOCK + c, mask=m, other=0.0, eviction_policy="evict_first")
            g = tl.load(DY + r * dy_stride + i * BLOCK + c, mask=m, other=0.0, eviction_policy="evict_first")
        else:
            y = ys[i]
            g = gs[i]
        dx = scale * y.to(tl.float32) * (g.to(tl.float32) - dot)
        tl.store(
            DX + r * COLS + i * BLOCK + c, dx.to(DX.dtype.element_ty), mask=rm & (i * BLOCK + c < COLS)
        )  # fmt: skip


@triton.jit
def softmax_backward(
    DY, Y, DX, rows, dy_stride, y_stride, scale, COLS: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ONCE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    if ONCE:
        _backward_tile(
            tl.program_id(0), DY, Y, DX, rows, dy_stride, y_stride, scale,
            COLS, QUERIES, CAUSAL, CHUNKS, BLOCK, ROWS, AGAIN,
        )  # fmt: skip
    else:
        for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _backward_tile(
                t, DY, Y, DX, rows, dy_stride, y_stride, scale, COLS, QUERIES, CAUSAL, CHUNKS, BLOCK, ROWS, AGAIN
            )


@triton.jit
def _seen_backward(
    DY, Y, DX, r, dy_stride, y_stride, scale, edge, COLS: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr
):
    """A row whose edge lies in the last of its first SEEN blocks."""
    c = tl.arange(0, BLOCK)
    ys = ()
    gs = ()
    for i in tl.static_range(SEEN):
        m = i * BLOCK + c < COLS
        if i == SEEN - 1:
            m = m & (i * BLOCK + c < (edge // 16 + 1) * 16)
        y = tl.load(Y + r * y_stride + i * BLOCK + c, mask=m, other=0.0)
        g = tl.load(DY + r * dy_stride + i * BLOCK + c, mask=m, other=0.0)
        if i == SEEN - 1:
            g = tl.where(i * BLOCK + c <= edge, g, 0.0)
            y = tl.where(i * BLOCK + c <= edge, y, 0.0)
        ys = ys + (y,)
        gs = gs + (g,)
        if i == 0:
            dots = y.to(tl.float32) * g.to(tl.float32)
        else:
            dots += y.to(tl.float32) * g.to(tl.float32)
    dot = tl.sum(dots, 0)
    for i in tl.static_range(SEEN):
        dx = scale * ys[i].to(tl.float32) * (gs[i].to(tl.float32) - dot)
        tl.store(DX + r * COLS + i * BLOCK + c, dx.to(DX.dtype.element_ty), mask=i * BLOCK + c < COLS)


@triton.jit
def causal_backward(
    DY, Y, DX, dy_stride, y_stride, scale,
    COLS: tl.constexpr, QUERIES: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    r = _descending(tl.program_id(0), QUERIES)
    edge = r % QUERIES + (COLS - QUERIES)
    r = r.to(tl.int64)
    seen = tl.maximum(edge, 0) // BLOCK + 1
    c = tl.arange(0, BLOCK)
    for i in tl.static_range(1, CHUNKS):
        if i >= seen:
            tl.store(DX + r * COLS + i * BLOCK + c, tl.zeros((BLOCK,), DX.dtype.element_ty), mask=i * BLOCK + c < COLS)
    for k in tl.static_range(1, CHUNKS + 1):
        if seen == k:
            _seen_backward(DY, Y, DX, r, dy_stride, y_stride, scale, edge, COLS, k, BLOCK)


@triton.jit
def softmax_backward_looped(
    DY, Y, DX, rows, dy_stride, y_stride, scale,
    COLS: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    edge = (r % QUERIES).to(tl.int32) + (COLS - QUERIES)
    end = COLS
    if CAUSAL:
        end = tl.minimum(COLS, tl.maximum(edge + 1, 0))
    dots = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, end, BLOCK):
        m = start + c < COLS
        if CAUSAL:
            m = m & (start + c < (edge // 16 + 1) * 16)
        y = tl.load(Y + r * y_stride + start + c, mask=m, other=0.0).to(tl.float32)
        g = tl.load(DY + r * dy_stride + start + c, mask=m, other=0.0).to(tl.float32)
        if CAUSAL:
            g = tl.where(start + c <= edge, g, 0.0)
            y = tl.where(start + c <= edge, y, 0.0)
        dots += y * g
    dot = tl.sum(dots, 0)
    for start in tl.range(0, COLS, BLOCK):
        m = start + c < COLS
        seen = m
        if CAUSAL:
            seen = m & (start + c < (edge // 16 + 1) * 16)
        y = tl.load(Y + r * y_stride + start + c, mask=seen, other=0.0).to(tl.float32)
        g = tl.load(DY + r * dy_stride + start + c, mask=seen, other=0.0).to(tl.float32)
        if CAUSAL:
            g = tl.where(start + c <= edge, g, 0.0)
            y = tl.where(start + c <= edge, y, 0.0)
        dx = scale * y * (g - dot)
        tl.store(DX + r * COLS + start + c, dx.to(DX.dtype.element_ty), mask=m)
