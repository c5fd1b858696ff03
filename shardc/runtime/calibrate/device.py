"""Rows of what one device takes: products, elementwise kernels, attention, launches.

On a CPU calls are measured as a step makes them: results are allocated, operands come from memory and not from a cache
that the call before has filled, and attention is what CPUs compute: ATen's kernel in float32, else the definition
(`ir.ops.cpu_attention`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

import shardc.ir.ops.cpu_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what CPUs run)
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.runtime.calibrate.timing import Call, Times, coarse_first, replayed, timed

aten = torch.ops.aten
Shape = tuple[int, int, int, int]  # batch, rows, columns, depth
# Cubes; each of rows, columns and depth small in turn; batches as attention's; odd sizes.
CPU_PRODUCTS: Sequence[Shape] = (
    (1, 32, 32, 32), (1, 64, 64, 64), (1, 128, 128, 128), (1, 256, 256, 256), (1, 512, 512, 512), (1, 768, 768, 768),
    (1, 1024, 256, 256), (1, 256, 1024, 256), (1, 256, 256, 1024), (1, 8, 512, 512), (1, 512, 16, 512),
    (8, 64, 64, 32), (16, 128, 128, 32), (1, 257, 255, 129),
)  # fmt: skip
GPU_PRODUCTS: Sequence[Shape] = (
    (1, 256, 256, 256), (1, 512, 512, 512), (1, 1024, 1024, 1024), (1, 2048, 2048, 2048), (1, 4096, 4096, 4096),
    (1, 8192, 8192, 8192), (1, 8192, 4096, 4096), (1, 8192, 1024, 4096), (1, 8192, 4096, 1024), (1, 4096, 4096, 8192),
    (1, 8192, 16384, 4096), (1, 8192, 4096, 16384), (1, 2048, 4096, 4096), (1, 2048, 2048, 8192), (1, 128, 4096, 4096),
    (1, 16, 4096, 4096), (1, 8192, 50304, 2048), (64, 2048, 2048, 128), (64, 2048, 128, 2048), (32, 512, 512, 64),
)  # fmt: skip
FEW = 5  # shapes of the dtypes that are not the device's first
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float32, torch.float64),
}
CPU_MOVED = [2**n for n in range(14, 28, 2)]
GPU_MOVED = [2**n for n in range(20, 33)]
ELEMENTS = 2**18  # of an operand of `FUNCTIONS`, which a CPU's caches hold
FUNCTIONS = ("exp", "log", "tanh", "sigmoid", "erf", "rsqrt", "sin", "cos")
MOST_OPERANDS, ALL_OPERANDS = 16, 2**26  # of a call on a CPU, and bytes of all of them
# Batch, heads, sequence, width of a head; causal.
CPU_ATTENTION = ((1, 4, 64, 32), (16, 8, 128, 64), (2, 8, 256, 64), (1, 4, 512, 64), (8, 8, 128, 32), (8, 8, 128, 96))
GPU_ATTENTION = (
    *((1, 16, 2048, 128), (4, 8, 2048, 128), (4, 16, 2048, 128), (4, 32, 2048, 128), (2, 8, 4096, 128)),
    *((2, 32, 4096, 128), (1, 8, 8192, 128), (1, 32, 8192, 128)),
)
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SHARES = {
    "product": 0.45,
    "ceiling": 0.2,
    "element": 0.1,
    "attention": 0.2,
    "launch": 0.05,
}  # of the time that there is


def rows(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """All rows, in about so many seconds. What would begin late is left out."""
    yield from products(device, seconds * SHARES["product"])
    yield from elementwise(device, seconds * SHARES["ceiling"])
    yield from elements(device, seconds * SHARES["element"])
    yield from attention(device, seconds * SHARES["attention"])
    yield from launches(device, seconds * SHARES["launch"])


def on_device(call: Any, budget: float, device: str) -> Times:
    """A call's own time: on a GPU replayed from a graph, so that issuing it is not in it."""
    return replayed(call, budget) if device == "cuda" else timed(call, budget, device)


