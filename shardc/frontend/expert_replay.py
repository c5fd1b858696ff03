"""What experts compute of their rows, each by itself, written once in the grouped form.

    h0 = linear(x, w0)      h1 = linear(x, w1)   ...       h = product(rows of x, stack(w0, w1, ...))
    y0 = silu(h0) * c       y1 = silu(h1) * c    ...  ->   y = silu(h) * c

The calls of all experts are walked in lockstep, from the rows that are given back to those that were read. In each step
they have to be the same calls; what differs may be weights: of a product, or of what goes element by element. A weight
that is a part of a stacked one, `w[e]`, is that one again. What is drawn (dropout) is drawn once, for each slot.

Longer than 400 lines: one walk, with a case for each kind of call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc import torch_compat
from shardc.frontend.expert_masks import Chosen, choice_of, shape_of
from shardc.frontend.library_experts import Rows
from shardc.frontend.memory_writes import writes_of, writes_to
from shardc.ir.ops.linear import LINEAR, linear
from shardc.ir.trees import flatten

aten = torch.ops.aten
_RESHAPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)


_VIEWS = (
    *_RESHAPED, aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.alias.default, aten.clone.default, aten.slice.Tensor,
)  # fmt: skip


class NotAlikeError(Exception):
    """Experts that compute different things, or something that has no grouped form."""


def _refuse() -> NoReturn:
    raise NotAlikeError


@dataclass(frozen=True)
class Root:
    """Rows as they were read: `source` has one for each element of a level. `ids` say whose they are."""

    source: Tensor
    level: tuple[int, ...]
    ids: fx.Node


@dataclass
class Recording:
    """What is known of the calls of experts."""

    known: dict[fx.Node, Tensor] = field(default_factory=dict[fx.Node, Tensor])  # what calls were given beside rows
    roots: dict[fx.Node, Root] = field(default_factory=dict[fx.Node, Root])
    lifts: dict[fx.Node, fx.Node] = field(
        default_factory=dict[fx.Node, fx.Node]
    )  # what rows are that were lifted, or made safe
    ungraded: set[fx.Node] = field(default_factory=set[fx.Node])  # calls under no_grad

    def root(self, rows: Tensor, root: Root) -> None:
        if (node := torch_compat.node_of(rows)) is not None:
            self.roots[node] = root

    def lift(self, rows: Tensor, before: Tensor) -> None:
        node, source = torch_compat.node_of(rows), torch_compat.node_of(before)
        if node is not None and source is not None:
            self.lifts[node] = source

    @contextmanager
    def call(self, args: Any, kwargs: Any) -> Generator[None]:
        """Meanwhile a call of an expert is traced."""
        first: fx.Node | None = None
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor):
                node = torch_compat.node_of(getattr(leaf, "rows", leaf))
                first = first or node
                if node is not None and not hasattr(leaf, "rows"):
                    self.known[node] = leaf
        last = None if first is None else next(iter(reversed(first.graph.nodes)))
        yield
        if last is not None and not torch.is_grad_enabled():
            self.ungraded.update(list(dropwhile(lambda node: node is not last, last.graph.nodes))[1:])


@dataclass(frozen=True)
class Batch:
    """The rows of experts 0 ... experts - 1, which are given to places of these labels: added, or set."""

    ids: Tensor
    chosen: Chosen
    experts: int
    labels: tuple[int, ...]
    adds: bool


def replayed(
    batch: Batch, rows: Sequence[tuple[Tensor, tuple[int, ...]]], recording: Recording
) -> tuple[Tensor, Tensor | None]:
    """What is given to all places; and to which of them something is, if not to all.

    Raises NotAlikeError.
    """
    ids, chosen = batch.ids, batch.chosen
    sizes = shape_of(chosen.ids)
    every = tuple(label for label, size in enumerate(sizes) if size != 1)
    bound, distinct = choice_of(chosen.ids)
    last = len(sizes) - 1
    if chosen.labels != every and not (distinct and every == (*chosen.labels, last)):
        _refuse()  # rows of a token that are counted once, however often it has chosen the expert
    each = sizes[last] if len(sizes) > 1 else 1
    tokens = tuple(label for label in every if label != last or each == 1)
    if batch.labels not in (tokens, every) or (not batch.adds and batch.labels != every):
        _refuse()
    certain = bound is not None and bound <= batch.experts
    flat = ids.reshape(-1, each)
    valid = None if certain else (flat >= 0) & (flat < batch.experts)
    kept = flat if valid is None else torch.where(valid, flat, batch.experts)
    grouped = Rows(kept, batch.experts)
    nodes = [torch_compat.node_of(value) for value, _ in rows]
    if any(node is None for node in nodes):
        _refuse()
    replay = _Replay(batch, grouped, kept, certain, recording, every, tokens)
    kind, result = replay.of(tuple(cast("list[fx.Node]", nodes)))
    replay.refuse_written()
    replay.refuse_reduced()
    result = replay.in_order(kind, result)
    if result.shape[0] != flat.numel():
        _refuse()
    slots = grouped.slots(result.flatten(1) if result.dim() > 1 else result[:, None])
    total = slots.flatten(0, 1) if batch.labels == every else slots.sum(1)
    return total, None if valid is None else valid.reshape(-1)


class _Replay:
    def __init__(
        self,
        batch: Batch,
        rows: Rows,
        ids: Tensor,
        certain: bool,
        recording: Recording,
        every: tuple[int, ...],
        tokens: tuple[int, ...],
    ) -> None:
        self.batch, self.rows, self.ids, self.certain = batch, rows, ids, certain
        self.recording, self.every, self.tokens = recording, every, tokens
        self.count = rows.perm.shape[0]
        self.memo: dict[tuple[fx.Node, ...], tuple[str, Any]] = {}
        self.single: dict[fx.Node, Any] = {}
        self.of_rows: dict[fx.Node, bool] = {}
        self.leaves: set[fx.Node] = {batch.chosen.ids}
        self.beside: set[fx.Node] = set()  # of these, what calls were given beside rows

    def of(self, nodes: tuple[fx.Node, ...]) -> tuple[str, Any]:
        """The value that these are, one of each expert: "rows", all in the order of experts; "plain", a tensor and its
        level, of which experts have their rows; "same", for all of them; or "each", whose first dim is the experts'."""
        if nodes not in self.memo:
            self.memo[nodes] = self._of(nodes)
        return self.memo[nodes]

    def _of(self, nodes: tuple[fx.Node, ...]) -> tuple[str, Any]:
        recording, head = self.recording, nodes[0]
        if head in recording.lifts:
            return self.of(tuple(recording.lifts.get(node) or _refuse() for node in nodes))
        if head in recording.roots:
            return self._root([recording.roots.get(node) or _refuse() for node in nodes])
        if head.target is RANDOM_UNIFORM:
            return "rows", self._drawn(nodes)
        if not self._has_rows(head):
            if any(self._has_rows(node) for node in nodes):
                _refuse()
            if all(node is head for node in nodes):
                return "same", self._alone(head)
            return "each", self._each(nodes)
        self._refuse_other_calls(nodes)
        with torch.set_grad_enabled(head not in recording.ungraded and torch.is_grad_enabled()):
            return self._call(nodes)

    def in_order(self, kind: str, value: Any) -> Tensor:
        """Rows in the order of experts."""
        if kind == "plain":
            return self._ordered(*value)
        return value if kind == "rows" else _refuse()

    def _has_rows(self, node: fx.Node) -> bool:
        """Whether a value is computed of rows that were read."""
        recording = self.recording
        todo = [node]
        while todo:
            one = todo[-1]
            if one in self.of_rows:
                todo.pop()
            elif one in recording.roots or one in recording.lifts or one.target is RANDOM_UNIFORM:
                self.of_rows[one] = True
            elif one in recording.known or one.op != "call_function":
                self.of_rows[one] = False
            elif missing := [source for source in one.all_input_nodes if source not in self.of_rows]:
                todo += missing
            else:
                self.of_rows[one] = any(self.of_rows[source] for source in one.all_input_nodes)
        return self.of_rows[node]

    # ------------------------------------------------------------------ rows
    def _root(self, roots: Sequence[Root]) -> tuple[str, Any]:
        head = roots[0]
        if any(root.level != head.level or root.source.shape != head.source.shape for root in roots):
            _refuse()
        nodes = [torch_compat.node_of(root.source) for root in roots]
        if None in nodes:
            _refuse()
        self.leaves.update(cast("list[fx.Node]", nodes))
        if all(_is_same(node, nodes[0]) for node in nodes):
            return "plain", (head.source, head.level)
        return "rows", self._column(cast("list[fx.Node]", nodes), head)

    def _ordered(self, source: Tensor, level: tuple[int, ...]) -> Tensor:
        inner = source.shape[1:]
        if level == self.tokens and self.tokens != self.every:
            return self.rows.of_tokens(source)
        sizes = shape_of(self.batch.chosen.ids)
        if level != self.every:
            spread = [sizes[label] if label in level else 1 for label in self.every]
            source = source.reshape(*spread, *inner).expand(*(sizes[label] for label in self.every), *inner)
        return self.rows.of_slots(source.reshape(self.rows.tokens, self.rows.each, *inner))

    def _column(self, nodes: Sequence[fx.Node], head: Root) -> Tensor:
        """Of a table with a column for each expert, that of a slot's: `scores[token, e]`."""
        if head.level != self.tokens or any(node.target is not aten.select.int for node in nodes):
            _refuse()
        table, dim = nodes[0].args[0], cast("int", nodes[0].args[1])
        if any(not _is_same(cast("fx.Node", node.args[0]), cast("fx.Node", table)) for node in nodes):
            _refuse()
        shape = shape_of(cast("fx.Node", table))
        columns = [cast("int", node.args[2]) % shape[dim] for node in nodes]
        if dim % len(shape) != len(shape) - 1 or columns != list(range(len(nodes))):
            _refuse()
        whole = torch.stack([self._source(node) for node in nodes], -1) if len(shape) != 2 else None
        whole = self._alone(table) if whole is None and table in self.recording.known else whole
        whole = torch.stack([self._source(node) for node in nodes], -1) if whole is None else whole
        ids = self.ids if self.certain else self.ids.clamp(max=self.batch.experts - 1)
        if whole.dim() != 2 or whole.shape[0] != self.rows.tokens:
            _refuse()
        return self.rows.of_slots(whole.gather(1, ids))

    def _source(self, node: fx.Node) -> Tensor:
        return next(root.source for root in self.recording.roots.values() if torch_compat.node_of(root.source) is node)

    def _drawn(self, nodes: tuple[fx.Node, ...]) -> Tensor:
        """One draw for each slot, in the order of slots: the same numbers on any layout."""
        seed, number, shape, *rest = nodes[0].args
        shapes = [cast("list[int]", node.args[2]) for node in nodes]
        sizes = shape_of(self.batch.chosen.ids)
        counts = {math.prod(sizes[label] for label in level) for level in (self.every, self.tokens)}
        if any(node.target is not RANDOM_UNIFORM or one != shape for node, one in zip(nodes, shapes, strict=True)):
            _refuse()
        if not shapes[0] or shapes[0][0] not in counts:
            _refuse()
        inner = list(shapes[0][1:])
        full = [self.count, *inner]
        strides = [math.prod(full[dim + 1 :]) for dim in range(len(full))]
        given = self._alone(cast("fx.Node", seed)), self._alone(cast("fx.Node", rest[1]))
        drawn = RANDOM_UNIFORM(given[0], number, full, strides, given[1])
        return self.rows.of_slots(drawn.reshape(self.rows.tokens, self.rows.each, *inner))

    # ------------------------------------------------------------------ calls
    def _refuse_other_calls(self, nodes: tuple[fx.Node, ...]) -> None:
        head = nodes[0]
        blank = _blank(head)
        ungraded = self.recording.ungraded
        for node in nodes:
            if node.op != "call_function" or node.target is not head.target or _blank(node) != blank:
                _refuse()
            if (node in ungraded) != (head in ungraded) or len(node.all_input_nodes) != len(head.all_input_nodes):
                _refuse()

    def _call(self, nodes: tuple[fx.Node, ...]) -> tuple[str, Any]:
        head = nodes[0]
        target: Any = head.target
        operands = list(zip(*(_operands(node) for node in nodes), strict=True))
        values = [self.of(tuple(one)) for one in operands]
        if target is operator.getitem:
            kind, value = values[0]
            at = cast("int", head.args[1])
            return (kind, (value[0][at], value[1])) if kind == "plain" else (kind, value[at])
        if not isinstance(target, OpOverload) or torch_compat.mutates(head):
            _refuse()
        kinds, levels = {kind for kind, _ in values}, {value[1] for kind, value in values if kind == "plain"}
        if kinds <= {"plain", "same"} and len(levels) == 1:  # the same for all experts: once is enough
            ready = iter([value[0] if kind == "plain" else value for kind, value in values])
            args, kwargs = _put(head.args, ready), {key: _put(arg, ready) for key, arg in head.kwargs.items()}
            done = linear(*args) if target is LINEAR else target(*args, **kwargs)
            return "plain", (done, levels.pop())
        values = [("rows", self.in_order(kind, value)) if kind == "plain" else (kind, value) for kind, value in values]
        values = [self._trained(kind, value) for kind, value in values]
        return "rows", self._on_rows(target, head, values)

    def _trained(self, kind: str, value: Any) -> tuple[str, Any]:
        """What all experts share has a gradient of each, as if each had its own."""
        if kind != "same" or not isinstance(value, Tensor) or not value.requires_grad:
            return kind, value
        return "each", value.unsqueeze(0).expand(self.batch.experts, *value.shape)

    def _on_rows(self, target: Any, head: fx.Node, values: Sequence[tuple[str, Any]]) -> Any:
        if target in (LINEAR, aten.mm.default, aten.addmm.default):
            return self._product(target, head, values)
        shape = shape_of(head) if isinstance(head.meta["val"], Tensor) else None
        ready = iter([self._beside(kind, value, head, target) for kind, value in values])
        args = tuple(_put(arg, ready) for arg in head.args)
        kwargs = {key: _put(arg, ready) for key, arg in head.kwargs.items()}
        if target in _RESHAPED:
            (x, sizes) = args[:2]
            before = shape_of(head.all_input_nodes[0])
            if shape is None or not before or shape[:1] != before[:1] or sizes[0] not in (-1, shape[0]):
                _refuse()
            args = (x, [self.count, *shape[1:]])
        result = target(*args, **kwargs)
        if shape is not None and tuple(result.shape) != (self.count, *shape[1:]):
            _refuse()
        return result

    def _product(self, target: Any, head: fx.Node, values: Sequence[tuple[str, Any]]) -> Tensor:
        bias, (x, w) = (values[0], values[1:]) if target is aten.addmm.default else (None, values)
        if x[0] != "rows" or x[1].dim() != 2 or w[0] == "rows" or head.kwargs:
            _refuse()
        if w[0] == "same":
            y = linear(x[1], w[1]) if target is LINEAR else torch.mm(x[1], w[1])
        else:
            y = self.rows.product(x[1], w[1].transpose(1, 2) if target is LINEAR else w[1])
        if bias is None:
            return y
        if bias[0] == "rows":
            _refuse()
        return y + self._beside(*bias, head, aten.add.Tensor)

    def _beside(self, kind: str, value: Any, head: fx.Node, target: Any) -> Any:
        """An operand, as rows need it: of what each expert has of its own, a row for each."""
        if kind != "each":
            return value
        if torch.Tag.pointwise not in target.tags or not self.certain:
            _refuse()
        rank = len(shape_of(head))
        inner = list(value.shape[1:])
        if len(inner) == rank and inner[0] == 1:
            inner = inner[1:]
        if len(inner) >= rank:
            _refuse()
        rows = value.reshape(self.batch.experts, -1)[self.rows.ordered]
        return rows.reshape(self.count, *(1 for _ in range(rank - 1 - len(inner))), *inner)

    # ------------------------------------------------------------------ weights
    def _alone(self, node: fx.Node) -> Any:
        """A value that rows are not needed for, as one expert has it."""
        if node in self.recording.known:
            self.leaves.add(node)
            self.beside.add(node)
            tensor = self.recording.known[node]
            return tensor if torch_compat.node_of(tensor) is node else _refuse()
        if node not in self.single and node.op == "placeholder":
            self.single[node] = torch_compat.tensors_by_node().get(node)
            self.leaves.add(node)
        if node not in self.single:
            if node.op != "call_function" or (isinstance(node.target, OpOverload) and torch_compat.mutates(node)):
                _refuse()
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._alone)
            with torch.set_grad_enabled(node not in self.recording.ungraded and torch.is_grad_enabled()):
                self.single[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.single[node]

    def _each(self, nodes: tuple[fx.Node, ...]) -> Tensor:
        """What each expert has of its own, along a new first dim."""
        whole = self._part_of_whole(nodes)
        if whole is not None:
            return whole
        values = [self._alone(node) for node in nodes]
        head = values[0]
        if not isinstance(head, Tensor) or any(v.shape != head.shape or v.dtype != head.dtype for v in values):
            _refuse()
        return torch.stack(values)

    def _part_of_whole(self, nodes: tuple[fx.Node, ...]) -> Tensor | None:
        """Of `w[0]`, `w[1]`, ..., of all that it has, `w`; and of what is a view of them, or a cast, that of `w`."""
        head = nodes[0]
        target: Any = head.target
        if any(node.op != "call_function" or node.target is not target for node in nodes):
            return None
        sources = tuple(node.all_input_nodes[0] for node in nodes if node.all_input_nodes)
        if len(sources) != len(nodes):
            return None
        if target is aten.select.int and all(node.args[1] == 0 for node in nodes):
            size = shape_of(sources[0])[0] if shape_of(sources[0]) else 0
            numbers = [cast("int", node.args[2]) % max(size, 1) for node in nodes]
            same = all(source is sources[0] for source in sources)
            return self._whole(sources[0]) if same and size == len(nodes) and numbers == list(range(size)) else None
        if any(_blank(node) != _blank(head) or len(node.all_input_nodes) != 1 for node in nodes):
            return None
        if target not in _SHIFTED:
            return None
        inner = self._part_of_whole(sources)
        self.leaves.update(nodes)
        return None if inner is None else _SHIFTED[target](inner, head)

    def _whole(self, node: fx.Node) -> Tensor | None:
        if node in self.recording.known:
            return self._alone(node)
        self.leaves.add(node)
        return torch_compat.tensors_by_node().get(node)

    def refuse_reduced(self) -> None:
        """Refuse where a number beside rows is computed of an expert's rows, as in `y == y.max()`: those that it was
        computed of, and those in the grouped form, are rounded differently."""
        roots = {node for node, root in self.recording.roots.items() if root.ids is self.batch.chosen.ids}
        first = min(roots)
        todo, seen = [*self.beside], set[fx.Node]()
        while todo:
            node = todo.pop()
            if node in roots:
                _refuse()
            if node not in seen and first < node:
                seen.add(node)
                todo += node.all_input_nodes

    def refuse_written(self) -> None:
        """Refuse where what is read now has been written to since it was read first, or what is written once more was
        written to by itself, as by `rows[:, 0] = 1`."""
        walked = [*self.leaves, *self.single, *(node for nodes in self.memo for node in nodes)]
        first = min(node for node in walked if node in self.recording.roots)
        writes = [write for write in writes_of(first.graph) if first < write]
        if writes and writes_to(dict.fromkeys(walked, False), writes):
            _refuse()


def _at(dim: int, rank: int) -> int:
    return dim % rank + 1


_SHIFTED: dict[Any, Any] = {
    aten.t.default: lambda w, node: w.transpose(1, 2),
    aten.transpose.int: lambda w, node: w.transpose(
        _at(node.args[1], len(shape_of(node))), _at(node.args[2], len(shape_of(node)))
    ),
    aten.permute.default: lambda w, node: w.permute(0, *(_at(d, len(shape_of(node))) for d in node.args[1])),
    aten._to_copy.default: lambda w, node: aten._to_copy.default(w, **node.kwargs),
    aten.alias.default: lambda w, node: w,
    aten.clone.default: lambda w, node: w.clone(),
    aten.detach.default: lambda w, node: w.detach(),
}


def _is_same(a: fx.Node | None, b: fx.Node | None) -> bool:
    """One value, or views of one that were taken alike."""
    while a is not b:
        if a is not None and b is not None and a.target is b.target is aten.arange.default:
            return _blank(a) == _blank(b)
        if a is None or b is None or a.op != "call_function" or b.op != "call_function":
            return False
        if a.target is not b.target or _blank(a) != _blank(b) or len(a.all_input_nodes) != 1:
            return False
        if len(b.all_input_nodes) != 1 or a.target not in _VIEWS:
            return False
        a, b = a.all_input_nodes[0], b.all_input_nodes[0]
    return True


def _operands(node: fx.Node) -> list[fx.Node]:
    """With repeats, in order."""
    collected: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda one: collected.append(one) or one)
    return collected


def _put(arg: Any, ready: Any) -> Any:
    return fx.map_arg(arg, lambda _: next(ready))


def _blank(node: fx.Node) -> str:
    """The arguments, but for which values they are."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: "%"))
