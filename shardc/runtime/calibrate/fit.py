"""Tables of hardware that come nearest to measurements.

collectives   a series a kind, group size and graph: medians, which never fall as messages grow (`ir.curve.rising`).
              With graphs, messages are measured up to some size; beyond it those without count, from where they take
              half as long again as the shortest: there the CPU does not bound them.
attention     start, rate and waste on the diagonal, a direction and backend: least squares of relative errors over
              the shapes' shortest times. A shape's longer ones waited for the CPU.
memory        an elementwise kernel by bytes
products      rate, start of a product and start of a tile, by a search; samples correct what is left
launches      medians
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from statistics import median
from typing import Any

import torch

from shardc.ir.curve import rising
from shardc.ir.device_rates import ProductRate
from shardc.runtime.calibrate.rows import Row

KINDS = {"p2p": "send", "ring_shift": "permute"}
ISSUED = 1.5  # times the shortest of a series, from where the CPU does not bound it
SMALLEST = 2.5e-6  # seconds of a kernel that moves next to nothing
BACKWARD = 2.5  # FLOPs of an attention's backward, by those of its forward
Points = tuple[tuple[float, float], ...]


def tables(rows: Sequence[Row]) -> dict[str, Any]:
    """Tables, as `Hardware.of` takes them, of what the rows tell. Links are of one level, inside a node."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    fits: dict[str, Callable[[list[Row]], Any]] = {
        "collective": lambda of: ("links", [{"name": "node", "series": collective_series(of)}]),
        "attention": lambda of: ("attention", attention_rates(of)),
        "ceiling": lambda of: ("memory", memory_points(of)),
        "contention": lambda of: ("contention", contention(of)),
    }
    return dict(fits[kind](found) for kind, found in by_kind.items() if kind in fits)


# ---------------------------------------------------------------------- collectives
def kind_of(row: Row) -> str:
    """Of a measured collective, the kind as `ir.links` names it."""
    op: str = row["op"]
    return KINDS.get(op, op)


def collective_series(rows: Iterable[Row]) -> list[dict[str, Any]]:
    times: dict[tuple[str, int, bool], dict[int, list[float]]] = {}
    for row in rows:
        series = times.setdefault((kind_of(row), row["group"], row["graph"]), {})
        series.setdefault(row["bytes"], []).append(row["us"] * 1e-6)
    medians = {key: {size: median(of) for size, of in series.items()} for key, series in times.items()}
    for (kind, group, graph), series in medians.items():
        if graph and (issued := medians.get((kind, group, False))):
            shortest = min(issued.values())
            beyond = {size: t for size, t in issued.items() if size > max(series) and t > ISSUED * shortest}
            series.update(beyond)
    return [
        {"kind": kind, "group": group, **({"graph": True} if graph else {}), "seconds": rising(series.items())}
        for (kind, group, graph), series in sorted(medians.items())
    ]


# ---------------------------------------------------------------------- attention
def attention_rates(rows: Iterable[Row], dtypes: Sequence[str] = ("bfloat16", "float16")) -> list[dict[str, Any]]:
    """A rate a backend and direction; the quickest backend first."""
    shapes: dict[str, dict[tuple[float, float], tuple[float, float]]] = {}
    for row in rows:
        flops = 2.0 * row["mb"] * row["heads"] * row["sequence"] ** 2 * row["width"]  # causal
        of = shapes.setdefault(row["backend"], {})
        forward, both = of.get((flops, row["sequence"]), (math.inf, math.inf))
        of[flops, row["sequence"]] = (min(forward, row["fwd_ms"] * 1e-3), min(both, row["fwd_bwd_ms"] * 1e-3))
    fitted: list[tuple[float, dict[str, Any]]] = []
    for backend, of in shapes.items():
        for backward in (False, True):
            times = {
                (flops * (BACKWARD if backward else 1), sequence): both - forward if backward else forward
                for (flops, sequence), (forward, both) in of.items()
            }
            entry = {"dtypes": list(dtypes), "backend": backend, "backward": backward, **saturating(times)}
            fitted.append((sum(both for _, both in of.values()), entry))
    return [entry for _, entry in sorted(fitted, key=lambda pair: pair[0])]