def products(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    first, *others = DTYPES[device]
    shapes = GPU_PRODUCTS if device == "cuda" else CPU_PRODUCTS
    wanted = [(first, shape) for shape in shapes]
    wanted += [(dtype, shape) for dtype in others for shape in shapes[1 : FEW + 1]]
    for (dtype, (batch, m, n, k)), budget in _shared(coarse_first(wanted), seconds):

        def operands(shape: Shape = (batch, m, n, k), dtype: torch.dtype = dtype) -> tuple[torch.Tensor, ...]:
            """The second lies as a linear layer's weight does."""
            batch, m, n, k = shape
            a, b = (torch.randn(batch, of, k, device=device).to(dtype) for of in (m, n))
            return (a[0], b[0].t()) if batch == 1 else (a, b.transpose(1, 2))

        multiply = torch.mm if batch == 1 else torch.bmm
        if device == "cpu":
            call = _from_memory(multiply, operands, batch * (m * k + n * k + m * n) * dtype.itemsize)
        else:
            a, b = operands()
            out = torch.empty(a.shape[:-1] + b.shape[-1:], device=device, dtype=dtype)
            call = _bound(multiply, a, b, out=out)
        times = on_device(call, budget, device)
        name = str(dtype).removeprefix("torch.")
        yield {"kind": "product", "dtype": name, "batch": batch, "rows": m, "columns": n, "depth": k, **times.row()}


def elementwise(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    moved = GPU_MOVED if device == "cuda" else CPU_MOVED
    for size, budget in _shared(coarse_first(moved), seconds):
        if device == "cpu":
            call = _from_memory(torch.neg, lambda size=size: (torch.ones(size // 8),), size)
        else:
            x = torch.ones(size // 8, device=device)
            call = _bound(torch.neg, x, out=torch.empty_like(x))
        times = on_device(call, budget, device)
        yield {"kind": "ceiling", "how": "neg", "mib": size / 2**20, **times.row(1e-3, "ms")}


def elements(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """On a CPU, ops that may compute for longer than they move, of operands that its caches hold."""
    if device != "cpu":
        return
    x, mask = torch.rand(ELEMENTS) + 0.5, torch.arange(ELEMENTS) % 2 == 0
    ids, row = torch.arange(ELEMENTS // 64)[:, None], torch.arange(64)
    calls: dict[str, Call] = {
        "gelu": _bound(gelu, x), "gelu_backward": _bound(aten.gelu_backward, x, x), "silu": _bound(silu, x),
        "gelu_tanh": _bound(gelu, x, approximate="tanh"),
        "gelu_backward_tanh": _bound(aten.gelu_backward, x, x, approximate="tanh"),
        "silu_backward": _bound(aten.silu_backward, x, x), "where": _bound(torch.where, mask, x, 0.0),
        "eq": _bound(torch.eq, ids, row), **{op: _bound(getattr(torch, op), x) for op in FUNCTIONS},
    }  # fmt: skip
    for (op, call), budget in _shared(list(calls.items()), seconds):
        yield {"kind": "element", "op": op, "elements": ELEMENTS, **timed(call, budget, device).row()}


def _from_memory(function: Callable[..., Any], operands: Callable[[], tuple[Any, ...]], size: int) -> Call:
    """A call on one set of operands after another, whose results are kept for a while, as backward's are. One moves so
    many bytes."""
    sets = [operands() for _ in range(max(2, min(MOST_OPERANDS, ALL_OPERANDS // size)))]
    turns, kept = cycle(range(len(sets))), [torch.empty(0)] * len(sets)

    def call() -> None:
        turn = next(turns)
        kept[turn] = function(*sets[turn])

    return call


def attention(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    shapes = GPU_ATTENTION if device == "cuda" else CPU_ATTENTION
    dtype = DTYPES[device][0]
    backends = BACKENDS if device == "cuda" else {"": None}
    wanted = [(name, shape) for shape in shapes for name in backends]
    for (name, (batch, heads, sequence, width)), budget in _shared(coarse_first(wanted), seconds):
        shape = (batch, heads, sequence, width)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=device == "cuda") for _ in range(3))
        gradient = torch.randn(shape, device=device, dtype=dtype)

        def forward(of: Any = (q, k, v), backend: Any = backends[name]) -> Any:
            if backend is None:
                return SDPA(*of, None, True, None, False)
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*of, is_causal=True)

        def both(forward: Any = forward, of: Any = (q, k, v), gradient: torch.Tensor = gradient) -> Any:
            if device == "cpu":
                return SDPA_BWD(gradient, *of, None, *forward(), True, None, False, False)
            return torch.autograd.grad(forward(), of, gradient)

        try:
            with torch.no_grad():
                fwd = on_device(forward, budget / 3, device)
            fwd_bwd = on_device(both, budget * 2 / 3, device)
        except RuntimeError:  # this device has no such backend
            continue
        about = {"backend": name, "dtype": str(dtype).removeprefix("torch."), "mb": batch, "heads": heads}
        times = {**fwd.row(1e-3, "fwd_ms"), **fwd_bwd.row(1e-3, "fwd_bwd_ms")}
        yield {"kind": "attention", **about, "kv_heads": heads, "sequence": sequence, "width": width, **times}


def launches(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """`launch`: the CPU's time for one call that does next to nothing. `gap`: a GPU's between two such kernels."""
    x = torch.ones(8, device=device)
    call = _bound(torch.neg, x, out=torch.empty_like(x))
    if device == "cpu":
        yield {"kind": "launch", "what": "launch", **timed(call, seconds, device).row()}
        return
    count, samples = 500, list[float]()
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        samples.append((time.perf_counter() - begin) / count)
    yield {"kind": "launch", "what": "launch", **Times(tuple(samples)).row()}
    yield {"kind": "launch", "what": "gap", **replayed(call, seconds / 2).row()}


def _bound(function: Any, *args: Any, **kwargs: Any) -> Any:
    def call() -> None:
        function(*args, **kwargs)

    return call


def _shared(wanted: Sequence[Any], seconds: float) -> Iterator[tuple[Any, float]]:
    """What is to be measured, each with its part of the time that is left; nothing once none is."""
    end = time.perf_counter() + seconds
    for index, item in enumerate(wanted):
        left = end - time.perf_counter()
        if left <= 0 and index:
            return
        yield item, left / (len(wanted) - index)
