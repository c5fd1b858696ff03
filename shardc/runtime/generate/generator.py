"""Generation for a trainer: prompts in, tokens out, all rows together or each row for itself.

    trainer.generate([[5, 6, 7], [8]], max_new_tokens=20)             `search.py`: one batch, from its first to its last
    trainer.generate(prompts, max_new_tokens=200, rows=8)             `continuous.py`: a row that has ended takes the
    trainer.generate_stream(prompts, max_new_tokens=200, rows=8)      next prompt

    prefill      tokens [rows, prompt], length 0        one program for prompts up to a length
    decode       tokens [rows, 1], length counts        one program for every step

The cache stays where it is computed: each rank holds its rows and heads of it, and a decode step writes one token into
it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc.frontend.cached_model import CausalModel, Form
from shardc.ir.default_device import on_cpu
from shardc.ir.diagnostic import error
from shardc.runtime.generate.continuous import Agree, Continuous, Weights
from shardc.runtime.generate.programs import Programs
from shardc.runtime.generate.prompts import Rows, as_given, one_prompt, opened, padded, prompt_rows
from shardc.runtime.generate.requests import Limits, Request, Settle, arriving, given, per_prompt
from shardc.runtime.generate.result import Finished, Generated
from shardc.runtime.generate.search import Search, padding_token, refuse_long
from shardc.runtime.generate.settings import Settings, digest
from shardc.runtime.generate.steps import Compile, StepEngine, Tensors, Types

Compare = Callable[[Mapping[str, Tensor], str], None]
Now = Callable[[], tuple[int, Tensors]]  # a trainer's steps, and its tensors


@dataclass(frozen=True)
class Choosing:
    """How tokens are chosen, as a caller says it. `options` are fields of the library's generation config."""

    options: Mapping[str, Any]
    seed: int
    tokenizer: Any = None
    generation_config: Any = None

    def settings(self, model: nn.Module, width: int, limit: Any) -> Settings:
        options = {**self.options} if limit is None else {**self.options, "max_new_tokens": limit}
        return Settings.of(model, options, self.generation_config, self.seed, self.tokenizer, width)


@dataclass(frozen=True)
class _Prompts:
    """Prompts that are all known: their tokens, and as a batch that the library would be given, with its mask."""

    rows: Rows
    batch: tuple[Tensor, Tensor]
    settings: Settings  # of the batch


