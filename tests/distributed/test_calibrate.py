"""This machine, measured in real processes: a file of hardware comes of it, with every kind of measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardc.ir.hardware import Group
from shardc.plan import hardware as files
from shardc.runtime.calibrate.peers import OPS, Peers, group_sizes
from shardc.torch_compat import hosted_store

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.long)])
def test_this_machine_is_measured(world: int, tmp_path: Path) -> None:
    output, kept = tmp_path / "mine.yaml", tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--world", str(world), "--seconds", "3", "--rows", str(kept), "-o", str(output)]
    command = [sys.executable, "-m", "shardc", "calibrate", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    kinds = {row["kind"] for row in rows}
    assert rows[0]["kind"] == "machine"
    assert rows[0]["world"] == world
    assert kinds == {
        "machine",
        "product",
        "ceiling",
        "attention",
        "launch",
        "element",
        "call",
        *(("collective", "neighbours", "cores", "meeting") if world > 1 else ()),
    }
    measured = {(row["op"], row["group"]) for row in rows if row["kind"] == "collective"}
    assert measured == {(op, size) for op in OPS for size in group_sizes(world) if op != "p2p" or size == 2}
    hardware = files.read_file(output)
    assert hardware.accelerators_per_node == world
    assert hardware.product_seconds(1, 256, 256, 256, torch.float32) > 0
    if world > 1:
        sizes = [hardware.collective_seconds("all_reduce", 2**n, Group((3,))) for n in (10, 20, 30)]
        assert sizes == sorted(sizes)


def test_group_sizes() -> None:
    assert [group_sizes(world) for world in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def _measure_for_a_time_of_its_own(rank: int, folder: str, variables: dict[str, str]) -> None:
    os.environ.update(variables, RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    # The clocks of ranks differ, and so does what each has left: a collective that only one of them calls never ends.
    counts = Counter(row["kind"] for row in Peers("cpu").rows(0.2 + 60.0 * rank))
    Path(folder, str(rank)).write_text(json.dumps(counts))
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_do_not_wait_for_each_other_for_ever_whatever_their_clocks_say(tmp_path: Path) -> None:
    with hosted_store() as variables:
        mp.spawn(_measure_for_a_time_of_its_own, (str(tmp_path), dict(variables)), 2)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert first == second
    assert first.keys() == {"collective", "neighbours", "cores", "meeting"}


@pytest.mark.slow
def test_under_torchrun_the_first_rank_writes(tmp_path: Path) -> None:
    output, kept = tmp_path / "mine.yaml", tmp_path / "rows.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--seconds", "2", "--rows", str(kept), "-o", str(output)]
    command = [*launcher, "-m", "shardc", "calibrate", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["kind"] for row in rows[:2]] == ["machine", "product"]
    assert rows[-1]["kind"] == "meeting"
    assert files.read_file(output).accelerators_per_node == 2
