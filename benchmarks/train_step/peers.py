"""A training step by eager torch, torch.compile, DDP and FSDP2, as their users configure them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.train_step.models import Batch, loss_of
from benchmarks.train_step.setting import Gradients, Run, Setting, compiler, nothing, optimizer_of


def stepping(
    setting: Setting,
    model: nn.Module,
    *,
    parts: Callable[[Batch], AbstractContextManager[Batch]] | None = None,
    divided: bool = False,
    summed: Callable[[], None] = nothing,
    names: Callable[[str], str] = lambda name: name,
) -> Run:
    """Forward, backward and, if asked for, torch's fused AdamW.

    `parts` gives this rank's part of a batch; `divided` says that gradients are then summed over ranks, not averaged,
    and `summed` waits for it.
    """
    optimizer = optimizer_of(model, fused=True) if setting.optimizer else None
    share = 1 / setting.ranks if divided else 1.0

    def rest() -> None:
        for p in model.parameters():
            p.grad = None

    def step(batch: Batch) -> Tensor:
        rest()
        with nullcontext(batch) if parts is None else parts(batch) as own:
            loss = loss_of(model(**own))
            (loss if share == 1 else loss * share).backward()
        summed()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    def gradients() -> Gradients:
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if (name := names(name)) in setting.model.checked and p.grad is not None:
                found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        return found

    return Run(step, gradients, local=parts is not None, rest=rest)


def own_part(setting: Setting) -> Callable[[Batch], AbstractContextManager[Batch]]:
    """A rank's sequences."""
    return lambda batch: nullcontext({name: x.chunk(setting.ranks)[setting.rank] for name, x in batch.items()})


def eager(setting: Setting) -> Run:
    return stepping(setting, setting.build())


def compiled(setting: Setting, mode: str = "default") -> Run:
    """Model and loss as one graph."""
    model = setting.build()
    model.compile(fullgraph=True, dynamic=False, backend=compiler(setting, mode))
    return stepping(setting, model)


def ddp(setting: Setting, compile: bool = False) -> Run:
    """Compiled from the outside: torch then cuts the graph where buckets end, so that they are sent during backward."""
    model: Any = nn.parallel.DistributedDataParallel(
        setting.build(), device_ids=[setting.device] if setting.on_gpu else None, gradient_as_bucket_view=True
    )
    if compile:
        model = torch.compile(model, dynamic=False, backend=compiler(setting))
    named = ("_orig_mod.", "module.")
    return stepping(
        setting, model, parts=own_part(setting), names=lambda name: name.removeprefix(named[0]).removeprefix(named[1])
    )


def fsdp2(setting: Setting, compile: bool = False, prefetch: int = 0) -> Run:
    """Compiled block by block, so that gathers stay between them. `prefetch`: how many blocks' gathers are begun ahead
    of the block that runs, forward and backward; 0 leaves it to FSDP2, which takes one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = setting.build()
    mesh = init_device_mesh(setting.device.type, (setting.ranks,))
    blocks = [*model.get_submodule(setting.model.blocks).children()]
    backend = compiler(setting)
    for block in blocks:
        if compile:
            block.compile(fullgraph=True, dynamic=False, backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number, block in enumerate(blocks if prefetch else ()):
        if ahead := blocks[number + 1 : number + 1 + prefetch]:
            block.set_modules_to_forward_prefetch(ahead)  # type: ignore[operator]
        if ahead := blocks[max(number - prefetch, 0) : number][::-1]:
            block.set_modules_to_backward_prefetch(ahead)  # type: ignore[operator]
    return stepping(setting, model, parts=own_part(setting))


CONTESTANTS: dict[str, Callable[[Setting], Run]] = {
    "eager": eager,
    "compiled": compiled,
    "autotuned": partial(compiled, mode="max-autotune-no-cudagraphs"),
    "ddp": ddp,
    "ddp-compiled": partial(ddp, compile=True),
    "fsdp2": fsdp2,
    "fsdp2-compiled": partial(fsdp2, compile=True),
    "fsdp2-compiled-prefetch": partial(fsdp2, compile=True, prefetch=2),
}
