"""What a call is to a kernel: a few operations of the kernels' own table, on memory instead of tensors.

A lowering takes the call's arguments and says in `Make`'s words what it computes; one line an op:

    @lower(aten.silu.default)
    def silu(m, x): return m.mul(x, m("sigmoid", x))

A call that has no lowering, or whose operands cannot be walked, stays as it is (`unit_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import fx

from kernels_triton.fused.kernel import DTYPES
from shardc.ir.graph import results, type_of
from shardc.passes.fuse.literals import constant
from shardc.passes.fuse.memory_of import Memories, Memory
from shardc.passes.fuse.spaces import Blocks, Demand, Over, Prim, Read, Shape, blocks

aten = torch.ops.aten


class Unfit(Exception):  # noqa: N818  (no error: a lowering's "no")
    """This call is no part of a kernel."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One call of the graph, as a part of a kernel."""

    node: fx.Node
    prims: tuple[Prim, ...]
    demand: Demand
    reads: frozenset[fx.Node] = field(init=False)  # the values of the graph whose memory it reads

    def __post_init__(self) -> None:
        made = [prim.out for prim in self.prims]
        every = [read.value for prim in self.prims for read in prim.reads]
        reads = frozenset([value for value in every if isinstance(value, fx.Node) and value not in made])
        object.__setattr__(self, "reads", reads)

    @property
    def double(self) -> bool:
        """Does it compute in float64? Kernels do, where all their tensors are of it. So does what tells float64 values
        apart, whatever it yields: in float32, 1 + 1e-12 is no more than 1."""
        for prim in self.prims:
            if prim.dtype == torch.float64 or (not prim.dtype.is_floating_point and any(map(_is_double, prim.reads))):
                return True
        return False


def _is_double(read: Read) -> bool:
    return isinstance(read.value, fx.Node) and type_of(read.value).dtype == torch.float64


class Inner(NamedTuple):
    """A value that only a kernel knows: number `at` of those that a call needs on the way."""

    node: fx.Node
    at: int


Operand = fx.Node | Inner | float | int | bool
Lower = Callable[..., Operand | tuple[Operand | None, ...]]
LOWERINGS: dict[Any, Lower] = {}


def lower(*ops: Any) -> Callable[[Lower], Lower]:
    def add(lowering: Lower) -> Lower:
        LOWERINGS.update(dict.fromkeys(ops, lowering))
        return lowering

    return add


