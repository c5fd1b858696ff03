"""What is dead in an arena is filled with NaNs (all bits set), before each call of a rank's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardc.ir.arena import Plan
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import Exchange
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.overlap import begin
from shardc.runtime.execute.prepared_code import CodeLine, _wait_into


class Late:
    """A communicator of one rank, as if the others sent the same. It reads its operands, and writes over one that is
    spent, when it is waited for and no earlier."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def begin(self, exchange: Exchange) -> Callable[[], Tensor]:
        x, count = exchange.x, self.mesh.size(exchange.axes)
        match exchange.kind:
            case "all_reduce":
                return lambda: x.mul_(count) if exchange.spent else x * count
            case "all_gather":
                return lambda: torch.stack([x] * count)
            case "reduce_scatter":
                return lambda: x[0].clone()
            case _:
                return lambda: x.clone()

    def __getattr__(self, kind: str) -> Callable[..., Tensor]:
        def at_once(x: Tensor, *args: Any) -> Tensor:
            op, axes = args if kind == "reduce_scatter" else ("sum", args[-1] if kind != "permute" else args[0])
            return self.begin(Exchange(kind, x, op=op, axes=axes))()  # type: ignore[arg-type]

        return at_once


def poisoned(code: Sequence[CodeLine], plan: Plan, arena: Arena) -> list[CodeLine]:
    found: list[CodeLine] = []
    done = -1
    for at, call, arguments, into, free in code:
        live = sorted((s.offset, s.end) for s in plan.slots if s.born <= done < s.dies)
        found.append((at, partial(_after_filling, arena.buffer, live, call), arguments, into, free))
        waits = isinstance(call, partial) and call.func in (begin, _wait_into)
        done = done if waits else max(done, at)
    return found


def _after_filling(
    buffer: Tensor, live: list[tuple[int, int]], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    start = 0
    for first, last in [*live, (buffer.numel(), buffer.numel())]:
        buffer[start:first].fill_(255)
        start = last
    return call(*args, **kwargs)
