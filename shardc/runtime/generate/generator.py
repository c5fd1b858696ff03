"""The loop of generation: prompts into the cache, then a token of every row at a time, until all rows have ended.

    trainer.generate([[5, 6, 7], [8]], max_new_tokens=20)

    prefill      tokens [rows, prompt], length 0        one program for prompts up to a length
    decode       tokens [rows, 1], length counts        one program for every step

The cache stays where it is computed: each rank holds its rows and heads of it, and a decode step writes one token into
it in place. Ranks tell each other the tokens that were chosen, eight bytes a row; where a greedy search does nothing to
the scores the program itself chooses, else a rank chooses for the rows that it holds, by all of their logits.

Prompts are padded to the next length of a series, so that a few pairs of programs serve all; those used last are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardc.frontend.cached_model import CausalModel, Form
from shardc.ir.caller import warn
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.microbatch import CACHE
from shardc.ir.ops.streams import step_key
from shardc.ir.program import CONSTANT
from shardc.ir.types import TensorType
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.generate.prompts import Rows, as_given, opened, padded, prompt_rows
from shardc.runtime.generate.result import Generated
from shardc.runtime.generate.sampling import draw, uniforms
from shardc.runtime.generate.settings import Settings

PROGRAMS = 4  # pairs, of single forms, that are kept
COARSE = 64  # lengths are powers of two up to here, and multiples of it beyond
Tensors = Mapping[str, Tensor]
Compare = Callable[[Mapping[str, Tensor], str], None]


class StepProgram(Protocol):
    """What of a compiled step is run."""

    @property
    def staged(self) -> StagedProgram: ...
    @property
    def reference(self) -> Graph: ...
    @property
    def constants(self) -> Mapping[str, Tensor]: ...
    def refuse_changed_model(self) -> None: ...


Compile = Callable[[Form], tuple[StepProgram, StepProgram]]
Types = Mapping[str, tuple[Port, TensorType]]


class StepEngine(Protocol):
    """What runs a trainer's steps, as `runtime.train.engine` has it."""

    homes: Any

    @property
    def shards(self) -> Any: ...
    def holds(self, name: str) -> bool: ...
    def fetch(self, name: str, tensor: Tensor | None, type: TensorType) -> Tensor: ...
    def run(self, state: Mapping[str, Tensor], fed: Any, step: int) -> dict[Port, Tensor]: ...
    def output(self, port: Port, tensor: Tensor | None) -> Tensor: ...
    def derived(self, port: Port, whole: Tensor | None, like: Tensor) -> Tensor: ...
    def beside(self, program: StagedProgram, evaluates: bool) -> StepEngine: ...


class _Step:
    """One of the two programs, and what runs it."""

    def __init__(self, program: StepProgram, engine: StepEngine, known: Types, homes: Mapping[str, Any]) -> None:
        self.program, self.engine = program, engine.beside(program.staged, True)
        body = program.staged.body
        pairs = list(zip(body.inputs, body.placeholders, strict=True))
        self.inputs = {port.name: (port, type_of(node)) for port, node in pairs}
        self.outputs = {port: type_of(value) for port, value in zip(body.outputs, body.output_values, strict=True)}
        # What the trainer holds of the model is as it is now; a program's own tensors are those of that program.
        own = {n: t for n, t in program.constants.items() if n.startswith(CONSTANT) or n not in known}
        hold = self.engine.shards.hold
        self.constants = {name: hold(t, self.inputs[name][1]) for name, t in own.items() if name in self.inputs}
        kept = [name for name, (port, _) in self.inputs.items() if port.role in ("param", "buffer")]
        self.kept = [name for name in kept if name not in self.constants and not name.startswith(CACHE)]
        self.borrowed = [n for n in self.kept if not {*self.engine.homes.get(n, ())} <= {*homes.get(n, ())}]

    def state(self, engine: StepEngine, known: Types, state: Tensors) -> dict[str, Tensor]:
        """Parameters and buffers as the program takes them; of a pipeline, tensors that a rank's stages do not hold in
        training are fetched."""
        tensors = {name: state[name] for name in self.kept if name in state} | self.constants
        for name in self.borrowed:
            whole = engine.fetch(name, state.get(name), known[name][1])
            tensors[name] = self.engine.shards.hold(whole, known[name][1])
        return tensors

    def run(self, state: Tensors, cache: dict[str, Tensor], given: Tensors, step: int) -> tuple[Port, Tensor | None]:
        """One step, which fills the cache; what it chooses the next tokens by, as this rank has it."""
        fed: Feed = {name: given[name] for name, (port, _) in self.inputs.items() if port.role == "input"}
        fed |= {
            name: torch.full(type.shape, step_key(0, step), dtype=type.dtype)
            for name, (port, type) in self.inputs.items()
            if port.role == "seed"
        }
        results = self.engine.run({**state, **cache}, [fed], step)
        for port, value in results.items():
            if port.role == "buffer" and port.name.startswith(CACHE):
                cache[port.name] = self._as_taken(port, value)
        (port,) = (port for port in self.outputs if port.role == "output")
        return port, results.get(port)

    def _as_taken(self, port: Port, value: Tensor) -> Tensor:
        made, taken = self.outputs[port], self.inputs[port.name][1]
        if made.dims == taken.dims and not made.partial:
            return value
        return self.engine.shards.hold(self.engine.shards.whole(value, made), taken)


