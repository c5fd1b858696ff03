"""The largest elements of what is rounded to 8 bits, remembered from step to step (delayed scaling).

    output "fp8_counts:blocks.0.norm" = %counts.sum
                                             ->   state "fp8:blocks.0.norm" = push_amax(%history, %counts.sum)

A step that changes nothing leaves the histories as they were. Before the first step they hold guesses, below 0: any
number that was seen is larger. With that of activations the scale is 1. That of gradients is of elements up to 0.5,
times the scale of the loss: e5m2 then has what is above 2^-32 of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from shardc.frontend.append import Append
from shardc.frontend.precision import Precision
from shardc.ir.graph import Port
from shardc.ir.ops.scaled import COUNTS, GRADIENT, HISTORY, PUSH_AMAX

aten = torch.ops.aten
ACTIVATIONS = -torch.finfo(torch.float8_e4m3fn).max
GRADIENTS = -0.5


def push_histories(
    append: Append,
    outputs: Sequence[tuple[Port, fx.Node]],
    allowed: fx.Node | None,
    precision: Precision | None,
    fills: dict[str, float],
) -> list[tuple[Port, fx.Node]]:
    """The outputs with histories in the place of the counts of this step's largest elements; adds to `fills`."""
    histories = append.graph.input_nodes()
    loss_scale = precision.loss_scale if precision is not None and precision.scaled else 1.0
    results: list[tuple[Port, fx.Node]] = []
    for port, counts in outputs:
        if not port.name.startswith(COUNTS):
            results.append((port, counts))
            continue
        about = port.name.removeprefix(COUNTS)
        name, prefix = HISTORY + about, f"opt.{HISTORY}{about}"
        pushed = append.call(prefix, "", PUSH_AMAX, histories[name], counts)
        if allowed is not None:
            pushed = append.call(prefix, "", aten.where.self, allowed, pushed, histories[name])
        fills[name] = GRADIENTS * loss_scale if about.startswith(GRADIENT) else ACTIVATIONS
        results.append((Port("state", name), pushed))
    return results
