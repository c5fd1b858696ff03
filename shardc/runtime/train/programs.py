"""Programs of one model for batches of several forms, all of them over the tensors that a trainer holds.

    launched for   batch [8, 128]     the first program: its placements of parameters, buffers and state are all others'
    then came      batch [3, 128]     compiled when first seen, kept among those used last

A program is compiled by every rank for itself, so all ranks must be given the same form. Where they are not, one of
them would wait for the others in a step that they do not make: it is found out before, and said with the ranks' names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.program import CONSTANT, PlanRecord
from shardc.ir.types import TensorType
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.batch import describe_sample, leaves_of
from shardc.runtime.execute.data_parts import data_parts_of
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.train.engine import Engine
from shardc.runtime.train.feeding import Feeding
from shardc.runtime.train.rank_part import RankPart
from shardc.runtime.train.result import Tensors


class Compiled(Protocol):
    """What of a program is run beside a trainer's own."""

    @property
    def staged(self) -> StagedProgram: ...
    @property
    def reference(self) -> Graph: ...
    @property
    def constants(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def plan(self) -> PlanRecord: ...
    @property
    def resizes(self) -> bool: ...
    def refuse_changed_model(self) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A program, and what runs it. `constants` are its own; all else it takes is the trainer's."""

    program: Compiled
    engine: Engine
    feeding: Feeding
    constants: Tensors

    @property
    def by_row(self) -> Collection[str]:
        return self.program.plan.get("by_row", ())


def prepare(
    program: Compiled, engine: Engine, held: Collection[str], *, evaluates: bool, own: RankPart | None = None
) -> Prepared:
    """A program over the ranks of a trainer's engine, which holds the tensors `held`, and whose rank brings its `own`
    part of a batch, if not all of it; all ranks must call it.

    Raises ShardcError (SC226) where the rows would not lie over the ranks as in training.
    """
    body = program.staged.body
    beside = engine.beside(program.staged, evaluates)
    part, check = _same_part(own, beside, program), IndexCheck(program.reference)
    feeding = Feeding(body, program.plan.get("batch"), check, program.plan.get("split", ()), own=part)
    types = {port.name: type for port, type in typed(body)}
    # What the trainer holds of the model is as it is now; a program's own tensors are those of that program.
    tensors = {n: t for n, t in program.constants.items() if n in types and (n.startswith(CONSTANT) or n not in held)}
    constants = {name: beside.shards.hold(t, types[name]) for name, t in tensors.items()}
    return Prepared(program, beside, feeding, constants)


def _same_part(training: RankPart | None, engine: Engine, program: Compiled) -> RankPart | None:
    """The part of a batch that this rank brings, if not all of it: the same as in training."""
    if training is None:
        return None
    parts = data_parts_of(program.plan, program.staged.body)
    own = None if parts is None else engine.brings(parts)
    if own is None or own.coordinates != training.coordinates:
        message = "the rows of this batch would lie over the ranks in another way than those of the sample batch"
        hint = f"give batches with a multiple of {training.parts.count} rows, placed as the sample batch is"
        raise error("SC226", message, hint=hint)
    return own


def typed(body: Graph) -> list[tuple[Port, TensorType]]:
    return [(port, type_of(node)) for port, node in zip(body.inputs, body.placeholders, strict=True)]


def form_of(batch: Any) -> Hashable:
    """What of a batch a program is compiled for: its leaves, their shapes and dtypes, its Python values."""
    leaves = leaves_of(batch)
    described = describe_sample(batch, [path for path, _ in leaves])
    tensors = [(tuple(leaf.shape), leaf.dtype) for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return described["by_name"], tuple(map(tuple, described["leaves"])), tuple(tensors)


def refuse_empty(batch: Any) -> None:
    """Raise ShardcError (SC501) for a batch without rows."""
    leaves = ((path, leaf) for path, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))
    tensors = [(path, leaf) for path, leaf in leaves if not leaf.is_nested and leaf.dim()]
    if tensors and not tensors[0][1].shape[0]:
        path, first = tensors[0]
        message = f"the batch has no rows: '{path}' has shape {list(first.shape)}"
        raise error("SC501", message, tensor=path, hint="leave empty batches out, as drop_last=True does")


def form_text(batch: Any) -> str:
    """The shapes of a batch, to be read: `input_ids [3, 128], labels [3, 128]`."""
    return shapes_text({path: tuple(t.shape) for path, t in leaves_of(batch) if isinstance(t, torch.Tensor)})


def shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}".strip() for name, shape in shapes.items())


T = TypeVar("T")
SHOWN = 3  # forms, in a warning


class Programs(Generic[T]):
    """Those used last, `most` of each group, by the form of their batch. `what` says of what kind they are. `pinned` is
    the form, as text, of one more that is kept elsewhere: the trainer's own."""

    def __init__(
        self, engine: Engine, most: int, what: str, release: Callable[[T], None], pinned: str | None = None
    ) -> None:
        self._engine, self._most, self._what, self._release = engine, most, what, release
        self._pinned = pinned
        self._ready: dict[tuple[Hashable, Hashable], T] = {}
        self._texts: dict[tuple[Hashable, Hashable], str] = {}
        self._said: set[Hashable] = set()

    def forms(self) -> list[Any]:
        """Those of the programs, the least recently used first."""
        return [form for _, form in self._ready]

    def agree(self, batch: Any, key: Hashable | None, when: str, due: bool) -> None:
        """Raise ShardcError (SC542) where ranks were given batches of several forms. With one program they are compared
        when that is `due`, or when a batch comes that it is not for; with several, each time."""
        if due or len(self._ready) + (self._pinned is not None) > 1:
            self._engine.agree(form_text(batch), when)
        elif key is not None and key not in self._ready:
            self._engine.agree(form_text(batch), when, alone=True)

    def of(
        self,
        group: Hashable,
        form: Hashable,
        make: Callable[[], T],
        text: Callable[[T], str],
        resizes: Callable[[T], bool] = lambda _: False,
    ) -> T:
        """The program of a batch's form, which is made when it is first asked for; its inputs' shapes as `text`. No
        warning is given of one that `resizes`: the next form is not compiled."""
        key = (group, form)
        if key not in self._ready:
            ready = make()
            alike = [known for known in self._ready if known[0] == group]
            self._texts[key] = text(ready)
            said = not resizes(ready)
            if said and (alike or self._pinned is not None) and group not in self._said:
                self._say_another(key, alike)
            if len(alike) == self._most:
                self._release(self._ready.pop(alike[0]))
                del self._texts[alike[0]]
                if said:
                    much = f"batches have more than {self._most} forms"
                    self._say(group, f"{much}: what is used least recently is compiled again")
            self._ready[key] = ready
        ready = self._ready[key] = self._ready.pop(key)  # the last of those in use
        return ready

    def _say_another(self, key: tuple[Hashable, Hashable], alike: Collection[tuple[Hashable, Hashable]]) -> None:
        """Once a form, until there are more than are kept."""
        texts = [*([] if self._pinned is None else [self._pinned]), *(self._texts[known] for known in alike)]
        earlier = "; ".join(texts[-SHOWN:]) + (f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")
        another = f"here is {self._texts[key]} after {earlier}"
        self._say(key, f"{self._what}: {another}; the {self._most} used last are kept")

    def _say(self, about: Hashable, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warn(message)
