"""Gather, scatter and indexing. Dims that the index does not touch are free.

The dim that is indexed counts in global positions. Where reading it yields one element each (`gather`,
`index_select`), its shards read what they own and add up; where adding to it is all that happens
(`scatter_add`, `index_add`), each shard adds what it owns. Otherwise that dim is whole, and an op whose result
size depends on data (nonzero, a boolean mask as an index) has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.ir.ops.columns import PICK_COLUMN, SUBTRACT_AT
from shardc.ir.types import TensorType
from shardc.rules.embedding import broadcast_mask, keep_owned, owned, sharded
from shardc.rules.local import LocalCall, fill_padding
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import by_block, example, rule

aten = torch.ops.aten


def _text(labels: Sequence[str]) -> str:
    return " ".join(labels) or "()"


# ------------------------------------------------------------------------------------------------ index, index_put
def _indexed(x: Dims, indices: Sequence[Dims | None]) -> tuple[list[str], list[str], list[str]]:
    """Labels of each index, of the elements they pick, and which dims of x are indexed."""
    index_tensors = [i for i in indices if i is not None]
    ndim = max(i.ndim for i in index_tensors)
    picked = [
        f"i{d}" if any(i.ndim >= ndim - d and i.shape[i.ndim - ndim + d] != 1 for i in index_tensors) else "1"
        for d in range(ndim)
    ]
    texts = [
        _text([label if n != 1 else "1" for label, n in zip(picked[ndim - i.ndim :], i.shape, strict=True)])
        for i in index_tensors
    ]
    indexed_dims = [d for d, i in enumerate(indices) if i is not None]
    other_labels = [x[d] for d in range(x.ndim) if d not in indexed_dims]
    # Indices that stand together leave their dims in place; apart, they go to the front.
    adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[0] + len(indexed_dims)))
    front = indexed_dims[0] if adjacent else 0
    return texts, [*other_labels[:front], *picked, *other_labels[front:]], [x[d] for d in indexed_dims]


@rule(
    aten.index.Tensor,
    examples=[
        example((6, 5), [(4, 3)], ints={"indices": 6}),
        example((2, 6, 5), [None, (4,)], ints={"indices": 6}),
        example((6, 6, 5), [(4, 1), (3,)], ints={"indices": 6}),
        example((6, 5, 6), [(4,), None, (4,)], ints={"indices": 6}),
    ],
)
def index(self: Dims, indices: Sequence[Dims | None]) -> Notation:
    texts, result, indexed = _indexed(self, indices)
    return Notation(f"{', '.join([str(self), *texts])} -> {_text(result)}", whole=" ".join(indexed), linear=(0,))


@rule(
    aten.index_put.default,
    examples=[
        example((6, 5), [(4,)], (4, 5), True, ints={"indices": 6}),
        example((2, 6, 5), [None, (4,)], (4, 5), True, ints={"indices": 6}),
        example((6, 6, 5), [(4, 1), (3,)], (), True, ints={"indices": 6}),
        example((6, 5), [(1,)], (5,), ints={"indices": 6}),
        example((6, 5), [(6, 5)], (), bools=["indices"]),
        example((4, 6, 5), [None, (6,)], (1,), True, bools=["indices"]),
    ],
)
def index_put(self: Dims, indices: Sequence[Dims | None], values: Dims, accumulate: bool = False) -> Notation:
    if any(i is not None and i.boolean for i in indices):
        return _put_where(self, indices, values)
    texts, result, indexed = _indexed(self, indices)
    aligned = result[len(result) - values.ndim :]
    value = _text([label if n != 1 else "1" for label, n in zip(aligned, values.shape, strict=True)])
    picked = [label for label in result if label not in self.labels]
    whole = " ".join([*indexed, *(p for p in picked if p != "1")])  # each shard would add to its own copy of self
    return Notation(f"{', '.join([str(self), *texts, value])} -> {self}", whole=whole)


def _put_where(x: Dims, indices: Sequence[Dims | None], values: Dims) -> Notation:
    """A mask lies on as many dims of x as it has. One value for every place is put shard by shard; of several, which
    place takes which depends on all of the mask."""
    labels: list[list[str]] = []
    covered: list[str] = []
    d = 0
    for position, i in enumerate(indices):
        spanned = i.ndim if i is not None and i.boolean else 1
        if i is not None:
            covered += x.labels[d : d + spanned]
            labels.append(x.labels[d : d + spanned] if i.boolean else [f"i{position}_{k}" for k in range(i.ndim)])
        d += spanned
    alone = len(labels) == 1 and all(n == 1 for n in values.shape)
    value = ["1" if n == 1 else f"v{k}" for k, n in enumerate(values.shape)]
    whole = (
        [] if alone else dict.fromkeys((*covered, *(label for mask_labels in labels for label in mask_labels), *value))
    )
    texts = ", ".join([str(x), *map(_text, labels), _text(value)])
    return Notation(f"{texts} -> {x}", whole=" ".join(label for label in whole if label != "1"))


# ------------------------------------------------------------------------------------------------ along one dim
def _aligned(x: Dims, other: Dims, dim: int, along: str) -> tuple[str, str]:
    """Labels of a tensor that lies beside x; and x's dims that it covers only in part, whole on both sides."""
    labels: list[str] = []
    whole: list[str] = []
    for d in range(x.ndim):
        if d == dim:
            labels.append(along)
        elif other.shape[d] == x.shape[d]:
            labels.append(x[d])
        else:
            labels.append(other[d])
            whole += [x[d], other[d]]
    return _text(labels), " ".join(whole)