@dataclass(frozen=True)
class _Ready:
    prefill: _Step
    decode: _Step
    check: IndexCheck

    def cache(self) -> dict[str, Tensor]:
        """An empty cache: what this rank holds of it."""
        cache: dict[str, Tensor] = {}
        for step in (self.prefill, self.decode):
            for name, (_, type) in step.inputs.items():
                if name.startswith(CACHE) and name not in cache and step.engine.holds(name):
                    cache[name] = step.engine.shards.load(_zeros(type), type)
        return cache


class Generator:
    """The generation of a trainer, whose engine holds `inputs`."""

    def __init__(
        self, engine: StepEngine, compile: Compile | None, model: nn.Module | None, inputs: Types, compare: Compare
    ) -> None:
        self.engine, self._compile, self._model, self._inputs, self._compare = engine, compile, model, inputs, compare
        self._ready: dict[Form, _Ready] = {}
        self._said: set[str] = set()

    def generate(
        self,
        prompts: Any,
        state: Tensors,
        seed: int,
        *,
        attention_mask: Any = None,
        generation_config: Any = None,
        tokenizer: Any = None,
        options: Mapping[str, Any],
    ) -> Generated:
        """New tokens for each prompt; every rank must call it, with the same prompts."""
        if self._model is None or self._compile is None:
            message = "the trainer has no model, so nothing can be generated"
            raise error("SC571", message, hint="launch a program that compile made of a model")
        causal = CausalModel.of(self._model)
        prompts, attention_mask = opened(prompts, attention_mask)
        rows = prompt_rows(prompts, attention_mask, tokenizer, causal.vocabulary)
        width = int(prompts.shape[-1]) if isinstance(prompts, Tensor) else max(map(len, rows))
        settings = Settings.of(
            self._model, options, generation_config, seed, tokenizer, 1 if causal.encoder_decoder else width
        )
        if attention_mask is None and isinstance(prompts, Tensor) and not causal.encoder_decoder:
            attention_mask = settings.inferred_mask(prompts)
            rows = prompt_rows(prompts, attention_mask, tokenizer, causal.vocabulary)
        left = not causal.encoder_decoder
        read = padded(rows, width, _fill(causal, settings), left=left)
        if attention_mask is not None:
            read = as_given(prompts, attention_mask, causal.vocabulary, left=left)
        rows = [row for row in rows for _ in range(settings.copies)]
        search = _Search(causal, settings, rows, *(t.repeat_interleave(settings.copies, 0) for t in read))
        form = search.form()
        compared = {"prompts": search.read, "their mask": search.read_mask, "settings": settings.digest()}
        self._compare(compared, "before generation")
        ready = self._of(form)
        search.check(ready)
        with torch.no_grad():
            return search.run(ready, self.engine, self._inputs, state)

    # ------------------------------------------------------------------ programs by form
    def _of(self, form: Form) -> _Ready:
        if form not in self._ready:
            assert self._compile is not None
            prefill, decode = self._compile(form)
            homes = self.engine.homes
            steps = [_Step(program, self.engine, self._inputs, homes) for program in (prefill, decode)]
            if self._ready:
                message = "generation is compiled for each form (rows, lengths, whether scores are changed)"
                self._say(f"{message}; here is another, and the {PROGRAMS} used last are kept")
            if len(self._ready) == PROGRAMS:
                del self._ready[next(iter(self._ready))]
                self._say(f"prompts have more than {PROGRAMS} forms: what is used least recently is compiled again")
            self._ready[form] = _Ready(steps[0], steps[1], IndexCheck(decode.reference))
        ready = self._ready[form] = self._ready.pop(form)  # the last of those in use
        for step in (ready.prefill, ready.decode):
            step.program.refuse_changed_model()
        return ready

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message)


