"""sum_products: gradients of linear layers and embeddings are added up over microbatches by the calls that make them.

    %d.w = linear_wgrad(%g, %x)          : bf16
    %d.w.wide = _to_copy(%d.w, f32)              ->     %d.w.sum = accumulate_wgrad(%g, %x, f32)
    %d.w.sum = accumulate(%d.w.wide)

So is the product of matrices that a layer without `linear` makes, as GPT-2's of transposed weights: its
`mm(transpose(%x), %g)` is `accumulate_wgrad(%x, %g)`.

The gradient of an embedding adds the rows of its tokens:

    %d.e = embedding_dense_backward(%g, %i, 9, -1, False)    ->    %d.e.sum = accumulate_rows(%g, %i, 9, -1, f32)
    %d.e.sum = accumulate(%d.e)

Of a weight that is an embedding and a head, the product makes the sum and the rows are added to it:

    %d = add(%d.head, %d.e)              ->     %d.head.sum = accumulate_wgrad(%g, %x, f32)
    %d.sum = accumulate(%d)                     %d.sum = accumulate_more_rows(%d.head.sum, %dy, %i, -1)

The sum of a padded product is padded, and cut once a step: `accumulate(slice(%d.w))` is a slice of the sum of `%d.w`.

Of a 16-bit product, a cast moves 6 bytes an element and an addition 12; the product itself reads and writes 8 of its
sum, and is never rounded to 16 bits. Rows are read and written where there are tokens alone. In a part of a pipeline's
stage, the term of a sum is an output.

Needs a localized body, or a part of one. Ensures the same sums under the same names. A product that something else
reads stays, and so does one that has to be reduced or added to another before it is summed, and an embedding's gradient
that is scaled by how often its tokens occur; in a part of a stage, also what has to be cut, or added to anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of, update
from shardc.ir.ops.accumulate import ACCUMULATE, ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS, ACCUMULATE_WGRAD, ADDS
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.ir.schema import given
from shardc.ir.sums import parts_of, whole_sum
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import HALF

aten = torch.ops.aten
ADD, CAST = aten.add.Tensor, aten._to_copy.default
ADDING = (*ADDS, ACCUMULATE_MORE_ROWS)
ROWS = aten.embedding_dense_backward.default
FACTORS = {"m": "n", "n": "k", "k": "~0"}  # of `mm`: those of the same product with its first operand transposed


class _Addend(NamedTuple):
    """A product, or an embedding's gradient, that is a term of a sum. `cut`: the call that takes its first rows alone,
    of a product that is padded."""

    call: fx.Node
    cut: fx.Node | None


@dataclass(frozen=True)
class SumProducts(Pass):
    """Let products and embeddings' gradients add to the sums over microbatches."""

    def run(self, graph: Graph) -> Graph:
        order = {node: index for index, node in enumerate(graph.fx.nodes)}
        chosen: list[tuple[fx.Node, list[_Addend]]] = []
        for call in graph.calls_of(ACCUMULATE):
            if addends := _addends(operands(call)[0], order):
                chosen.append((call, addends))
        for port, value in zip(graph.outputs, graph.output_values, strict=True):
            addends = _addends(value, order) if port.role == "sum" else []
            if len(addends) == 1 and addends[0].cut is None:  # in a stage
                chosen.append((value, addends))
        if not chosen:
            return graph
        table: dict[fx.Node, fx.Node] = {}
        graph = graph.copy(table)
        for sum_, addends in chosen:
            _replace(graph, table[sum_], [_Addend(table[call], cut and table[cut]) for call, cut in addends])
        graph.erase_dead()
        return graph


def separate_terms(graph: Graph) -> None:
    """Undo the pass, in place: stages are cut from bodies whose terms are values."""
    for last in [call for call in graph.calls() if call.target in ADDING and whole_sum(call) is call]:
        type, parts, term = type_of(last), parts_of(last), None
        for part in parts:
            with graph.fx.inserting_before(part):
                made = single_term(graph, part)
                term = made if term is None else graph.call(ADD, (term, made), like=part, type=type_of(made))
        with graph.fx.inserting_before(last):
            assert term is not None
            if type_of(term).dtype != type.dtype:
                cast = {"dtype": type.dtype}
                term = graph.call(CAST, (term,), cast, like=last, type=type, name=f"{info(last).name}.wide")
            sum_ = graph.call(ACCUMULATE, (term,), like=last, type=type)
        _take_place(graph, last, sum_)
        for part in reversed(parts):
            graph.fx.erase_node(part)


