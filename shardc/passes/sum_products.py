"""sum_products: gradients of linear layers and embeddings are added up over microbatches by the calls that make them.

    %d.w = linear_wgrad(%g, %x)          : bf16
    %d.w.wide = _to_copy(%d.w, f32)              ->     %d.w.sum = accumulate_wgrad(%g, %x, f32)
    %d.w.sum = accumulate(%d.w.wide)

So is the product of matrices that a layer without `linear` makes, as GPT-2's of transposed weights: its
`mm(transpose(%x), %g)` is `accumulate_wgrad(%x, %g)`.

The gradient of an embedding adds the rows of its tokens:

    %d.e = embedding_dense_backward(%g, %i, 9, -1, False)    ->    %d.e.sum = accumulate_rows(%g, %i, 9, -1, f32)
    %d.e.sum = accumulate(%d.e)

Of a 16-bit product, a cast moves 6 bytes an element and an addition 12; the product itself reads and writes 8 of its
sum, and is never rounded to 16 bits. Rows are read and written where there are tokens alone. In a part of a pipeline's
stage, the term of a sum is an output.

Needs a localized body, or a part of one. Ensures the same sums under the same names. A product that something else
reads stays, and so does one that has to be reduced, cut or added to another before it is summed, and an embedding's
gradient that is scaled by how often its tokens occur.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of, update
from shardc.ir.ops.accumulate import ACCUMULATE, ACCUMULATE_ROWS, ACCUMULATE_WGRAD, ADDS
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.ir.schema import given
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import HALF

aten = torch.ops.aten
CAST = aten._to_copy.default
ROWS = aten.embedding_dense_backward.default
FACTORS = {"m": "n", "n": "k", "k": "~0"}  # of `mm`: those of the same product with its first operand transposed


@dataclass(frozen=True)
class SumProducts(Pass):
    """Let products and embeddings' gradients add to the sums over microbatches."""

    def run(self, graph: Graph) -> Graph:
        terms = {v: v for port, v in zip(graph.outputs, graph.output_values, strict=True) if port.role == "sum"}
        terms = {operands(call)[0]: call for call in graph.calls_of(ACCUMULATE)} | terms
        chosen = [(term, sum_, product) for term, sum_ in terms.items() if (product := _product(term)) is not None]
        if not chosen:
            return graph
        table: dict[fx.Node, fx.Node] = {}
        graph = graph.copy(table)
        for _, sum_, product in chosen:
            _replace(graph, table[sum_], table[product])
        graph.erase_dead()
        return graph


def separate_terms(graph: Graph) -> None:
    """Undo the pass, in place: stages are cut from bodies whose terms are values."""
    for summed in [call for call in graph.calls() if call.target in ADDS]:
        type = type_of(summed)
        with graph.fx.inserting_before(summed):
            term = single_term(graph, summed)
            if type_of(term).dtype != type.dtype:
                cast = {"dtype": type.dtype}
                term = graph.call(CAST, (term,), cast, like=summed, type=type, name=f"{info(summed).name}.wide")
            sum_ = graph.call(ACCUMULATE, (term,), like=summed, type=type)
        _take_place(graph, summed, sum_)
        graph.fx.erase_node(summed)


def single_term(graph: Graph, summed: fx.Node) -> fx.Node:
    """A call, put where the graph inserts, that makes what a microbatch adds to a sum: in the dtype of its operands."""
    about, type, read = info(summed), type_of(summed), operands(summed)
    target, arguments = LINEAR_WGRAD, tuple(read)
    if summed.target is ACCUMULATE_ROWS:
        target, arguments = ROWS, (*list(given(summed).values())[:-1], False)
    return graph.call(
        target,
        arguments,
        like=summed,
        type=type.with_dtype(type_of(read[0]).dtype),
        name=f"{about.name}.term",
        assignment=about.assignment,
    )


def _product(term: fx.Node) -> fx.Node | None:
    """The product that a term is, or a wider cast of, if nothing else reads either."""
    product = term
    if term.target is CAST and term.kwargs == {"dtype": torch.float32} and len(term.users) == 1:
        (product,) = operands(term)
        if type_of(product).dtype not in HALF:
            return None
    read = _read(product) if len(product.users) == 1 else None
    if read is not None and product.target is ROWS:
        read = read[:1]  # and not positions
    return product if read and {type_of(value).dtype for value in read} == {type_of(product).dtype} else None


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


def _replace(graph: Graph, sum_: fx.Node, product: fx.Node) -> None:
    """The sum where the product was made: what the product reads lives no longer."""
    type, read, rows = type_of(sum_), _read(product), product.target is ROWS
    assert read is not None
    arguments = [value for key, value in given(product).items() if key != "scale_grad_by_freq"] if rows else read
    with graph.fx.inserting_before(product):
        summed = graph.call(
            ACCUMULATE_ROWS if rows else ACCUMULATE_WGRAD,
            (*arguments, type.dtype),
            like=product,
            type=type,
            assignment=_assignment(product),
        )
    _take_place(graph, sum_, summed)


def _take_place(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    """Let all read the new value, which gets the name of the old one."""
    name = info(old).name
    old.replace_all_uses_with(new)
    for named in (graph.gradients, graph.activations):
        named.update({key: new for key, value in named.items() if value is old})
    update(old, name=graph.unique(f"{name}.before"))
    update(new, name=name)
