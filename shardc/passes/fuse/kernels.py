"""A cluster as a kernel of the generator's: its tensors with their walks, its steps, what it stores.

A kernel's floats are float32 and its integers int64 whatever the graph's dtypes are, and where that could be told the
graph's dtypes come back, by casts. Arithmetic on narrower integers wraps. And what jumps, a comparison or a floor,
jumps where it would in eager torch: of a 16-bit value of the graph it sees what is rounded, infinite where that is.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import fx

from kernels_triton.fused.behind import padded
from kernels_triton.fused.kernel import Input, Kernel, Output, Ref, Step, Store, Walk
from kernels_triton.fused.kernel import Operand as Argument
from kernels_triton.fused.naming import named
from kernels_triton.fused.simplify import simplified
from kernels_triton.fused.unrolled import unrolled
from kernels_triton.templates.match import found as matched
from shardc.ir.graph import Graph, op_name, producer, type_of
from shardc.passes.fuse.memory_of import Memories
from shardc.passes.fuse.spaces import Demand, Prim, Read, Space, Strides, Value, along, space

WRAPS = {"add", "sub", "mul", "neg", "abs", "square", "floordiv", "bitnot", "shl"}
JUMPS = {"eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil"}


@dataclass(frozen=True)
class Made:
    """A kernel, the values that it reads as they come, and those that it makes."""

    kernel: Kernel
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass
class _Writer:
    memories: Memories
    graph: Graph
    space: Space
    inputs: dict[tuple[fx.Node, int, Strides], Input] = field(default_factory=dict)  # type: ignore[type-arg]
    numbers: dict[tuple[fx.Node, int, Strides], int] = field(default_factory=dict)  # type: ignore[type-arg]
    steps: list[Step] = field(default_factory=list[Step])
    known: dict[Step, int] = field(default_factory=dict[Step, int])
    values: dict[Value, Argument] = field(default_factory=dict[Value, Argument])
    parts: dict[Value, list[tuple[Argument, Walk]]] = field(default_factory=dict)  # type: ignore[type-arg]

    def load(self, read: Read, own: Strides) -> Argument:
        if read.value in self.values:
            return self.values[read.value]
        assert isinstance(read.value, fx.Node)
        strides = along(read.blocks, self.space.dims, own)
        assert strides is not None, read
        key = (read.value, read.offset, strides)
        if key not in self.inputs:
            shape = type_of(read.value).local_shape(self.graph.mesh)
            if read.value in self.memories.permuted:
                shape = tuple(shape[d] for d in self.memories.permuted[read.value])
            self.numbers[key] = len(self.inputs)
            self.inputs[key] = Input(type_of(read.value).dtype, shape, Walk(read.offset, strides))
        return Ref(-1 - self.numbers[key])  # counted from the end until all inputs are known

    def step(self, op: str, *operands: Argument, dtype: torch.dtype | None = None, more: tuple[int, ...] = ()) -> Ref:
        step = Step(op, operands, more, dtype)
        if step not in self.known:
            self.known[step] = len(self.steps)
            self.steps.append(step)
        return Ref(self.known[step])

    def write(self, prim: Prim) -> None:
        if prim.op == "cat":
            own = self.space.runs[prim.out]
            strides = along(prim.index, self.space.dims, own)
            assert strides is not None
            parts = [self.load(a, own) if isinstance(a, Read) else a for a in prim.args]
            walks = [Walk(at * prim.seed, strides) for at in range(len(parts))]
            self.parts[prim.out] = list(zip(parts, walks, strict=True))  # type: ignore[arg-type]
        else:
            self.values[prim.out] = self._value(prim)

    def _value(self, prim: Prim) -> Argument:
        own = self.space.runs[prim.out]
        args: list[Argument] = [self.load(a, own) if isinstance(a, Read) else a for a in prim.args]  # type: ignore[misc]
        if prim.op in JUMPS or (prim.op == "cast" and not prim.dtype.is_floating_point):
            args = [self.rounded(of, a) if isinstance(of, Read) else a for of, a in zip(prim.args, args, strict=True)]
        match prim.op:
            case "same":
                return args[0] if isinstance(args[0], Ref) else self.step("cast", args[0], dtype=prim.dtype)
            case "cast":
                return self.step("cast", args[0], dtype=prim.dtype)
            case "iota":
                return self._index(prim, own)
            case "uniform":
                strides = along(prim.index, self.space.dims, own)
                assert strides is not None
                return self.step("uniform", *args, more=(prim.seed, *strides))
            case "sum" | "max" | "min" | "prod":  # of the columns, then of the rows
                value, made, batch = args[0], self.space.walks[prim.out], self.space.batch
                if own[-1] and not made[-1]:
                    value = self.step(f"r{prim.op}", value)
                return self.step(f"c{prim.op}", value) if any(own[batch:-1]) else value
            case _:
                made = self.step(prim.op, *args)
                narrow = not prim.dtype.is_floating_point and prim.dtype != torch.int64
                return self.step("cast", made, dtype=prim.dtype) if narrow and prim.op in WRAPS else made

    def rounded(self, read: Read, argument: Argument) -> Argument:
        """A value of the graph as eager torch has it: what is loaded was rounded when it was stored."""
        loaded = isinstance(argument, Ref) and argument.index < 0
        if loaded or not isinstance(read.value, fx.Node) or not isinstance(argument, Ref):
            return argument
        dtype = type_of(read.value).dtype
        before = self.steps[argument.index]
        if not dtype.is_floating_point or dtype.itemsize > 2 or (before.op == "cast" and before.dtype == dtype):
            return argument
        return self.step("cast", argument, dtype=dtype)

    def _index(self, prim: Prim, own: Strides) -> Argument:
        strides = along(prim.index, self.space.dims, own)
        assert strides is not None
        total: Argument | None = None
        for dim, stride in enumerate(strides):
            if stride:
                at = self.step("iota", more=(dim,))
                at = at if stride == 1 else self.step("mul", at, stride)
                total = at if total is None else self.step("add", total, at)
        return 0 if total is None else total


def kernel(graph: Graph, memories: Memories, prims: Sequence[Prim], wanted: Demand, outputs: Sequence[fx.Node]) -> Made:
    """The kernel that computes `outputs`, which are among what the calls make."""
    found = space(prims, wanted)
    assert found is not None, "a cluster has a space"
    writer = _Writer(memories, graph, found)
    for prim in prims:
        writer.write(prim)
    count = len(writer.inputs)

    def final(argument: Argument) -> Argument:
        if not isinstance(argument, Ref):
            return argument
        return Ref(-1 - argument.index) if argument.index < 0 else Ref(count + argument.index)

    stored: list[list[tuple[Argument, Walk]]] = []
    for value in outputs:
        parts = writer.parts.get(value) or [(writer.values[value], Walk(0, found.walks[value]))]
        # A number is stored like any value.
        made = type_of(value).dtype
        stored.append([(a if isinstance(a, Ref) else writer.step("cast", a, dtype=made), walk) for a, walk in parts])
    stores: list[Output] = []
    for value, parts in zip(outputs, stored, strict=True):
        each = tuple(Store(ref, walk) for a, walk in parts if isinstance(ref := final(a), Ref))
        shape = type_of(value).local_shape(graph.mesh)
        behind = len(each) == 1 and padded(each[0].walk, shape, found.dims)
        stores.append(Output(type_of(value).dtype, shape, each, behind))
    steps = tuple(Step(one.op, tuple(map(final, one.operands)), one.attributes, one.dtype) for one in writer.steps)
    made = Kernel(_name(prims), found.dims, tuple(writer.inputs.values()), steps, tuple(stores), found.batch)
    made, sources = unrolled(made, [node for node, _, _ in writer.inputs])
    return Made(simplified(made), sources, tuple(outputs))


def _name(prims: Iterable[Prim]) -> str:
    nodes = [prim.out for prim in prims if isinstance(prim.out, fx.Node)]
    return named([op_name(producer(node)[0].target) for node in nodes])


class Kernels:
    """Clusters as kernels, a template's with its name. Layers repeat: clusters that differ in names alone are one."""

    def __init__(self, graph: Graph, memories: Memories, templates: Collection[str]) -> None:
        self.graph, self.memories, self.templates = graph, memories, templates
        self.known: dict[Hashable, tuple[Made, list[int]]] = {}

    def of(self, prims: Sequence[Prim], wanted: Demand, outputs: Sequence[fx.Node]) -> Made:
        """As `kernel` has it."""
        numbers: dict[Value, int] = {}
        alike = tuple([self._prim(prim, numbers) for prim in prims])
        key = (alike, wanted, tuple([numbers[value] for value in outputs]), tuple(map(self._value, numbers)))
        if key not in self.known:
            made = self._named(kernel(self.graph, self.memories, prims, wanted, outputs))
            self.known[key] = made, [numbers[value] for value in made.inputs]
        made, read = self.known[key]
        values = list(numbers)
        return replace(made, inputs=tuple([cast("fx.Node", values[at]) for at in read]), outputs=tuple(outputs))

    def _named(self, made: Made) -> Made:
        """A kernel that is one of the templates has its name."""
        match = matched(made.kernel)
        if match is None or match.template.name not in self.templates:
            return made
        return replace(made, kernel=replace(made.kernel, name=match.template.name))

    def _prim(self, prim: Prim, numbers: dict[Value, int]) -> Hashable:
        args = tuple(
            [
                (numbers.setdefault(a.value, len(numbers)), a.blocks, a.offset) if isinstance(a, Read) else repr(a)
                for a in prim.args
            ]
        )
        target = producer(prim.out)[0].target if isinstance(prim.out, fx.Node) else None  # which the name tells
        about = (prim.size, prim.dtype, prim.over, prim.cols, prim.seed, prim.index)
        return prim.op, numbers.setdefault(prim.out, len(numbers)), target, args, *about

    def _value(self, value: Value) -> Hashable:
        if not isinstance(value, fx.Node):
            return None
        type = type_of(value)
        return type.dtype, type.local_shape(self.graph.mesh), self.memories.permuted.get(value)
