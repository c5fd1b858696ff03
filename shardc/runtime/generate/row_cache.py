"""A cache whose rows begin and end at different times, though a decode step writes all rows at one column.

    column   0 1 2 3 4 5 6 7           the next token is written at column 5
    row 0    . . a b c * . .           3 tokens
    row 1    a b c d e * . .           5 tokens
    row 2    . . . . . * . .           free: what is written there is read by nobody

All rows that are alive end at the same column, and a row's mask says where it begins. So a prompt joins by being
written before the column, and one program serves every step. Where the column comes to the end of the cache, rows are
moved to the left over what none of them holds; where a prompt is longer than the column, to the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardc.runtime.generate.programs import ByRow
from shardc.runtime.generate.steps import Step, empty_cache, rows_like


class RowCache:
    """The keys and values of all rows, of which this rank holds its part; every rank must do the same with it."""

    def __init__(self, programs: ByRow) -> None:
        self.programs = programs
        self.tensors = empty_cache(programs.decode)
        self.lengths = [0] * programs.form.rows  # how many tokens each row has
        self.column = 0

    @property
    def length(self) -> int:
        return self.programs.form.length

    def make_room(self) -> None:
        """Let there be a column for the next token of each row."""
        if self.column == self.length:
            self._move(max(self.lengths) - self.column)
        assert self.column < self.length, "a row is as long as the cache"

    def inputs(self) -> dict[str, Tensor]:
        """What a decode step reads beside tokens: where it writes, and which columns and position each row has."""
        lengths = torch.tensor(self.lengths)[:, None]
        columns = torch.arange(self.length)
        mask = (columns >= self.column - lengths) & (columns <= self.column)
        return {"length": torch.tensor(self.column), "mask": mask.long(), "positions": lengths}

    def written(self) -> None:
        """A decode step has written a token into each row."""
        self.column += 1
        self.lengths = [length + 1 if length else 0 for length in self.lengths]

    def free(self, row: int) -> None:
        self.lengths[row] = 0

    def join(self, prefill: Step, filled: Mapping[str, Tensor], joining: Mapping[int, int]) -> None:
        """Take prompts from the cache that a prefill filled, to its right end: rows, and how many tokens each has."""
        self._reach(max(joining.values()))
        for name, tensor in filled.items():
            into = self.tensors[name]
            targets = _places(self.programs.decode, name, into)
            sources = _places(prefill, name, tensor)
            for row, tokens in joining.items():
                if row in targets:  # and so the row of the prefill that lies with it
                    source = tensor[sources[self.programs.joins_at(row)], :, tensor.shape[2] - tokens :]
                    into[targets[row], :, self.column - tokens : self.column].copy_(source)
        for row, tokens in joining.items():
            self.lengths[row] = tokens

    def grown(self, programs: ByRow) -> RowCache:
        """The same rows in the cache of another program, which is as long or longer."""
        cache = RowCache(programs)
        for name, tensor in self.tensors.items():
            cache.tensors[name][:, :, : self.length].copy_(tensor)
        cache.lengths, cache.column = self.lengths, self.column
        return cache

    def _reach(self, tokens: int) -> None:
        """Let there be so many columns before the next token."""
        if not any(self.lengths):
            self.column = tokens
        elif tokens > self.column:
            self._move(tokens - self.column)

    def _move(self, by: int) -> None:
        """Move all rows by so many columns to the right."""
        longest = max(self.lengths)
        start = self.column - longest
        for tensor in self.tensors.values():
            held = tensor[:, :, start : self.column].clone()
            tensor[:, :, start + by : self.column + by].copy_(held)
        self.column += by


def _places(step: Step, name: str, tensor: Tensor) -> dict[int, int]:
    """The rows that this rank holds of a tensor of the cache, and where."""
    type = step.inputs[name][1]
    numbers = torch.arange(1, type.shape[0] + 1)  # 0 is padding
    held: Sequence[int] = step.engine.shards.hold(numbers, rows_like(type, numbers)).tolist()
    return {number - 1: place for place, number in enumerate(held) if number}
