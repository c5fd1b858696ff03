"""AdamW on a flat bucket in one pass: unscale and clip, both moments, the update, the low-precision copy."""

import triton
import triton.language as tl


@triton.jit
def adamw(
    PARAM, GRAD, M, V, COPY, LR, STEP, SCALE, SKIP, count, log_beta1, log_beta2, rest1, rest2, beta2, eps, decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < count
    p = tl.load(PARAM + i, mask=m, other=0.0).to(tl.float32)
    g = tl.load(GRAD + i, mask=m, other=0.0).to(tl.float32)
    first = tl.load(M + i, mask=m, other=0.0).to(tl.float32)
    second = tl.load(V + i, mask=m, other=0.0).to(tl.float32)
    if SCALE is not None:
        g *= tl.load(SCALE).to(tl.float32)
    lr = tl.load(LR).to(tl.float32)
    # In float64: 1 - beta^step cancels.
    step = tl.load(STEP).to(tl.float64)
    correct1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
    correct2 = tl.sqrt((1.0 - tl.exp(step * log_beta2)).to(tl.float32))
    new_first = first + (g - first) * rest1
    new_second = second * beta2 + g * g * rest2
    new = p * (1.0 - lr * decay) - (lr / correct1) * (new_first / (tl.sqrt(new_second) / correct2 + eps))
    if SKIP is not None:
        skip = tl.load(SKIP) != 0
        new = tl.where(skip, p, new)
        new_first = tl.where(skip, first, new_first)
        new_second = tl.where(skip, second, new_second)
    new = new.to(PARAM.dtype.element_ty)
    tl.store(PARAM + i, new, mask=m)
    tl.store(M + i, new_first.to(M.dtype.element_ty), mask=m)
    tl.store(V + i, new_second.to(V.dtype.element_ty), mask=m)
    if COPY is not None:
        tl.store(COPY + i, new.to(COPY.dtype.element_ty), mask=m)
