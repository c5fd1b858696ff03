"""Parts of a dim that a kernel tells apart, computed side by side: what the parts share is then read once.

    over (..., 2 | 64)   y = x * cos + where(part == 0, -x.upper, x.lower) * sin      three elements of x for one of y
    over (... | 64)      y.lower = x.lower * cos - x.upper * sin                      two for two
                         y.upper = x.upper * cos + x.lower * sin

A `where` by the number of a part chooses after both of its sides were read. With a copy of the steps for each part that
number is a literal, and what is not chosen is not read. So do rotary embeddings, whose halves are inputs of one tensor,
parts that are joined and then used, and the gradients of parts. `sources` say which inputs are of one tensor; what is
read of it in the same way is one input.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch

from kernels_triton.fused.kernel import Input, Kernel, Operand, Output, Ref, Step, Store, Walk, reads
from kernels_triton.fused.table import OPS, Class, call_class, literal_class

MOST = 4  # parts
LESS = 0.75  # of what was loaded, or it is not worth more steps
Source = TypeVar("Source", bound=Hashable)


def unrolled(kernel: Kernel, sources: Sequence[Source]) -> tuple[Kernel, tuple[Source, ...]]:
    """The kernel, and the sources of its inputs, which may be fewer."""
    padded = any(made.padded for made in kernel.outputs)  # which end with rows of one store
    if kernel.batch or padded or any(OPS[step.op].reduces or step.op == "spread" for step in kernel.steps):
        return kernel, tuple(sources)
    for dim in reversed(range(len(kernel.space) - 1)):
        counted = any(step.op == "iota" and step.attributes == (dim,) for step in kernel.steps)
        if counted and 1 < kernel.space[dim] <= MOST:
            made = _Unrolled(kernel, sources, dim).kernel()
            if made is not None and _loaded(made[0]) < LESS * _loaded(kernel):
                kernel, sources = made
    return kernel, tuple(sources)


def _loaded(kernel: Kernel) -> int:
    """Bytes that its programs load of what varies along rows and columns."""
    full = [given for at, given in enumerate(kernel.inputs) if kernel.kind(at) == "full"]
    return sum(given.dtype.itemsize for given in full) * math.prod(kernel.space)


class _No(Exception):  # noqa: N818  (no error: a kernel's "no")
    """It cannot be written so."""


class _Unrolled(Generic[Source]):
    def __init__(self, kernel: Kernel, sources: Sequence[Source], dim: int) -> None:
        self.old, self.sources, self.dim = kernel, sources, dim
        self.inputs: dict[tuple[Source, Input], int] = {}
        self.steps: dict[Step, int] = {}
        self.classes: list[Class] = []  # of inputs, then steps
        self.copies = [[self._input(at, part) for at in range(len(kernel.inputs))] for part in range(kernel.space[dim])]

    def kernel(self) -> tuple[Kernel, tuple[Source, ...]] | None:
        old, dim = self.old, self.dim
        try:
            for part, values in enumerate(self.copies):
                for step in old.steps:
                    values.append(self._step(step, part, old.classes[len(values)]))
            outputs = [replace(o, stores=tuple(s for one in o.stores for s in self._stores(one))) for o in old.outputs]
        except _No:
            return None
        new = {value: Ref(at) for at, value in enumerate(self._needed(outputs))}
        read = [one for one, at in self.inputs.items() if at in new]
        if not read:
            return None
        steps = tuple(
            replace(step, operands=tuple(new[o.index] if isinstance(o, Ref) else o for o in step.operands))
            for step, at in self.steps.items()
            if at in new
        )
        stored = tuple(
            replace(made, stores=tuple(replace(s, value=new[s.value.index]) for s in made.stores)) for made in outputs
        )
        space = (*old.space[:dim], *old.space[dim + 1 :])
        made = Kernel(old.name, space, tuple(given for _, given in read), steps, stored)
        return made, tuple(source for source, _ in read)

    def _needed(self, outputs: Sequence[Output]) -> list[int]:
        """The values that outputs depend on, in order."""
        steps = {at: step for step, at in self.steps.items()}
        found, todo = set[int](), [store.value.index for made in outputs for store in made.stores]
        while todo:
            value = todo.pop()
            if value not in found:
                found.add(value)
                todo += reads(steps[value]) if value in steps else ()
        return sorted(found)

    def _walk(self, walk: Walk, part: int) -> Walk:
        before, stride, after = walk.strides[: self.dim], walk.strides[self.dim], walk.strides[self.dim + 1 :]
        return Walk(walk.offset + part * stride, (*before, *after))

    def _input(self, at: int, part: int) -> Operand:
        given = self.old.inputs[at]
        key = (self.sources[at], replace(given, walk=self._walk(given.walk, part)))
        return self._known(self.inputs, key, len(self.inputs), self.old.classes[at])

    def _known(self, table: dict[Any, int], key: Hashable, at: int, own: Class) -> Ref:
        if key not in table:
            table[key] = at
            self.classes.append(own)
        return Ref(table[key])

    def _stores(self, store: Store) -> list[Store]:
        """One for each part; what is the same in all of them is stored once."""
        along = self.old.space[self.dim] if store.walk.strides[self.dim] else 1
        found: list[Store] = []
        for part in range(along):
            value = self.copies[part][store.value.index]
            if not isinstance(value, Ref):
                raise _No
            found.append(Store(value, self._walk(store.walk, part)))
        return found

    def _step(self, step: Step, part: int, own: Class) -> Operand:
        """Its value in one part: a number where it can be told."""
        operands = tuple(self.copies[part][o.index] if isinstance(o, Ref) else o for o in step.operands)
        attributes = step.attributes
        if step.op == "iota":
            if attributes == (self.dim,):
                return part
            attributes = (attributes[0] - (attributes[0] > self.dim),)
        elif step.op == "uniform":
            if attributes[1 + self.dim]:
                raise _No
            attributes = (*attributes[: 1 + self.dim], *attributes[2 + self.dim :])
        elif not any(isinstance(o, Ref) for o in operands):
            return _number(step, cast("Sequence[float]", operands), self.old.double)
        elif step.op == "where" and not isinstance(operands[0], Ref):
            return self._as(operands[1] if operands[0] else operands[2], own)
        elif step.op == "add" and any(not isinstance(o, Ref) and o == 0 for o in operands):
            return self._as(next(o for o in operands if isinstance(o, Ref)), own)
        made = Step(step.op, operands, attributes, step.dtype)
        return self._known(self.steps, made, len(self.classes), own)

    def _as(self, operand: Operand, own: Class) -> Operand:
        """An operand for a value of a class."""
        if not isinstance(operand, Ref):
            return {"f": float, "i": int, "b": bool}[own](operand)
        if self.classes[operand.index] != own:
            raise _No  # it would have to be converted
        return operand


def _number(step: Step, operands: Sequence[float | int | bool], double: bool) -> float | int | bool:
    """What a step makes of numbers, as the reference computes it."""
    wide = torch.float64 if double else torch.float32
    words = {"f": wide, "i": torch.int64, "b": torch.bool}
    if step.op == "cast":
        assert step.dtype is not None
        value = torch.tensor(operands[0], dtype=words[literal_class(operands[0])]).to(step.dtype)
        return (value.to(wide) if step.dtype.is_floating_point else value).item()
    op = OPS[step.op]
    common = call_class(op, [literal_class(o) for o in operands])
    letters = [common if letter in "na" else cast("Class", letter) for letter in op.operands]
    given = [torch.tensor(o, dtype=words[letter]) for o, letter in zip(operands, letters, strict=True)]
    return op.torch(*given).item()
