"""Cross-entropy: a row's logits are read once, kept in registers, and replaced by their gradient.

A program uses most of a multiprocessor: a row of 50,304 bfloat16 logits takes 100 registers in each of 256 threads. It
steps down the rows. While the gradient of a block of columns is stored, the same block of the next row is loaded, so
that loads, the pass for maximum and sum, and stores overlap. The rest of a longer row is read twice, the second time
from the L2 cache. Kept logits are kept in pairs, as 32-bit words: single 16-bit numbers would each take a register from
one row to the next.

The online pass keeps a maximum and a sum for each group of GROUP neighbouring columns, which one thread loads as 16
bytes. So threads exchange nothing until the row ends, and there is one exponential an element.

Exponentials are taken of differences to the maximum, never to lse (the maximum plus a logarithm). lse is rounded at the
logits' magnitude, by 0.06 at 1e6, while differences of neighbouring numbers are exact. So a row's maximum and sum stay
separate to the end, and the factor of the exponentials is divided by the sum.

COLS need not be whole groups. If rows are aligned to 16 bytes nevertheless, the last group is read to its end, READ,
and its columns after the row become minus infinity. The gradient is then written to WRITE, with zeros there. Strides
are in units of X_UNIT and DX_UNIT elements, so that the compiler knows that rows are aligned.
"""

import triton
import triton.language as tl

from kernels_triton.library.kernels.arithmetic import LOG2E

