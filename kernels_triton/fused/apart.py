"""What a kernel computes that has nothing in common: each part of it has programs of its own, in one launch.

    p1, m1, v1 = update(p0, g0, m0, v0, lr)         programs (.., 0)
    p3, m3, v3 = update(p2, g2, m2, v2, lr)         programs (.., 1)

A program that does all has the tensors of all in its registers, and few programs then fit on a multiprocessor: while
they compute, too little is loaded. Updates of four large parameters at once took 1.7 times as long as a copy of as many
bytes. Parts may share numbers, which each loads; an output may not lie over such a number (`schedules.in_place`).
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.table import OPS


@cache
def apart(kernel: Kernel) -> tuple[frozenset[int], ...]:
    """The values of each part: one of all, where rows or columns are reduced."""
    found: list[frozenset[int]] = []
    reduces = any(OPS[step.op].reduces for step in kernel.steps)
    for made in kernel.outputs:
        own = _closure(kernel, [store.value.index for store in made.stores])
        joined = [one for one in found if reduces or not (own & one) <= _numbers(kernel)]
        found = [one for one in found if one not in joined] + [own.union(*joined)]
    return tuple(found)


@cache
def shared(kernel: Kernel) -> frozenset[int]:
    """The inputs that several parts read."""
    count = Counter(value for part in apart(kernel) for value in part)
    return frozenset(value for value, times in count.items() if times > 1)


@cache
def _numbers(kernel: Kernel) -> frozenset[int]:
    """What parts may share: inputs that are the same everywhere, and are not stored as they are."""
    stored = {store.value.index for made in kernel.outputs for store in made.stores}
    return frozenset(v for v in range(len(kernel.inputs)) if kernel.kind(v) == "scalar" and v not in stored)


def _closure(kernel: Kernel, roots: list[int]) -> frozenset[int]:
    found, todo = set[int](), roots
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            todo += kernel.values_read(value)
    return frozenset(found)
