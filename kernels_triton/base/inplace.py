"""The protocol of in-place calls: how an op of several results writes some of them over what its operands hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Operand = int | Tensor  # the slot of a value, or the tensor that it is in every run
Place = Tensor | Callable[[list[Any]], Tensor]  # where a result goes: there in every run, or given the values of slots
Scratch = Callable[[int], Tensor]  # so many bytes for good, which others use too
Prepare = Callable[
    [Sequence[Operand], str, Mapping[int, Place], torch.device, Scratch | None], Callable[..., Any] | None
]


@dataclass(frozen=True)
class Into:
    """The in-place calls of one op.

    `pairs(*args)` are the (result, operand) of which the one may take the place of the other. `run(*args, over)`, with
    `over` from results to tensors, is the call. `anywhere`: a result may also be written where no operand is.
    `prepare(operands, kernel's text, places, device, scratch)` is the same call of a kernel, ready for one device: a
    function of the values of all slots, whose results go where `places` say. None where there is nothing to prepare on
    that device.
    """

    pairs: Callable[..., frozenset[tuple[int, int]]]
    run: Callable[..., Any]
    anywhere: bool = False
    prepare: Prepare | None = None


INTO: dict[Any, Into] = {}  # by op
# By the id of an op, whose hash is written in Python: the (result, operand) of a call with these arguments of which the
# one may take the memory of the other, if nothing reads the operand after the call.
OVER_DEAD: dict[int, Callable[..., frozenset[tuple[int, int]]]] = {}