def _position(call: LocalCall, operand: int = 0) -> tuple[int, Any]:
    """The indexed dim, counted from the front, and its atoms."""
    dims = call.operands[operand].dims
    dim = call.args["dim"] % max(1, len(dims))
    return dim, dims[dim] if dims else ()


def _gather_owned(call: LocalCall) -> Any:
    _, atoms = _position(call)
    if not sharded(atoms):
        return call.with_args()
    index, owned_mask = owned(call, call.args["index"], atoms)
    picked = call.emit(aten.gather.default, call.args["self"], call.args["dim"], index, type=call.results[0])
    return keep_owned(call, picked, owned_mask)


rule(PICK_COLUMN, "n v, n 1 -> n 1", whole="v", examples=[example((4, 6), (4, 1), ints={"column": range(-1, 7)})])
rule(
    SUBTRACT_AT,
    "n v, n 1, n 1 -> n v",
    whole="v",
    examples=[example((4, 6), (4, 1), (4, 1), ints={"column": range(-1, 7)})],
)


@rule(
    aten.gather.default,
    localize=_gather_owned,
    examples=[
        example((4, 8), 1, (4, 3), ints={"index": 8}),
        example((4, 8, 3), -2, (4, 1, 3), ints={"index": 8}),
        example((8, 4), 0, (5, 2), ints={"index": 8}),
    ],
)
def gather(self: Dims, dim: int, index: Dims, sparse_grad: bool = False) -> Notation:
    if not self.ndim:
        return Notation("(), () -> ()", linear=(0,))
    dim = self.dim(dim)
    text, whole = _aligned(self, index, dim, "j")
    return Notation(f"{self}, {text} -> {text}", sum=self[dim], whole=whole, linear=(0,), counts=self[dim])


def _select_owned(call: LocalCall) -> Any:
    dim, atoms = _position(call)
    if not sharded(atoms):
        return call.with_args()
    index, owned_mask = owned(call, call.args["index"], atoms)
    picked = call.emit(aten.index_select.default, call.args["self"], dim, index, type=call.results[0])
    return keep_owned(call, picked, owned_mask, before=dim)


@rule(
    aten.index_select.default,
    localize=_select_owned,
    examples=[example((4, 8, 3), 1, (5,), ints={"index": 8}), example((8, 4), 0, (5,), ints={"index": 8})],
)
def index_select(self: Dims, dim: int, index: Dims) -> Notation:
    dim = self.dim(dim)
    text = f"{self}, {'j' if index.ndim else '()'} -> {self.replace(dim, 'j')}"
    return Notation(text, sum=self[dim], linear=(0,), counts=self[dim])


def _scatter_add_owned(call: LocalCall) -> Any:
    _, atoms = _position(call)
    if not sharded(atoms):
        return call.with_args()
    index, owned_mask = owned(call, call.args["index"], atoms)
    # src may be larger than index; only its leading part is read, so the mask is laid over that part.
    src, type = call.args["src"], call.operands[2]
    for d, (size, target_size) in enumerate(zip(type.shape, call.operands[1].shape, strict=True)):
        if size != target_size:
            dims = (*type.dims[:d], call.operands[1].dims[d], *type.dims[d + 1 :])
            type = TensorType(type.dtype, dims)
            src = call.emit(aten.slice.Tensor, src, d, 0, target_size, type=type)
    target, args, kwargs = keep_owned(call, src, owned_mask)
    return call.with_args(index=index, src=call.emit(target, *args, type=type, **kwargs))


def _scattered(x: Dims, dim: int, index: Dims, src: Dims | None) -> tuple[str, str]:
    """The text, and what must be whole but for the dim of x that is scattered to."""
    text, whole = _aligned(x, index, dim, "j")
    if src is None:
        return f"{x}, {text} -> {x}", f"{whole} j"
    from_text, from_whole = _aligned(x, src, dim, "j" if src.shape[dim] == index.shape[dim] else "l")
    if src.shape != index.shape:  # covered in part: whichever of the dims differ
        partly = [x[d] for d in range(x.ndim) if d != dim and src.shape[d] != index.shape[d]]
        from_whole = " ".join([from_whole, *partly])
    return f"{x}, {text}, {from_text} -> {x}", f"{whole} {from_whole} j l"


