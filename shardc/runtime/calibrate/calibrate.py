"""Measures the machine at hand and writes a file of hardware: `shardc calibrate`.

    processes   one a rank, on this machine (NCCL on GPUs, gloo on CPUs), or those of a job under torchrun
    each        its device's products, kernels and attention, all ranks at the same time; then collectives together;
                on a CPU all of it several times
    rank 0      its rows, as they come, into a file of JSON lines
    afterwards  the fit of those rows (`fit`), as YAML (`write`), each figure with its source

Ranks of CPUs share memory and cores, so each measures what it gets of them while the others work, too.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardc.ir.device_rates import ProductRate
from shardc.ir.diagnostic import error
from shardc.ir.hardware import DTYPES, Hardware
from shardc.runtime.calibrate.device import rows as device_rows
from shardc.runtime.calibrate.fit import quantities, tables
from shardc.runtime.calibrate.peers import Peers
from shardc.runtime.calibrate.rows import Row, read_rows
from shardc.runtime.calibrate.write import hardware_yaml
from shardc.torch_compat import hosted_store

DEVICE_SHARE = 0.4  # of the seconds, where there are peers
# How often all is measured. A CPU's cores are slower for some seconds, by what others do.
TURNS = {"cpu": 2, "cuda": 1}
# Tiles of a GPU's products, with the share of the rate that each reaches (estimated).
TILES = (((128, 256), 1.0), ((256, 128), 1.0), ((128, 128), 0.85), ((128, 64), 0.6), ((64, 128), 0.6), ((64, 64), 0.4))


@dataclass(frozen=True)
class Machine:
    """What is measured: the device, how many ranks, and for how long."""

    device: str
    world: int
    seconds: float

    @classmethod
    def at_hand(cls, device: str | None, world: int | None, seconds: float) -> Machine:
        """The devices of this host, one a rank; on a CPU two ranks. Raises ShardcError (SC506) for more than there are
        GPUs, or for GPUs where there is none."""
        count = torch.cuda.device_count()
        device = device or ("cuda" if count else "cpu")
        world = int(os.environ.get("WORLD_SIZE", world or (count if device == "cuda" else 2)))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if device == "cuda" and here > count:
            message = f"{here} processes on this host need as many GPUs, and there are {count}"
            raise error("SC506", message, hint="write --device cpu" if not count else f"write --world {count}")
        return cls(device, world, seconds)


def measure(machine: Machine, file: Path) -> list[Row] | None:
    """Measure, and leave the rows in a file as they come. None of a rank under torchrun that is not the first.

    Starting processes comes on top of the machine's seconds.
    """
    if int(os.environ.get("RANK", 0)) == 0:
        file.write_text("")
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        _measure(rank, machine, str(file), {})
        return read_rows(file) if rank == 0 else None
    if machine.world == 1:
        _measure(0, machine, str(file), {})
    else:
        with hosted_store() as variables:
            mp.spawn(_measure, (machine, str(file), variables), machine.world)
    return read_rows(file)


def _measure(rank: int, machine: Machine, file: str, variables: Mapping[str, str]) -> None:
    """One process's part: the first writes what it finds."""
    torch.manual_seed(0)
    if variables:
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(machine.world))
    if machine.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // machine.world))
    alone = machine.world == 1

    def note(row: Mapping[str, Any]) -> None:
        if rank == 0:
            with Path(file).open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")

    if not alone:
        dist.init_process_group("cpu:gloo,cuda:nccl" if machine.device == "cuda" else "gloo")
    note(about(machine))
    begin = time.perf_counter()
    try:
        peers = None if alone else Peers(machine.device)
        for turn in range(turns := TURNS[machine.device]):
            for row in device_rows(machine.device, machine.seconds / turns * (1 if alone else DEVICE_SHARE)):
                note(row)
            if peers is None:
                continue
            # Device rows end early where a size is left out, and late where one takes long.
            left = machine.seconds * (turn + 1) / turns - (time.perf_counter() - begin)
            for row in peers.rows(max(machine.seconds / turns * (1 - DEVICE_SHARE) / 2, left)):
                note(row)
    finally:
        if not alone:
            dist.destroy_process_group()


def about(machine: Machine) -> dict[str, Any]:
    """The first row: what the others are of. `units` compute tiles of a product at the same time."""
    on_gpus = machine.device == "cuda"
    return {
        "kind": "machine", "device": machine.device, "world": machine.world,
        "units": torch.cuda.get_device_properties(0).multi_processor_count if on_gpus else 1,
        "name": torch.cuda.get_device_name(0) if on_gpus else f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "seconds": machine.seconds,
    }  # fmt: skip


