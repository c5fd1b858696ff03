"""Attention: batch and heads are free, keys and head_dim whole, query rows free unless the mask is implied.

    q  b (k r) s d      k  b k t d      v  b k t e      mask  b|1 (k r)|1 s|1 t|1
    o  b (k r) s e      lse  b (k r) s

Query head h reads key-value head h // r, so heads are `(k r)`: an axis that shards key-value heads shards the
query heads of their groups with them. In backward, dk and dv are sums over r and over query rows, and the mask's
gradient is one over every dim that the mask broadcasts.
"""

from __future__ import annotations

from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import example, rule


class _Labels:
    """The labels of each tensor of one attention call."""

    def __init__(self, q: Dims, k: Dims, mask: Dims | None) -> None:
        lead = [f"b{i}" for i in range(q.ndim - 2)]
        heads, keys = lead, lead
        if lead and q.shape[-3] != k.shape[-3]:
            heads, keys = [*lead[:-1], "(k r)"], [*lead[:-1], "k"]
        self.q, self.o = " ".join([*heads, "s", "d"]), " ".join([*heads, "s", "e"])
        self.k, self.v = " ".join([*keys, "t", "d"]), " ".join([*keys, "t", "e"])
        self.lse = " ".join([*heads, "s"])
        self.mask = None
        if mask is not None:
            scores = [*heads, "s", "t"]
            aligned = scores[len(scores) - mask.ndim :]
            self.mask = " ".join("1" if n == 1 else label for n, label in zip(mask.shape, aligned, strict=True)) or "()"


PLAIN = ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 3))
GROUPED = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))


@rule(
    SDPA,
    examples=[
        (*PLAIN, None, False, None, False),
        (*GROUPED, None, True, 0.3, True),
        (*PLAIN, (2, 1, 6, 5), False, None, False),
        example(*GROUPED, (6, 6), False, None, True, bools=("mask",)),
    ],
)
def sdpa(q: Dims, k: Dims, v: Dims, mask: Dims | None, causal: bool, scale: float | None, gqa: bool) -> Notation:
    labels = _Labels(q, k, mask)
    ins = ", ".join(filter(None, (labels.q, labels.k, labels.v, labels.mask)))
    return Notation(f"{ins} -> {labels.o}, {labels.lse}", whole="t d e s" if causal else "t d e")


@rule(
    SDPA_BWD,
    linear=(0,),
    examples=[
        ((2, 4, 6, 3), *PLAIN, None, (2, 4, 6, 3), (2, 4, 6), False, None, False, False),
        ((2, 4, 6, 8), *GROUPED, None, (2, 4, 6, 8), (2, 4, 6), True, 0.3, True, False),
        ((2, 4, 6, 3), *PLAIN, (2, 1, 6, 5), (2, 4, 6, 3), (2, 4, 6), False, None, False, True),
        ((2, 4, 6, 8), *GROUPED, (4, 1, 6), (2, 4, 6, 8), (2, 4, 6), False, None, True, True),
    ],
)
def sdpa_bwd(
    g: Dims, q: Dims, k: Dims, v: Dims, mask: Dims | None, o: Dims, lse: Dims,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool,
) -> Notation:  # fmt: skip
    labels = _Labels(q, k, mask)
    ins = ", ".join(filter(None, (labels.o, labels.q, labels.k, labels.v, labels.mask, labels.o, labels.lse)))
    dmask = labels.mask if need_mask and labels.mask is not None else "0"  # an empty tensor when nobody asks
    free = " ".join(f"b{i}" for i in range(q.ndim - 2)) + " k r"
    return Notation(
        f"{ins} -> {labels.q}, {labels.k}, {labels.v}, {dmask}",
        sum=free if causal else f"{free} s",
        whole="t d e s" if causal else "t d e",
        linear=(0,),
    )
