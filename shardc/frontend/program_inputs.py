"""What a program is run on when nobody says: the model's own tensors, and small random values for what is missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from shardc.frontend.model_tree import named_tensors
from shardc.ir.graph import Graph, type_of


def model_state(model: nn.Module | None, graph: Graph | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by every one of their names; nothing of what lies on the meta device.

    With a graph, parameters have the dtype that it stores them in.
    """
    if model is None:
        return {}
    parameters, buffers = named_tensors(model, remove_duplicate=False)
    tensors = (*parameters.items(), *buffers.items())
    state = {name: t.detach() for name, t in tensors if not t.is_meta}
    if graph is not None:
        for port, node in zip(graph.inputs, graph.placeholders, strict=True):
            names = (port.name, *port.aliases) if port.role == "param" else ()
            state |= {name: state[name].to(type_of(node).dtype) for name in names if name in state}
    return state


def complete_inputs(graph: Graph, known_inputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """All inputs of a graph: those given, and for parameters and buffers that are not, small random values."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        known = next((known_inputs[n] for n in (port.name, *port.aliases) if n in known_inputs), None)
        if known is not None:
            inputs[port.name] = known
        elif port.role == "seed":
            inputs[port.name] = torch.tensor(seed)
        elif port.role in ("param", "buffer"):
            type = type_of(node)
            values = torch.rand(type.shape, generator=generator) * 0.2
            # Weights around 0; vectors, which may be variances or scales of a norm, below 1.
            values = values - 0.1 if type.ndim > 1 else 1 - values
            inputs[port.name] = values.to(type.dtype)
    return inputs


def drawn_batch(graph: Graph, split: Collection[str] = ()) -> dict[str, Tensor]:
    """Values that any model takes: floats in [0, 1); whole numbers 0 and 1, which are in any table.

    Of inputs that are `split` into microbatches, rows for all of them: each microbatch has other ones.
    """
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Tensor] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        if port.role != "input":
            continue
        type = type_of(node)
        shape = (graph.microbatches * type.shape[0], *type.shape[1:]) if port.name in split else type.shape
        if type.dtype.is_floating_point:
            batch[port.name] = torch.rand(shape, generator=generator).to(type.dtype)
        else:
            batch[port.name] = torch.randint(2, shape, generator=generator).to(type.dtype)
    return batch