def saturating(times: Mapping[tuple[float, float], float]) -> dict[str, float]:
    """The figures of an `AttentionRate`, by seconds of (FLOPs, sequence)."""
    terms = torch.tensor([[1.0, n, flops, flops / n] for flops, n in times], dtype=torch.float64)
    seconds = torch.tensor(list(times.values()), dtype=torch.float64)
    start, keys, slope, waste = nonnegative(terms / seconds[:, None], torch.ones_like(seconds), needed=(2,))
    return {
        "flops_per_second": 1 / slope, "start_seconds": start, "key_seconds": keys, "tile": round(waste / slope)
    }  # fmt: skip


def nonnegative(columns: torch.Tensor, target: torch.Tensor, needed: Sequence[int] = ()) -> list[float]:
    """Coefficients of least squares, none below 0 and those `needed` above: the best over the subsets of columns."""
    best: tuple[float, list[float]] = (math.inf, [])
    count = columns.shape[1]
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            if not set(needed) <= set(subset) or size > columns.shape[0]:
                continue
            part = columns[:, list(subset)]
            scale = part.norm(dim=0).clamp_min(1e-300)
            solved = torch.linalg.lstsq(part / scale, target[:, None], driver="gelsd").solution[:, 0] / scale
            error = float((part @ solved - target).square().sum())
            if (
                bool((solved >= 0).all())
                and all(solved[subset.index(n)] > 0 for n in needed)
                and error < best[0] - 1e-12
            ):
                whole = [0.0] * count
                for index, value in zip(subset, solved.tolist(), strict=True):
                    whole[index] = value
                best = (error, whole)
    assert best[1], "no coefficients fit"
    return best[1]


# ---------------------------------------------------------------------- memory, products, launches, contention
def memory_points(rows: Iterable[Row]) -> Points:
    """By the quickest kernel of each size. Below the smallest, its segment goes on, to `SMALLEST` at the most."""
    times: dict[float, float] = {}
    for row in rows:
        size = row["mib"] * 2**20
        times[size] = min(times.get(size, math.inf), row["ms"] * 1e-3)
    points = rising(times.items())
    if len(points) < 2:
        return points
    (x0, y0), (x1, y1) = points[:2]
    return ((0, max(1e-9, min(SMALLEST, y0 - (y1 - y0) * x0 / (x1 - x0)))), *points)


def product_rate(rows: Sequence[Row], like: ProductRate, memory_rate: float) -> ProductRate:
    """The rate of products of one dtype, with the units and tiles of `like`; samples correct what figures leave."""
    times: dict[tuple[int, int, int, int], list[float]] = {}
    for row in rows:
        times.setdefault((row["batch"], row["rows"], row["columns"], row["depth"]), []).append(row["us"] * 1e-6)
    shapes = {shape: median(of) for shape, of in times.items()}

    def misfit(rate: ProductRate) -> float:
        errors = [abs(math.log(rate.model_seconds(*shape, memory_rate) / t)) for shape, t in shapes.items()]
        return sum(errors)

    quickest = max(2 * math.prod(shape) / t for shape, t in shapes.items())
    starts = [0.0, *(min(shapes.values()) * share for share in (0.25, 0.5, 0.75, 0.95))]
    depths = sorted({0, 16, 32, 64, 128, 256, like.depth_start})
    rates = [quickest * 1.02**n for n in range(-15, 11)]
    candidates = (
        like.model_copy(update={"flops_per_second": rate, "start_seconds": start, "depth_start": depth, "samples": ()})
        for rate, start, depth in product(rates, starts, depths)
    )
    best = min(candidates, key=misfit)
    return best.model_copy(update={"samples": tuple((*shape, t) for shape, t in sorted(shapes.items()))})


def contention(rows: Iterable[Row]) -> dict[str, float]:
    """Times as long, beside the other."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["what"], []).append(row["beside_us"] / row["alone_us"])
    return {what: max(1.0, round(median(of), 3)) for what, of in ratios.items()}


def launch_seconds(rows: Iterable[Row], what: str) -> float | None:
    times = [row["us"] * 1e-6 for row in rows if row["kind"] == "launch" and row["what"] == what]
    return median(times) if times else None