@rule(
    aten.scatter_add.default,
    localize=_scatter_add_owned,
    examples=[
        example((4, 8), 1, (4, 3), (4, 3), ints={"index": 8}),
        example((8, 4, 3), 0, (5, 4, 2), (6, 4, 3), ints={"index": 8}),
    ],
)
def scatter_add(self: Dims, dim: int, index: Dims, src: Dims) -> Notation:
    text, whole = _scattered(self, self.dim(dim), index, src)
    return Notation(text, whole=whole, counts=self[self.dim(dim)] if self.ndim else "")


@rule(
    aten.scatter.src,
    examples=[
        example((4, 8), 1, (4, 1), (4, 1), ints={"index": 8}),
        example((8, 4), 0, (1, 3), (2, 4), ints={"index": 8}),
    ],
)
def scatter_src(self: Dims, dim: int, index: Dims, src: Dims) -> Notation:
    dim = self.dim(dim)
    text, whole = _scattered(self, dim, index, src)
    return Notation(text, whole=f"{whole} {self[dim]}")


@rule(
    aten.scatter_reduce.two,
    examples=[
        example((4, 8), 1, (4, 3), (4, 3), reduce, include_self=itself, ints={"index": 8})
        for reduce in ("sum", "amax", "mean")
        for itself in (True, False)
    ],
)
def scatter_reduce(self: Dims, dim: int, index: Dims, src: Dims, reduce: str, include_self: bool = True) -> Notation:
    return scatter_src(self, dim, index, src)


@rule(aten.scatter.reduce, examples=[example((4, 8), 1, (4, 3), (4, 3), reduce="multiply", ints={"index": 8})])
def scatter_with(self: Dims, dim: int, index: Dims, src: Dims, reduce: str) -> Notation:
    return scatter_src(self, dim, index, src)


@rule(aten.scatter.value, examples=[example((4, 8), 1, (4, 3), 1.5, ints={"index": 8})])
def scatter_value(self: Dims, dim: int, index: Dims, value: float) -> Notation:
    dim = self.dim(dim)
    text, whole = _scattered(self, dim, index, None)
    return Notation(text, whole=f"{whole} {self[dim]}")


# ------------------------------------------------------------------------------------------------ whole slices
def _index_add_owned(call: LocalCall) -> Any:
    dim, atoms = _position(call)
    if not sharded(atoms):
        return call.with_args()
    index, owned_mask = owned(call, call.args["index"], atoms)
    type = call.operands[2]
    target, args, kwargs = keep_owned(call, call.args["source"], owned_mask, before=dim)
    return call.with_args(index=index, source=call.emit(target, *args, type=type, **kwargs))


@rule(
    aten.index_add.default,
    localize=_index_add_owned,
    examples=[
        example((4, 8, 3), 1, (5,), (4, 5, 3), ints={"index": 8}),
        example((8, 4), 0, (5,), (5, 4), alpha=2.0, ints={"index": 8}),
    ],
)
def index_add(self: Dims, dim: int, index: Dims, source: Dims, alpha: float = 1) -> Notation:
    text = f"{self}, {_one('j', index)}, {self.replace(dim, _one('j', source, dim))} -> {self}"
    return Notation(text, whole="j", counts=self[self.dim(dim)])


@rule(aten.index_copy.default, examples=[example((4, 8, 3), 1, (1,), (4, 1, 3), ints={"index": 8})])
def index_copy(self: Dims, dim: int, index: Dims, source: Dims) -> Notation:
    whole = f"j {self[self.dim(dim)]}"
    return Notation(f"{self}, {_one('j', index)}, {self.replace(dim, _one('j', source, dim))} -> {self}", whole=whole)


@rule(
    aten.index_reduce.default,
    examples=[
        example((4, 8, 3), 1, (5,), (4, 5, 3), reduce, include_self=itself, ints={"index": 8})
        for reduce in ("prod", "amax", "mean")
        for itself in (True, False)
    ],
)
def index_reduce(self: Dims, dim: int, index: Dims, source: Dims, reduce: str, include_self: bool = True) -> Notation:
    return index_copy(self, dim, index, source)


