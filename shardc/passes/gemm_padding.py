"""align: products of 16-bit tensors get dims that are multiples of 16 bytes, where theirs are not.

    %logits = linear(%h, %w)           %w.even = constant_pad_nd(%w, [0, 0, 0, 7])
                                ->     %logits.even = linear(%h, %w.even)
                                       %logits = slice(%logits.even, 1, 0, 50257)

    with h bf16[16384, 768] and w bf16[50257, 768]: 13.5 ms on an H200 before, 1.8 after

Matrix units are fed 16 bytes at a time, and libraries' kernels for other dims are 2 to 8 times slower; padded strides
alone do not help. What is added is 0, adds 0 to every sum, and is cut off the result, which is a view: kernels read it
where it lies, and add what bias there is to what is left. Only of a dim that lies along rows somewhere is it known to
matter: of `linear` those are its features. What kernels make, `fuse` has them write with its padding (see
fuse/padding.py): the gradient of the logits above is copied by nobody, and read by both of its products, one of which
may turn it: `mm(transpose(g), h)`.

The rule: such a product takes `Hardware.unaligned_slowdown` times as long at the least as one with even dims, which
takes `Hardware.product_seconds`, and padding is worth it where its copies take less than is saved; products as short as
two launches stay. A parameter is padded anew in backward
rather than kept; others once a phase. If more is held at the peak than SLACK above what was, the products with the
largest copies are left as they are.

Needs a localized body, or a part of one. Ensures the same values under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.cost.memory import memory
from shardc.ir.graph import Graph, Phase, info, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.ir.provenance import NO_CAUSE
from shardc.ir.types import Atom, TensorType
from shardc.ir.units import UnequalError
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import HALF

aten = torch.ops.aten
LAUNCHES = 2  # that a product must take as long as
GROWTH = 1.25  # of a product, at most
SLACK = 1.02  # of the peak


class Form(NamedTuple):
    """The last dims of both operands and the result, a letter each; `padded` are those that lie along rows."""

    operands: tuple[str, str]
    result: str
    padded: str

    def extents(self, sizes: Mapping[str, int], rows: int) -> tuple[int, int, int, int]:
        """Batch, rows, columns and depth of the product; `rows` are of the dims that have no letter."""
        if "m" in self.padded:
            return rows, sizes["m"], sizes["n"], sizes["k"]
        if len(self.result) == 2:
            return 1, sizes["n"], sizes["k"], rows
        columns = sizes[self.result]
        return 1, rows, columns, math.prod(sizes.values()) // columns


FORMS: Mapping[Any, Form] = {
    LINEAR: Form(("k", "nk"), "n", "nk"),
    LINEAR_DGRAD: Form(("n", "nk"), "k", "nk"),
    LINEAR_WGRAD: Form(("n", "k"), "nk", "nk"),
    aten.mm.default: Form(("mk", "kn"), "mn", "mnk"),
    aten.bmm.default: Form(("mk", "kn"), "mn", "mnk"),
}


@dataclass(frozen=True)
class Product:
    """A product that is worth padding: by how much, letter by letter, and the bytes of the copies it takes."""

    node: fx.Node
    more: Mapping[str, int]
    copied: int


@dataclass(frozen=True)
class Align(Pass):
    """Pad the operands of products whose rows are no multiples of 16 bytes."""

    enabled: bool = True
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        return align(graph, self.hardware) if self.enabled else graph


def align(graph: Graph, hardware: Hardware = DEFAULT) -> Graph:
    """Returns a copy of the body with padded products; the given graph is not modified."""
    chosen = [product for node in graph.calls() if (product := worth(graph, node, hardware)) is not None]
    names = [info(candidate.node).name for candidate in sorted(chosen, key=lambda product: product.copied)]
    if not names:
        return graph
    allowed = memory(graph).peak * SLACK
    while names:
        padded = graph.copy()
        padding = _Padding(padded)
        for node in list(padded.calls()):
            if info(node).name in names and (product := worth(padded, node, hardware)) is not None:
                padding.pad(product)
        padded.erase_dead()  # what was turned before it was padded
        if memory(padded).peak <= allowed:
            return padded
        if graph.units:
            raise UnequalError("padded products take too much of few layers")
        names = names[: len(names) * 3 // 4]
    return graph


def worth(graph: Graph, node: fx.Node, hardware: Hardware = DEFAULT) -> Product | None:
    """A product with what is to be added to its dims; None where nothing is, or it is not worth it."""
    form = FORMS.get(node.target)
    if form is None or type_of(node).dtype not in HALF:
        return None
    values = [value for value in node.args if isinstance(value, fx.Node)]
    sizes: dict[str, int] = {}
    for value, letters in zip(values, form.operands, strict=True):
        shape = type_of(value).local_shape(graph.mesh)
        sizes |= dict(zip(letters, shape[len(shape) - len(letters) :], strict=True))
    step = hardware.row_alignment_bytes // 2
    more = {name: -sizes[name] % step for name in form.padded if sizes[name] % step}
    if "m" in more and not _turned(values[0]):  # rows of the one operand, along which nothing lies
        del more["m"]
    if not more:
        return None
    first = type_of(values[0]).local_shape(graph.mesh)
    rows = math.prod(first[: len(first) - len(form.operands[0])])
    grown = math.prod(1 + extra / sizes[name] for name, extra in more.items())
    copied = sum(
        2 * type_of(value).local_bytes(graph.mesh)
        for value, letters in zip(values, form.operands, strict=True)
        if not more.keys().isdisjoint(letters)
    )
    dtype = type_of(node).dtype
    # Dims that do not lie along rows count as if they were multiples: they are not known to matter.
    even = {name: size + -size % step for name, size in sizes.items()}
    odd = {name: sizes[name] if name in more else size for name, size in even.items()}
    outer = rows if "m" in form.padded else rows + -rows % step
    after = hardware.product_seconds(*form.extents(even, outer), dtype)
    # Tables of products know odd dims, and that what memory bounds is no slower with them.
    known = any(str(dtype).removeprefix("torch.") in rate.dtypes for rate in hardware.tables.products)
    slower = hardware.product_seconds(*form.extents(odd, outer), dtype) if known else 0.0
    before = slower or after * hardware.unaligned_slowdown
    if after < LAUNCHES * hardware.kernel_launch_seconds or grown > GROWTH:
        return None
    if before - after < hardware.memory_seconds(copied):
        return None
    return Product(node, more, copied)


def _order(value: fx.Node) -> list[int] | None:
    """For a permuted or transposed value: the operand's dim that each of its dims is. None for other values."""
    ndim = type_of(value).ndim
    if value.target is aten.permute.default:
        permutation: Sequence[int] = value.args[1]  # type: ignore[assignment]
        return [d % ndim for d in permutation]
    if value.target is aten.transpose.int:
        a, b = value.args[1:]
        order = list(range(ndim))
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return None


