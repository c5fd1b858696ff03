"""How an op is written in terms of other ops: one function each, in the table `DECOMPOSITIONS`.

    @decompose(aten.mean.dim)
    def mean(e: Emit, x: Node, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Result:
        return e.div(e.sum(x, dim, keepdim, dtype), count)

A function receives the call's arguments by the schema's order and an `Emit`, which inserts calls before
the one replaced. It returns the value (a tuple for several results, None where one is not needed), or
`KEEP` to leave the call as it is. Types of the new calls are found by running them on meta tensors, and
remembered, so that a repeated layer costs a dictionary lookup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import fx

from shardc.ir.graph import Graph, info, type_of
from shardc.ir.types import TensorType

aten = torch.ops.aten
Node = fx.Node
KEEP: Literal["keep"] = "keep"
Result = Node | tuple[Node | None, ...] | Literal["keep"]
Decomposition = Callable[..., Result]
F = TypeVar("F", bound=Decomposition)
DECOMPOSITIONS: dict[Any, Decomposition] = {}
REMOVED: set[Any] = set()  # ops that never survive: those whose decomposition has no case to keep

HALF = (torch.bfloat16, torch.float16)


def decompose(*ops: Any, sometimes: bool = False) -> Callable[[F], F]:
    """Put a function in the table, under each of the ops; one that may return `KEEP` says `sometimes`."""

    def register(function: F) -> F:
        for op in ops:
            assert op not in DECOMPOSITIONS, f"{op} has a decomposition already"
            DECOMPOSITIONS[op] = function
            if not sometimes:
                REMOVED.add(op)
        return function

    return register


@dataclass
class Emit:
    """Inserts calls before the node being replaced, `at`, in its module and phase; never the same call twice."""

    graph: Graph
    at: Node
    memo: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    seen: dict[Hashable, Node] = field(default_factory=dict[Hashable, Node])
    new_nodes: set[Node] = field(default_factory=set[Node])  # by this decomposition

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        constant = is_constant(target, args, kwargs)
        key = self.key(target, args, kwargs, constant)
        node = self.seen.get(key)
        if node is None:
            type = infer(target, args, kwargs)
            assert isinstance(type, TensorType), f"{target} has several results"
            node = self.graph.call(target, args, kwargs, like=self.at, type=type, results=(), constant=constant)
            self.seen[key] = node
            self.new_nodes.add(node)
        return node

    def key(self, target: Any, args: Any, kwargs: Any, constant: bool) -> Hashable:
        """Calls with the same key may be merged. Merging across phases would undo activation checkpointing."""
        return target, _freeze(args, _itself), _freeze(kwargs, _itself), None if constant else info(self.at).phase

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` yields, remembered for the rest of the graph (nodes come in topological order)."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    # ------------------------------------------------------------------ arithmetic; a number is taken as well
    def add(self, a: Any, b: Any) -> Node:
        return self(aten.add.Tensor, a, b)

    def sub(self, a: Any, b: Any) -> Node:
        return self(aten.sub.Tensor, a, b)

    def mul(self, a: Any, b: Any) -> Node:
        return self(aten.mul.Tensor, a, b)

    def div(self, a: Any, b: Any) -> Node:
        return self(aten.div.Tensor, a, b)

    def neg(self, a: Node) -> Node:
        return self(aten.neg.default, a)

    def exp(self, a: Node) -> Node:
        return self(aten.exp.default, a)

    def log(self, a: Node) -> Node:
        return self(aten.log.default, a)

    def where(self, condition: Node, a: Node, b: Node | float) -> Node:
        if isinstance(b, fx.Node):
            return self(aten.where.self, condition, a, b)
        return self(aten.where.ScalarOther, condition, a, b)

    # ------------------------------------------------------------------ shapes
    def sum(self, x: Node, dim: Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Node:
        """A sum over the given dims; over none of them it is the value itself."""
        dims = canonical_dims(dim, len(shape_of(x)), empty_is_all=False)
        if not dims:
            return self.cast(x, dtype or dtype_of(x))
        return self(aten.sum.dim_IntList, x, dims, keepdim, **({"dtype": dtype} if dtype else {}))

    def view(self, x: Node, shape: Sequence[int]) -> Node:
        return x if shape_of(x) == tuple(shape) else self(aten.view.default, x, list(shape))

    def expand(self, x: Node, shape: Sequence[int]) -> Node:
        return x if shape_of(x) == tuple(shape) else self(aten.expand.default, x, list(shape))

    def along(self, x: Node, dim: int, ndim: int) -> Node:
        """A vector as dim `dim` of `ndim`, the others of size 1."""
        return self.view(x, [shape_of(x)[0] if d == dim else 1 for d in range(ndim)])

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if dtype_of(x) == dtype else self(aten._to_copy.default, x, dtype=dtype)

    def wide(self, x: Node) -> Node:
        """In float32 if x is a half: what torch's own kernels accumulate in."""
        return self.cast(x, torch.float32) if dtype_of(x) in HALF else x

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Node:
        return self(aten.full.default, list(shape), value, dtype=dtype)


