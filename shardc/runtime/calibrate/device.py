"""Rows of what one device takes: products, elementwise kernels, attention, launches.

On a CPU calls are measured as a step makes them: results are allocated, operands come from memory, each follows a
kernel that has filled the caches (`eviction`), and attention is what CPUs compute: ATen's kernel in float32, else the
definition (`ir.ops.cpu_attention`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
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
    (1, 1024, 256, 256), (1, 256, 1024, 256), (1, 256, 256, 1024), (1, 2048, 512, 512), (1, 512, 2048, 512),
    (1, 512, 512, 2048), (1, 8, 512, 512), (1, 512, 16, 512),
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
ELEMENTS = 2**18  # of an operand of `FUNCTIONS`
FUNCTIONS = ("exp", "log", "tanh", "sigmoid", "erf", "rsqrt", "sin", "cos")
MOST_OPERANDS, ALL_OPERANDS = 64, 2**27  # of a call on a CPU, and bytes of all of them: as many as a step holds
FEW_OPERANDS = 16  # of a product, one of whose operands the call before it has just written
MOVED_BEFORE = (2**22, 2**20, 2**17, 2**12)  # bytes of the kernel before a call: the first fill the caches of a core
# Batch, heads, sequence, width of a head; causal.
CPU_ATTENTION = ((1, 4, 64, 32), (16, 8, 128, 64), (2, 8, 256, 64), (1, 4, 512, 64), (8, 8, 128, 32), (8, 8, 128, 96))
GPU_ATTENTION = (
    *((1, 16, 2048, 128), (4, 8, 2048, 128), (4, 16, 2048, 128), (4, 32, 2048, 128), (2, 8, 4096, 128)),
    *((2, 32, 4096, 128), (1, 8, 8192, 128), (1, 32, 8192, 128)),
)
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SHARES = {
    "product": 0.43,
    "ceiling": 0.15,
    "element": 0.14,
    "attention": 0.2,
    "launch": 0.02,
    "call": 0.06,
}  # of the time that there is


def rows(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """All rows, in about so many seconds. What would begin late is left out."""
    yield from products(device, seconds * SHARES["product"])
    yield from elementwise(device, seconds * SHARES["ceiling"])
    yield from elements(device, seconds * SHARES["element"])
    yield from attention(device, seconds * SHARES["attention"])
    yield from launches(device, seconds * SHARES["launch"])
    yield from calls(device, seconds * SHARES["call"])


def on_device(call: Any, budget: float, device: str) -> Times:
    """A call's own time: on a GPU replayed from a graph, so that issuing it is not in it."""
    return replayed(call, budget) if device == "cuda" else timed(call, budget, device, before=eviction())


@cache
def eviction() -> Call:
    """A kernel on a CPU that leaves none of what was in a core's caches."""
    return _moving(MOVED_BEFORE[0])


