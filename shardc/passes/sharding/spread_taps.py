"""spread_taps: a depthwise convolution along a sequence as a sum over the taps of its kernel, of rows shifted by each.

Needs: unplaced types of one atom a dim. Ensures: nothing but that values are equal up to rounding.

    %y = convolution(%x, %w, padding 3)[..., :S]      of f32[4, 64, S], w f32[64, 1, 4]

becomes the sum of `w[:, :, j] * shift(x, j - 3)`. A rank of an axis that shards the sequence then fetches three rows
for all of its own, wherever they lie (`passes.sharding.find_sequences`): the ranks before may have fewer, or the
sequence may be a zigzag. Only calls on a dim as long as an annotated sequence are rewritten. The gradients of x and w
are such sums too, with the rows shifted back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, results, type_of
from shardc.ir.ops.shift import SHIFT
from shardc.ir.schema import given
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import Emit

aten = torch.ops.aten
SPACE = 2  # the dim of a sequence in a convolution's input


@dataclass(frozen=True)
class SpreadTaps(Pass):
    """Rewrite depthwise convolutions along dims of these lengths."""

    lengths: frozenset[int] = frozenset()

    def run(self, graph: Graph) -> Graph:
        if not self.lengths:
            return graph
        for node in list(graph.calls()):
            if not node.users:
                continue
            if node.target is aten.convolution.default and self._fits(node, "input"):
                _forward(graph, node)
            elif node.target is aten.convolution_backward.default and self._fits(node, "input"):
                _backward(graph, node)
            elif node.target is aten.sum.dim_IntList:
                self._sum(node)
        graph.erase_dead()
        return graph

    def _fits(self, node: fx.Node, name: str) -> bool:
        args = given(node)
        x, weight = type_of(args[name]).shape, type_of(args["weight"]).shape
        depthwise = len(weight) == SPACE + 1 and weight[1] == 1 and args["groups"] == weight[0] == x[1]
        return depthwise and args["stride"] == [1] and not args["transposed"] and x[SPACE] in self.lengths

    def _sum(self, node: fx.Node) -> None:
        """A sum over what was padded with zeros is the sum over what they were put about."""
        args = given(node)
        padded = args["self"]
        if padded.target is not aten.slice_backward.default:
            return
        dim = given(padded)["dim"] % type_of(padded).ndim
        inner = given(padded)["grad_output"]
        over = [d % type_of(padded).ndim for d in args.get("dim") or ()]
        if dim in over and type_of(inner).shape[dim] in self.lengths:
            node.args = (inner, *node.args[1:])


@dataclass(frozen=True)
class _Kernel:
    """The taps of a convolution: the j-th reads row `i + j * dilation - padding` for the result's row i."""

    taps: int
    dilation: int
    padding: int

    @staticmethod
    def of(node: fx.Node) -> _Kernel:
        args = given(node)
        return _Kernel(type_of(args["weight"]).shape[SPACE], args["dilation"][0], args["padding"][0])

    def reads(self, tap: int) -> int:
        return tap * self.dilation - self.padding


def _forward(graph: Graph, node: fx.Node) -> None:
    args, kernel = given(node), _Kernel.of(node)
    if args.get("bias") is not None:
        return
    x, weight, window = args["input"], args["weight"], _window(node)
    if window is None:
        return
    start, length, cuts = window
    e = Emit(graph, node)
    with graph.fx.inserting_before(node):
        rows, scale, total = e.wide(x), e.wide(weight), None
        for j in range(kernel.taps):
            moved = e(SHIFT, rows, SPACE, start + kernel.reads(j), length, 0.0, False)
            term = e.mul(moved, e(aten.select.int, scale, SPACE, j))
            total = term if total is None else e.add(total, term)
        assert total is not None
        y = e.cast(total, type_of(node).dtype)
    if cuts is None:
        node.replace_all_uses_with(y)
        return
    for cut in cuts:
        read = cut.args[0]
        assert isinstance(read, fx.Node)
        if read is node:
            cut.replace_all_uses_with(y)
            continue
        e.at = cut  # the bias comes first
        with graph.fx.inserting_before(cut):
            other = next(a for a in read.args if isinstance(a, fx.Node) and a is not node)
            cut.replace_all_uses_with(e.add(y, other))