class _Search:
    """The rows of one call, and how far they are."""

    def __init__(self, causal: CausalModel, settings: Settings, rows: Rows, read: Tensor, mask: Tensor) -> None:
        self.causal, self.settings, self.rows = causal, settings, rows
        self.lengths = torch.tensor([len(row) for row in rows])
        # What the library would be given, and what it makes of its scores reads.
        self.read, self.read_mask = read, mask
        self.sequences = settings.first(len(rows)) if causal.encoder_decoder else read
        self.fill = _fill(causal, settings)

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
        needed = settings.new_tokens - 1 + (1 if causal.encoder_decoder else longest)
        length = series(prompt + settings.new_tokens - 1)
        if (limit := settings.config.max_cache_len) is not None:
            if needed > limit:
                message = f"{needed} tokens do not fit into a cache of max_cache_len={limit}"
                cause = f"the longest prompt has {longest} tokens, and {settings.new_tokens} are to follow it"
                hint = "pass a larger max_cache_len, shorter prompts, or fewer max_new_tokens"
                raise error("SC573", message, cause=cause, hint=hint)
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

    def check(self, ready: _Ready) -> None:
        """Raise ShardcError (SC573) where the last tokens have positions that the model has no embedding for."""
        if self.causal.encoder_decoder:
            return
        last = self.lengths.max() + self.settings.new_tokens - 2
        types = {name: type for name, (port, type) in ready.decode.inputs.items() if port.role == "input"}
        feed = {name: torch.zeros(type.shape, dtype=type.dtype) for name, type in types.items()}
        if "positions" not in feed:
            return
        try:
            ready.check({**feed, "positions": last.expand(feed["positions"].shape)})
        except ShardcError as outside:
            message = f"the model has no position {int(last)}, which the last token that is read would have"
            cause = outside.diagnostics[0].message
            raise error("SC573", message, cause=cause, hint="pass fewer max_new_tokens, or shorter prompts") from None

    # ------------------------------------------------------------------ the loop
    def run(self, ready: _Ready, engine: StepEngine, known: Types, state: Tensors) -> Generated:
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
                if held is not None:  # of a pipeline, other stages do not have it
                    type = step.outputs[port]
                    processors = self._processors(step.engine, type) if processors is None else processors
                    chosen = self._choose(step.engine, held, type, processors, number)
                tokens = step.engine.derived(port, chosen, self.lengths).cpu()
            if bool((tokens[~done] < 0).any()):
                raise _not_a_number(~done & (tokens < 0), number)
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

    def _first_inputs(self, ready: _Ready) -> dict[str, Tensor]:
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
        read, mask = (engine.shards.hold(t, _rows_like(type, t)) for t in (self.read, self.read_mask))
        return self.settings.processors(read, mask)

    def _choose(self, engine: StepEngine, logits: Tensor, type: TensorType, processors: Any, number: int) -> Tensor:
        """The next token of every row: each rank chooses for the rows that it holds."""
        shards = engine.shards
        scores = processors(shards.hold(self.sequences, _rows_like(type, self.sequences)), logits)
        if self.settings.samples:
            rows = torch.arange(len(self.rows))
            behind = torch.ones_like(rows) if self.causal.encoder_decoder else self.lengths
            numbers = uniforms(self.settings.seed, rows, behind + number)
            chosen = draw(scores, shards.hold(numbers, _rows_like(type, numbers)))
        else:
            chosen = scores.argmax(-1)
        chosen = torch.where(scores.isnan().any(-1), -1, chosen)
        return shards.whole(chosen, _rows_like(type, self.lengths))

    def _result(self, ended_at: Tensor) -> Generated:
        start = self.settings.width
        new = self.sequences[:, start:]
        tokens = [row[:end].tolist() for row, end in zip(new, ended_at.tolist(), strict=True)]
        text = None
        if self.settings.tokenizer is not None:
            text = [self.settings.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        return Generated(self.sequences, tokens, text)


def _not_a_number(rows: Tensor, number: int) -> ShardcError:
    message = f"the scores of new token {number} of prompt {int(rows.nonzero()[0])} are NaN, so none can be chosen"
    hint = "look at the weights and at trainer.predict(batch); remove_invalid_values=True reads NaN as 0"
    return error("SC509", message, hint=hint)


def series(length: int) -> int:
    """The length that is compiled for so many tokens."""
    if length > COARSE:
        return -(-length // COARSE) * COARSE
    return max(8, 1 << (length - 1).bit_length())


def _rows_like(type: TensorType, tensor: Tensor) -> TensorType:
    """The placement of a tensor whose rows lie where those of a placed one do."""
    plain = TensorType.of(tensor)
    return TensorType(tensor.dtype, (type.dims[0], *plain.dims[1:]))


def _zeros(type: TensorType) -> Callable[[tuple[slice, ...]], Tensor]:
    return lambda slices: torch.zeros([s.stop - s.start for s in slices], dtype=type.dtype)


def _fill(causal: CausalModel, settings: Settings) -> int:
    """What padding is: any token, since nothing reads it."""
    fill = 0 if settings.pad is None else settings.pad
    return fill if 0 <= fill < causal.vocabulary else 0
