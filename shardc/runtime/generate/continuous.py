"""Continuous batching: a row whose sequence has ended takes the next prompt, while the others go on.

    for finished in trainer.generate_stream(prompts, max_new_tokens=200, rows=8):
        print(finished.prompt, finished.tokens)

    rows free    prompts that wait are read by a prefill program, whose keys and values are written to their rows
    then         one token of each row by the decode program, until a sequence ends: it is given out, its row is free

A sequence is what the library generates for its prompt alone: settings, processors of scores and random numbers are
its own. Which row it has, and what the other rows do, changes nothing but the order in which sequences end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardc.frontend.cached_model import Form
from shardc.ir.default_device import on_cpu
from shardc.ir.diagnostic import error
from shardc.runtime.generate.programs import Programs, refuse_positions, series
from shardc.runtime.generate.prompts import padded
from shardc.runtime.generate.requests import Request
from shardc.runtime.generate.result import Finished
from shardc.runtime.generate.row_cache import RowCache
from shardc.runtime.generate.sampling import draw, not_a_number, uniforms
from shardc.runtime.generate.steps import Step, Tensors, Types, empty_cache, rows_like

Agree = Callable[[Sequence[Request], bool], None]  # that all ranks were given these prompts, and whether there are more


class Weights:
    """A trainer's tensors, which must stay as they are while sequences are generated: the cache was made by them."""

    def __init__(self, now: Callable[[], tuple[int, Tensors]]) -> None:
        self._now = now
        self._steps, tensors = now()
        self.tensors = dict(tensors)
        self._versions = self._counted()

    def refuse_changed(self) -> None:
        """Raise ShardcError (SC574) where the trainer has other weights by now."""
        steps, tensors = self._now()
        same = all(tensors.get(name) is tensor for name, tensor in self.tensors.items())
        if steps != self._steps or not same or self._counted() != self._versions:
            message = "the trainer's weights changed while sequences were being generated"
            cause = "their keys and values are those of the weights that generate_stream began with"
            hint = "take all sequences before the next step, and call generate_stream again after it"
            raise error("SC574", message, cause=cause, hint=hint)

    def _counted(self) -> list[int]:
        return [0 if tensor.is_inference() else tensor._version for tensor in self.tensors.values()]


class _Line:
    """A sequence that is being generated."""

    def __init__(self, request: Request) -> None:
        self.request, self.settings = request, request.settings
        self.tokens = torch.tensor([list(request.tokens)])
        self._processors: Any = None

    @property
    def last(self) -> int:
        return int(self.tokens[0, -1])

    def choose(self, scores: Tensor) -> Tensor:
        """The next token by its scores [1, vocabulary], on a rank that has them; -1 where they are NaN."""
        tokens, settings = self.tokens.to(scores.device), self.settings
        if self._processors is None:
            self._processors = settings.processors(tokens, torch.ones_like(tokens))
        scores = self._processors(tokens, scores)
        if settings.samples:
            number, position = torch.tensor([self.request.number]), torch.tensor([tokens.shape[1]])
            chosen = draw(scores, uniforms(settings.seed, number, position))
        else:
            chosen = scores.argmax(-1)
        return torch.where(scores.isnan().any(-1), -1, chosen)

    def take(self, token: int) -> Finished | None:
        """Go on with a token; the sequence, if it ends it."""
        start = len(self.request.tokens)
        count = self.tokens.shape[1] - start + 1
        if token < 0:
            raise not_a_number(self.request.prompt, count - 1)
        last = torch.tensor([token])
        self.tokens = torch.cat([self.tokens, last[:, None]], 1)
        if count < self.settings.new_tokens and not bool(self.settings.ended(last, self.tokens)):
            return None
        new: list[int] = self.tokens[0, start:].tolist()
        tokenizer = self.settings.tokenizer
        text = None if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True)
        return Finished(self.request.prompt, new, self.tokens[0], text, self.request.copy)


