"""group_experts: what libraries write to bring rows into the order of their experts becomes ops of ours.

    sorted, perm = sort(ids)                              perm, offs = group_rows(ids)
    offs = cumsum(histc(sorted))
    a = grouped_mm(index(x, [perm // k]), w, offs)   ->   a = expert_mm(gather_rows(x, perm, k), w, offs)
    inverse = index_put(full, [perm], arange)
    y = index(a, [inverse])                               y = ungroup_rows(a, perm, offs)

and so do the gradients, which are the same moves the other way. Written with `sort` and `index`, rows have positions
in the whole batch, so every rank would sort, gather and multiply all of it. Here a row is only of its token and of its
expert, and its type says so (see `ir.types`): each rank may order its own.

Needs normalised calls. A grouping is rewritten if all that is read of it is understood: positions as above, biases of
experts, products; and between them, calls that go row by row. Otherwise it is left as it is.
Ensures: `groups_agree`, the rows that meet in a call are of one grouping.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, results, set_info, type_of, update
from shardc.ir.ops.experts import (
    EXPERT_MM,
    EXPERT_WGRAD,
    GATHER_ROWS,
    GROUP_ROWS,
    SPREAD_GROUPS,
    SUM_GROUPS,
    UNGROUP_ROWS,
)
from shardc.ir.ops.grouped import GROUPED_MM, GROUPED_MM_WGRAD
from shardc.ir.types import Dim, TensorType
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import infer
from shardc.passes.normalize.dropped_rows import are_of_experts, zero_where_products_are
from shardc.rules.notation import RuleError, divided
from shardc.rules.registry import bind_call, find_rule, result_shapes, rule_of

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)
UNIFORM = (aten.full.default,)


@dataclass(frozen=True)
class GroupExperts(Pass):
    """Rewrite every grouping of rows by expert that is understood."""

    def run(self, graph: Graph) -> Graph:
        for node in [node for node in graph.calls() if node.target in SORTS]:
            try:
                grouping = _Grouping.read(graph, node)
            except _NotUnderstoodError:
                continue
            grouping.rewrite()
        graph.erase_dead()
        return graph


class _NotUnderstoodError(Exception):
    """Something else is done with rows, or with their order."""


def _require(condition: bool) -> None:
    if not condition:
        raise _NotUnderstoodError


@dataclass(frozen=True)
class _Index:
    """A vector of positions. `take`: of each grouped row its token's, of `each` rows. `put`: of each row its place
    among the grouped. `group`: of each grouped row its expert's."""

    kind: Literal["take", "put", "group"]
    each: int = 1


@dataclass(frozen=True)
class _Move:
    """A call that takes the rows of `moved` at positions, or adds them there to zeros for `size` rows."""

    call: fx.Node
    index: _Index
    moved: fx.Node
    adds: bool = False
    size: int = 0


