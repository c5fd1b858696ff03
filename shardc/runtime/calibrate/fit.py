"""Tables of hardware that come nearest to measurements.

collectives   a series a kind, group size and graph: medians, which never fall as messages grow (`ir.curve.rising`).
              With graphs, messages are measured up to some size; beyond it those without count, from where they take
              half as long again as the shortest: there the CPU does not bound them.
attention     start, rate and waste on the diagonal, a direction and backend: least squares of relative errors over
              the shapes' shortest times. A shape's longer ones waited for the CPU. On a CPU start, rate and scores, of
              medians.
memory        an elementwise kernel by bytes: the median of the quickest one
products      rate, start of a product and start of a tile, by a search; samples correct what is left
launches      medians
elements      ops that take longer than moving their bytes does: medians
calls         what a CPU's call takes beside its work, after kernels of several sizes: medians
cores         what work beside a collective took longer: a share of its seconds, and as much for each: least errors
neighbours    what work took longer while other ranks computed: the median
units         of a GPU, that a collective takes from products: those with which tiles come nearest to the ratios
meetings      the jitter by which ranks that computed for some time waited for each other: the median; where the times
              span two orders of magnitude, with the time constant that comes nearest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from statistics import median
from typing import Any

import torch

from shardc.ir.curve import rising, seconds_at
from shardc.ir.device_rates import ProductRate
from shardc.ir.hardware import DTYPES
from shardc.ir.links import sent_share
from shardc.ir.slowdowns import Meetings
from shardc.runtime.calibrate.rows import Row

KINDS = {"p2p": "send", "ring_shift": "permute"}
ISSUED = 1.5  # times the shortest of a series, from where the CPU does not bound it
SMALLEST = 2.5e-6  # seconds of a kernel that moves next to nothing
BACKWARD = 2.5  # FLOPs of an attention's backward, by those of its forward
SPAN = 50  # times as long as the shortest: pieces of work that tell how long a rank keeps its speed
STEADY = (0.0, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)  # seconds
SEQUENTIAL = ProductRate(dtypes=(), flops_per_second=1e12)  # no tiles: time by FLOPs, as on a CPU
Points = tuple[tuple[float, float], ...]


def tables(rows: Sequence[Row], like: ProductRate | None = None) -> dict[str, Any]:
    """Tables, as `Hardware.of` takes them, of what the rows tell. Links are of one level, inside a node; products have
    the units and tiles of `like`."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    fitted: dict[str, Any] = {}
    calling = SMALLEST
    calls = by_kind.get("call", [])
    if len({row["moved"] for row in calls}) > 1:  # else there was no time to tell what a call takes after little
        fitted["calls"] = {name: call_points(calls, f"{name}_us") for name in ("first", "later")}
        calling = fitted["calls"]["first"][-1][1]
    if ceilings := by_kind.get("ceiling"):
        fitted["memory"] = memory_points(ceilings, max(SMALLEST, calling))
    if products := by_kind.get("product"):
        memory_rate = fitted["memory"][-1][0] / fitted["memory"][-1][1] if "memory" in fitted else 1e18
        rates = [product_rate(of, like or SEQUENTIAL, memory_rate) for of in _by_dtype(products).values()]
        fitted["products"] = [rate.model_dump(exclude_defaults=True) for rate in rates]
    if attentions := by_kind.get("attention"):
        fitted["attention"] = [
            rate for dtype, of in _by_dtype(attentions).items() for rate in attention_rates(of, equals(dtype))
        ]
    if collectives := by_kind.get("collective"):
        fitted["links"] = [{"name": "node", "series": collective_series(collectives)}]
    if beside := by_kind.get("contention"):
        fitted["contention"] = contention(beside, like)
    if beside := by_kind.get("cores"):
        fitted["contention"] = cores(beside)
    if beside := by_kind.get("neighbours"):
        times = median(row["beside_us"] / row["alone_us"] for row in beside)
        fitted["contention"] = fitted.get("contention", {}) | {"neighbours": min(100.0, max(1.0, round(times, 3)))}
    if meetings := by_kind.get("meeting"):
        fitted["meetings"] = jitter(meetings)
    if elements := by_kind.get("element"):
        fitted["elements"] = element_seconds(elements, fitted.get("memory", ()), calling if "calls" in fitted else 0.0)
    return fitted


