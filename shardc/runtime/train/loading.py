"""The batches of a run: epochs over a loader, from where a checkpoint left it, each a step ahead of its use on a GPU.

    position    {"epoch": 2, "batch": 17, "state": ...}      after the 17th batch of the third epoch
    going on    the loader's own state is put back, else what was trained on is passed over

How a loader goes on:

    it has state_dict, load_state_dict     its state after the last batch that was trained on
    its sampler has set_epoch              the epoch is set, and its first batches are passed over
    it is a DataLoader of torch            its generator and its samplers', or torch's, are put back to the epoch's
                                           start, as above
    it is a list                           the first batches of the epoch are passed over
    it is any other iterable               batches of all epochs are passed over: it begins as it did

No thread is used: while a GPU computes a step, the next batch is fetched, and copied on a stream of its own. One
batch is ahead, at most, and none of an iterator, which its owner may go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.utils.data import DataLoader

from shardc.ir.caller import warn
from shardc.ir.diagnostic import error
from shardc.runtime.train.loader_state import decode, encode
from shardc.runtime.train.rank_part import RankPart, ended_early

Position = Mapping[str, Any]  # plain data
START: Position = {"epoch": 0, "batch": 0}


@dataclass(frozen=True)
class Fetched:
    """A batch, its copy for the step, and where a run goes on that was trained on it."""

    batch: Any
    for_step: Any
    position: Position


class Loading:
    """The batches of one call of `train`, in order.

    Without `epochs` it is one pass. `position` is where to go on, or the number of batches to pass over. Positions are
    complete where `keeps`, for a checkpoint. `own` is the part of each batch that the rank brings, if not all. `copy`
    brings a batch to the device, and the next one is fetched before it is needed where `ahead`.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        epochs: int | None,
        position: Position | int = 0,
        *,
        keeps: bool = False,
        own: RankPart | None = None,
        ahead: bool = False,
        copy: Callable[[Any], Any] | None = None,
    ) -> None:
        self.batches: Any = batches
        self.epochs, self.own, self._keeps, self._copy = epochs, own, keeps, copy or (lambda batch: batch)
        self.position: Position = START if isinstance(position, int) else position
        self._to_pass_over = position if isinstance(position, int) else 0
        self._ahead = ahead and not isinstance(batches, Iterator)
        self._has_state = has_state(batches)
        self._epoch_setters = _epoch_setters(batches)
        self._source: Iterator[Fetched] = iter(())
        self._next: list[Fetched | Exception | None] = []  # what was fetched ahead; None at an epoch's end
        self._wants_more = self._said = False
        if "state" in self.position and not self._has_state:
            message = f"the checkpoint has the state of a loader, and this one, a {type(batches).__name__}, takes none"
            raise error("SC557", message, hint="give the loader that it was saved with, or resume=False")

    @property
    def total(self) -> int | None:
        """How many batches all epochs have, if the loader knows."""
        try:
            return None if self.epochs is None else self.epochs * len(self.batches)
        except TypeError:  # an iterable has no length; the loader of an iterable data set has a method that raises
            return None

    def take(self, limit: int | None) -> Iterator[Fetched]:
        """At most so many batches; no more are fetched."""
        epoch = int(self.position["epoch"])
        if epoch and self._begins_as_it_did:
            for _ in range(epoch):
                for _ in self.batches:
                    pass
        while self.epochs is None or epoch < self.epochs:
            self._source = self._pass(epoch)
            fresh = not ((self.position["epoch"] == epoch and self.position["batch"]) or self._to_pass_over)
            while limit != 0:
                fetched = self._fetched()
                if self._ends(fetched):
                    break
                assert fetched is not None
                limit, fresh = None if limit is None else limit - 1, False
                self._wants_more = limit != 0
                self.position = fetched.position
                yield fetched
            if limit == 0 or self.epochs is None:
                return
            if fresh:
                hint = "an iterator is used up after one pass: give a list or a loader, which begins anew"
                raise error("SC553", f"epoch {epoch} of train has no batch", hint=hint)
            epoch += 1
            if not self._has_state:  # its state goes on from epoch to epoch, and is that after the last batch
                self.position = {"epoch": epoch, "batch": 0, **self._started_from()}

    def look_ahead(self) -> None:
        """Fetch the next batch, if one is wanted. What goes wrong is raised when it is its turn."""
        if self._ahead and self._wants_more and not self._next:
            try:
                self._next.append(next(self._source, None))
            except Exception as failure:
                self._next.append(failure)

    def _fetched(self) -> Fetched | None:
        item = self._next.pop() if self._next else next(self._source, None)
        if isinstance(item, Exception):
            raise item
        return item

    def _ends(self, fetched: Fetched | None) -> bool:
        """Whether the epoch ends here: on all ranks, where the first has no batch left."""
        if self.own is None:
            return fetched is None
        without = self.own.agree(None if fetched is None else fetched.batch, ended=fetched is None)
        if without and len(without) < len(self.own.coordinates) and not self._said:
            self._said = True
            warn(str(replace(ended_early(without, "what is left of theirs is not trained on"), severity="warning")))
        return bool(without)

    # ------------------------------------------------------------------ one epoch
    def _pass(self, epoch: int) -> Iterator[Fetched]:
        """The batches of an epoch, from where the position says."""
        goes_on = self.position if self.position["epoch"] == epoch else START
        number = int(goes_on["batch"])
        if self.epochs is not None:
            for set_epoch in self._epoch_setters:
                set_epoch(epoch)
        if "state" in goes_on:
            self.batches.load_state_dict(decode(goes_on["state"]))
            skipped = 0
        else:
            skipped = number
            _set_generator(self._generator, goes_on)
        self._set_samplers(goes_on)
        started = self._started_from()
        to_restore = "state" in goes_on  # torchdata's resumed epoch leaves the loader's generator where it was not
        for batch in self.batches:
            if to_restore:
                to_restore = _set_generator(self._generator, goes_on)
            if skipped:
                skipped -= 1
                continue
            number += 1
            if self._to_pass_over:
                self._to_pass_over -= 1
                continue
            yield Fetched(batch, self._copy(batch), self._after(epoch, number, started))
        if to_restore:
            _set_generator(self._generator, goes_on)

    def _after(self, epoch: int, number: int, started: Position) -> Position:
        """The position after a batch of an epoch, which was `started` with these generators."""
        position = {"epoch": epoch, "batch": number, **started}
        if self._has_state and self._keeps:
            return {**position, "state": encode(self.batches.state_dict()), **self._drawn_from()}
        return position

    @property
    def _begins_as_it_did(self) -> bool:
        """Whether only what was taken from it says where an iterable stands: it begins again in the first epoch."""
        known = self._has_state or self._epoch_setters or self._generator is not None
        return not known and not isinstance(self.batches, Sequence)

    @property
    def _generator(self) -> torch.Generator | None:
        """What a DataLoader draws the order of its batches from."""
        if not isinstance(self.batches, DataLoader):
            return None
        return self.batches.generator or (None if self._has_state else torch.default_generator)

    @property
    def _sampler_generators(self) -> list[torch.Generator]:
        """What its samplers draw from, unless it is what the loader does, or is in its own state."""
        return [generator for generator in _sampler_generators(self.batches) if generator is not self._generator]

    def _started_from(self) -> Position:
        """The states of all generators before an epoch, by which it would begin again in the same order. A loader that
        has a state passes over the first batches by its sampler."""
        drawn = {} if self._has_state else self._drawn_from()
        samplers = self._sampler_generators if self._keeps else []
        return {**drawn, **({"samplers": [encode(g.get_state()) for g in samplers]} if samplers else {})}

    def _set_samplers(self, position: Position) -> None:
        states, generators = position.get("samplers", []), self._sampler_generators
        if len(states) not in (0, len(generators)):
            message = f"the checkpoint has the states of {len(states)} samplers' generators, these draw from "
            hint = "give the loader that it was saved with, or resume=False"
            raise error("SC557", f"{message}{len(generators)}", hint=hint)
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(decode(state))

    def _drawn_from(self) -> Position:
        """The present state of that, where it says the order of an epoch."""
        generator = None if self._epoch_setters and not self._has_state else self._generator
        return {"generator": encode(generator.get_state())} if generator is not None and self._keeps else {}