@dataclass
class _Grouping:
    """One sort of rows by expert, and all that is made with it."""

    graph: Graph
    sort: fx.Node
    ids: fx.Node
    experts: int = 0
    offsets: set[fx.Node] = field(default_factory=set[fx.Node])
    moves: list[_Move] = field(default_factory=list[_Move])
    counting: set[fx.Node] = field(default_factory=set[fx.Node])  # calls on the way from numbers to offsets
    products: list[fx.Node] = field(default_factory=list[fx.Node])
    rows: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])  # values in the order of experts
    between: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])  # calls that go row by row

    @staticmethod
    def read(graph: Graph, sort: fx.Node) -> _Grouping:
        """Raises _NotUnderstoodError."""
        args = _given(sort)
        ids: fx.Node = args["self"]
        type = type_of(ids)
        _require(type.ndim == 1 and type.shape[0] > 1 and not args["descending"])
        _require(type.dtype in (torch.int32, torch.int64))
        grouping = _Grouping(graph, sort, ids)
        ordered, perm = results(sort)
        _require(perm is not None)
        grouping._follow(perm, _Index("take"))  # type: ignore[arg-type]
        counted = [ids] if ordered is None else [ids, ordered]
        for value in counted:
            grouping._find_offsets(value)
        _require(bool(grouping.experts))
        if ordered is not None:
            grouping._follow(ordered, _Index("group"))
        grouping._find_rows()
        return grouping

    # ------------------------------------------------------------------ positions and counts
    def _follow(self, value: fx.Node, index: _Index) -> None:
        """Note all calls that move rows by these positions."""
        for user in value.users:
            target, args = user.target, _given(user) if user.op == "call_function" else {}
            if target in (aten.floor_divide.default, aten.div.Tensor_mode) and index == _Index("take"):
                rounds_down = target is aten.floor_divide.default or args["rounding_mode"] == "floor"
                each = args["other"]
                _require(rounds_down and args["self"] is value and isinstance(each, int) and each > 0)
                self._follow(user, _Index("take", each))
            elif target is aten.index_put.default and index == _Index("take"):
                _require(args["indices"] == [value] and not args["accumulate"] and self._counts(args["values"]))
                self._follow(user, _Index("put"))
            elif target in SORTS and index == _Index("take"):  # the order that sorts the order back
                _require(not args["descending"] and results(user)[0] is None)
                if (back := results(user)[1]) is not None:
                    self._follow(back, _Index("put"))
            elif target is aten.where.self:
                _require(_from_front(user) is value)
                self._follow(user, index)
            elif (move := _move(user, value, index)) is not None:
                self.moves.append(move)
            elif index.kind == "group" and user in self.counting:
                continue
            else:  # a test that is part of `where` is looked at there
                _require(bool(user.users) and all(_from_front(reader) is value for reader in user.users))

    def _counts(self, value: fx.Node) -> bool:
        args = _given(value) if value.op == "call_function" else {}
        return value.target is aten.arange.default and args["end"] == type_of(self.ids).shape[0]

    def _find_offsets(self, value: fx.Node) -> None:
        """Where groups end: the cumulated histogram of the experts' numbers."""
        for cast in value.users:
            for histogram in cast.users if cast.target is aten._to_copy.default else [cast]:
                if histogram.target is not aten.histc.default:
                    continue
                args = _given(histogram)
                for end in histogram.users:
                    if end.target is aten.cumsum.default and (args["min"], args["max"]) == (0, args["bins"] - 1):
                        _require(self.experts in (0, args["bins"]))
                        self.experts = args["bins"]
                        self.offsets.add(end)
                if self.offsets.issuperset(histogram.users):
                    self.counting |= {cast, histogram}

    # ------------------------------------------------------------------ rows
    def _find_rows(self) -> None:
        """All values in the order of experts, and whether all that reads them may."""
        count = type_of(self.ids).shape[0]
        leaving: set[fx.Node] = set()
        for move in self.moves:
            index, rows = move.index, type_of(move.moved).shape[0]
            size = self.experts if index.kind == "group" else count // index.each
            _require(index.kind == "group" or size * index.each == count)
            _require((move.size == size and rows == count) if move.adds else rows == size)
            if move.adds == (index.kind == "put"):
                self.rows[move.call] = None
            else:
                leaving.add(move.call)
        for offsets in self.offsets:
            for user in offsets.users:
                _require(user.target in (GROUPED_MM, GROUPED_MM_WGRAD) and _given(user)["offs"] is offsets)
                self.products.append(user)
                if user.target is GROUPED_MM:
                    _require(type_of(_given(user)["b"]).shape[0] == self.experts)
                    self.rows[user] = None
                else:
                    leaving.add(user)
        entering = set(self.rows)
        todo = list(self.rows)
        while todo:
            for user in todo.pop().users:
                _require(user.op == "call_function" and user.target is not operator.getitem)
                if user in entering or user in leaving or user in self.between:
                    continue
                self.between[user] = None
                for value in results(user):
                    if value is not None:
                        self.rows[value] = None
                        todo.append(value)
        for move in self.moves:
            in_order = [value for value in operands(move.call) if value in self.rows]
            _require(in_order == ([move.moved] if move.call in leaving else []))
        for call in self.products:
            first, second, *_ = operands(call)
            _require(first in self.rows and (second in self.rows) == (call.target is GROUPED_MM_WGRAD))
        for call in self.between:
            self._check_row_by_row(call)
        self._check_dropped_rows(leaving)

    def _check_dropped_rows(self, leaving: set[fx.Node]) -> None:
        if are_of_experts(self.ids, self.experts) or any(move.index.kind == "group" for move in self.moves):
            return  # each id is a position among the experts
        products = [call for call in self.products if call.target is GROUPED_MM]
        zeros = zero_where_products_are(self.graph, products, self.between)
        _require(all(move.moved in zeros for move in self.moves if move.call in leaving))

    def _check_row_by_row(self, call: fx.Node) -> None:
        _require(find_rule(call.target) is not None and not any(type_of(v).ragged for v in operands(call)))
        rule, ragged = rule_of(call), (self.experts,)
        by = tuple(ragged if value in self.rows else () for value in operands(call))
        try:
            divided(rule, by, tuple(ragged for _ in result_shapes(call)))
        except RuleError:
            raise _NotUnderstoodError from None
        row = next(labels[0] for labels, is_row in zip(rule.operands, by, strict=True) if is_row)
        for value, labels, is_row in zip(operands(call), rule.operands, by, strict=True):
            if not is_row and any(factor in dim for dim in labels for factor in row):
                _require(producer(value)[0].target in UNIFORM)  # the same in any order

    # ------------------------------------------------------------------ rewriting
    def rewrite(self) -> None:
        by = TensorType.plain(torch.int64, (self.experts,)).dims[0]
        slots = type_of(self.ids).dims[0]
        with self.graph.fx.inserting_before(self.sort):
            perm, offs = self._call_group_rows(by, slots)
        for call in self.between:
            if info(call).type is None:
                kinds = tuple(None if t is None else t.divided_by(by) for t in info(call).results)
                update(call, results=kinds)
            for value in results(call):
                if value is not None:
                    update(value, type=type_of(value).divided_by(by))
        became: dict[fx.Node, fx.Node] = {}  # what one move yields, another may take
        for move in self.moves:
            with self.graph.fx.inserting_before(move.call):
                new = self._moved(replace(move, moved=became.get(move.moved, move.moved)), perm, offs, by)
                self._replace(move.call, new)
                became[move.call] = new
        for call in self.products:
            args = _given(call)
            with self.graph.fx.inserting_before(call):
                if call.target is GROUPED_MM:
                    new = self._emit(call, by, EXPERT_MM, args["a"], args["b"], offs)
                else:
                    new = self._emit(call, None, EXPERT_WGRAD, args["a"], args["g"], offs)
                self._replace(call, new)

    def _call_group_rows(self, by: Dim, slots: Dim) -> tuple[fx.Node, fx.Node]:
        of_rows, of_groups = infer(GROUP_ROWS, (self.ids, self.experts), {})  # type: ignore[misc]
        types = of_rows.divided_by(by), of_groups.divided_by(slots)  # type: ignore[union-attr]
        call = self.graph.call(GROUP_ROWS, (self.ids, self.experts), like=self.sort, type=None, results=types)
        items: list[fx.Node] = []
        for i, (name, type) in enumerate(zip(("perm", "offs"), types, strict=True)):
            item = self.graph.fx.call_function(operator.getitem, (call, i))
            unique = self.graph.unique(f"{info(call).name}.{name}")
            set_info(item, replace(info(call), name=unique, type=type, results=()))
            items.append(item)
        return items[0], items[1]

    def _moved(self, move: _Move, perm: fx.Node, offs: fx.Node, by: Dim) -> fx.Node:
        call, index, moved = move.call, move.index, move.moved
        if index.kind == "group":
            if move.adds:
                return self._emit(call, None, SUM_GROUPS, moved, offs)
            return self._emit(call, by, SPREAD_GROUPS, moved, perm, offs)
        if move.adds == (index.kind == "put"):
            token, each = self._of_token(moved)
            return self._emit(call, by, GATHER_ROWS, token, perm, index.each * each)
        rows = self._emit(call, None, UNGROUP_ROWS, moved, perm, offs)
        if index.each == 1:
            return rows
        shape = type_of(moved).shape
        slots = self._emit(call, None, aten.view.default, rows, [shape[0] // index.each, index.each, *shape[1:]])
        return self._emit(call, None, aten.sum.dim_IntList, slots, [1])

    def _of_token(self, moved: fx.Node) -> tuple[fx.Node, int]:
        """A value for each token, and how often each is repeated: where tokens are gathered, once is enough."""
        repeated: Any = moved.args[0] if moved.target is aten.view.default else None
        if getattr(repeated, "target", None) is not aten.expand.default:
            return moved, 1
        single: fx.Node = repeated.args[0]
        (tokens, *rest), shape = type_of(single).shape, type_of(moved).shape
        each = shape[0] // max(tokens, 1)
        if rest[:1] != [1] or type_of(repeated).shape != (tokens, each, *rest[1:]) or shape[1:] != tuple(rest[1:]):
            return moved, 1
        if tokens * each != shape[0]:
            return moved, 1
        return self._emit(moved, None, aten.view.default, single, [tokens, *rest[1:]]), each

    def _emit(self, like: fx.Node, by: Dim | None, target: Callable[..., Any], *args: Any) -> fx.Node:
        type = infer(target, args, {})
        assert isinstance(type, TensorType)
        return self.graph.call(target, args, like=like, type=type if by is None else type.divided_by(by), results=())

    def _replace(self, call: fx.Node, new: fx.Node) -> None:
        name, old, kind = info(call).name, type_of(call), type_of(new)
        assert (old.dtype, old.shape) == (kind.dtype, kind.shape), f"{name}: {old} became {kind}"
        call.replace_all_uses_with(new)
        self.graph.activations = {key: new if v is call else v for key, v in self.graph.activations.items()}
        self.graph.gradients = {key: new if v is call else v for key, v in self.graph.gradients.items()}
        self.graph.fx.erase_node(call)
        update(new, name=name)


def _given(call: fx.Node) -> dict[str, Any]:
    """A call's arguments by name, defaults filled in."""
    return bind_call(call.target, call.args, dict(call.kwargs), lambda _, value: value)


def _move(call: fx.Node, positions: fx.Node, index: _Index) -> _Move | None:
    """How a call moves rows by `positions`; None if it does something else with them."""
    args = _given(call) if call.op == "call_function" else {}
    if call.target is aten.index.Tensor and args["indices"] == [positions]:
        return _Move(call, index, args["self"])
    if call.target is aten.index_select.default and args["index"] is positions and args["dim"] == 0:
        return _Move(call, index, args["self"])
    if call.target is aten.embedding_dense_backward.default and args["indices"] is positions:
        plain = args["padding_idx"] == -1 and not args["scale_grad_by_freq"]
        return _Move(call, index, args["grad_output"], True, args["num_weights"]) if plain else None
    if call.target is aten.index_add.default and args["index"] is positions and args["dim"] == 0:
        zeros = producer(args["self"])[0]
        plain = zeros.target in UNIFORM and _given(zeros)["fill_value"] == 0 and args["alpha"] == 1
        same = type_of(args["self"]).dtype == type_of(args["source"]).dtype
        size = type_of(args["self"]).shape[0]
        return _Move(call, index, args["source"], True, size) if plain and same else None
    return None


def _from_front(node: fx.Node) -> fx.Node | None:
    """`x` of `where(x < 0, x + n, x)`, as positions that may count from the end are written."""
    if node.target is not aten.where.self:
        return None
    condition, wrapped, x = (_given(node)[name] for name in ("condition", "self", "other"))
    if condition.target is not aten.lt.Scalar or wrapped.target is not aten.add.Tensor:
        return None
    return x if condition.args[:2] == (x, 0) and wrapped.args[0] is x else None
