"""Activations: bias + GeLU, SwiGLU, GeGLU and squared ReLU. Forward, and backward that recomputes the forward.

Both GeLUs are `x * logistic(u(x))`. This equals the tanh form; for erf, in 16 bits, u is the logit of the normal
distribution as a polynomial. This form has no cancellation where x is very negative, and few instructions: otherwise
these kernels would be bound by arithmetic, not by memory. Tiles are `ROWS x BLOCK`. Kernels that also sum over rows (a
bias's gradient) step down one block of columns and leave partial sums for `column_sums`.
"""

import triton
import triton.language as tl

from kernels_triton.library.kernels.arithmetic import LOG2E, logistic, normal, quotient


@triton.jit
def _below(x, EXACT: tl.constexpr):
    """The normal distribution function at x."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) if EXACT else normal(x)


@triton.jit
def _act(x, ACT: tl.constexpr, EXACT: tl.constexpr):
    if ACT == "silu":
        y = quotient(x, 1.0 + tl.exp2(x * -LOG2E))
    elif ACT == "gelu_tanh":
        # 2 * sqrt(2 / pi) * (x + 0.044715 x^3), in units of log 2
        y = quotient(x, 1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * (x * x))))
    elif ACT == "gelu":
        y = x * _below(x, EXACT)
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = positive * positive
    return y


@triton.jit
def _act_and_grad(x, dy, ACT: tl.constexpr, EXACT: tl.constexpr):
    """(f(x), dy * f'(x))."""
    if ACT == "silu":
        s = logistic(x)
        y = x * s
        dx = dy * (s + y * (1.0 - s))
    elif ACT == "gelu_tanh":
        # Past 14 the logistic is 0 or 1 in float32. A square that overflows would turn its slope, 0, into NaN.
        square = tl.minimum(x * x, 200.0)
        s = quotient(1.0, 1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * square)))
        y = x * s
        dx = dy * (s + (y - y * s) * (1.5957691216057308 + 0.2140644488 * square))
    elif ACT == "gelu":
        s = _below(x, EXACT)
        y = x * s
        dx = dy * (s + x * (0.3989422804014327 * tl.exp2(x * x * (-0.5 * LOG2E))))
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = positive * positive
        # Doubled last: twice an x past 1.7e38 would be infinite for any dy. No gradient passes where x is not positive,
        # not even an infinite one.
        dx = tl.where(x <= 0.0, 0.0, 2.0 * (dy * positive))
    return y, dx


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
def _backward_tile(
    DY, X, bias, DX, t, c, rows, dy_stride, x_stride, ACT: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr
):
    """Stores the gradient of tile t, and returns it in float32: zeros after the rows and columns."""
    r = t * ROWS + tl.arange(0, ROWS)[:, None]
    m = (r < rows) & (c < COLS)
    r = r.to(tl.int64)
    x = tl.load(X + r * x_stride + c, mask=m, other=0.0).to(tl.float32) + bias
    dy = tl.load(DY + r * dy_stride + c, mask=m, other=0.0).to(tl.float32)
    _, dx = _act_and_grad(x, dy, ACT, X.dtype.element_ty == tl.float32)
    tl.store(DX + r * COLS + c, dx.to(DX.dtype.element_ty), mask=m)
    return dx


@triton.jit
def activation_backward(
    DY, X, B, DX, DB, rows, dy_stride, x_stride,
    ACT: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a tile. With DB, the programs of a block of columns share its tiles and write [programs, COLS]
    partials.

    Programs of one row are neighbours.
    """
    blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    program = tl.program_id(0) // blocks
    c = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    bias = tl.zeros((1, BLOCK), tl.float32)
    if B is not None:
        bias = tl.load(B + c, mask=c < COLS, other=0.0).to(tl.float32)
    if DB is None:
        _backward_tile(DY, X, bias, DX, program, c, rows, dy_stride, x_stride, ACT, COLS, ROWS)
    else:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for t in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0) // blocks, num_stages=STAGES):
            total += _backward_tile(DY, X, bias, DX, t, c, rows, dy_stride, x_stride, ACT, COLS, ROWS)
        tl.store(DB + program.to(tl.int64) * COLS + c, tl.sum(total, 0, keep_dims=True), mask=c < COLS)


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
    y, dgate = _act_and_grad(gate, dy * up, ACT, GATE.dtype.element_ty == tl.float32)
    tl.store(DGATE + r * dgate_stride + c, dgate.to(DGATE.dtype.element_ty), mask=m)
    tl.store(DUP + r * dup_stride + c, (dy * y).to(DUP.dtype.element_ty), mask=m)