def not_measured(rows: Sequence[Row]) -> list[str]:
    """What a file of these rows takes from the default, which is no machine."""
    kinds = {row["kind"] for row in rows}
    taken = {"product": "products", "ceiling": "kernels by size", "collective": "collectives"}
    alone = next((row["world"] == 1 for row in rows if row["kind"] == "machine"), False)
    return [what for kind, what in taken.items() if kind not in kinds and not (alone and kind == "collective")]


def hardware_text(rows: Sequence[Row], title: Sequence[str]) -> str:
    """The file of hardware that rows come to. Where none says of which machine they are, they are taken to be of one
    node with as many GPUs as the largest group has."""
    groups: list[int] = [row["group"] for row in rows if row["kind"] == "collective"]
    unknown: Row = {"device": "cuda", "world": max(groups, default=1), "units": 1}
    machine: Row = next((row for row in rows if row["kind"] == "machine"), unknown)
    like = ProductRate(dtypes=(), flops_per_second=1e14, units=machine["units"], tiles=TILES)
    fitted = tables(rows, like if machine["units"] > 1 else None)
    told: dict[str, Any] = {"device": "gpu" if machine["device"] == "cuda" else "cpu", **quantities(rows, fitted)}
    told["network_bytes_per_second"] = told.get("link_bytes_per_second", Hardware().network_bytes_per_second)
    if rates := [told[name] for name in DTYPES if name in told]:
        told["peak_flops_per_second"] = max(rates)
    as_wide = "fp32_flops_per_second" if machine["device"] == "cpu" else "bf16_flops_per_second"
    if as_wide in told:
        told["fp8_flops_per_second"] = told[as_wide]
    world: int = machine["world"]
    told["accelerators_per_node"] = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if machine["device"] == "cpu":
        told["unaligned_slowdown"] = 1
        told["host_bytes_per_second"] = told.get("memory_bytes_per_second", Hardware().host_bytes_per_second) / 2
    sources = dict.fromkeys(told, "measured") | {
        "device": "programs for a gpu have kernels, unless their plan says fuse: false",
        "peak_flops_per_second": "of MFU: the best rate that was measured",
        "network_bytes_per_second": "not measured: as inside the node",
        "fp8_flops_per_second": "not measured: as bfloat16",
        "accelerators_per_node": "the ranks of this host that were measured",
        "host_bytes_per_second": "not measured: a copy reads and writes memory",
        "unaligned_slowdown": "a CPU's products have no rows to align",
        "products": "fitted, with the samples that were measured",
        "attention": "fitted: start, rate and waste on the diagonal",
        "memory": "measured: an elementwise kernel by the bytes that it moves",
        "links": "measured; times that fell as messages grew are averaged",
        "contention": "measured: medians beside each other, by those alone",
        "meetings": "measured: what ranks that compute and meet take longer than both take alone",
        "elements": "measured: ops that take longer than moving their bytes does",
        "calls": "measured: what a call takes beside its work, by the bytes that the kernel before it moved",
    }
    if machine["device"] == "cpu":
        sources["fp8_flops_per_second"] = "8-bit floats are widened to float32"
        sources["attention"] = "fitted: start, rate and what softmax takes of scores"
        sources["contention"] = "fitted: what work took longer beside collectives, by the seconds of those alone"
    Hardware.of({**told, **fitted})  # refuses what no file may have
    missing = [f"Not measured, and as in default.yaml, which is no machine: {what}." for what in not_measured(rows)]
    return hardware_yaml({**told, **fitted}, sources, [*title, *missing])


def title_of(machine: Row) -> list[str]:
    """Of the file's head: what was measured, with what, and when."""
    backend = "NCCL" if machine["device"] == "cuda" else "gloo"
    options = f"--device {machine['device']} --world {machine['world']} --seconds {machine['seconds']:g}"
    return [
        f"{machine['world']} ranks, {machine['name']}; {backend}, torch {machine['torch']}, {machine['date']}.",
        "What is not here is as in default.yaml.",
        "",
        f"Written by: shardc calibrate {options}",
    ]


def calibrate(machine: Machine, file: Path | None = None) -> str | None:
    """Measure this machine and fit: the text of a file of hardware; None in a rank that is not the first. The rows are
    left in `file` if one is given."""
    with tempfile.TemporaryDirectory(prefix="shardc-") as folder:
        rows = measure(machine, file or Path(folder) / "rows.jsonl")
    return None if rows is None else hardware_text(rows, title_of(rows[0]))
