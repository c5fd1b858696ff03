"""LayerNorm and RMSNorm, with the residual added before, forward and backward.

A tile is `ROWS` rows of `CHUNKS x BLOCK` columns. Forward: `h = x + residual` rounded to its dtype (backward will read
it so), statistics of h in two passes over registers, `y = (h - mean) * rstd * w + b`. Backward, with
`xhat = (h - mean) * rstd`, `g = dy * w` and means over the row:

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + the gradient that reaches h beside the norm
    dw = sum over rows of dy * xhat,   db = sum over rows of dy

The sums over rows stay in the registers of a few persistent programs, which write one partial row each; `column_sums`
adds those in a fixed order. RMSNorm is the same without the mean (`MEAN` is None).
"""

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    X, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)[None, :]
    # Weights are asked for before the row: the statistics' exchanges between threads would only delay them.
    ws = ()
    bs = ()
    for i in tl.static_range(CHUNKS):
        if W is not None:
            ws = ws + (tl.load(W + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0),)
        if B is not None:
            bs = bs + (tl.load(B + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0),)
    for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        rm = r < rows
        r = r.to(tl.int64)
        xs = ()
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for i in tl.static_range(CHUNKS):
            m = rm & (i * BLOCK + c < COLS)
            x = tl.load(X + r * x_stride + i * BLOCK + c, mask=m, other=0.0).to(tl.float32)
            if RES is not None:
                x += tl.load(RES + r * res_stride + i * BLOCK + c, mask=m, other=0.0).to(tl.float32)
                h = x.to(SUM.dtype.element_ty)
                tl.store(SUM + r * COLS + i * BLOCK + c, h, mask=m)
                x = h.to(tl.float32)
            xs = xs + (x,)
            total += x
        mean = tl.zeros((ROWS, 1), tl.float32)
        if MEAN is not None:
            mean = tl.sum(total, 1, keep_dims=True) / COLS
        squares = tl.zeros((ROWS, BLOCK), tl.float32)
        for i in tl.static_range(CHUNKS):
            d = xs[i]
            if MEAN is not None:
                d = tl.where(i * BLOCK + c < COLS, d - mean, 0.0)
            squares += d * d
        rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / COLS + eps)
        if MEAN is not None:
            tl.store(MEAN + r, mean, mask=rm)
        tl.store(RSTD + r, rstd, mask=rm)
        for i in tl.static_range(CHUNKS):
            cm = i * BLOCK + c < COLS
            y = xs[i]
            if MEAN is not None:
                y -= mean
            y *= rstd
            if W is not None:
                y *= ws[i].to(tl.float32)
            if B is not None:
                y += bs[i].to(tl.float32)
            tl.store(Y + r * COLS + i * BLOCK + c, y.to(Y.dtype.element_ty), mask=rm & cm)


