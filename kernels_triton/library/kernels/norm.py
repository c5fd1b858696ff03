"""LayerNorm and RMSNorm, with the residual added before, forward and backward.

A tile is `ROWS` rows of `CHUNKS x BLOCK` columns. Forward: `h = x + residual`, rounded to its dtype (as backward
reads it), statistics of h without cancellation, `y = (h - mean) * rstd * w + b`.
Backward, with `xhat = (h - mean) * rstd`, `g = dy * w` and means over the row:

    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + the gradient that reaches h beside the norm
    dw = sum over rows of dy * xhat,   db = sum over rows of dy,   dbefore = sum over rows of dx

The sums over rows stay in the registers of a few persistent programs, where a thread has GROUP neighbouring columns.
Each program writes one partial row, and `column_sums` adds these in a fixed order. RMSNorm is the same without the mean
(`MEAN` is None). Optional operands are None: BEFORE, a bias of x; RES; SUM; MORE, added to dy.
"""

import triton
import triton.language as tl

from kernels_triton.library.kernels.moments import EXACT, add, moments


@triton.jit
def _summed(X, BEFORE, RES, SUM, r, at, m, cm, x_stride, res_stride, kept: tl.constexpr):
    """The norm's operand: x + BEFORE + RES in columns `at`, rounded as SUM is; 0 where the masks `m` and `cm` are
    False."""
    x = tl.load(X + r * x_stride + at, mask=m, other=0.0, eviction_policy=kept).to(tl.float32)
    if BEFORE is not None:
        x += tl.load(BEFORE + at, mask=cm, other=0.0).to(tl.float32)
    if RES is not None:
        x += tl.load(RES + r * res_stride + at, mask=m, other=0.0).to(tl.float32)
    if SUM is not None:
        x = x.to(SUM.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _norm_tile(
    t, ws, bs, X, BEFORE, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HOLD: tl.constexpr, ONCE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The t-th ROWS rows. `ws` and `bs` are weight and bias, unless ONCE. AGAIN: rows are reread, from a cache."""
    kept: tl.constexpr = "evict_last" if AGAIN else ""
    c = tl.arange(0, BLOCK)[None, :]
    r = t * ROWS + tl.arange(0, ROWS)[:, None]
    rm = r < rows
    r = r.to(tl.int64)
    xs = ()
    for i in tl.static_range(CHUNKS):
        m = rm & (i * BLOCK + c < COLS)
        x = _summed(X, BEFORE, RES, SUM, r, i * BLOCK + c, m, i * BLOCK + c < COLS, x_stride, res_stride, kept)
        if SUM is not None:
            tl.store(SUM + r * COLS + i * BLOCK + c, x.to(SUM.dtype.element_ty), mask=m)
        xs = xs + (x,)
    if ONCE and HOLD:  # these loads are in flight while the row is summed
        ws, bs = _weights(W, B, c, COLS, CHUNKS, BLOCK)
    if MEAN is not None:
        bits: tl.constexpr = (X if SUM is None else SUM).dtype.element_ty.fp_mantissa_width  # of the summed operands
        short: tl.constexpr = (SUM is not None or (BEFORE is None and RES is None)) and COLS << bits <= EXACT
        first = 0.0
        if not short:
            at = tl.zeros((1, 1), tl.int32)
            first = _summed(X, BEFORE, RES, SUM, r, at, rm & (at < COLS), at < COLS, x_stride, res_stride, kept)
        mean, variance = moments(xs, c, first, COLS, CHUNKS, BLOCK, short)
        tl.store(MEAN + r, mean, mask=rm)
    else:
        squares = xs[0] * xs[0]
        for i in tl.static_range(1, CHUNKS):
            squares += xs[i] * xs[i]
        variance = tl.sum(squares, 1, keep_dims=True) / COLS
    rstd = tl.rsqrt(variance + eps)
    tl.store(RSTD + r, rstd, mask=rm)
    for i in tl.static_range(CHUNKS):
        cm = i * BLOCK + c < COLS
        if AGAIN:
            y = tl.load(X + r * x_stride + i * BLOCK + c, mask=rm & cm, other=0.0, eviction_policy="evict_first")
            y = y.to(tl.float32)
        else:
            y = xs[i]
        if MEAN is not None:
            y -= mean
        y *= rstd
        if W is not None:
            w = ws[i] if HOLD else tl.load(W + i * BLOCK + c, mask=cm, other=0.0, eviction_policy="evict_last")
            y *= w.to(tl.float32)
        if B is not None:
            b = bs[i] if HOLD else tl.load(B + i * BLOCK + c, mask=cm, other=0.0, eviction_policy="evict_last")
            y += b.to(tl.float32)
        tl.store(Y + r * COLS + i * BLOCK + c, y.to(Y.dtype.element_ty), mask=rm & cm)


@triton.jit
def _weights(W, B, c, COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight and bias. Every program reads them, so they should stay in the L2 cache."""
    ws = ()
    bs = ()
    for i in tl.static_range(CHUNKS):
        m = i * BLOCK + c < COLS
        if W is not None:
            ws = ws + (tl.load(W + i * BLOCK + c, mask=m, other=0.0, eviction_policy="evict_last"),)
        if B is not None:
            bs = bs + (tl.load(B + i * BLOCK + c, mask=m, other=0.0, eviction_policy="evict_last"),)
    return ws, bs


@triton.jit
def norm_forward(
    X, BEFORE, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, ONCE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """HOLD: weight and bias are loaded early and stay in registers; otherwise they are loaded at their use. ONCE: a
    program has one tile. A loop of one iteration costs up to 5 % of a short row's time."""
    if ONCE:
        _norm_tile(
            tl.program_id(0), (), (), X, BEFORE, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps,
            COLS, CHUNKS, BLOCK, ROWS, HOLD, True, AGAIN,
        )  # fmt: skip
    else:
        ws, bs = _weights(W, B, tl.arange(0, BLOCK)[None, :], COLS, CHUNKS, BLOCK)
        for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            _norm_tile(
                t, ws, bs, X, BEFORE, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps,
                COLS, CHUNKS, BLOCK, ROWS, True, False, AGAIN,
            )  # fmt: skip


@triton.jit
def norm_forward_looped(
    X, BEFORE, RES, SUM, W, B, Y, MEAN, RSTD, rows, x_stride, res_stride, eps,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program. Means and squared deviations of blocks are merged by Chan's formula, without cancellation in
    long rows. If a block's sum may be inexact, all numbers are differences from the mean of the first block, which
    is exact for equal numbers."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    bits: tl.constexpr = (X if SUM is None else SUM).dtype.element_ty.fp_mantissa_width  # of the summed operands
    short: tl.constexpr = (SUM is not None or (BEFORE is None and RES is None)) and BLOCK << bits <= EXACT
    pivot = 0.0
    if MEAN is not None and not short:
        at = tl.zeros((), tl.int32)
        pivot = _summed(X, BEFORE, RES, SUM, r, at, at < COLS, at < COLS, x_stride, res_stride, "")
        x = _summed(X, BEFORE, RES, SUM, r, c, c < COLS, c < COLS, x_stride, res_stride, "")
        pivot += tl.sum(tl.where(c < COLS, x - pivot, 0.0), 0) / min(COLS, BLOCK)
    mean = 0.0
    squares = 0.0
    for start in tl.range(0, COLS, BLOCK):
        m = start + c < COLS
        x = _summed(X, BEFORE, RES, SUM, r, start + c, m, m, x_stride, res_stride, "")
        if SUM is not None:
            tl.store(SUM + r * COLS + start + c, x.to(SUM.dtype.element_ty), mask=m)
        if MEAN is not None:
            count = tl.minimum(COLS - start, BLOCK).to(tl.float32)
            before = tl.zeros((), tl.float32) + start
            if not short:
                x = tl.where(m, x - pivot, 0.0)
            here = tl.sum(x, 0)
            if short and COLS % BLOCK > 0:  # a quotient of a power of two is exact as it is
                here = tl.div_rn(here, count)
            else:
                here /= count
            d = tl.where(m, x - here, 0.0)
            delta = here - mean
            # In this order: in the first block `before` is 0, and the square of a large number is infinite.
            squares += tl.sum(d * d, 0) + delta * (delta * (before * count / (before + count)))
            mean += delta * (count / (before + count))
        else:
            squares += tl.sum(x * x, 0)
    rstd = tl.rsqrt(squares / COLS + eps)
    if MEAN is not None:
        mean += pivot
        tl.store(MEAN + r, mean)
    tl.store(RSTD + r, rstd)
    for start in tl.range(0, COLS, BLOCK):
        m = start + c < COLS
        # Reread the operands rather than SUM, which other threads of the program may still be writing.
        y = _summed(X, BEFORE, RES, SUM, r, start + c, m, m, x_stride, res_stride, "")
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
    DY, MORE, X, W, MEAN, RSTD, DRES, DX, DW, DB, DBEFORE, rows, dy_stride, more_stride, x_stride, dres_stride,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """HOLD: the weight stays in registers, if there are enough."""
    c = tl.arange(0, BLOCK // GROUP)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    dws = ()
    dbs = ()
    dbefores = ()
    ws = ()
    for i in tl.static_range(CHUNKS):
        dws = dws + (tl.zeros((ROWS, BLOCK // GROUP, GROUP), tl.float32),)
        dbefores = dbefores + (tl.zeros((ROWS, BLOCK // GROUP, GROUP), tl.float32),)
        dbs = dbs + (tl.zeros((ROWS, BLOCK // GROUP, GROUP), tl.float32),)
        if W is not None and HOLD:
            ws = ws + (tl.load(W + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0).to(tl.float32),)
    for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        r = t * ROWS + tl.arange(0, ROWS)[:, None, None]
        rm = r < rows
        rstd = tl.load(RSTD + r, mask=rm, other=0.0).to(tl.float32)
        mean = 0.0
        if MEAN is not None:
            mean = tl.load(MEAN + r, mask=rm, other=0.0).to(tl.float32)
        r = r.to(tl.int64)
        xs = ()
        gs = ()
        for i in tl.static_range(CHUNKS):
            m = rm & (i * BLOCK + c < COLS)
            xs = xs + (tl.load(X + r * x_stride + i * BLOCK + c, mask=m, other=0.0),)
            g = tl.load(DY + r * dy_stride + i * BLOCK + c, mask=m, other=0.0)
            if MORE is not None:
                more = tl.load(MORE + r * more_stride + i * BLOCK + c, mask=m, other=0.0)
                g = g.to(tl.float32) + more.to(tl.float32)
            gs = gs + (g,)
        sum_g = tl.zeros((ROWS, BLOCK // GROUP), tl.float32)
        sum_gx = tl.zeros((ROWS, BLOCK // GROUP), tl.float32)
        next_w = ()
        next_b = ()
        for i in tl.static_range(CHUNKS):
            # Columns past the end have dy = 0, so their xhat does not count here.
            xhat = (xs[i].to(tl.float32) - mean) * rstd
            dy = gs[i].to(tl.float32)
            g = dy
            if W is not None:
                if HOLD:
                    g = dy * ws[i]
                else:
                    g = dy * tl.load(W + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0).to(tl.float32)
            if MEAN is not None:
                sum_g += tl.sum(g, 2)
            sum_gx += tl.sum(g * xhat, 2)
            next_w = next_w + (dws[i] + dy * xhat if DW is not None else dws[i],)
            next_b = next_b + (dbs[i] + dy if DB is not None else dbs[i],)
        dws = next_w
        dbs = next_b
        if MEAN is not None:
            mean_g, mean_gx = tl.reduce((sum_g, sum_gx), 1, add)  # one exchange between threads for both
            mean_g = mean_g[:, None, None] / COLS
        else:
            mean_gx = tl.sum(sum_gx, 1)
        mean_gx = mean_gx[:, None, None] / COLS
        next_before = ()
        for i in tl.static_range(CHUNKS):
            m = rm & (i * BLOCK + c < COLS)
            xhat = (xs[i].to(tl.float32) - mean) * rstd
            g = gs[i].to(tl.float32)
            if W is not None:
                if HOLD:
                    g *= ws[i]
                else:
                    g *= tl.load(W + i * BLOCK + c, mask=i * BLOCK + c < COLS, other=0.0).to(tl.float32)
            if MEAN is not None:
                g -= mean_g
            dx = (g - xhat * mean_gx) * rstd
            if DRES is not None:
                dx += tl.load(DRES + r * dres_stride + i * BLOCK + c, mask=m, other=0.0).to(tl.float32)
            tl.store(DX + r * COLS + i * BLOCK + c, dx.to(DX.dtype.element_ty), mask=m)
            next_before = next_before + (dbefores[i] + dx if DBEFORE is not None else dbefores[i],)
        dbefores = next_before
    for i in tl.static_range(CHUNKS):
        at = tl.program_id(0) * COLS + i * BLOCK + c
        if DW is not None:
            tl.store(DW + at, tl.sum(dws[i], 0, keep_dims=True), mask=i * BLOCK + c < COLS)
        if DB is not None:
            tl.store(DB + at, tl.sum(dbs[i], 0, keep_dims=True), mask=i * BLOCK + c < COLS)
        if DBEFORE is not None:
            tl.store(DBEFORE + at, tl.sum(dbefores[i], 0, keep_dims=True), mask=i * BLOCK + c < COLS)


@triton.jit
def norm_backward_looped(
    DY, MORE, X, W, MEAN, RSTD, DRES, DX, DW, DB, DBEFORE, rows, dy_stride, more_stride, x_stride, dres_stride,
    COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows too long for registers: read twice, the second time from the L2 cache. A program keeps its sums over rows in
    its own row of the partials, which it reads and writes once every ROWS rows."""
    c = tl.arange(0, BLOCK)[None, :]
    pid = tl.program_id(0)
    for t in tl.range(pid, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        later = tl.zeros((1, 1), tl.int32) + t != pid  # the first iteration has no sums to read
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        rm = r < rows
        rstd = tl.load(RSTD + r, mask=rm, other=0.0).to(tl.float32)
        mean = tl.zeros((ROWS, 1), tl.float32)
        if MEAN is not None:
            mean = tl.load(MEAN + r, mask=rm, other=0.0).to(tl.float32)
        r = r.to(tl.int64)
        mean_g = tl.zeros((ROWS, 1), tl.float32)
        mean_gx = tl.zeros((ROWS, 1), tl.float32)
        for start in tl.range(0, COLS, BLOCK):
            m = rm & (start + c < COLS)
            xhat = (tl.load(X + r * x_stride + start + c, mask=m, other=0.0).to(tl.float32) - mean) * rstd
            g = tl.load(DY + r * dy_stride + start + c, mask=m, other=0.0).to(tl.float32)
            if MORE is not None:
                g += tl.load(MORE + r * more_stride + start + c, mask=m, other=0.0).to(tl.float32)
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
            if MORE is not None:
                dy += tl.load(MORE + r * more_stride + start + c, mask=m, other=0.0).to(tl.float32)
            g = dy
            if W is not None:
                g *= tl.load(W + start + c, mask=cm, other=0.0).to(tl.float32)
            if MEAN is not None:
                g -= mean_g
            dx = (g - xhat * mean_gx) * rstd
            if DRES is not None:
                dx += tl.load(DRES + r * dres_stride + start + c, mask=m, other=0.0).to(tl.float32)
            tl.store(DX + r * COLS + start + c, dx.to(DX.dtype.element_ty), mask=m)
            # Barriers order a program's writes before its next reads; no other program touches this row.
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
            if DBEFORE is not None:
                dbefore = tl.sum(dx, 0, keep_dims=True)
                dbefore += tl.load(DBEFORE + at, mask=cm & later, other=0.0)
                tl.debug_barrier()
                tl.store(DBEFORE + at, dbefore, mask=cm)
        tl.debug_barrier()


@triton.jit
def column_sums(
    P, Q, R, OUT_P, OUT_Q, OUT_R, rows, COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The second step: OUT[c] = sum of P[:, c] in a fixed order. Axis 1 of the grid: P, then Q, then R."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    cm = c < COLS
    for which in tl.static_range(3):
        if tl.program_id(1) == which:
            source = P if which == 0 else Q if which == 1 else R
            target = OUT_P if which == 0 else OUT_Q if which == 1 else OUT_R
            if source is not None:
                total = tl.zeros((ROWS, BLOCK), tl.float32)
                for start in tl.range(0, rows, ROWS):
                    r = start + tl.arange(0, ROWS)[:, None]
                    total += tl.load(source + r.to(tl.int64) * COLS + c, mask=(r < rows) & cm, other=0.0)
                value = tl.sum(total, 0, keep_dims=True)
                tl.store(target + c, value.to(target.dtype.element_ty), mask=cm)
