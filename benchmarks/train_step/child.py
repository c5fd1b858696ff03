"""One process of a job that `benchmarks.train_step` starts: it measures rows one after another."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch.distributed as dist

from benchmarks.train_step.job import Agreement, circumstances, joined, say
from benchmarks.train_step.measure import Measured
from benchmarks.train_step.rows import ROWS


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--skip", nargs="+", default=[])
    parser.add_argument("--device", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    asked = parser.parse_args()
    began = time.monotonic()
    device = joined(asked.device)
    agreement = Agreement()
    about = circumstances(device)
    say(about)
    for number, name in enumerate(asked.rows):
        row = replace(ROWS[name], optimizer=asked.optimizer)
        row = row.tiny(dist.get_world_size()) if asked.tiny else row
        names = [each for each in row.contestants if f"{name}/{each}" not in asked.skip]
        if not names:
            continue
        now = time.monotonic()
        end = now + (began + asked.seconds - now) / (len(asked.rows) - number)  # a fair share of what is left
        measured = Measured(row, device, agreement, tiny=asked.tiny, end=end, about=about)
        measured.all(names, asked.rounds, asked.steps)
        del measured
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
