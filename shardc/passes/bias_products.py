"""bias_products: a product adds its bias itself, where no kernel would add it on its way.

    %y = linear(%x, %w)
    %b = _to_copy(%bias, bf16)           ->    %b = _to_copy(%bias, bf16)
    %z = add(%y, %b)                           %z = linear_bias(%x, %w, %b)
    ... = sdpa(views of %z)

An activation's kernel, a residual sum's or a norm's adds the bias to what it reads anyway. What only attention,
products and collectives read is read and written once more for its bias, unless the product adds it as it writes its
result. In 16 bits that leaves a rounding out, so a call and those of its graph that repeat it, in backward or for the
other half of a batch, are all joined or none is. (A stage's forward and backward are graphs of their own.) Without
kernels every bias of at least 32 bits is joined; shorter ones are rounded as plans without this pass round them.

Needs a localized body, or a part of one. Ensures the same values under the same names; no product that is a pending sum
has a bias, which would be added on each rank.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from shardc.cost.flops import PRODUCTS
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name, operands, type_of, update
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS
from shardc.ir.storages import Storage, storages
from shardc.ir.types import TensorType
from shardc.passes.base import Pass, firsts
from shardc.passes.fusion.analysis.view_analysis import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True)
class BiasProducts(Pass):
    """Give products their biases: if `kernels` are made afterwards, those that none of them would add."""

    kernels: bool = True

    def run(self, graph: Graph) -> Graph:
        adding = graph.calls_of(aten.add.Tensor)
        storage_of = storages(graph) if self.kernels and any(_parts(call) is not None for call in adding) else {}
        first = firsts(adding)
        refused = {first[call] for call in adding if not self._may_join(call, storage_of)}
        names = {info(call).name for call in adding if first[call] not in refused}
        if not names:
            return graph
        graph = graph.copy()
        for call in [call for call in graph.calls_of(aten.add.Tensor) if info(call).name in names]:
            parts = _parts(call)
            assert parts is not None
            _join(graph, call, *parts)
        return graph

    def _may_join(self, call: fx.Node, storage_of: Mapping[fx.Node, Storage]) -> bool:
        if _parts(call) is None:
            return False
        if not self.kernels:
            return type_of(call).dtype.itemsize >= torch.float32.itemsize
        return all(map(_is_opaque, _readers(call, storage_of)))


def _parts(call: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The product and the bias that a call adds, if both may be one product."""
    if call.target is not aten.add.Tensor or call.kwargs or len(operands(call)) != 2:
        return None
    for product, bias in (operands(call), operands(call)[::-1]):
        if product.target not in (LINEAR, aten.mm.default) or len(product.users) != 1:
            continue
        type, bias_type = type_of(product), type_of(bias)
        if (
            bias_type == TensorType(type.dtype, type.dims[-1:])  # neither is a pending sum, or ragged
            and TensorType(type.dtype, type.dims) == type
            and type.ndim > 1
        ):
            return product, bias
    return None


def _is_opaque(reader: fx.Node) -> bool:
    return op_name(reader.target) in PRODUCTS or op_name(reader.target) in KINDS


def _readers(value: fx.Node, storage_of: Mapping[fx.Node, Storage]) -> Iterator[fx.Node]:
    """The calls that read a value, or views of it. The graph's output is none; what copies a view is one."""
    for user in value.users:
        is_view = user.target in VIEWS or user.target is operator.getitem
        if is_view and (info(user).type is None or storage_of.get(user) is storage_of[_base(value)]):
            yield from _readers(user, storage_of)
        elif user.op != "output":
            yield user


def _base(value: fx.Node) -> fx.Node:
    """The value itself, or what a call of several views reads."""
    return value if info(value).type is not None else operands(value)[0]


def _join(graph: Graph, added: fx.Node, product: fx.Node, bias: fx.Node) -> None:
    """The product with its bias, where the product was; where the bias was added, if a plan gathers it in between."""
    x, w = operands(product)
    target, args = (LINEAR_BIAS, (x, w, bias)) if product.target is LINEAR else (aten.addmm.default, (bias, x, w))
    about = info(added)
    early = next(node for node in graph.fx.nodes if node is product or node is bias) is bias
    with graph.fx.inserting_before(product if early else added):
        joined = graph.call(target, args, like=added, type=type_of(added), assignment=info(product).assignment)
    added.replace_all_uses_with(joined)
    for named in (graph.gradients, graph.activations):
        named.update({key: joined for key, value in named.items() if value is added})
    update(added, name=graph.unique(f"{about.name}.before"))
    update(joined, name=about.name)
    graph.fx.erase_node(added)
    graph.fx.erase_node(product)
