"""Products: contracted dims are summed, the rest are free. Bilinear, so one factor may be a pending sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardc.ir.ops.accumulate import ACCUMULATE_WGRAD
from shardc.ir.ops.grouped import GROUPED_MM, GROUPED_MM_WGRAD
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten

rule(aten.mm.default, "m k, k n -> m n", sum="k", linear="each")
rule(aten.bmm.default, "b m k, b k n -> b m n", sum="k", linear="each")
rule(aten.mv.default, "m k, k -> m", sum="k", linear="each")
rule([aten.dot.default, aten.vdot.default], "k, k -> ()", sum="k", linear="each")

rule(LINEAR, "... k, n k -> ... n", sum="k", linear="each")
rule(LINEAR_BIAS, "... k, n k, n -> ... n", whole="k")
rule(LINEAR_DGRAD, "... n, n k -> ... k", sum="n", linear="each")
rule(LINEAR_WGRAD, "... n, ... k -> n k", sum="...", linear="each")
rule(
    ACCUMULATE_WGRAD,
    "... n, ... k -> n k",
    sum="...",
    linear="each",
    examples=[((4, 6), (4, 3), torch.float64), ((2, 4, 6), (2, 4, 3), torch.float64)],
)


@rule(aten.addmm.default, examples=[((4, 6), (4, 3), (3, 6)), ((6,), (4, 3), (3, 6)), ((4, 1), (4, 3), (3, 6))])
def addmm(self: Dims, mat1: Dims, mat2: Dims, beta: float, alpha: float) -> Notation:
    return _added(self, "m k, k n", "m n", (mat1.shape[0], mat2.shape[1]))


@rule(aten.baddbmm.default, examples=[((2, 4, 6), (2, 4, 3), (2, 3, 6)), ((4, 6), (2, 4, 3), (2, 3, 6))])
def baddbmm(self: Dims, batch1: Dims, batch2: Dims, beta: float, alpha: float) -> Notation:
    return _added(self, "b m k, b k n", "b m n", (*batch1.shape[:2], batch2.shape[2]))


@rule(
    aten.addbmm.default,
    examples=[((4, 6), (2, 4, 3), (2, 3, 6)), ((6,), (2, 4, 3), (2, 3, 6)), ((), (1, 4, 3), (1, 3, 6))],
)
def addbmm(self: Dims, batch1: Dims, batch2: Dims, beta: float, alpha: float) -> Notation:
    added = _added(self, "b m k, b k n", "m n", (batch1.shape[1], batch2.shape[2]))
    return replace(added, whole="b k")


@rule(aten.addr.default, examples=[((4, 6), (4,), (6,)), ((6,), (4,), (6,)), ((4, 1), (4,), (6,)), ((), (4,), (6,))])
def addr(self: Dims, vec1: Dims, vec2: Dims, beta: float, alpha: float) -> Notation:
    return replace(_added(self, "m, n", "m n", (vec1.shape[0], vec2.shape[0])), whole="")


def _added(term: Dims, factors: str, product: str, shape: tuple[int, ...]) -> Notation:
    """Not split along k: the term would be added once for each shard. Normalize leaves the optimizer's products so."""
    names = product.split()[len(shape) - term.ndim :]
    sizes = zip(names, term.shape, shape[len(shape) - term.ndim :], strict=True)
    own = " ".join(name if size == full else "1" for name, size, full in sizes) or "()"
    return Notation(f"{own}, {factors} -> {product}", whole="k")


@rule(
    aten._trilinear.default,
    linear="each",
    examples=[
        ((4, 3), (6, 3, 5), (4, 5), (1, 3), (0,), (1, 2), (2, 3)),
        ((4, 6), (6, 3, 5), (4, 5), (2, 3), (0,), (1, 2), (1, 3)),
        ((4, 3), (1, 3, 5), (4, 5), (1, 3), (0,), (1, 2), (2, 3), 2),
    ],
)
def trilinear(
    i1: Dims, i2: Dims, i3: Dims, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int],
    sumdim: Sequence[int], unroll_dim: int,
) -> Notation:  # fmt: skip
    """The product of three tensors, each without the dims that it is expanded to, summed over some."""
    ndim = i1.ndim + len(expand1)

    def dims(x: Dims, expanded: Sequence[int]) -> str:
        own = [d for d in range(ndim) if d not in expanded]
        return " ".join("1" if size == 1 else f"d{d}" for d, size in zip(own, x.shape, strict=True))

    factors = ", ".join(dims(x, e) for x, e in ((i1, expand1), (i2, expand2), (i3, expand3)))
    result = " ".join(f"d{d}" for d in range(ndim) if d not in sumdim) or "()"
    return Notation(f"{factors} -> {result}", sum=" ".join(f"d{d}" for d in sumdim), linear="each")


@rule(
    aten.linalg_cross.default,
    linear="each",
    examples=[((4, 6, 3), (4, 6, 3)), example((3, 4, 5), (3, 4, 5), dim=0), example((1, 3, 5), (4, 3, 1), dim=1)],
)
def cross(self: Dims, other: Dims, dim: int) -> Notation:
    """Each coordinate of the product is of the two others', so `dim` is whole; other dims of size 1 are broadcast."""

    def dims(x: Dims) -> str:
        return " ".join("1" if size == 1 else f"d{d}" for d, size in enumerate(x.shape))

    result = " ".join(f"d{d}" for d in range(self.ndim))
    return Notation(f"{dims(self)}, {dims(other)} -> {result}", whole=f"d{self.dim(dim)}")


# ------------------------------------------------------------------------------------------------ distances
@by_block
def _same_algorithm(call: LocalCall) -> Any:
    """By a product, or by differences, as the whole call decides by its numbers of rows: they round differently."""
    rows = max(call.operands[0].shape[-2], call.operands[1].shape[-2])
    mode = call.args["compute_mode"]
    return call.with_args(compute_mode=(1 if rows > 25 else 2) if mode in (None, 0) else mode)


rule(
    aten._cdist_forward.default,
    "... p d, ... r d -> ... p r",
    whole="d",
    localize=_same_algorithm,
    examples=[((2, 3, 4), (2, 5, 4), 1.0, None), ((4, 3), (6, 3), 2.0, 0), ((2, 30, 4), (2, 4, 4), 2.0, None)],
)
rule(
    aten._cdist_backward.default,
    "... p r, ... p d, ... r d, ... p r -> ... p d",
    sum="r",
    linear=(0,),
    examples=[((2, 3, 5), (2, 3, 4), (2, 5, 4), 1.0, (2, 3, 5)), ((4, 6), (4, 3), (6, 3), 3.0, (4, 6))],
)

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
