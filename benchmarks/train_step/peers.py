"""A training step by eager torch, torch.compile, DDP and FSDP2, as their users configure them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.train_step.models import Batch, loss_of
from benchmarks.train_step.setting import Gradients, Run, Setting, compiler, optimizer_of


def stepping(
    setting: Setting, model: nn.Module, *, part: bool = False, names: Callable[[str], str] = lambda name: name
) -> Run:
    """Forward, backward and, if asked for, torch's fused AdamW. `part`: of this rank's part of the batch."""
    optimizer = optimizer_of(model, fused=True) if setting.optimizer else None

    def rest() -> None:
        for p in model.parameters():
            p.grad = None

    def step(batch: Batch) -> Tensor:
        rest()
        if part:
            batch = {name: x.chunk(setting.ranks)[setting.rank] for name, x in batch.items()}
        loss = loss_of(model(**batch))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    def gradients() -> Gradients:
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if (name := names(name)) in setting.model.checked and p.grad is not None:
                found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad  # type: ignore[operator]
        return found

    return Run(step, gradients, local=part, rest=rest)


def eager(setting: Setting) -> Run:
    return stepping(setting, setting.build())


def compiled(setting: Setting, mode: str = "default") -> Run:
    """Model and loss as one graph."""
    model = setting.build()
    model.compile(fullgraph=True, dynamic=False, backend=compiler(setting, mode))
    return stepping(setting, model)


def ddp(setting: Setting, compile: bool = False) -> Run:
    """Compiled from the outside: torch then cuts the graph where buckets end, so that they are sent during backward."""
    spread = nn.parallel.DistributedDataParallel(
        setting.build(), device_ids=[setting.device] if setting.on_gpu else None, gradient_as_bucket_view=True
    )
    model = spread
    if compile:
        model = torch.compile(spread, dynamic=False, backend=compiler(setting))
    return stepping(
        setting, model, part=True, names=lambda name: name.removeprefix("_orig_mod.").removeprefix("module.")
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
    return stepping(setting, model, part=True)


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