def _moving(size: int) -> Call:
    """A kernel on a CPU that reads and writes so many bytes."""
    return _from_memory(torch.neg, lambda: (torch.ones(size // 8),), size, most=FEW_OPERANDS)


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
            moved = batch * (m * k + n * k + m * n) * dtype.itemsize
            call = _from_memory(multiply, operands, moved, most=FEW_OPERANDS)
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
    """On a CPU, ops that may compute for longer than they move."""
    if device != "cpu":
        return

    def one() -> tuple[torch.Tensor]:
        return (torch.rand(ELEMENTS) + 0.5,)

    mask, ids, row = torch.arange(ELEMENTS) % 2 == 0, torch.arange(ELEMENTS // 64)[:, None], torch.arange(64)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"), "silu": silu,
        "gelu_backward": lambda x: aten.gelu_backward(x, x),
        "gelu_backward_tanh": lambda x: aten.gelu_backward(x, x, approximate="tanh"),
        "silu_backward": lambda x: aten.silu_backward(x, x), "where": lambda x: torch.where(mask, x, 0.0),
        "eq": lambda _: torch.eq(ids, row), **{op: getattr(torch, op) for op in FUNCTIONS},
    }  # fmt: skip
    for (op, call), budget in _shared(list(calls.items()), seconds):
        times = on_device(_from_memory(call, one, 8 * ELEMENTS), budget, device)
        yield {"kind": "element", "op": op, "elements": ELEMENTS, **times.row()}


def _from_memory(
    function: Callable[..., Any], operands: Callable[[], tuple[Any, ...]], size: int, most: int = MOST_OPERANDS
) -> Call:
    """A call on one set of operands after another, whose results are kept for a while, as backward's are. One moves so
    many bytes."""
    first = operands()
    copies = max(2, min(most, ALL_OPERANDS // size)) - 1
    # With the strides of the first: a weight lies transposed.
    sets = [first, *(tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in first) for _ in range(copies))]
    turns, kept = cycle(range(len(sets))), [torch.empty(0)] * len(sets)

    def call() -> None:
        turn = next(turns)
        kept[turn] = function(*sets[turn])

    return call


def attention(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    shapes = GPU_ATTENTION if device == "cuda" else CPU_ATTENTION
    dtype = DTYPES[device][0]
    wanted = [(name, shape) for shape in shapes for name in (BACKENDS if device == "cuda" else ("",))]
    for (name, shape), budget in _shared(coarse_first(wanted), seconds):
        try:
            with torch.no_grad():
                forward, both = (_attention_on_cpu if device == "cpu" else _attention_on_gpu)(
                    name, shape, dtype, budget
                )
        except RuntimeError:  # this device has no such backend
            continue
        batch, heads, sequence, width = shape
        about = {"backend": name, "dtype": str(dtype).removeprefix("torch."), "mb": batch, "heads": heads}
        times = {**forward.row(1e-3, "fwd_ms"), **both.row(1e-3, "fwd_bwd_ms")}
        yield {"kind": "attention", **about, "kv_heads": heads, "sequence": sequence, "width": width, **times}


def _attention_on_gpu(backend: str, shape: Shape, dtype: torch.dtype, budget: float) -> tuple[Times, Times]:
    """Forward; forward and backward."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device="cuda", dtype=dtype)

    def forward() -> torch.Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(forward(), (q, k, v), gradient)

    return on_device(forward, budget / 3, "cuda"), on_device(both, budget * 2 / 3, "cuda")


def _attention_on_cpu(_: str, shape: Shape, dtype: torch.dtype, budget: float) -> tuple[Times, Times]:
    """The same of what CPUs run; backward finds nothing of forward in the caches, as in a step."""

    def operands() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape, dtype=dtype) for _ in range(3))

    def forward(*of: torch.Tensor) -> Any:
        return SDPA(*of, None, True, None, False)

    def saved() -> tuple[Any, ...]:
        of = operands()
        return (torch.randn(shape, dtype=dtype), *of, None, *forward(*of))

    def backward(*of: Any) -> Any:
        return SDPA_BWD(*of, True, None, False, False)

    size = 4 * math.prod(shape) * dtype.itemsize
    first = on_device(_from_memory(forward, operands, size), budget / 3, "cpu")
    second = on_device(_from_memory(backward, saved, 2 * size), budget * 2 / 3, "cpu")
    return first, Times(tuple(first.median + sample for sample in second.samples))


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


def calls(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """What a call that does next to nothing takes on a CPU after a kernel that moved some bytes: right after it, and
    after a view in between."""
    if device != "cpu":
        return
    x, y = torch.ones(8), torch.ones(8)
    call, view = _bound(aten.add.Tensor, x, y), _bound(aten.view.default, x, [2, 4])
    for moved, budget in _shared(coarse_first(MOVED_BEFORE), seconds):
        kernel = _moving(moved)

        def viewed(kernel: Call = kernel) -> None:
            kernel()
            view()

        first, later = (timed(call, budget / 2, device, before=before) for before in (kernel, viewed))
        yield {"kind": "call", "moved": moved, **first.row(name="first_us"), **later.row(name="later_us")}


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
