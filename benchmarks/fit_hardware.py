"""Writes `configs/hardware/h200-nvlink.yaml` from measurements, and says how far from them it is.

    python -m benchmarks.fit_hardware benchmarks/measurements/h200.jsonl --out configs/hardware/h200-nvlink.yaml

Collectives, attention and memory are fitted directly (`shardc.runtime.calibrate.fit`); the cache to
`h200_calibrate.jsonl` beside the measurements, of other H200s; contention and meetings to `h100_pair.jsonl`, of two
H100s, whose units and NVLink are the same. Products were not measured on their own: their rate is that with which whole
steps of one GPU come out, in which all else has a time already:

    products        6 FLOPs a weight and token, by `ProductRate` at each product's shape
    attention       by the fit
    elementwise     a kernel an op, the bytes that it reads and writes, at the memory's rate
    cross-entropy   as measured in eager mode (README.md: 13.1 ps an element of the logits, forward and backward)

Steps with an optimizer, and those of several GPUs, are left out. With `--out`, the limit of power is then fitted to the
compiled programs of one GPU (`benchmarks.fit_power`), which takes minutes. What a call of a program takes the host
(`call_seconds`) is no fit: it is of our own steps on hosts of H100s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import fit_power
from shardc.ir.device_rates import ProductRate
from shardc.ir.hardware import Hardware
from shardc.ir.links import Group
from shardc.ir.slowdowns import Power
from shardc.runtime.calibrate.fit import BACKWARD, contention, jitter, kind_of, memory_points, tables
from shardc.runtime.calibrate.rows import Row, read_rows
from shardc.runtime.calibrate.write import hardware_yaml

BF16 = torch.bfloat16
OTHERS = "h200_calibrate.jsonl", "h100_pair.jsonl"
LOGIT_SECONDS = 13.1e-12  # of cross-entropy in eager mode, for an element of the logits


class Shape(NamedTuple):
    """A model of `MODELS`: its sizes, and its gate if it is a Llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    sequence: int
    vocabulary: int
    gated: bool = False


MODELS = {
    "gpt-1.3b": Shape(24, 2048, 16, 16, 8192, 2048, 50304),
    "gpt-6.7b-slice": Shape(8, 4096, 32, 32, 16384, 2048, 50304),
    "llama3-8b-slice": Shape(8, 4096, 32, 8, 14336, 4096, 128256, gated=True),
}
SHEET = {
    "peak_flops_per_second": (9.89e14, "data sheet, without sparsity"),
    "fp32_flops_per_second": (6.7e13, "data sheet, without TF32"),
    "fp64_flops_per_second": (6.7e13, "data sheet, tensor cores"),
    "fp8_flops_per_second": (1.5e15, "1.979e+15 by the data sheet, of which bf16 reaches 0.76"),
    "link_bytes_per_second": (4.3e11, "measured: all-gathers of 4 GPUs from 16 MiB on; 4.5e+11 by the data sheet"),
    "network_bytes_per_second": (4.7e10, "46 to 48 GB/s of a 400 Gbit/s adapter: NVIDIA/nccl-tests issue 290"),
    "accelerators_per_node": (8, "data sheet of the DGX H200"),
    "collective_start_seconds": (20e-6, "measured: 15 to 24 in a CUDA graph, 21 to 34 outside of one"),
    "kernel_launch_seconds": (7.8e-6, "measured (calibrated)"),
    "call_seconds": (2.3e-5, "measured on hosts of H100s: 17 us a call of GPT-2 on one GPU, 20 to 32 of dp=2"),
}  # fmt: skip
CACHE = 50 * 10**6  # bytes
CACHED = 32  # MiB of a kernel that the cache holds whole, read and written
PRODUCTS = {
    "dtypes": ["bfloat16", "float16"], "flops_per_second": 7e14, "units": 132, "start_seconds": 3e-6, "depth_start": 96,
    "tiles": [
        [[128, 256], 1.0], [[256, 128], 1.0], [[192, 192], 1.0], [[320, 128], 1.0], [[128, 128], 0.85],
        [[128, 64], 0.6], [[64, 128], 0.6], [[64, 64], 0.4],
    ],
}  # fmt: skip
MOST = 1.15  # of the products' rate, which large products alone reach: 800 TFLOP/s
NETWORK: list[dict[str, Any]] = [
    {"name": "infiniband", "ranks": 256, "doubling_seconds": 10e-6, "series": [
        {"kind": kind, "group": 2, "latency_seconds": latency, "bytes_per_second": rate}
        for kind, latency, rate in (
            ("all_reduce", 30e-6, 4.7e10), ("all_gather", 25e-6, 4.7e10), ("reduce_scatter", 25e-6, 4.7e10),
            ("all_to_all", 25e-6, 4.3e10), ("permute", 20e-6, 4.7e10),
        )
    ]},
    {"name": "racks", "series": [
        {"kind": kind, "group": 2, "latency_seconds": 2e-6, "bytes_per_second": 4.7e10}
        for kind in ("all_reduce", "permute")
    ]},
]  # fmt: skip


