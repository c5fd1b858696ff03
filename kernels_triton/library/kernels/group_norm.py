"""GroupNorm: a program has one group of one sample, or some channels of it, in tiles of CHANNELS channels x BLOCK
positions. One warp has a whole channel of a tile: only its threads exchange sums over positions.

A group is contiguous. What fits stays in registers in its loaded dtype: a whole group, or one of PARTS parts of a
longer group. Each part has a program; these exchange their sums and wait for each other. Still longer groups are read
twice, and should stay in the L2 cache between. The first pass of backward leaves each channel's sums (of dy * xhat and
dy) for one sample, which `column_sums` adds over the samples.

A program waits for its neighbours, which start before those of any later group. So only PARTS programs of each running
launch must be resident at once. GPUs start programs in the order of their numbers, and CUB's scans rely on that too,
but the CUDA programming model does not promise it. If programs run one after the other (Triton's interpreter), none can
wait: STEP 1 ends where they would meet, and STEP 2, a launch of its own, continues.
"""

import triton
import triton.language as tl

from kernels_triton.library.kernels.arithmetic import INTERPRETED, quotient
from kernels_triton.library.kernels.moments import EXACT, add


@triton.jit
def _pool(count, mean, squares, other_count, other_mean, other_squares):
    """For two groups: the count, the mean, and the squared deviations from it (Chan). A mean is unchanged by an equal
    mean, and by an empty group."""
    total = count + other_count
    share = tl.where(count > 0.0, quotient(other_count, tl.maximum(total, 1.0)), 1.0)
    apart = other_mean - mean
    return total, mean + apart * share, squares + other_squares + apart * (apart * (count * share))


@triton.jit
def _neighbours(x, there, GROUP: tl.constexpr):
    """The operands of `_pool` for each group of a block, for elements that are `there`. Means are of differences from a
    group's first number, which is the fourth result."""
    lane = tl.arange(0, GROUP)[None, None, :]
    first = tl.sum(tl.where(lane == 0, x, 0.0), 2)
    count = tl.sum(there.to(tl.float32), 2)
    x = tl.where(there, x - first[:, :, None], 0.0)
    mean = quotient(tl.sum(x, 2), tl.maximum(count, 1.0))
    d = tl.where(there, x - mean[:, :, None], 0.0)
    return count, mean, tl.sum(d * d, 2), first


