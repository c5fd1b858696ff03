"""A kernel is a small program over one index space of rows and columns, and says how it walks each tensor's memory.

The space is a few batch dims, often none, a few row dims and one column dim, sizes static. A tensor, contiguous in its
own shape, is walked by an offset and one stride a dim of the space; stride 0 means that the value is the same along it.
So a bias, a transposed operand, one half of a packed one, or positions that repeat for each batch are numbers, and not
cases:

    space (4, 128 | 64):  x f32[4, 128, 64]            offset 0,  strides (8192, 64, 1)
                          bias f32[64]                 offset 0,  strides (0, 0, 1)
                          upper half of f32[4,128,128] offset 64, strides (16384, 128, 1)
                          positions f32[128, 64]       offset 0,  strides (0, 64, 1)

Steps are ops of `table` on earlier values (inputs first, then steps) and literals. Floats are computed in float32 and
rounded where an output is stored, and by `cast`, and nowhere else: who wants eager's rounding between two ops writes
the cast. (A value that is stored and used again is used as it was before rounding. Where backward reads what was
stored, cast it, so that both see the same. A kernel whose floats are all float64, numbers of an optimizer's step, is
computed in float64.) `rsum`, `rmax`, `rmin` reduce the columns of a row; `csum` sums a value
over all rows, leaving a value of the columns, or a scalar of a row value; with batch dims, one for each point of these.
What is computed from a `csum` is `late`: it may use values of batch dims, columns and scalars, never of rows.

    sums over (0, 2, 3) of NCHW        space (C; N | H W)       csum(rsum(x))       strides of x (HW; CHW | 1)
    sum over 1 of [B, S, H]            space (B; S | H)         csum(x)

Integers are computed in int64, and wrap where they are stored and by `cast`: who wants those of a narrower dtype to
wrap between two ops writes the cast. So the fusion pass does, and it has what jumps (a comparison, a floor) see a
16-bit value of the graph rounded, as eager torch does: 300 * 300 in float16 is infinite, and not 90000. What is
computed from such a value sees it as it was, and may be finite where eager torch overflows.

Space, inputs, steps and outputs are checked when a kernel is made; what is wrong is SC531.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from kernels_triton.fused.behind import padded
from kernels_triton.fused.table import OPS, WIDE, Class, call_class, class_of, literal_class
from shardc.ir.diagnostic import ShardcError, error

Kind = Literal["full", "row", "col", "scalar"]
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@dataclass(frozen=True, slots=True)
class Walk:
    """Where in a contiguous tensor the element of a point of the space lies: `offset + sum(strides * indices)`."""

    offset: int
    strides: tuple[int, ...]

    def last(self, space: Sequence[int]) -> int:
        """The largest element that is touched."""
        return self.offset + sum(max(s, 0) * (n - 1) for s, n in zip(self.strides, space, strict=True))

    def first(self, space: Sequence[int]) -> int:
        return self.offset + sum(min(s, 0) * (n - 1) for s, n in zip(self.strides, space, strict=True))


def whole(space: Sequence[int], offset: int = 0) -> Walk:
    """Of a tensor that has one element a point of the space, in order."""
    strides = [math.prod(space[i + 1 :]) if n > 1 else 0 for i, n in enumerate(space)]
    return Walk(offset, tuple(strides))


def broadcast(shape: Sequence[int], space: Sequence[int]) -> Walk:
    """Of a tensor whose shape broadcasts to the space, dims aligned at the right as in torch."""
    padded = (*(1,) * (len(space) - len(shape)), *shape)
    assert len(padded) == len(space), (shape, space)
    assert all(n in (1, m) for n, m in zip(padded, space, strict=True)), (shape, space)
    return whole(padded)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value: input `index`, or step `index - len(inputs)`."""

    index: int


Operand = Ref | float | int | bool


@dataclass(frozen=True, slots=True)
class Input:
    dtype: torch.dtype
    shape: tuple[int, ...]
    walk: Walk


