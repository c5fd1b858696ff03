"""The part of each batch that this rank of a job brings, where a plan says `data: per_rank`.

    dp=2, tp=2      ranks 0 and 1 bring part 0, which is compared between them; ranks 2 and 3 bring part 1

What is said of a whole batch is said here over all parts: which ranks must have the same, how many tokens count,
whether there is a batch at all. Ranks whose data end at different times would wait for each other for ever: in a loop
they agree before each step (`agree`), by a number of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.types import TensorType
from shardc.runtime.execute.batch import leaves_of
from shardc.runtime.execute.data_parts import DataParts
from shardc.runtime.execute.microbatches import Counted, Feed
from shardc.runtime.train.agreement import ranks_text, sides
from shardc.runtime.train.replicas import Item, Peers, fingerprint

EQUAL_PARTS = "give parts of one shape: a sampler with equal parts and drop_last=True; labels of -100 count no tokens"
SAMPLER = "DistributedSampler(dataset, trainer.data_ranks, trainer.data_rank)"


@dataclass(frozen=True)
class RankPart:
    """Part `index` of the `parts`; `coordinates` are those of all ranks of the job, `peers`."""

    parts: DataParts
    index: int
    coordinates: Sequence[int]
    peers: Peers

    @property
    def counted(self) -> Counted:
        """How tokens are counted over all parts; every rank must do it at once."""
        return Counted(self.total, first=self.index == 0)

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum over all parts of what each has, on its device; every rank must call it."""
        rows = self.peers.gather(counts.to(self.peers.device))
        firsts = [self.coordinates.index(c) for c in range(self.parts.count)]  # a rank of each data coordinate
        return torch.stack([rows[rank] for rank in firsts]).sum(0).to(counts.device)

    def items(self, fed: Sequence[Feed], roles: Mapping[str, str]) -> list[Item]:
        """What is compared over ranks: of a part those that share its coordinate, all else by all."""
        shared = self.parts.shared
        return [
            Item(name, "part", shared[name], value)
            if name in shared
            else Item(name, roles[name], TensorType.plain(value.dtype, tuple(value.shape)), value)
            for feed in fed
            for name, value in feed.items()
        ]

    def warn_of_equal(self, fed: Sequence[Feed]) -> None:
        """Warn (SC542) where two data coordinates bring the same rows, as by a sampler that is not told of the ranks;
        every rank must call it."""
        hashes = [fingerprint(feed[name], self.peers.device) for feed in fed for name in self.parts.inputs]
        # A microbatch's place counts: parts of the same rows in another order are as wrong, and not as usual.
        own = sum((h * (2 * place + 1) for place, h in enumerate(hashes)), torch.zeros_like(hashes[0]))
        rows = [int(row) for row in self.peers.gather(own)]
        first: dict[int, int] = {}
        for rank, row in enumerate(rows):
            other = first.setdefault(row, rank)
            if self.coordinates[other] != self.coordinates[rank]:
                message = f"{ranks_text([other, rank])} were given the same rows, though each has a part of its own"
                hint = f"tell the sampler of the ranks: {SAMPLER}"
                warn(str(Diagnostic("SC542", message, "warning", hint=hint)))
                return

    def agree(self, batch: Any, *, ended: bool = False) -> list[int]:
        """The ranks whose data have ended; every rank must call it, before each batch.

        Raises ShardcError (SC542), the same on every rank, where batches are not of one form.
        """
        digest = 0 if ended else _digest(batch)
        rows = [int(row) for row in self.peers.gather(torch.tensor(digest, device=self.peers.device))]
        without = [rank for rank, row in enumerate(rows) if not row]
        if not without and len(set(rows)) > 1:
            differing = sorted(rank for ranks in sides(rows)[1].values() for rank in ranks)
            was = "was" if len(differing) == 1 else "were"
            message = f"{ranks_text(differing)} {was} given other leaves, shapes or dtypes than the other ranks"
            raise error("SC542", message, hint=EQUAL_PARTS)
        return without

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches, while every rank has one. Raises ShardcError (SC556), on every rank, where some have fewer."""
        iterator, end = iter(batches), object()
        while True:
            batch = next(iterator, end)
            without = self.agree(batch, ended=batch is end)
            if without:
                if len(without) < len(self.coordinates):
                    raise ShardcError(ended_early(without, "the mean would leave out what the others have"))
                return
            yield batch


def ended_early(ranks: Sequence[int], what: str) -> Diagnostic:
    """Of data that ended on some ranks, and not on the others."""
    has = "has" if len(ranks) == 1 else "have"
    message = f"{ranks_text(ranks)} {has} no batch left, and the other ranks have: {what}"
    hint = f"give each rank as many batches: {SAMPLER}, which gives equal parts, or a number of steps"
    return Diagnostic("SC556", message, hint=hint)


def _digest(batch: Any) -> int:
    """The leaves of a batch, their shapes and dtypes, in a number that is not 0."""
    text = repr(
        [(path, tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else path for path, x in leaves_of(batch)]
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True) | 1
