"""The same kernel over other dims: as few as will do, and in the order that suits memory.

Fewer dims are fewer divisions of a row's number, and one kernel for more shapes.
Adjacent dims, of the batch or of the rows, become one where every tensor walks them as one (its outer stride is its
inner stride times the inner size). Without reductions the columns may join too: then `x + bias` over (8, 128 | 64) is
(1024 | 64), and a sum of two whole tensors is flat, (| 65536).

The order of the row dims is free. A tensor that is contiguous along one of them, and not along the columns, is read in
tiles of rows and columns: `arranged` puts that dim last among the rows, so that a tile has many of its elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from kernels_triton.fused.kernel import Kernel, Walk
from kernels_triton.fused.table import OPS


def simplified(kernel: Kernel) -> Kernel:
    space, walks, indexed = (
        list(kernel.space),
        _strides(kernel),
        {s.attributes[0] for s in kernel.steps if s.op == "iota"},
    )
    reduces = any(OPS[step.op].reduces for step in kernel.steps)
    groups = [[d] for d in range(len(space))]  # dims of the kernel that make each dim of the result
    at = len(groups) - 2
    while at >= 0:
        outer, inner = groups[at], groups[at + 1]
        fixed = at + 1 == len(groups) - 1 and reduces  # the columns stay themselves
        fixed = fixed or (outer[-1] < kernel.batch <= inner[0])
        if not fixed and _join(outer, inner, space, walks, indexed):
            groups[at : at + 2] = [outer + inner]
        at -= 1
    if len(groups) == len(space):
        return kernel

    def strides(of: Iterable[int]) -> tuple[int, ...]:
        each = tuple(of)
        # A dim of size 1 has stride 0: of those joined, the innermost that is not one has the stride.
        return tuple(next((each[d] for d in reversed(group) if space[d] > 1), 0) for group in groups)

    def dim(of: int) -> int:
        return next(g for g, group in enumerate(groups) if of in group)

    batch = sum(group[0] < kernel.batch for group in groups)
    return _over(kernel, [math.prod(space[d] for d in group) for group in groups], strides, dim, batch)


def arranged(kernel: Kernel) -> Kernel:
    """The dim that most of the transposed tensors are contiguous along, last among the rows."""
    last, batch = len(kernel.space) - 2, kernel.batch
    found: Counter[int] = Counter()
    for strides in _strides(kernel):
        if strides[-1] not in (0, 1) and 1 in strides[batch:-1]:
            found[strides.index(1, batch)] += 1
    best = max(found, key=lambda d: (found[d], kernel.space[d]), default=last)
    if best == last:
        return kernel
    order = [d for d in range(len(kernel.space)) if d not in (best, last + 1)] + [best, last + 1]
    return _over(
        kernel,
        [kernel.space[d] for d in order],
        lambda of: tuple(tuple(of)[d] for d in order),
        lambda d: order.index(d),
        batch,
    )


def _over(
    kernel: Kernel,
    space: list[int],
    strides: Callable[[Iterable[int]], tuple[int, ...]],
    dim: Callable[[int], int],
    batch: int,
) -> Kernel:
    """The kernel over another space: `strides` says what becomes of a walk's strides, `dim` of a dim's number."""

    def walk(of: Walk) -> Walk:
        return Walk(of.offset, strides(of.strides))

    steps = list(kernel.steps)
    for i, step in enumerate(steps):
        if step.op == "iota":
            steps[i] = replace(step, attributes=(dim(step.attributes[0]),))
        elif step.op == "uniform":
            steps[i] = replace(step, attributes=(step.attributes[0], *strides(step.attributes[1:])))
        elif step.op == "spread":
            steps[i] = replace(step, attributes=strides(step.attributes))
    return Kernel(
        kernel.name,
        tuple(space),
        tuple(replace(given, walk=walk(given.walk)) for given in kernel.inputs),
        tuple(steps),
        tuple(
            replace(made, stores=tuple(replace(s, walk=walk(s.walk)) for s in made.stores)) for made in kernel.outputs
        ),
        batch,
    )


def _strides(kernel: Kernel) -> list[tuple[int, ...]]:
    walks = [given.walk.strides for given in kernel.inputs]
    walks += [store.walk.strides for made in kernel.outputs for store in made.stores]
    walks += [step.attributes for step in kernel.steps if step.op == "spread"]
    return walks + [step.attributes[1:] for step in kernel.steps if step.op == "uniform"]


def _join(
    outer: list[int], inner: list[int], space: list[int], walks: list[tuple[int, ...]], indexed: set[int]
) -> bool:
    outers, inners = ([d for d in group if space[d] > 1] for group in (outer, inner))
    if not outers or not inners:
        # Of size 1 altogether: it joins anything, and an index along it is 0 wherever it is.
        return not (set(outer) | set(inner)) & indexed
    if (set(outer) | set(inner)) & indexed:
        return False
    size = 1
    for d in inners:
        size *= space[d]
    # Inside a group strides agree already, so the innermost dim's stride is the group's.
    return all(strides[outers[-1]] == strides[inners[-1]] * size for strides in walks)
