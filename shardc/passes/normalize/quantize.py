"""quantize: products with weights are made of 8-bit floats, in forward and in backward.

    y = linear(x, w)      ->   x.scale = scale(amax(abs(x)))      x.fp8 = quantize(x, x.scale, f8e4m3)
                               w.scale = scale(amax(abs(w)))      w.fp8 = quantize(w, w.scale, f8e4m3)
                               y = scaled_linear(x.fp8, w.fp8, x.scale, w.scale, bf16)

    scale: tensor   one scale a tensor: what is rounded once serves all products that read it
    scale: row      one for each row along the dim that a product sums; other products round anew

amax is a maximum: over the axes that divide a tensor it is pending, and is resolved as every pending value, so that all
ranks have one scale. Rounding goes element by element, so that 8-bit numbers are what is gathered, and what backward
keeps.

    history: 16     activations and gradients are scaled by the largest elements of so many steps before: by state

Kept wide, by the graph's form: what no parameter is multiplied in, as attention; a parameter that is looked up, as an
embedding, also where the head is tied to it; the last products before the loss, as the head; those whose result is
ranked, as a router's; and what is not of the dtype that the plan computes in. `keep` names further modules.

Needs: a normalised graph of a microbatch, and the dtype that it computes in. Ensures: products of other numbers are as
they were. Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.ir.annotation import Annotation
from shardc.ir.diagnostic import Diagnostic, did_you_mean, error
from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, operands, replace_operands, set_info, type_of
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.ir.ops.scaled import (
    COUNT_AMAX,
    COUNTS,
    GRADIENT,
    HISTORY,
    INTERVALS,
    QUANTIZE,
    SCALE,
    SCALED_DGRAD,
    SCALED_LINEAR,
    SCALED_MM,
    SCALED_WGRAD,
)  # fmt: skip
from shardc.ir.types import TensorType
from shardc.passes.base import Pass
from shardc.passes.sharding.casts import CAST, gradients
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
MM = aten.mm.default
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALED: Mapping[Any, OpOverload] = {
    LINEAR: SCALED_LINEAR,
    LINEAR_DGRAD: SCALED_DGRAD,
    LINEAR_WGRAD: SCALED_WGRAD,
    MM: SCALED_MM,
}
RANKINGS = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, GROUP_ROWS}
MULTIPLE = 16  # of which an extent of a weight has to be one
# Views that keep every element, and so may stand behind the rounding as well as before it.
TURNS = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default}


class _Product(NamedTuple):
    """A product with a parameter, by the values that both operands are views of."""

    node: fx.Node
    weight: fx.Node  # the parameter, or its cast
    other: fx.Node
    form: tuple[object, int, int]  # the op, the weight's place, and how often it is transposed


@dataclass(frozen=True)
class Quantize(Pass):
    """Make products of `compute` with weights of 8-bit floats; None leaves the graph as it is."""

    compute: torch.dtype | None = None
    scale: Literal["tensor", "row"] = "tensor"
    gradients: torch.dtype = E5M2
    history: int = 0
    keep: tuple[Annotation, ...] = ()

    def run(self, graph: Graph) -> Graph:
        if self.compute is None:
            return graph
        products = self._chosen(graph)
        if not products:
            hint = "leave 'linear' out of precision, or see which layers stay wide: docs/guides/precision.md"
            message = "no product is made of 8-bit floats: none has a weight that may be rounded"
            graph.diagnostics.append(Diagnostic("SC233", message, "warning", hint=hint))
            return graph
        rounding = _Rounding(graph, self.scale, self.gradients, self.history, products, _params(graph))
        for node in [node for node in graph.calls() if node in products]:
            rounding.replace(node)
        rounding.finish()
        graph.erase_dead()
        return graph

    def _chosen(self, graph: Graph) -> dict[fx.Node, int | None]:
        """The products that are rounded, each with the place of the gradient that it reads: those of forward, and of
        backward those of the same parameters."""
        params = _params(graph)
        products = [p for node in graph.calls() if (p := _with_weight(node, params)) is not None]
        forward = [p for p in products if info(p.node).phase == "fwd"]
        wide = _heads(graph, forward) | _routers(graph) | {p.node for p in forward if not self._fits(p.node)}
        wide |= self._named(forward)
        looked_up = {_parameter(_base(operands(node)[0])) for node in graph.calls_of(aten.embedding.default)}
        kept = looked_up | {_parameter(p.weight) for p in forward if p.node in wide}
        chosen = [p for p in forward if _parameter(p.weight) not in kept]
        forms = {(_parameter(p.weight), p.form) for p in chosen}
        found: dict[fx.Node, int | None] = {}
        read: dict[fx.Node, set[fx.Node]] = {}  # parameter -> what it is multiplied with, in forward or run again
        for p in products:
            parameter = _parameter(p.weight)
            if (parameter, p.form) in forms and self._fits(p.node):
                found[p.node] = None
                read.setdefault(parameter, set()).add(p.other)
        parameters = {parameter for parameter, _ in forms}
        for p in products:
            if p.node not in found and _parameter(p.weight) in parameters and self._fits(p.node):
                found[p.node] = 1 - p.form[1]
        names, of_parameter = {node: name for name, node in graph.input_nodes().items()}, gradients(graph)
        for parameter, xs in read.items():
            for node in _products_of(of_parameter.get(names[parameter])):
                bases = [_base(v) for v in operands(node)]
                known = [base for base in bases if base in xs]
                if node.target is LINEAR_WGRAD and not known:
                    known = bases[1:]  # an activation that is made again, and by its place no gradient
                if self._fits(node) and len(known) == 1:
                    found[node] = next(i for i, base in enumerate(bases) if base not in known)
        return found

    def _fits(self, node: fx.Node) -> bool:
        types = [type_of(v) for v in (*operands(node), node)]
        return all(t.dtype == self.compute for t in types)

    def _named(self, forward: Sequence[_Product]) -> set[fx.Node]:
        """The products that `keep` names, by their module. Raises ShardcError (SC202) for a pattern of none."""
        names = list(dict.fromkeys(info(p.node).fqn for p in forward))
        named: set[str] = set()
        for annotation in self.keep:
            matching = {n for n in names if any(annotation.matches(up) for up in _ancestors(n))}
            if not matching:
                message = f"'{annotation.pattern}' of what linear keeps matches no module with a product"
                hint = did_you_mean(annotation.pattern, names, "modules")
                raise error("SC202", message, location=annotation.origin, hint=hint)
            named |= matching
        return {p.node for p in forward if info(p.node).fqn in named}


_Key = tuple[fx.Node, torch.dtype, tuple[int, ...]]  # a value, what it is rounded to, and the dims of one scale


@dataclass
class _Rounding:
    """The 8-bit numbers of each value, made once: before the first product that reads them."""

    graph: Graph
    scale: Literal["tensor", "row"]
    of_gradients: torch.dtype
    history: int
    products: Mapping[fx.Node, int | None]
    params: Collection[fx.Node]
    made: dict[_Key, tuple[fx.Node, fx.Node]] = field(default_factory=dict[_Key, tuple[fx.Node, fx.Node]])
    counts: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])  # by what follows the port's prefix

    def replace(self, node: fx.Node) -> None:
        """Put a product of rounded operands in a product's place."""
        graph = self.graph
        with graph.fx.inserting_before(node):
            gradient = self.products[node]
            rounded = [
                self._of(node, value, dims, i == gradient)
                for i, (value, dims) in enumerate(zip(operands(node), _summed(node), strict=True))
            ]
            args = (*(q for q, _ in rounded), *(s for _, s in rounded), type_of(node).dtype)
            name = info(node).name
            product = graph.call(SCALED[node.target], args, like=node, type=type_of(node), name=f"{name}.fp8")
        graph.replace_value(node, product)

    def finish(self) -> None:
        """Return what histories are made of."""
        graph = self.graph
        graph.outputs = (*graph.outputs, *(Port("output", COUNTS + name) for name in self.counts))
        graph.output_node.args = ((*graph.output_values, *self.counts.values()),)

    def _of(self, reader: fx.Node, value: fx.Node, summed: tuple[int, ...], gradient: bool) -> tuple[fx.Node, fx.Node]:
        base = _base(value)
        if self.scale == "row":
            return self._rounded(reader, value, summed, gradient)
        q, s = self._rounded(reader, base, tuple(range(type_of(base).ndim)), gradient)
        return self._turned(reader, value, base, q), s

    def _rounded(
        self, reader: fx.Node, value: fx.Node, dims: tuple[int, ...], gradient: bool
    ) -> tuple[fx.Node, fx.Node]:
        whole, dtype = self.scale == "tensor", self.of_gradients if gradient else E4M3
        key = value, dtype, () if whole else dims
        if key in self.made:
            return self.made[key]
        graph, type, name = self.graph, type_of(value), info(value).name
        kept = () if whole else tuple(1 if d in dims else n for d, n in enumerate(type.shape))

        def call(
            target: object, args: tuple[object, ...], called: str, of: torch.dtype, shape: Sequence[int]
        ) -> fx.Node:
            made = TensorType.plain(of, shape)
            return graph.call(target, args, like=reader, type=made, name=f"{name}.{called}")

        size = call(aten.abs.default, (value,), "abs", type.dtype, type.shape)
        amax = call(aten.amax.default, (size, list(dims), not whole), "amax", type.dtype, kept)
        delayed = bool(self.history) and _parameter(value) not in self.params
        if delayed:
            about = (GRADIENT if gradient else "") + name
            self.counts[about] = call(COUNT_AMAX, (amax, dtype), "counts", torch.float32, (INTERVALS,))
            history = self._history(about, info(reader).fqn)
            last = call(aten.amax.default, (history, [0], False), "history", torch.float32, ())
            amax = call(aten.abs.default, (last,), "history", torch.float32, ())
        scale = call(SCALE, (amax, dtype), "scale", torch.float32, kept)
        arguments = (value, scale, dtype, True) if delayed else (value, scale, dtype)
        rounded = call(QUANTIZE, arguments, "fp8", dtype, type.shape)
        self.made[key] = rounded, scale
        return rounded, scale

    def _history(self, about: str, fqn: str) -> fx.Node:
        """A new input: the largest elements of a value in steps before; what is no more than a guess is below 0."""
        graph, port = self.graph, Port("state", HISTORY + about)
        with graph.fx.inserting_after(graph.placeholders[-1]):
            node = graph.fx.placeholder(f"{port.role}_{len(graph.inputs)}")
        type = TensorType.plain(torch.float32, (self.history,))
        set_info(node, ValueInfo(graph.unique(port.name), type, fqn=fqn))
        graph.inputs = (*graph.inputs, port)
        return node

    def _turned(self, reader: fx.Node, value: fx.Node, base: fx.Node, rounded: fx.Node) -> fx.Node:
        """The views that make `value` of its base, of the rounded base."""
        if value is base:
            return rounded
        (source,) = operands(value)
        moved = self._turned(reader, source, base, rounded)
        type = type_of(value).with_dtype(type_of(rounded).dtype)
        turned = self.graph.call(
            value.target, value.args, dict(value.kwargs), like=value, type=type, phase=info(reader).phase
        )
        replace_operands(turned, [moved])
        return turned


