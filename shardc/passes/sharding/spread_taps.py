"""spread_taps: a convolution along a sequence as a sum over the taps of its kernel, of rows shifted by each.

Needs: unplaced types of one atom a dim. Ensures: nothing but that values are equal up to rounding.

    %y = convolution(%x, %w, padding 3)[..., :S]      of f32[4, 64, S], w f32[64, 1, 4]

becomes the sum of `w[:, :, j] * shift(x, j - 3)`. A rank of an axis that shards the sequence then fetches three rows
for all of its own, wherever they lie (`passes.sharding.find_sequences`): the ranks before may have fewer, or the
sequence may be a zigzag. Only calls on a dim as long as an annotated sequence are rewritten, also where it is padded by
hand. The gradients of x and w are such sums too, with the rows shifted back.

With a stride of 2 a tap reads one row of every two: rows are grouped in chunks of as many (`ir.ops.shift`), and the
result, one row of each chunk, is a sequence of its own. Where kernels tile the rows, they are fetched by `rules.halo`.

Of a convolution that is not depthwise each tap is one of a single tap, a product. With as much padding on both sides it
stays as it is, unless the sequence may become a zigzag: ranks then fetch the rows on both sides (`rules.halo`). Rows
that are put behind others become moves too (`join_rows`), and those that are cut into chunks are grouped anew
(`chunked_rows`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, results, set_info, type_of
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.shift import SHIFT
from shardc.ir.schema import given
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import Emit
from shardc.passes.sharding.chunked_rows import separate_chunks
from shardc.passes.sharding.join_rows import join_rows
from shardc.passes.sharding.pool_taps import POOLS, SLICES, every_so_many, pool
from shardc.passes.sharding.strided_taps import MOST_TAPS, Phases, unfold
from shardc.plan.context import Balance
from shardc.rules.attention_rows import implied

aten = torch.ops.aten
SPACE = 2  # the dim of a sequence in a convolution's input


@dataclass(frozen=True)
class SpreadTaps(Pass):
    """Rewrite convolutions along dims of these lengths, which may be zigzags by `balance`."""

    lengths: frozenset[int] = frozenset()
    balance: Balance = "none"
    ports: tuple[tuple[str, int], ...] = ()  # the inputs' dims that are these sequences

    def run(self, graph: Graph) -> Graph:
        if not self.lengths:
            return graph
        causal = (n.target in (SDPA, SDPA_BWD) and implied(given(n)) for n in graph.calls())
        turned = self.balance == "zigzag" or (self.balance == "auto" and any(causal))
        lengths = set(self.lengths)
        for node in list(graph.calls()):
            if not node.users:
                continue
            if node.target is aten.convolution.default and self._fits(node, lengths, turned):
                _forward(graph, node)
                if _Kernel.of(node).stride > 1:
                    lengths.add(_Kernel.of(node).length)  # a sequence as well
            elif node.target is aten.convolution_backward.default and self._fits(node, lengths, turned):
                _backward(graph, node)
            elif node.target in (aten.unfold.default, aten.unfold_backward.default):
                unfold(graph, node, lengths)
            elif node.target in POOLS:
                made = pool(graph, node, lengths, () if turned else self.lengths)
                lengths |= set() if made is None else {made}
            elif node.target in SLICES:
                made = every_so_many(graph, node, lengths)
                lengths |= set() if made is None else {made}
            elif node.target is aten.sum.dim_IntList:
                self._sum(node)
        graph.erase_dead()  # what is rewritten says nothing of how rows lie
        separate_chunks(graph, self.ports, turned)
        join_rows(graph, self.lengths)
        graph.erase_dead()
        return graph

    def _fits(self, node: fx.Node, lengths: Collection[int], turned: bool) -> bool:
        args = given(node)
        weight = type_of(args["weight"]).shape
        if len(weight) != SPACE + 1 or args["transposed"]:
            return False
        kernel = _Kernel.of(node)
        if type_of(kernel.x).shape[SPACE] not in lengths or kernel.length < 1:
            return False
        if kernel.stride > 1:
            size = type_of(kernel.x).shape[SPACE]
            tiled = kernel.length * kernel.stride == size and kernel.x is args["input"] and size in self.lengths
            return kernel.taps <= MOST_TAPS and (turned or not tiled)
        around = kernel.x is args["input"] and kernel.length == type_of(kernel.x).shape[SPACE]
        return kernel.depthwise or (1 < kernel.taps <= MOST_TAPS and (turned or not around))

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

    x: fx.Node
    taps: int
    dilation: int
    padding: int
    length: int  # of the result
    groups: int
    depthwise: bool
    by_hand: int  # how much of the padding in front is no padding of the call
    stride: int = 1

    @staticmethod
    def of(node: fx.Node) -> _Kernel:
        args = given(node)
        x, by_hand = _unpadded(args["input"])
        weight, dilation, padding = type_of(args["weight"]).shape, args["dilation"][0], args["padding"][0]
        length = type_of(args["input"]).shape[SPACE] + 2 * padding - (weight[SPACE] - 1) * dilation - 1
        length, stride = length // args["stride"][0] + 1, args["stride"][0]
        depthwise = weight[1] == 1 and args["groups"] == weight[0] == type_of(x).shape[1]
        return _Kernel(
            x, weight[SPACE], dilation, padding + by_hand, length, args["groups"], depthwise, by_hand, stride
        )

    def reads(self, tap: int) -> int:
        return tap * self.dilation - self.padding

    @property
    def options(self) -> tuple[Any, ...]:
        """Of a convolution with one tap."""
        return [1], [0], [1], False, [0], self.groups


def _unpadded(x: fx.Node) -> tuple[fx.Node, int]:
    """What zeros are put about, along a sequence alone; and how many of them are in front."""
    if x.target is not aten.constant_pad_nd.default:
        return x, 0
    args = given(x)
    front, behind, *others = args["pad"]
    if args.get("value", 0) != 0 or any(others) or front < 0 or behind < 0 or type_of(x).ndim != SPACE + 1:
        return x, 0
    return args["self"], front


def _forward(graph: Graph, node: fx.Node) -> None:
    args, kernel = given(node), _Kernel.of(node)
    if args.get("bias") is not None:
        return
    if kernel.stride > 1:
        _strided(graph, node, kernel, args["weight"])
        return
    x, weight, window = kernel.x, args["weight"], _window(node, type_of(kernel.x).shape[SPACE])
    if window is None:
        return
    start, length, cuts = window
    e = Emit(graph, node)
    with graph.fx.inserting_before(node):
        rows, scale, total = (e.wide(x), e.wide(weight), None) if kernel.depthwise else (x, weight, None)
        for j in range(kernel.taps):
            moved = e(SHIFT, rows, SPACE, start + kernel.reads(j), length, 0.0, False)
            if kernel.depthwise:
                term = e.mul(moved, e(aten.select.int, scale, SPACE, j))
            else:
                tap = e(aten.slice.Tensor, scale, SPACE, j, j + 1)
                term = e.wide(e(aten.convolution.default, moved, tap, None, *kernel.options))
            total = term if total is None else e.add(total, term)
        assert total is not None
        y = e.cast(total, type_of(node).dtype)
    if cuts is None:
        graph.replace_value(node, y)
        return
    for cut in cuts:
        read = cut.args[0]
        assert isinstance(read, fx.Node)
        if read is node:
            graph.replace_value(cut, y)
            continue
        e.at = cut  # the bias comes first
        with graph.fx.inserting_before(cut):
            other = next(a for a in read.args if isinstance(a, fx.Node) and a is not node)
            graph.replace_value(cut, e.add(y, other))


def _phases(e: Emit, kernel: _Kernel) -> Phases:
    taps = [j * kernel.dilation for j in range(kernel.taps)]
    return Phases(e, type_of(kernel.x).shape, SPACE, taps, kernel.stride, kernel.padding, kernel.length)


def _strided(graph: Graph, node: fx.Node, kernel: _Kernel, weight: fx.Node) -> None:
    """A convolution with a stride: each tap reads one row of each chunk of as many rows."""
    e, total = Emit(graph, node), None
    with graph.fx.inserting_before(node):
        for j, rows in enumerate(_phases(e, kernel).read(kernel.x)):
            tap = e(aten.slice.Tensor, weight, SPACE, j, j + 1)
            term = e.wide(e(aten.convolution.default, rows, tap, None, *kernel.options))
            total = term if total is None else e.add(total, term)
        assert total is not None
        graph.replace_value(node, e.cast(total, type_of(node).dtype))


def _strided_backward(
    graph: Graph, node: fx.Node, kernel: _Kernel, mask: list[bool], of_x: fx.Node | None, of_weight: fx.Node | None
) -> None:
    e, args = Emit(graph, node), given(node)
    gradient, weight = args["grad_output"], args["weight"]
    backs: list[fx.Node] = []
    parts: list[fx.Node] = []
    with graph.fx.inserting_before(node):
        phases = _phases(e, kernel)
        for j, rows in enumerate(phases.read(kernel.x)):
            tap = e(aten.slice.Tensor, weight, SPACE, j, j + 1)
            back, part = _one_tap(graph, e, gradient, rows, tap, kernel, mask)
            backs += [back] if back is not None else []
            parts += [part] if part is not None else []
        if of_x is not None:
            y = e.cast(phases.joined(backs), type_of(of_x).dtype)
            for value in [of_x] if kernel.x is args["input"] else list(of_x.users):
                graph.replace_value(value, y)
        if of_weight is not None:
            joined = parts[0] if len(parts) == 1 else e(aten.cat.default, parts, SPACE)
            graph.replace_value(of_weight, e.cast(joined, type_of(of_weight).dtype))


def _window(node: fx.Node, rows: int) -> tuple[int, int, list[fx.Node] | None] | None:
    """Which rows of a convolution are read: all of as many as the input has, or those of one section; and who cuts."""
    length = type_of(node).shape[SPACE]
    if length <= rows:
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
    gradient, x, weight, mask = args["grad_output"], kernel.x, args["weight"], args["output_mask"]
    of_x, of_weight, *_ = [*results(node), None, None] if mask[0] and mask[1] else _one_of(node, mask)
    if mask[2] or (of_x is not None and kernel.x is not args["input"] and not _reads_back(of_x, kernel)):
        return
    if kernel.stride > 1:
        _strided_backward(graph, node, kernel, mask, of_x, of_weight)
        return
    start = 0
    if gradient.target is aten.slice_backward.default:
        cut = given(gradient)
        if cut["dim"] % (SPACE + 1) != SPACE or cut["step"] != 1:
            return
        start = slice(cut["start"], cut["end"], 1).indices(cut["input_sizes"][SPACE])[0]
        gradient = cut["grad_output"]
    elif type_of(gradient).shape[SPACE] > type_of(x).shape[SPACE]:
        return
    size, length = type_of(x).shape[SPACE], type_of(gradient).shape[SPACE]
    e = Emit(graph, node)
    with graph.fx.inserting_before(node):
        rows, g, scale = (e.wide(x), e.wide(gradient), e.wide(weight)) if kernel.depthwise else (x, gradient, weight)
        total: fx.Node | None = None
        parts: list[Any] = []
        for j in range(kernel.taps):
            moved = kernel.reads(j) + start
            if not kernel.depthwise:
                read = e(SHIFT, rows, SPACE, moved, length, 0.0, False)
                tap = e(aten.slice.Tensor, scale, SPACE, j, j + 1)
                back, part = _one_tap(graph, e, g, read, tap, kernel, mask)
                if back is not None:
                    term = e.wide(e(SHIFT, back, SPACE, -moved, size, 0.0, False))
                    total = term if total is None else e.add(total, term)
                parts += [] if part is None else [part]
                continue
            if of_x is not None:
                term = e.mul(e(SHIFT, g, SPACE, -moved, size, 0.0, False), e(aten.select.int, scale, SPACE, j))
                total = term if total is None else e.add(total, term)
            if of_weight is not None:
                part = e.sum(e.mul(g, e(SHIFT, rows, SPACE, moved, length, 0.0, False)), [0, SPACE])
                parts.append(e.view(part, [*type_of(weight).shape[:SPACE], 1]))
        if of_x is not None and total is not None:
            y = e.cast(total, type_of(of_x).dtype)
            for value in [of_x] if kernel.x is args["input"] else list(of_x.users):
                graph.replace_value(value, y)
        if of_weight is not None:
            joined = parts[0] if len(parts) == 1 else e(aten.cat.default, parts, SPACE)
            graph.replace_value(of_weight, e.cast(joined, type_of(of_weight).dtype))


def _reads_back(of_x: fx.Node, kernel: _Kernel) -> bool:
    """Is of the gradient of what was padded by hand nothing read but what lies between the zeros?"""
    size = type_of(kernel.x).shape[SPACE]
    for user in of_x.users:
        if user.op != "call_function":
            return False
        args = given(user) if user.target in (aten.slice.Tensor, aten.constant_pad_nd.default) else {}
        if user.target is aten.slice.Tensor:
            start, end, step = slice(args.get("start"), args.get("end"), args.get("step", 1)).indices(
                type_of(of_x).shape[SPACE]
            )
            between = (args.get("dim", 0) % (SPACE + 1), start, end - start, step) == (SPACE, kernel.by_hand, size, 1)
        else:
            pads = list(args.get("pad", ()))
            between = pads[:1] == [-kernel.by_hand] and not any(pads[2:]) and type_of(user).shape[SPACE] == size
        if not between:
            return False
    return True


def _one_tap(
    graph: Graph, e: Emit, g: fx.Node, read: fx.Node, tap: fx.Node, kernel: _Kernel, mask: list[bool]
) -> tuple[fx.Node | None, fx.Node | None]:
    """The gradients of a convolution with one tap: of the rows that it reads, and of the tap."""
    types = (type_of(read) if mask[0] else None, type_of(tap) if mask[1] else None, None)
    args = (g, read, tap, None, *kernel.options, [*mask[:2], False])
    made = graph.call(aten.convolution_backward.default, args, like=e.at, type=None, results=types)
    found: list[fx.Node | None] = [None, None]
    for i, type in enumerate(types[:2]):
        if type is not None:
            value = graph.fx.call_function(operator.getitem, (made, i))
            set_info(value, graph.info_like(e.at, made.target, type, f"{info(made).name}.{i}"))
            found[i] = value
    return found[0], found[1]


def _one_of(node: fx.Node, mask: list[bool]) -> list[fx.Node | None]:
    """Of a backward call with one gradient: that of the input, and of the weight."""
    found = iter(results(node))
    return [next(found) if wanted else None for wanted in mask]