class Continuous:
    """The rows of one call, and the prompts that wait for them. `form` is that of the decode program: of no length
    where the first prompts say it."""

    def __init__(
        self,
        programs: Programs,
        known: Types,
        weights: Weights,
        form: Form,
        fill: int,
        agree: Agree | None,
    ) -> None:
        self._programs, self._known, self._weights = programs, known, weights
        self._form, self._fill, self._agree = form, fill, agree
        self._cache: RowCache | None = None
        self._lines: list[_Line | None] = [None] * form.rows
        self._waiting: deque[Request] = deque()
        self._read: dict[Step, dict[str, Tensor]] = {}  # what a program reads of the trainer's tensors
        self._steps = 0

    def run(self, requests: Iterator[Request]) -> Iterator[Finished]:
        """Each sequence when it ends. The next prompt is asked for when a row is free."""
        more = True
        while True:
            asked, before = more, len(self._waiting)
            while more and len(self._waiting) < self._lines.count(None):
                request = next(requests, None)
                if request is None:
                    more = False
                else:
                    self._waiting.append(request)
            if self._agree is not None and asked and (not more or len(self._waiting) > before):
                self._agree([*self._waiting][before:], more)
            if not self._waiting and not any(self._lines):
                return
            yield from self._advance()

    @on_cpu
    def _advance(self) -> list[Finished]:
        """Let some prompts join, or make one step of all rows; the sequences that end with it."""
        self._weights.refuse_changed()
        with torch.no_grad():
            return self._join() if self._waiting else self._decode()

    # ------------------------------------------------------------------ the programs
    @on_cpu
    def prepare(self, requests: Sequence[Request]) -> RowCache:
        """Let the cache hold these. Raises ShardcError (SC573) for positions that the model does not have."""
        needed = max(request.needed for request in requests)
        form, cache = self._form, self._cache
        if form.length < needed:
            form = replace(form, length=max(2 * form.length, series(needed + needed // 8)))
        if any(request.settings.changes_scores for request in requests):
            form = replace(form, chosen="logits")
        if cache is None or form != self._form:
            programs = self._programs.by_row(form)
            cache = RowCache(programs) if cache is None else cache.grown(programs)
            self._form, self._cache = form, cache
            self._lines += [None] * (programs.form.rows - len(self._lines))
        for request in requests:
            refuse_positions(cache.programs, len(request.tokens) + request.settings.new_tokens - 2, request.prompt)
        return cache

    def _state(self, step: Step) -> dict[str, Tensor]:
        if step not in self._read:
            self._read[step] = step.state(self._programs.engine, self._known, self._weights.tensors)
        return self._read[step]

    # ------------------------------------------------------------------ prompts and tokens
    def _join(self) -> list[Finished]:
        """As many of the prompts that wait as one prefill reads."""
        cache = self.prepare(self._waiting)
        programs = cache.programs
        free: dict[int, list[int]] = {}
        for row, line in enumerate(self._lines):
            if line is None:
                free.setdefault(programs.joins_at(row), []).append(row)
        places = sorted(free, key=lambda place: -len(free[place]))
        joining = {place: self._waiting.popleft() for place in places[: len(self._waiting)]}

        prefill = programs.prefill(max(len(request.tokens) for request in joining.values()))
        prompts = [[*joining[place].tokens] if place in joining else [self._fill] for place in range(programs.joining)]
        tokens, mask = padded(prompts, prefill.inputs["tokens"][1].shape[1], self._fill, left=True)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"tokens": tokens, "length": torch.tensor(0), "mask": mask, "positions": positions}
        lines = {place: _Line(request) for place, request in joining.items()}
        filled = empty_cache(prefill)
        chosen = self._run(prefill, filled, inputs, [lines.get(place) for place in range(programs.joining)])

        ended, joined = list[Finished](), dict[int, int]()
        for place, line in lines.items():
            finished, row = line.take(chosen[place]), free[place][0]
            if finished is not None:
                ended.append(finished)
            else:
                self._lines[row], joined[row] = line, len(line.request.tokens)
        if joined:
            cache.join(prefill, filled, joined)
        return ended

    def _decode(self) -> list[Finished]:
        """One token of every row."""
        cache = self._cache
        assert cache is not None, "a row has joined"
        cache.make_room()
        tokens = torch.tensor([self._fill if line is None else line.last for line in self._lines])
        inputs = cache.inputs() | {"tokens": tokens[:, None]}
        chosen = self._run(cache.programs.decode, cache.tensors, inputs, self._lines)
        cache.written()
        ended = list[Finished]()
        for row, line in enumerate(self._lines):
            if line is not None and (finished := line.take(chosen[row])) is not None:
                ended.append(finished)
                self._lines[row] = None
                cache.free(row)
        return ended

    def _run(
        self, step: Step, cache: dict[str, Tensor], inputs: Tensors, lines: Sequence[_Line | None]
    ) -> Sequence[int]:
        """Run a program; the next token of each of its rows, on every rank."""
        port, held = step.run(self._state(step), cache, inputs, self._steps)
        self._steps += 1
        if self._form.chosen == "token":
            return step.engine.output(port, held).tolist()
        numbers, chosen = torch.arange(1, len(lines) + 1), None
        if held is not None:  # other stages do not have it
            type, shards = rows_like(step.outputs[port], numbers), step.engine.shards
            rows: list[Tensor] = []
            for place, number in enumerate(shards.hold(numbers, type).tolist()):  # 0 is padding
                line = lines[number - 1] if number else None
                scores = held[place : place + 1]
                rows.append(scores.new_zeros(1, dtype=torch.int64) if line is None else line.choose(scores))
            chosen = shards.whole(torch.cat(rows), type)
        return step.engine.derived(port, chosen, numbers).tolist()