def kept(position: Position, positions: Sequence[Position] | None = None) -> dict[str, Any]:
    """What a checkpoint holds: where the loader stands, or those of all parts of a batch, in their order."""
    return {"positions": list(positions or [position])}


def resumed(data: object, part: int, parts: int, batches: Any) -> Position:
    """Where this rank's loader goes on, which brings one of so many parts of each batch.

    Raises ShardcError (SC557) where the checkpoint's loaders brought other parts, and it is not known which batches
    those would be now: a sampler that has set_epoch deals the same rows to any number of ranks.
    """
    try:
        positions = _Kept.model_validate(data).positions
    except ValidationError as wrong:
        message = f"where the loader stood is not in the checkpoint: {wrong.errors(include_url=False)[0]['msg']}"
        raise error("SC557", message, hint="go on with resume=False, or from another checkpoint") from None
    if len(positions) == parts:
        return positions[part].model_dump(exclude_none=True)
    first = positions[0]
    drawn = first.generator is not None or first.samplers is not None
    if first.state is not None or drawn or not _epoch_setters(batches):
        saved = f"{len(positions)} part{'s' * (len(positions) > 1)} of a batch"
        message = f"the checkpoint's loaders brought {saved}, these bring {parts}: where they would go on is not known"
        hint = "a plain DataLoader with a DistributedSampler can; or keep the number of data ranks, or resume=False"
        raise error("SC557", message, hint=hint)
    return {"epoch": first.epoch, "batch": first.batch}