class Generator:
    """The generation of a trainer, whose engine holds `inputs`."""

    def __init__(
        self,
        engine: StepEngine,
        compile: Compile | None,
        model: nn.Module | None,
        inputs: Types,
        now: Now,
        compare: Compare,
    ) -> None:
        self.engine, self._model, self._inputs, self._now, self._compare = engine, model, inputs, now, compare
        self.programs = None if compile is None else Programs(engine, compile, inputs)

    def generate(
        self, prompts: Any, attention_mask: Any, limits: Limits, choosing: Choosing, rows: int | None
    ) -> Generated:
        """New tokens for each prompt; every rank must call it, with the same prompts."""
        causal, programs = self._usable()
        if rows is not None:
            return self._by_row(causal, prompts, attention_mask, limits, choosing, rows)
        if per_prompt(limits):
            hint = "pass rows=, the number of sequences that are generated at a time; or one number for all"
            raise error("SC572", "max_new_tokens is given for each prompt, and all are generated together", hint=hint)
        known = self._known(causal, prompts, attention_mask, choosing, limits)
        settings = known.settings
        repeated = [row for row in known.rows for _ in range(settings.copies)]
        search = Search(causal, settings, repeated, *(t.repeat_interleave(settings.copies, 0) for t in known.batch))
        form = search.form()
        compared = {"prompts": search.read, "their mask": search.read_mask, "settings": settings.digest()}
        self._compare(compared, "before generation")
        pair = programs.pair(form)
        search.check(pair)
        with torch.no_grad():
            return search.run(pair, self.engine, self._inputs, self._now()[1])

    def stream(
        self, prompts: Any, attention_mask: Any, limits: Limits, choosing: Choosing, rows: int
    ) -> Iterator[Finished]:
        """Each sequence when it ends; every rank must take them, with the same prompts."""
        causal, _ = self._usable()
        _refuse_rows(causal, rows)
        if isinstance(prompts, Sequence | Mapping | Tensor) or not isinstance(prompts, Iterable):
            known = self._known(causal, prompts, attention_mask, choosing, limits)
            requests = self._requests(causal, known, limits, choosing)
            continuous = self._continuous(causal, known.settings, rows, None)
            continuous.prepare(requests)
            return continuous.run(iter(requests))
        if attention_mask is not None:
            message = "an attention_mask is given beside prompts that come one by one"
            raise error("SC573", message, hint="leave it out: each prompt has the length that it has")
        read = on_cpu(lambda item, number: one_prompt(item, number, choosing.tokenizer, causal.vocabulary))
        settings = choosing.settings(causal.model, 1, 1)  # refuses options that no prompt is generated with
        continuous = self._continuous(causal, settings, rows, self._agree)
        return continuous.run(arriving(prompts, limits, read, self._settle(causal, choosing)))

    # ------------------------------------------------------------------ what is given
    def _usable(self) -> tuple[CausalModel, Programs]:
        if self._model is None or self.programs is None:
            message = "the trainer has no model, so nothing can be generated"
            raise error("SC571", message, hint="launch a program that compile made of a model")
        return CausalModel.of(self._model), self.programs

    def _known(
        self, causal: CausalModel, prompts: Any, attention_mask: Any, choosing: Choosing, limits: Limits
    ) -> _Prompts:
        prompts, attention_mask = opened(prompts, attention_mask)
        tokenizer, vocabulary, left = choosing.tokenizer, causal.vocabulary, not causal.encoder_decoder
        rows = prompt_rows(prompts, attention_mask, tokenizer, vocabulary)
        width = int(prompts.shape[-1]) if isinstance(prompts, Tensor) else max(map(len, rows))
        limit: Any = 1 if per_prompt(limits) else limits
        settings = choosing.settings(causal.model, width if left else 1, limit)
        if attention_mask is None and isinstance(prompts, Tensor) and left:
            attention_mask = settings.inferred_mask(prompts)
            rows = prompt_rows(prompts, attention_mask, tokenizer, vocabulary)
        batch = padded(rows, width, padding_token(causal, settings), left=left)
        if attention_mask is not None:
            batch = as_given(prompts, attention_mask, vocabulary, left=left)
        return _Prompts(rows, batch, settings)

    # ------------------------------------------------------------------ rows that begin and end at different times
    def _settle(self, causal: CausalModel, choosing: Choosing) -> Settle:
        @on_cpu
        def settle(width: int, limit: Any) -> Settings:
            settings = choosing.settings(causal.model, width, limit)
            refuse_long(width, settings)
            return settings

        return settle

    def _requests(self, causal: CausalModel, known: _Prompts, limits: Limits, choosing: Choosing) -> list[Request]:
        requests = given(known.rows, limits, self._settle(causal, choosing))
        ends = torch.tensor([request.needed for request in requests])
        tokens, mask = known.batch
        compared = {"prompts": tokens, "their mask": mask, "settings": known.settings.digest(), "lengths": ends}
        self._compare(compared, "before generation")
        return requests

    def _continuous(self, causal: CausalModel, settings: Settings, rows: int, agree: Agree | None) -> Continuous:
        assert self.programs is not None
        form = Form(rows, 1, settings.config.max_cache_len or 0)
        fill = padding_token(causal, settings)
        return Continuous(self.programs, self._inputs, Weights(self._now), form, fill, agree)

    def _by_row(
        self, causal: CausalModel, prompts: Any, attention_mask: Any, limits: Limits, choosing: Choosing, rows: int
    ) -> Generated:
        """All sequences, as a batch of them is returned."""
        _refuse_rows(causal, rows)
        known = self._known(causal, prompts, attention_mask, choosing, limits)
        requests = self._requests(causal, known, limits, choosing)
        continuous = self._continuous(causal, known.settings, rows, None)
        continuous.prepare(requests)
        finished = sorted(continuous.run(iter(requests)), key=lambda one: (one.prompt, one.copy))
        settings, tokens = known.settings, [one.tokens for one in finished]
        pad = padding_token(causal, settings) if settings.pad is None else settings.pad
        new, _ = padded([[*row] for row in tokens], max(map(len, tokens)), pad, left=False)
        sequences = torch.cat([known.batch[0].repeat_interleave(settings.copies, 0), new], 1)
        text = None if choosing.tokenizer is None else [one.text or "" for one in finished]
        return Generated(sequences, tokens, text)

    def _agree(self, requests: Sequence[Request], more: bool) -> None:
        """Raise ShardcError (SC542) where ranks were not given the same prompts."""
        said = [(list(request.tokens), int(request.settings.digest())) for request in requests]
        self._compare({"prompts": digest((said, more))}, "while sequences are generated")


def _refuse_rows(causal: CausalModel, rows: object) -> None:
    """Raise ShardcError where rows cannot begin and end at different times."""
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        message = f"generate is given rows={rows!r}"
        raise error("SC572", message, hint="give the number of sequences that are generated at a time, from 1")
    name = type(causal.model).__name__
    if causal.encoder_decoder:
        message = f"the rows of {name} begin together, since its decoder counts positions for all of them"
        raise error("SC571", message, hint="trainer.generate(prompts) without rows= generates them as one batch")
    if not (causal.takes_positions and causal.takes_mask):
        message = f"the rows of {name} begin together, since its forward takes no position_ids and attention_mask"
        raise error("SC571", message, hint="trainer.generate(prompts) without rows= generates them as one batch")
