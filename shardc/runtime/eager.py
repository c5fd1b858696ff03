"""What PyTorch itself finds: the unmodified model's loss, gradients and buffers, by autograd on one device.

The independent witness: neither our tracer nor our passes had a hand in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardc.torch_compat import flatten, unflatten

Witness = dict[tuple[str, str], Tensor]  # (role, name) of an output -> its value


def eager_outputs(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None, dtype: torch.dtype
) -> Witness:
    """The loss, the gradient of every parameter that gets one, and every buffer after the step.

    Runs on a copy in `dtype`, in the model's present mode, on the CPU. Floats of the batch are cast too. Gradients are
    those of `.backward()`, which also reaches parameters that `autograd.grad` does not see (reentrant checkpointing's).
    """
    twin = copy.deepcopy(model).to("cpu").to(dtype)

    def lifted(leaf: Any) -> Any:
        return leaf.to("cpu", dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    leaves, structure = flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    batch = unflatten([lifted(leaf) for leaf in leaves], structure)
    with torch.enable_grad():
        if isinstance(batch, dict):
            output = twin(**batch)
        else:
            output = twin(*batch) if isinstance(batch, (tuple, list)) else twin(batch)
        value = loss(output, batch) if loss is not None else _own_loss(output)
        twin.zero_grad()
        value.backward()
    found: Witness = {("loss", "loss"): value.detach()}
    found |= {("grad", name): p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return found | {("buffer", name): b.detach() for name, b in twin.named_buffers()}


def _own_loss(output: Any) -> Tensor:
    """The loss that a model returns: alone, first, or as `loss`. Tracing has checked that there is one."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, (tuple, list)):
        return next(item for item in output if isinstance(item, Tensor))
    return cast(Any, output).loss
