"""Programs for 16,384 ranks: how long they take to compile, prove, cost and report, and what a step would take.

    python -m benchmarks.at_scale                       llama (dp, pp, cp, tp) and mixtral (dp, pp, ep, tp)
    python -m benchmarks.at_scale --shape llama --hardware h200

Layers are those of Llama-3-405B and of Mixtral-8x7B, 16 of them, one a stage; weights are bfloat16, on the meta
device. Nothing
here depends on the number of ranks: those of one coordinate of the pipeline are one class, which runs one list and one
set of graphs, and a class is compiled, proved, timed and walked once. The network has two levels, nodes and what joins
them. A JSON line a shape, with seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

import shardc
from shardc.partition.rank_costs import bytes_sent_by_axis

T = TypeVar("T")
MICROBATCHES = 64
ATTENTION = {f"**.{name}_proj.weight": "tp, -" for name in "qkv"}
ENDS = {"**.embed_tokens.weight": "tp, -", "lm_head.weight": "tp, -"}
MLP = {f"**.{name}_proj.weight": "tp, -" for name in ("gate", "up")}
EXPERTS = {"**.experts.gate_up_proj": "ep, 2*tp, -", "**.experts.down_proj": "ep, -, tp"}
Shape = tuple[str, dict[str, int], dict[str, Any], int]  # mesh, sizes, plan, tokens of a row
SHAPES: dict[str, Shape] = {
    "llama": (
        "dp=8, pp=16, cp=16, tp=8",
        {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8,
         "vocab_size": 128256, "num_hidden_layers": 16},
        {"params": ATTENTION | ENDS | MLP, "inputs": {"*": "dp, cp"}},
        131072,
    ),
    "mixtral": (
        "dp=16, pp=16, ep=8, tp=8",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000, "num_hidden_layers": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
        {"params": ATTENTION | ENDS | EXPERTS, "inputs": {"*": "dp.ep, -"}},
        4096,
    ),
}  # fmt: skip


def model_of(sizes: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        if "num_local_experts" in sizes:
            return MixtralForCausalLM(MixtralConfig(**sizes, use_cache=False)).bfloat16()
        return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).bfloat16()


def compiled(shape: Shape, microbatches: int = MICROBATCHES) -> shardc.Program:
    """The program of a shape, with AdamW: a row of the batch for each microbatch of each rank along its axes."""
    text, sizes, plan, length = shape
    mesh, model = shardc.Mesh.parse(text), model_of(sizes)
    rows = mesh.size(plan["inputs"]["*"].partition(",")[0].split(".")) * microbatches
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    full = {**plan, "pipeline": {"microbatches": microbatches}}
    batch, optimizer = {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(model.parameters())
    return shardc.compile(model, batch, mesh=mesh, plan=full, optimizer=optimizer, cache=False)


def measure(shape: Shape, hardware: str, microbatches: int = MICROBATCHES) -> dict[str, Any]:
    seconds: dict[str, float] = {}

    def timed(name: str, do: Callable[[], T]) -> T:
        start = time.process_time()
        result = do()
        seconds[name] = round(time.process_time() - start, 2)
        return result

    program = timed("compile", lambda: compiled(shape, microbatches))
    proof = timed("prove", program.prove)
    predicted = timed("predict", lambda: program.predict(hardware))
    memory = timed("memory", program.memory)
    timed("report", lambda: str(memory))
    sent = Counter[str]()
    for c in program.staged.coordinate_range:
        for axis, size in bytes_sent_by_axis(program.staged, c, program.mesh).items():
            sent[axis] = max(sent[axis], size)
    return {
        "mesh": str(program.mesh),
        "ranks": program.mesh.world_size,
        "classes": len(program.staged.coordinate_range),
        "instructions": sum(map(len, program.staged.lists.ranks)),
        "proved": proof.ok,
        "cpu_seconds": seconds,
        "bytes_sent_by_axis": dict(sent),
        "peak_bytes": memory.peak,
        "hardware": hardware,
        "step_ms": round(predicted.step_ms, 1),
        "exposed_ms": round(predicted.exposed_total_ms, 1),
        "bubble": round(predicted.bubble, 3),
        "mfu": round(predicted.mfu, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--hardware", default="h200")
    arguments = parser.parse_args()
    for name in arguments.shape or SHAPES:
        print(json.dumps({"shape": name, **measure(SHAPES[name], arguments.hardware)}), flush=True)


if __name__ == "__main__":
    main()
