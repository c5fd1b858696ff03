"""A kernel is a small program over one iteration space of rows and columns. Each tensor has an access map.

The space has a few batch dims (often none), a few row dims and one column dim; all sizes are static. A tensor is
contiguous in its own shape. Its access map is an offset and one stride for each dim of the space. Stride 0 means that
the value is the same along that dim. So a bias, a transposed operand, one half of a packed operand, or positions that
repeat for each batch differ in numbers only, and need no cases of their own:

    space (4, 128 | 64):  x f32[4, 128, 64]            offset 0,  strides (8192, 64, 1)
                          bias f32[64]                 offset 0,  strides (0, 0, 1)
                          upper half of f32[4,128,128] offset 64, strides (16384, 128, 1)
                          positions f32[128, 64]       offset 0,  strides (0, 64, 1)

Steps are ops of `table`. Their operands are literals or earlier values (inputs first, then steps). Floats are computed
in float32. They are rounded where an output is stored and by `cast`, and nowhere else. To get eager torch's rounding
between two ops, write the cast. (A value that is both stored and used is used unrounded. Where backward reads the
stored value, cast it, so that both see the same number. A kernel whose floats are all float64, such as an optimizer's
scalars, is computed in float64.) `rsum`, `rmax` and `rmin` reduce the columns of a row. `csum` sums a value over all
rows: the result varies along the columns, or is a scalar if the operand is a row value. With batch dims there is one
result for each of their points. A `csum` and everything computed from it is `in_epilogue`: it may use values of batch
dims, columns and scalars, never of rows.

    sums over (0, 2, 3) of NCHW        space (C; N | H W)       csum(rsum(x))       strides of x (HW; CHW | 1)
    sum over 1 of [B, S, H]            space (B; S | H)         csum(x)

Integers are computed in int64. They wrap where they are stored and by `cast`. To wrap integers of a narrower dtype
between two ops, write the cast, as the fusion pass does. The pass also rounds a 16-bit value of the graph before a
discontinuous op (a comparison, a floor), as eager torch does: 300 * 300 in float16 is infinite, not 90000. Other ops on
such a value see it unrounded, so their result may be finite where eager torch overflows.

A kernel checks its space, inputs, steps and outputs when it is constructed. A malformed kernel raises SC531.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from kernels_triton.base.diagnostic import ShardcError, error
from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.row_padding import is_padded_output
from kernels_triton.ir.table import OPS, WIDE, Class, class_of, common_class, literal_class

Kind = Literal["full", "row", "col", "scalar"]
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)

INDEXED = {"iota", "uniform", "spread"}  # they change along dims that no operand says


class Ref(NamedTuple):
    """A reference to a value: input `index`, or step `index - len(inputs)`."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]


Operand = Ref | float | int | bool


@dataclass(frozen=True, slots=True)
class Input:
    dtype: torch.dtype
    shape: tuple[int, ...]
    access_map: AccessMap


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One op of a kernel. `attributes` and `dtype` are for `iota`, `uniform`, `spread` and `cast` (see `table`).

    In Python 1, 1.0 and True are equal, and so are 0.0 and -0.0. Steps with such literals differ: they compute in
    integers, in floats, or with another sign. `literals` keeps them distinct.
    """

    op: str
    operands: tuple[Operand, ...] = ()
    attributes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    literals: tuple[str, ...] = field(init=False, repr=False)
    reads: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the values among the operands

    def __post_init__(self) -> None:
        reads = tuple([o.index for o in self.operands if type(o) is Ref])
        literal = len(reads) < len(self.operands)
        literals = tuple([repr(o) for o in self.operands if type(o) is not Ref]) if literal else ()
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "literals", literals)


def value_operands(step: KernelStep) -> tuple[int, ...]:
    """The values among a step's operands."""
    return step.reads


@dataclass(frozen=True, slots=True)
class OutputStore:
    value: Ref
    access_map: AccessMap