LEAST = tl.constexpr(-3.4028234663852886e38)  # initial value of maxima: minus infinity minus itself would be NaN


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    return tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _behind(start, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """In a row's last group, the columns after its end. This is one comparison a group; `c < COLS` would be one a
    column."""
    group = start // GROUP + tl.arange(0, BLOCK // GROUP)[:, None]
    return (group == COLS // GROUP) & (tl.arange(0, GROUP)[None, :] >= COLS % GROUP)


@triton.jit
def _keep(
    row, START: tl.constexpr, READ: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """A block of a row, as it stays in registers. If the row is long, the L2 cache is left to the rest of the row."""
    policy: tl.constexpr = "evict_first" if READ > 2 * CHUNKS * BLOCK else ""
    kind: tl.constexpr = row.dtype.element_ty
    if PAIRS:
        w = START // 2 + _columns(BLOCK // 2, GROUP // 2)
        void: tl.constexpr = -8323200 if kind == tl.bfloat16 else -67044352  # twice minus infinity
        words = row.to(tl.pointer_type(tl.int32), bitcast=True)
        block = tl.load(words + w, mask=w < READ // 2, other=void, eviction_policy=policy)
    else:
        c = START + _columns(BLOCK, GROUP)
        block = tl.load(row + c, mask=c < READ, other=float("-inf"), eviction_policy=policy)
    return block


@triton.jit
def _ended(
    block, kind: tl.constexpr, START: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The block in which a row ends, with minus infinity after the end."""
    if PAIRS:
        high: tl.constexpr = -8388608 if kind == tl.bfloat16 else -67108864
        void: tl.constexpr = -8323200 if kind == tl.bfloat16 else -67044352
        rest: tl.constexpr = COLS % GROUP
        word = tl.arange(0, GROUP // 2)[None, :]
        last = START // GROUP + tl.arange(0, BLOCK // GROUP)[:, None] == COLS // GROUP
        block = tl.where(last & (2 * word >= rest), void, block)
        if rest % 2:
            block = tl.where(last & (word == rest // 2), (block & 65535) | high, block)
    else:
        block = tl.where(_behind(START, COLS, BLOCK, GROUP), float("-inf"), block)
    return block


@triton.jit
def _kept(
    block, kind: tl.constexpr, START: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The block's numbers in float32."""
    if READ > COLS and START + BLOCK > COLS:
        block = _ended(block, kind, START, COLS, BLOCK, GROUP, PAIRS)
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
    """Logits in float32, with a bias added to each column."""
    if BIAS is not None:
        x = x.to(tl.float32) + tl.load(BIAS + c, mask=c < COLS, other=0.0).to(tl.float32)
    return x


@triton.jit
def _exponential(x, top):
    return tl.exp2((x.to(tl.float32) - top) * LOG2E)


@triton.jit
def _merge(x, top, total):
    """(maximum, sum of exp(x - maximum)) by group."""
    now = tl.maximum(top, tl.max(x.to(tl.float32), 1, keep_dims=True))
    return now, total * _exponential(top, now) + tl.sum(_exponential(x, now), 1, keep_dims=True)


@triton.jit
def _stream(
    row, BIAS, top, total, START: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merges the columns from START on, with loads of STAGES blocks in flight. These columns should stay in the cache,
    so everything else here is evicted first."""
    for start in tl.range(START, COLS, BLOCK, num_stages=STAGES):
        c = start + _columns(BLOCK, GROUP)
        x = tl.load(row + c, mask=c < READ, other=float("-inf"))
        if READ > COLS:
            x = tl.where(_behind(start, COLS, BLOCK, GROUP), float("-inf"), x.to(tl.float32))
        top, total = _merge(_biased(x, BIAS, c, COLS), top, total)
    return top, total


@triton.jit
def _larger(top, total, other_top, other_total):
    now = tl.maximum(top, other_top)
    return now, total * _exponential(top, now) + other_total * _exponential(other_top, now)


@triton.jit
def _whole(top, total):
    """The maximum and sum of the row from those of the groups; (-inf, 0) if all is minus infinity."""
    most, total = tl.reduce((tl.sum(top, 1), tl.sum(total, 1)), 0, _larger)  # one number each is its own sum
    return tl.where(total == 0.0, float("-inf"), most), total


@triton.jit
def _slope(x, top, share):
    """share * exp(x - top); 0 where share is 0, for any logits."""
    return tl.where(share == 0.0, 0.0, _exponential(x, top) * share)


@triton.jit
def _store(target, g, start, COLS: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """A block of a row's gradient. Columns written after the row's end are 0, also in groups of a narrower dtype."""
    c = start + _columns(BLOCK, GROUP)
    if WRITE > (COLS + GROUP - 1) // GROUP * GROUP:
        g = tl.where(c >= COLS, 0.0, g)
    elif WRITE > COLS:
        g = tl.where(_behind(start, COLS, BLOCK, GROUP), 0.0, g)
    tl.store(target + c, g.to(target.dtype.element_ty), mask=c < WRITE, eviction_policy="evict_first")


@triton.jit
def _slopes(
    source, BIAS, target, top, share, START: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr,
    WRITE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of the columns from START on, which are read for the last time. Without a gradient they are 0, by
    one selection fewer an element; the bias may be any number."""
    shift = tl.where(share == 0.0, 0.0, top)
    for start in tl.range(START, COLS, BLOCK, num_stages=STAGES):
        c = start + _columns(BLOCK, GROUP)
        x = tl.load(source + c, mask=(c < READ) & (share != 0.0), other=0.0, eviction_policy="evict_first")
        biased = _biased(x, BIAS, c, COLS)
        g = _exponential(x, shift) * share if BIAS is None else _slope(biased, top, share)
        _store(target, g, start, COLS, WRITE, BLOCK, GROUP)


@triton.jit
def _hit(target, column, logit, top, share, factor, COLS: tl.constexpr):
    """Corrects one element of the row after it was stored."""
    if (column >= 0) & (column < COLS) & (factor != 0.0):
        tl.debug_barrier()
        g = _exponential(logit, top) * share - factor
        tl.store(target + column, g.to(target.dtype.element_ty))


@triton.jit
def _factor(SCALE, target, ignore, classes, INVERSE: tl.constexpr = False):
    """The factor of a row's gradient: the scale, 0 if ignored, NaN if there is no such class."""
    factor = 1.0
    if SCALE is not None:
        factor = tl.load(SCALE).to(tl.float32)
        if INVERSE:
            factor = 1.0 / factor
    factor = tl.where((target < 0) | (target >= classes), float("nan"), factor)
    return tl.where(target == ignore, 0.0, factor)


@triton.jit
def _column(TARGET, r, ignore, COLS: tl.constexpr):
    """A row's target as a column, in few registers; -1 if there is none, -2 if it is ignored."""
    target = tl.load(TARGET + r)
    column = tl.where((target >= 0) & (target < COLS), target, -1)
    return tl.where(target == ignore, -2, column).to(tl.int32)


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
    COLS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, X_UNIT: tl.constexpr, DX_UNIT: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, PARTS: tl.constexpr, INVERSE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """CHUNKS blocks of a row are kept. DX may be X: a row's target logit is read before the row is overwritten.

    AGAIN: kept pairs are unpacked for the sum, and again for the gradient, since registers hold no more than the pairs.
    The compiler would unpack them once; the selection in between hides that both are the same number.

    PARTS: LOSS gets the target's logit minus the row's maximum, 0 without a target, and LSE the sum of exp(x -
    maximum). INVERSE: SCALE holds the reciprocal of the scale. BIAS, by column, is added to the logits; DX is the
    gradient of the sum.
    """
    kind: tl.constexpr = X.dtype.element_ty
    c = _columns(BLOCK, GROUP)
    start = tl.zeros((), tl.int64) + tl.program_id(0)
    first = X + start * x_stride * X_UNIT
    target = _column(TARGET, start, ignore, COLS)
    logit = _logit(first, BIAS, target, COLS)
    kept = ()
    for i in tl.static_range(CHUNKS):
        kept = kept + (_keep(first, i * BLOCK, READ, CHUNKS, BLOCK, GROUP, PAIRS),)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        source = X + r * x_stride * X_UNIT
        grad = DX + r * dx_stride * DX_UNIT
        factor = _factor(SCALE, target, -2, COLS, INVERSE)
        top = tl.full((BLOCK // GROUP, 1), LEAST, tl.float32)
        total = tl.zeros((BLOCK // GROUP, 1), tl.float32)
        if COLS > CHUNKS * BLOCK:
            top, total = _stream(source, BIAS, top, total, CHUNKS * BLOCK, COLS, READ, BLOCK, GROUP, STAGES)
        for i in tl.static_range(CHUNKS):
            x = _kept(kept[i], kind, i * BLOCK, COLS, READ, BLOCK, GROUP, PAIRS)
            top, total = _merge(_biased(x, BIAS, i * BLOCK + c, COLS), top, total)
        top, total = _whole(top, total)
        if PARTS:
            tl.store(LOSS + r, tl.where(target >= 0, logit - top, 0.0))
            tl.store(LSE + r, tl.where(total == 0.0, float("nan"), total))
        else:
            loss = tl.log(total) - (logit - top)
            tl.store(LOSS + r, tl.where(target == -2, 0.0, tl.where(target == -1, float("nan"), loss)))
            tl.store(LSE + r, top + tl.log(total))
        share = tl.where(factor == 0.0, 0.0, factor / total)
        shift = tl.where(share == 0.0, 0.0, top)
        # The last iteration reloads its own row, and does not use it.
        after = tl.where(row + tl.num_programs(0) < rows, r + tl.num_programs(0), r)
        following = X + after * x_stride * X_UNIT
        next_target = _column(TARGET, after, ignore, COLS)
        coming = ()
        for i in tl.static_range(CHUNKS):
            block = tl.where(share == 0.0, 0, kept[i]) if AGAIN else kept[i]
            x = _kept(block, kind, i * BLOCK, COLS, READ, BLOCK, GROUP, PAIRS)
            x = _biased(x, BIAS, i * BLOCK + c, COLS)
            g = _exponential(x, shift) * share if AGAIN else _slope(x, top, share)
            coming = coming + (_keep(following, i * BLOCK, READ, CHUNKS, BLOCK, GROUP, PAIRS),)
            _store(grad, g, i * BLOCK, COLS if i * BLOCK + BLOCK > COLS else WRITE, WRITE, BLOCK, GROUP)
        if COLS > CHUNKS * BLOCK:
            _slopes(source, BIAS, grad, top, share, CHUNKS * BLOCK, COLS, READ, WRITE, BLOCK, GROUP, STAGES)
        next_logit = _logit(following, BIAS, next_target, COLS)
        _hit(grad, target, logit, top, share, factor, COLS)
        kept = coming
        target = next_target
        logit = next_logit


@triton.jit
def cross_entropy_stats(
    X, TARGET, STATS, rows, x_stride, first,
    COLS: tl.constexpr, READ: tl.constexpr, X_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        r = tl.zeros((), tl.int64) + row
        target = tl.load(TARGET + r) - first
        logit = _logit(X + r * x_stride * X_UNIT, None, target, COLS)
        top = tl.full((BLOCK // GROUP, 1), LEAST, tl.float32)
        total = tl.zeros((BLOCK // GROUP, 1), tl.float32)
        source = X + r * x_stride * X_UNIT
        top, total = _stream(source, None, top, total, 0, COLS, READ, BLOCK, GROUP, STAGES)
        top, total = _whole(top, total)
        tl.store(STATS + r * 3, top)
        tl.store(STATS + r * 3 + 1, total)
        tl.store(STATS + r * 3 + 2, logit)


@triton.jit
def cross_entropy_finish(
    X, TARGET, STATS, SCALE, LOSS, LSE, DX, rows, x_stride, dx_stride, ignore, classes, first, shards,
    COLS: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, X_UNIT: tl.constexpr, DX_UNIT: tl.constexpr,
    SHARDS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A program has a block of one row. The first program of a row also computes the row's results. SHARDS is a power
    of two."""
    PARTS: tl.constexpr = (WRITE + BLOCK - 1) // BLOCK
    r = tl.zeros((), tl.int64) + tl.program_id(0) // PARTS
    start = tl.program_id(0) % PARTS * BLOCK
    c = start + _columns(BLOCK, GROUP)
    x = tl.load(X + r * x_stride * X_UNIT + c, mask=c < READ, other=0.0, eviction_policy="evict_first")
    target = tl.load(TARGET + r)
    shard = tl.arange(0, SHARDS)
    there = shard < shards
    at = STATS + (shard.to(tl.int64) * rows + r) * 3
    tops = tl.load(at, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    # Selected, or a thread would add its own product unrounded to the rounded products of others: sums would differ.
    shift = tl.where(top == float("-inf"), 0.0, top)  # for a row of only minus infinity, whose sum is 0
    total = tl.sum(tl.where(there, tl.load(at + 1, mask=there, other=0.0) * tl.exp(tops - shift), 0.0), 0)
    factor = _factor(SCALE, target, ignore, classes)
    if start == 0:
        logit = tl.sum(tl.load(at + 2, mask=there, other=0.0), 0)
        wrong = (target < 0) | (target >= classes)
        loss = tl.where(target == ignore, 0.0, tl.where(wrong, float("nan"), tl.log(total) - (logit - top)))
        tl.store(LOSS + r, loss)
        tl.store(LSE + r, top + tl.log(total))
    g = _exponential(x, top) * (factor / total)
    g = tl.where(c == (target - first).to(tl.int32), g - factor, g)
    g = tl.where(factor == 0.0, 0.0, g)
    _store(DX + r * dx_stride * DX_UNIT, g, start, COLS, WRITE, BLOCK, GROUP)