def _summed(node: fx.Node) -> list[tuple[int, ...]]:
    """Of each operand of a product, the dims that it sums."""
    ndim = type_of(operands(node)[0]).ndim
    if node.target is MM:
        return [(1,), (0,)]
    if node.target is LINEAR_WGRAD:
        return [tuple(range(ndim - 1))] * 2
    return [(ndim - 1,), (1,) if node.target is LINEAR else (0,)]


def _base(value: fx.Node) -> fx.Node:
    """What a value is a view of that has the same elements."""
    while value.op == "call_function" and value.target in TURNS:
        (value,) = operands(value)
    return value


def _params(graph: Graph) -> set[fx.Node]:
    return {n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if p.role == "param"}


def _parameter(weight: fx.Node) -> fx.Node:
    return operands(weight)[0] if weight.target is CAST else weight


def _with_weight(node: fx.Node, params: Collection[fx.Node]) -> _Product | None:
    """A product with a parameter, whose extents are multiples of 16."""
    if node.target not in (LINEAR, LINEAR_DGRAD, MM):
        return None
    values = operands(node)
    bases = [_base(v) for v in values]
    places = [i for i, base in enumerate(bases) if _parameter(base) in params]
    if len(places) != 1 or any(extent % MULTIPLE for extent in type_of(bases[places[0]]).shape):
        return None
    (place,) = places
    return _Product(node, bases[place], bases[1 - place], (node.target, place, _transposed(values[place])))


