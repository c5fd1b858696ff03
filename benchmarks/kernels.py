"""How fast the templates are: ours, torch's builtins, torch.compile (max-autotune) and Liger, in one run on one GPU.

Every line is one op at one shape by one provider, in bfloat16: the median time of a CUDA-graph replay with the L2 cache
flushed before it, and of that the median over three placements in memory; GB/s of the fewest bytes that the op must
move; and `of_copy`, its share of what a plain elementwise kernel moves in the same harness with as many bytes. Backward
of the peers is their own autograd's. `summary` lines say where we fall short of 0.9 of the copy (and why, where that is
known) or of the best peer, and the geometric mean over the best peer.

    python -m benchmarks.kernels [--rows 8192] [--cols 4096 12288] [--ops norm ...] [--seconds 120] [--warm I/N]

torch.compile takes most of the time. `--warm I/N`, run N at once, only compiles the I-th of N parts of what the peers
need into Inductor's cache on disk, and forgets what it measured of it; the run after it then tunes alone on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels_triton import ops
from kernels_triton.tune import flushed_time

BF16 = torch.bfloat16
NOT_CAPTURED = {("cross_entropy", "liger")}  # it asks the GPU for the number of targets
ROWS, COLS, VOCABULARIES = (4096, 8192, 16384), (1024, 4096, 8192, 12288), (50304, 128256)
CE_TOKENS = 4096
EPS = 1e-5
REASONS = {  # of what falls short of the copy, by what an op's name contains
    "dropout_residual_backward": "sums over rows end in a second kernel, 4.5 us",
    "dropout": "ten rounds of Philox an element: wide multiplications run at a quarter of the rate",
    "causal": "half of the bytes, almost all of the instructions",
    "norm_backward": "sums over rows end in a second kernel, 4.5 us; rows divide unevenly over multiprocessors",
    "gelu_backward": "sums over rows end in a second kernel, 4.5 us",
    "gelu_tanh_backward": "sums over rows end in a second kernel, 4.5 us",
    "cross_entropy": "passes of one row a multiprocessor overlap with memory in part; long rows are read twice",
}


@dataclass(frozen=True)
class Case:
    """One op at one shape: what each provider calls, and the fewest bytes it must move."""

    op: str
    shape: tuple[int, int]
    bytes: int
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)  # made only when they run


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, generator=GENERATOR).to(BF16)


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
    if rows % cols:
        return
    # Causal: rows are queries of square attention matrices, half of which is seen.
    square, grad = x.view(-1, cols, cols), dy.view(-1, cols, cols)
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


def ropes(rows: int, cols: int) -> Iterator[Case]:
    heads = cols // 128
    x, dy = draw(1, rows, heads, 128), draw(1, rows, heads, 128)
    angles = torch.rand(rows, 64, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    wide = [torch.cat((t, t), -1).to(BF16)[None, :, None] for t in (cos, sin)]

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * wide[0] + torch.cat((-b, a), -1) * wide[1]

    fwd, bwd = both(rotate, dy, x)
    size = 4 * rows * cols
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

    ours = lambda: ops.adamw(p, grad, m, v, lr, step, grad_scale=scale, copy=low)  # noqa: E731
    yield Case("adamw", (rows, cols), (24 + 2 + 2) * count, ours, {"eager": lambda: fused})


def cases(rows: list[int], cols: list[int], only: list[str] | None) -> Iterator[Callable[[], Iterator[Case]]]:
    shapes = sorted(((r, c) for r in rows for c in cols), key=lambda s: (s != (8192, 4096), s[0] != 8192, s))
    groups = {"norm": norms, "softmax": softmaxes, "activation": activations, "rope": ropes, "adamw": optimizers}
    for index, (r, c) in enumerate(shapes):
        for name, make in groups.items():
            if (not only or name in only) and not (name == "adamw" and index):
                yield lambda make=make, r=r, c=c: make(r, c)
        if index == 0 and (not only or "cross_entropy" in only):
            for classes in VOCABULARIES:
                yield lambda classes=classes: losses(CE_TOKENS, classes)


def warm(groups: Iterator[Callable[[], Iterator[Case]]], index: int, of: int) -> None:
    """Compiles; the best configurations that Inductor finds on a shared GPU are not kept."""
    import torch._inductor.config as inductor

    inductor.autotune_local_cache = False
    for number, group in enumerate(groups):
        if number % of == index:
            for case in group():
                with contextlib.suppress(Exception):
                    torch._dynamo.reset()
                    case.peers["compile"]()()
                    torch.cuda.synchronize()


_copies: dict[int, float] = {}


def copy_time(size: int) -> float:
    """Milliseconds of a plain elementwise kernel that reads and writes `size` bytes in all."""
    if size not in _copies:
        source = torch.ones(size // 4, dtype=BF16, device=DEVICE)
        target = torch.empty_like(source)
        _copies[size] = timed(lambda: torch.neg(source, out=target))
    return _copies[size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--cols", type=int, nargs="*", default=COLS)
    parser.add_argument("--ops", nargs="*", help="norm, softmax, activation, rope, adamw, cross_entropy")
    parser.add_argument("--seconds", type=float, default=1e9, help="what would start later is left out")
    parser.add_argument("--warm", help="I/N: compile the I-th of N parts of the cases, and time nothing")
    parser.add_argument("--compile-seconds", type=float, default=1e9, help="the same for torch.compile alone")
    options = parser.parse_args()
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward is replayed here, and must leave its saved values alone
    if options.warm:
        warm(cases(options.rows, options.cols, options.ops), *map(int, options.warm.split("/")))
        return
    start = time.monotonic()
    short: list[dict[str, Any]] = []
    ratios: list[float] = []
    for group in cases(options.rows, options.cols, options.ops):
        for case in group():
            if time.monotonic() - start > options.seconds:
                continue
            copy = copy_time(case.bytes)
            ours = timed(case.ours)
            line = {"op": case.op, "shape": case.shape, "provider": "ours", **figures(case, ours, copy)}
            print(json.dumps(line), flush=True)
            best: tuple[float, str] | None = None
            for name, make in case.peers.items():
                if time.monotonic() - start > (options.compile_seconds if name == "compile" else options.seconds):
                    continue
                try:
                    torch._dynamo.reset()
                    spent = timed(make(), capture=(case.op, name) not in NOT_CAPTURED)
                except Exception as failed:
                    what = {"op": case.op, "shape": case.shape, "provider": name}
                    print(json.dumps({**what, "failed": repr(failed)[:200]}))
                    continue
                more = {"op": case.op, "shape": case.shape, "provider": name, **figures(case, spent, copy)}
                print(json.dumps(more), flush=True)
                best = min(best or (spent, name), (spent, name))
            ratio = best[0] / ours if best else None
            if ratio:
                ratios.append(ratio)
            if line["of_copy"] < 0.9 or (ratio is not None and ratio < 1.0):
                against = {"best_peer": best[1], "speedup": round(ratio, 3)} if best and ratio else {}
                found = [why for part, why in REASONS.items() if part in case.op] if line["of_copy"] < 0.9 else []
                why = {"why": found[0]} if found else {}
                short.append({"op": case.op, "shape": case.shape, "of_copy": line["of_copy"], **against, **why})
    for line in short:
        print(json.dumps({"summary": "short", **line}))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    print(json.dumps({"summary": "geometric mean over the best peer", "lines": len(ratios), "speedup": mean}))


def timed(call: Callable[[], Any], capture: bool = True) -> float:
    """The median over a few placements of the outputs in memory, which alone can make 5 % of a difference."""
    spent: list[float] = []
    pads: list[Tensor] = []
    for mebibytes in (0, 34, 70):
        pads.append(torch.empty(mebibytes << 20, dtype=torch.int8, device=DEVICE))
        try:
            spent.append(flushed_time(call, capture=capture))
        except RuntimeError:  # what a library makes on its first call in a capture fails it: then again
            torch.cuda.synchronize()
            spent.append(flushed_time(call, capture=capture))
    return sorted(spent)[1]


def figures(case: Case, spent: float, copy: float) -> dict[str, float]:
    rate = case.bytes / spent / 1e6
    return {"us": round(spent * 1e3, 2), "GB/s": round(rate), "of_copy": round(copy / spent, 3)}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GENERATOR = torch.Generator(DEVICE).manual_seed(0)  # torch's own is the captured graphs'

if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