class Make:
    """Writes down the operations of one call. Operands are tensors of the graph, values made here, and numbers."""

    def __init__(self, memories: Memories, node: fx.Node) -> None:
        self.memories, self.node = memories, node
        self.prims: list[Prim] = []
        self.shapes: dict[Inner, Shape] = {}
        self.dtypes: dict[Inner, torch.dtype] = {}
        found = next((value for value in results(node) if value is not None), None)
        self.shape: Shape = memories.of[found].shape if found is not None else ()
        self.dtype = type_of(found).dtype if found is not None else torch.float32

    def __call__(
        self,
        op: str,
        *args: Operand | Read,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> Inner:
        shape = self.shape if shape is None else shape
        return self._put(op, tuple(self.read(arg, shape) for arg in args), shape, math.prod(shape), dtype, **fields)

    def reduce(
        self,
        op: str,
        x: Operand,
        over: Over,
        shape: Shape,
        cols: int = 0,
        order: Sequence[int] | None = None,
        index: Blocks = (),
        dtype: torch.dtype | None = None,
    ) -> Inner:
        """A reduction of x to `shape`, x's dims in some order; `index`: where in the result each element goes."""
        own = self.shape_of(x)
        read = self.read(x, own) if order is None else self.ordered(x, order)
        return self._put(op, (read,), shape, math.prod(own), dtype, over=over, cols=cols, index=index)

    def order(self, x: Operand) -> list[int]:
        """The dims of x as they lie in memory, the outermost first, if each lies somewhere."""
        shape = self.shape_of(x)
        if not isinstance(x, fx.Node) or constant(x) is not None:
            return list(range(len(shape)))
        strides = self.memories.of[x].strides
        if any(n > 1 and not step for n, step in zip(shape, strides, strict=True)):
            return list(range(len(shape)))
        return sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else 0, d))

    def ordered(self, x: Operand, order: Sequence[int]) -> Read | float | int | bool:
        """The elements of x, its dims in another order than its own."""
        read = self.read(x, self.shape_of(x))
        if list(order) == sorted(order) or not isinstance(read, Read):
            return read
        memory = self._memory(x)
        shape, strides = (tuple(each[d] for d in order) for each in (memory.shape, memory.strides))
        return Read(memory.base, blocks(shape, strides), memory.offset)

    def numbered(self, shape: Shape, index: Blocks) -> Inner:
        """Numbers, as a walk through the elements of a tensor counts; not a single one, which would be a literal."""
        if not any(stride for _, stride in index):
            raise Unfit
        return self._put("iota", (), shape, math.prod(shape), torch.int64, index=index)

    def spread(self, x: Operand, dim: int, times: int) -> Read:
        """The elements of x over a tensor whose `dim` is so many times as long: the same in each part of it."""
        memory = self._memory(x)
        shape = (*memory.shape[:dim], times, *memory.shape[dim:])
        strides = (*memory.strides[:dim], 0, *memory.strides[dim:])
        return Read(memory.base, blocks(shape, strides), memory.offset)

    def halves(self, x: Operand, dim: int, times: int = 1) -> tuple[Read, Read]:
        """Both halves of x along a dim, each `times` times, one after another along it."""
        memory = self._memory(x)
        dim %= len(memory.shape)
        step, half = memory.strides[dim], memory.shape[dim] // 2
        shape = (*memory.shape[:dim], times, half, *memory.shape[dim + 1 :])
        own = blocks(shape, (*memory.strides[:dim], 0, *memory.strides[dim:]))
        return Read(memory.base, own, memory.offset), Read(memory.base, own, memory.offset + half * step)

    def repeated(self, x: Operand, times: Sequence[int]) -> Read:
        """x repeated along each dim, new ones in front."""
        memory = self._memory(x)
        more = len(times) - len(memory.shape)
        shape, strides = (*[1] * more, *memory.shape), (*[0] * more, *memory.strides)
        each = [pair for n, own in zip(times, shape, strict=True) for pair in (n, own)]
        steps = [pair for step in strides for pair in (0, step)]
        return Read(memory.base, blocks(tuple(each), tuple(steps)), memory.offset)

    def _memory(self, x: Operand) -> Memory:
        if not isinstance(x, fx.Node) or constant(x) is not None or type_of(x).dtype not in DTYPES:
            raise Unfit
        if not self.memories.readable(x):
            raise Unfit
        return self.memories.of[x]

    def seen(self, x: Operand) -> Operand:
        """x as eager torch sees it: a 16-bit value of the graph is rounded."""
        narrow = isinstance(x, fx.Node) and self.dtype_of(x).is_floating_point and self.dtype_of(x).itemsize == 2
        return self("cast", x, shape=self.shape_of(x), dtype=self.dtype_of(x)) if narrow else x

    def placed(self, x: Inner, order: Sequence[int]) -> Inner:
        """x, whose dims are the result's in another order, where the result has them."""
        own, steps = self.shapes[x], [math.prod(self.shape[d + 1 :]) for d in order]
        return self._put("cat", (self.read(x, own),), self.shape, math.prod(own), None, index=blocks(own, tuple(steps)))

    def spread_over(self, x: Operand, own: Shape, shape: Shape) -> Read | float | int | bool:
        """The elements of x in order, as those of a tensor of the shape `own`, which is broadcast to `shape`."""
        if isinstance(x, fx.Node) and constant(x) is None:
            memory = self.memories.of[x]
            whole = blocks((math.prod(memory.shape),), (1,))
            if not self.memories.readable(x) or blocks(memory.shape, memory.strides) not in (whole, ((1, 0),)):
                raise Unfit
            steps = tuple(math.prod(own[i + 1 :]) if n > 1 else 0 for i, n in enumerate(own))
            return Read(memory.base, blocks(shape, steps), memory.offset)
        return self.read(x, shape)

    def side_by_side(self, tensors: Sequence[Operand], dim: int) -> Inner:
        """Tensors of one shape, joined along a dim: each stored in its place."""
        part = self.shape_of(tensors[0])
        steps = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        apart = part[dim] * steps[dim]
        reads = tuple(self.read(x, part) for x in tensors)
        if not all(isinstance(one, Read) for one in reads):
            raise Unfit  # a kernel computes all that it stores
        return self._put("cat", reads, self.shape, math.prod(part), None, index=blocks(part, steps), seed=apart)

    def before_zeros(self, x: Operand) -> Inner:
        """A tensor whose rows go on with zeros: stored in its place, and nothing in the kernel reads it."""
        part, steps = self.shape_of(x), tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        read = self.read(x, part)
        if not isinstance(read, Read):
            raise Unfit
        return self._put("cat", (read,), self.shape, math.prod(part), None, index=blocks(part, steps))

    def _put(
        self, op: str, args: tuple[Any, ...], shape: Shape, size: int, dtype: torch.dtype | None, **fields: Any
    ) -> Inner:
        if op != "iota" and not any(isinstance(arg, Read) for arg in args):
            raise Unfit  # of numbers alone
        made = Inner(self.node, len(self.prims))
        self.prims.append(Prim(made, op, args, size, dtype or self.dtype, **fields))
        self.shapes[made], self.dtypes[made] = shape, dtype or self.dtype
        return made

    # ------------------------------------------------------------------ operands
    def read(self, arg: Operand | Read, shape: Shape) -> Read | float | int | bool:
        if isinstance(arg, (bool, int, float, Read)):
            return arg
        if isinstance(arg, Inner):
            own = self.shapes[arg]
            missing = len(shape) - len(own)
            steps = [math.prod(own[i + 1 :]) if n > 1 else 0 for i, n in enumerate(own)]
            if missing < 0 or any(n not in (1, want) for n, want in zip(own, shape[missing:], strict=True)):
                raise Unfit
            return Read(arg, blocks(shape, (*[0] * missing, *steps)))
        if (number := constant(arg)) is not None:
            return number
        if type_of(arg).dtype not in DTYPES or not self.memories.readable(arg):
            raise Unfit
        found = self.memories.of[arg].read(shape)
        if found is None:
            raise Unfit
        return found

    def shape_of(self, arg: Operand) -> Shape:
        if isinstance(arg, Inner):
            return self.shapes[arg]
        return self.memories.of[arg].shape if isinstance(arg, fx.Node) else ()

    def dtype_of(self, arg: Operand) -> torch.dtype:
        if isinstance(arg, Inner):
            return self.dtypes[arg]
        if isinstance(arg, fx.Node):
            return type_of(arg).dtype
        return torch.bool if isinstance(arg, bool) else torch.int64 if isinstance(arg, int) else torch.float32

    def floating(self, *args: Operand) -> None:
        """This lowering is for floats alone."""
        if not all(self.dtype_of(arg).is_floating_point for arg in args if not isinstance(arg, (int, float))):
            raise Unfit

    def alike(self, *args: Operand) -> tuple[Operand, ...]:
        """Integers that are compared or chosen from, in the dtype that torch takes them to: a number wraps in it."""
        numbers = {at: n for at, a in enumerate(args) if (n := self._number(a)) is not None}
        tensors = [arg for at, arg in enumerate(args) if at not in numbers]
        ranked = [t for t in tensors if self.shape_of(t)] or tensors
        floats = any(self.dtype_of(arg).is_floating_point for arg in args)
        common = reduce(torch.promote_types, map(self.dtype_of, ranked), torch.bool)
        if floats or common == torch.bool:
            return args
        if any(torch.promote_types(self.dtype_of(t), common) != common for t in tensors):
            raise Unfit
        size = 1 << 8 * common.itemsize
        least = torch.iinfo(common).min
        return tuple(
            (n - least) % size + least if type(n := numbers.get(at)) is int else arg for at, arg in enumerate(args)
        )

    def compared(self, a: Operand, b: Operand) -> tuple[Operand, ...]:
        """Floats that are compared, in the dtype that torch takes them to: that of 16 bits, or of fewer than it has, to
        which a tensor of no dims goes."""
        like = [torch.empty((1,) * len(self.shape_of(x)), dtype=self.dtype_of(x), device="meta") for x in (a, b)]
        common = torch.result_type(like[0], like[1])

        def taken(x: Operand) -> Operand:
            number = constant(x) if isinstance(x, fx.Node) and not self.shape_of(x) else None
            if number is not None and common.itemsize == 2 and common.is_floating_point:
                return float(torch.tensor(number, dtype=common))
            other = isinstance(x, fx.Node) and constant(x) is None and self.dtype_of(x) != common
            narrower = common.is_floating_point and (common.itemsize == 2 or self.dtype_of(x) == torch.float64)
            return self("cast", x, shape=self.shape_of(x), dtype=common) if other and narrower else x

        return taken(a), taken(b)

    def _number(self, arg: Operand) -> float | int | bool | None:
        """A literal, or the one element of a constant tensor of no dims."""
        if isinstance(arg, fx.Node):
            return None if self.shape_of(arg) else constant(arg)
        return None if isinstance(arg, Inner) else arg

    # ------------------------------------------------------------------ the commonest
    def add(self, a: Operand, b: Operand) -> Inner:
        return self("add", a, b)

    def sub(self, a: Operand, b: Operand) -> Inner:
        return self("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> Inner:
        return self("mul", a, b)

    def div(self, a: Operand, b: Operand) -> Inner:
        return self("div", a, b)

    def less(self, a: Operand, b: Operand) -> Inner:
        return self("lt", a, b, dtype=torch.bool)

    def more(self, a: Operand, b: Operand) -> Inner:
        return self("gt", a, b, dtype=torch.bool)

    def at_most(self, a: Operand, b: Operand) -> Inner:
        return self("le", a, b, dtype=torch.bool)

    def choose(self, condition: Operand, a: Operand, b: Operand) -> Inner:
        return self("where", condition, a, b)

    def limited(self, x: Operand, low: float, high: float) -> Inner:
        return self("minimum", self("maximum", x, float(low)), float(high))