def _window(node: fx.Node) -> tuple[int, int, list[fx.Node] | None] | None:
    """Which rows of a convolution are read: all of as many as the input has, or those of one section; and who cuts."""
    args = given(node)
    length = type_of(node).shape[SPACE]
    if length == type_of(args["input"]).shape[SPACE]:
        return 0, length, None
    cuts: list[fx.Node] = []
    for user in node.users:
        others = [a for a in user.args if isinstance(a, fx.Node) and a is not node]
        plain = user.target is aten.add.Tensor and not user.kwargs and len(user.args) == 2 and len(others) == 1
        broadcast = plain and type_of(others[0]).shape[-1:] in ((1,), ())
        if user.target is aten.slice.Tensor:
            cuts.append(user)
        elif broadcast and all(reader.target is aten.slice.Tensor for reader in user.users):
            cuts += user.users
        else:
            return None
    sections: set[tuple[int, int]] = set()
    for cut in cuts:
        said = given(cut)
        start, end, _ = slice(said.get("start"), said.get("end"), 1).indices(length)
        if said.get("dim", 0) % (SPACE + 1) != SPACE or said.get("step", 1) != 1 or end <= start:
            return None
        sections.add((start, end))
    if len(sections) != 1:
        return None
    ((start, end),) = sections
    return start, end - start, cuts


def _backward(graph: Graph, node: fx.Node) -> None:
    args, kernel = given(node), _Kernel.of(node)
    gradient, x, weight, mask = (args[name] for name in ("grad_output", "input", "weight", "output_mask"))
    if mask[2]:
        return
    start = 0
    if gradient.target is aten.slice_backward.default:
        cut = given(gradient)
        if cut["dim"] % (SPACE + 1) != SPACE or cut["step"] != 1:
            return
        start = slice(cut["start"], cut["end"], 1).indices(cut["input_sizes"][SPACE])[0]
        gradient = cut["grad_output"]
    elif type_of(gradient).shape != type_of(x).shape:
        return
    size, length = type_of(x).shape[SPACE], type_of(gradient).shape[SPACE]
    of_x, of_weight, *_ = [*results(node), None, None] if mask[0] and mask[1] else _one_of(node, mask)
    e = Emit(graph, node)
    with graph.fx.inserting_before(node):
        rows, g, scale = e.wide(x), e.wide(gradient), e.wide(weight)
        total: fx.Node | None = None
        parts: list[Any] = []
        for j in range(kernel.taps):
            moved = kernel.reads(j) + start
            if of_x is not None:
                term = e.mul(e(SHIFT, g, SPACE, -moved, size, 0.0, False), e(aten.select.int, scale, SPACE, j))
                total = term if total is None else e.add(total, term)
            if of_weight is not None:
                part = e.sum(e.mul(g, e(SHIFT, rows, SPACE, moved, length, 0.0, False)), [0, SPACE])
                parts.append(e.view(part, [*type_of(weight).shape[:SPACE], 1]))
        if of_x is not None and total is not None:
            of_x.replace_all_uses_with(e.cast(total, type_of(of_x).dtype))
        if of_weight is not None:
            joined = parts[0] if len(parts) == 1 else e(aten.cat.default, parts, SPACE)
            of_weight.replace_all_uses_with(e.cast(joined, type_of(of_weight).dtype))


def _one_of(node: fx.Node, mask: list[bool]) -> list[fx.Node | None]:
    """Of a backward call with one gradient: that of the input, and of the weight."""
    found = iter(results(node))
    return [next(found) if wanted else None for wanted in mask]
