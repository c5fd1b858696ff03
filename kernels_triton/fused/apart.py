"""What a kernel computes that has nothing in common: each part of it has programs of its own, in one launch.

    p1, m1, v1 = update(p0, g0, m0, v0, lr)         programs (.., 0)
    p3, m3, v3 = update(p2, g2, m2, v2, lr)         programs (.., 1)

A program that does all has the tensors of all in its registers, and few programs then fit on a multiprocessor: while
they compute, too little is loaded. Updates of four large parameters at once took 1.7 times as long as a copy of as many
bytes. Parts may share numbers, which each loads; an output may not lie over such a number (`schedules.in_place`).

A part is a set of outputs: these stay what they are however a kernel is rewritten before it is written, and what parts
have in common may not. So it is the kernel of the graph that says what its parts are, to the grid and to the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.table import OPS


@cache
def apart(kernel: Kernel) -> tuple[tuple[int, ...], ...]:
    """The outputs of each part: one of all, where rows or columns are reduced."""
    found: list[tuple[int, ...]] = []
    reduces = any(OPS[step.op].reduces for step in kernel.steps)
    for at in range(len(kernel.outputs)):
        own = values(kernel, [at])
        joined = [one for one in found if reduces or not (own & values(kernel, one)) <= _numbers(kernel)]
        found = [one for one in found if one not in joined] + [tuple(sorted([at, *(n for one in joined for n in one)]))]
    return tuple(found)


def values(kernel: Kernel, outputs: Iterable[int]) -> frozenset[int]:
    """What some outputs are computed from, and themselves."""
    return closure(kernel, (store.value.index for at in outputs for store in kernel.outputs[at].stores))


@cache
def shared(kernel: Kernel) -> frozenset[int]:
    """The inputs that several parts read."""
    count = Counter(value for part in apart(kernel) for value in values(kernel, part))
    return frozenset(value for value, times in count.items() if times > 1)


@cache
def _numbers(kernel: Kernel) -> frozenset[int]:
    """What parts may share: inputs that are the same everywhere, and are not stored as they are."""
    stored = {store.value.index for made in kernel.outputs for store in made.stores}
    return frozenset(v for v in range(len(kernel.inputs)) if kernel.kind(v) == "scalar" and v not in stored)


def closure(kernel: Kernel, roots: Iterable[int]) -> frozenset[int]:
    """All values that some depend on, these among them."""
    found, todo = set[int](), list(roots)
    while todo:
        value = todo.pop()
        if value not in found:
            found.add(value)
            todo += kernel.values_read(value)
    return frozenset(found)
