"""How tokens are chosen: the library's generation config, the model's own under what the user passes.

Every field is honoured, refused (SC572), or known to change no token. What the library does to the scores of the next
token, its own code does here too, on the rows that a rank holds: temperature, top-k, top-p, penalties, forbidden words.

This is the one module that calls methods of transformers that have an underscore: a model's own preparation of its
config and processors, which `model.generate` begins with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.ir.diagnostic import ShardcError, did_you_mean, error


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HONOURED = _words("""
    max_length max_new_tokens min_length min_new_tokens stop_strings do_sample temperature top_k top_p min_p top_h
    typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    num_return_sequences pad_token_id bos_token_id eos_token_id decoder_start_token_id max_cache_len
""")
COUNTS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_return_sequences", "max_cache_len")
# They change no token of a search without beams and assistants, or only how fast it is.
WITHOUT_EFFECT = _words("""
    use_cache early_stopping length_penalty num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold max_matching_ngram_size assistant_lookbehind target_lookbehind
    assistant_ensemble_weight compile_config disable_compile prefill_chunk_size transformers_version
""")
NO_BEAMS = "leave it out: shardc searches greedily or samples (do_sample=True)"
NO_ASSISTANT = "leave it out: shardc decodes token by token"
TOKENS_ALONE = "leave it out: generate returns tokens; trainer.predict(batch) returns logits"
# What is refused: the values that ask for nothing, and a hint.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "num_beams": ((None, 1), NO_BEAMS),
    "num_beam_groups": ((None, 1), NO_BEAMS),
    "diversity_penalty": ((None, 0.0), NO_BEAMS),
    "constraints": ((None,), NO_BEAMS),
    "force_words_ids": ((None,), NO_BEAMS),
    "penalty_alpha": ((None, 0.0), NO_BEAMS),
    "guidance_scale": ((None, 1), "leave it out: guidance runs the model twice a token"),
    "token_healing": ((None, False), "leave it out, and end prompts where a token does"),
    "watermarking_config": ((None,), "leave it out"),
    "use_mtp": ((None, False), NO_ASSISTANT),
    "prompt_lookup_num_tokens": ((None,), NO_ASSISTANT),
    "assistant_early_exit": ((None,), NO_ASSISTANT),
    "speculation_type": ((None,), NO_ASSISTANT),
    "is_assistant": ((None, False), NO_ASSISTANT),
    "dola_layers": ((None,), "leave it out"),
    "low_memory": ((None, False), NO_BEAMS),
    "max_time": ((None,), "bound the tokens by max_new_tokens: ranks have clocks of their own"),
    "output_attentions": ((None, False), TOKENS_ALONE),
    "output_hidden_states": ((None, False), TOKENS_ALONE),
    "output_scores": ((None, False), TOKENS_ALONE),
    "output_logits": ((None, False), TOKENS_ALONE),
    "return_dict_in_generate": ((None, False), TOKENS_ALONE),
    "cache_implementation": (
        (None, "dynamic", "static", "hybrid", "sliding_window"),
        "leave it out: shardc keeps a static cache on the ranks; max_cache_len says how long it is",
    ),
    "cache_config": ((None,), "leave it out: the cache holds keys and values as the model computes them"),
    "continuous_batching_config": ((None,), "leave it out: rows= generates so many prompts at a time"),
}
# Arguments of the library's `generate` that are no fields of its config.
ARGUMENTS: dict[str, str] = {
    "assistant_model": NO_ASSISTANT,
    "assistant_tokenizer": NO_ASSISTANT,
    "logits_processor": "leave it out: a rank has the rows of its part of the batch alone",
    "stopping_criteria": "pass eos_token_id or stop_strings",
    "prefix_allowed_tokens_fn": "leave it out",
    "streamer": "leave it out",
    "synced_gpus": "leave it out: ranks run one program",
    "custom_generate": "leave it out",
    "negative_prompt_ids": "leave it out: guidance runs the model twice a token",
    "negative_prompt_attention_mask": "leave it out: guidance runs the model twice a token",
    "inputs": "pass prompts",
    "input_ids": "pass prompts",
    "inputs_embeds": "pass prompts of token ids",
    "decoder_input_ids": "pass decoder_start_token_id",
    "encoder_outputs": "pass prompts",
    "position_ids": "leave it out: positions are counted from the attention_mask",
    "cache": "leave it out: shardc keeps the cache",
    "past_key_values": "leave it out: shardc keeps the cache",
}


@dataclass(frozen=True)
class Settings:
    """The prepared config of one call. `width` is the length that the library counts as a prompt's."""

    model: Any  # of transformers
    config: Any
    seed: int
    tokenizer: Any
    width: int

    @classmethod
    def of(
        cls,
        model: Any,
        given: Mapping[str, Any],
        generation_config: Any,
        seed: object,
        tokenizer: Any,
        width: int,
    ) -> Settings:
        """Raises ShardcError (SC572) for a field or an argument that is not supported."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise error("SC572", f"generate is given seed={seed!r}", hint="give a whole number")
        for name in given:
            if name in ARGUMENTS:
                raise error("SC572", f"generate does not take {name}=", hint=ARGUMENTS[name])
        given = {name: None if name == "eos_token_id" and _is_empty(value) else value for name, value in given.items()}
        known = type(model.generation_config)()
        if generation_config is not None and not isinstance(generation_config, type(known)):
            message = f"generation_config is of type {type(generation_config).__name__}"
            raise error("SC572", message, hint="give one of transformers, or single options")
        lengths = [
            all(source.get(key) is None for source in _sources(model, given, generation_config))
            for key in ("max_length", "min_length")
        ]
        try:
            config, unknown = model._prepare_generation_config(generation_config, **given)
        except (ValueError, TypeError) as problem:
            raise _refused_by_library(problem) from problem
        for name in COUNTS:
            value = getattr(config, name, None)
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
                raise error("SC572", f"{name} is {value!r}", hint="give a whole number")
        for name in (*unknown, *_fields(config)):
            if name in unknown or (name not in HONOURED | WITHOUT_EFFECT | REFUSED.keys() and _says(config, name)):
                where = "generate is given" if name in given else "the model's generation config has"
                hint = did_you_mean(name, [*HONOURED], "options")
                if name not in given:
                    hint = f"clear it: model.generation_config.{name} = None"
                raise error("SC572", f"{where} '{name}', which generate does not know", hint=hint)
        _refuse(config, given)
        settings = cls(model, config, seed, tokenizer, width)
        settings._prepare(*lengths)
        return settings

    def _prepare(self, default_max: bool, default_min: bool) -> None:
        config, model = self.config, self.model
        try:
            model._prepare_special_tokens(config, True, device=torch.device("cpu"))
            model._prepare_generated_length(
                generation_config=config,
                has_default_max_length=default_max,
                has_default_min_length=default_min,
                model_input_name="input_ids",
                inputs_tensor=torch.empty(0, self.width, dtype=torch.int64),
                input_ids_length=self.width,
            )
            config.validate()
        except (ValueError, TypeError, IndexError) as problem:
            raise _refused_by_library(problem) from problem
        if self.new_tokens < 1:
            message = f"the prompts are {self.width} tokens long, and max_length is {config.max_length}"
            raise error("SC572", message, hint="pass max_new_tokens, which counts new tokens alone")
        top_p = config.top_p
        if top_p is not None and not 0 <= top_p <= 1:
            raise error("SC572", f"top_p={top_p:g} is no probability", hint="give a number from 0 to 1")
        _ = self.stop
        if self.copies > 1 and not config.do_sample:
            message = f"num_return_sequences={self.copies} of a greedy search are one sequence, {self.copies} times"
            raise error("SC572", message, hint="pass do_sample=True, or leave it out")
        self.processors(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64))

    @property
    def new_tokens(self) -> int:
        return int(self.config.max_length) - self.width

    @property
    def copies(self) -> int:
        """How many rows each prompt is."""
        return int(self.config.num_return_sequences or 1)

    @property
    def samples(self) -> bool:
        return bool(self.config.do_sample)

    @cached_property
    def changes_scores(self) -> bool:
        """Whether a token is chosen by more than the model's own scores."""
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        return self.samples or len(self.processors(tokens, torch.ones_like(tokens))) > 0

    @property
    def eos(self) -> Tensor | None:
        return self.config._eos_token_tensor

    @property
    def pad(self) -> int | None:
        """What a row that has ended is filled with."""
        pad = self.config._pad_token_tensor
        return None if pad is None else int(pad)

    def inferred_mask(self, prompts: Tensor) -> Tensor | None:
        """The mask of prompts that are padded with the token for it, as the library infers it; None without one."""
        pad, eos, tokens = self.config._pad_token_tensor, self.config._eos_token_tensor, prompts.cpu()
        if pad is None or not bool(torch.isin(tokens, pad).any()):
            return None
        if eos is not None and bool(torch.isin(eos, pad).any()):
            return None
        return tokens != pad

    def first(self, rows: int) -> Tensor:
        """What the decoder of an encoder-decoder model begins each row with."""
        start: Tensor = self.config._decoder_start_token_tensor.cpu()
        if start.dim() and start.shape[0] != rows:
            message = f"decoder_start_token_id has {start.shape[0]} tokens, and there are {rows} rows"
            raise error("SC572", message, hint="give one for all, or one a row")
        return start.reshape(-1, 1).expand(rows, 1).clone()

    def processors(self, source: Tensor, mask: Tensor) -> Any:
        """What the library makes of the scores of rows, whose prompts, and their masks, these are."""
        try:
            self.model._prepare_special_tokens(self.config, True, device=mask.device)
            return self.model._get_logits_processor(
                generation_config=self.config,
                input_ids_seq_length=self.width,
                encoder_input_ids=source,
                device=mask.device,
                model_kwargs={"attention_mask": mask},
            )
        except (ValueError, TypeError) as problem:
            raise _refused_by_library(problem) from problem

    def ended(self, tokens: Tensor, sequences: Tensor) -> Tensor:
        """Which rows end with the token that they have now."""
        done = torch.zeros(len(tokens), dtype=torch.bool)
        if self.eos is not None:
            done |= torch.isin(tokens, self.eos.cpu())
        if self.stop is not None:
            done |= self.stop(sequences, None)
        return done

    @cached_property
    def stop(self) -> Any:
        """What finds strings that end a row; None where there are none."""
        if self.config.stop_strings is None:
            return None
        if self.tokenizer is None:
            raise error("SC572", "stop_strings need a tokenizer", hint="pass tokenizer=, or eos_token_id")
        from transformers.generation.stopping_criteria import StopStringCriteria

        try:
            return StopStringCriteria(stop_strings=self.config.stop_strings, tokenizer=self.tokenizer)
        except Exception as problem:
            message = f"transformers finds no stop_strings with this tokenizer: {type(problem).__name__}: {problem}"
            raise error("SC572", message, hint="pass the model's own tokenizer, or eos_token_id") from problem

    def digest(self) -> Tensor:
        """A number that differs where settings do: ranks must have the same."""
        fields = sorted((name, repr(getattr(self.config, name))) for name in _fields(self.config))
        return digest((fields, self.seed, self.width))


