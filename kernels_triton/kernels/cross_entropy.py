"""Cross-entropy: one online pass over a row's logits, then the gradient in a second, which finds the row in L2.

The online pass keeps a maximum and a sum per group of GROUP neighbouring columns that one thread loads as 16 bytes, so
it needs no exchange between threads until the row ends, and one exponential an element. A few persistent programs a
multiprocessor bound how many rows are in flight, and so keep them in the cache until they are read again.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _online(X, r, x_stride, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(m, sum of 2^(x log2(e) - m)) of a row, m its maximum in units of log 2; (-inf, 0) where all is minus infinity.
    Each block is asked for while the one before it is summed."""
    c = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = X + r * x_stride
    top = tl.full((BLOCK // GROUP, 1), -1e38, tl.float32)
    total = tl.zeros((BLOCK // GROUP, 1), tl.float32)
    ahead = tl.load(row + c, mask=c < COLS, other=float("-inf"), eviction_policy="evict_last")
    for start in tl.range(BLOCK, COLS + BLOCK, BLOCK):
        x = ahead.to(tl.float32)
        ahead = tl.load(row + start + c, mask=start + c < COLS, other=float("-inf"), eviction_policy="evict_last")
        now = tl.maximum(top, tl.max(x, 1, keep_dims=True) * LOG2E)
        total = total * tl.exp2(top - now) + tl.sum(tl.exp2(x * LOG2E - now), 1, keep_dims=True)
        top = now
    most = tl.max(tl.max(top, 1), 0)
    total = tl.sum(tl.sum(total * tl.exp2(top - most), 1), 0)
    return tl.where(total == 0.0, float("-inf"), most), total


@triton.jit
def _gradient(
    X, DX, r, x_stride, dx_stride, lse, hit, logit, factor, COLS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """factor * (exp(x - lse) - 1 at the column `hit`); 0 where the factor is, whatever the logits."""
    c = tl.arange(0, BLOCK)
    source = X + r * x_stride
    target = DX + r * dx_stride
    if factor == 0.0:
        for start in tl.range(0, COLS, BLOCK):
            tl.store(target + start + c, tl.zeros((BLOCK,), DX.dtype.element_ty), mask=start + c < COLS)
    else:
        lse2 = lse * LOG2E
        ahead = tl.load(source + c, mask=c < COLS, other=0.0, eviction_policy="evict_first")
        for start in tl.range(0, COLS, BLOCK):
            x = ahead.to(tl.float32)
            after = start + BLOCK + c
            ahead = tl.load(source + after, mask=after < COLS, other=0.0, eviction_policy="evict_first")
            g = tl.exp2(x * LOG2E - lse2) * factor
            tl.store(target + start + c, g.to(DX.dtype.element_ty), mask=start + c < COLS)
        if (hit >= 0) & (hit < COLS):
            tl.debug_barrier()  # the row is stored; one element of it is put right
            tl.store(target + hit, ((tl.exp2(logit * LOG2E - lse2) - 1.0) * factor).to(DX.dtype.element_ty))


@triton.jit
def _factor(SCALE, target, ignore, classes):
    """What a row's gradient is multiplied by: the scale, 0 where ignored, NaN where there is no such class."""
    factor = 1.0
    if SCALE is not None:
        factor = tl.load(SCALE).to(tl.float32)
    factor = tl.where((target < 0) | (target >= classes), float("nan"), factor)
    return tl.where(target == ignore, 0.0, factor)


@triton.jit
def cross_entropy_rows(
    X, TARGET, SCALE, LOSS, LSE, DX, rows, x_stride, dx_stride, ignore,
    COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """DX may be X: a row's target logit is read before the row is overwritten."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        target = tl.load(TARGET + r)
        inside = (target >= 0) & (target < COLS)
        logit = tl.load(X + r * x_stride + target, mask=inside, other=0.0).to(tl.float32)
        top, total = _online(X, r, x_stride, COLS, BLOCK, GROUP)
        lse = top * LN2 + tl.log(total)
        factor = _factor(SCALE, target, ignore, COLS)
        loss = tl.where(target == ignore, 0.0, tl.where(inside, lse - logit, float("nan")))
        tl.store(LOSS + r, loss)
        tl.store(LSE + r, lse)
        _gradient(X, DX, r, x_stride, dx_stride, lse, target, logit, factor, COLS, BLOCK)


@triton.jit
def cross_entropy_stats(
    X, TARGET, STATS, rows, x_stride, first,
    COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        target = tl.load(TARGET + r) - first
        inside = (target >= 0) & (target < COLS)
        logit = tl.load(X + r * x_stride + target, mask=inside, other=0.0).to(tl.float32)
        top, total = _online(X, r, x_stride, COLS, BLOCK, GROUP)
        tl.store(STATS + r * 3, top * LN2)
        tl.store(STATS + r * 3 + 1, total)
        tl.store(STATS + r * 3 + 2, logit)


@triton.jit
def cross_entropy_finish(
    X, TARGET, STATS, SCALE, LOSS, LSE, DX, rows, x_stride, dx_stride, ignore, classes, first, shards,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        target = tl.load(TARGET + r)
        top = float("-inf")
        for shard in tl.range(0, shards):
            top = tl.maximum(top, tl.load(STATS + (tl.zeros((), tl.int64) + shard) * rows * 3 + r * 3))
        total = 0.0
        logit = 0.0
        for shard in tl.range(0, shards):
            at = STATS + (tl.zeros((), tl.int64) + shard) * rows * 3 + r * 3
            total += tl.load(at + 1) * tl.exp(tl.load(at) - top)
            logit += tl.load(at + 2)
        lse = top + tl.log(total)
        factor = _factor(SCALE, target, ignore, classes)
        wrong = (target < 0) | (target >= classes)
        loss = tl.where(target == ignore, 0.0, tl.where(wrong, float("nan"), lse - logit))
        tl.store(LOSS + r, loss)
        tl.store(LSE + r, lse)
        # Where the target lies here, every thread has read its logit before any overwrites it.
        here = target - first
        own = tl.load(X + r * x_stride + here, mask=(here >= 0) & (here < COLS), other=0.0).to(tl.float32)
        tl.debug_barrier()
        _gradient(X, DX, r, x_stride, dx_stride, lse, here, own, factor, COLS, BLOCK)