@triton.jit
def norm_forward_looped(
    X, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps, COLS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program. Chunks' means and squared deviations are merged as Chan's: no cancellation in long rows."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mean = 0.0
    squares = 0.0
    for start in tl.range(0, COLS, BLOCK):
        m = start + c < COLS
        x = tl.load(X + r * x_stride + start + c, mask=m, other=0.0).to(tl.float32)
        if RES is not None:
            x += tl.load(RES + r * res_stride + start + c, mask=m, other=0.0).to(tl.float32)
            h = x.to(SUM.dtype.element_ty)
            tl.store(SUM + r * COLS + start + c, h, mask=m)
            x = h.to(tl.float32)
        if MEAN is not None:
            count = tl.minimum(COLS - start, BLOCK).to(tl.float32)
            before = tl.zeros((), tl.float32) + start
            here = tl.sum(x, 0) / count
            d = tl.where(m, x - here, 0.0)
            delta = here - mean
            squares += tl.sum(d * d, 0) + delta * delta * (before * count / (before + count))
            mean += delta * (count / (before + count))
        else:
            squares += tl.sum(x * x, 0)
    rstd = tl.rsqrt(squares / COLS + eps)
    if MEAN is not None:
        tl.store(MEAN + r, mean)
    tl.store(RSTD + r, rstd)
    for start in tl.range(0, COLS, BLOCK):
        m = start + c < COLS
        y = tl.load(X + r * x_stride + start + c, mask=m, other=0.0).to(tl.float32)
        if RES is not None:  # read again rather than SUM, which other threads of the program may still be writing
            y += tl.load(RES + r * res_stride + start + c, mask=m, other=0.0).to(tl.float32)
            y = y.to(SUM.dtype.element_ty).to(tl.float32)
        if MEAN is not None:
            y -= mean
        y *= rstd
        if W is not None:
            y *= tl.load(W + start + c, mask=m, other=0.0).to(tl.float32)
        if B is not None:
            y += tl.load(B + start + c, mask=m, other=0.0).to(tl.float32)
        tl.store(Y + r * COLS + start + c, y.to(Y.dtype.element_ty), mask=m)


@triton.jit
def norm_backward(
    DY, X, W, MEAN, RSTD, DRES, DX, DW, DB, rows, dy_stride, x_stride, dres_stride,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)[None, :]
    dws = ()
    dbs = ()
    for _ in tl.static_range(CHUNKS):
        dws = dws + (tl.zeros((ROWS, BLOCK), tl.float32),)
        dbs = dbs + (tl.zeros((ROWS, BLOCK), tl.float32),)
    for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        rm = r < rows
        rstd = tl.load(RSTD + r, mask=rm, other=0.0)
        mean = tl.zeros((ROWS, 1), tl.float32)
        if MEAN is not None:
            mean = tl.load(MEAN + r, mask=rm, other=0.0)
        r = r.to(tl.int64)
        xs = ()
        gs = ()
        for i in tl.static_range(CHUNKS):
            m = rm & (i * BLOCK + c < COLS)
            xs = xs + (tl.load(X + r * x_stride + i * BLOCK + c, mask=m, other=0.0),)
            gs = gs + (tl.load(DY + r * dy_stride + i * BLOCK + c, mask=m, other=0.0),)
        mean_g = tl.zeros((ROWS, 1), tl.float32)
        mean_gx = tl.zeros((ROWS, 1), tl.float32)
        next_w = ()
        next_b = ()
        for i in tl.static_range(CHUNKS):
            # Columns past the end have dy = 0, which silences their xhat here.
            xhat = (xs[i].to(tl.float32) - mean) * rstd
            dy = gs[i].to(tl.float32)
            g = dy
            if W is not None:
                g = dy * tl.load(W + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0).to(tl.float32)
            # Chunk by chunk: adding whole chunks first would take registers that the sums over rows need.
            if MEAN is not None:
                mean_g += tl.sum(g, 1, keep_dims=True) / COLS
            mean_gx += tl.sum(g * xhat, 1, keep_dims=True) / COLS
            next_w = next_w + (dws[i] + dy * xhat if DW is not None else dws[i],)
            next_b = next_b + (dbs[i] + dy if DB is not None else dbs[i],)
        dws = next_w
        dbs = next_b
        for i in tl.static_range(CHUNKS):
            m = rm & (i * BLOCK + c < COLS)
            xhat = (xs[i].to(tl.float32) - mean) * rstd
            g = gs[i].to(tl.float32)
            if W is not None:
                g *= tl.load(W + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0).to(tl.float32)
            if MEAN is not None:
                g -= mean_g
            dx = (g - xhat * mean_gx) * rstd
            if DRES is not None:
                dx += tl.load(DRES + r * dres_stride + i * BLOCK + c, mask=m, other=0.0).to(tl.float32)
            tl.store(DX + r * COLS + i * BLOCK + c, dx.to(DX.dtype.element_ty), mask=m)
    for i in tl.static_range(CHUNKS):
        at = tl.program_id(0) * COLS + i * BLOCK + c
        if DW is not None:
            tl.store(DW + at, tl.sum(dws[i], 0, keep_dims=True), mask=i * BLOCK + c < COLS)
        if DB is not None:
            tl.store(DB + at, tl.sum(dbs[i], 0, keep_dims=True), mask=i * BLOCK + c < COLS)


@triton.jit
def norm_backward_looped(
    DY, X, W, MEAN, RSTD, DRES, DX, DW, DB, rows, dy_stride, x_stride, dres_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows too long for registers: read twice, the second time from the L2 cache. A program's sums over rows live in
    its own row of the partials, which it reads and writes once every ROWS rows."""
    c = tl.arange(0, BLOCK)[None, :]
    pid = tl.program_id(0)
    for t in tl.range(pid, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        later = tl.zeros((1, 1), tl.int32) + t != pid  # the first turn finds no sums yet
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        rm = r < rows
        rstd = tl.load(RSTD + r, mask=rm, other=0.0)
        mean = tl.zeros((ROWS, 1), tl.float32)
        if MEAN is not None:
            mean = tl.load(MEAN + r, mask=rm, other=0.0)
        r = r.to(tl.int64)
        mean_g = tl.zeros((ROWS, 1), tl.float32)
        mean_gx = tl.zeros((ROWS, 1), tl.float32)
        for start in tl.range(0, COLS, BLOCK):
            m = rm & (start + c < COLS)
            xhat = (tl.load(X + r * x_stride + start + c, mask=m, other=0.0).to(tl.float32) - mean) * rstd
            g = tl.load(DY + r * dy_stride + start + c, mask=m, other=0.0).to(tl.float32)
            if W is not None:
                g *= tl.load(W + start + c, mask=start + c < COLS, other=0.0).to(tl.float32)
            mean_g += tl.sum(g, 1, keep_dims=True)
            mean_gx += tl.sum(g * xhat, 1, keep_dims=True)
        mean_g /= COLS
        mean_gx /= COLS
        for start in tl.range(0, COLS, BLOCK):
            cm = start + c < COLS
            m = rm & cm
            xhat = (tl.load(X + r * x_stride + start + c, mask=m, other=0.0).to(tl.float32) - mean) * rstd
            dy = tl.load(DY + r * dy_stride + start + c, mask=m, other=0.0).to(tl.float32)
            g = dy
            if W is not None:
                g *= tl.load(W + start + c, mask=cm, other=0.0).to(tl.float32)
            if MEAN is not None:
                g -= mean_g
            dx = (g - xhat * mean_gx) * rstd
            if DRES is not None:
                dx += tl.load(DRES + r * dres_stride + start + c, mask=m, other=0.0).to(tl.float32)
            tl.store(DX + r * COLS + start + c, dx.to(DX.dtype.element_ty), mask=m)
            # Barriers order a program's writes before its reads of the next turn; nobody else touches this row.
            at = pid * COLS + start + c
            if DW is not None:
                dw = tl.sum(dy * xhat, 0, keep_dims=True)
                dw += tl.load(DW + at, mask=cm & later, other=0.0)
                tl.debug_barrier()
                tl.store(DW + at, dw, mask=cm)
            if DB is not None:
                db = tl.sum(dy, 0, keep_dims=True)
                db += tl.load(DB + at, mask=cm & later, other=0.0)
                tl.debug_barrier()
                tl.store(DB + at, db, mask=cm)
        tl.debug_barrier()


@triton.jit
def column_sums(P, Q, OUT_P, OUT_Q, rows, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The second stage: OUT[c] = sum of P[:, c] in a fixed order. Axis 1 of the grid: P, then Q."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    cm = c < COLS
    for which in tl.static_range(2):
        if tl.program_id(1) == which:
            source = P if which == 0 else Q
            target = OUT_P if which == 0 else OUT_Q
            if source is not None:
                total = tl.zeros((ROWS, BLOCK), tl.float32)
                for start in tl.range(0, rows, ROWS):
                    r = start + tl.arange(0, ROWS)[:, None]
                    total += tl.load(source + r.to(tl.int64) * COLS + c, mask=(r < rows) & cm, other=0.0)
                value = tl.sum(total, 0, keep_dims=True)
                tl.store(target + c, value.to(target.dtype.element_ty), mask=cm)
