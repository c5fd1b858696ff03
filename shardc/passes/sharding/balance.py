"""Whether attention is worth a zigzag: what its fullest rank has less to do, against what ranks send more.

    causal, all keys before a row           a zigzag: it sends as much as one run does
    a short window                          one run: all ranks but the first have the same to do
    chunks of a rank's rows, or of half     one run: nothing is sent
    chunks of several ranks' rows           as the account says

Keys are counted as a ring sends them, twice, and their gradients once, and nothing covers that; each step reads and
writes a rank's results, and gradients of its rows, in float32.
"""

from __future__ import annotations

import math
from functools import partial

from torch import fx

from shardc.ir.blocks import zigzag
from shardc.ir.graph import type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_rows import reach
from shardc.ir.ops.attention_sums import wide
from shardc.ir.ops.attention_window import Window, window_of
from shardc.ir.schema import given

BACKWARD = 2.5  # products of backward for each of forward
SENT = 3


def worth_a_zigzag(node: fx.Node, axis: str, mesh: Mesh, hardware: Hardware) -> bool:
    """Is this attention, whose rows and keys an axis shards, sooner done in a zigzag than in one run a rank?"""
    args = given(node) if node.target in (SDPA, SDPA_BWD) else {}
    window, ranks = window_of(args.get("window", ())), mesh.size(axis)
    if window is None:
        return bool(args.get("causal"))
    q, k, v = (type_of(args[name]) for name in ("q", "k", "v"))
    length, width = k.shape[-2], k.shape[-1] + v.shape[-1]
    turned = zigzag(length, axis, ranks)
    if turned is None:
        return False
    parts = pairs_of_parts(window, length, 2 * ranks)
    fullest = (
        max(parts[2 * r] + parts[2 * r + 1] for r in range(ranks)),
        max(parts[r] + parts[-1 - r] for r in range(ranks)),
    )
    group, key = hardware.group_of(mesh, (axis,)), math.prod(k.shape[:-2]) * width * k.dtype.itemsize

    merged = math.prod(q.shape[:-1]) // ranks * width * (q.dtype.itemsize + 2 * wide(q.dtype).itemsize)

    def seconds(pairs: float, rows: str) -> float:
        flops = 2 * math.prod(q.shape[:-2]) * width * pairs
        rate = partial(hardware.attention_seconds, dtype=q.dtype, sequence=length, width=q.shape[-1])
        forward, backward = rate(round(flops)), rate(round(BACKWARD * flops), backward=True)
        hops = reach(rows, (axis,), window, mesh).values()
        sent = SENT * sum(hardware.collective_seconds("permute", n * key, group) for n in hops)
        return forward + backward + sent + len(hops) * hardware.memory_seconds(merged)

    return seconds(fullest[0], str(length)) > seconds(fullest[1], str(turned))


def pairs_of_parts(window: Window, length: int, parts: int) -> list[float]:
    """How many keys the rows of each of so many equal parts see; of a long sequence, counted for some of its rows."""
    found, step = [0.0] * parts, max(1, length // 4096)
    for row in range(0, length, step):
        low, high = window.keys(row, row + 1)
        found[row * parts // length] += step * max(0, min(high, length) - max(low, 0))
    return found
