"""Independent outputs: parts of a kernel that share no values get programs of their own, in one launch.

    p1, m1, v1 = update(p0, g0, m0, v0, lr)         programs (.., 0)
    p3, m3, v3 = update(p2, g2, m2, v2, lr)         programs (.., 1)

A program that computes all parts holds the tensors of all in registers. Occupancy is then low, and too few loads are in
flight while programs compute: updates of four large parameters at once took 1.7 times as long as a copy of as many
bytes. Parts may share scalars, which each part loads. An output may not overwrite such a scalar
(`schedules.inplace_pairs`).

A part is a set of outputs. Outputs stay the same when a kernel is rewritten before code generation; the values that
parts share may not. So the kernel of the graph decides the parts, both for the grid and for the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.table import OPS


@cache
def independent_outputs(kernel: Kernel) -> tuple[tuple[int, ...], ...]:
    """The outputs of each part. A kernel that reduces rows or columns is one part."""
    parts: list[tuple[int, ...]] = []
    reduces = any(OPS[step.op].reduces for step in kernel.steps)
    for output in range(len(kernel.outputs)):
        needed = values_of_outputs(kernel, [output])
        joined = [
            part
            for part in parts
            if reduces or not (needed & values_of_outputs(kernel, part)) <= _shareable_scalars(kernel)
        ]
        parts = [part for part in parts if part not in joined] + [
            tuple(sorted([output, *(n for part in joined for n in part)]))
        ]
    return tuple(parts)


def values_of_outputs(kernel: Kernel, outputs: Iterable[int]) -> frozenset[int]:
    """The values that some outputs depend on, including the stored values themselves."""
    return dependencies(kernel, (store.value.index for output in outputs for store in kernel.outputs[output].stores))


@cache
def shared_inputs(kernel: Kernel) -> frozenset[int]:
    """The inputs that several parts read."""
    count = Counter(value for part in independent_outputs(kernel) for value in values_of_outputs(kernel, part))
    return frozenset(value for value, times in count.items() if times > 1)


@cache
def _shareable_scalars(kernel: Kernel) -> frozenset[int]:
    """The values that parts may share: scalar inputs that are not stored unchanged."""
    stored = {store.value.index for output in kernel.outputs for store in output.stores}
    return frozenset(v for v in range(len(kernel.inputs)) if kernel.kind(v) == "scalar" and v not in stored)


def dependencies(kernel: Kernel, roots: Iterable[int]) -> frozenset[int]:
    """All values that the roots depend on, including the roots."""
    reached, todo = set[int](), list(roots)
    while todo:
        value = todo.pop()
        if value not in reached:
            reached.add(value)
            todo += kernel.values_read(value)
    return frozenset(reached)
