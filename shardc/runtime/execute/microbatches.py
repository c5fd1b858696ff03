"""Splits a step's batch into its microbatches: equal parts along dim 0, in order.

    batch [8, 128] of a program of 4 microbatches        4 x [2, 128]

Tensors that were not split when the program was compiled (a scalar, positions of [1, 128]) go to each microbatch whole.
Of a graph whose microbatches are two interleaved halves (`Graph.halves`), one is two of these parts, in one tensor.
Random draws differ between microbatches: a microbatch's key is derived from the step's key and its index
(`ir.ops.streams`).

If losses are weighted by tokens, microbatch k also gets its share n_k / (n_0 + n_1 + ...), computed on the batch's
device, so that no GPU synchronization is needed. A microbatch without counted tokens has share 0. But its mean would be
0 / 0, and NaN times 0 is NaN. One of its tokens is therefore counted, and the share of 0 removes that token's loss. A
step without any counted token then has a loss and gradients of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Tokens, type_of
from shardc.ir.microbatch import GIVEN
from shardc.ir.ops.streams import fold_in
from shardc.ir.trees import flatten
from shardc.ir.types import TensorType
from shardc.torch_compat import unflatten

Feed = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Counted:
    """How tokens are counted over ranks that each have a part of the batch: `total` sums what one counts, by
    microbatch, over all parts. `first` says whether this is the first of them, which has a microbatch's first row."""

    total: Callable[[torch.Tensor], torch.Tensor]
    first: bool


def feeds(
    graph: Graph,
    batch: Mapping[str, torch.Tensor],
    *,
    types: Mapping[str, TensorType] | None = None,
    split: Collection[str] = (),
    counted: Counted | None = None,
) -> list[Feed]:
    """The inputs of each microbatch by port: its part of each split input, other inputs whole, and its own seed.

    `types` are those of inputs that are not the graph's: of a part of a microbatch. `split` are inputs that are no
    microbatch's, even if they have its shape.
    """
    count = graph.microbatches
    microbatch_feeds: list[Feed] = [{} for _ in range(count)]
    shares: list[torch.Tensor] = []
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        if port.role not in GIVEN:
            continue  # most ports: those of state
        name = next((name for name in (port.name, *port.aliases) if name in batch), None)
        if port.role == "share":
            # Without the tokens there are no shares; another check reports the missing input.
            for feed, share in zip(microbatch_feeds, shares, strict=False):
                feed[port.name] = share
        if name is None:
            continue
        value, shape = batch[name], ((types or {}).get(port.name) or type_of(node)).shape
        for k, feed in enumerate(microbatch_feeds):
            if port.role == "seed":
                feed[port.name] = _keys(value, k, graph.halves)
            elif count == 1 or (tuple(value.shape) == shape and port.name not in split):
                feed[port.name] = value
            else:
                feed[port.name] = _part(port.name, value, shape, k, count)
        if graph.tokens is not None and port.name == graph.tokens.input:
            whole = types is None or port.name not in types
            tokens = [half for feed in microbatch_feeds for half in feed[port.name].chunk(graph.halves)]
            parts, shares = _token_shares(tokens, graph.tokens, None if whole else counted)
            if graph.halves > 1:
                parts, shares = _joined(parts, graph.halves, torch.cat), _joined(shares, graph.halves, torch.stack)
            for feed, part in zip(microbatch_feeds, parts, strict=True):
                feed[port.name] = part
    return microbatch_feeds


def halved(graph: Graph, feed: Feed, split: Collection[str]) -> list[Feed]:
    """The inputs of each half of a microbatch; `split` are those that are split into microbatches."""
    return (
        [
            {name: value.chunk(graph.halves)[half] if name in split else value for name, value in feed.items()}
            for half in range(graph.halves)
        ]
        if graph.halves > 1
        else [feed]
    )


def _keys(key: torch.Tensor, microbatch: int, halves: int) -> torch.Tensor:
    """The key of a microbatch, or those of its halves, of the step's."""
    step = int(key.flatten()[0])
    keys = [fold_in(step, microbatch * halves + half) for half in range(halves)]
    return torch.tensor(keys if halves > 1 else keys[0], dtype=key.dtype, device=key.device)


def _joined(parts: Sequence[torch.Tensor], count: int, join: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Every `count` tensors as one."""
    return [join(list(parts[at : at + count])) for at in range(0, len(parts), count)]


def _token_shares(
    parts: Sequence[torch.Tensor], tokens: Tokens, counted: Counted | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each microbatch's tokens, with one of them counted if none was, and its share."""
    counts = torch.stack([(part[..., tokens.shift :] != tokens.ignore).sum() for part in parts])
    if counted is not None:
        counts = counted.total(counts)
    total = counts.sum().clamp(min=1)
    if counted is not None and not counted.first:
        return list(parts), list((counts.double() / total).unbind())
    fed: list[torch.Tensor] = []
    for part, count in zip(parts, counts, strict=True):
        first = part.new_zeros(part.shape, dtype=torch.bool)
        first[(0,) * (part.dim() - 1) + (tokens.shift,)] = True
        fed.append(part.masked_fill(first & (count == 0), 0 if tokens.ignore else 1))
    return fed, list((counts.double() / total).unbind())


def _part(name: str, value: torch.Tensor, shape: tuple[int, ...], k: int, count: int) -> torch.Tensor:
    whole = (count * shape[0], *shape[1:]) if shape else shape
    if tuple(value.shape) != whole:
        message = (
            f"input '{name}' has shape {list(value.shape)}, the program was compiled for {list(whole)}: "
            f"{count} microbatches of {list(shape)}"
        )
        hint = "pass tensors of the sample batch's shapes, or compile again with this batch"
        raise error("SC501", message, tensor=name, hint=hint)
    return value.narrow(0, k * shape[0], shape[0])


def split(batch: Any, count: int) -> list[Any]:
    """The microbatches of a batch as a model takes it: a tensor, a tuple or a dict.

    Every tensor whose dim 0 is that of the first is split, the others go to each. Raises ShardcError (SC103) where
    that size is no multiple of `count`.
    """
    if count == 1:
        return [batch]
    leaves, structure = flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    size = next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
    if not size or size % count:
        message = f"a batch of {size} cannot be split into {count} equal microbatches"
        raise error("SC103", message, hint=f"give a batch whose dim 0 is a multiple of {count}, or fewer microbatches")

    def part(leaf: Any, k: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        return leaf.narrow(0, k * (size // count), size // count)

    return [unflatten([part(leaf, k) for leaf in leaves], structure) for k in range(count)]
