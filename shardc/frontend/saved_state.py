"""What a model's own `state_dict` holds: its keys in their order, the tensor that each stands for, and its dtype.

    lm_head.weight    model.embed_tokens.weight    bfloat16        a tied weight goes by the first of its names

A program records it, so that a trainer gives back what the model would, no more: of a buffer that is not persistent
there is no key. An entry without a tensor is none of the model's: extra state, or what a hook of `state_dict` computes.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardc.frontend.model_tree import named_tensors
from shardc.ir.types import DTYPE_NAMES

Entry = tuple[str, str, str]  # key, parameter or buffer, dtype


def saved_state(model: nn.Module) -> list[Entry] | None:
    """The entries of `model.state_dict()`; None for a model that raises there, whose names are then its state."""
    try:
        items = dict(model.state_dict(keep_vars=True))
    except Exception:
        return None
    names: dict[int, str] = {}
    parameters, buffers = named_tensors(model)
    for name, t in (*parameters.items(), *buffers.items()):
        names.setdefault(id(t), name)
    return [
        (key, names.get(id(value), ""), DTYPE_NAMES.get(value.dtype, str(value.dtype)))
        if isinstance(value, Tensor)
        else (key, "", "")
        for key, value in items.items()
    ]
