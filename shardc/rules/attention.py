"""Attention: batch, heads and query rows are free, keys and head_dim whole.

    q  b (k r) s d      k  b k t d      v  b k t e      mask  b|1 (k r)|1 s|1 t|1
    o  b (k r) s e      lse  b (k r) s

Query head h reads key-value head h // r, so heads are `(k r)`: an axis that shards key-value heads shards the
query heads of their groups with them. In backward, dk and dv are sums over r and over query rows, and the mask's
gradient is one over every dim that the mask broadcasts.

Where the mask is implied, a rank that has a part of the rows counts them in the sequence: `shardc.rules.attention_rows`
makes the call local. So it does for `sdpa_ring`, whose keys are as many as its rows (`s` is a factor of both) or lie
over the same axes (`u` follows `s`), and for `sdpa_heads`, whose rows are whole along the axes that divide its heads.
Of `sdpa_keys` axes divide the keys: `o` is a sum over them, and `lse` is merged by the call itself
(`shardc.rules.attention_keys`).
"""

from __future__ import annotations

from typing import Any

import shardc.ir.ops.cpu_attention  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what CPUs run)
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_keys import SDPA_KEYS, SDPA_KEYS_BWD
from shardc.ir.ops.attention_rows import SDPA_HEADS, SDPA_HEADS_BWD, SDPA_RING, SDPA_RING_BWD
from shardc.rules.attention_keys import backward_by_keys, by_keys
from shardc.rules.attention_keys import unfit as unfit_keys
from shardc.rules.attention_rows import backward_by_rows, by_rows, keys_are_rows, unfit
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import example, rule


class _Labels:
    """The labels of each tensor of one attention call."""

    def __init__(self, q: Dims, k: Dims, mask: Dims | None, ring: bool = False) -> None:
        self.others = ring and not keys_are_rows(q, k)
        t = ("u" if self.others else "s") if ring else "t"
        lead = [f"b{i}" for i in range(q.ndim - 2)]
        heads, keys = lead, lead
        if lead and q.shape[-3] != k.shape[-3]:
            heads, keys = [*lead[:-1], "(k r)"], [*lead[:-1], "k"]
        self.q, self.o = " ".join([*heads, "s", "d"]), " ".join([*heads, "s", "e"])
        self.k, self.v = " ".join([*keys, t, "d"]), " ".join([*keys, t, "e"])
        self.lse = " ".join([*heads, "s"])
        self.mask = None
        if mask is not None:
            scores = [*heads, "s", "t"]
            aligned = scores[len(scores) - mask.ndim :]
            self.mask = " ".join("1" if n == 1 else label for n, label in zip(mask.shape, aligned, strict=True)) or "()"

    def rule(self, text: str, sums: str, whole: str, **said: Any) -> Notation:
        """With what is true of keys that are not as many as rows."""
        if self.others:
            return Notation(text, sum=f"{sums} u", whole=whole, following=(("s", "u"),), **said)
        return Notation(text, sum=sums, whole=whole, **said)


GROUPED = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))


def _register(forward: Any, backward: Any, *said: Any, ring: bool = False, by_key: bool = False) -> None:
    """`sdpa` and its backward; `said` are the last arguments of both in examples, beyond those of `sdpa`."""
    whole, split = ("d e", "t") if by_key else ("t d e", "")
    keys = 6 if ring else 5
    plain = ((2, 4, 6, 8), (2, 4, keys, 8), (2, 4, keys, 3))
    longer = ((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 3), (6, 9))

    @rule(
        forward,
        localize=by_keys if by_key else by_rows,
        unfit=unfit_keys if by_key else unfit,
        examples=[
            (*plain, None, False, None, False, *said),
            (*GROUPED, None, True, 0.3, True, *said),
            (*plain, (2, 1, 6, keys), False, None, False, *said),
            example(*GROUPED, (6, 6), False, None, True, *said, bools=("mask",)),
            (*longer, True, None, False, *said),
        ],
    )
    def sdpa(
        q: Dims, k: Dims, v: Dims, mask: Dims | None, causal: bool, scale: float | None, gqa: bool, *more: Any
    ) -> Notation:
        labels = _Labels(q, k, mask, ring)
        ins = ", ".join(filter(None, (labels.q, labels.k, labels.v, labels.mask)))
        return labels.rule(f"{ins} -> {labels.o}, {labels.lse}", split, whole, merged=(1,))

    @rule(
        backward,
        linear=(0,),
        localize=backward_by_keys if by_key else backward_by_rows,
        unfit=unfit_keys if by_key else unfit,
        examples=[
            ((2, 4, 6, 3), *plain, None, (2, 4, 6, 3), (2, 4, 6), False, None, False, False, *said),
            ((2, 4, 6, 8), *GROUPED, None, (2, 4, 6, 8), (2, 4, 6), True, 0.3, True, False, *said),
            ((2, 4, 6, 3), *plain, (2, 1, 6, keys), (2, 4, 6, 3), (2, 4, 6), False, None, False, True, *said),
            ((2, 4, 6, 8), *GROUPED, (4, 1, 6), (2, 4, 6, 8), (2, 4, 6), False, None, True, True, *said),
            ((2, 4, 6, 3), *longer, (2, 4, 6, 3), (2, 4, 6), True, None, False, True, *said),
        ],
    )
    def sdpa_bwd(
        g: Dims, q: Dims, k: Dims, v: Dims, mask: Dims | None, o: Dims, lse: Dims,
        causal: bool, scale: float | None, gqa: bool, need_mask: bool, *more: Any,
    ) -> Notation:  # fmt: skip
        labels = _Labels(q, k, mask, ring)
        ins = ", ".join(filter(None, (labels.o, labels.q, labels.k, labels.v, labels.mask, labels.o, labels.lse)))
        dmask = labels.mask if need_mask and labels.mask is not None else "0"  # an empty tensor when nobody asks
        free = " ".join(f"b{i}" for i in range(q.ndim - 2)) + " k r"
        text = f"{ins} -> {labels.q}, {labels.k}, {labels.v}, {dmask}"
        return labels.rule(text, f"{free} s {split}", whole, linear=(0,))


_register(SDPA, SDPA_BWD)
_register(SDPA_HEADS, SDPA_HEADS_BWD, [])
_register(SDPA_RING, SDPA_RING_BWD, [], ring=True)
_register(SDPA_KEYS, SDPA_KEYS_BWD, ["a"], by_key=True)
