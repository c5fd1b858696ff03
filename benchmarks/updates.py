"""An optimizer's update of a whole model: the launches that a program makes, in one CUDA graph, against what else can.

    python -m benchmarks.updates [--layers 12] [--dtypes float32 bfloat16]

AdamW on Hugging Face's GPT-2, parameters, gradients and moments of one dtype; a JSON line each with microseconds (in
turns, the L2 cache flushed before: benchmarks/replays.py): of the program's generated launches, in place; of torch's
fused AdamW; of the template on one flat tensor of as many elements (`flat`); and of a plain elementwise kernel of as
many bytes (`copy`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

import shardc
from benchmarks import replays
from kernels_triton import ops
from kernels_triton.codegen.schedules import inplace_pairs
from kernels_triton.generated.launcher import launcher
from kernels_triton.ir.kernel import Kernel
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import Graph, info, type_of

LR = 1e-3
DEVICE = "cuda"


def gpt2(layers: int, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, **drop)).to(dtype)  # type: ignore[arg-type]
        tokens = torch.zeros(2, 64, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}


def updates(model: torch.nn.Module, batch: dict[str, Tensor]) -> Graph:
    """The body of a program on one device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return shardc.compile(model, batch, mesh="dp=1", plan={"fuse": True}, optimizer=optimizer).body


def launches(body: Graph) -> list[tuple[fx.Node, Kernel]]:
    """The kernels that update parameters, and whatever they need that is no gradient; there are no other calls."""
    found: list[tuple[fx.Node, Kernel]] = []
    for node in body.calls():
        if info(node).phase == "opt" and (kernel := kernel_of(node.target, node.args)) is not None:
            found.append((node, kernel))
    return found


def over(kernel: Kernel) -> dict[int, int]:
    """Which output is written over which input, as the program does it: each over one of its own."""
    found: dict[int, int] = {}
    for at, source in sorted(inplace_pairs(kernel)):
        if at not in found and source not in found.values():
            found[at] = source
    return found


def bound(found: list[tuple[fx.Node, Kernel]], body: Graph) -> Callable[[], None]:
    """All launches, on tensors of their own; results in place where they may be."""
    tensors: dict[fx.Node, Tensor] = {}

    def tensor(node: fx.Node) -> Tensor:
        if node not in tensors:
            type = type_of(node)
            drawn = torch.rand(type.local_shape(body.mesh), device=DEVICE).to(type.dtype)
            tensors[node] = drawn + 1 if drawn.dim() == 0 else drawn  # numbers of steps
        return tensors[node]

    calls: list[Callable[[], Any]] = []
    for node, kernel in found:
        inputs = [tensor(x) for x in node.args[0]]  # type: ignore[union-attr,arg-type]
        places = over(kernel)
        outputs = [
            inputs[places[at]] if at in places and kernel.space != (1,) else torch.empty(
                made.shape, dtype=made.dtype, device=DEVICE
            )
            for at, made in enumerate(kernel.outputs)
        ]  # fmt: skip
        calls.append(launcher(kernel).bind(inputs, outputs))
        for item in node.users:
            tensors[item] = outputs[int(item.args[1])]  # type: ignore[arg-type]

    def run() -> None:
        for call in calls:
            call()

    return run


def theirs(model: torch.nn.Module) -> Callable[[], Any]:
    """torch's fused AdamW on parameters of these shapes."""
    params = [torch.nn.Parameter(torch.rand(p.shape, dtype=p.dtype, device=DEVICE)) for p in model.parameters()]
    for p in params:
        p.grad = torch.rand_like(p)
    return torch.optim.AdamW(params, lr=LR, fused=True, capturable=True).step


def flat(count: int, dtype: torch.dtype) -> Callable[[], None]:
    p, g, m, v = (torch.rand(count, device=DEVICE).to(dtype) for _ in range(4))
    lr, step = torch.tensor(LR, device=DEVICE), torch.tensor(2.0, device=DEVICE)
    return lambda: ops.adamw(p, g, m, v, lr, step)


def measured(layers: int, dtype: torch.dtype) -> dict[str, Any]:
    model, batch = gpt2(layers, dtype)
    body = updates(model, batch)
    found = launches(body)
    count = sum(p.numel() for p in model.parameters())
    size = sum(kernel.bytes_moved for _, kernel in found)
    line: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "parameters": len(list(model.parameters()))}
    line |= {"elements": count, "launches": len(found), "MB": round(size / 1e6, 1)}
    calls = {"ours": bound(found, body), "torch": theirs(model), "flat": flat(count, dtype), "copy": replays.copy(size)}
    spent, failed = replays.times(calls, size)
    for why in failed.values():
        raise why
    line |= {f"{name}_us": round(us, 1) for name, us in spent.items()}
    line["of_copy"] = round(spent["copy"] / spent["ours"], 3)
    return line | {"torch_over_ours": round(spent["torch"] / spent["ours"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    options = parser.parse_args()
    for name in options.dtypes:
        print(json.dumps(measured(options.layers, getattr(torch, name))), flush=True)


if __name__ == "__main__":
    main()