def _fill_owned(call: LocalCall) -> Any:
    """Which of a rank's positions some index names, and the value there."""
    dim, atoms = _position(call)
    if not sharded(atoms):
        return call.with_args()
    index, owned_mask = owned(call, _from_front(call, call.args["index"], math.prod(a.size for a in atoms)), atoms)
    hits = call.emit(aten._to_copy.default, owned_mask, dtype=torch.int64, type=type_of(index))
    counted = TensorType(torch.int64, (atoms,))
    none = call.emit(aten.full.default, list(counted.local_shape(call.graph.mesh)), 0, dtype=torch.int64, type=counted)
    if not type_of(index).ndim:
        single = TensorType(torch.int64, ((),))
        index, hits = (call.emit(aten.unsqueeze.default, value, 0, type=single) for value in (index, hits))
    count = call.emit(aten.index_add.default, none, 0, index, hits, type=counted)
    named = call.emit(aten.gt.Scalar, count, 0, type=counted.with_dtype(torch.bool))
    mask = broadcast_mask(call, named, call.operands[0], dim)
    value = call.args["value"]
    target = aten.masked_fill.Scalar if call.node.target is aten.index_fill.int_Scalar else aten.masked_fill.Tensor
    return target, (call.args["self"], mask, value), {}


def _from_front(call: LocalCall, index: fx.Node, size: int) -> fx.Node:
    """Positions that may be counted from the end, from the front."""
    type = type_of(index)
    below = call.emit(aten.lt.Scalar, index, 0, type=type.with_dtype(torch.bool))
    moved = call.emit(aten.add.Tensor, index, size, type=type)
    return call.emit(aten.where.self, below, moved, index, type=type)


FILLED = [((4, 8, 3), 1, (5,)), ((8, 4), -2, (1,)), ((6,), 0, (4,))]


@rule(
    aten.index_fill.int_Tensor,
    localize=_fill_owned,
    examples=[example(*case, (), ints={"index": range(-case[0][case[1]], case[0][case[1]])}) for case in FILLED],
)
def index_fill_tensor(self: Dims, dim: int, index: Dims, value: Dims) -> Notation:
    return Notation(f"{self}, {_one('j', index)}, () -> {self}", whole="j")


@rule(
    aten.index_fill.int_Scalar,
    localize=_fill_owned,
    examples=[example(*case, 2.5, ints={"index": range(-case[0][case[1]], case[0][case[1]])}) for case in FILLED],
)
def index_fill(self: Dims, dim: int, index: Dims, value: float) -> Notation:
    return Notation(f"{self}, {_one('j', index)} -> {self}", whole="j")


def _one(label: str, x: Dims, dim: int = 0) -> str:
    """A label, or what stands for it where the tensor is a scalar or has size 1 there."""
    if not x.ndim:
        return "()"
    return label if x.shape[dim] != 1 else "1"


# ------------------------------------------------------------------------------------------------ all dims as one
@by_block
def _positions_padded(call: LocalCall) -> Any:
    return call.with_args(index=fill_padding(call, call.args["index"], 0.0))


@rule(
    aten.take.default,
    localize=_positions_padded,
    examples=[example((4, 6), (3, 5), ints={"index": range(-24, 24)}), example((4,), (), ints={"index": 4})],
)
def take(self: Dims, index: Dims) -> Notation:
    places = f"{index if index.ndim else '()'}"
    return Notation(f"{self}, {places} -> {places}", whole=str(self), linear=(0,))


@rule(aten.put.default, examples=[example((4, 6), (3, 5), (3, 5), True, ints={"index": 24})])
def put(self: Dims, index: Dims, source: Dims, accumulate: bool = False) -> Notation:
    places = (str(x) if x.ndim else "()" for x in (index, source))
    return Notation(f"{self}, {', '.join(places)} -> {self}", whole=f"{self} {index} {source}")


# ------------------------------------------------------------------------------------------------ counting
@rule(aten.bucketize.Tensor, examples=[((4, 6), (5,))])
def bucketize(self: Dims, boundaries: Dims, *options: Any) -> Notation:
    return Notation(f"{self if self.ndim else '()'}, k -> {self if self.ndim else '()'}", whole="k")


@rule(aten.searchsorted.Tensor, examples=[((5,), (4, 6)), ((4, 5), (4, 6)), ((4, 1, 5), (4, 1, 6)), ((5,), ())])
def searchsorted(
    sorted_sequence: Dims, self: Dims, out_int32: bool, right: bool, side: str | None, sorter: Dims | None
) -> Notation:
    found = str(self) if self.ndim else "()"
    rows = "" if sorted_sequence.ndim == 1 else " ".join(self.labels[:-1])
    texts = [f"{rows} k", found, *([] if sorter is None else [f"{rows} k"])]
    return Notation(f"{', '.join(texts)} -> {found}", whole="k")


@rule(aten.isin.Tensor_Tensor, examples=[example((4, 6), (2, 5), ints={"elements": 9, "test_elements": 9})])
def isin(elements: Dims, test_elements: Dims, assume_unique: bool, invert: bool) -> Notation:
    kept = str(elements) if elements.ndim else "()"
    return Notation(f"{kept}, {test_elements if test_elements.ndim else '()'} -> {kept}", whole=str(test_elements))
