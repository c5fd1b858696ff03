"""What generation gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Generated:
    """The tokens of every row, on every rank.

    `sequences` is what the library's own `generate` returns: the prompts, padded on the left, and the new tokens; of an
    encoder-decoder model what the decoder was begun with, and the new tokens. `tokens` are the new tokens of each row,
    with the one that ended it and without padding. `text` is there where a tokenizer was given.
    """

    sequences: Tensor
    tokens: Sequence[Sequence[int]]
    text: Sequence[str] | None = None

    def __repr__(self) -> str:
        return f"Generated({len(self.tokens)} rows, {sum(map(len, self.tokens))} new tokens)"


@dataclass(frozen=True)
class Finished:
    """A sequence that `generate_stream` has ended, on every rank.

    `prompt` is the number of its prompt, in the order in which they were given. `tokens` are its new tokens, with the
    one that ended it; `sequence` is the prompt and the new tokens. `text` is there where a tokenizer was given. Of
    several sequences of one prompt (`num_return_sequences`), `copy` is its number.
    """

    prompt: int
    tokens: Sequence[int]
    sequence: Tensor
    text: str | None = None
    copy: int = 0

    def __repr__(self) -> str:
        return f"Finished(prompt {self.prompt}, {len(self.tokens)} new tokens)"
