"""What PyTorch itself finds: the unmodified model's loss, gradients and buffers, by autograd on one device.

The independent witness: neither our tracer nor our passes had a hand in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
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
    counted: Callable[[Any], int] | None = None,
    limit: float | None = None,
) -> Witness:
    """The loss, the gradient of every parameter that gets one, and every buffer after the step.

    Of several `microbatches` the loss is the mean, or, where tokens are `counted` in them, the mean weighted by these;
    they are run one after the other, as torch accumulates. What is `stored` of a parameter may have been rounded; it is
    what the model then has. Gradients are clipped to a global norm of `limit`, where there is one.

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
    parts = split(batch, microbatches)
    counts = [1 if counted is None else counted(part) for part in parts]
    for part, count in zip(parts, counts, strict=True):
        with torch.enable_grad():
            if isinstance(part, dict):
                output = twin(**part)
            else:
                output = twin(*part) if isinstance(part, (tuple, list)) else twin(part)
            value = loss(output, part) if loss is not None else _own_loss(output)
            if count:
                value = value * count / sum(counts)
                value.backward()
                total += value.detach()
            else:  # a mean over no tokens is 0 / 0
                _backward_of_nothing(value, list(twin.parameters()))
    if limit is not None:
        nn.utils.clip_grad_norm_(twin.parameters(), limit)
    found: Witness = {("loss", "loss"): total}
    found |= {("grad", name): p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return found | {("buffer", name): b.detach() for name, b in twin.named_buffers()}


def _backward_of_nothing(value: Tensor, params: Sequence[Tensor]) -> None:
    """Leave gradients as they are, but for a 0 where a parameter had none."""
    before = [None if p.grad is None else p.grad.clone() for p in params]
    value.backward()
    for p, grad in zip(params, before, strict=True):
        if p.grad is not None:
            p.grad = torch.zeros_like(p) if grad is None else grad


def _own_loss(output: Any) -> Tensor:
    """The loss that a model returns: alone, first, or as `loss`. Tracing has checked that there is one."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(output, (tuple, list)):
        return next(item for item in output if isinstance(item, Tensor))
    return cast(Any, output).loss
