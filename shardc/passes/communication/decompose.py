"""decompose: products gather their operand, or scatter their result, piece by piece.

    %x = all_gather(%x.shard, [tp], ...)         %x.shard -> gather_linear -> %q, %k, %v, %x
    %q = linear(%x, %wq)                   ->
    %k = linear(%x, %wk)
    %v = linear(%x, %wv)

    %y = linear(%h, %w)                    ->    %h -> linear_scatter -> %y.sum
    %y.sum = reduce_scatter(%y, sum, ...)

Sequence parallelism gathers activations for the product that needs them next, so the gather has nothing to run beside
it but the product itself: of the rows that are there already (`ir.ops.decomposed`). All products that read one gather,
as those of queries, keys and values, share it. Of backward, the same of the gradients of results and of operands.

Needs a localized body, or a part of one. Ensures the same values under the same names, but for what is gathered, whose
name is the call's, as the name of what is scattered is. The call stands where the gathered operand is read first;
weights that are cast or gathered behind that are made before it. A product stays as it is whose result something else
reads, or adds up before it is scattered, and so does one of 8-bit floats, and of dims that the group does not divide.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, set_info, type_of, update
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops.collectives import all_gather, reduce_scatter
from shardc.ir.ops.decomposed import GATHER_LINEAR, LINEAR_SCATTER
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD
from shardc.ir.ops.scaled import FP8
from shardc.ir.overlap_schedule import PASS_ON, sums_gradients
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Pass

aten = torch.ops.aten
PRODUCTS: dict[Any, bool] = {LINEAR: True, LINEAR_DGRAD: False, aten.mm.default: False}  # is its weight turned?
# What makes a weight of a parameter: it may run earlier.
MAKES_WEIGHTS = PASS_ON | {all_gather, aten.t.default, aten.clone.default}


@dataclass(frozen=True)
class Decompose(Pass):
    """Decompose products, if `enabled`. `any_size`: of dims that the group does not divide too, where the choice must
    not depend on sizes."""

    enabled: bool = False
    any_size: bool = False

    def run(self, graph: Graph) -> Graph:
        if not self.enabled:
            return graph
        gathers = list(_gathers(graph, any_size=self.any_size))
        taken = {product for match in gathers for product in match.products}
        scatters = [match for match in _scatters(graph, any_size=self.any_size) if taken.isdisjoint(match.products)]
        return _decomposed(graph, [*gathers, *scatters])


class _Match(NamedTuple):
    """A collective, and the products that run piece by piece with it."""

    collective: fx.Node
    products: tuple[fx.Node, ...]


def _gathers(graph: Graph, *, any_size: bool) -> Iterator[_Match]:
    place = {node: index for index, node in enumerate(graph.fx.nodes)}
    inside = in_microbatch(graph)
    for gather in graph.calls_of(all_gather):
        args = given(gather)
        whole = type_of(gather)
        if info(gather).phase == "opt" or not _is_plain(whole) or not _is_leading(whole, args["pos"]):
            continue
        if not any_size and args["atoms"][args["pos"]] * graph.mesh.size(args["axes"]) != args["size"]:
            continue
        readers = sorted((user for user in gather.users if user.op != "output"), key=place.__getitem__)
        multiplied = [gather, *(view for view in readers if _flattens_rows(view, gather))]
        products = tuple(
            product
            for product in sorted({user for value in multiplied for user in value.users}, key=lambda n: place.get(n, 0))
            if _multiplies(product, multiplied)
            and (product in inside, info(product).phase) == (gather in inside, info(gather).phase)
            and _made_late(operands(product)[1], place, place[readers[0]], gather) is not None
        )
        if products:
            yield _Match(gather, products)


def _scatters(graph: Graph, *, any_size: bool) -> Iterator[_Match]:
    inside = in_microbatch(graph)
    for scatter in graph.calls_of(reduce_scatter):
        args = given(scatter)
        product = operands(scatter)[0]
        if info(scatter).phase == "opt" or args["op"] != "sum" or args.get("counts") or len(product.users) != 1:
            continue
        if info(scatter).phase == "bwd" and sums_gradients(scatter):  # which holds nothing up
            continue
        if product.target not in PRODUCTS or (product in inside) != (scatter in inside):
            continue
        x, w = operands(product)
        if not all(map(_is_plain, (type_of(x), type_of(w)))) or not _is_leading(type_of(product), args["pos"]):
            continue
        if any_size or args["atoms"][args["pos"]] % graph.mesh.size(args["axes"]) == 0:
            yield _Match(scatter, (product,))


def _is_plain(type: TensorType) -> bool:
    """Floats that lie in no pieces, and are no terms of a sum."""
    floats = type.dtype.is_floating_point and type.dtype not in FP8
    return floats and type == TensorType(type.dtype, type.dims) and not type.in_blocks


def _is_leading(type: TensorType, pos: int) -> bool:
    """Is an atom one of the rows that a product multiplies?"""
    return pos < sum(len(dim) for dim in type.dims[:-1])


def _flattens_rows(view: fx.Node, x: fx.Node) -> bool:
    """Is a call a view that has the same columns?"""
    if view.target is not aten.view.default:
        return False
    type, whole = type_of(view), type_of(x)
    return type.atoms == whole.atoms and type.dims[-1:] == whole.dims[-1:]


def _multiplies(product: fx.Node, values: Sequence[fx.Node]) -> bool:
    if product.target not in PRODUCTS:
        return False
    x, w = operands(product)
    return x in values and w not in values and _is_plain(type_of(w)) and type_of(w).dtype == type_of(x).dtype


def _made_late(value: fx.Node, place: dict[fx.Node, int], first: int, gather: fx.Node) -> list[fx.Node] | None:
    """The calls from `first` on that make a weight, in their order; None if some of them may not run earlier, or read
    what is gathered."""
    calls, todo = set[fx.Node](), [value]
    while todo:
        call = todo.pop()
        if place[call] < first or call in calls:
            continue
        if call.target not in MAKES_WEIGHTS or gather in call.all_input_nodes:
            return None
        calls.add(call)
        todo += call.all_input_nodes
    return sorted(calls, key=place.__getitem__)


# ---------------------------------------------------------------------- the calls
def _decomposed(graph: Graph, matches: Sequence[_Match]) -> Graph:
    if not matches:
        return graph
    table: dict[fx.Node, fx.Node] = {}
    graph = graph.copy(table)
    for match in matches:
        products = [table[product] for product in match.products]
        put = _put_gather if match.collective.target is all_gather else _put_scatter
        put(graph, table[match.collective], products)
    graph.erase_dead()
    return graph


def _put_gather(graph: Graph, gather: fx.Node, products: Sequence[fx.Node]) -> None:
    place = {node: index for index, node in enumerate(graph.fx.nodes)}
    anchor = min((user for user in gather.users if user.op != "output"), key=place.__getitem__)
    made_late = [_made_late(operands(product)[1], place, place[anchor], gather) for product in products]
    if None in made_late:  # a weight is by now what another product gathers
        return
    for call in sorted({call for calls in made_late for call in calls or ()}, key=place.__getitem__):
        anchor.prepend(call)
    anchor.prepend(gather)
    type, (x, *others) = type_of(gather), gather.args
    ws, turned = [operands(product)[1] for product in products], [PRODUCTS[product.target] for product in products]
    with graph.fx.inserting_before(anchor):
        whole = _item(graph, gather, len(products), type, gather, f"{info(gather).name}.whole")
    graph.replace_value(gather, whole)
    whole.args = (gather, len(products))
    types: list[TensorType] = []
    for index, product in enumerate(products):
        about = type_of(product)
        if operands(product)[0] is whole:
            types.append(about)
            _become(product, operator.getitem, (gather, index))
        else:
            types.append(TensorType(about.dtype, (*type.dims[:-1], about.dims[-1]), about.partial))
            with graph.fx.inserting_before(anchor):
                item = _item(graph, gather, index, types[-1], product, f"{info(product).name}.rows")
            _become(product, aten.view.default, (item, list(about.local_shape(graph.mesh))))
        if product is not anchor:
            anchor.prepend(product)
    gather.target, gather.args = GATHER_LINEAR, (x, ws, turned, *others)
    update(gather, type=None, results=(*types, type))


def _put_scatter(graph: Graph, scatter: fx.Node, products: Sequence[fx.Node]) -> None:
    (product,) = products
    rows, types, (_, *others) = type_of(scatter), (type_of(scatter), type_of(product)), scatter.args
    (x, w), turned = operands(product), PRODUCTS[product.target]
    with graph.fx.inserting_after(scatter):
        item = _item(graph, scatter, 0, rows, scatter, f"{info(scatter).name}.rows")
    graph.replace_value(scatter, item)
    item.args = (scatter, 0)
    for named in (graph.activations, graph.gradients):
        named.update({key: item for key, value in named.items() if value is product})
    scatter.target, scatter.args = LINEAR_SCATTER, (x, w, turned, *others)
    update(scatter, type=None, results=types)


def _item(graph: Graph, call: fx.Node, position: int, type: TensorType, like: fx.Node, name: str) -> fx.Node:
    """A result of a call that will have several."""
    return graph.call(operator.getitem, (call, position), like=like, type=type, name=name)


def _become(value: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let a value be that of another call."""
    about = info(value)
    value.target, value.args, value.kwargs = target, args, {}
    set_info(value, about)
    update(value, assignment=())
