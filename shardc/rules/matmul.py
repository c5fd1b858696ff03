"""Products: contracted dims are summed, the rest are free. Bilinear, so one factor may be a pending sum."""

from __future__ import annotations

import torch

from shardc.ir.ops.grouped import GROUPED_MM, GROUPED_MM_WGRAD
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.rules.registry import example, rule

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", sum="k", linear="each")
rule(aten.bmm.default, "b m k, b k n -> b m n", sum="k", linear="each")
rule(aten.mv.default, "m k, k -> m", sum="k", linear="each")
rule([aten.dot.default, aten.vdot.default], "k, k -> ()", sum="k", linear="each")

rule(LINEAR, "... k, n k -> ... n", sum="k", linear="each")
rule(LINEAR_DGRAD, "... n, n k -> ... k", sum="n", linear="each")
rule(LINEAR_WGRAD, "... n, ... k -> n k", sum="...", linear="each")

# Rows lie in runs, one run an expert, and `offs` counts them: neither rows nor experts can be cut without moving rows.
rule(
    GROUPED_MM,
    "s k, e k n, e -> s n",
    sum="k",
    whole="s e",
    linear=(0, 1),
    examples=[example((8, 6), (3, 6, 5), (3,), ints={"offs": 8})],
)
rule(
    GROUPED_MM_WGRAD,
    "s k, s n, e -> e k n",
    whole="s e",
    linear=(0, 1),
    examples=[example((8, 6), (8, 5), (3,), ints={"offs": 8})],
)
