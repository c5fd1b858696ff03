"""Builds the generator's kernel of a fusion group: its inputs with their access maps, its steps, its stores.

A kernel's floats are float32 and its integers int64, whatever the graph's dtypes are. Where the difference could be
observed, casts restore the graph's dtypes. Arithmetic on narrower integers wraps. A discontinuous operation, such as a
comparison or a floor, sees what it would see in eager torch: a 16-bit value of the graph is rounded for it, to infinity
where eager torch overflows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import fx

from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Input, Kernel, KernelStep, Output, OutputStore, Ref
from kernels_triton.ir.kernel import Operand as Argument
from kernels_triton.ir.naming import fused_kernel_name
from kernels_triton.ir.row_padding import is_padded_output
from kernels_triton.match.match import match_template as matched
from kernels_triton.transform.simplify import simplify
from kernels_triton.transform.unroll_dim import unroll_dim
from shardc.ir.graph import Graph, op_name, producer, type_of
from shardc.passes.fusion.analysis.iteration_space import (
    IterationSpace,
    Prim,
    Read,
    SpaceConstraint,
    Strides,
    Value,
    find_space,
    strides_along,
    structure,
)
from shardc.passes.fusion.analysis.view_analysis import ViewAnalysis
from shardc.passes.fusion.lowering.lowering_cache import LoweringCache

WRAPS = {"add", "sub", "mul", "neg", "abs", "square", "floordiv", "bitnot", "shl"}
DISCONTINUOUS = {"eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil"}


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel, the values that are its inputs, in order, and those that are its outputs."""

    kernel: Kernel
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class _Step(NamedTuple):
    """A step of a kernel before its inputs are numbered."""

    op: str
    operands: tuple[Argument, ...]
    attributes: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass
class _KernelWriter:
    """Writes the steps of a kernel, one operation after another."""

    views: ViewAnalysis
    graph: Graph
    iteration_space: IterationSpace
    inputs: dict[tuple[fx.Node, int, Strides], Input] = field(default_factory=dict)  # type: ignore[type-arg]
    numbers: dict[tuple[fx.Node, int, Strides], int] = field(default_factory=dict)  # type: ignore[type-arg]
    steps: list[_Step] = field(default_factory=list[_Step])
    step_numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    values: dict[Value, Argument] = field(default_factory=dict[Value, Argument])
    parts: dict[Value, list[tuple[Argument, AccessMap]]] = field(default_factory=dict)  # type: ignore[type-arg]

    def load(self, read: Read, call_map: Strides) -> Argument:
        if read.value in self.values:
            return self.values[read.value]
        assert isinstance(read.value, fx.Node)
        strides = strides_along(read.runs, self.iteration_space.dims, call_map)
        assert strides is not None, read
        key = (read.value, read.offset, strides)
        if key not in self.inputs:
            shape = type_of(read.value).local_shape(self.graph.mesh)
            if read.value in self.views.permuted:
                shape = tuple(shape[d] for d in self.views.permuted[read.value])
            self.numbers[key] = len(self.inputs)
            self.inputs[key] = Input(type_of(read.value).dtype, shape, AccessMap(read.offset, strides))
        return Ref(-1 - self.numbers[key])  # counted from the end until all inputs are known

    def step(
        self, op: str, *operands: Argument, dtype: torch.dtype | None = None, attributes: tuple[int, ...] = ()
    ) -> Ref:
        # To Python 1 equals True, and 0.0 equals -0.0: literals are compared by their text.
        key = (op, tuple([each if type(each) is Ref else repr(each) for each in operands]), attributes, dtype)
        number = self.step_numbers.setdefault(key, len(self.steps))
        if number == len(self.steps):
            self.steps.append(_Step(op, operands, attributes, dtype))
        return Ref(number)

    def write(self, prim: Prim) -> None:
        if prim.op == "cat":
            call_map = self.iteration_space.call_maps[prim.out]
            strides = strides_along(prim.index, self.iteration_space.dims, call_map)
            assert strides is not None
            parts = [self.load(a, call_map) if isinstance(a, Read) else a for a in prim.args]
            maps = [AccessMap(number * prim.seed, strides) for number in range(len(parts))]
            self.parts[prim.out] = list(zip(parts, maps, strict=True))  # type: ignore[arg-type]
        else:
            self.values[prim.out] = self._value(prim)

    def _value(self, prim: Prim) -> Argument:
        call_map = self.iteration_space.call_maps[prim.out]
        args: list[Argument] = [self.load(a, call_map) if isinstance(a, Read) else a for a in prim.args]  # type: ignore[misc]
        if prim.op in DISCONTINUOUS or (prim.op == "cast" and not prim.dtype.is_floating_point):
            args = [
                self.rounded(read, a) if isinstance(read, Read) else a for read, a in zip(prim.args, args, strict=True)
            ]
        match prim.op:
            case "same":
                return args[0] if isinstance(args[0], Ref) else self.step("cast", args[0], dtype=prim.dtype)
            case "cast":
                return self.step("cast", args[0], dtype=prim.dtype)
            case "iota":
                return self._index(prim, call_map)
            case "uniform":
                strides = strides_along(prim.index, self.iteration_space.dims, call_map)
                assert strides is not None
                return self.step("uniform", *args, attributes=(prim.seed, *strides))
            case "sum" | "max" | "min" | "prod":  # over the columns, then over the rows
                value, space = args[0], self.iteration_space
                if call_map[-1] and not space.access_maps[prim.out][-1]:
                    value = self.step(f"r{prim.op}", value)
                return self.step(f"c{prim.op}", value) if any(call_map[space.batch : -1]) else value
            case _:
                result = self.step(prim.op, *args)
                narrow = not prim.dtype.is_floating_point and prim.dtype != torch.int64
                return self.step("cast", result, dtype=prim.dtype) if narrow and prim.op in WRAPS else result

    def rounded(self, read: Read, argument: Argument) -> Argument:
        """A value of the graph as eager torch has it. A loaded value was rounded when it was stored."""
        loaded = isinstance(argument, Ref) and argument.index < 0
        if loaded or not isinstance(read.value, fx.Node) or not isinstance(argument, Ref):
            return argument
        dtype = type_of(read.value).dtype
        step = self.steps[argument.index]
        if not dtype.is_floating_point or dtype.itemsize > 2 or (step.op == "cast" and step.dtype == dtype):
            return argument
        return self.step("cast", argument, dtype=dtype)

    def _index(self, prim: Prim, call_map: Strides) -> Argument:
        strides = strides_along(prim.index, self.iteration_space.dims, call_map)
        assert strides is not None
        total: Argument | None = None
        for dim, stride in enumerate(strides):
            if stride:
                index = self.step("iota", attributes=(dim,))
                index = index if stride == 1 else self.step("mul", index, stride)
                total = index if total is None else self.step("add", total, index)
        return 0 if total is None else total