@dataclass(frozen=True, slots=True)
class Output:
    """A fresh contiguous tensor. Exactly one store writes each of its elements; a concatenation has several stores.
    `padded`: its rows end with zeros after the columns (see `row_padding`)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stores: tuple[OutputStore, ...]
    padded: bool = False


@dataclass(frozen=True)
class Kernel:
    """`space` lists the `batch` dims, the row dims, then the columns. A kernel of one dim is flat. `name` is an
    identifier for human readers."""

    name: str
    space: tuple[int, ...]
    inputs: tuple[Input, ...]
    steps: tuple[KernelStep, ...]
    outputs: tuple[Output, ...]
    batch: int = 0
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _zero_unit_strides(self)
        object.__setattr__(
            self, "_hash", hash((self.name, self.space, self.inputs, self.steps, self.outputs, self.batch))
        )
        _check_kernel(self)

    def __hash__(self) -> int:
        return self._hash

    @property
    def rows(self) -> int:
        """The number of rows at each point of the batch dims."""
        return math.prod(self.space[self.batch : -1])

    @property
    def batches(self) -> int:
        return math.prod(self.space[: self.batch])

    @cached_property
    def is_float64(self) -> bool:
        """Whether floats are computed in float64: they are if every floating-point tensor is float64, as an optimizer's
        scalars."""
        tensors = (*self.inputs, *self.outputs)
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        return dtypes == {torch.float64}

    @property
    def cols(self) -> int:
        return self.space[-1]

    def step(self, value: int) -> KernelStep | None:
        """The step that computes a value; None for an input."""
        return self.steps[value - len(self.inputs)] if value >= len(self.inputs) else None

    def values_read(self, value: int) -> tuple[int, ...]:
        step = self.step(value)
        return () if step is None else step.reads

    @cached_property
    def varies(self) -> tuple[tuple[bool, ...], ...]:
        """For each value, the dims of the space along which it may change."""
        dims_of_values: list[tuple[bool, ...]] = []
        for tensor in self.inputs:
            dims_of_values.append(
                tuple(s != 0 and n > 1 for s, n in zip(tensor.access_map.strides, self.space, strict=True))
            )
        for step in self.steps:
            operands = [dims_of_values[v] for v in step.reads]
            reduces = OPS[step.op].reduces
            if operands and not reduces and step.op not in INDEXED and operands.count(operands[0]) == len(operands):
                dims_of_values.append(operands[0])
                continue
            along = [any(each) for each in zip(*operands, strict=True)] if operands else [False] * len(self.space)
            if step.op == "iota":
                along[step.attributes[0]] = True
            elif step.op == "uniform":
                along = [s != 0 or a for s, a in zip(step.attributes[1:], along, strict=True)]
            elif step.op == "spread":
                along = [s != 0 or a for s, a in zip(step.attributes, along, strict=True)]
            elif reduces == "row":
                along[-1] = False
            elif reduces == "col":
                along[self.batch : -1] = [False] * (len(along) - 1 - self.batch)
            dims_of_values.append(tuple(a and n > 1 for a, n in zip(along, self.space, strict=True)))
        return tuple(dims_of_values)

    def varies_by_row(self, value: int) -> bool:
        """Whether a value may change from row to row at one point of the batch dims."""
        return any(self.varies[value][self.batch : -1])

    def kind(self, value: int) -> Kind:
        *rows, col = self.varies[value]
        return "full" if any(rows) and col else "row" if any(rows) else "col" if col else "scalar"

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """For each value its class: float, integer or bool."""
        classes: list[Class] = [class_of(tensor.dtype) for tensor in self.inputs]
        for step in self.steps:
            op = OPS[step.op]
            if step.op == "cast":
                assert step.dtype is not None
                classes.append(class_of(step.dtype))
            elif op.result in ("n", "a"):
                operand_classes: list[Class] = [
                    classes[o.index] if isinstance(o, Ref) else literal_class(o) for o in step.operands
                ]
                classes.append(common_class(op, operand_classes))
            else:
                classes.append(op.result)  # type: ignore[arg-type]
        return tuple(classes)

    @cached_property
    def in_epilogue(self) -> tuple[bool, ...]:
        """For each value, whether it is a sum over rows or is computed from one."""
        flags = [False] * len(self.inputs)
        for step in self.steps:
            is_late = OPS[step.op].reduces == "col"
            for value in step.reads:
                is_late |= flags[value]
            flags.append(is_late)
        return tuple(flags)

    @cached_property
    def level(self) -> tuple[int, ...]:
        """For each value, the length of the longest chain of row reductions that it depends on."""
        levels = [0] * len(self.inputs)
        for number, step in enumerate(self.steps):
            depth = max((levels[v] for v in self.values_read(number + len(self.inputs))), default=0)
            levels.append(depth + (OPS[step.op].reduces == "row"))
        return tuple(levels)

    @property
    def bytes_moved(self) -> int:
        """A lower bound of the memory traffic: each distinct element that is read or written counts once."""
        read = sum(_elements_touched(i.access_map, self.space) * i.dtype.itemsize for i in self.inputs)
        return read + sum(math.prod(o.shape) * o.dtype.itemsize for o in self.outputs)


def _zero_unit_strides(kernel: Kernel) -> None:
    """Sets strides to 0 along dims of size 1, so that equal access maps compare equal."""
    if 1 not in kernel.space:
        return

    def normalised(access_map: AccessMap) -> AccessMap:
        if len(access_map.strides) != len(kernel.space):
            return access_map
        return AccessMap(
            access_map.offset, tuple(s if n > 1 else 0 for s, n in zip(access_map.strides, kernel.space, strict=True))
        )

    inputs = tuple(replace(tensor, access_map=normalised(tensor.access_map)) for tensor in kernel.inputs)
    outputs = tuple(
        replace(output, stores=tuple(replace(s, access_map=normalised(s.access_map)) for s in output.stores))
        for output in kernel.outputs
    )
    object.__setattr__(kernel, "inputs", inputs)
    object.__setattr__(kernel, "outputs", outputs)


def _elements_touched(access_map: AccessMap, space: Sequence[int]) -> int:
    return math.prod(n for s, n in zip(access_map.strides, space, strict=True) if s)


def malformed_kernel(message: str, kernel: str = "") -> ShardcError:
    hint = "compile the program anew: the compiler writes such texts, and this one was changed since"
    return error("SC531", f"{kernel or 'a fused kernel'}: {message}", hint=hint)


def _step_fault(step: KernelStep, index: int, dims: int) -> str:
    """What is wrong with step `index` by itself; "" if nothing is. Kernels have many steps, so a message is formatted
    only when it is needed."""
    op = OPS.get(step.op)
    if op is None:
        return f"no op {step.op!r}"
    if len(step.operands) != len(op.operands):
        return f"{step.op} takes {len(op.operands)} operands"
    operands = step.reads
    for value in operands:
        if not 0 <= value < index:
            return f"{step.op} reads a value that is not there yet"
    if not operands and op.operands:
        return f"{step.op} of literals"
    if step.op == "uniform" and not isinstance(step.operands[0], Ref):
        return "a seed that is a literal"
    if (step.op == "cast") != (step.dtype is not None):
        return "a cast, and nothing else, has a dtype"
    if step.dtype is not None and step.dtype not in DTYPES:
        return f"a cast to {step.dtype}"
    count = 0 if step.op not in INDEXED else {"iota": 1, "uniform": 1 + dims, "spread": dims}[step.op]
    if len(step.attributes) != count:
        return f"{step.op} has {count} attributes"
    if step.op == "iota" and not 0 <= step.attributes[0] < dims:
        return "iota along no dim of the space"
    return ""


def _check_kernel(kernel: Kernel) -> None:
    def expect(condition: bool, message: str) -> None:
        if not condition:
            raise malformed_kernel(message, kernel.name)

    expect(kernel.name.isidentifier(), "its name is no identifier")
    expect(bool(kernel.space) and all(n > 0 for n in kernel.space), f"space {list(kernel.space)} is empty")
    expect(0 <= kernel.batch < len(kernel.space), f"{kernel.batch} batch dims of {len(kernel.space)}")
    expect(bool(kernel.inputs), "it has no inputs: nothing says on which device it runs")
    expect(bool(kernel.outputs), "it has no outputs")
    dims = len(kernel.space)
    for index, tensor in enumerate(kernel.inputs):
        if tensor.dtype not in DTYPES:
            raise malformed_kernel(f"%{index} is {tensor.dtype}", kernel.name)
        _check_access_map(kernel, f"%{index}", tensor.access_map, math.prod(tensor.shape))
    for index, step in enumerate(kernel.steps, len(kernel.inputs)):
        if wrong := _step_fault(step, index, dims):
            raise malformed_kernel(f"%{index}: {wrong}", kernel.name)
    if kernel.is_float64:
        # The approximations of functions.py have float32 accuracy only.
        float32_ops = [s.op for s in kernel.steps if OPS[s.op].reduces or OPS[s.op].function not in WIDE]
        expect(not float32_ops, f"{', '.join(float32_ops)} in float64")
    in_epilogue = kernel.in_epilogue
    epilogue = {value for value, is_late in enumerate(in_epilogue) if is_late}
    for index, step in enumerate(kernel.steps, len(kernel.inputs)):
        if epilogue and not epilogue.isdisjoint(step.reads):
            expect(not OPS[step.op].reduces, f"%{index}: {step.op} of a sum over rows")
            for value in (*step.reads, index):
                level = 0 if in_epilogue[value] else kernel.level[value]
                expect(level == 0, f"%{index}: a sum over rows meets a reduction of a row")
                expect(not kernel.varies_by_row(value), f"%{index}: a sum over rows meets a value of rows")
        if step.op == "uniform":
            expect(all(kernel.kind(v) == "scalar" for v in step.reads), f"%{index}: a seed that varies")
        letters = OPS[step.op].operands
        if "b" not in letters and "i" not in letters:
            continue
        for operand, letter in zip(step.operands, letters, strict=True):
            if letter in "bi":
                got = kernel.classes[operand.index] if isinstance(operand, Ref) else literal_class(operand)
                is_accepted = got == letter or (letter == "i" and got == "b")
                expect(is_accepted, f"%{index}: {step.op} of a value of class {got}")
    for index, output in enumerate(kernel.outputs):
        expect(output.dtype in DTYPES, f"output {index} is {output.dtype}")
        covered = 0
        for store in output.stores:
            expect(0 <= store.value.index < len(kernel.varies), f"output {index} stores a value that is not there")
            _check_access_map(kernel, f"output {index}", store.access_map, math.prod(output.shape))
            for along, stride in zip(kernel.varies[store.value.index], store.access_map.strides, strict=True):
                expect(stride != 0 or not along, f"output {index} has one place for several values")
            in_rows = any(s for s in store.access_map.strides[kernel.batch : -1])
            expect(
                not (in_rows and kernel.in_epilogue[store.value.index]),
                f"output {index} has a sum over rows in every row",
            )
            reach = 1
            sizes = [(abs(s), n) for s, n in zip(store.access_map.strides, kernel.space, strict=True) if s]
            for stride, size in sorted(sizes):
                expect(stride >= reach, f"output {index} is written twice")
                reach = stride * (size - 1) + reach
            covered += _elements_touched(store.access_map, kernel.space)
        if output.padded:
            (store, *others) = output.stores
            whole = not others and is_padded_output(store.access_map, output.shape, kernel.space)
            expect(whole, f"output {index} has no rows that end with zeros")
            covered = math.prod(output.shape)
        expect(covered == math.prod(output.shape), f"output {index} is written in part: {covered} elements")


def _check_access_map(kernel: Kernel, what: str, access_map: AccessMap, size: int) -> None:
    if len(access_map.strides) != len(kernel.space):
        raise malformed_kernel(
            f"{what} has {len(access_map.strides)} strides in a space of {len(kernel.space)} dims", kernel.name
        )
    if access_map.first_element(kernel.space) < 0 or access_map.last_element(kernel.space) >= size:
        raise malformed_kernel(f"{what} is walked out of its {size} elements", kernel.name)