def _by_dtype(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows that do not say are of bfloat16."""
    by_dtype: dict[str, list[Row]] = {}
    for row in rows:
        by_dtype.setdefault(row.get("dtype", "bfloat16"), []).append(row)
    return by_dtype


def equals(dtype: str) -> list[str]:
    """The dtypes whose products are as fast."""
    return ["bfloat16", "float16"] if dtype == "bfloat16" else [dtype]


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
def attention_rates(rows: Iterable[Row], dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """A rate a backend and direction, for these dtypes; the quickest backend first."""
    rows_of: dict[str, dict[tuple[float, float, float], list[tuple[float, float]]]] = {}
    for row in rows:
        flops = 2.0 * row["mb"] * row["heads"] * row["sequence"] ** 2 * row["width"]  # causal
        of = rows_of.setdefault(row["backend"], {})
        shape = flops, row["sequence"], row["width"]
        of.setdefault(shape, []).append((row["fwd_ms"] * 1e-3, row["fwd_bwd_ms"] * 1e-3))
    fitted: list[tuple[float, dict[str, Any]]] = []
    for backend, by_shape in rows_of.items():
        middle = min if backend else median
        of = {shape: tuple(map(middle, zip(*times, strict=True))) for shape, times in by_shape.items()}
        for backward in (False, True):
            times = {
                # Two measurements of a busy host may differ by more than backward takes.
                (flops * (BACKWARD if backward else 1), sequence, width): max(both - forward, both / 10)
                if backward
                else forward
                for (flops, sequence, width), (forward, both) in of.items()
            }
            # An attention without a backend is a CPU's, where softmax of the scores takes as long as products do.
            figures = {"backend": backend, "backward": backward, **(saturating if backend else by_scores)(times)}
            entry = {"dtypes": list(dtypes), **{name: figure for name, figure in figures.items() if figure}}
            fitted.append((sum(both for _, both in of.values()), entry))
    return [entry for _, entry in sorted(fitted, key=lambda pair: pair[0])]


def by_scores(times: Mapping[tuple[float, float, float], float]) -> dict[str, float]:
    """The same of one whose softmax takes time by the scores, whatever a head's width."""
    terms = torch.tensor([[1.0, flops, flops / width] for flops, _, width in times], dtype=torch.float64)
    seconds = torch.tensor(list(times.values()), dtype=torch.float64)
    start, slope, scores = nonnegative(terms / seconds[:, None], torch.ones_like(seconds), needed=(1,))
    return {"flops_per_second": 1 / slope, "start_seconds": start, "score_width": round(scores / slope)}


def saturating(times: Mapping[tuple[float, float, float], float]) -> dict[str, float]:
    """The figures of an `AttentionRate`, by seconds of (FLOPs, sequence, width)."""
    terms = torch.tensor([[1.0, n, flops, flops / n] for flops, n, _ in times], dtype=torch.float64)
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
def memory_points(rows: Iterable[Row], smallest: float = SMALLEST) -> Points:
    """By the median of each size's quickest kernel. Below the smallest, its segment goes on, to `smallest` at most."""
    times: dict[float, dict[str, list[float]]] = {}
    for row in rows:
        times.setdefault(row["mib"] * 2**20, {}).setdefault(row["how"], []).append(row["ms"] * 1e-3)
    points = rising((size, min(map(median, kernels.values()))) for size, kernels in times.items())
    if len(points) < 2:
        return points
    (x0, y0), (x1, y1) = points[:2]
    return ((0, max(1e-9, min(smallest, y0 - (y1 - y0) * x0 / (x1 - x0)))), *points)


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
        like.changed(flops_per_second=rate, start_seconds=start, depth_start=depth, samples=())
        for rate, start, depth in product(rates, starts, depths)
    )
    best = min(candidates, key=misfit)
    samples = tuple((*shape, t) for shape, t in sorted(shapes.items()))
    return best.changed(dtypes=tuple(equals(rows[0].get("dtype", "bfloat16"))), samples=samples)


def contention(rows: Iterable[Row], rate: ProductRate | None = None) -> dict[str, float]:
    """Times as long, beside the other; and by the tiles of `rate` the units that products lose."""
    ratios: dict[str, list[float]] = {}
    shaped: list[tuple[tuple[int, int, int, int], float]] = []
    for row in rows:
        ratio = row["beside_us"] / row["alone_us"]
        ratios.setdefault(row["what"], []).append(ratio)
        if row["what"] == "product" and "rows" in row:
            shaped.append(((1, row["rows"], row["columns"], row["depth"]), ratio))
    found: dict[str, float] = {what: min(100.0, max(1.0, round(median(of), 3))) for what, of in ratios.items()}
    if rate is not None and rate.units > 1 and shaped:
        found["units"] = _units(rate, shaped)
    return found


