"""Whether a program has kernels where its plan leaves `fuse` open: on GPUs, as there they make every step faster.

    hardware: h200        on: its file says `device: gpu`
    hardware: cpu-gloo    off: CPUs run the kernels' references
    no hardware           on where Triton is there, and the model's parameters or the sample batch lie on a CUDA device,
                          or this is a rank of a job on a host with GPUs, which `launch` runs on

A plan with `symbols` has no kernels unless it says so: how values divide into kernels depends on their sizes, and
formulas of costs are for all of them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from kernels_triton.launch.launch import HAS_TRITON
from shardc.plan.hardware import DEFAULT_NAME
from shardc.plan.schema import Plan
from shardc.runtime.execute.batch import leaves_of


def with_fusion(plan: Plan, model: nn.Module, batch: Any) -> tuple[Plan, str]:
    """The plan, with `fuse` on where it leaves that open and the device is a GPU; and then what says so, else ''."""
    fused_on = device_of_kernels(plan, model, batch) if plan.fuse.enabled is None else ""
    if not fused_on:
        return plan, ""
    return plan.model_copy(update={"fuse": plan.fuse.model_copy(update={"enabled": True})}), fused_on


def device_of_kernels(plan: Plan, model: nn.Module, batch: Any) -> str:
    """The GPU that a plan which leaves `fuse` open compiles kernels for, in words; '' for none."""
    if plan.symbols:
        return ""
    choice = plan.hardware
    if choice.value.device is not None:
        name = "the plan's hardware" if choice.like == DEFAULT_NAME else f"hardware {choice.like}"
        return f"{name} is a GPU" if choice.value.device == "gpu" else ""
    if not HAS_TRITON:
        return ""
    if (device := cuda_device(model, batch)) is not None:
        return f"the model lies on {device}"
    return "this job has GPUs" if job_has_gpus() else ""


def job_has_gpus() -> bool:
    """Whether this process is a rank of a job (torchrun's variables), on a host with CUDA devices: `launch` runs there,
    wherever the model lies while it is compiled."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and torch.cuda.is_available()


def cuda_device(model: nn.Module, batch: Any) -> str | None:
    """The first CUDA device that a parameter, a buffer or a tensor of the batch lies on."""
    tensors = (*model.parameters(), *model.buffers(), *(leaf for _, leaf in leaves_of(batch)))
    return next((str(t.device) for t in tensors if isinstance(t, Tensor) and t.is_cuda), None)
