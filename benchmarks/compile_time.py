"""How long does compiling take, and how much memory: Llama-7B's and 70B's shapes on the meta device.

    python benchmarks/compile_time.py                 the two bars, and that time grows linearly in layers
    python benchmarks/compile_time.py --shape 7b --layers 8 16 32

Every configuration compiles in a process of its own (so that peak memory is its own) and prints one JSON line: seconds
in all, of tracing, and of each pass (its static checks included), nodes, peak GiB of resident memory. The number of
ranks does not appear in any pass: `7b` on 8 and on 128 ranks shows that.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

PLAN = Path(__file__).parent.parent / "configs" / "plans" / "llama.yaml"
SHAPES: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
           "vocab_size": 32000, "num_hidden_layers": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
            "vocab_size": 128256, "num_hidden_layers": 80},
}  # fmt: skip
# shape, layers (None: the shape's own), mesh, limit in seconds (None: measured only)
BARS: list[tuple[str, int | None, str, float | None]] = [
    ("7b", 8, "dp=2,tp=4", None),
    ("7b", 16, "dp=2,tp=4", None),
    ("7b", None, "dp=2,tp=4", 15.0),
    ("7b", None, "dp=16,tp=8", None),
    ("70b", None, "dp=16,tp=8", 35.0),
]
MEMORY_LIMIT_GIB = 4.0


def measure(shape: str, layers: int | None, mesh: str) -> dict[str, object]:
    """Compile once, in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import shardc
    from shardc import api

    sizes = {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
    parsed = shardc.Mesh.parse(mesh)
    batch = 2 * parsed.size("dp")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
        tokens = torch.zeros(batch, 2048, dtype=torch.int64)
    shares: dict[str, float] = {}
    traced = api.trace

    def timed_trace(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return traced(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            shares["trace"] = round(time.perf_counter() - start, 2)

    api.trace = timed_trace  # type: ignore[assignment]
    start = time.perf_counter()
    program = shardc.compile(
        model,
        {"input_ids": tokens, "labels": tokens},
        mesh=parsed,
        plan=PLAN,
        watch=lambda one, _graph, seconds: shares.__setitem__(one.name, round(seconds, 2)),
    )
    seconds = time.perf_counter() - start
    return {
        "shape": shape,
        "layers": sizes["num_hidden_layers"],
        "mesh": mesh,
        "ranks": parsed.world_size,
        "seconds": round(seconds, 2),
        "nodes": len(program.body.fx.nodes),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "shares": shares,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, nargs="*", default=[0])
    parser.add_argument("--mesh", default="dp=2,tp=4")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.shape, options.layers[0] or None, options.mesh)))
        return 0
    todo = [(options.shape, n or None, options.mesh, None) for n in options.layers] if options.shape else BARS
    missed = 0
    for shape, layers, mesh, limit in todo:
        command = [sys.executable, __file__, "--one", "--shape", shape, "--layers", str(layers or 0), "--mesh", mesh]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(printed.strip().splitlines()[-1])
        if limit is not None:
            row |= {"limit": limit, "ok": row["seconds"] < limit and row["peak_gib"] < MEMORY_LIMIT_GIB}
            missed += not row["ok"]
        print(json.dumps(row), flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
