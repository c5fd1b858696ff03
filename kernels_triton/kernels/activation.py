"""Activations: bias + GeLU, SwiGLU and GeGLU, squared ReLU; forward, and backward that recomputes.

Tanh-GeLU is written `x * sigmoid(2u)`: the same function with fewer instructions and no cancellation where x is very
negative. Tiles are `ROWS x BLOCK`; kernels that also sum over rows (a bias's gradient) walk down one block of columns
and leave partial sums for `column_sums`.
"""

import triton
import triton.language as tl


@triton.jit
def _normal(x, EXACT: tl.constexpr):
    """(the normal distribution function at x, exp(-x * x / 2)).

    Unless EXACT, Abramowitz and Stegun's 7.1.26 (1.5e-7 off at most, which no 16-bit format shows) with the exponential
    that the derivative needs anyway: half the instructions of `erf`, which would cost more than the memory traffic.
    """
    gauss = tl.exp(-0.5 * x * x)
    if EXACT:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(x))
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        tail *= gauss
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    return below, gauss


@triton.jit
def _act(x, ACT: tl.constexpr, EXACT: tl.constexpr):
    if ACT == "silu":
        y = x * tl.sigmoid(x)
    elif ACT == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "gelu":
        below, _ = _normal(x, EXACT)
        y = x * below
    else:
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    return y


@triton.jit
def _act_and_grad(x, ACT: tl.constexpr, EXACT: tl.constexpr):
    """(f(x), f'(x))."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        y = x * s
        d = s + y * (1.0 - s)
    elif ACT == "gelu_tanh":
        # Past +-12 the sigmoid is 0 or 1 in float32, and x^3 must not overflow into inf * 0.
        z = tl.minimum(tl.maximum(x, -12.0), 12.0)
        s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        y = x * s
        d = s + z * s * (1.0 - s) * (1.5957691216057308 + 0.2140644488 * z * z)
    elif ACT == "gelu":
        z = tl.minimum(tl.maximum(x, -14.0), 14.0)
        below, gauss = _normal(z, EXACT)
        y = x * below
        d = below + z * 0.3989422804014327 * gauss
    else:
        positive = tl.maximum(x, 0.0)
        y = positive * positive
        d = 2.0 * positive
    return y, d


@triton.jit
def activation_forward(
    X, B, Y, rows, x_stride, ACT: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(COLS, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    r = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    m = (r < rows) & (c < COLS)
    r = r.to(tl.int64)
    x = tl.load(X + r * x_stride + c, mask=m, other=0.0).to(tl.float32)
    if B is not None:
        x += tl.load(B + c, mask=c < COLS, other=0.0).to(tl.float32)
    tl.store(Y + r * COLS + c, _act(x, ACT, X.dtype.element_ty == tl.float32).to(Y.dtype.element_ty), mask=m)


@triton.jit
def activation_backward(
    DY, X, B, DX, DB, rows, dy_stride, x_stride,
    ACT: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Axis 0 of the grid: programs that share the rows; axis 1: blocks of columns. DB: [programs, COLS] partials."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    bias = tl.zeros((1, BLOCK), tl.float32)
    if B is not None:
        bias = tl.load(B + c, mask=c < COLS, other=0.0).to(tl.float32)
    for t in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        r = t * ROWS + tl.arange(0, ROWS)[:, None]
        m = (r < rows) & (c < COLS)
        r = r.to(tl.int64)
        x = tl.load(X + r * x_stride + c, mask=m, other=0.0).to(tl.float32) + bias
        dy = tl.load(DY + r * dy_stride + c, mask=m, other=0.0).to(tl.float32)
        _, d = _act_and_grad(x, ACT, X.dtype.element_ty == tl.float32)
        dx = dy * d
        tl.store(DX + r * COLS + c, dx.to(DX.dtype.element_ty), mask=m)
        if DB is not None:
            total += dx
    if DB is not None:
        tl.store(DB + tl.program_id(0) * COLS + c, tl.sum(total, 0, keep_dims=True), mask=c < COLS)


@triton.jit
def gated_forward(
    GATE, UP, Y, rows, gate_stride, up_stride,
    ACT: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """act(gate) * up. Packed gate and up are two pointers into one tensor with one stride."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(COLS, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    r = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    m = (r < rows) & (c < COLS)
    r = r.to(tl.int64)
    gate = tl.load(GATE + r * gate_stride + c, mask=m, other=0.0).to(tl.float32)
    up = tl.load(UP + r * up_stride + c, mask=m, other=0.0).to(tl.float32)
    y = _act(gate, ACT, GATE.dtype.element_ty == tl.float32) * up
    tl.store(Y + r * COLS + c, y.to(Y.dtype.element_ty), mask=m)


@triton.jit
def gated_backward(
    DY, GATE, UP, DGATE, DUP, rows, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ACT: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    blocks = tl.cdiv(COLS, BLOCK)
    c = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    r = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    m = (r < rows) & (c < COLS)
    r = r.to(tl.int64)
    dy = tl.load(DY + r * dy_stride + c, mask=m, other=0.0).to(tl.float32)
    gate = tl.load(GATE + r * gate_stride + c, mask=m, other=0.0).to(tl.float32)
    up = tl.load(UP + r * up_stride + c, mask=m, other=0.0).to(tl.float32)
    y, d = _act_and_grad(gate, ACT, GATE.dtype.element_ty == tl.float32)
    tl.store(DGATE + r * dgate_stride + c, (dy * up * d).to(DGATE.dtype.element_ty), mask=m)
    tl.store(DUP + r * dup_stride + c, (dy * y).to(DUP.dtype.element_ty), mask=m)