def single_term(graph: Graph, summed: fx.Node) -> fx.Node:
    """A call, put where the graph inserts, that makes what a microbatch adds to a sum: in the dtype of its operands."""
    about, type, read = info(summed), type_of(summed), given(summed)
    if summed.target is ACCUMULATE_WGRAD:
        target, arguments = LINEAR_WGRAD, (read["g"], read["x"])
    else:
        rows = read.get("num_weights", type.local_shape(graph.mesh)[0])
        target, arguments = ROWS, (read["grad_output"], read["indices"], rows, read["padding_idx"], False)
    return graph.call(
        target,
        arguments,
        like=summed,
        type=type.with_dtype(type_of(arguments[0]).dtype),
        name=f"{about.name}.term",
        assignment=about.assignment,
    )


def _addends(term: fx.Node, order: Mapping[fx.Node, int]) -> list[_Addend]:
    """The calls that can add a term to its sum themselves, in order; none where something else is a part of it.

    The first of several makes the sum's memory, and only embeddings' gradients are added to what is there.
    """
    addends = sorted(_leaves(term) or (), key=lambda addend: order[addend.call])
    if any(call.target is not ROWS or cut is not None for call, cut in addends[1:]):
        return []
    return addends if len({type_of(call).dtype for call, _ in addends}) == 1 else []


def _leaves(value: fx.Node) -> list[_Addend] | None:
    """What a value is the sum of, or a wider cast of, if nothing else reads any of it."""
    if len(value.users) != 1:
        return None
    if value.target is CAST:
        (narrow,) = operands(value)
        widens = value.kwargs == {"dtype": torch.float32} and type_of(narrow).dtype in HALF
        return _leaves(narrow) if widens else None
    if value.target is ADD:
        read = operands(value)
        plain = len(read) == len(value.args) == 2 and not value.kwargs
        if not plain or read[0] is read[1] or any(type_of(v) != type_of(value) for v in read):
            return None
        left, right = map(_leaves, read)
        return left and right and [*left, *right]
    cut, product = None, value
    if value.target is aten.slice.Tensor:
        about = given(value)
        if about.get("dim", 0) or about.get("start") or about.get("step", 1) != 1:
            return None
        cut, product = value, operands(value)[0]
    if len(product.users) != 1 or not (read := _read(product)) or (cut is not None and product.target is ROWS):
        return None
    read = read[:1] if product.target is ROWS else read  # and not positions
    same = {type_of(v).dtype for v in read} == {type_of(product).dtype}
    return [_Addend(product, cut)] if same else None


def _read(product: fx.Node) -> list[fx.Node] | None:
    """The two operands of `linear_wgrad`, of a product that is one, or of an embedding's gradient."""
    if product.target is ROWS:
        return None if given(product)["scale_grad_by_freq"] else operands(product)
    if product.target is LINEAR_WGRAD:
        return operands(product)
    if product.target is not aten.mm.default:
        return None
    left, right = operands(product)
    turned = left.target is aten.t.default or (
        left.target is aten.transpose.int and {dim % 2 for dim in left.args[1:]} == {0, 1}  # type: ignore[operator]
    )
    return [*operands(left), right] if turned else None


def _assignment(product: fx.Node) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What the product splits, by the factors of `linear_wgrad`, or of an embedding's gradient."""
    split = info(product).assignment
    if product.target in (LINEAR_WGRAD, ROWS):
        return split
    return tuple((FACTORS[factor[0]] + factor[1:], axes) for factor, axes in split)


def _replace(graph: Graph, sum_: fx.Node, addends: list[_Addend]) -> None:
    """The sum where its terms were made: what these read lives no longer."""
    (first, cut), dtype = addends[0], type_of(sum_).dtype
    type = type_of(sum_ if cut is None else first).with_dtype(dtype)
    summed: fx.Node | None = None
    for product, _ in addends:
        read, about = _read(product), given(product)
        assert read is not None
        if summed is not None:
            target, arguments = ACCUMULATE_MORE_ROWS, (summed, *read, about["padding_idx"])
        elif product.target is ROWS:
            target, arguments = ACCUMULATE_ROWS, (*read, about["num_weights"], about["padding_idx"], dtype)
        else:
            target, arguments = ACCUMULATE_WGRAD, (*read, dtype)
        with graph.fx.inserting_before(product):
            summed = graph.call(target, arguments, like=product, type=type, assignment=_assignment(product))
    assert summed is not None
    if cut is not None:
        with graph.fx.inserting_before(sum_):
            summed = graph.call(cut.target, (summed, *cut.args[1:]), cut.kwargs, like=sum_, type=type_of(sum_))
    _take_place(graph, sum_, summed)


def _take_place(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    """Let all read the new value, which gets the name of the old one."""
    name = info(old).name
    old.replace_all_uses_with(new)
    for named in (graph.gradients, graph.activations):
        named.update({key: new for key, value in named.items() if value is old})
    update(old, name=graph.unique(f"{name}.before"))
    update(new, name=name)
