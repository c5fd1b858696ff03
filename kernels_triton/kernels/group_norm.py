"""GroupNorm: one group of one sample a program, in tiles of CHANNELS channels x BLOCK positions.

A group is contiguous, and is read twice, the second time from cache. Backward's first pass leaves each channel's sums
(of dy * xhat and dy) for one sample, which `column_sums` adds over the samples.
"""

import triton
import triton.language as tl


@triton.jit
def group_norm_forward(
    X, W, B, Y, MEAN, RSTD, eps, groups, OF_GROUP: tl.constexpr, SPACE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    base = pid.to(tl.int64) * (OF_GROUP * SPACE)
    k = tl.arange(0, CHANNELS)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    mean = 0.0
    squares = 0.0
    before = 0.0
    for channel in tl.range(0, OF_GROUP, CHANNELS):
        for start in tl.range(0, SPACE, BLOCK):
            m = (channel + k < OF_GROUP) & (start + s < SPACE)
            x = tl.load(X + base + (channel + k) * SPACE + start + s, mask=m, other=0.0).to(tl.float32)
            high = tl.minimum(OF_GROUP - channel, CHANNELS)
            count = (high * tl.minimum(SPACE - start, BLOCK)).to(tl.float32)
            here = tl.sum(tl.sum(x, 1), 0) / count
            d = tl.where(m, x - here, 0.0)
            delta = here - mean
            share = count / (before + count)
            squares += tl.sum(tl.sum(d * d, 1), 0) + delta * delta * before * share
            mean += delta * share
            before += count
    rstd = tl.rsqrt(squares / before + eps)
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
            x = tl.load(X + base + (channel + k) * SPACE + start + s, mask=m, other=0.0).to(tl.float32)
            y = (x - mean) * rstd * w + b
            tl.store(Y + base + (channel + k) * SPACE + start + s, y.to(Y.dtype.element_ty), mask=m)


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
        dw = tl.zeros((CHANNELS, 1), tl.float32)
        db = tl.zeros((CHANNELS, 1), tl.float32)
        for start in tl.range(0, SPACE, BLOCK):
            m = km & (start + s < SPACE)
            x = tl.load(X + base + (channel + k) * SPACE + start + s, mask=m, other=0.0).to(tl.float32)
            dy = tl.load(DY + base + (channel + k) * SPACE + start + s, mask=m, other=0.0).to(tl.float32)
            dw += tl.sum(dy * ((x - mean) * rstd), 1, keep_dims=True)
            db += tl.sum(dy, 1, keep_dims=True)
        at = (pid // groups).to(tl.int64) * groups * OF_GROUP + first + channel + k
        tl.store(DW + at, dw, mask=km)
        tl.store(DB + at, db, mask=km)
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
            x = tl.load(X + base + (channel + k) * SPACE + start + s, mask=m, other=0.0).to(tl.float32)
            dy = tl.load(DY + base + (channel + k) * SPACE + start + s, mask=m, other=0.0).to(tl.float32)
            xhat = (x - mean) * rstd
            dx = (dy * w - mean_g - xhat * mean_gx) * rstd
            tl.store(DX + base + (channel + k) * SPACE + start + s, dx.to(DX.dtype.element_ty), mask=m)