def shape_of(x: Node) -> tuple[int, ...]:
    return type_of(x).shape


def dtype_of(x: Node) -> torch.dtype:
    return type_of(x).dtype


def canonical_dims(dim: int | Sequence[int] | None, ndim: int, *, empty_is_all: bool = True) -> list[int]:
    """Dims counted from the front; None, and for most reductions the empty list too, is all of them."""
    if dim is None:
        return list(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not dims and empty_is_all:
        return list(range(ndim))
    return [d % ndim for d in dims] if ndim else []


def extent(x: Node, dims: Sequence[int]) -> int:
    """How many elements a reduction over these dims combines, in the global tensor."""
    return math.prod(shape_of(x)[d] for d in dims)


def is_constant(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call depends on no input: all its operands are constants, and it draws nothing at random."""
    constant = True

    def visit(node: Node) -> Node:
        nonlocal constant
        constant = constant and info(node).constant
        return node

    fx.map_arg((args, kwargs), visit)
    return constant and not is_random(target)


def is_random(target: Any) -> bool:
    """Whether an op draws from torch's generator. `shardc::random_uniform` does not: it is a function of its id."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


# ---------------------------------------------------------------------- types of new calls
_TYPES: dict[Hashable, TensorType | tuple[TensorType | None, ...]] = {}


def infer(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TensorType | tuple[TensorType | None, ...]:
    """The unplaced type of what a call yields, or of its results."""
    key = (target, _freeze(args, _signature), _freeze(kwargs, _signature))
    if key not in _TYPES:
        _TYPES[key] = _run_on_meta(target, args, kwargs)
    return _TYPES[key]


def _run_on_meta(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> TensorType | tuple[TensorType | None, ...]:
    def meta(node: Node) -> torch.Tensor:
        return torch.empty(shape_of(node), dtype=dtype_of(node), device="meta")

    if any(a.name == "device" for a in target._schema.arguments):
        kwargs = {**kwargs, "device": "meta"}
    out = target(*fx.map_arg(tuple(args), meta), **fx.map_arg(kwargs, meta))
    if isinstance(out, torch.Tensor):
        return TensorType.of(out)
    return tuple(TensorType.of(t) if isinstance(t, torch.Tensor) else None for t in out)


def _itself(node: Node) -> Hashable:
    return node


def _signature(node: Node) -> Hashable:
    type = type_of(node)
    return type.dtype, type.shape


def _freeze(value: Any, tensor: Callable[[Node], Hashable]) -> Hashable:
    if isinstance(value, fx.Node):
        return tensor(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v, tensor) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v, tensor)) for k, v in value.items())
    # 1, 1.0 and True are equal, and not the same argument; nor are 0.0 and -0.0.
    return (type(value), repr(value) if isinstance(value, float) else value)