def digest(value: object) -> Tensor:
    """A number by which ranks find out whether they have the same."""
    return torch.tensor(int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], signed=True))


def _is_empty(value: object) -> bool:
    return isinstance(value, list | tuple) and not value


def _sources(model: Any, given: Mapping[str, Any], generation_config: Any) -> list[Mapping[str, Any]]:
    """Where a field may be set, as plain data."""
    configs = [model.generation_config, *([] if generation_config is None else [generation_config])]
    return [given, *map(vars, configs)]


def _fields(config: Any) -> list[str]:
    return [name for name in vars(config) if not name.startswith("_")]


def _says(config: Any, name: str) -> bool:
    return getattr(config, name) not in (None, False)


def _refuse(config: Any, given: Mapping[str, Any]) -> None:
    for name, (nothing, hint) in REFUSED.items():
        value = getattr(config, name, None)
        if value not in nothing:
            where = "generate" if name in given else "the model's generation config"
            if name not in given:
                hint = f"{hint}; or clear it: model.generation_config.{name} = None"
            raise error("SC572", f"{where} asks for {name}={value!r}, which is not supported", hint=hint)


def _refused_by_library(problem: Exception) -> ShardcError:
    message = f"transformers refuses the options: {str(problem).strip().splitlines()[0]}"
    return error("SC572", message, hint="the options are those of model.generate")
