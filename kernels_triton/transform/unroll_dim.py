"""Unrolls a small dim whose parts a kernel computes differently: what the parts share is then read once.

    over (..., 2 | 64)   y = x * cos + where(part == 0, -x.upper, x.lower) * sin      three elements of x for one of y
    over (... | 64)      y.lower = x.lower * cos - x.upper * sin                      two for two
                         y.upper = x.upper * cos + x.lower * sin

A `where` on the part's number selects after both sides were read. With one copy of the steps for each part that number
is a literal, and the other side is never read. This covers rotary embeddings, whose halves are inputs from one tensor,
concatenations that are used further, and gradients of slices. `sources` name the tensor of each input. Inputs with the
same tensor and access map become one input.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch

from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Input, Kernel, KernelStep, Operand, Output, OutputStore, Ref, value_operands
from kernels_triton.ir.table import OPS, Class, common_class, literal_class

MOST_PARTS = 4
WORTHWHILE = 0.75  # the bytes loaded must fall below this share, or the additional steps do not pay
SourceKey = TypeVar("SourceKey", bound=Hashable)


def unroll_dim(kernel: Kernel, sources: Sequence[SourceKey]) -> tuple[Kernel, tuple[SourceKey, ...]]:
    """The kernel, and the sources of its inputs, which may be fewer."""
    padded = any(output.padded for output in kernel.outputs)  # padded rows have a single store
    if kernel.batch or padded or any(OPS[step.op].reduces or step.op == "spread" for step in kernel.steps):
        return kernel, tuple(sources)
    for dim in reversed(range(len(kernel.space) - 1)):
        counted = any(step.op == "iota" and step.attributes == (dim,) for step in kernel.steps)
        if counted and 1 < kernel.space[dim] <= MOST_PARTS:
            unrolled = _DimUnrolling(kernel, sources, dim).kernel()
            if unrolled is not None and _bytes_loaded(unrolled[0]) < WORTHWHILE * _bytes_loaded(kernel):
                kernel, sources = unrolled
    return kernel, tuple(sources)


def _bytes_loaded(kernel: Kernel) -> int:
    """Bytes that programs load of inputs that vary along both rows and columns."""
    tensors = [tensor for index, tensor in enumerate(kernel.inputs) if kernel.kind(index) == "full"]
    return sum(tensor.dtype.itemsize for tensor in tensors) * math.prod(kernel.space)


class _NotUnrollable(Exception):  # noqa: N818  (control flow, not an error)
    """The kernel cannot be unrolled along this dim."""


class _DimUnrolling(Generic[SourceKey]):
    def __init__(self, kernel: Kernel, sources: Sequence[SourceKey], dim: int) -> None:
        self.old, self.sources, self.dim = kernel, sources, dim
        self.inputs: dict[tuple[SourceKey, Input], int] = {}
        self.steps: dict[KernelStep, int] = {}
        self.classes: list[Class] = []  # of inputs, then steps
        self.copies = [
            [self._input(index, part) for index in range(len(kernel.inputs))] for part in range(kernel.space[dim])
        ]

    def kernel(self) -> tuple[Kernel, tuple[SourceKey, ...]] | None:
        old, dim = self.old, self.dim
        try:
            for part, values in enumerate(self.copies):
                for step in old.steps:
                    values.append(self._step(step, part, old.classes[len(values)]))
            outputs = [
                replace(o, stores=tuple(s for store in o.stores for s in self._stores(store))) for o in old.outputs
            ]
        except _NotUnrollable:
            return None
        new = {value: Ref(position) for position, value in enumerate(self._live_values(outputs))}
        read = [key for key, position in self.inputs.items() if position in new]
        if not read:
            return None
        steps = tuple(
            replace(step, operands=tuple(new[o.index] if isinstance(o, Ref) else o for o in step.operands))
            for step, position in self.steps.items()
            if position in new
        )
        stored = tuple(
            replace(output, stores=tuple(replace(s, value=new[s.value.index]) for s in output.stores))
            for output in outputs
        )
        space = (*old.space[:dim], *old.space[dim + 1 :])
        unrolled = Kernel(old.name, space, tuple(tensor for _, tensor in read), steps, stored)
        return unrolled, tuple(source for source, _ in read)

    def _live_values(self, outputs: Sequence[Output]) -> list[int]:
        """The values that outputs depend on, in order."""
        steps = {index: step for step, index in self.steps.items()}
        live, todo = set[int](), [store.value.index for output in outputs for store in output.stores]
        while todo:
            value = todo.pop()
            if value not in live:
                live.add(value)
                todo += value_operands(steps[value]) if value in steps else ()
        return sorted(live)

    def _access_map(self, walk: AccessMap, part: int) -> AccessMap:
        before, stride, after = walk.strides[: self.dim], walk.strides[self.dim], walk.strides[self.dim + 1 :]
        return AccessMap(walk.offset + part * stride, (*before, *after))

    def _input(self, index: int, part: int) -> Operand:
        tensor = self.old.inputs[index]
        key = (self.sources[index], replace(tensor, access_map=self._access_map(tensor.access_map, part)))
        return self._shared_ref(self.inputs, key, len(self.inputs), self.old.classes[index])

    def _shared_ref(self, table: dict[Any, int], key: Hashable, index: int, value_class: Class) -> Ref:
        if key not in table:
            table[key] = index
            self.classes.append(value_class)
        return Ref(table[key])

    def _stores(self, store: OutputStore) -> list[OutputStore]:
        """One store for each part; a value that is the same in all parts is stored once."""
        copies = self.old.space[self.dim] if store.access_map.strides[self.dim] else 1
        stores: list[OutputStore] = []
        for part in range(copies):
            value = self.copies[part][store.value.index]
            if not isinstance(value, Ref):
                raise _NotUnrollable
            stores.append(OutputStore(value, self._access_map(store.access_map, part)))
        return stores

    def _step(self, step: KernelStep, part: int, value_class: Class) -> Operand:
        """The step's operand in one part: a literal if it can be folded."""
        operands = tuple(self.copies[part][o.index] if isinstance(o, Ref) else o for o in step.operands)
        attributes = step.attributes
        if step.op == "iota":
            if attributes == (self.dim,):
                return part
            attributes = (attributes[0] - (attributes[0] > self.dim),)
        elif step.op == "uniform":
            if attributes[1 + self.dim]:
                raise _NotUnrollable
            attributes = (*attributes[: 1 + self.dim], *attributes[2 + self.dim :])
        elif not any(isinstance(o, Ref) for o in operands):
            return _fold_constant(step, cast("Sequence[float]", operands), self.old.is_float64)
        elif step.op == "where" and not isinstance(operands[0], Ref):
            return self._as_class(operands[1] if operands[0] else operands[2], value_class)
        elif step.op == "add" and any(not isinstance(o, Ref) and o == 0 for o in operands):
            return self._as_class(next(o for o in operands if isinstance(o, Ref)), value_class)
        copy = KernelStep(step.op, operands, attributes, step.dtype)
        return self._shared_ref(self.steps, copy, len(self.classes), value_class)

    def _as_class(self, operand: Operand, value_class: Class) -> Operand:
        """An operand as a value of a class."""
        if not isinstance(operand, Ref):
            return {"f": float, "i": int, "b": bool}[value_class](operand)
        if self.classes[operand.index] != value_class:
            raise _NotUnrollable  # it would need a conversion
        return operand


def _fold_constant(step: KernelStep, operands: Sequence[float | int | bool], double: bool) -> float | int | bool:
    """The result of a step on literals, computed as the reference does."""
    wide = torch.float64 if double else torch.float32
    dtypes = {"f": wide, "i": torch.int64, "b": torch.bool}
    if step.op == "cast":
        assert step.dtype is not None
        value = torch.tensor(operands[0], dtype=dtypes[literal_class(operands[0])]).to(step.dtype)
        return (value.to(wide) if step.dtype.is_floating_point else value).item()
    op = OPS[step.op]
    common = common_class(op, [literal_class(o) for o in operands])
    letters = [common if letter in "na" else cast("Class", letter) for letter in op.operands]
    tensors = [torch.tensor(o, dtype=dtypes[letter]) for o, letter in zip(operands, letters, strict=True)]
    return op.torch(*tensors).item()