def _turned(value: fx.Node) -> bool:
    """Is the value a transpose whose last dim is not the last dim of its operand?"""
    order = _order(value)
    return order is not None and order[-1] != len(order) - 1


class _Padding:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.memo: dict[tuple[fx.Node, Phase, tuple[int, ...]], fx.Node] = {}

    def pad(self, product: Product) -> None:
        node, form, graph = product.node, FORMS[product.node.target], self.graph
        original_type, name = type_of(node), info(node).name
        with graph.fx.inserting_before(node):
            node.args = tuple(
                self.padded(value, [product.more.get(letter, 0) for letter in letters], node)  # type: ignore[arg-type]
                for value, letters in zip(node.args, form.operands, strict=True)
            )
        extra = [product.more.get(letter, 0) for letter in form.result]
        if not any(extra):
            return
        types = [original_type]  # with the first dims cut, one after another
        for from_end, more in enumerate(reversed(extra), 1):
            types.append(_wider(types[-1], original_type.ndim - from_end, more, graph))
        update(node, type=types[-1], name=graph.unique(f"{name}.even"))
        readers = list(node.users)
        cut = node
        for index, more in enumerate(extra):
            if more:
                dim = original_type.ndim - len(extra) + index
                type = types[len(extra) - 1 - index]
                size = type.local_shape(graph.mesh)[dim]
                with graph.fx.inserting_after(cut):
                    cut = graph.call(aten.slice.Tensor, (cut, dim, 0, size), like=node, type=type, name=f"{name}.cut")
        for reader in readers:
            reader.replace_input_with(node, cut)
        update(cut, name=name)
        for table in (graph.activations, graph.gradients):
            table.update({key: cut for key, value in table.items() if value is node})

    def padded(self, value: fx.Node, extra: Sequence[int], product: fx.Node) -> fx.Node:
        """A value with zeros at the ends of its last dims. Of one that is turned, what it is made of is padded, which
        other products read as it lies, and turned then: a copy that turns would be slower, and one more."""
        if not any(extra):
            return value
        type = type_of(value)
        last = type.ndim - 1
        extra = (*[0] * (type.ndim - len(extra)), *extra)
        key = (value, info(product).phase, extra)
        if key not in self.memo:
            for dim, more in enumerate(extra):
                type = _wider(type, dim, more, self.graph)
            order, source = _order(value), value.args[0] if value.args else None
            if order is not None and isinstance(source, fx.Node):
                source_extra = [extra[order.index(dim)] for dim in range(last + 1)]
                target, args = value.target, (self.padded(source, source_extra, product), *value.args[1:])
            else:
                first = next(dim for dim, more in enumerate(extra) if more)
                amounts = [n for more in reversed(extra[first:]) for n in (0, more)]
                target, args = aten.constant_pad_nd.default, (value, amounts, 0.0)
            name = f"{info(value).name}.even"
            self.memo[key] = self.graph.call(target, args, like=product, type=type, name=name, cause=NO_CAUSE)
        return self.memo[key]


def _wider(type: TensorType, dim: int, more: int, graph: Graph) -> TensorType:
    """The type with `more` additional elements along a dim, on every rank."""
    if not more:
        return type
    axes = tuple(axis for atom in type.dims[dim] for axis in atom.axes)
    size = (type.local_shape(graph.mesh)[dim] + more) * graph.mesh.size(axes)
    return replace(type, dims=(*type.dims[:dim], (Atom(size, axes),), *type.dims[dim + 1 :]))
