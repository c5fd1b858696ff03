"""What benchmarks/kernels.py times: each op of the templates at a shape, what its peers call, and its fewest bytes.

A peer is torch's own op or plain torch (`eager`), the same through torch.compile (max-autotune), and Liger's where it
has one and is installed. Backward of a peer is its own autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels_triton import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GENERATOR = torch.Generator(DEVICE).manual_seed(0)  # torch's own is the captured graphs'
BF16 = torch.bfloat16
ROWS, COLS, VOCABULARIES = (4096, 8192, 16384), (1024, 4096, 8192, 12288), (50304, 128256)
CE_TOKENS = 4096
SHARDS = 4  # of a vocabulary
EPS = 1e-5
VARIANT_ROWS = 8192  # where what runs the same kernels is timed: masks, GeGLU, packed gates
GROUPS, SPACE = 32, 1024  # of GroupNorm: groups of channels, and positions (32 x 32)


@dataclass(frozen=True)
class Case:
    """One op at one shape: what each provider calls, and the fewest bytes it must move."""

    op: str
    shape: tuple[int, int]
    bytes: int
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)  # made only when they run


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, generator=GENERATOR).to(BF16)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)


def forward(function: Callable[..., Any], *inputs: Any) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return function(*inputs)

        return call

    return make


def backward(function: Callable[..., Any], dy: Any, *inputs: Any) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
        out = function(*leaves)
        wanted = [x for x in leaves if torch.is_tensor(x) and x.requires_grad]
        return lambda: torch.autograd.grad(out, wanted, dy, retain_graph=True)

    return make


def both(eager: Callable[..., Any], dy: Any, *inputs: Any, liger: Any = None, plain: Any = None) -> tuple[dict, dict]:
    """Forward and backward peers of a differentiable function. `plain` is what torch.compile gets, if not `eager`."""
    source = plain or eager
    peers = (
        {"eager": forward(eager, *inputs), "compile": lambda: forward(compiled(source), *inputs)()},
        {"eager": backward(eager, dy, *inputs), "compile": lambda: backward(compiled(source), dy, *inputs)()},
    )
    if liger is not None:
        peers[0]["liger"] = forward(liger, *inputs)
        peers[1]["liger"] = backward(liger, dy, *inputs)
    return peers


def liger(name: str) -> Any:
    """A class or function of liger_kernel.ops; None where it is not installed."""
    try:
        import liger_kernel.ops as found

        return getattr(found, name, None)
    except Exception:
        return None


def norms(rows: int, cols: int) -> Iterator[Case]:
    x, residual, dy, beside = (draw(rows, cols) for _ in range(4))
    w, b = draw(cols), draw(cols)
    size = 2 * rows * cols

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.layer_norm(x, (cols,), w, b, EPS)

    def rms(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x, (cols,), w, EPS)

    def add_layer(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return layer(total, w, b), total

    def add_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return rms(total, w), total

    ln, rn, fused = (liger(f"Liger{kind}Function") for kind in ("LayerNorm", "RMSNorm", "FusedAddRMSNorm"))
    liger_ln = ln and (lambda x, w, b: ln.apply(x, w, b, EPS))
    # The last but one says whether dy may be overwritten: it is needed again here.
    liger_rms = rn and (lambda x, w: rn.apply(x, w, EPS, 0.0, "llama", False))
    liger_add = fused and (lambda x, r, w: fused.apply(x, r, w, EPS, 0.0, "llama", False))
    _, mean, rstd = ops.layer_norm(x, w, b, EPS)
    _, rrms = ops.rms_norm(x, w, EPS)
    fwd, bwd = both(layer, dy, x, w, b, liger=liger_ln)
    yield Case("layer_norm", (rows, cols), 2 * size, lambda: ops.layer_norm(x, w, b, EPS), fwd)
    yield Case(
        "layer_norm_backward", (rows, cols), 3 * size, lambda: ops.layer_norm_backward(dy, x, w, mean, rstd), bwd
    )
    fwd, bwd = both(rms, dy, x, w, liger=liger_rms)
    yield Case("rms_norm", (rows, cols), 2 * size, lambda: ops.rms_norm(x, w, EPS), fwd)
    yield Case("rms_norm_backward", (rows, cols), 3 * size, lambda: ops.rms_norm_backward(dy, x, w, rrms), bwd)
    fwd, bwd = both(add_layer, (dy, beside), x, residual, w, b)
    yield Case("add_layer_norm", (rows, cols), 4 * size, lambda: ops.add_layer_norm(x, residual, w, b, EPS), fwd)
    ours = lambda: ops.layer_norm_backward(dy, x, w, mean, rstd, beside)  # noqa: E731
    yield Case("add_layer_norm_backward", (rows, cols), 4 * size, ours, bwd)
    fwd, bwd = both(add_rms, (dy, beside), x, residual, w, liger=liger_add)
    yield Case("add_rms_norm", (rows, cols), 4 * size, lambda: ops.add_rms_norm(x, residual, w, EPS), fwd)
    ours = lambda: ops.rms_norm_backward(dy, x, w, rrms, beside)  # noqa: E731
    yield Case("add_rms_norm_backward", (rows, cols), 4 * size, ours, bwd)


def softmaxes(rows: int, cols: int) -> Iterator[Case]:
    x, dy = draw(rows, cols), draw(rows, cols)
    size = 2 * rows * cols
    y = ops.softmax(x)
    fwd, bwd = both(lambda x: torch.softmax(x, -1), dy, x, liger=(s := liger("LigerSoftmaxFunction")) and s.apply)
    yield Case("softmax", (rows, cols), 2 * size, lambda: ops.softmax(x), fwd)
    yield Case("softmax_backward", (rows, cols), 3 * size, lambda: ops.softmax_backward(dy, y), bwd)
    if rows == VARIANT_ROWS:
        heads, kept = x.view(4, 8, -1, cols), torch.rand(4, 1, 1, cols, device=DEVICE) < 0.8

        def masked(x: Tensor) -> Tensor:
            return torch.softmax((x * 0.125).masked_fill(~kept, -math.inf), -1)

        peers, _ = both(masked, dy, heads)
        yield Case("masked_softmax", (rows, cols), 2 * size, lambda: ops.softmax(heads, 0.125, kept), peers)
    if rows < cols:
        return
    # Causal: rows are queries of square attention matrices, half of which is seen.
    rows -= rows % cols
    square, grad = (t[:rows].view(-1, cols, cols) for t in (x, dy))
    size = 2 * rows * cols
    seen = torch.ones(cols, cols, dtype=torch.bool, device=DEVICE).tril()

    def causal(x: Tensor) -> Tensor:
        return torch.softmax((x * 0.125).masked_fill(~seen, -math.inf), -1)

    z = ops.softmax(square, 0.125, None, True)
    fwd, bwd = both(causal, grad, square)
    half = size // 2
    yield Case("causal_softmax", (rows, cols), half + size, lambda: ops.softmax(square, 0.125, None, True), fwd)
    ours = lambda: ops.softmax_backward(grad, z, 0.125, True)  # noqa: E731
    yield Case("causal_softmax_backward", (rows, cols), 2 * half + size, ours, bwd)


def activations(rows: int, cols: int) -> Iterator[Case]:
    x, up, dy, b = draw(rows, cols), draw(rows, cols), draw(rows, cols), draw(cols)
    size = 2 * rows * cols
    for act, how in (("gelu_tanh", "tanh"), ("gelu", "none")):
        fwd, bwd = both(lambda x, b, how=how: functional.gelu(x + b, approximate=how), dy, x, b)
        yield Case(f"bias_{act}", (rows, cols), 2 * size, lambda act=act: ops.bias_gelu(x, b, act), fwd)
        ours = lambda act=act: ops.bias_gelu_backward(dy, x, b, act)  # noqa: E731
        yield Case(f"bias_{act}_backward", (rows, cols), 3 * size, ours, bwd)
    silu = liger("LigerSiLUMulFunction")
    fwd, bwd = both(lambda x, u: functional.silu(x) * u, dy, x, up, liger=silu and silu.apply)
    yield Case("swiglu", (rows, cols), 3 * size, lambda: ops.gated(x, up), fwd)
    yield Case("swiglu_backward", (rows, cols), 5 * size, lambda: ops.gated_backward(dy, x, up), bwd)
    if rows == VARIANT_ROWS:
        yield from gates(rows, cols)
    fwd, bwd = both(lambda x: functional.relu(x).square(), dy, x)
    yield Case("squared_relu", (rows, cols), 2 * size, lambda: ops.squared_relu(x), fwd)
    yield Case("squared_relu_backward", (rows, cols), 3 * size, lambda: ops.squared_relu_backward(dy, x), bwd)
    seed = torch.tensor(1, device=DEVICE)
    offset = torch.zeros((), dtype=torch.int64, device=DEVICE)
    _, keep = ops.bias_dropout_residual(x, b, up, 0.1, seed, 3)
    fwd, bwd = both(lambda x, b, r: r + functional.dropout(x + b, 0.1, True), dy, x, b, up)
    bits = rows * cols // 8
    ours = lambda: ops.bias_dropout_residual(x, b, up, 0.1, seed, 3, None, offset)  # noqa: E731
    yield Case("bias_dropout_residual", (rows, cols), 3 * size + bits, ours, fwd)
    ours = lambda: ops.bias_dropout_residual_backward(dy, keep, 0.1, b)  # noqa: E731
    yield Case("bias_dropout_residual_backward", (rows, cols), 2 * size + bits, ours, bwd)


def gates(rows: int, cols: int) -> Iterator[Case]:
    """GeGLU, and gates packed with what they multiply."""
    x, up, dy, packed = draw(rows, cols), draw(rows, cols), draw(rows, cols), draw(rows, 2 * cols)
    size = 2 * rows * cols

    def plain(x: Tensor, up: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh") * up

    kind = liger("LigerGELUMulFunction")
    fwd, bwd = both(plain, dy, x, up, liger=kind and kind.apply)
    yield Case("geglu", (rows, cols), 3 * size, lambda: ops.gated(x, up, "gelu_tanh"), fwd)
    yield Case("geglu_backward", (rows, cols), 5 * size, lambda: ops.gated_backward(dy, x, up, "gelu_tanh"), bwd)
    for name, act in (("swiglu", "silu"), ("geglu", "gelu_tanh")):

        def whole(packed: Tensor, act: str = act) -> Tensor:
            x, up = packed.chunk(2, -1)
            return functional.silu(x) * up if act == "silu" else plain(x, up)

        fwd, bwd = both(whole, dy, packed)
        yield Case(f"{name}_packed", (rows, cols), 3 * size, lambda act=act: ops.gated(packed, None, act), fwd)
        ours = lambda act=act: ops.gated_backward(dy, packed, None, act)  # noqa: E731
        yield Case(f"{name}_packed_backward", (rows, cols), 5 * size, ours, bwd)


def groups(rows: int, cols: int) -> Iterator[Case]:
    """GroupNorm of as many elements: cols / 4 channels of 32 x 32 positions."""
    channels = cols // 4
    x, dy = draw(rows // 256, channels, SPACE), draw(rows // 256, channels, SPACE)
    w, b = draw(channels), draw(channels)
    size = 2 * rows * cols

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.group_norm(x, GROUPS, w, b, EPS)

    kind = liger("LigerGroupNormFunction")
    theirs = kind and (lambda x, w, b: kind.apply(x, w, b, channels, GROUPS, EPS))
    _, mean, rstd = ops.group_norm(x, GROUPS, w, b, EPS)
    fwd, bwd = both(plain, dy, x, w, b, liger=theirs)
    yield Case("group_norm", (rows, cols), 2 * size, lambda: ops.group_norm(x, GROUPS, w, b, EPS), fwd)
    ours = lambda: ops.group_norm_backward(dy, x, GROUPS, w, mean, rstd)  # noqa: E731
    yield Case("group_norm_backward", (rows, cols), 3 * size, ours, bwd)


def ropes(rows: int, cols: int) -> Iterator[Case]:
    heads = cols // 128
    x, dy = draw(1, rows, heads, 128), draw(1, rows, heads, 128)
    angles = torch.rand(rows, 64, device=DEVICE)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)  # as models give them; plain torch has each twice in a row
    wide = [torch.cat((t, t), -1)[None, :, None] for t in (cos, sin)]

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * wide[0] + torch.cat((-b, a), -1) * wide[1]

    fwd, bwd = both(rotate, dy, x)
    if kind := liger("LigerRopeFunction"):  # it turns queries and keys at once, in place: half of the heads each
        pair, grads = ([draw(1, rows, heads // 2, 128).transpose(1, 2) for _ in range(2)] for _ in range(2))
        turned = lambda q, k: kind.apply(q, k, wide[0][:, :, 0], wide[1][:, :, 0])  # noqa: E731
        fwd["liger"], bwd["liger"] = forward(turned, *pair), backward(turned, grads, *pair)
    size = 4 * rows * cols + 2 * 2 * rows * 64  # the angles, once
    yield Case("rope", (rows, cols), size, lambda: ops.rope(x, cos, sin), fwd)
    yield Case("rope_backward", (rows, cols), size, lambda: ops.rope(dy, cos, sin, True), bwd)


def losses(tokens: int, classes: int) -> Iterator[Case]:
    logits = draw(tokens, classes)
    target = torch.randint(0, classes, (tokens,), device=DEVICE)
    scale = torch.tensor(1.0 / tokens, device=DEVICE)

    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), target)

    def step(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        leaf = logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(function(leaf), leaf)

    peers = {"eager": lambda: step(loss), "compile": lambda: step(compiled(loss))}
    if function := liger("LigerCrossEntropyFunction"):
        scratch = logits.clone().requires_grad_()  # Liger writes the gradient into its logits
        peers["liger"] = lambda: lambda: function.apply(scratch, target, None, -100)
    size = 4 * tokens * classes
    yield Case("cross_entropy", (tokens, classes), size, lambda: ops.cross_entropy(logits, target, scale), peers)
    yield from shards(tokens, classes // SHARDS)


def shards(tokens: int, classes: int) -> Iterator[Case]:
    """The two passes over one of SHARDS shards of a vocabulary."""
    logits = draw(tokens, classes)
    target = torch.randint(0, SHARDS * classes, (tokens,), device=DEVICE)
    scale = torch.tensor(1.0 / tokens, device=DEVICE)

    def statistics(logits: Tensor, target: Tensor) -> Tensor:
        x = logits.float()
        top = x.amax(-1)
        own = x.gather(1, target.clamp(max=classes - 1)[:, None])[:, 0]
        return torch.stack((top, (x - top[:, None]).exp().sum(-1), torch.where(target < classes, own, 0.0)), -1)

    def finish(logits: Tensor, target: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
        top = stats[..., 0].amax(0)
        lse = top + (stats[..., 1] * (stats[..., 0] - top).exp()).sum(0).log()
        hit = torch.arange(classes, device=logits.device) == target[:, None]
        slope = ((logits.float() - lse[:, None]).exp() - hit.float()) * scale
        return lse - stats[..., 2].sum(0), slope.to(logits.dtype)

    def peers(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Callable[[], Callable[[], Any]]]:
        return {"eager": forward(function, *inputs), "compile": lambda: forward(compiled(function), *inputs)()}

    size = 2 * tokens * classes
    ours = lambda: ops.cross_entropy_stats(logits, target)  # noqa: E731
    yield Case("cross_entropy_stats", (tokens, classes), size, ours, peers(statistics, logits, target))
    stats = ours()[None].expand(SHARDS, -1, -1).contiguous()
    ours = lambda: ops.cross_entropy_finish(logits, target, stats, SHARDS * classes, 0, scale)  # noqa: E731
    yield Case("cross_entropy_finish", (tokens, classes), 2 * size, ours, peers(finish, logits, target, stats))


def optimizers(rows: int, cols: int) -> Iterator[Case]:
    count = rows * cols
    p, g, m, v = (torch.rand(count, device=DEVICE) for _ in range(4))
    low, grad = p.to(BF16), g.to(BF16)
    lr, step, scale = (torch.tensor(value, device=DEVICE) for value in (1e-3, 2.0, 0.5))

    def fused() -> None:  # torch's fused AdamW knows no low-precision gradient or copy of a float32 parameter
        wide = grad.float().mul_(scale)
        torch._fused_adamw_(
            [p], [wide], [m], [v], [], [step], lr=lr, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        low.copy_(p)

    def plain(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, low: Tensor) -> None:
        wide = grad.float() * scale
        m.lerp_(wide, 0.1)
        v.mul_(0.999).addcmul_(wide, wide, value=0.001)
        root = (v / (1 - 0.999**step)).sqrt() + 1e-8
        p.mul_(1 - lr * 0.01).sub_(lr / (1 - 0.9**step) * m / root)
        low.copy_(p)

    peers = {"eager": lambda: fused, "compile": lambda: forward(compiled(plain), p, grad, m, v, low)()}
    ours = lambda: ops.adamw(p, grad, m, v, lr, step, grad_scale=scale, copy=low)  # noqa: E731
    yield Case("adamw", (rows, cols), (24 + 2 + 2) * count, ours, peers)