class _Position(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    epoch: int = Field(ge=0, lt=1 << 53)
    batch: int = Field(ge=0, lt=1 << 53)
    state: Any = None
    generator: Any = None
    samplers: list[Any] | None = None


class _Kept(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    positions: list[_Position] = Field(min_length=1)


def _set_generator(generator: torch.Generator | None, position: Position) -> bool:
    """Put back the state of a generator; False, for what remains to do."""
    if generator is not None and "generator" in position:
        generator.set_state(decode(position["generator"]))
    return False


def _sampler_generators(loader: object) -> list[torch.Generator]:
    """What the samplers of a DataLoader draw from, but for those that have a state, or are set by the epoch."""
    if not isinstance(loader, DataLoader):
        return []
    of: Any = loader
    batch_sampler = getattr(of, "batch_sampler", None)
    holders = [getattr(of, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    drawing = [h for h in holders if hasattr(h, "generator") and not _sets_epoch(h) and not has_state(h)]
    generators = {id(g): g for h in drawing for g in [getattr(h, "generator", None) or torch.default_generator]}
    return list(generators.values())


@contextmanager
def draws_taken_back(loader: object) -> Generator[None]:
    """While batches are evaluated: the generators that they draw from may be those of the training's loader."""
    own = getattr(loader, "generator", None)
    generators = [*([own] if isinstance(own, torch.Generator) else []), *_sampler_generators(loader)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def has_state(loader: object) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _sets_epoch(sampler: object) -> bool:
    return callable(getattr(sampler, "set_epoch", None))


def _epoch_setters(batches: Any) -> list[Callable[[int], object]]:
    """The `set_epoch` of a loader, its samplers and its data set."""
    sampler = getattr(batches, "batch_sampler", None)
    holders = [batches, getattr(batches, "sampler", None), sampler, getattr(sampler, "sampler", None)]
    holders.append(getattr(batches, "dataset", None))
    by_id = {id(holder): getattr(holder, "set_epoch", None) for holder in holders}
    return [set_epoch for set_epoch in by_id.values() if callable(set_epoch)]
