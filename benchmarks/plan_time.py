"""What planning costs: CPU seconds of finding plans for Llama's 8B on 8 GPUs and 70B on 512, on paper.

    python -m benchmarks.plan_time 8b 70b          each in a process of its own; ends with 1 if one is over its bar
    python -m benchmarks.plan_time 8b --json

CPU seconds are those of the whole process, imports and the model on the meta device included; beside them the wall
clock, the candidates and the small programs that were compiled. The counts are the same in each run: they tell a change
of the search from a busy machine. The package's bytecode is made before, as installing it does: compiling its sources
would be another second.
"""

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 8192
VOCABULARY = 128256


@dataclass(frozen=True)
class Case:
    """Shapes of a Llama, a job, and the CPU seconds that planning it may take."""

    hidden: int
    inner: int
    layers: int
    heads: int
    gpus: int
    rows: int
    bar: float


CASES = {"8b": Case(4096, 14336, 32, 32, 8, 64, 15.0), "70b": Case(8192, 28672, 80, 64, 512, 2048, 60.0)}


def planned(case: Case, hardware: str = "h200-nvlink", memory: str = "80GiB") -> Any:
    """The ranking of a case."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama.configuration_llama import LlamaConfig

    import shardc

    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.ones(1, LENGTH, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    return shardc.autoplan(model, batch, gpus=case.gpus, memory=memory, hardware=hardware, rows=case.rows)


def measured(name: str) -> dict[str, Any]:
    """A row of the table, of this process: to be called once, before anything else is done."""
    start = time.perf_counter()
    ranking = planned(CASES[name])
    best = ranking.best
    return {
        "case": name,
        "cpu_s": round(time.process_time(), 1),
        "wall_s": round(time.perf_counter() - start, 1),
        "bar_s": CASES[name].bar,
        "candidates": ranking.considered,
        "compiles": ranking.compiled,
        "best": str(best.candidate),
        "step_ms": round(best.step_ms, 3),
        "closed_form_ms": round(1e3 * best.estimate.seconds, 3),
        "peak_bytes": best.peak_bytes,
    }


def main() -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_time", description=about)
    parser.add_argument("cases", nargs="*", default=[*CASES])
    parser.add_argument("--json", action="store_true", help="a line of JSON each")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case '{unknown[0]}': there are {', '.join(CASES)}")
    if options.here:
        print(json.dumps(measured(options.cases[0])))
        return
    for package in ("shardc", "kernels_triton"):
        compileall.compile_dir(ROOT / package, quiet=1)
    late = False
    for name in options.cases:
        command = [sys.executable, "-m", "benchmarks.plan_time", name, "--here"]
        row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        late |= row["cpu_s"] > row["bar_s"]
        counts = f"{row['candidates']:,} candidates, {row['compiles']} small programs compiled"
        time_taken = f"{row['cpu_s']} s of CPU (bar {row['bar_s']:g}), {row['wall_s']} s of wall clock"
        text = f"{name}: {time_taken}; {counts}; {row['best']}: {row['step_ms']} ms"
        print(json.dumps(row) if options.json else text)
    sys.exit(late)


if __name__ == "__main__":
    main()
