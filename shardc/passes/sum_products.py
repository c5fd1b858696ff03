"""sum_products: gradients of linear layers are added up over microbatches by the products that make them.

    %d.w = linear_wgrad(%g, %x)          : bf16
    %d.w.wide = _to_copy(%d.w, f32)              ->     %d.w.sum = accumulate_wgrad(%g, %x, f32)
    %d.w.sum = accumulate(%d.w.wide)

So is the product of matrices that a layer without `linear` makes, as GPT-2's of transposed weights: its
`mm(transpose(%x), %g)` is `accumulate_wgrad(%x, %g)`.

Of a 16-bit product, a cast moves 6 bytes an element and an addition 12; the product itself reads and writes 8 of its
sum, and is never rounded to 16 bits. In a part of a pipeline's stage, the term of a sum is an output.

Needs a localized body, or a part of one. Ensures the same sums under the same names. A product that something else
reads stays, and so does one that has to be reduced, cut or added to another before it is summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of, update
from shardc.ir.ops.accumulate import ACCUMULATE, ACCUMULATE_WGRAD
from shardc.ir.ops.linear import LINEAR_WGRAD
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import HALF

aten = torch.ops.aten
CAST = aten._to_copy.default
FACTORS = {"m": "n", "n": "k", "k": "~0"}  # of `mm`: those of the same product with its first operand transposed


@dataclass(frozen=True)
class SumProducts(Pass):
    """Let products add to the sums over microbatches."""

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
    for summed in graph.calls_of(ACCUMULATE_WGRAD):
        about, type, read = info(summed), type_of(summed), operands(summed)
        narrow = type.with_dtype(type_of(read[0]).dtype)
        with graph.fx.inserting_before(summed):
            term = graph.call(
                LINEAR_WGRAD,
                tuple(read),
                like=summed,
                type=narrow,
                name=f"{about.name}.term",
                assignment=about.assignment,
            )
            if narrow.dtype != type.dtype:
                cast = {"dtype": type.dtype}
                term = graph.call(CAST, (term,), cast, like=summed, type=type, name=f"{about.name}.wide")
            sum_ = graph.call(ACCUMULATE, (term,), like=summed, type=type)
        _take_place(graph, summed, sum_)
        graph.fx.erase_node(summed)


def _product(term: fx.Node) -> fx.Node | None:
    """The product that a term is, or a wider cast of, if nothing else reads either."""
    product = term
    if term.target is CAST and term.kwargs == {"dtype": torch.float32} and len(term.users) == 1:
        (product,) = operands(term)
        if type_of(product).dtype not in HALF:
            return None
    read = _read(product) if len(product.users) == 1 else None
    return product if read and {type_of(value).dtype for value in read} == {type_of(product).dtype} else None


def _read(product: fx.Node) -> list[fx.Node] | None:
    """The two operands of `linear_wgrad`, of a product that is one."""
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
    """What the product splits, by the factors of `linear_wgrad`."""
    split = info(product).assignment
    if product.target is LINEAR_WGRAD:
        return split
    return tuple((FACTORS[factor[0]] + factor[1:], axes) for factor, axes in split)


def _replace(graph: Graph, sum_: fx.Node, product: fx.Node) -> None:
    """The sum where the product was made: what the product reads lives no longer."""
    type, read = type_of(sum_), _read(product)
    assert read is not None
    with graph.fx.inserting_before(product):
        summed = graph.call(
            ACCUMULATE_WGRAD,
            (*read, type.dtype),
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