def build_kernel(
    graph: Graph, views: ViewAnalysis, prims: Sequence[Prim], constraint: SpaceConstraint, outputs: Sequence[fx.Node]
) -> BuiltKernel:
    """The kernel that computes `outputs`, which are results of `prims`."""
    space = find_space(prims, constraint)
    assert space is not None, "a cluster has a space"
    writer = _KernelWriter(views, graph, space)
    for prim in prims:
        writer.write(prim)
    count = len(writer.inputs)

    def numbered(argument: Argument) -> Argument:
        if not isinstance(argument, Ref):
            return argument
        return Ref(-1 - argument.index) if argument.index < 0 else Ref(count + argument.index)

    stored: list[list[tuple[Argument, AccessMap]]] = []
    for value in outputs:
        parts = writer.parts.get(value) or [(writer.values[value], AccessMap(0, space.access_maps[value]))]
        dtype = type_of(value).dtype  # a literal is stored like any value
        stored.append([(a if isinstance(a, Ref) else writer.step("cast", a, dtype=dtype), to) for a, to in parts])
    kernel_outputs: list[Output] = []
    for value, parts in zip(outputs, stored, strict=True):
        stores = tuple(OutputStore(ref, to) for a, to in parts if isinstance(ref := numbered(a), Ref))
        shape = type_of(value).local_shape(graph.mesh)
        is_padded = len(stores) == 1 and is_padded_output(stores[0].access_map, shape, space.dims)
        kernel_outputs.append(Output(type_of(value).dtype, shape, stores, is_padded))
    steps = tuple(
        KernelStep(each.op, tuple(map(numbered, each.operands)), each.attributes, each.dtype) for each in writer.steps
    )
    kernel = Kernel(_name(prims), space.dims, tuple(writer.inputs.values()), steps, tuple(kernel_outputs), space.batch)
    kernel, sources = unroll_dim(kernel, [node for node, _, _ in writer.inputs])
    return BuiltKernel(simplify(kernel), sources, tuple(outputs))


def _name(prims: Iterable[Prim]) -> str:
    nodes = [prim.out for prim in prims if isinstance(prim.out, fx.Node)]
    return fused_kernel_name([op_name(producer(node)[0].target) for node in nodes])


class KernelCache:
    """The kernels of groups; one that a template matches has the template's name. Layers repeat: groups that differ
    only in the names of their values have one kernel."""

    def __init__(self, graph: Graph, lowerings: LoweringCache, templates: Collection[str]) -> None:
        self.graph, self.lowerings, self.templates = graph, lowerings, templates
        self.kernels: dict[Hashable, tuple[BuiltKernel, list[int]]] = {}

    def build(self, prims: Sequence[Prim], constraint: SpaceConstraint, outputs: Sequence[fx.Node]) -> BuiltKernel:
        """The result of `build_kernel`, built once for groups that differ only in names."""
        numbers: dict[Value, int] = {}
        operations = structure(prims, numbers)
        # Targets are for the name, and hashed by Python: their ids serve as well.
        targets = tuple([id(producer(prim.out)[0].target) for prim in prims if type(prim.out) is fx.Node])
        kinds, kind = self.lowerings.kinds, self.lowerings.kind
        value_kinds = tuple([kinds.get(v) or kind(v) if type(v) is fx.Node else 0 for v in numbers])
        key = (operations, targets, constraint, tuple([numbers[value] for value in outputs]), value_kinds)
        entry = self.kernels.get(key)
        if entry is None:
            built = self._with_template_name(build_kernel(self.graph, self.lowerings.views, prims, constraint, outputs))
            entry = self.kernels[key] = built, [numbers[value] for value in built.inputs]
        built, input_numbers = entry
        values = list(numbers)
        inputs = tuple([cast("fx.Node", values[number]) for number in input_numbers])
        return replace(built, inputs=inputs, outputs=tuple(outputs))

    def _with_template_name(self, built: BuiltKernel) -> BuiltKernel:
        match = matched(built.kernel)
        if match is None or match.template.name not in self.templates:
            return built
        return replace(built, kernel=replace(built.kernel, name=match.template.name))
