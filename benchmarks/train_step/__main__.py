"""How long does a training step take, against every peer in the same processes?

    python -m benchmarks.train_step --gpus 1                     the rows of part B for one GPU
    python -m benchmarks.train_step --rows tp4-gpt-6.7b-slice --contestants ours-tp dtensor-tp-sp-async
    python -m benchmarks.train_step --gpus 2 --shares            what single passes of ours are worth
    python -m benchmarks.train_step --device cpu --tiny          a rehearsal over gloo; its times mean nothing
    python -m benchmarks.train_step --summary LINES.jsonl        ratios, bars and misses of lines that were kept

JSON lines: one of each job's circumstances, one a contestant of a row; then the summary. `benchmarks.train_step.rows`
has the rows. A contestant that fails or kills its job leaves a line that says so, and the others' lines.

The same for all: the model's code, first weights, tokens, sequences, bfloat16, cuDNN or flash attention, and torch's
fused AdamW (ours is in the graph) where there is an optimizer; by default a step is forward and backward. Contestants
take turns, three rounds of them. `median_ms`: of steps between two synchronisations, the slowest rank counts;
`free_ms`: a step's share of as many steps without any between them. `peak_gib` counts what the contestant has
allocated alone; `reported_peak_gib` is `program.memory()`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.train_step import parent, summary


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), help="the rows of so many GPUs")
    parser.add_argument("--rows", nargs="+", default=[], help="by name")
    parser.add_argument("--shares", action="store_true", help="ours alone, each pass switched off, instead of part B")
    parser.add_argument("--contestants", nargs="+", default=[], help="by name; all of a row's by default")
    parser.add_argument("--optimizer", action="store_true", help="AdamW is part of the step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a round: so many synchronised, and as many free")
    parser.add_argument("--seconds", type=float, default=540.0, help="in which all must be done")
    parser.add_argument("--stall", type=float, default=300.0, help="seconds without a line after which a job is ended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, at most 2 processes")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--summary", type=Path, nargs="+", help="read lines instead of measuring")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    asked = options(argv)
    if asked.summary:
        print("\n".join(summary.of_files(asked.summary)))
        return 0
    return parent.measure(asked)


if __name__ == "__main__":
    sys.exit(main())
