"""Is what several ranks hold the same? A hash of every tensor, compared by those that should have the same bits.

    param w : f32[8@tp, 4] on mesh (dp=2, tp=2)      ranks 0 and 2 hold its rows 0..3, ranks 1 and 3 its rows 4..7

Tensors that are sharded on the same axes and held by the same stages make a class. A check gathers one number for each
class, from all ranks; only where these differ, a second one says which tensors do. What no second rank holds is not
hashed. A hash is a sum modulo 2^64 of a tensor's bits, as whole numbers: exact in any order, so that it may be computed
on any device.

Replicas of state that was computed may differ by rounding, where kernels are not deterministic, or machines not the
same. That is a warning; a difference beyond it is an error, and so is any of what was given: inputs, learning rates,
state at the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import Diagnostic, ShardcError, listed
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.runtime.train.agreement import ranks_text, sides

FIRST = 3  # steps that are checked, whatever the interval
EVERY = 100  # steps between checks from then on
ROUNDING = 1e-3  # of a tensor's largest magnitude: what replicas may drift apart, with a warning
SAMPLE = 1 << 14  # elements that say how far two replicas lie apart
COLUMNS = 1021  # words of a row of a hash, a prime, so that rows of weights are not in step with it
WHAT = {
    "input": "was given another batch",
    "part": "was given other rows",
    "hyper": "has another learning rate",
    "seed": "is at another step or random seed",
}
HINTS = {
    "input": "give every rank the same whole batch, of which it takes its part: with the same sampler, order and seed",
    "part": "ranks of one data coordinate bring the same part of the batch: give their samplers the same rank, as in "
    "DistributedSampler(dataset, trainer.data_ranks, trainer.data_rank), and the same seed",
    "form": "give every rank batches of one shape, also the last one",
    "hyper": "step the same schedule on every rank",
    "seed": "take the same steps on every rank, from the same checkpoint",
    "launch": "make the model alike on every rank: call torch.manual_seed before, or launch(state=path)",
    "state": "something writes to what these ranks hold, or their hardware fails: go on from the last checkpoint",
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LABELS = {"hyper": "learning rate", "part": "input"}
AMONG = {"part": "the ranks of the same data coordinate"}  # else all others


@dataclass(frozen=True)
class Item:
    """A tensor as this rank holds it; None where it does not."""

    name: str
    role: str
    type: TensorType
    value: torch.Tensor | None


@dataclass(frozen=True)
class Peers:
    """All ranks of a job. `places` are, by rank, its stage and its rank in the mesh of the other axes.

    `homes` names the stages that hold a tensor, of those that not all do. `gather` is a collective: what it is given,
    from every rank, in order.
    """

    mesh: Mesh
    device: torch.device
    gather: Callable[[torch.Tensor], list[torch.Tensor]]
    places: Sequence[tuple[int, int]]
    homes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    def check(self, items: Sequence[Item], when: str, *, launching: bool = False) -> None:
        """Compare the items, which are the same on all ranks but for their values; all must call it.

        Raises ShardcError (SC542), the same on every rank, which names ranks and tensors; warns of rounding.
        """
        shared = [(item, holders) for item in items if (holders := self._holders(item))]
        if not shared:
            return
        classes = {holders: index for index, holders in enumerate(dict.fromkeys(h for _, h in shared))}
        hashes = torch.stack([fingerprint(item.value, self.device) for item, _ in shared])
        class_indices = torch.tensor([classes[holders] for _, holders in shared], device=self.device)
        digests = hashes.new_zeros(len(classes)).index_add_(
            0, class_indices, hashes * _weights(len(shared), self.device)
        )
        rows = self._gathered(digests)
        if not any(_differ(rows, holders, index) for holders, index in classes.items()):
            return
        rows = self._gathered(hashes)
        differing = [(item, groups, _differ(rows, groups, i)) for i, (item, groups) in enumerate(shared)]
        differing = [(item, groups, ranks) for item, groups, ranks in differing if ranks]
        differing_inputs = [(item, ranks) for item, _, ranks in differing if launching or item.role in WHAT]
        computed = [] if launching else [difference for difference in differing if difference[0].role not in WHAT]
        gaps = [self._apart(item, groups) for item, groups, _ in computed]
        far = [(item, ranks) for (item, _, ranks), gap in zip(computed, gaps, strict=True) if not 0 < gap <= ROUNDING]
        if differing_inputs or far:
            raise ShardcError(*_diagnostics([*differing_inputs, *far], when, launching))
        names = listed(item.name for item, _, _ in computed)
        ranks = ranks_text(sorted({rank for _, _, differing_ranks in computed for rank in differing_ranks}))
        warn(
            f"{when}: {ranks} and the others differ in what they hold of {names}, by {max(gaps):.1g} of its size: "
            "rounding that is not the same on all ranks, as of kernels that are not deterministic"
        )

    def _holders(self, item: Item) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks, of two or more, that should hold the same of a tensor."""
        axes = tuple(sorted(item.type.axes))
        homes = self.homes.get(item.name)
        return () if item.type.partial else _groups(self.mesh, tuple(self.places), axes, homes and tuple(homes))

    def _gathered(self, x: torch.Tensor) -> list[list[int]]:
        return torch.stack(self.gather(x)).tolist()

    def _apart(self, item: Item, groups: Sequence[Sequence[int]]) -> float:
        """How far replicas lie apart, relative to their size: 0 where the sample shows nothing."""
        # A stage that does not hold it takes part in the exchange all the same.
        size = min(SAMPLE, max(1, math.prod(item.type.local_shape(self.mesh))))
        sample = torch.zeros(size, dtype=torch.float64, device=self.device)
        if item.value is not None and item.value.numel():
            flat = item.value.detach().reshape(-1)
            flat = flat[:: -(-flat.numel() // size)]
            sample[: flat.numel()] = (flat.abs() if flat.is_complex() else flat).double()
        rows = torch.stack(self.gather(sample)).cpu()
        return max(_gap(rows[list(group)]) for group in groups)


def fingerprint(x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A tensor's bits in one int64, 0-dim, on the device; of nothing 0.

    Words are summed by column first, then weighted by it, so that it also sees most exchanges of elements.
    """
    if x is None or not x.numel():
        return torch.zeros((), dtype=torch.int64, device=device)
    x = x.detach()
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).contiguous()
    size = flat.element_size()
    if flat.storage_offset() * size % 8 or flat.stride(0) != 1:  # a single element may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    end = flat.numel() // (8 // size) * (8 // size)
    words, rest = flat[:end].view(torch.int64), flat[end:].view(INTEGERS[size]).to(torch.int64)
    whole = words.numel() // COLUMNS * COLUMNS
    rest = torch.cat([rest, words[whole:]])
    rest = torch.cat([rest, rest.new_zeros(2 * COLUMNS - rest.numel())])
    total = rest.view(2, COLUMNS).sum(0)
    if whole:
        total = total + words[:whole].view(-1, COLUMNS).sum(0)
    return (total * _weights(COLUMNS, total.device)).sum().to(device)


def corners(shape: Sequence[int], count: int = 4) -> list[tuple[slice, ...]]:
    """The first and the last few along every dim: what every rank reads of a tensor that it holds a shard of."""
    return [tuple(slice(0, min(n, count)) for n in shape), tuple(slice(max(0, n - count), n) for n in shape)]


@cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, spread over 64 bits: int64 products wrap, and an odd factor loses nothing."""
    generator = torch.Generator().manual_seed(17)
    return (torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1).to(device)


@cache
def _groups(
    mesh: Mesh, places: tuple[tuple[int, int], ...], axes: tuple[str, ...], homes: tuple[int, ...] | None
) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, (stage, member) in enumerate(places):
        if homes is None or stage in homes:
            groups.setdefault(tuple(mesh.index(member, (axis,)) for axis in axes), []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values() if len(ranks) > 1)


def _differ(rows: Sequence[Sequence[int]], holders: Sequence[Sequence[int]], column: int) -> list[int]:
    """The ranks that have something else at a place than most of those that should have the same."""
    ranks: list[int] = []
    for group in holders:
        _, others = sides([rows[rank][column] for rank in group])
        ranks += [group[position] for positions in others.values() for position in positions]
    return sorted(ranks)


def _gap(rows: torch.Tensor) -> float:
    if not bool(rows.isfinite().all()):
        return float("inf")
    spread = float((rows.amax(0) - rows.amin(0)).max())
    return spread / max(float(rows.abs().max()), torch.finfo(torch.float64).tiny)


def _diagnostics(differing: Sequence[tuple[Item, Sequence[int]]], when: str, launching: bool) -> list[Diagnostic]:
    """One diagnostic for each kind of item that differs."""
    kinds: dict[str, list[tuple[Item, Sequence[int]]]] = {}
    for item, ranks in differing:
        kinds.setdefault(item.role if item.role in WHAT else "state", []).append((item, ranks))
    diagnostics: list[Diagnostic] = []
    for kind, items in kinds.items():
        ranks = sorted({rank for _, ranks in items for rank in ranks})
        what = WHAT.get(kind) or ("starts from other values" if launching else "holds other values")
        if len(ranks) > 1:
            what = what.replace("was ", "were ").replace("has ", "have ").replace("is ", "are ")
            what = what.replace("starts", "start").replace("holds", "hold")
        names = listed(f"{LABELS.get(item.role, item.role)} {item.name}" for item, _ in items)
        message = f"{when}: {ranks_text(ranks)} {what} than {AMONG.get(kind, 'the other ranks')}"
        hint = HINTS["launch" if launching and kind == "state" else kind]
        cause = f"different: {names}"
        diagnostics.append(Diagnostic("SC542", message, tensor=items[0][0].name, cause=cause, hint=hint))
    return diagnostics