# ---------------------------------------------------------------------- a step of one GPU
def products(shape: Shape, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and depth of forward's products, and of the two of each in backward."""
    kv = shape.width * shape.kv_heads // shape.heads
    outputs = [(shape.width, shape.width)] * 2 + [(kv, shape.width)] * 2
    outputs += [(shape.hidden, shape.width)] * (2 if shape.gated else 1) + [(shape.width, shape.hidden)]
    for columns, depth in [*outputs * shape.layers, (shape.vocabulary, shape.width)]:
        yield tokens, columns, depth
        yield tokens, depth, columns
        yield columns, depth, tokens


def kernels(shape: Shape, tokens: int) -> Iterator[float]:
    """Bytes of the elementwise kernels of a layer in eager mode, forward and backward, over bfloat16."""
    row, hidden, kv = (
        2 * tokens * shape.width,
        2 * tokens * shape.hidden,
        2 * tokens * shape.width * shape.kv_heads / shape.heads,
    )
    yield from [3 * row] * 2  # norms: read twice
    yield from [7 * row, row] * 2  # their backward: both operands read three times; sums over rows
    yield from [3 * row] * 4  # residuals, and their gradients' sums
    yield from [3 * row] * 2  # the gradient of what q, k and v are made of
    if shape.gated:
        yield from [2 * hidden, 3 * hidden, 3 * hidden, 3 * hidden, 3 * hidden, 3 * row]  # SiLU and gate
        for rotated in (row, kv):  # rotary embeddings: halves are negated and joined, two products and a sum; backward
            yield from [2 * rotated, 2 * rotated, 2 * rotated, 3 * rotated] * 2
    else:
        yield from [2 * hidden, 3 * hidden]  # GeLU
        yield from [row] * 5 + [hidden]  # gradients of biases


def step_parts(row: Row, hardware: Hardware) -> dict[str, float]:
    """Seconds of a step of one GPU."""
    shape = MODELS[row["config"]]
    tokens = row["mb"] * shape.sequence
    flops = 2.0 * row["mb"] * shape.heads * shape.sequence**2 * (shape.width // shape.heads)
    attention = sum(
        hardware.attention_seconds(round(flops * of), BF16, backward=of > 1, sequence=shape.sequence)
        for of in (1, BACKWARD)
    )
    return {
        "products": sum(hardware.product_seconds(1, *sizes, BF16) for sizes in products(shape, tokens)),
        "attention": shape.layers * attention,
        "elementwise": shape.layers * sum(map(hardware.memory_seconds, kernels(shape, tokens))),
        "loss": LOGIT_SECONDS * tokens * shape.vocabulary,
    }


def steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "step" and row["gpus"] == 1 and not row["opt"]]


def fitted(rows: Sequence[Row], calibrated: Sequence[Row], pair: Sequence[Row]) -> Hardware:
    """All tables; the products' rate and start of a tile are those with which steps come out best. `calibrated` are of
    warm caches, whose table they tell; `pair` tells what ranks and collectives do to each other."""
    measured = tables(rows)
    cached = [row for row in calibrated if row["kind"] == "ceiling" and row["mib"] <= CACHED]
    measured["cache"] = {"bytes": CACHE, "seconds": memory_points(cached)}
    tiles = ProductRate.model_validate({**PRODUCTS, "start_seconds": 0.0, "depth_start": 0})
    measured["contention"] = contention([row for row in pair if row["kind"] == "contention"], tiles)
    measured["meetings"] = jitter([row for row in pair if row["kind"] == "meeting"])
    measured["links"][0]["name"] = "nvlink"
    measured["links"] += NETWORK
    quantities = {name: value for name, (value, _) in SHEET.items()}
    memory = measured["memory"]
    quantities["memory_bytes_per_second"] = memory[-1][0] / memory[-1][1]
    quantities["bf16_flops_per_second"] = 7.5e14
    hardware = Hardware.of({**quantities, **measured, "products": [PRODUCTS]})
    candidates = (_with_products(hardware, 7e14, depth) for depth in (0, 16, 32, 48, 64, 96, 128))
    return min((_at_its_rate(rows, candidate) for candidate in candidates), key=lambda one: _misfit(rows, one))


def with_power(hardware: Hardware, power: Power) -> Hardware:
    return dataclasses.replace(hardware, tables=hardware.tables.changed(power=power))


def _with_products(hardware: Hardware, rate: float, depth_start: int) -> Hardware:
    products = ProductRate.model_validate({**PRODUCTS, "flops_per_second": rate, "depth_start": depth_start})
    return dataclasses.replace(hardware, tables=hardware.tables.changed(products=(products,)))


def _at_its_rate(rows: Sequence[Row], hardware: Hardware) -> Hardware:
    """The rate that leaves steps as far above as below, by bisection."""
    low, high, depth = 1e14, 1e16, hardware.tables.products[0].depth_start
    for _ in range(20):
        rate = math.sqrt(low * high)
        above = sum(map(math.log, _ratios(rows, _with_products(hardware, rate, depth)))) > 0
        low, high = (rate, high) if above else (low, rate)
    return _with_products(hardware, float(f"{high:.3g}"), depth)


def _ratios(rows: Sequence[Row], hardware: Hardware) -> list[float]:
    return [sum(step_parts(row, hardware).values()) / (row["step_ms"] * 1e-3) for row in steps(rows)]


def _misfit(rows: Sequence[Row], hardware: Hardware) -> float:
    return sum(math.log(ratio) ** 2 for ratio in _ratios(rows, hardware))


# ---------------------------------------------------------------------- how far from the measurements
def errors(rows: Sequence[Row], hardware: Hardware) -> Iterator[tuple[str, Row, float]]:
    """Of each measurement what it is of, and how much more the hardware says, as a share."""
    for row in rows:
        if row["kind"] == "collective":
            group = Group((row["group"],))
            seconds = hardware.collective_seconds(kind_of(row), row["bytes"], group, graph=row["graph"])
            yield "collective", row, seconds / (row["us"] * 1e-6) - 1
        elif row["kind"] == "attention":
            flops = 2 * row["mb"] * row["heads"] * row["sequence"] ** 2 * row["width"]
            forward, backward = (
                hardware.attention_seconds(
                    round(flops * of), BF16, backward=of > 1, sequence=row["sequence"], backend=row["backend"]
                )
                for of in (1, BACKWARD)
            )
            yield "attention forward", row, forward / (row["fwd_ms"] * 1e-3) - 1
            yield "attention", row, (forward + backward) / (row["fwd_bwd_ms"] * 1e-3) - 1
        elif row["kind"] == "ceiling" and row["how"] == "neg":
            yield "memory", row, hardware.memory_seconds(row["mib"] * 2**20) / (row["ms"] * 1e-3) - 1
    for row in steps(rows):
        yield "step", row, sum(step_parts(row, hardware).values()) / (row["step_ms"] * 1e-3) - 1


def text(hardware: Hardware, source: str) -> str:
    """The file."""
    quantities = hardware.quantities()
    quantities["links"] = [quantities["links"][0], *NETWORK]
    default = Hardware().quantities()
    kept = {name: value for name, value in quantities.items() if name in SHEET or value != default.get(name)}
    kept["device"] = "gpu"
    sources = {name: why for name, (_, why) in SHEET.items()} | {
        "device": "programs for a gpu have kernels, unless their plan says fuse: false",
        "bf16_flops_per_second": "measured: large products reach 700 to 800 TFLOP/s alone; 989 by the data sheet",
        "memory_bytes_per_second": "measured: 4 GiB by an elementwise kernel; 4.8e+12 by the data sheet",
        "products": "fitted to steps of one GPU, in which power limits the rate. Tiles and starts: cuBLAS's usual ones,"
        " shares estimated",
        "attention": "fitted to the shortest times of each shape; forward and backward by cuDNN and by flash",
        "memory": "measured by an elementwise kernel from 16 MiB on; at 0 an estimate",
        "links": "nvlink: measured; infiniband and racks (of 32 nodes, as in a DGX SuperPOD): NVIDIA/nccl-tests issue"
        " 290 for adapters, DeepEP's README for all_to_all (43 GB/s and more), latencies estimated",
        "power": "fitted to steps of one GPU, eager and our own: products slow down while a device does nothing else;"
        " most: measured",
        "cache": "measured: an elementwise kernel up to 32 MiB, its operand and result in the cache; bytes: data sheet",
        "contention": "measured on two H100s: medians beside each other, by those alone; units: by products' shapes",
        "meetings": "measured on two H100s: what ranks that compute and meet take longer than both take alone",
    }  # fmt: skip
    title = [
        "NVIDIA H200 SXM, 8 a node. What is not here is as in default.yaml.",
        "",
        f"Written by: python -m benchmarks.fit_hardware {source} --out configs/hardware/h200-nvlink.yaml",
        "measured: 4 H200s on NVLink, torch 2.11, CUDA 13.0, NCCL, November 2026, NVLink multicast off",
        "data sheet: https://www.nvidia.com/en-us/data-center/h200/, and of the DGX H200 for the network",
    ]
    return hardware_yaml(kept, sources, title)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    rows = read_rows(asked.measurements)
    calibrated, pair = (read_rows(asked.measurements.with_name(name)) for name in OTHERS)
    hardware = fitted(rows, calibrated, pair)
    if asked.out is not None:
        programs = list(fit_power.steps(hardware))
        hardware = with_power(hardware, fit_power.fitted(programs, MOST))
        asked.out.write_text(text(hardware, str(asked.measurements)))
        for step in programs:
            found = 1e3 * step.predicted(hardware.tables.power)
            print(json.dumps({"program": step.name, "step_ms": 1e3 * step.measured, "fitted_ms": round(found, 2)}))
    sizes: dict[str, list[float]] = {}
    for what, _, error in errors(rows, hardware):
        sizes.setdefault(what, []).append(abs(error))
    for what, of in sizes.items():
        summary = {
            "median": round(median(of), 4),
            "most": round(max(of), 4),
            "above_10_percent": sum(e > 0.1 for e in of),
        }
        print(json.dumps({"what": what, "rows": len(of), **summary}))
    for row in steps(rows):
        parts = {part: round(seconds * 1e3, 2) for part, seconds in step_parts(row, hardware).items()}
        about = {key: row[key] for key in ("peer", "config", "mb", "step_ms")}
        print(json.dumps({**about, "fitted_ms": round(sum(parts.values()), 2), **parts}))


if __name__ == "__main__":
    main(sys.argv[1:])
