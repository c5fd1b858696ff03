"""A lowered call: a few operations of the kernels' own table, on memory instead of tensors.

A lowering takes the call's arguments and writes its operations with a `LoweringBuilder`; one line an op:

    @lower(aten.silu.default)
    def silu(m, x): return m.mul(x, m("sigmoid", x))

A call that has no lowering, or whose operands a kernel cannot read, stays a call (`lower_op`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import fx

from kernels_triton.ir.kernel import DTYPES
from shardc.ir.graph import results, type_of
from shardc.passes.fusion.analysis.access import Access, access_of
from shardc.passes.fusion.analysis.constant_values import constant_value
from shardc.passes.fusion.analysis.iteration_space import (
    Over,
    Prim,
    Read,
    Shape,
    SpaceConstraint,
    StridedRuns,
    Value,
    interned,
    strided_runs,
    structure,
)
from shardc.passes.fusion.analysis.view_analysis import StridedView, ViewAnalysis

aten = torch.ops.aten


class NotLowerable(Exception):  # noqa: N818  (not an error: the call stays a call)
    """No kernel can compute this call."""


@dataclass(frozen=True, eq=False)
class LoweredOp:
    """One call of the graph, as operations of a kernel."""

    node: fx.Node
    prims: tuple[Prim, ...]
    constraint: SpaceConstraint
    reads: frozenset[fx.Node] = field(init=False)  # values of the graph
    # Does it compute in float64? A kernel does if all its tensors are float64. So does an operation that compares
    # float64 values, whatever its result: in float32, 1 + 1e-12 equals 1.
    is_float64: bool = field(init=False)

    def __post_init__(self) -> None:
        computed = [prim.out for prim in self.prims]
        read = [read.value for prim in self.prims for read in prim.reads]
        reads = frozenset([value for value in read if isinstance(value, fx.Node) and value not in computed])
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "is_float64", _computes_in_float64(self.prims))

    @cached_property
    def structure(self) -> tuple[object, list[Value]]:
        """An object that is the same for calls whose operations differ in the names of their values only, and the
        values of the graph, what they read first."""
        numbers: dict[Value, int] = {}
        key = structure(self.prims, numbers)
        values: list[Value] = [value for value in numbers if isinstance(value, fx.Node)]
        values.sort(key=self.reads.__contains__, reverse=True)
        return interned(key, tuple([numbers[value] for value in values])), values

    @cached_property
    def access(self) -> Access:
        """How it reads its operands, and what it computes of them."""
        return access_of(self.prims, self.constraint.size)

    def renamed(self, node: fx.Node, names: Mapping[Value, Value]) -> LoweredOp:
        """The same operations for another call. `names` has the new name of every value, temporaries included."""
        op = object.__new__(LoweredOp)
        key, values = self.structure
        values = [names[value] for value in values]
        op.__dict__.update(
            node=node,
            prims=tuple([prim.renamed(names) for prim in self.prims]),
            constraint=self.constraint,
            reads=frozenset(values[: len(self.reads)]),
            is_float64=self.is_float64,
            structure=(key, values),
            access=self.access.renamed(names),
        )
        return op


def _computes_in_float64(prims: Sequence[Prim]) -> bool:
    for prim in prims:
        if prim.dtype is torch.float64 or (not prim.dtype.is_floating_point and any(map(_is_float64, prim.reads))):
            return True
    return False


def _is_float64(read: Read) -> bool:
    return isinstance(read.value, fx.Node) and type_of(read.value).dtype == torch.float64


@dataclass(slots=True, eq=False)
class Temporary:
    """A value inside a kernel, which the graph does not have: an intermediate result of a call, by its number."""

    node: fx.Node
    number: int


Operand = fx.Node | Temporary | float | int | bool
Lowering = Callable[..., Operand | tuple[Operand | None, ...]]
LOWERINGS: dict[Any, Lowering] = {}


def lower(*ops: Any) -> Callable[[Lowering], Lowering]:
    def add(lowering: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(ops, lowering))
        return lowering

    return add


class LoweringBuilder:
    """Collects the operations of one call. Operands are values of the graph, temporaries, and numbers."""

    def __init__(self, views: ViewAnalysis, node: fx.Node) -> None:
        self.views, self.node = views, node
        self.prims: list[Prim] = []
        self.shapes: dict[Temporary, Shape] = {}
        self.dtypes: dict[Temporary, torch.dtype] = {}
        result = next((value for value in results(node) if value is not None), None)
        self.shape: Shape = views.of[result].shape if result is not None else ()
        self.dtype = type_of(result).dtype if result is not None else torch.float32

    def __call__(
        self,
        op: str,
        *args: Operand | Read,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> Temporary:
        shape = self.shape if shape is None else shape
        return self._append(op, tuple(self.read(arg, shape) for arg in args), shape, math.prod(shape), dtype, **fields)

    def reduce(
        self,
        op: str,
        x: Operand,
        over: Over,
        shape: Shape,
        cols: int = 0,
        order: Sequence[int] | None = None,
        index: StridedRuns = (),
        dtype: torch.dtype | None = None,
    ) -> Temporary:
        """Reduce x to `shape`, with x's dims in the given order; `index`: to which element of the result each goes."""
        operand_shape = self.shape_of(x)
        read = self.read(x, operand_shape) if order is None else self.permuted(x, order)
        return self._append(op, (read,), shape, math.prod(operand_shape), dtype, over=over, cols=cols, index=index)

    def dim_order(self, x: Operand) -> list[int]:
        """The dims of x by their strides, the outermost first; the usual order if x is broadcast."""
        shape = self.shape_of(x)
        if not isinstance(x, fx.Node) or constant_value(x) is not None:
            return list(range(len(shape)))
        strides = self.views.of[x].strides
        if any(n > 1 and not step for n, step in zip(shape, strides, strict=True)):
            return list(range(len(shape)))
        return sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else 0, d))

    def permuted(self, x: Operand, order: Sequence[int]) -> Read | float | int | bool:
        """The elements of x with its dims permuted."""
        read = self.read(x, self.shape_of(x))
        if list(order) == sorted(order) or not isinstance(read, Read):
            return read
        view = self._view(x)
        shape, strides = (tuple(dims[d] for d in order) for dims in (view.shape, view.strides))
        return Read(view.base, strided_runs(shape, strides), view.offset)

    def indices(self, shape: Shape, index: StridedRuns) -> Temporary:
        """An index for each element of a tensor, by strided runs; not a constant one, which would be a literal."""
        if not any(stride for _, stride in index):
            raise NotLowerable
        return self._append("iota", (), shape, math.prod(shape), torch.int64, index=index)

    def tiled(self, x: Operand, dim: int, times: int) -> Read:
        """x repeated `times` times along a dim, block after block."""
        view = self._view(x)
        shape = (*view.shape[:dim], times, *view.shape[dim:])
        strides = (*view.strides[:dim], 0, *view.strides[dim:])
        return Read(view.base, strided_runs(shape, strides), view.offset)

    def halves(self, x: Operand, dim: int, times: int = 1) -> tuple[Read, Read]:
        """Both halves of x along a dim, each repeated `times` times along it."""
        view = self._view(x)
        dim %= len(view.shape)
        step, half = view.strides[dim], view.shape[dim] // 2
        shape = (*view.shape[:dim], times, half, *view.shape[dim + 1 :])
        runs = strided_runs(shape, (*view.strides[:dim], 0, *view.strides[dim:]))
        return Read(view.base, runs, view.offset), Read(view.base, runs, view.offset + half * step)

    def repeated(self, x: Operand, times: Sequence[int]) -> Read:
        """x repeated along each dim, as torch's `repeat`: new dims come first."""
        view = self._view(x)
        more = len(times) - len(view.shape)
        shape, strides = (*[1] * more, *view.shape), (*[0] * more, *view.strides)
        sizes = [size for pair in zip(times, shape, strict=True) for size in pair]
        steps = [step for stride in strides for step in (0, stride)]
        return Read(view.base, strided_runs(tuple(sizes), tuple(steps)), view.offset)

    def _view(self, x: Operand) -> StridedView:
        if not isinstance(x, fx.Node) or constant_value(x) is not None or type_of(x).dtype not in DTYPES:
            raise NotLowerable
        if not self.views.readable(x):
            raise NotLowerable
        return self.views.of[x]

    def as_stored(self, x: Operand) -> Operand:
        """x as eager torch stores it: a 16-bit value of the graph is rounded."""
        narrow = isinstance(x, fx.Node) and self.dtype_of(x).is_floating_point and self.dtype_of(x).itemsize == 2
        return self("cast", x, shape=self.shape_of(x), dtype=self.dtype_of(x)) if narrow else x

    def store_permuted(self, x: Temporary, order: Sequence[int]) -> Temporary:
        """Store x, whose dims are the result's in another order, in the result's order."""
        shape, steps = self.shapes[x], [math.prod(self.shape[d + 1 :]) for d in order]
        return self._append(
            "cat", (self.read(x, shape),), self.shape, math.prod(shape), None, index=strided_runs(shape, tuple(steps))
        )

    def broadcast(self, x: Operand, viewed: Shape, shape: Shape) -> Read | float | int | bool:
        """x viewed with the shape `viewed`, and broadcast to `shape`."""
        if isinstance(x, fx.Node) and constant_value(x) is None:
            view = self.views.of[x]
            whole = strided_runs((math.prod(view.shape),), (1,))
            if not self.views.readable(x) or strided_runs(view.shape, view.strides) not in (whole, ((1, 0),)):
                raise NotLowerable
            steps = tuple(math.prod(viewed[i + 1 :]) if n > 1 else 0 for i, n in enumerate(viewed))
            return Read(view.base, strided_runs(shape, steps), view.offset)
        return self.read(x, shape)

    def concatenate(self, tensors: Sequence[Operand], dim: int) -> Temporary:
        """Concatenate tensors of one shape along a dim: each is stored in its part of the result."""
        part = self.shape_of(tensors[0])
        steps = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        distance = part[dim] * steps[dim]
        reads = tuple(self.read(x, part) for x in tensors)
        if not all(isinstance(read, Read) for read in reads):
            raise NotLowerable  # a kernel stores no literal
        return self._append(
            "cat", reads, self.shape, math.prod(part), None, index=strided_runs(part, steps), seed=distance
        )

    def pad_rows(self, x: Operand) -> Temporary:
        """Store a tensor whose rows are padded with zeros; nothing in the kernel reads the result."""
        part, steps = self.shape_of(x), tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        read = self.read(x, part)
        if not isinstance(read, Read):
            raise NotLowerable
        return self._append("cat", (read,), self.shape, math.prod(part), None, index=strided_runs(part, steps))

    def _append(
        self, op: str, args: tuple[Any, ...], shape: Shape, size: int, dtype: torch.dtype | None, **fields: Any
    ) -> Temporary:
        if op != "iota" and not any(isinstance(arg, Read) for arg in args):
            raise NotLowerable  # its operands are numbers only
        temporary = Temporary(self.node, len(self.prims))
        self.prims.append(Prim(temporary, op, args, size, dtype or self.dtype, **fields))
        self.shapes[temporary], self.dtypes[temporary] = shape, dtype or self.dtype
        return temporary

    # ------------------------------------------------------------------ operands
    def read(self, arg: Operand | Read, shape: Shape) -> Read | float | int | bool:
        if isinstance(arg, (bool, int, float, Read)):
            return arg
        if isinstance(arg, Temporary):
            sizes = self.shapes[arg]
            missing = len(shape) - len(sizes)
            steps = [math.prod(sizes[i + 1 :]) if n > 1 else 0 for i, n in enumerate(sizes)]
            if missing < 0 or any(n not in (1, want) for n, want in zip(sizes, shape[missing:], strict=True)):
                raise NotLowerable
            return Read(arg, strided_runs(shape, (*[0] * missing, *steps)))
        if (number := constant_value(arg)) is not None:
            return number
        if type_of(arg).dtype not in DTYPES or not self.views.readable(arg):
            raise NotLowerable
        read = self.views.of[arg].read(shape)
        if read is None:
            raise NotLowerable
        return read

    def shape_of(self, arg: Operand) -> Shape:
        if isinstance(arg, Temporary):
            return self.shapes[arg]
        return self.views.of[arg].shape if isinstance(arg, fx.Node) else ()

    def dtype_of(self, arg: Operand) -> torch.dtype:
        if isinstance(arg, Temporary):
            return self.dtypes[arg]
        if isinstance(arg, fx.Node):
            return type_of(arg).dtype
        return torch.bool if isinstance(arg, bool) else torch.int64 if isinstance(arg, int) else torch.float32

    def require_floats(self, *args: Operand) -> None:
        """Raise NotLowerable unless all operands are floats."""
        if not all(self.dtype_of(arg).is_floating_point for arg in args if not isinstance(arg, (int, float))):
            raise NotLowerable

    def promoted(self, *args: Operand) -> tuple[Operand, ...]:
        """Integer operands in the dtype to which torch promotes them: a literal wraps in it."""
        literals = {i: n for i, a in enumerate(args) if (n := self._literal(a)) is not None}
        tensors = [arg for i, arg in enumerate(args) if i not in literals]
        ranked = [t for t in tensors if self.shape_of(t)] or tensors
        floats = any(self.dtype_of(arg).is_floating_point for arg in args)
        common = reduce(torch.promote_types, map(self.dtype_of, ranked), torch.bool)
        if floats or common == torch.bool:
            return args
        if any(torch.promote_types(self.dtype_of(t), common) != common for t in tensors):
            raise NotLowerable
        size = 1 << 8 * common.itemsize
        least = torch.iinfo(common).min
        return tuple(
            (n - least) % size + least if type(n := literals.get(i)) is int else arg for i, arg in enumerate(args)
        )

    def comparison_operands(self, a: Operand, b: Operand) -> tuple[Operand, ...]:
        """Float operands of a comparison in the dtype to which torch promotes them. That may be a 16-bit one, or one of
        fewer bits than a tensor without dims has."""
        like = [torch.empty((1,) * len(self.shape_of(x)), dtype=self.dtype_of(x), device="meta") for x in (a, b)]
        common = torch.result_type(like[0], like[1])

        def promoted(x: Operand) -> Operand:
            number = constant_value(x) if isinstance(x, fx.Node) and not self.shape_of(x) else None
            if number is not None and common.itemsize == 2 and common.is_floating_point:
                return float(torch.tensor(number, dtype=common))
            other = isinstance(x, fx.Node) and constant_value(x) is None and self.dtype_of(x) != common
            narrower = common.is_floating_point and (common.itemsize == 2 or self.dtype_of(x) == torch.float64)
            return self("cast", x, shape=self.shape_of(x), dtype=common) if other and narrower else x

        return promoted(a), promoted(b)

    def _literal(self, arg: Operand) -> float | int | bool | None:
        """A literal, or the only element of a constant tensor without dims."""
        if isinstance(arg, fx.Node):
            return None if self.shape_of(arg) else constant_value(arg)
        return None if isinstance(arg, Temporary) else arg

    # ------------------------------------------------------------------ common operations
    def add(self, a: Operand, b: Operand) -> Temporary:
        return self("add", a, b)

    def sub(self, a: Operand, b: Operand) -> Temporary:
        return self("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> Temporary:
        return self("mul", a, b)

    def div(self, a: Operand, b: Operand) -> Temporary:
        return self("div", a, b)

    def less(self, a: Operand, b: Operand) -> Temporary:
        return self("lt", a, b, dtype=torch.bool)

    def greater(self, a: Operand, b: Operand) -> Temporary:
        return self("gt", a, b, dtype=torch.bool)

    def less_equal(self, a: Operand, b: Operand) -> Temporary:
        return self("le", a, b, dtype=torch.bool)

    def where(self, condition: Operand, a: Operand, b: Operand) -> Temporary:
        return self("where", condition, a, b)

    def clamp(self, x: Operand, low: float, high: float) -> Temporary:
        return self("minimum", self("maximum", x, float(low)), float(high))