def _transposed(value: fx.Node) -> int:
    """Whether a matrix is its base's, transposed: 1 or 0."""
    turns = 0
    while value.op == "call_function" and value.target in TURNS:
        turns += value.target in (aten.t.default, aten.transpose.int, aten.permute.default)
        (value,) = operands(value)
    return turns % 2


def _heads(graph: Graph, forward: Sequence[_Product]) -> set[fx.Node]:
    """The products that no other product with a weight follows."""
    products = {p.node for p in forward}
    followed: set[fx.Node] = set()
    for node in reversed(list(graph.fx.nodes)):
        if node.op == "call_function" and info(node).phase == "fwd" and (node in followed or node in products):
            followed.update(node.all_input_nodes)
    return products - followed


def _routers(graph: Graph) -> set[fx.Node]:
    """The nearest products before what ranks their results."""
    nearest: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [v for node in graph.calls() if node.target in RANKINGS for v in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in SCALED:
            nearest.add(node)
        elif not op_name(node.target).startswith("shardc.sdpa"):
            todo += node.all_input_nodes
    return nearest


def _products_of(gradient: fx.Node | None) -> Iterator[fx.Node]:
    """The products that a gradient is a sum of, or a view, or a cast."""
    todo = [] if gradient is None else [gradient]
    while todo:
        node = todo.pop()
        if node.target in SCALED:
            yield node
            continue
        rule = find_rule(node.target) if node.op == "call_function" else None
        if rule is not None and rule.kind in ("view", "pointwise") and rule_of(node).linear == "joint":
            todo += operands(node)


def _ancestors(name: str) -> list[str]:
    """A module, and those around it."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
