"""The rows of one batch, generated together: prompts into the cache, then a token of every row, until all have ended.

Ranks tell each other the tokens that were chosen, eight bytes a row; where a greedy search does nothing to the scores
the program itself chooses, else a rank chooses for the rows that it holds, by all of their logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.frontend.cached_model import CausalModel, Form
from shardc.ir.diagnostic import error
from shardc.ir.types import TensorType
from shardc.runtime.generate.programs import Pair, refuse_positions, series
from shardc.runtime.generate.prompts import Rows, padded
from shardc.runtime.generate.result import Generated
from shardc.runtime.generate.sampling import draw, not_a_number, uniforms
from shardc.runtime.generate.settings import Settings
from shardc.runtime.generate.steps import StepEngine, Tensors, Types, rows_like


class Search:
    """The rows of one call, and how far they are."""

    def __init__(self, causal: CausalModel, settings: Settings, rows: Rows, read: Tensor, mask: Tensor) -> None:
        self.causal, self.settings, self.rows = causal, settings, rows
        self.lengths = torch.tensor([len(row) for row in rows])
        # What the library would be given, and what it makes of its scores reads.
        self.read, self.read_mask = read, mask
        self.sequences = settings.first(len(rows)) if causal.encoder_decoder else read
        self.fill = padding_token(causal, settings)

    def form(self) -> Form:
        """What the programs are compiled for. Raises ShardcError (SC573) for prompts that the cache cannot hold."""
        settings, causal, width = self.settings, self.causal, self.read.shape[1]
        mask = self.read_mask
        chosen = "logits" if settings.samples or len(settings.processors(self.read, mask)) else "token"
        longest = int(self.lengths.max())
        if causal.encoder_decoder:
            prompt, source = 1, self._source(longest)
        else:
            # Without positions of its own a row has those of its columns: as many as it is given.
            prompt, source = (series(longest) if causal.takes_positions and causal.takes_mask else width), 0
        length = series(prompt + settings.new_tokens - 1)
        if (limit := settings.config.max_cache_len) is not None:
            refuse_long(1 if causal.encoder_decoder else longest, settings)
            prompt = min(prompt, limit - settings.new_tokens + 1)
            length = limit
        return Form(len(self.rows), prompt, length, source, chosen)

    def _source(self, longest: int) -> int:
        """The length of the encoder's inputs: no more than it has positions for."""
        read, written = self.causal.positions("encoder"), self.causal.positions("decoder")
        if read is not None and longest > read:
            message = f"the longest prompt has {longest} tokens, and the encoder {read} positions"
            raise error("SC573", message, hint="pass shorter prompts")
        if written is not None and self.settings.new_tokens > written:
            message = f"{self.settings.new_tokens} tokens are to follow, and the decoder has {written} positions"
            raise error("SC573", message, hint="pass fewer max_new_tokens")
        return series(longest) if read is None else min(series(longest), read)

    def check(self, ready: Pair) -> None:
        """Raise ShardcError (SC573) where the last tokens have positions that the model has no embedding for."""
        if self.causal.encoder_decoder:
            return
        refuse_positions(ready, int(self.lengths.max()) + self.settings.new_tokens - 2)

    # ------------------------------------------------------------------ the loop
    def run(self, ready: Pair, engine: StepEngine, known: Types, state: Tensors) -> Generated:
        settings, cache = self.settings, ready.cache()
        tensors = ready.prefill.state(engine, known, state)
        given, form = self._first_inputs(ready), self.form()
        done = torch.zeros(len(self.rows), dtype=torch.bool)
        ended_at = torch.full((len(self.rows),), settings.new_tokens)
        step, processors = ready.prefill, None
        for number in range(settings.new_tokens):
            port, held = step.run(tensors, cache, given, number)
            if form.chosen == "token":
                tokens = step.engine.output(port, held).cpu()
            else:
                chosen = None
                if held is not None:  # other stages do not have it
                    type = step.outputs[port]
                    processors = self._processors(step.engine, type) if processors is None else processors
                    chosen = self._choose(step.engine, held, type, processors, number)
                tokens = step.engine.derived(port, chosen, self.lengths).cpu()
            if bool((tokens[~done] < 0).any()):
                raise not_a_number(int((~done & (tokens < 0)).nonzero()[0]), number)
            if settings.pad is not None and settings.eos is not None:
                tokens = torch.where(done, settings.pad, tokens)
            self.sequences = torch.cat([self.sequences, tokens[:, None]], 1)
            ends = settings.ended(tokens, self.sequences) & ~done
            ended_at = torch.where(ends, number + 1, ended_at)
            done |= ends
            if bool(done.all()) or number + 1 == settings.new_tokens:
                break
            if step is ready.prefill:
                step, tensors = ready.decode, ready.decode.state(engine, known, state)
                given = {name: value for name, value in given.items() if name not in ("tokens", "source_tokens")}
            given |= {"tokens": tokens[:, None], "length": torch.tensor(form.prompt + number)}
            if "positions" in given:
                given["positions"] = (self.lengths + number)[:, None]
        return self._result(ended_at)

    def _first_inputs(self, ready: Pair) -> dict[str, Tensor]:
        form, start = self.form(), torch.tensor(0)
        if self.causal.encoder_decoder:
            source, mask = padded(self.rows, form.source, self.fill, left=False)
            return {"tokens": self.sequences, "length": start, "source_tokens": source, "source_mask": mask}
        tokens, mask = padded(self.rows, form.prompt, self.fill, left=True)
        later = torch.ones(len(self.rows), form.length - form.prompt, dtype=torch.int64)
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        return {"tokens": tokens, "length": start, "mask": torch.cat([mask, later], 1), "positions": positions}

    # ------------------------------------------------------------------ tokens by logits
    def _processors(self, engine: StepEngine, type: TensorType) -> Any:
        read, mask = (engine.shards.hold(t, rows_like(type, t)) for t in (self.read, self.read_mask))
        return self.settings.processors(read, mask)

    def _choose(self, engine: StepEngine, logits: Tensor, type: TensorType, processors: Any, number: int) -> Tensor:
        """The next token of every row: each rank chooses for the rows that it holds."""
        shards = engine.shards
        scores = processors(shards.hold(self.sequences, rows_like(type, self.sequences)), logits)
        if self.settings.samples:
            rows = torch.arange(len(self.rows))
            behind = torch.ones_like(rows) if self.causal.encoder_decoder else self.lengths
            numbers = uniforms(self.settings.seed, rows, behind + number)
            chosen = draw(scores, shards.hold(numbers, rows_like(type, numbers)))
        else:
            chosen = scores.argmax(-1)
        chosen = torch.where(scores.isnan().any(-1), -1, chosen)
        return shards.whole(chosen, rows_like(type, self.lengths))

    def _result(self, ended_at: Tensor) -> Generated:
        start = self.settings.width
        new = self.sequences[:, start:]
        tokens = [row[:end].tolist() for row, end in zip(new, ended_at.tolist(), strict=True)]
        text = None
        if self.settings.tokenizer is not None:
            text = [self.settings.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        return Generated(self.sequences, tokens, text)


def padding_token(causal: CausalModel, settings: Settings) -> int:
    """What padding is: any token, since nothing reads it."""
    fill = 0 if settings.pad is None else settings.pad
    return fill if 0 <= fill < causal.vocabulary else 0


def refuse_long(longest: int, settings: Settings) -> None:
    """Raise ShardcError (SC573) where so many tokens, and those that follow, do not fit into the cache."""
    limit, needed = settings.config.max_cache_len, longest + settings.new_tokens - 1
    if limit is not None and needed > limit:
        message = f"{needed} tokens do not fit into a cache of max_cache_len={limit}"
        cause = f"the longest prompt has {longest} tokens, and {settings.new_tokens} are to follow it"
        hint = "pass a larger max_cache_len, shorter prompts, or fewer max_new_tokens"
        raise error("SC573", message, cause=cause, hint=hint)
