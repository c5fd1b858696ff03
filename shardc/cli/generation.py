"""What `shardc generate` does: a target's model, weights of a folder, prompts from the command line, tokens to stdout.

shardc generate ...              all ranks are simulated here
shardc generate --nproc N ...    N processes are started here; the first leaves what it has, and this one prints
torchrun -m shardc generate ...  each process is a rank, and the first one prints
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from shardc.api import Program
from shardc.cli.commands import Asked, compiled
from shardc.cli.console import diagnose, progress, write_json
from shardc.cli.host_memory import refuse_program
from shardc.cli.local_launch import STATE, leave, ranks_of, state_of
from shardc.ir.diagnostic import error
from shardc.runtime.train.trainer import Trainer

ROWS = "rows.json"  # what rank 0 leaves
Rows = list[dict[str, Any]]


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
    rows: int | None  # that are generated at a time; None for all


@dataclass(frozen=True)
class Given:
    """What each rank needs to know."""

    asked: Asked
    prompts: Sequence[str]
    choosing: Choosing
    tokenizer: Path | None
    weights: Path | None


def generate(given: Given, *, nproc: int | None, as_json: bool) -> None:
    target = given.asked.target
    if target.endswith(".json") and not target.startswith("hf:"):
        message = f"{target} is a program without its model, so nothing can be generated"
        raise error("SC571", message, hint="give the model that it was compiled from")
    tokens = _tokens_of(given)  # what is wrong with them is said before anything is compiled
    program = _compiled(given, meta=given.weights is not None)
    diagnose(program.diagnostics)
    refuse_program(program)
    if nproc is not None:
        rows = _by_processes(given, program, nproc)
    else:
        with (
            program.launch(state=state_of(program) if given.weights is None else given.weights) as trainer,
            progress("generating"),
        ):
            rows = _rows(given, tokens, trainer)
        if not trainer.leads:
            return
    if as_json:
        write_json({"rows": rows})
        return
    for row in rows:
        typer.echo(row.get("text") if "text" in row else " ".join(map(str, row["tokens"])))


def _by_processes(given: Given, program: Program, nproc: int) -> Rows:
    """What rank 0 of a job on this machine leaves."""
    with ranks_of(program, nproc) as ranks:
        if given.weights is None:
            torch.save(state_of(program), ranks.folder / STATE)
        ranks.run(_generate, (given,))
        return json.loads((ranks.folder / ROWS).read_text(encoding="utf-8"))


def _generate(folder: Path, rank: int, given: Given) -> None:
    """In a rank, which compiles for itself: a saved program has no model to generate with."""
    with ExitStack() as stack:
        if rank:
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stderr(nowhere))  # progress and warnings are those of rank 0
        program = _compiled(given, meta=True)
        state: Any = torch.load(folder / STATE, mmap=True) if given.weights is None else given.weights
        with program.launch(state=state) as trainer:
            rows = _rows(given, _tokens_of(given), trainer)
    if rank == 0:
        leave(folder / ROWS, json.dumps(rows))


def _compiled(given: Given, *, meta: bool) -> Program:
    prepare = None if given.weights is None else partial(_read_generation_config, given.weights)
    program, _ = compiled(given.asked, meta=meta, prepare=prepare)
    return program


def _tokens_of(given: Given) -> Sequence[Any]:
    """Prompts of token ids; of text what was given, where a tokenizer is there to read it."""
    return given.prompts if given.tokenizer is not None else [_tokens(text) for text in given.prompts]


def _rows(given: Given, prompts: Sequence[Any], trainer: Trainer) -> Rows:
    """A record of each row, as --json prints it."""
    reader = None if given.tokenizer is None else _tokenizer(given.tokenizer)
    result = trainer.generate(list(prompts), tokenizer=reader, **vars(given.choosing))
    copies = len(result.tokens) // len(prompts)
    texts = result.text or [None] * len(result.tokens)
    return [
        {"prompt": prompts[number // copies], "tokens": list(tokens)} | ({} if text is None else {"text": text})
        for number, (tokens, text) in enumerate(zip(result.tokens, texts, strict=True))
    ]


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
