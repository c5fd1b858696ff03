"""Prompts in any form that a user has, as rows of tokens.

    [[5, 6, 7], [8]]                 rows of unequal length
    tensor, attention_mask           rows padded on the left or on the right: the mask says where
    ["Once upon", "A"], tokenizer    text

A decoder reads rows padded on the left, so that the next token of each stands in one column; an encoder reads them
padded on the right. What stands in the padding is read by no model; what the library makes of its scores does see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from shardc.ir.diagnostic import ShardcError, error

Rows = list[list[int]]
FORMS = (
    "give token ids as a list of lists, or a tensor of [rows, length] with its attention_mask; or text, and tokenizer="
)


def opened(prompts: Any, attention_mask: Any) -> tuple[Any, Any]:
    """The prompts and their mask, of a mapping too, as a tokenizer returns one."""
    if not isinstance(prompts, Mapping):
        return prompts, attention_mask
    encoded = cast("Mapping[str, Any]", prompts)
    if "input_ids" not in encoded:
        raise error("SC573", "the prompts are a mapping without 'input_ids'", hint=FORMS)
    return encoded["input_ids"], encoded.get("attention_mask") if attention_mask is None else attention_mask


def prompt_rows(prompts: Any, attention_mask: Any, tokenizer: Any, vocabulary: int) -> Rows:
    """The tokens of each prompt. Raises ShardcError (SC573) for what nothing can be generated from."""
    if isinstance(prompts, str) or _is_text(prompts):
        rows = _encoded([prompts] if isinstance(prompts, str) else list(prompts), tokenizer)
    elif isinstance(prompts, Tensor):
        rows = _of_tensor(prompts, attention_mask)
        attention_mask = None
    else:
        rows = _of_lists(prompts)
    if attention_mask is not None:
        message = "an attention_mask is given beside prompts that are no tensor"
        raise error("SC573", message, hint="leave it out: lists have the length that they have")
    if not rows:
        raise error("SC573", "there are no prompts", hint=FORMS)
    for number, row in enumerate(rows):
        if not row:
            hint = "begin with the token that the model begins with, as in [[bos_token_id]]"
            raise error("SC573", f"prompt {number} has no token", hint=hint)
        wrong = next((token for token in row if not 0 <= token < vocabulary), None)
        if wrong is not None:
            message = f"prompt {number} has the token {wrong}; the model's are 0 to {vocabulary - 1}"
            raise error("SC573", message, hint="was it made by the tokenizer of another model?")
    return rows


def one_prompt(prompt: Any, number: int, tokenizer: Any, vocabulary: int) -> list[int]:
    """The tokens of one prompt of several that come one by one. Raises ShardcError (SC573), which says its number."""
    tokens, mask = opened(prompt, None)
    try:
        if isinstance(tokens, int):
            raise error("SC573", "prompt 0 is no list of token ids", hint=FORMS)
        is_empty = isinstance(tokens, list | tuple) and not tokens  # to a list of prompts, there would be none
        rows = prompt_rows([[]] if is_empty else tokens, mask, tokenizer, vocabulary)
        if len(rows) != 1:
            raise error("SC573", f"prompt 0 is {len(rows)} prompts", hint="give one at a time, or all as a list")
    except ShardcError as wrong:
        first, *rest = wrong.diagnostics
        message = first.message.replace("prompt 0", f"prompt {number}")
        raise ShardcError(replace(first, message=message), *rest) from None
    return rows[0]


def padded(rows: Rows, width: int, fill: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of one width, and where they have tokens."""
    tokens = torch.full((len(rows), width), fill, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[number, place] = torch.tensor(row, dtype=torch.int64)
        mask[number, place] = 1
    return tokens, mask


def as_given(prompts: Tensor, attention_mask: Any, vocabulary: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """The user's own tensor and mask: what stands in the padding is kept, on the left of each row for a decoder."""
    tokens, mask = prompts.detach().cpu().long(), (torch.as_tensor(attention_mask).cpu() != 0).long()
    tokens, mask = tokens.reshape(-1, tokens.shape[-1]), mask.reshape(-1, mask.shape[-1])
    tokens = torch.where((tokens >= 0) & (tokens < vocabulary), tokens, 0)  # as -100, which no model reads
    if left:
        order = mask.argsort(dim=1, stable=True)
        tokens, mask = tokens.gather(1, order), mask.gather(1, order)
    return tokens, mask


def _is_text(prompts: Any) -> bool:
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(p, str) for p in prompts)


def _encoded(texts: list[str], tokenizer: Any) -> Rows:
    if not callable(tokenizer):
        message = "the prompts are text, and there is no tokenizer"
        raise error("SC573", message, hint="pass tokenizer=, or the token ids")
    read: Any = tokenizer
    return [list(map(int, read(text)["input_ids"])) for text in texts]


def _of_lists(prompts: Any) -> Rows:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise error("SC573", f"the prompts are of type {type(prompts).__name__}", hint=FORMS)
    items = list(cast("Sequence[Any]", prompts))
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        items = [items]  # one prompt
    rows: Rows = []
    for number, item in enumerate(items):
        values: Any = item
        if isinstance(item, Tensor) and item.dim() == 1:
            values = item.tolist()
        whole = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        if not whole or any(isinstance(t, bool) or not isinstance(t, int) for t in cast("Sequence[Any]", values)):
            raise error("SC573", f"prompt {number} is no list of token ids", hint=FORMS)
        rows.append(list(cast("Sequence[int]", values)))
    return rows


def _of_tensor(prompts: Tensor, attention_mask: Any) -> Rows:
    if (
        prompts.is_floating_point()
        or prompts.is_complex()
        or prompts.dtype == torch.bool
        or prompts.dim() not in (1, 2)
    ):
        message = f"the prompts are a tensor of {str(prompts.dtype).removeprefix('torch.')}{list(prompts.shape)}"
        raise error("SC573", message, hint=FORMS)
    if prompts.is_meta:
        raise error("SC573", "the prompts lie on the meta device and have no values", hint=FORMS)
    whole = prompts.unsqueeze(0) if prompts.dim() == 1 else prompts
    if attention_mask is None:
        return whole.tolist()
    mask = torch.as_tensor(attention_mask).cpu()
    mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
    if mask.shape != whole.shape:
        message = f"the attention_mask has the shape {list(mask.shape)}, the prompts {list(whole.shape)}"
        raise error("SC573", message, hint="give one entry a token")
    kept = mask != 0
    return [_between(number, row, keep) for number, (row, keep) in enumerate(zip(whole.cpu(), kept, strict=True))]


def _between(number: int, row: Tensor, keep: Tensor) -> list[int]:
    """The tokens of a row that are not padding."""
    places = keep.nonzero().flatten()
    if len(places) and int(places[-1] - places[0]) + 1 != len(places):
        raise _hole(number)
    return row[keep].tolist()


def _hole(number: int) -> ShardcError:
    message = f"the attention_mask of prompt {number} has zeros between ones"
    hint = "padding is on the left or on the right; take other tokens out of the prompt"
    return error("SC573", message, hint=hint)
