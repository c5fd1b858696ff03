"""What does it cost to pack a bucket and to unpack it: microseconds of Python a call, and of the GPU?

GPT-2's block, twelve members, over so many rows: gradients that will be scattered, in float32, and parameters that were
gathered, in bfloat16. `plain` is what runs on a CPU, a copy each; `views` is torch's `_foreach_copy_` of pieces, each
in one row, made beforehand, and allocates nothing; `ours` is what a program's code holds, with what it allocates,
and `fixed` the same where everything has a place for good. `gb_s` is what is read and written in a second of the GPU,
`first_s` how long the first call takes, which compiles.

    python -m benchmarks.bucket_copies [--calls 200]       one JSON line for each way, of each number of rows
    python -m benchmarks.bucket_copies --device cpu        a rehearsal: there the copies themselves take the time
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.buckets import starts, unit_of
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed
from shardc.torch_compat import copy_all

WIDTH = 768
SHAPES: list[tuple[int, ...]] = [
    *((WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3, 12, 64), (12, 64, WIDTH), (WIDTH,)),
    *((WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)),
]
LEADS = [3 if len(shape) == 3 and shape[0] == 3 else 1 for shape in SHAPES]
MIDS: list[int] = [shape[1] if lead > 1 else shape[0] for shape, lead in zip(SHAPES, LEADS, strict=True)]
# 12 heads cannot be cut in eight: there the last rows are padded, as a program has them, and `views` leaves them out.


def python(call: Callable[[], Any], calls: int, sync: Callable[[], None]) -> float:
    """Median microseconds a call, of ten rounds; the GPU is idle before each."""
    spent: list[float] = []
    for _ in range(10):
        sync()
        start = time.perf_counter()
        for _ in range(calls // 10):
            call()
        spent.append((time.perf_counter() - start) / (calls // 10) * 1e6)
    return statistics.median(spent)


def gpu(call: Callable[[], Any], calls: int) -> float:
    """Microseconds a call of its kernels alone: a graph of twenty is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(calls // 20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / (calls // 20 * 20)


def ways(packs: bool, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Any]]:
    unit, chunks = unit_of(dtype), [-(-mid // rows) for mid in MIDS]
    xs = [torch.ones(shape, dtype=dtype, device=device) for shape in SHAPES]
    flat = PACK(xs, LEADS, MIDS, rows, unit)
    sizes, ranks = [n for shape in SHAPES for n in shape], [len(shape) for shape in SHAPES]
    if packs:
        found: dict[str, Callable[[], Any]] = {"plain": lambda: PACK(xs, LEADS, MIDS, rows, unit)}
    else:
        found = {"plain": lambda: UNPACK(flat, LEADS, chunks, rows, unit, MIDS, sizes, ranks)}
    columns = columns_packed([math.prod(shape) for shape in SHAPES], MIDS, rows)
    *offsets, width = starts(columns, unit)
    places = [flat.view(rows, width)[:, start : start + n] for start, n in zip(offsets, columns, strict=True)]
    pieces: list[tuple[Tensor, Tensor]] = []
    for x, place, mid in zip(xs, places, MIDS, strict=True):
        if mid % rows == 0:
            pieces += zip(x.view(rows, -1), place, strict=True)  # type: ignore[arg-type]
    own, there = [list(side) for side in zip(*pieces, strict=True)]
    found["views"] = (lambda: copy_all(there, own)) if packs else (lambda: copy_all(own, there))
    if device.type == "cuda":
        found |= ours(packs, rows, dtype, device, xs, flat)
    return found


def ours(
    packs: bool, rows: int, dtype: torch.dtype, device: torch.device, xs: list[Tensor], flat: Tensor
) -> dict[str, Callable[[], Any]]:
    from kernels_triton.bucket.layout import pack_layout, unpack_layout
    from kernels_triton.bucket.prepared_call import PreparedPack, PreparedUnpack

    unit, every, chunks = unit_of(dtype), range(len(xs)), [-(-mid // rows) for mid in MIDS]
    env = [*xs, flat]
    if packs:
        laid = pack_layout([x.numel() for x in xs], LEADS, MIDS, rows, unit, dtype, every)
        assert laid is not None
        free, fixed = PreparedPack(laid, list(every), None, dtype, device), PreparedPack(laid, xs, flat, dtype, device)
    else:
        back = unpack_layout(SHAPES, LEADS, chunks, MIDS, rows, unit, dtype, every)
        assert back is not None
        free = PreparedUnpack(back, len(xs), SHAPES, {}, every, dtype, device)
        fixed = PreparedUnpack(back, flat, SHAPES, dict(enumerate(xs)), every, dtype, device)
    return {"ours": lambda: free(env), "fixed": lambda: fixed(env)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sync = torch.cuda.synchronize if on_gpu else lambda: None
    with torch.no_grad():
        for packs, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            for rows in (2, 8):
                for name, call in ways(packs, rows, dtype, device).items():
                    start = time.perf_counter()
                    call()
                    first = time.perf_counter() - start
                    line: dict[str, Any] = {"does": "pack" if packs else "unpack", "rows": rows, "way": name}
                    line["python_us"] = round(python(call, options.calls, sync), 1)
                    if on_gpu:
                        moved = 2 * sum(map(math.prod, SHAPES)) * dtype.itemsize
                        spent = gpu(call, options.calls)
                        line |= {
                            "gpu_us": round(spent, 1),
                            "gb_s": round(moved / spent / 1e3),
                            "first_s": round(first, 2),
                        }
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
