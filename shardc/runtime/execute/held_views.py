"""Views of held tensors, made once: parameters and state stay where they are from step to step.

    %w.t = t(%w)          made in the first run, and again in a run where `w` is another tensor, or lies elsewhere

A user may replace a held tensor between two steps, or give it other memory (`w.data = ...`). So each run compares what
is held with what the views were made of: the tensor itself, its address, shape and strides. An update in place changes
none of these, and views show it. What is no view, because strides forced a copy, is made in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Env = list[Any]
Results = tuple[tuple[int | None, int], ...]  # (position among the results or None for the only one, slot)
ViewCall = tuple[Callable[[Env], Any], Results]


class HeldViews:
    """The view calls of each held slot, in order: a later one may read what an earlier one made."""

    def __init__(self, calls: dict[int, list[ViewCall]]) -> None:
        self._calls = calls
        self._made: dict[int, tuple[Tensor, int, torch.Size, tuple[int, ...], Sequence[tuple[int, Tensor]]]] = {}

    def copy(self) -> HeldViews:
        """The same calls, for other held tensors."""
        return HeldViews(self._calls)

    def fill(self, env: Env) -> None:
        """Put the views of what the held slots have into their slots."""
        made = self._made
        for source, calls in self._calls.items():
            x = env[source]
            known = made.get(source)
            if known is None or not (
                known[0] is x and known[1] == x.data_ptr() and known[2] == x.shape and known[3] == x.stride()
            ):
                views, stays = _views(env, x, calls)
                made.pop(source, None)
                if stays:
                    made[source] = x, x.data_ptr(), x.shape, x.stride(), views
                continue
            for slot, view in known[4]:
                env[slot] = view


def _views(env: Env, x: Tensor, calls: Sequence[ViewCall]) -> tuple[list[tuple[int, Tensor]], bool]:
    """The results by slot, which are in `env` then too, and whether all of them share the memory of `x`."""
    views: list[tuple[int, Tensor]] = []
    for make, results in calls:
        result = make(env)
        for position, slot in results:
            view: Tensor = result if position is None else result[position]
            env[slot] = view
            views.append((slot, view))
    address = x.untyped_storage().data_ptr()
    return views, all(view.untyped_storage().data_ptr() == address for _, view in views)
