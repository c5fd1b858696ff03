"""What `shardc generate` does: a target's model, weights of a folder, prompts from the command line, tokens to stdout.

Without torchrun all ranks are simulated here; under it each process is a rank, and the first one prints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from torch import nn

from shardc.cli.commands import Asked, compiled
from shardc.cli.console import diagnose, progress, write_json
from shardc.cli.host_memory import refuse_program
from shardc.cli.local_launch import state_of
from shardc.ir.diagnostic import error
from shardc.runtime.generate.result import Generated


@dataclass(frozen=True)
class Choosing:
    """How tokens are chosen; None for what the model's own generation config says."""

    max_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    eos_token_id: int | None
    seed: int


def generate(
    asked: Asked,
    prompts: Sequence[str],
    choosing: Choosing,
    *,
    tokenizer: Path | None,
    weights: Path | None,
    as_json: bool,
) -> None:
    if asked.target.endswith(".json") and not asked.target.startswith("hf:"):
        message = f"{asked.target} is a program without its model, so nothing can be generated"
        raise error("SC571", message, hint="give the model that it was compiled from")
    reader = None if tokenizer is None else _tokenizer(tokenizer)
    given: Any = list(prompts) if reader is not None else [_tokens(text) for text in prompts]
    prepare = None if weights is None else partial(_read_generation_config, weights)
    program, _ = compiled(asked, meta=weights is not None, prepare=prepare)
    diagnose(program.diagnostics)
    refuse_program(program)
    with (
        program.launch(state=weights if weights is not None else state_of(program)) as trainer,
        progress("generating"),
    ):
        result = trainer.generate(given, tokenizer=reader, **vars(choosing))
    if trainer.leads:
        _print(given, result, as_json)


def _print(prompts: list[Any], result: Generated, as_json: bool) -> None:
    copies = len(result.tokens) // len(prompts)
    texts = result.text or [None] * len(result.tokens)
    if as_json:
        rows = zip(result.tokens, texts, strict=True)
        found = [
            {"prompt": prompts[number // copies], "tokens": tokens} | ({} if text is None else {"text": text})
            for number, (tokens, text) in enumerate(rows)
        ]
        write_json({"rows": found})
        return
    for tokens, text in zip(result.tokens, texts, strict=True):
        typer.echo(" ".join(map(str, tokens)) if text is None else text)


def _tokens(text: str) -> list[int]:
    """A prompt of token ids. Raises ShardcError (SC573) for a word that is none."""
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for word in words:
        if not word.isascii() or not word.isdigit():
            hint = "write ids, as in --prompt '5 6 7'; or pass --tokenizer FOLDER for text"
            raise error("SC573", f"'{word}' in --prompt is no token id", hint=hint)
    return list(map(int, words))


def _tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        hint = "give a folder that a tokenizer's save_pretrained wrote"
        raise error("SC573", f"there is no folder {folder} with a tokenizer", hint=hint)
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as problem:
        message = f"transformers reads no tokenizer from {folder}: {type(problem).__name__}"
        cause = str(problem).strip().partition("\n")[0]
        hint = "give a folder that a tokenizer's save_pretrained wrote"
        raise error("SC573", message, cause=cause, hint=hint) from problem


def _read_generation_config(weights: Path, model: nn.Module) -> None:
    """The generation config that lies beside the weights is the model's own, as it is to `from_pretrained`."""
    folder = weights if weights.is_dir() else weights.parent
    current: Any = getattr(model, "generation_config", None)
    if current is not None and (folder / "generation_config.json").is_file():
        with suppress(OSError):
            model.generation_config = type(current).from_pretrained(str(folder))
