"""Prompts one after the other, each with its limit and settings, from lists or from an iterator that may have no end.

    requests = given(rows, limits, settle)                all are known, and checked before the first is read
    requests = arriving(iterator, limits, read, settle)   each is checked when it comes

A prompt of which several sequences are sampled is as many requests. The number of a request keys the random numbers of
its tokens, so that they are those of a batch in which all rows stand together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.generate.prompts import Rows
from shardc.runtime.generate.settings import Settings

Settle = Callable[[int, Any], Settings]  # of a prompt's length, and its limit
Limits = int | Iterable[int] | None
PER_PROMPT = "give max_new_tokens as one number, or as one for each prompt"


@dataclass(frozen=True)
class Request:
    """One sequence to be generated."""

    prompt: int  # its number
    copy: int  # of the sequences of one prompt
    tokens: Sequence[int]
    settings: Settings

    @property
    def number(self) -> int:
        return self.prompt * self.settings.copies + self.copy

    @property
    def needed(self) -> int:
        """The length of a cache that holds all that is read of it: the last token is not."""
        return len(self.tokens) + self.settings.new_tokens - 1


def given(rows: Rows, limits: Limits, settle: Settle) -> list[Request]:
    """The requests of prompts that are known. Raises ShardcError (SC572) where limits do not fit them."""
    if per_prompt(limits):
        limits = list(limits)
        if len(limits) != len(rows):
            message = f"max_new_tokens has {len(limits)} numbers, and there are {len(rows)} prompts"
            raise error("SC572", message, hint=PER_PROMPT)
    return list(arriving(rows, limits, lambda tokens, _: tokens, settle))


def arriving(
    prompts: Iterable[Any], limits: Limits, read: Callable[[Any, int], Sequence[int]], settle: Settle
) -> Iterator[Request]:
    """The requests of prompts that come one by one; `read` makes tokens of one, given its number."""
    each = iter(limits) if per_prompt(limits) else None
    for number, prompt in enumerate(prompts):
        tokens = read(prompt, number)
        limit = limits if each is None else _next_limit(each, number)
        try:
            settings = settle(len(tokens), limit)
        except ShardcError as wrong:
            first, *rest = wrong.diagnostics
            raise ShardcError(replace(first, message=f"prompt {number}: {first.message}"), *rest) from wrong
        for copy in range(settings.copies):
            yield Request(number, copy, tokens, settings)


def per_prompt(limits: object) -> TypeGuard[Iterable[int]]:
    """Whether there is a limit for each prompt."""
    return isinstance(limits, Iterable) and not isinstance(limits, str)


def _next_limit(limits: Iterator[Any], number: int) -> int:
    try:
        limit = next(limits)
    except StopIteration:
        message = f"max_new_tokens has {number} numbers, and there are more prompts"
        raise error("SC572", message, hint=PER_PROMPT) from None
    try:
        if isinstance(limit, bool):
            raise TypeError
        return operator.index(limit)
    except TypeError:
        message = f"max_new_tokens of prompt {number} is {limit!r}, which is no whole number"
        raise error("SC572", message, hint=PER_PROMPT) from None
