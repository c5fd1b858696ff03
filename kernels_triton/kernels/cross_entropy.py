"""Cross-entropy: a row's logits are read once, kept in registers, and become their gradient.

A program is most of a multiprocessor: a row of 50,304 bfloat16 logits is 28 registers a thread. It walks down the rows;
as the gradient of a block of columns goes out, the same block of the next row comes in, so that loads, the pass for
maximum and sum, and stores overlap. Of longer rows the rest is read twice, the second time from the L2 cache. What is
kept is kept in pairs, as 32-bit words: single 16-bit numbers would each take a register from one row to the next.

The online pass keeps a maximum and a sum per group of GROUP neighbouring columns that one thread loads as 16 bytes, so
it needs no exchange between threads until the row ends, and one exponential an element.
"""

import triton
import triton.language as tl

from kernels_triton.kernels.arithmetic import LN2, LOG2E


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    return tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _keep(
    row, START: tl.constexpr, COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """A block of a row as it stays in registers. It leaves the L2 cache to the rest of the row, if that is long."""
    policy: tl.constexpr = "evict_first" if COLS > 2 * CHUNKS * BLOCK else ""
    kind: tl.constexpr = row.dtype.element_ty
    if PAIRS:
        w = START // 2 + _columns(BLOCK // 2, GROUP // 2)
        void: tl.constexpr = -8323200 if kind == tl.bfloat16 else -67044352  # twice minus infinity
        words = row.to(tl.pointer_type(tl.int32), bitcast=True)
        block = tl.load(words + w, mask=w < COLS // 2, other=void, eviction_policy=policy)
    else:
        c = START + _columns(BLOCK, GROUP)
        block = tl.load(row + c, mask=c < COLS, other=float("-inf"), eviction_policy=policy)
    return block


@triton.jit
def _kept(block, kind: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr):
    """Its numbers in float32."""
    x = block
    if PAIRS:
        if kind == tl.bfloat16:
            low = (block << 16).to(tl.float32, bitcast=True)
            high = (block & -65536).to(tl.float32, bitcast=True)
        else:
            low = (block & 65535).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (block >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        x = tl.reshape(tl.join(low, high), (BLOCK // GROUP, GROUP))
    return x


@triton.jit
def _biased(x, BIAS, c, COLS: tl.constexpr):
    """Logits in float32, with what a layer adds to each column."""
    if BIAS is not None:
        x = x.to(tl.float32) + tl.load(BIAS + c, mask=c < COLS, other=0.0).to(tl.float32)
    return x


@triton.jit
def _merge(x, top, total):
    """(maximum, sum of 2^(x log2(e) - maximum)) by group, the maximum in units of log 2."""
    x = x.to(tl.float32)
    now = tl.maximum(top, tl.max(x, 1, keep_dims=True) * LOG2E)
    return now, total * tl.exp2(top - now) + tl.sum(tl.exp2(x * LOG2E - now), 1, keep_dims=True)


@triton.jit
def _stream(
    row, BIAS, top, total,
    START: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merges the columns from START on, STAGES blocks on their way at once. They are to stay in the cache, which is why
    everything else here is to leave it first."""
    for start in tl.range(START, COLS, BLOCK, num_stages=STAGES):
        c = start + _columns(BLOCK, GROUP)
        x = tl.load(row + c, mask=c < COLS, other=float("-inf"))
        top, total = _merge(_biased(x, BIAS, c, COLS), top, total)
    return top, total


@triton.jit
def _larger(top, total, other_top, other_total):
    now = tl.maximum(top, other_top)
    return now, total * tl.exp2(top - now) + other_total * tl.exp2(other_top - now)


@triton.jit
def _whole(top, total):
    """Of the groups' maxima and sums, the row's; (-inf, 0) where all is minus infinity."""
    most, total = tl.reduce((tl.sum(top, 1), tl.sum(total, 1)), 0, _larger)  # one number each: sums are they
    return tl.where(total == 0.0, float("-inf"), most), total


@triton.jit
def _slope(x, lse2, factor):
    """factor * exp(x - lse); 0 where the factor is, whatever the logits."""
    g = tl.exp2(x.to(tl.float32) * LOG2E - lse2) * factor
    return tl.where(factor == 0.0, 0.0, g)


@triton.jit
def _slopes(
    source, BIAS, target, lse2, factor,
    START: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of the columns from START on, which are read for the last time."""
    for start in tl.range(START, COLS, BLOCK, num_stages=STAGES):
        c = start + _columns(BLOCK, GROUP)
        x = tl.load(source + c, mask=c < COLS, other=0.0, eviction_policy="evict_first")
        g = _slope(_biased(x, BIAS, c, COLS), lse2, factor).to(target.dtype.element_ty)
        tl.store(target + c, g, mask=c < COLS, eviction_policy="evict_first")


@triton.jit
def _hit(target, column, logit, lse2, factor, COLS: tl.constexpr):
    """The row is stored; one element of it is put right."""
    if (column >= 0) & (column < COLS) & (factor != 0.0):
        tl.debug_barrier()
        g = (tl.exp2(logit * LOG2E - lse2) - 1.0) * factor
        tl.store(target + column, g.to(target.dtype.element_ty))


@triton.jit
def _factor(SCALE, target, ignore, classes, INVERSE: tl.constexpr = False):
    """What a row's gradient is multiplied by: the scale, 0 where ignored, NaN where there is no such class."""
    factor = 1.0
    if SCALE is not None:
        factor = tl.load(SCALE).to(tl.float32)
        if INVERSE:
            factor = 1.0 / factor
    factor = tl.where((target < 0) | (target >= classes), float("nan"), factor)
    return tl.where(target == ignore, 0.0, factor)


@triton.jit
def _logit(row, BIAS, column, COLS: tl.constexpr):
    there = (column >= 0) & (column < COLS)
    logit = tl.load(row + column, mask=there, other=0.0).to(tl.float32)
    if BIAS is not None:
        logit += tl.load(BIAS + column, mask=there, other=0.0).to(tl.float32)
    return logit


@triton.jit
def cross_entropy_rows(
    X, BIAS, TARGET, SCALE, LOSS, LSE, DX, rows, x_stride, dx_stride, ignore,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, PARTS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """CHUNKS blocks of a row are kept. DX may be X: a row's target logit is read before the row is overwritten.

    PARTS: LOSS gets the target's logit less the row's maximum, 0 without a target, and LSE the sum of exp(x - maximum).
    INVERSE: SCALE holds one over the scale. BIAS, of the columns, is added to the logits: DX is that of the sum."""
    kind: tl.constexpr = X.dtype.element_ty
    c = _columns(BLOCK, GROUP)
    start = tl.zeros((), tl.int64) + tl.program_id(0)
    first = X + start * x_stride
    target = tl.load(TARGET + start)
    logit = _logit(first, BIAS, target, COLS)
    kept = ()
    for i in tl.static_range(CHUNKS):
        kept = kept + (_keep(first, i * BLOCK, COLS, CHUNKS, BLOCK, GROUP, PAIRS),)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        source = X + r * x_stride
        grad = DX + r * dx_stride
        factor = _factor(SCALE, target, ignore, COLS, INVERSE)
        top = tl.full((BLOCK // GROUP, 1), -1e38, tl.float32)
        total = tl.zeros((BLOCK // GROUP, 1), tl.float32)
        if COLS > CHUNKS * BLOCK:
            top, total = _stream(source, BIAS, top, total, CHUNKS * BLOCK, COLS, BLOCK, GROUP, STAGES)
        for i in tl.static_range(CHUNKS):
            x = _kept(kept[i], kind, BLOCK, GROUP, PAIRS)
            top, total = _merge(_biased(x, BIAS, i * BLOCK + c, COLS), top, total)
        top, total = _whole(top, total)
        lse = top * LN2 + tl.log(total)
        there = (target >= 0) & (target < COLS)
        if PARTS:
            tl.store(LOSS + r, tl.where(there, logit - top * LN2, 0.0))
            tl.store(LSE + r, total)
        else:
            tl.store(LOSS + r, tl.where(target == ignore, 0.0, tl.where(there, lse - logit, float("nan"))))
            tl.store(LSE + r, lse)
        # The last turn asks for its own row again, and does not use it.
        after = tl.where(row + tl.num_programs(0) < rows, r + tl.num_programs(0), r)
        following = X + after * x_stride
        next_target = tl.load(TARGET + after)
        coming = ()
        for i in tl.static_range(CHUNKS):
            x = _biased(_kept(kept[i], kind, BLOCK, GROUP, PAIRS), BIAS, i * BLOCK + c, COLS)
            g = _slope(x, lse * LOG2E, factor).to(DX.dtype.element_ty)
            coming = coming + (_keep(following, i * BLOCK, COLS, CHUNKS, BLOCK, GROUP, PAIRS),)
            tl.store(grad + i * BLOCK + c, g, mask=i * BLOCK + c < COLS, eviction_policy="evict_first")
        if COLS > CHUNKS * BLOCK:
            _slopes(source, BIAS, grad, lse * LOG2E, factor, CHUNKS * BLOCK, COLS, BLOCK, GROUP, STAGES)
        next_logit = _logit(following, BIAS, next_target, COLS)
        _hit(grad, target, logit, lse * LOG2E, factor, COLS)
        kept = coming
        target = next_target
        logit = next_logit


@triton.jit
def cross_entropy_stats(
    X, TARGET, STATS, rows, x_stride, first,
    COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        target = tl.load(TARGET + r) - first
        logit = _logit(X + r * x_stride, None, target, COLS)
        top = tl.full((BLOCK // GROUP, 1), -1e38, tl.float32)
        total = tl.zeros((BLOCK // GROUP, 1), tl.float32)
        top, total = _stream(X + r * x_stride, None, top, total, 0, COLS, BLOCK, GROUP, STAGES)
        top, total = _whole(top, total)
        tl.store(STATS + r * 3, top * LN2)
        tl.store(STATS + r * 3 + 1, total)
        tl.store(STATS + r * 3 + 2, logit)


@triton.jit
def cross_entropy_finish(
    X, TARGET, STATS, SCALE, LOSS, LSE, DX, rows, x_stride, dx_stride, ignore, classes, first, shards,
    COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
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
        own = _logit(X + r * x_stride, None, here, COLS)
        tl.debug_barrier()
        grad = DX + r * dx_stride
        _slopes(X + r * x_stride, None, grad, lse * LOG2E, factor, 0, COLS, BLOCK, GROUP, STAGES)
        _hit(grad, here, own, lse * LOG2E, factor, COLS)
