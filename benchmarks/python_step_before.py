"""Serves `benchmarks.python_step` for the first checkouts that it is compared with, as 7391cca: their executors have
other names and arguments, and their kernels' references stand where a GPU would launch. No pipelines: those had
executors of their own. It runs in a process of its own, whose shardc and benchmarks are the checkout's, and so can
import nothing of `python_step`: what the two share stands in both.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")


def of(module: str, name: str) -> Any:
    """A name of the checkout's, which today's tree may not have."""
    return getattr(import_module(module), name)


def made(kernel: Any, inputs: Any) -> list[Tensor]:
    """A kernel's results, as before a launch: operands are read, results allocated."""
    for x in inputs:
        x.data_ptr()
    return [torch.zeros(output.shape, dtype=output.dtype) for output in kernel.outputs]


def attended(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    rows = q.transpose(1, 2)
    return rows.new_zeros((*rows.shape[:3], v.shape[-1])).transpose(1, 2), q.new_zeros(q.shape[:3]).float()


def attended_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    gradients = (t.new_zeros([t.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2) for t in (q, k, v))
    return (*gradients, q.new_zeros(0))


def sizes(plan: Mapping[str, Any]) -> tuple[int, int, int]:
    """The width of a case's model, the sequences of its batch, and the tokens of each."""
    return (16, 4, 2) if "precision" in plan else (32, 8, 16)


def step_of(mesh: str, plan: Mapping[str, Any], layers: int) -> Callable[[], Any]:
    """A step of rank 0, over the process group `fake`, which it makes."""
    import shardc

    torch.manual_seed(0)
    width, sequences, tokens = sizes(plan)
    model = of("benchmarks.gpt", "GPT")(64, width, 2, layers, tokens)
    batch = {name: torch.randint(64, (sequences, tokens)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program: Any = shardc.compile(model, batch, mesh=mesh, plan=dict(plan), optimizer=optimizer)
    body = program.body
    dist.init_process_group("fake", rank=0, world_size=body.mesh.world_size, store=FakeStore())
    groups = of("shardc.runtime.groups", "axes_used")(body)
    comm = of("shardc.runtime.groups", "ProcessGroupCommunicator")(body.mesh, 0, groups, timedelta(seconds=9))
    context = of("shardc.runtime.instructions", "rank_context")(body.mesh, 0, comm)
    arena = of("shardc.runtime.arena", "Arena")({body: of("shardc.ir.arena", "planned")(body)}, CPU)
    executor = of("shardc.runtime.executor", "Executor")(body, context, 0, CPU, arena)
    types = {name: of("shardc.ir.graph", "type_of")(node) for name, node in body.input_nodes().items()}
    whole = program.inputs()

    def local(name: str, value: Tensor) -> Tensor:
        return of("shardc.runtime.layout", "shard")(value.detach(), types[name], body.mesh, 0).clone()

    feeds = of("shardc.runtime.microbatches", "feeds")(body, whole)
    fed = [{name: local(name, x) for name, x in feed.items()} for feed in feeds]
    held = {name: local(name, x) for name, x in whole.items() if name not in fed[0]}
    return lambda: executor.run(held, fed, None)


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds of process time."""
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3


def main() -> None:
    """Serve the requests of `python_step.Side`; a case comes with its mesh and plan."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    library = of("shardc.ir.ops.library", "LIBRARY")
    import_module("shardc.ir.ops.attention")
    library.impl("sdpa", attended, "CPU")
    library.impl("sdpa_bwd", attended_backward, "CPU")
    import_module("kernels_triton.fused.reference").__dict__["run"] = made
    run: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        match json.loads(line):
            case ["case", str(mesh), dict(plan), int(layers)]:
                if dist.is_initialized():
                    dist.destroy_process_group()
                run = step_of(mesh, plan, layers)  # pyright: ignore[reportUnknownArgumentType]
                for _ in range(3):
                    run()
                print(json.dumps(import_module("shardc").__file__), flush=True)
            case ["steps", int(count)]:
                print(json.dumps([timed(run) for _ in range(count)]), flush=True)
            case other:
                raise ValueError(f"unknown request {other}")


if __name__ == "__main__":
    main()
