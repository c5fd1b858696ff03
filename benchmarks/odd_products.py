"""How long do products of odd sizes take: as they are, with padded strides, and padded as by
`shardc/passes/gemm_padding.py`?

    python -m benchmarks.odd_products             on a GPU; a JSON line a size and product
    python -m benchmarks.odd_products --tiny      a rehearsal on any machine; its times mean nothing

bfloat16, x [rows, width] and w [classes, width]: the logits, and the gradients of x and w. Milliseconds, the median of
9. `strides`: logits and their gradient are the first columns of a matrix that is wider; `padded`: so is the product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

SIZES = ((16384, 768, 50257), (16384, 768, 25129), (8192, 2048, 50257), (16384, 770, 3073))
TINY = ((64, 16, 33),)
STEP = 8  # elements: 16 bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on the CPU if there is no GPU")
    asked = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for rows, width, classes in TINY if asked.tiny else SIZES:
        for name, ways in products(rows, width, classes, device).items():
            times = {way: round(milliseconds(call, device), 3) for way, call in ways.items()}
            print(json.dumps({"product": name, "rows": rows, "width": width, "classes": classes, **times}), flush=True)
    return 0


def products(rows: int, width: int, classes: int, device: torch.device) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """By product, the ways to make it."""
    whole = -(-classes // STEP) * STEP

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    x, w, g = drawn(rows, width), drawn(classes, width), drawn(rows, classes)
    more = whole - classes
    even_w, even_g = pad(w, (0, 0, 0, more)), pad(g, (0, more))
    y, even_y = torch.empty_like(g), torch.empty_like(even_g)
    dx, dw, even_dw = torch.empty_like(x), torch.empty_like(w), torch.empty_like(even_w)
    part_y, part_g = even_y[:, :classes], even_g[:, :classes]
    return {
        "logits": {
            "plain": lambda: torch.mm(x, w.t(), out=y),
            "strides": lambda: torch.mm(x, w.t(), out=part_y),
            "padded": lambda: torch.mm(x, even_w.t(), out=even_y),
        },
        "gradient of x": {
            "plain": lambda: torch.mm(g, w, out=dx),
            "strides": lambda: torch.mm(part_g, w, out=dx),
            "padded": lambda: torch.mm(even_g, even_w, out=dx),
        },
        "gradient of w": {
            "plain": lambda: torch.mm(g.t(), x, out=dw),
            "strides": lambda: torch.mm(part_g.t(), x, out=dw),
            "padded": lambda: torch.mm(even_g.t(), x, out=even_dw),
        },
    }


def milliseconds(call: Callable[[], Tensor], device: torch.device) -> float:
    spent: list[float] = []
    for _ in range(2):
        call()
    for _ in range(9):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            spent.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent)


if __name__ == "__main__":
    sys.exit(main())
