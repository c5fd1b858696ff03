"""Tensor parallelism by torch's DTensor, compiled, with and without its asynchronous form; and Megatron's by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measured_models import Block, Decoder
from benchmarks.train_step.megatron import Megatron
from benchmarks.train_step.models import Batch
from benchmarks.train_step.setting import Gradients, LeftOutError, Run, Setting, compiler, optimizer_of


def dtensor(setting: Setting, sequence: bool = False, asynchronous: bool = False, compile: bool = True) -> Run:
    """As torchtitan parallelizes a Llama, and compiles it: block by block, and the loss over a split vocabulary.

    `asynchronous`: Inductor decomposes gathers and reduce-scatters that stand beside products.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model, ranks = setting.build(), setting.ranks
    if not isinstance(model, Decoder):
        raise LeftOutError("only the recorded models are parallelized by hand")
    if asynchronous and not setting.on_gpu:
        raise LeftOutError("asynchronous tensor parallelism needs GPUs")
    mesh = init_device_mesh(setting.device.type, (ranks,), mesh_dim_names=("tp",))
    between = Shard(1) if sequence else Replicate()
    s = model.size
    local = replace(s, heads=s.heads // ranks, kv_heads=s.kv_heads // ranks)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.size = local
        style: dict[str, ParallelStyle] = {
            **{f"attn.{name}": ColwiseParallel() for name in ("q", "k", "v")},
            **{f"mlp.{name}": ColwiseParallel() for name in (("gate", "up") if s.gated else ("up",))},
            **{name: RowwiseParallel(output_layouts=between) for name in ("attn.out", "mlp.down")},
        }
        if sequence:
            style |= {
                **{name: SequenceParallel() for name in ("n1", "n2")},
                "attn": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(block, mesh, style)
    outer: dict[str, ParallelStyle] = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        outer["norm"] = SequenceParallel()
        if not s.gated:
            model.pos = nn.Parameter(model.pos.detach().chunk(ranks)[setting.rank].clone())
    parallelize_module(model, mesh, outer)
    backend = compiler(setting, subclasses=True)
    for block in model.blocks if compile else ():
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = _adamw(groups) if setting.optimizer else None

    def rest() -> None:
        for p in model.parameters():
            p.grad = None

    def step(batch: Batch) -> Tensor:
        rest()
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def gradients() -> Gradients:
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if name not in setting.model.checked or p.grad is None:
                continue
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            if sequence and name == "pos":
                parts = [torch.empty_like(grad) for _ in range(ranks)]
                dist.all_gather(parts, grad.contiguous())
                grad = torch.cat(parts)
            found[name] = grad
        return found

    run = Run(step, gradients, rest=rest)
    if asynchronous:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh.get_group().group_name)
        run.building = lambda: torch._inductor.config.patch(_micro_pipeline_tp=True)
    return run


def _adamw(groups: list[list[Tensor]]) -> torch.optim.AdamW:
    """DTensors and tensors are not updated in one call."""
    from benchmarks.train_step.setting import RATE

    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=RATE, fused=True)


def megatron(setting: Setting, sequence: bool = False) -> Run:
    if setting.model.sizes is None:
        raise LeftOutError("written for the recorded models alone")
    model = Megatron(setting, sequence)
    optimizer = optimizer_of(model, fused=True) if setting.optimizer else None

    def rest() -> None:
        for p in model.parameters():
            p.grad = None

    def step(batch: Batch) -> Tensor:
        rest()
        loss = model(*(batch[name] for name in setting.model.inputs))
        loss.backward()
        model.sum_replicated()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return Run(step, model.gradients, rest=rest)


CONTESTANTS: dict[str, Callable[[Setting], Run]] = {
    "dtensor-tp": dtensor,
    "dtensor-tp-sp": partial(dtensor, sequence=True),
    "dtensor-tp-sp-async": partial(dtensor, sequence=True, asynchronous=True),
    "megatron-tp": megatron,
    "megatron-tp-sp": partial(megatron, sequence=True),
}