@triton.jit
def _moments(X, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(mean, variance) of SIZE numbers: first of a thread's own, then pooled in one exchange between threads. With
    float32 all numbers are differences from a thread's first few; the means of these change little and are not
    rounded as the mean is."""
    c = tl.arange(0, BLOCK // GROUP)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    whole: tl.constexpr = SIZE // BLOCK * BLOCK
    wide: tl.constexpr = X.dtype.element_ty == tl.float32
    pivot = tl.zeros((1, BLOCK // GROUP), tl.float32)
    if wide and whole > 0:
        x = tl.load(X + c, eviction_policy="evict_last")
        pivot = tl.sum(x * (1.0 / GROUP), 2)  # exact for so few equal numbers
    mean = tl.zeros((1, BLOCK // GROUP), tl.float32)
    squares = tl.zeros((1, BLOCK // GROUP), tl.float32)
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        x = tl.load(X + start + c, eviction_policy="evict_last").to(tl.float32)
        if wide:
            x -= pivot[:, :, None]
        here = tl.sum(x, 2) / GROUP
        d = x - here[:, :, None]
        apart = here - mean
        before = tl.zeros((), tl.float32) + start
        share = BLOCK / (before + BLOCK)
        mean += apart * share
        # In this order: in the first block `before` is 0, and the square of a large number is infinite.
        squares += tl.sum(d * d, 2) + apart * (apart * (before / BLOCK * GROUP * share))
    count = tl.full((1, BLOCK // GROUP), whole // BLOCK * GROUP, tl.float32)
    if whole < SIZE:
        there = whole + c < SIZE
        x = tl.load(X + whole + c, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if wide and whole > 0:
            x -= pivot[:, :, None]
        rest_count, rest, rest_squares, first = _neighbours(x, there, GROUP)
        if wide and whole == 0:
            pivot = first
        else:
            rest += first
        count, mean, squares = _pool(count, mean, squares, rest_count, rest, rest_squares)
    middle = 0.0
    if wide:  # near the mean: differences from it are small, and exact for equal numbers
        middle = tl.sum(tl.sum((pivot + mean) * (count * (1.0 / SIZE)), 1), 0)
        mean = tl.where(count > 0.0, (pivot - middle) + mean, 0.0)
    _, mean, squares = tl.reduce((count, mean, squares), 1, _pool)
    return middle + tl.sum(mean, 0), tl.sum(squares, 0) / SIZE  # one number each is its own sum


@triton.jit
def group_norm_forward(
    X, W, B, Y, MEAN, RSTD, eps, groups, OF_GROUP: tl.constexpr, SPACE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth  # 16 bytes of neighbours
    pid = tl.program_id(0)
    base = pid.to(tl.int64) * (OF_GROUP * SPACE)
    k = tl.arange(0, CHANNELS)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    mean, variance = _moments(X + base, OF_GROUP * SPACE, CHANNELS * BLOCK, group)
    rstd = tl.rsqrt(variance + eps)
    tl.store(MEAN + pid, mean)
    tl.store(RSTD + pid, rstd)
    first = (pid % groups) * OF_GROUP
    for channel in tl.range(0, OF_GROUP, CHANNELS):
        km = channel + k < OF_GROUP
        w = tl.full((CHANNELS, 1), 1.0, tl.float32)
        b = tl.zeros((CHANNELS, 1), tl.float32)
        if W is not None:
            w = tl.load(W + first + channel + k, mask=km, other=0.0).to(tl.float32)
        if B is not None:
            b = tl.load(B + first + channel + k, mask=km, other=0.0).to(tl.float32)
        for start in tl.range(0, SPACE, BLOCK):
            m = km & (start + s < SPACE)
            at = base + (channel + k).to(tl.int64) * SPACE + start + s
            x = tl.load(X + at, mask=m, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = (x - mean) * rstd * w + b
            tl.store(Y + at, y.to(Y.dtype.element_ty), mask=m)


@triton.jit
def _meet(SIGNAL, arrives, PARTS: tl.constexpr):
    """Waits until all PARTS programs of a group have arrived. `arrives` is True in one thread. The last program flips
    the sign of the signal, whose other bits are then 0 again, so a later launch can reuse it."""
    tl.debug_barrier()  # all threads have stored what other programs read
    step = tl.where(arrives, 2147483648 - (PARTS - 1), 1).to(tl.int32)
    before = tl.atomic_add(SIGNAL, step, sem="acq_rel")
    now = before + step
    while (before ^ now) >= 0:
        now = tl.atomic_add(SIGNAL, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _as_loaded(x, PARTS: tl.constexpr):
    """A 16-bit part, hidden from the compiler's knowledge that it was converted before. Otherwise the converted values
    would stay in twice the registers while programs wait."""
    if not (INTERPRETED or PARTS == 1 or x.dtype == tl.float32):
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _channels(part, OF_GROUP: tl.constexpr, PARTS: tl.constexpr):
    """The number of channels of a part; the last part may have fewer."""
    of_part: tl.constexpr = (OF_GROUP + PARTS - 1) // PARTS
    count = tl.minimum(of_part, OF_GROUP - part * of_part)
    if OF_GROUP % of_part == 0:
        count = of_part
    return count


@triton.jit
def _together(SHARED, group, SPACE: tl.constexpr, OF_GROUP: tl.constexpr, PARTS: tl.constexpr):
    """(mean, squared deviations) of a group, from those of its parts."""
    most: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, most)
    at = SHARED + (group * PARTS + part) * 3
    counts = tl.where(part < PARTS, _channels(part, OF_GROUP, PARTS) * SPACE, 0).to(tl.float32)
    means = tl.load(at, mask=part < PARTS, other=0.0, cache_modifier=".cg")
    squares = tl.load(at + 1, mask=part < PARTS, other=0.0, cache_modifier=".cg")
    first = tl.load(SHARED + group * PARTS * 3, cache_modifier=".cg")
    # Differences are summed, since a sum of equal means would be rounded; and means before their rounding.
    apart = tl.where(
        part < PARTS, means - first + tl.load(at + 2, mask=part < PARTS, other=0.0, cache_modifier=".cg"), 0.0
    )
    middle = tl.sum(apart * counts, 0) / (OF_GROUP * SPACE)
    apart -= middle
    return first + middle, tl.sum(squares + counts * (apart * apart), 0)


@triton.jit
def group_norm_forward_held(
    X, W, B, Y, MEAN, RSTD, SHARED, SIGNAL, eps, groups, OF_GROUP: tl.constexpr, SPACE: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    of_part: tl.constexpr = (OF_GROUP + PARTS - 1) // PARTS
    across: tl.constexpr = (SPACE + BLOCK - 1) // BLOCK
    down: tl.constexpr = (of_part + CHANNELS - 1) // CHANNELS
    base = pid.to(tl.int64) * (OF_GROUP * SPACE) + part * (of_part * SPACE)
    count = _channels(part, OF_GROUP, PARTS)
    k = tl.arange(0, CHANNELS)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    short: tl.constexpr = of_part * SPACE << X.dtype.element_ty.fp_mantissa_width <= EXACT
    first = 0.0
    if not short:
        first = tl.load(X + base).to(tl.float32)
    xs = ()
    total = tl.zeros((CHANNELS, BLOCK), tl.float32)
    for i in tl.static_range(down * across):
        channel = i // across * CHANNELS + k
        at = i % across * BLOCK + s
        m = (channel < count) & (at < SPACE)
        x = tl.load(X + base + channel * SPACE + at, mask=m, other=0.0)
        if short:
            total += x.to(tl.float32)
        else:
            total += tl.where(m, x.to(tl.float32) - first, 0.0)
        xs = xs + (x,)
    size = (tl.zeros((), tl.int32) + count * SPACE).to(tl.float32)
    mean = tl.div_rn(tl.sum(tl.sum(total, 1), 0), size) + first
    squares = tl.zeros((CHANNELS, BLOCK), tl.float32)
    aparts = tl.zeros((CHANNELS, BLOCK), tl.float32)
    for i in tl.static_range(down * across):
        m = (i // across * CHANNELS + k < count) & (i % across * BLOCK + s < SPACE)
        d = tl.where(m, _as_loaded(xs[i], PARTS).to(tl.float32) - mean, 0.0)
        squares += d * d
        if not short:
            aparts += d
    left = 0.0
    if short:
        square = tl.sum(tl.sum(squares, 1), 0)
    else:  # corrects the mean's rounding by the mean difference; the rest is passed on to the other programs
        aparts, squares = tl.reduce((aparts, squares), 1, add)
        apart, square = tl.reduce((aparts, squares), 0, add)
        apart /= size
        square -= apart * apart * size
        square = tl.where(square < 0.0, 0.0, square)  # a maximum would lose NaN
        corrected = mean + apart
        left = apart - (corrected - mean)
        mean = corrected
    if PARTS > 1:
        own = SHARED + tl.program_id(0) * 3
        tl.store(own, mean)
        tl.store(own + 1, square)
        tl.store(own + 2, left)
        if STEP == 0:
            _meet(SIGNAL + pid, part == 0, PARTS)
        if STEP != 1:
            mean, square = _together(SHARED, pid, SPACE, OF_GROUP, PARTS)
    if STEP != 1:
        rstd = tl.rsqrt(square / (OF_GROUP * SPACE) + eps)
        tl.store(MEAN + pid, mean, mask=part == 0)
        tl.store(RSTD + pid, rstd, mask=part == 0)
        first = (pid % groups) * OF_GROUP + part * of_part
        for j in tl.static_range(down):
            channel = j * CHANNELS + k
            km = channel < count
            w = tl.full((CHANNELS, 1), 1.0, tl.float32)
            b = tl.zeros((CHANNELS, 1), tl.float32)
            if W is not None:
                w = tl.load(W + first + channel, mask=km, other=0.0).to(tl.float32)
            if B is not None:
                b = tl.load(B + first + channel, mask=km, other=0.0).to(tl.float32)
            for i in tl.static_range(across):
                at = i * BLOCK + s
                y = (_as_loaded(xs[j * across + i], PARTS).to(tl.float32) - mean) * rstd * w + b
                tl.store(Y + base + channel * SPACE + at, y.to(Y.dtype.element_ty), mask=km & (at < SPACE))


@triton.jit
def group_norm_backward(
    DY, X, W, MEAN, RSTD, DX, DW, DB, groups, OF_GROUP: tl.constexpr, SPACE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DW and DB: [batch, channels] partials, always written."""
    pid = tl.program_id(0)
    base = pid.to(tl.int64) * (OF_GROUP * SPACE)
    first = (pid % groups) * OF_GROUP
    k = tl.arange(0, CHANNELS)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    mean = tl.load(MEAN + pid)
    rstd = tl.load(RSTD + pid)
    mean_g = 0.0
    mean_gx = 0.0
    for channel in tl.range(0, OF_GROUP, CHANNELS):
        km = channel + k < OF_GROUP
        sum_w = tl.zeros((CHANNELS, BLOCK), tl.float32)
        sum_b = tl.zeros((CHANNELS, BLOCK), tl.float32)
        for start in tl.range(0, SPACE, BLOCK):
            m = km & (start + s < SPACE)
            at = base + (channel + k).to(tl.int64) * SPACE + start + s
            x = tl.load(X + at, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(DY + at, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
            sum_w += dy * ((x - mean) * rstd)  # dy is 0 past the end, for any xhat there
            sum_b += dy
        dw = tl.sum(sum_w, 1, keep_dims=True)
        db = tl.sum(sum_b, 1, keep_dims=True)
        to = (pid // groups).to(tl.int64) * groups * OF_GROUP + first + channel + k
        tl.store(DW + to, dw, mask=km)
        tl.store(DB + to, db, mask=km)
        w = tl.full((CHANNELS, 1), 1.0, tl.float32)
        if W is not None:
            w = tl.load(W + first + channel + k, mask=km, other=0.0).to(tl.float32)
        mean_g += tl.sum(tl.sum(tl.where(km, w * db, 0.0), 1), 0)
        mean_gx += tl.sum(tl.sum(tl.where(km, w * dw, 0.0), 1), 0)
    mean_g /= OF_GROUP * SPACE
    mean_gx /= OF_GROUP * SPACE
    for channel in tl.range(0, OF_GROUP, CHANNELS):
        km = channel + k < OF_GROUP
        w = tl.full((CHANNELS, 1), 1.0, tl.float32)
        if W is not None:
            w = tl.load(W + first + channel + k, mask=km, other=0.0).to(tl.float32)
        for start in tl.range(0, SPACE, BLOCK):
            m = km & (start + s < SPACE)
            at = base + (channel + k).to(tl.int64) * SPACE + start + s
            x = tl.load(X + at, mask=m, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(DY + at, mask=m, other=0.0, eviction_policy="evict_first").to(tl.float32)
            xhat = (x - mean) * rstd
            dx = (dy * w - mean_g - xhat * mean_gx) * rstd
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=m)


@triton.jit
def group_norm_backward_held(
    DY, X, W, MEAN, RSTD, DX, DW, DB, SHARED, SIGNAL, groups, OF_GROUP: tl.constexpr, SPACE: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `group_norm_backward`."""
    pid = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    of_part: tl.constexpr = (OF_GROUP + PARTS - 1) // PARTS
    across: tl.constexpr = (SPACE + BLOCK - 1) // BLOCK
    down: tl.constexpr = (of_part + CHANNELS - 1) // CHANNELS
    base = pid.to(tl.int64) * (OF_GROUP * SPACE) + part * (of_part * SPACE)
    first = (pid % groups) * OF_GROUP + part * of_part
    count = _channels(part, OF_GROUP, PARTS)
    k = tl.arange(0, CHANNELS)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    mean = tl.load(MEAN + pid)
    rstd = tl.load(RSTD + pid)
    xs = ()
    gs = ()
    for i in tl.static_range(down * across):
        channel = i // across * CHANNELS + k
        at = i % across * BLOCK + s
        m = (channel < count) & (at < SPACE)
        xs = xs + (tl.load(X + base + channel * SPACE + at, mask=m, other=0.0),)
        gs = gs + (tl.load(DY + base + channel * SPACE + at, mask=m, other=0.0),)
    ws = ()
    if W is not None:
        for j in tl.static_range(down):  # these loads are in flight while the part is loaded
            km = j * CHANNELS + k < count
            ws = ws + (tl.load(W + first + j * CHANNELS + k, mask=km, other=0.0).to(tl.float32),)
    sum_g = tl.zeros((CHANNELS, 1), tl.float32)
    sum_gx = tl.zeros((CHANNELS, 1), tl.float32)
    for j in tl.static_range(down):
        km = j * CHANNELS + k < count
        sum_w = tl.zeros((CHANNELS, BLOCK), tl.float32)
        sum_b = tl.zeros((CHANNELS, BLOCK), tl.float32)
        for i in tl.static_range(across):
            dy = gs[j * across + i].to(tl.float32)  # 0 past the end, for any xhat there
            sum_w += dy * ((xs[j * across + i].to(tl.float32) - mean) * rstd)
            sum_b += dy
        dw = tl.sum(sum_w, 1, keep_dims=True)
        db = tl.sum(sum_b, 1, keep_dims=True)
        at = (pid // groups).to(tl.int64) * groups * OF_GROUP + first + j * CHANNELS + k
        tl.store(DW + at, dw, mask=km)
        tl.store(DB + at, db, mask=km)
        if W is not None:
            sum_g += ws[j] * db
            sum_gx += ws[j] * dw
        else:
            sum_g += db
            sum_gx += dw
    mean_g = tl.sum(tl.sum(sum_g, 1), 0)
    mean_gx = tl.sum(tl.sum(sum_gx, 1), 0)
    if PARTS > 1:
        tl.store(SHARED + tl.program_id(0) * 2, mean_g)
        tl.store(SHARED + tl.program_id(0) * 2 + 1, mean_gx)
        if STEP == 0:
            _meet(SIGNAL + pid, part == 0, PARTS)
        if STEP != 1:
            most: tl.constexpr = triton.next_power_of_2(PARTS)
            other = tl.arange(0, most)
            sums = SHARED + (pid * PARTS + other) * 2
            mean_g = tl.sum(tl.load(sums, mask=other < PARTS, other=0.0, cache_modifier=".cg"), 0)
            mean_gx = tl.sum(tl.load(sums + 1, mask=other < PARTS, other=0.0, cache_modifier=".cg"), 0)
    mean_g /= OF_GROUP * SPACE
    mean_gx /= OF_GROUP * SPACE
    if STEP != 1:
        for i in tl.static_range(down * across):
            channel = i // across * CHANNELS + k
            at = i % across * BLOCK + s
            xhat = (_as_loaded(xs[i], PARTS).to(tl.float32) - mean) * rstd
            g = _as_loaded(gs[i], PARTS).to(tl.float32)
            if W is not None:
                g *= ws[i // across]
            dx = (g - mean_g - xhat * mean_gx) * rstd
            m = (channel < count) & (at < SPACE)
            tl.store(DX + base + channel * SPACE + at, dx.to(DX.dtype.element_ty), mask=m)
