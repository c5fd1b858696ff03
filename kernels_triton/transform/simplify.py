"""The same kernel over other dims: as few as possible, in the order that suits memory.

Fewer dims mean fewer divisions of a row index, and one kernel for more shapes. Adjacent dims of the batch or of the
rows are merged where every access map allows it (the outer stride is the inner stride times the inner size). Without
reductions the columns may be merged too: `x + bias` over (8, 128 | 64) becomes (1024 | 64), and a sum of two whole
tensors becomes flat, (| 65536).

The order of the row dims is free. A tensor that is contiguous along a row dim, and not along the columns, is read in
tiles of rows and columns. `order_rows` moves that dim to the last place among the rows, so that a tile holds many
neighbouring elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.table import OPS


def simplify(kernel: Kernel) -> Kernel:
    """The kernel with adjacent dims merged."""
    space, walks, indexed = (
        list(kernel.space),
        _all_strides(kernel),
        {s.attributes[0] for s in kernel.steps if s.op == "iota"},
    )
    reduces = any(OPS[step.op].reduces for step in kernel.steps)
    groups = [[d] for d in range(len(space))]  # for each dim of the result, the dims of the kernel that it merges
    position = len(groups) - 2
    while position >= 0:
        outer, inner = groups[position], groups[position + 1]
        fixed = position + 1 == len(groups) - 1 and reduces  # reductions keep the column dim apart
        fixed = fixed or (outer[-1] < kernel.batch <= inner[0])
        if not fixed and _can_join(outer, inner, space, walks, indexed):
            groups[position : position + 2] = [outer + inner]
        position -= 1
    if len(groups) == len(space):
        return kernel

    def strides(of: Iterable[int]) -> tuple[int, ...]:
        all_strides = tuple(of)
        # A dim of size 1 has stride 0: the innermost merged dim of another size gives the stride.
        return tuple(next((all_strides[d] for d in reversed(group) if space[d] > 1), 0) for group in groups)

    def dim(of: int) -> int:
        return next(g for g, group in enumerate(groups) if of in group)

    batch = sum(group[0] < kernel.batch for group in groups)
    return _over_space(kernel, [math.prod(space[d] for d in group) for group in groups], strides, dim, batch)


def order_rows(kernel: Kernel) -> Kernel:
    """The kernel with its last row dim chosen: the dim along which most transposed tensors are contiguous."""
    last, batch = len(kernel.space) - 2, kernel.batch
    contiguous_along: Counter[int] = Counter()
    for strides in _all_strides(kernel):
        if strides[-1] not in (0, 1) and 1 in strides[batch:-1]:
            contiguous_along[strides.index(1, batch)] += 1
    best = max(contiguous_along, key=lambda d: (contiguous_along[d], kernel.space[d]), default=last)
    if best == last:
        return kernel
    order = [d for d in range(len(kernel.space)) if d not in (best, last + 1)] + [best, last + 1]
    return _over_space(
        kernel,
        [kernel.space[d] for d in order],
        lambda of: tuple(tuple(of)[d] for d in order),
        lambda d: order.index(d),
        batch,
    )


def _over_space(
    kernel: Kernel,
    space: list[int],
    strides: Callable[[Iterable[int]], tuple[int, ...]],
    dim: Callable[[int], int],
    batch: int,
) -> Kernel:
    """The kernel over another space: `strides` maps the strides of an access map, `dim` maps a dim's number."""

    def moved(of: AccessMap) -> AccessMap:
        return AccessMap(of.offset, strides(of.strides))

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
        tuple(replace(tensor, access_map=moved(tensor.access_map)) for tensor in kernel.inputs),
        tuple(steps),
        tuple(
            replace(output, stores=tuple(replace(s, access_map=moved(s.access_map)) for s in output.stores))
            for output in kernel.outputs
        ),
        batch,
    )


def _all_strides(kernel: Kernel) -> list[tuple[int, ...]]:
    strides = [tensor.access_map.strides for tensor in kernel.inputs]
    strides += [store.access_map.strides for output in kernel.outputs for store in output.stores]
    strides += [step.attributes for step in kernel.steps if step.op == "spread"]
    return strides + [step.attributes[1:] for step in kernel.steps if step.op == "uniform"]


def _can_join(
    outer: list[int], inner: list[int], space: list[int], walks: list[tuple[int, ...]], indexed: set[int]
) -> bool:
    outers, inners = ([d for d in group if space[d] > 1] for group in (outer, inner))
    if not outers or not inners:
        # A group of size 1 merges with anything; an index along it is always 0.
        return not (set(outer) | set(inner)) & indexed
    if (set(outer) | set(inner)) & indexed:
        return False
    size = 1
    for d in inners:
        size *= space[d]
    # Strides agree inside a group, so the innermost dim's stride is the group's.
    return all(strides[outers[-1]] == strides[inners[-1]] * size for strides in walks)