def _units(rate: ProductRate, shaped: Sequence[tuple[tuple[int, int, int, int], float]]) -> int:
    """The middle of the numbers that come nearest: tiles are dealt in rounds, so several are as good."""
    misfits = {
        taken: sum(math.log(rate.slowdown(*shape, 1e18, taken) / ratio) ** 2 for shape, ratio in shaped)
        for taken in range(rate.units // 2 + 1)
    }
    least = min(misfits.values())
    nearest = [taken for taken, misfit in misfits.items() if misfit <= least * (1 + 1e-9)]
    return nearest[len(nearest) // 2]


def cores(rows: Iterable[Row]) -> dict[str, float]:
    """Of `Contention`: what collectives take of the cores that compute, from what both took together.

    A share of their seconds, 1 at the most, and as much again for each. Schedulers of cores make single times wrong by
    far, so the sum of errors is least, not of their squares. Each is divided by the time alone plus what was taken. The
    least sum lies where two of the times, a time and a bound, or two bounds are met exactly.
    """
    points = [
        (row["collective_us"] * 1e-6 / row["times"], max(0.0, row["both_us"] - row["work_us"]) * 1e-6 / row["times"])
        for row in rows
    ]
    candidates = [(0.0, 0.0), (1.0, 0.0)]
    candidates += [pair for alone, more in points for pair in ((more / alone, 0.0), (0.0, more), (1.0, more - alone))]
    for (x0, y0), (x1, y1) in combinations(points, 2):
        if x0 != x1:
            share = (y1 - y0) / (x1 - x0)
            candidates.append((share, y0 - share * x0))

    def misfit(pair: tuple[float, float]) -> float:
        return sum(abs(pair[0] * alone + pair[1] - more) / (alone + more) for alone, more in points)

    possible = (pair for pair in candidates if 0 <= pair[0] <= 1 and pair[1] >= 0)
    share, switch = min(possible, key=lambda pair: (round(misfit(pair), 12), -pair[0]))
    return {"cores": round(share, 3), **({"switch_seconds": float(f"{switch:.4g}")} if switch else {})}


def jitter(rows: Sequence[Row]) -> dict[str, float]:
    """`Meetings`: what ranks took longer that met after each piece of work than what both take alone."""
    waits = [(row["computed_us"] * 1e-6, max(0.0, row["together_us"] - row["alone_us"]) * 1e-6) for row in rows]
    times = [computed for computed, _ in waits]
    if max(times) < SPAN * min(times):
        return {"jitter_seconds": round(median(wait**2 / computed for computed, wait in waits), 9)}
    fits: list[tuple[float, Meetings]] = []
    for steady in STEADY:
        law = [Meetings(jitter_seconds=1.0, steady_seconds=steady).wait(computed) for computed in times]
        # Of waits by the root of the time, the squared error is least.
        scale = sum(w * x / t for (t, w), x in zip(waits, law, strict=True))
        scale /= sum(x * x / t for t, x in zip(times, law, strict=True))
        error = sum((w - scale * x) ** 2 / t for (t, w), x in zip(waits, law, strict=True))
        fits.append((error, Meetings(jitter_seconds=float(f"{scale**2:.4g}"), steady_seconds=steady)))
    return min(fits, key=lambda fit: fit[0])[1].model_dump(exclude_defaults=True)


def call_points(rows: Iterable[Row], name: str) -> Points:
    times: dict[float, list[float]] = {}
    for row in rows:
        times.setdefault(row["moved"], []).append(row[name] * 1e-6)
    return rising((moved, median(of)) for moved, of in times.items())


def element_seconds(rows: Iterable[Row], memory: Points, calling: float = 0.0) -> dict[str, float]:
    """Of the ops that take longer than a kernel that reads one operand and writes a result of as many elements: what an
    element takes beside `calling`, the seconds of a call."""
    times: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        moving = seconds_at(memory, 8 * row["elements"]) if memory else 0.0
        computing = max(1e-15, row["us"] * 1e-6 - calling)
        times.setdefault(row["op"], []).append((computing / row["elements"], (moving - calling) / row["elements"]))
    medians = {op: (median(t for t, _ in of), of[0][1]) for op, of in times.items()}
    return {op: seconds for op, (seconds, moving) in sorted(medians.items()) if seconds > moving}


# ---------------------------------------------------------------------- quantities
def quantities(rows: Sequence[Row], fitted: Mapping[str, Any]) -> dict[str, float]:
    """The flat quantities that the rows tell: the best rate of each kind, and the median start of a collective."""
    told: dict[str, float] = {}
    for rate in fitted.get("products", ()):
        best = max(2 * math.prod(sample[:4]) / sample[4] for sample in rate["samples"])
        told |= {name: best for name, dtypes in DTYPES.items() if set(rate["dtypes"]) & dtypes}
    if "memory" in fitted:
        size, seconds = fitted["memory"][-1]
        told["memory_bytes_per_second"] = size / seconds
    series = [one for level in fitted.get("links", ()) for one in level["series"]]
    if series:
        ends = [
            (sent_share(one["kind"], one["group"]) * one["seconds"][-1][0], one["seconds"][-1][1]) for one in series
        ]
        told["link_bytes_per_second"] = max(size / seconds for size, seconds in ends)
        told["collective_start_seconds"] = median(one["seconds"][0][1] for one in series)
    for name, what in (("kernel_launch_seconds", "launch"), ("kernel_gap_seconds", "gap")):
        times = [row["us"] * 1e-6 for row in rows if row["kind"] == "launch" and row["what"] == what]
        if times:
            told[name] = median(times)
    return told
