"""How long does compiling take, and how much memory: Llama-7B's, 70B's and Mixtral-8x7B's shapes on the meta device.

    python benchmarks/compile_time.py                 the bars: of seconds, and of 128 layers against 32
    python benchmarks/compile_time.py --shape 7b --layers 8 16 32
    python benchmarks/compile_time.py --shape 7b --calls --against ../before
                                                      calls of functions, which do not vary as seconds do, of two trees
    python benchmarks/compile_time.py --shape 7b --pairs 5 --against ../before
                                                      seconds of two trees, in turn, and their ratios
    python benchmarks/compile_time.py --shape 7b --layers 80 --trained
                                                      with AdamW, `precision: bf16`, `fuse` and `bucket`
    python benchmarks/compile_time.py --shape 7b --shares
                                                      seconds of each pass too; then all layers go through all passes,
                                                      which takes longer
    python benchmarks/compile_time.py --shape 7b --cached
                                                      a second start, which takes the program from the cache: the bar is
                                                      0.5 s of CPU
    python benchmarks/compile_time.py --fusing --against ../before
                                                      seconds of CPU that fusing graphs of 10,000 calls takes, and calls
                                                      of functions: drawn chains, blocks of norms and softmaxes, GPT-2

Every configuration compiles in a process of its own (so that peak memory is its own) and prints one JSON line: seconds
in all and of tracing, nodes, peak GiB of resident memory. The number of
ranks does not appear in any pass: `7b` on 8 and on 128 ranks shows that.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLAN = ROOT / "configs" / "plans" / "llama.yaml"
SHAPES: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
           "vocab_size": 32000, "num_hidden_layers": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
            "vocab_size": 128256, "num_hidden_layers": 80},
    "mixtral-8x7b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "vocab_size": 32000, "num_hidden_layers": 32, "num_local_experts": 8,
                     "num_experts_per_tok": 2},
}  # fmt: skip
PLANS: dict[str, Any] = {  # by shape; the others have the file's
    "mixtral-8x7b": {
        "params": {"**.experts.gate_up_proj": "ep, -, -", "**.experts.down_proj": "ep, -, -"},
        "inputs": {"*": "dp, -"},
    },
}
# shape, layers (None: the shape's own), mesh, limit in seconds (None: measured only)
BARS: list[tuple[str, int | None, str, float | None]] = [
    ("7b", 8, "dp=2,tp=4", None),
    ("7b", 16, "dp=2,tp=4", None),
    ("7b", None, "dp=2,tp=4", 15.0),
    ("7b", 128, "dp=2,tp=4", None),  # at most `DEEP` times the line before
    ("7b", None, "dp=16,tp=8", None),
    ("70b", None, "dp=16,tp=8", 35.0),
    ("7b", None, "dp=4,tp=8", None),
    ("mixtral-8x7b", None, "dp=4,ep=8", None),  # at most 1.5 times the line before
]
DEEP = 1.5
MEMORY_LIMIT_GIB = 4.0
CACHED_LIMIT = 0.5  # seconds of CPU
GPT2_CALLS_OF_LAYER = 119  # forward and backward


def _module_that_traces() -> Any:
    """The module through which `compile` traces: another tree may have it elsewhere."""
    names = ("shardc.compiler.preparation", "shardc.compiler.request", "shardc.api")
    return next(sys.modules[name] for name in names if hasattr(sys.modules.get(name), "trace"))


def measure(
    shape: str,
    layers: int | None,
    mesh: str,
    calls: bool,
    cached: bool = False,
    by_pass: bool = False,
    trained: bool = False,
) -> dict[str, object]:
    """Compile once, in this process. With `calls`, the calls of functions are counted, which makes it slower. `cached`,
    the program is taken from the cache, if it has it; then what the graphs take is told too, which are read later."""
    import torch
    import yaml
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    import shardc

    build = shardc.compile  # imported here, before any clock runs
    tracing = _module_that_traces()
    sizes = {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
    parsed = shardc.Mesh.parse(mesh)
    batch = 2 * parsed.size("dp")
    with torch.device("meta"):
        if "num_local_experts" in sizes:
            model: torch.nn.Module = MixtralForCausalLM(MixtralConfig(**sizes, use_cache=False))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
        tokens = torch.zeros(batch, 2048, dtype=torch.int64)
    plan = PLANS.get(shape, PLAN)
    if trained:
        said = plan if isinstance(plan, dict) else yaml.safe_load(plan.read_text())
        plan = {**said, "precision": "bf16", "fuse": True, "bucket": True}
    shares: dict[str, Any] = {}
    traced = tracing.trace

    def timed_trace(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return traced(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            shares["trace"] = round(time.perf_counter() - start, 2)

    tracing.trace = timed_trace
    profile = cProfile.Profile()
    if calls:
        profile.enable()
    start, cpu_start = time.perf_counter(), time.process_time()
    program = build(
        model,
        {"input_ids": tokens, "labels": tokens},
        mesh=parsed,
        plan=plan,
        optimizer=torch.optim.AdamW(model.parameters()) if trained else None,
        watch=(lambda one, _graph, seconds: shares.__setitem__(one.name, round(seconds, 2))) if by_pass else None,
        **({"cache": True} if cached else {}),
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    profile.disable()
    if cached:
        shares = {"cached": program.cached}
        for graph in ("body", "reference"):
            start = time.process_time()
            _ = getattr(program, graph).fx
            shares[graph] = round(time.process_time() - start, 2)
    return {
        "shape": shape,
        "layers": sizes["num_hidden_layers"],
        "mesh": mesh,
        "ranks": parsed.world_size,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        **({"calls": pstats.Stats(profile).total_calls} if calls else {}),
        "nodes": len(program.body.fx.nodes),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "shares": shares,
    }


def compiled_apart(arguments: list[str], tree: Path, cache: str = "off") -> dict[str, Any]:
    """The row of a compile in a process of its own, by the shardc of a checkout."""
    with started(arguments, tree, cache) as process:
        printed = process.communicate()[0]
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    row: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return row


def started(arguments: list[str], tree: Path, cache: str = "off") -> subprocess.Popen[str]:
    """This file, run by the shardc of a checkout; `cache` is the folder of its programs."""
    env = {**os.environ, "SHARDC_CACHE": cache, "PYTHONPATH": str(tree.resolve())}
    command = [sys.executable, "-P", __file__, *arguments]  # beside this file lies a `kernels` that is not the package
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, bufsize=1)


def compare(arguments: list[str], other: Path, pairs: int) -> None:
    """A line for each compile, this tree and the other one in turn, and a line of their ratios."""
    ratios: dict[str, list[float]] = {}
    for _ in range(pairs):
        ours, theirs = (compiled_apart(arguments, tree) for tree in (ROOT, other))
        print(json.dumps({"tree": "this", **ours}), json.dumps({"tree": str(other), **theirs}), sep="\n", flush=True)
        for figure in ("seconds", "cpu_seconds", "calls"):
            if figure in ours:
                ratios.setdefault(figure, []).append(round(ours[figure] / theirs[figure], 4))
    spread = {name: [min(some), statistics.median(some), max(some)] for name, some in ratios.items()}
    print(json.dumps({"ratio this / other, least, median, most": spread}), flush=True)


def function_calls(run: Callable[[], object]) -> tuple[int, int]:
    """How many functions a run calls, the same number in every run: those written in Python, and those of C."""
    counts = {"call": 0, "c_call": 0}

    def on_event(_frame: object, event: str, _argument: object) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


def serve_fusing(calls: int) -> None:
    """Print the sizes of the graphs. Then fuse the graph of each name that is read, and print the seconds of CPU, with
    the check of memory; after the word "count", the calls of functions instead."""
    from benchmarks.fusion_census import body_of, fuse, traced  # of either tree
    from tests.passes.fuse_graphs import chains

    layers = max(1, round(calls / GPT2_CALLS_OF_LAYER))
    graphs = {"drawn": chains(calls), "blocks": traced(calls), "gpt2": body_of("gpt2", layers, True)}
    print(json.dumps({name: sum(1 for _ in graph.calls()) for name, graph in graphs.items()}))
    for request in sys.stdin:
        graph = graphs[request.split()[-1]]
        gc.collect()  # what compiling and the last run left behind
        if request.startswith("count"):
            print(sum(function_calls(lambda graph=graph: fuse(graph))), flush=True)
            continue
        start = time.process_time()
        fuse(graph)
        print(time.process_time() - start, flush=True)


def compare_fusing(calls: int, trees: list[Path], rounds: int) -> None:
    """A line for each graph: the least seconds of each tree, which fuse it in turn, their calls of functions, and the
    ratios of the first tree to the last."""
    processes = [started(["--fusing", str(calls), "--one"], tree) for tree in trees]

    def answer(process: subprocess.Popen[str], request: str = "") -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        if request:
            print(request, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    sizes = [answer(process) for process in processes]
    for name in sizes[0]:
        times = [[answer(process, name) for process in processes] for _ in range(rounds)]
        seconds = [min(of_tree) for of_tree in zip(*times, strict=True)]
        counts = [answer(process, f"count {name}") for process in processes]
        for tree, size, least, count in zip(trees, sizes, seconds, counts, strict=True):
            row = {"tree": str(tree), "graph": name, "calls": size[name], "cpu_seconds": round(least, 3)}
            print(json.dumps({**row, "functions": count}), flush=True)
        if len(trees) > 1:
            ratios = {"cpu_seconds": seconds[0] / seconds[1], "functions": counts[0] / counts[1]}
            print(json.dumps({"ratio this / other": {key: round(ratio, 3) for key, ratio in ratios.items()}}))
    for process in processes:
        process.communicate()


def time_second_starts(shape: str, layers: list[int], mesh: str, *, trained: bool = False) -> int:
    """A line for each number of layers: what a start takes that has the program of another one."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for count in layers:
            arguments = ["--one", "--cached", "--shape", shape, "--layers", str(count), "--mesh", mesh]
            arguments += ["--trained"] if trained else []
            compiled_apart(arguments, ROOT, folder)
            row = compiled_apart(arguments, ROOT, folder)
            ok = row["shares"]["cached"] == "hit" and row["cpu_seconds"] < CACHED_LIMIT
            missed += not ok
            print(json.dumps({**row, "limit": CACHED_LIMIT, "ok": ok}), flush=True)
    return min(missed, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, nargs="*", default=[0])
    parser.add_argument("--mesh", default="dp=2,tp=4")
    parser.add_argument("--calls", action="store_true", help="count the calls of functions, under a profiler")
    parser.add_argument(
        "--fusing", type=int, nargs="?", const=10_000, metavar="CALLS", help="time the fusion pass alone"
    )
    parser.add_argument("--against", type=Path, help="another checkout, compiled with in turn with this one")
    parser.add_argument("--pairs", type=int, help="how often, with --against (1) and with --fusing (5)")
    parser.add_argument("--cached", action="store_true", help="time a second start, in a process of its own")
    parser.add_argument("--shares", action="store_true", help="seconds of each pass, over all layers")
    parser.add_argument("--trained", action="store_true", help="with AdamW, bf16, fuse and bucket")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fusing and options.one:
        serve_fusing(options.fusing)
        return 0
    if options.fusing:
        trees = [ROOT, options.against] if options.against else [ROOT]
        compare_fusing(options.fusing, trees, options.pairs or 5)
        return 0
    if options.one:
        layers = options.layers[0] or None
        row = measure(
            options.shape, layers, options.mesh, options.calls, options.cached, options.shares, options.trained
        )
        print(json.dumps(row))
        return 0
    if options.cached:
        return time_second_starts(options.shape or "7b", options.layers, options.mesh, trained=options.trained)
    todo = [(options.shape, n or None, options.mesh, None) for n in options.layers] if options.shape else BARS
    missed, seconds = 0, list[float]()
    for shape, layers, mesh, limit in todo:
        arguments = ["--one", "--shape", shape, "--layers", str(layers or 0), "--mesh", mesh]
        arguments += ["--calls"] if options.calls else []
        arguments += ["--shares"] if options.shares else []
        arguments += ["--trained"] if options.trained else []
        if options.against is not None:
            compare(arguments, options.against, options.pairs or 1)
            continue
        row = compiled_apart(arguments, ROOT)
        seconds.append(row["cpu_seconds"])
        if layers == 128 and todo is BARS:
            row |= {"of the line before": round(seconds[-1] / seconds[-2], 2), "ok": seconds[-1] <= DEEP * seconds[-2]}
            missed += not row["ok"]
        if limit is not None:
            row |= {"limit": limit, "ok": row["seconds"] < limit and row["peak_gib"] < MEMORY_LIMIT_GIB}
            missed += not row["ok"]
        print(json.dumps(row), flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
