"""What PyTorch itself finds: the unmodified model's loss, gradients and buffers, by autograd on one device.

The independent witness: neither our tracer nor our passes had a hand in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardc.runtime.microbatches import split
from shardc.torch_compat import each_tensor, flatten, unflatten

Witness = dict[tuple[str, str], Tensor]  # (role, name) of an output -> its value


def eager_outputs(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    dtype: torch.dtype | None,
    microbatches: int = 1,
    stored: Mapping[str, Tensor] | None = None,
) -> Witness:
    """The loss, the gradient of every parameter that gets one, and every buffer after the step.

    Of several `microbatches` the loss is the mean, and they are run one after the other, as torch accumulates. What is
    `stored` of a parameter may have been rounded; it is what the model then has.

    Runs on a copy in `dtype` (in its own if that is None), in the model's present mode, on the CPU. Floats of the batch
    are cast too, and complex numbers to the wider kind. Gradients are those of `.backward()`, which also reaches
    parameters that `autograd.grad` does not see (reentrant checkpointing's).
    """

    def lifted(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wide = dtype if leaf.is_floating_point() else torch.complex128 if leaf.is_complex() and dtype else None
        return leaf.to("cpu", wide or leaf.dtype)

    twin = each_tensor(copy.deepcopy(model), lifted)
    with torch.no_grad():
        own = dict(twin.named_parameters())
        for name, value in (stored or {}).items():
            if name in own:
                own[name].copy_(value)

    leaves, structure = flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    batch = unflatten([lifted(leaf) for leaf in leaves], structure)
    twin.zero_grad()
    total = torch.zeros((), dtype=dtype or torch.float32)
    for part in split(batch, microbatches):
        with torch.enable_grad():
            if isinstance(part, dict):
                output = twin(**part)
            else:
                output = twin(*part) if isinstance(part, (tuple, list)) else twin(part)
            value = loss(output, part) if loss is not None else _own_loss(output)
            (value / microbatches).backward()
        total += value.detach() / microbatches
    found: Witness = {("loss", "loss"): total}
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
