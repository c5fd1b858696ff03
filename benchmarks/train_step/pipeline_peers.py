"""Pipelines by torch.distributed.pipelining. Its schedules divide gradients by the microbatches, as a mean wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from benchmarks.measured_models import Decoder
from benchmarks.train_step.models import Batch
from benchmarks.train_step.setting import Gradients, LeftOutError, Run, Setting, compiler, optimizer_of

# Layers of each stage, by layers and stages: the embedding's and the head's stages have fewer, as measured best.
LAYERS = {(24, 4): [7, 6, 6, 5], (24, 8): [4, 3, 3, 2, 3, 3, 3, 3]}
LAYERS_IN_A_V = {(24, 8): [2, 4, 3, 3, 3, 3, 3, 3]}


class Stage(nn.Module):
    """Some layers of a decoder, under the names that they have there."""

    def __init__(self, model: Decoder, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.gated, self.first, self.last = model.size.gated, first, last
        if first:
            self.tok = model.tok
            if not self.gated:
                self.pos = model.pos
        if self.gated:
            self.register_buffer("cos", model.cos)
            self.register_buffer("sin", model.sin)
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in layers})
        if last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tok(x) if self.gated else self.tok(x) + self.pos
        angles = (self.cos, self.sin) if self.gated else None
        for block in self.blocks.values():
            x = block(x, angles)
        return self.head(self.norm(x)) if self.last else x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def pipeline(setting: Setting, schedule: str, compile: bool = False) -> Run:
    if setting.model.sizes is None:
        raise LeftOutError("its stages are cut for the recorded models alone")
    made = getattr(pipelining, f"Schedule{schedule}", None) or getattr(pipelining.schedules, f"Schedule{schedule}")
    several = issubclass(made, pipelining.schedules.PipelineScheduleMulti)
    ranks, rank, layers = setting.ranks, setting.rank, setting.model.layers
    count = 2 * ranks if several else ranks
    in_a_v = schedule == "ZBVZeroBubble"
    own = [rank, count - 1 - rank] if in_a_v else range(rank, count, ranks)
    cuts = _cuts((LAYERS_IN_A_V if in_a_v else LAYERS).get((layers, count)) or _even(layers, count))
    model = setting.build()
    assert isinstance(model, Decoder)
    backend = compiler(setting)
    stages: list[Stage] = [Stage(model, cuts[n], n == 0, n == count - 1) for n in own]
    del model
    loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    if compile:
        for stage in stages:
            for block in stage.blocks.values():
                block.compile(fullgraph=True, dynamic=False, backend=backend)
        loss_fn = torch.compile(cross_entropy, fullgraph=True, dynamic=False, backend=backend)
    made_of = [pipelining.PipelineStage(stage, n, count, setting.device) for n, stage in zip(own, stages, strict=True)]
    runner = made(made_of if several else made_of[0], setting.microbatches, loss_fn=loss_fn)
    module = nn.ModuleList(stages)
    optimizer = optimizer_of(module, fused=True) if setting.optimizer else None
    begins, ends = 0 in own, count - 1 in own

    def rest() -> None:
        for p in module.parameters():
            p.grad = None

    def step(batch: Batch) -> Tensor:
        rest()
        tokens, targets = (batch[name] for name in setting.model.inputs)
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if ends else {}
        runner.step(*((tokens,) if begins else ()), **given)
        if optimizer is not None:
            optimizer.step()
        if not ends:
            return torch.zeros((), device=setting.device)
        return torch.stack([loss.detach().float() for loss in losses]).mean() * ranks  # the others have none

    def gradients() -> Gradients:
        mine = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
        found: dict[str, Tensor] = {}
        for name in setting.model.checked:
            grad = mine.get(name)
            whole = torch.zeros_like(setting.state[name], device=setting.device) if grad is None else grad.clone()
            dist.all_reduce(whole)
            found[name] = whole
        return found

    return Run(step, gradients, local=True, rest=rest)


def _even(layers: int, stages: int) -> list[int]:
    return [layers * (n + 1) // stages - layers * n // stages for n in range(stages)]


def _cuts(counts: Sequence[int]) -> list[range]:
    return [range(sum(counts[:n]), sum(counts[: n + 1])) for n in range(len(counts))]


CONTESTANTS: dict[str, Callable[[Setting], Run]] = {
    "torch-pp-1f1b": partial(pipeline, schedule="1F1B"),
    "torch-pp-1f1b-compiled": partial(pipeline, schedule="1F1B", compile=True),
    "torch-pp-interleaved": partial(pipeline, schedule="Interleaved1F1B"),
    "torch-pp-interleaved-compiled": partial(pipeline, schedule="Interleaved1F1B", compile=True),
    "torch-pp-zbv": partial(pipeline, schedule="ZBVZeroBubble"),
    "torch-pp-interleaved-zb": partial(pipeline, schedule="InterleavedZeroBubble"),
}
