"""What every contestant is made from, and what it has to be able to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.train_step.models import Batch, Model, skip_masks
from benchmarks.train_step.switches import ALL_ON, Switch

RATE = 1e-4
Gradients = Mapping[str, Tensor]


class LeftOutError(Exception):
    """Why a contestant cannot run here."""


@dataclass(frozen=True)
class Setting:
    model: Model
    state: Mapping[str, Tensor]  # the first weights, on the CPU
    sample: Batch  # a whole batch: of all ranks, of all microbatches
    device: torch.device
    dtype: torch.dtype
    ranks: int
    microbatches: int = 1
    optimizer: bool = False
    master: bool = False  # parameters and gradients of ours are of float32, and computed with in `dtype`
    switch: Switch = ALL_ON  # which pass of ours is off

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def build(self) -> nn.Module:
        """The model with its first weights, on this rank's device."""
        with self.device:  # not on meta and then to_empty, which loses rotary frequencies
            model = self.model.build(self.dtype)
        skip_masks()
        model.load_state_dict(self.state)
        return model


def nothing() -> None:
    pass


@dataclass
class Run:
    """A contestant, ready to step. Gradients are those of the step before, whole, on every rank."""

    step: Callable[[Batch], Tensor]
    gradients: Callable[[], Gradients]
    local: bool = False  # the loss is that of a rank's part of the batch
    rest: Callable[[], None] = nothing  # gives back what the last step left
    close: Callable[[], None] = nothing
    about: dict[str, object] = field(default_factory=dict[str, object])
    settle: Callable[[], None] | None = None  # waits for the last step, where synchronising the device does not
    peak: Callable[[], int] | None = None  # bytes, where torch's allocator does not know
    loss: Callable[[], float] | None = None  # of the last step, where the step returns none
    building: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the first step, which compiles


def optimizer_of(model: nn.Module, fused: bool | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)


def whole_loss(run: Run, loss: Tensor, ranks: int) -> float:
    if run.loss is not None:
        return run.loss()
    loss = loss.detach().float().clone()
    if run.local:
        dist.all_reduce(loss)
        loss /= ranks
    return float(loss)


def attention(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN's kernel before the flash one, as ours chooses."""
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return sdpa_kernel(kernels, set_priority=True) if device.type == "cuda" else nullcontext()


def compiler(setting: Setting, mode: str = "default") -> Callable[..., Any]:
    """A backend of torch.compile that is no other one: Inductor on GPUs. On the CPU a rehearsal captures graphs and
    runs them as they are, of one rank backward, too; torch 2.13 does not record that of DTensors.

    Contestants share the code of their layers, and dynamo keeps what it has compiled by code: it takes an entry again
    only for the backend that the entry is of.
    """
    if setting.on_gpu:
        import torch._inductor as inductor

        patches = inductor.list_mode_options(mode) if mode != "default" else None
        compiled = partial(lookup_backend("inductor"), config_patches=patches)
    else:
        compiled = lookup_backend("aot_eager" if setting.ranks == 1 else "eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compiled(graph, inputs)

    return backend
