"""The programs of generation by their forms, compiled when first asked for; those used last are kept.

    pair(form)      of a batch that is generated together: a prefill and a decode program of the same rows
    by_row(form)    of rows that begin and end at different times: one decode program, and prefills of a few rows

What joins the rows of a decode program is read by a prefill of as many rows as the ranks hold parts of them: under
dp=2 of two rows, one a data coordinate, so that keys and values are made where the cache is. Its length is the next
power of two, so that there are few of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from shardc.frontend.cached_model import Form
from shardc.ir.caller import warn
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import type_of
from shardc.ir.microbatch import CACHE
from shardc.ir.types import TensorType
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.generate.steps import Compile, Step, StepEngine, StepProgram, Types, empty_cache

PROGRAMS = 4  # of single forms, that are kept
COARSE = 64  # lengths are powers of two up to here, and multiples of it beyond
SHORTEST = 8  # tokens that a program reads at least
Kept = TypeVar("Kept", "Pair", "ByRow")
Placements = frozenset[tuple[str, tuple[tuple[str, ...], ...]]]


@dataclass(frozen=True)
class Pair:
    """The two programs of a batch, which share a cache."""

    prefill: Step
    decode: Step
    check: IndexCheck  # of the decode program's inputs

    def cache(self) -> dict[str, Tensor]:
        return empty_cache(self.prefill, self.decode)


class ByRow:
    """The programs of rows that begin and end at different times. `form` is that of the decode program."""

    def __init__(
        self, form: Form, decode: Step, check: IndexCheck, joining: int, prefill: Callable[[Form], Step]
    ) -> None:
        self.form, self.decode, self.check, self.joining = form, decode, check, joining
        self._prefill = prefill

    def prefill(self, longest: int) -> Step:
        """What reads prompts of up to so many tokens."""
        length = power_of_two(longest)
        return self._prefill(replace(self.form, rows=self.joining, prompt=length, length=length))

    def joins_at(self, row: int) -> int:
        """The row of a prefill whose keys and values are made where this row of the cache is."""
        return row * self.joining // self.form.rows


class Programs:
    """The programs that generate beside those of a trainer, whose engine holds `inputs`."""

    def __init__(self, engine: StepEngine, compile: Compile, inputs: Types) -> None:
        self.engine, self._compile, self._inputs = engine, compile, inputs
        self._pairs: dict[Form, Pair] = {}
        self._by_row: dict[Form, ByRow] = {}
        self._prefills: dict[tuple[Form, Placements], Step] = {}  # what joins the rows of one cache, or of a longer one
        self._said: set[str] = set()

    def pair(self, form: Form) -> Pair:
        pair = self._kept(self._pairs, form, self._new_pair)
        for step in (pair.prefill, pair.decode):
            step.program.refuse_changed_model()
        return pair

    def by_row(self, form: Form) -> ByRow:
        """Of as many rows as the form has; of a few more where parts of them would not be equal."""
        programs = self._kept(self._by_row, form, self._new_by_row)
        programs.decode.program.refuse_changed_model()
        return programs

    def _kept(self, table: dict[Form, Kept], form: Form, make: Callable[[Form], Kept]) -> Kept:
        if form not in table:
            new = make(form)
            if table:
                message = "generation is compiled for each form (rows, lengths, whether scores are changed)"
                self._say(f"{message}; here is another, and the {PROGRAMS} used last are kept")
            if len(table) == PROGRAMS:
                del table[next(iter(table))]
                self._say(f"prompts have more than {PROGRAMS} forms: what is used least recently is compiled again")
            table[form] = new
        ready = table[form] = table.pop(form)  # the last of those in use
        return ready

    def _new_pair(self, form: Form) -> Pair:
        decode = self._compile(form)
        steps = [Step(program, self.engine, self._inputs) for program in (self._compile(form, decode), decode)]
        return Pair(steps[0], steps[1], IndexCheck(decode.reference))

    def _new_by_row(self, form: Form) -> ByRow:
        decode = self._compile(form)
        parts = _parts(decode)
        if form.rows % parts:  # a row of padding may as well be one of the cache
            form = replace(form, rows=-(-form.rows // parts) * parts)
            decode = self._compile(form)

        placements = frozenset((name, type.placement) for name, type in _cache(decode))

        def prefill(joining: Form) -> Step:
            key = (joining, placements)
            if key not in self._prefills:
                if self._prefills:
                    self._say("prompts that join are read by a program for each power of two of tokens")
                self._prefills[key] = Step(self._compile(joining, decode), self.engine, self._inputs)
            self._prefills[key].program.refuse_changed_model()
            return self._prefills[key]

        step = Step(decode, self.engine, self._inputs)
        return ByRow(form, step, IndexCheck(decode.reference), parts, prefill)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message)


def _parts(decode: StepProgram) -> int:
    """In how many equal parts the ranks hold the rows of a decode program's cache."""
    types = [type for _, type in _cache(decode)]
    rows, *others = {type.dims[0] for type in types}
    assert not others, f"tensors of a cache whose rows lie otherwise: {types}"
    assert not any(atom.axes for type in types for atom in type.dims[2]), f"a cache that is cut into tokens: {types}"
    return math.prod(decode.staged.body.mesh.size(atom.axes) for atom in rows)


def _cache(decode: StepProgram) -> list[tuple[str, TensorType]]:
    body = decode.staged.body
    pairs = zip(body.inputs, body.placeholders, strict=True)
    return [(port.name, type_of(node)) for port, node in pairs if port.name.startswith(CACHE)]


def refuse_positions(programs: Pair | ByRow, last: int, prompt: int | None = None) -> None:
    """Raise ShardcError (SC573) where a token that is read has a position that the model has no embedding for."""
    inputs = programs.decode.inputs
    types = {name: type for name, (port, type) in inputs.items() if port.role == "input"}
    if "positions" not in types:
        return
    feed = {name: torch.zeros(type.shape, dtype=type.dtype) for name, type in types.items()}
    try:
        programs.check({**feed, "positions": torch.full_like(feed["positions"], max(last, 0))})
    except ShardcError as outside:
        whose = "" if prompt is None else f" of prompt {prompt}"
        message = f"the model has no position {last}, which the last token that is read{whose} would have"
        cause = outside.diagnostics[0].message
        raise error("SC573", message, cause=cause, hint="pass fewer max_new_tokens, or shorter prompts") from None


def series(length: int) -> int:
    """The length of the cache, or of prompts, that is compiled for so many tokens."""
    return power_of_two(length) if length <= COARSE else -(-length // COARSE) * COARSE


def power_of_two(length: int) -> int:
    return max(SHORTEST, 1 << (length - 1).bit_length())