@dataclass(frozen=True, slots=True)
class Step:
    """`attributes` and `dtype` are for `iota`, `uniform`, `spread` and `cast` (see `table`). To Python 1, 1.0 and True
    are equal, and so are 0.0 and -0.0: steps with such literals are not, for these compute in integers, in floats and
    with another sign. `literals` tells them apart."""

    op: str
    operands: tuple[Operand, ...] = ()
    attributes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    literals: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "literals", tuple([repr(o) for o in self.operands if not isinstance(o, Ref)]))


def reads(step: Step) -> tuple[int, ...]:
    """The values among a step's operands."""
    return tuple(o.index for o in step.operands if isinstance(o, Ref))


@dataclass(frozen=True, slots=True)
class Store:
    value: Ref
    walk: Walk


@dataclass(frozen=True, slots=True)
class Output:
    """A fresh contiguous tensor, each element of which exactly one store writes: several for a concatenation. `padded`:
    its rows go on with zeros behind the columns, as `behind` says."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stores: tuple[Store, ...]
    padded: bool = False


@dataclass(frozen=True)
class Kernel:
    """`space`: `batch` dims, the row dims, then the columns; a kernel of one dim is flat. `name` is for humans, an
    identifier."""

    name: str
    space: tuple[int, ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    batch: int = 0
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _settle(self)
        object.__setattr__(
            self, "_hash", hash((self.name, self.space, self.inputs, self.steps, self.outputs, self.batch))
        )
        _check(self)

    def __hash__(self) -> int:
        return self._hash

    @property
    def rows(self) -> int:
        """Of each point of the batch dims."""
        return math.prod(self.space[self.batch : -1])

    @property
    def batches(self) -> int:
        return math.prod(self.space[: self.batch])

    @cached_property
    def double(self) -> bool:
        """Are its floats computed in float64? Where all of its tensors' are: the numbers of an optimizer's step."""
        tensors = (*self.inputs, *self.outputs)
        found = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        return found == {torch.float64}

    @property
    def cols(self) -> int:
        return self.space[-1]

    def step(self, value: int) -> Step | None:
        """The step that makes a value; None for an input."""
        return self.steps[value - len(self.inputs)] if value >= len(self.inputs) else None

    def values_read(self, value: int) -> tuple[int, ...]:
        step = self.step(value)
        return () if step is None else reads(step)

    @cached_property
    def varies(self) -> tuple[tuple[bool, ...], ...]:
        """Of each value: along which dims of the space it may change."""
        found: list[tuple[bool, ...]] = []
        for given in self.inputs:
            found.append(tuple(s != 0 and n > 1 for s, n in zip(given.walk.strides, self.space, strict=True)))
        for step in self.steps:
            operands = [found[v] for v in reads(step)]
            along = [any(each) for each in zip(*operands, strict=True)] if operands else [False] * len(self.space)
            if step.op == "iota":
                along[step.attributes[0]] = True
            elif step.op == "uniform":
                along = [s != 0 or a for s, a in zip(step.attributes[1:], along, strict=True)]
            elif step.op == "spread":
                along = [s != 0 or a for s, a in zip(step.attributes, along, strict=True)]
            elif OPS[step.op].reduces == "row":
                along[-1] = False
            elif OPS[step.op].reduces == "col":
                along[self.batch : -1] = [False] * (len(along) - 1 - self.batch)
            found.append(tuple(a and n > 1 for a, n in zip(along, self.space, strict=True)))
        return tuple(found)

    def of_rows(self, value: int) -> bool:
        """May it change from row to row of a point of the batch dims?"""
        return any(self.varies[value][self.batch : -1])

    def kind(self, value: int) -> Kind:
        *rows, col = self.varies[value]
        return "full" if any(rows) and col else "row" if any(rows) else "col" if col else "scalar"

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """Of each value: float, integer or bool."""
        found: list[Class] = [class_of(given.dtype) for given in self.inputs]
        for step in self.steps:
            op = OPS[step.op]
            if step.op == "cast":
                assert step.dtype is not None
                found.append(class_of(step.dtype))
            elif op.result in ("n", "a"):
                classes: list[Class] = [
                    found[o.index] if isinstance(o, Ref) else literal_class(o) for o in step.operands
                ]
                found.append(call_class(op, classes))
            else:
                found.append(op.result)  # type: ignore[arg-type]
        return tuple(found)

    @cached_property
    def late(self) -> tuple[bool, ...]:
        """Of each value: whether it is computed from a sum over rows."""
        found = [False] * len(self.inputs)
        for at, step in enumerate(self.steps):
            read = self.values_read(at + len(self.inputs))
            found.append(OPS[step.op].reduces == "col" or any(found[v] for v in read))
        return tuple(found)

    @cached_property
    def level(self) -> tuple[int, ...]:
        """Of each value: how many reductions of rows, one after another, come before it."""
        found = [0] * len(self.inputs)
        for at, step in enumerate(self.steps):
            before = max((found[v] for v in self.values_read(at + len(self.inputs))), default=0)
            found.append(before + (OPS[step.op].reduces == "row"))
        return tuple(found)

    @property
    def bytes_moved(self) -> int:
        """What the kernel must move at least: each distinct element that it reads or writes, once."""
        read = sum(_touched(i.walk, self.space) * i.dtype.itemsize for i in self.inputs)
        return read + sum(math.prod(o.shape) * o.dtype.itemsize for o in self.outputs)


def _settle(kernel: Kernel) -> None:
    """Along a dim of size 1 every stride is 0, so that equal walks are written in one way."""
    if 1 not in kernel.space:
        return

    def settled(walk: Walk) -> Walk:
        if len(walk.strides) != len(kernel.space):
            return walk
        return Walk(walk.offset, tuple(s if n > 1 else 0 for s, n in zip(walk.strides, kernel.space, strict=True)))

    inputs = tuple(replace(given, walk=settled(given.walk)) for given in kernel.inputs)
    outputs = tuple(
        replace(made, stores=tuple(replace(s, walk=settled(s.walk)) for s in made.stores)) for made in kernel.outputs
    )
    object.__setattr__(kernel, "inputs", inputs)
    object.__setattr__(kernel, "outputs", outputs)


def _touched(walk: Walk, space: Sequence[int]) -> int:
    return math.prod(n for s, n in zip(walk.strides, space, strict=True) if s)


def malformed(message: str, kernel: str = "") -> ShardcError:
    return error("SC531", f"{kernel or 'a fused kernel'}: {message}")


def _wrong(step: Step, at: int, dims: int) -> str:
    """What is wrong with a step by itself, which makes value `at`; "" if nothing is. Kernels have many steps, and
    nothing is put into words before it is needed."""
    op = OPS.get(step.op)
    if op is None:
        return f"no op {step.op!r}"
    if len(step.operands) != len(op.operands):
        return f"{step.op} takes {len(op.operands)} operands"
    read = reads(step)
    if not all(0 <= v < at for v in read):
        return f"{step.op} reads a value that is not there yet"
    if not read and op.operands:
        return f"{step.op} of literals"
    if step.op == "uniform" and not isinstance(step.operands[0], Ref):
        return "a seed that is a literal"
    if (step.op == "cast") != (step.dtype is not None):
        return "a cast, and nothing else, has a dtype"
    if step.dtype is not None and step.dtype not in DTYPES:
        return f"a cast to {step.dtype}"
    count = {"iota": 1, "uniform": 1 + dims, "spread": dims}.get(step.op, 0)
    if len(step.attributes) != count:
        return f"{step.op} has {count} attributes"
    if step.op == "iota" and not 0 <= step.attributes[0] < dims:
        return "iota along no dim of the space"
    return ""


def _check(kernel: Kernel) -> None:
    def expect(condition: bool, message: str) -> None:
        if not condition:
            raise malformed(message, kernel.name)

    expect(kernel.name.isidentifier(), "its name is no identifier")
    expect(bool(kernel.space) and all(n > 0 for n in kernel.space), f"space {list(kernel.space)} is empty")
    expect(0 <= kernel.batch < len(kernel.space), f"{kernel.batch} batch dims of {len(kernel.space)}")
    expect(bool(kernel.inputs), "it has no inputs: nothing says on which device it runs")
    expect(bool(kernel.outputs), "it has no outputs")
    dims = len(kernel.space)
    for at, given in enumerate(kernel.inputs):
        expect(given.dtype in DTYPES, f"%{at} is {given.dtype}")
        _check_walk(kernel, f"%{at}", given.walk, math.prod(given.shape))
    for at, step in enumerate(kernel.steps, len(kernel.inputs)):
        if wrong := _wrong(step, at, dims):
            raise malformed(f"%{at}: {wrong}", kernel.name)
    if kernel.double:
        # What functions.py approximates, it approximates to float32.
        narrow = [s.op for s in kernel.steps if OPS[s.op].reduces or OPS[s.op].function not in WIDE]
        expect(not narrow, f"{', '.join(narrow)} in float64")
    for at, step in enumerate(kernel.steps, len(kernel.inputs)):
        late = any(kernel.late[v] for v in reads(step))
        if late:
            expect(not OPS[step.op].reduces, f"%{at}: {step.op} of a sum over rows")
            for value in (*reads(step), at):
                level = 0 if kernel.late[value] else kernel.level[value]
                expect(level == 0, f"%{at}: a sum over rows meets a reduction of a row")
                expect(not kernel.of_rows(value), f"%{at}: a sum over rows meets a value of rows")
        if step.op == "uniform":
            expect(all(kernel.kind(v) == "scalar" for v in reads(step)), f"%{at}: a seed that varies")
        for operand, letter in zip(step.operands, OPS[step.op].operands, strict=True):
            if letter in "bi":
                got = kernel.classes[operand.index] if isinstance(operand, Ref) else literal_class(operand)
                known = got == letter or (letter == "i" and got == "b")
                expect(known, f"%{at}: {step.op} of a value of class {got}")
    for at, made in enumerate(kernel.outputs):
        expect(made.dtype in DTYPES, f"output {at} is {made.dtype}")
        covered = 0
        for store in made.stores:
            expect(0 <= store.value.index < len(kernel.varies), f"output {at} stores a value that is not there")
            _check_walk(kernel, f"output {at}", store.walk, math.prod(made.shape))
            for along, stride in zip(kernel.varies[store.value.index], store.walk.strides, strict=True):
                expect(stride != 0 or not along, f"output {at} has one place for several values")
            in_rows = any(s for s in store.walk.strides[kernel.batch : -1])
            expect(not (in_rows and kernel.late[store.value.index]), f"output {at} has a sum over rows in every row")
            reach = 1
            sizes = [(abs(s), n) for s, n in zip(store.walk.strides, kernel.space, strict=True) if s]
            for stride, size in sorted(sizes):
                expect(stride >= reach, f"output {at} is written twice")
                reach = stride * (size - 1) + reach
            covered += _touched(store.walk, kernel.space)
        if made.padded:
            (store, *others) = made.stores
            whole = not others and padded(store.walk, made.shape, kernel.space)
            expect(whole, f"output {at} has no rows that end with zeros")
            covered = math.prod(made.shape)
        expect(covered == math.prod(made.shape), f"output {at} is written in part: {covered} elements")


def _check_walk(kernel: Kernel, what: str, walk: Walk, size: int) -> None:
    if len(walk.strides) != len(kernel.space):
        raise malformed(f"{what} has {len(walk.strides)} strides in a space of {len(kernel.space)} dims", kernel.name)
    if walk.first(kernel.space) < 0 or walk.last(kernel.space) >= size:
        raise malformed(f"{what} is walked out of its {size} elements", kernel.name)
