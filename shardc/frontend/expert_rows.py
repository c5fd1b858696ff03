"""Loops over experts as tutorials and older libraries write them, while a model is traced.

    for e, expert in enumerate(experts):
        token, choice = torch.where(ids == e)                               places
        out.index_add_(0, token, expert(x[token]) * w[token, choice, None]) rows, given to `out`

How many rows an expert gets is known in a step alone. So `x[token]` becomes all tokens, of which a mask is known
(`ExpertRows`, a kind of `SelectedRows`), and what is computed of them is traced so. What a loop gives to `out` waits
until something else reads `out`. Then all experts are known: if they are alike, what one computes of its rows is
written once more in the grouped form (`expert_replay`), and what was traced is dropped. Otherwise each expert computes
all tokens, and what no router has sent to it is dropped where it is added; a note says so (SC129).

A *level* of rows is for which dims of `ids` there is one each: x[token] for each token, w[token, choice] for each slot.
Rows meet at the finer level. Whether an expert has any rows may be asked (`if token.numel() == 0: continue`): all have.
That nothing else depends on the answer is tried by a second trace, in which none has.

Longer than 400 lines: which reads and writes a loop may make of a tensor are one set of conditions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx

from shardc import torch_compat
from shardc.frontend.expert_masks import EXPERTS, Chosen, Masks, choice_of, layout, shape_of
from shardc.frontend.expert_replay import Batch, NotAlikeError, Recording, Root, replayed
from shardc.frontend.memory_writes import has_views, is_written, memory_of, writes_of, writes_to
from shardc.frontend.row_selection import Questions, harmless, name_of
from shardc.frontend.selected_rows import SelectedRows, writes_in_place
from shardc.ir.diagnostic import error
from shardc.ir.trees import flatten

_T: Any = Tensor
_ADDS = (Tensor.index_add_, Tensor.index_add, torch.index_add)
_PLUS = (Tensor.__iadd__, Tensor.__add__, Tensor.__radd__, Tensor.add, Tensor.add_, torch.add)
_READS = (Tensor.__getitem__, Tensor.__setitem__, *_ADDS)
_ABOUT = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "names"}
_ABOUT_CALLS = {"size", "dim", "numel", "is_floating_point", "element_size", "is_contiguous", "stride", "get_device"}
HINT = (
    "read rows by torch.where(ids == e), x[token], and give them back by out.index_add_(0, token, rows) or "
    "out[token] += rows"
)


@dataclass
class Selection:
    """The slots of one expert. `mask`: over the labels, in their order."""

    loops: ExpertLoops
    chosen: Chosen
    mask: Tensor
    at: dict[tuple[int, ...], Tensor] = field(default_factory=dict[tuple[int, ...], Tensor])

    @property
    def labels(self) -> tuple[int, ...]:
        return self.chosen.labels

    def sizes(self, labels: Sequence[int]) -> list[int]:
        ids = shape_of(self.chosen.ids)
        return [ids[label] for label in labels]

    def mask_at(self, level: tuple[int, ...]) -> Tensor:
        """One truth value for each row of a level."""
        if level not in self.at:
            gone = [place for place, label in enumerate(self.labels) if label not in level]
            self.at[level] = (self.mask.any(gone) if gone else self.mask).reshape(-1)
        return self.at[level]


class ExpertRows(SelectedRows):
    """`rows` of one level; those of the selection's expert are chosen."""

    selection: Selection
    level: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]  # of coordinates: which labels they count
    read: tuple[Tensor, Any] | None  # they are what stands in a tensor at places, and
    added: ExpertRows | None  # these more
    stale: bool  # the tensor waits for rows, which these are without
    waits: tuple[_Pending, int] | None  # and for how many
    leading: bool  # a dim of size 1 stands before the rows

    @staticmethod
    def at(selection: Selection, level: tuple[int, ...], rows: Tensor, *, safe: bool = False) -> ExpertRows:
        self = torch_compat.wrapper(ExpertRows, rows)
        self.rows, self.mask, self.questions = rows, selection.mask_at(level), selection.loops.questions
        self.selection, self.level, self.safe, self.places, self.dims = selection, level, safe, None, ()
        self.read, self.added, self.stale, self.waits, self.leading = None, None, False, None, False
        return self

    def derived(self, rows: Tensor, mask: Tensor) -> SelectedRows:
        """What a call that goes row by row makes of these."""
        if mask is not self.mask:
            return SelectedRows.of(rows, mask, self.questions)
        made = ExpertRows.at(self.selection, self.level, rows)
        if self.dims and rows.numel() == self.rows.numel() and not rows.dtype.is_floating_point:
            same = rows.dtype == self.rows.dtype and _is_view(rows, self.rows)
            made.dims = self.dims if same else ()
        return made

    def make_safe(self) -> None:
        before = self.rows
        super().make_safe()
        self.selection.loops.recording.lift(self.rows, before)

    def lifted(self, level: tuple[int, ...]) -> ExpertRows:
        """The same at a finer level: each row for every slot that it is of."""
        if level == self.level:
            return self
        every = self.selection.sizes(level)
        inner = self.rows.shape[1:]
        sizes = [size if label in self.level else 1 for label, size in zip(level, every, strict=True)]
        spread = self.rows.reshape(*sizes, *inner)
        if (node := torch_compat.node_of(spread)) is not None:
            self.selection.loops.spread.add(node)
        rows = spread.expand(*every, *inner).reshape(-1, *inner)
        self.selection.loops.recording.lift(rows, self.rows)
        return ExpertRows.at(self.selection, level, rows)

    def become(self, other: ExpertRows) -> None:
        """Be what a call in place makes of these, for all who hold them."""
        if other is self:
            return
        node = torch_compat.node_of(self.rows)
        if node is None or has_views(node, self.selection.loops.spread):
            what = "rows of a token are changed in place by numbers of each of its choices, and have views"
            raise error("SC101", what, hint="write `rows = rows * weights` in the place of `rows *= weights`")
        self.rows, self.mask, self.level, self.dims = other.rows, other.mask, other.level, other.dims
        self.safe, self.read, self.added = other.safe, other.read, other.added
        self.stale, self.waits = other.stale, other.waits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = [leaf for leaf in flatten((args, named))[0] if isinstance(leaf, ExpertRows)]
        loops = given[0].selection.loops
        answer = loops.answer(func, args, named)
        if answer is not loops.otherwise:
            return answer
        for rows in given:
            loops.refresh(rows)
        keys = {_key(rows.selection.chosen) for rows in given}
        if len(keys) == 1:
            level = tuple(sorted({label for rows in given for label in rows.level}))
            if writes_in_place(name_of(func)) and isinstance(args[0], ExpertRows):
                args[0].become(args[0].lifted(level))
            args, named = _lifted(args, level), _lifted(named, level)
        with loops.recording.call(args, named):
            return super().__torch_function__(func, types, args, named)


def _key(chosen: Chosen) -> Any:
    return chosen.ids, chosen.expert, chosen.labels


def _is_view(rows: Tensor, of: Tensor) -> bool:
    return torch_compat.storage_of(rows) == torch_compat.storage_of(of)


def _lifted(value: Any, level: tuple[int, ...]) -> Any:
    if isinstance(value, ExpertRows):
        return value.lifted(level)
    if type(value) in (list, tuple):
        return type(value)(_lifted(item, level) for item in value)
    if type(value) is dict:
        return {key: _lifted(item, level) for key, item in cast("dict[Any, Any]", value).items()}
    return value


@dataclass(frozen=True)
class _Given:
    """Rows that a loop gives to a tensor, at coordinates along its first dims: added there, or set."""

    rows: ExpertRows
    dims: tuple[tuple[int, ...], ...]
    adds: bool
    graded: bool

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(label for dim in self.dims for label in dim)

    @property
    def expert(self) -> int:
        return cast("int", self.rows.selection.chosen.expert)

    @property
    def kind(self) -> Any:
        chosen = self.rows.selection.chosen
        return chosen.ids, chosen.labels, self.dims, self.adds, self.graded


@dataclass
class _Pending:
    out: Tensor
    given: list[_Given] = field(default_factory=list[_Given])
    last: fx.Node | None = None  # of the calls that have given them

    def is_written(self) -> bool:
        """Has something else written to the tensor since?"""
        node = torch_compat.node_of(self.out)
        if node is None or self.last is None:
            return True
        return bool(
            writes_to({memory_of(node): False}, [write for write in writes_of(node.graph) if self.last < write])
        )


class ExpertHits:
    """The experts that some token is routed to, as a loop goes through them: all, one number each or a row of one."""

    def __init__(self, experts: Sequence[int], rank: int) -> None:
        self._experts, self._rank = experts, rank

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([e] if self._rank == 2 else e) for e in self._experts)

    def tolist(self) -> list[Any]:
        return [[e] if self._rank == 2 else e for e in self._experts]

    def flatten(self, *_: Any) -> ExpertHits:
        return ExpertHits(self._experts, 1)

    squeeze = view = reshape = flatten

    def __getitem__(self, key: Any) -> ExpertHits:
        if key in ((slice(None), 0), 0) and (key != 0 or self._rank == 3):
            return ExpertHits(self._experts, 1)
        return _refuse("the number of experts that have tokens")

    def __getattr__(self, name: str) -> NoReturn:
        return _refuse(f".{name} of the experts that have tokens")


def _refuse(what: str) -> NoReturn:
    raise error("SC101", f"how many rows an expert gets is known in a step alone, and {what} asks for it", hint=HINT)


class ExpertLoops:
    """The loops of one recording. `forced`: no expert has rows, wherever that is asked."""

    otherwise = object()

    def __init__(self, questions: Questions, masks: Masks, *, forced: bool = False) -> None:
        self.questions, self.masks, self.forced = questions, masks, forced
        self.recording = Recording()
        self.asked: list[fx.Node] = []  # where forward asked whether an expert has rows
        self.kept: dict[fx.Node, fx.Node] = {}  # what a tensor is with rows of a loop, and without
        self.masked: list[
            tuple[fx.Node, int, int]
        ] = []  # experts that compute all tokens: where, how many, of how many
        self.spread: set[fx.Node] = set()  # views of rows that are of ours alone
        self._integers: dict[fx.Node, Tensor] = {}
        self._selections: dict[Any, Selection] = {}
        self._pending: dict[int | None, _Pending] = {}

    def finish(self) -> None:
        """Let go of all tensors."""
        self._integers, self._selections, self._pending = {}, {}, {}
        self.recording = Recording()

    # ------------------------------------------------------------------ what is asked of values
    def observe(self, args: Sequence[Any], result: Any) -> None:
        """Keep integers, of which some are the experts of tokens."""
        for value in (*args, *(cast("Sequence[Any]", result) if isinstance(result, (tuple, list)) else (result,))):
            if isinstance(value, Tensor) and not isinstance(value, SelectedRows) and value.dtype in _INTEGERS:
                node = torch_compat.node_of(value)
                if node is not None:
                    self._integers[node] = value

    def select(self, mask: Tensor) -> Selection | None:
        """The selection that a mask is; None if it is of no expert."""
        node = torch_compat.node_of(mask)
        chosen = self.masks.read(node)
        if chosen is None or chosen.kind != "is" or chosen.expert is None or not chosen.labels:
            return None
        if any(EXPERTS in dim for dim in chosen.dims) or self._is_written(cast("fx.Node", node), chosen.ids):
            return None
        if (key := _key(chosen)) not in self._selections:
            order = [label for dim in chosen.dims for label in dim]
            ids = shape_of(chosen.ids)
            plain = mask if mask.dtype == torch.bool else mask != 0
            plain = plain.reshape([ids[label] for label in order])
            plain = plain.permute([order.index(label) for label in chosen.labels]).clone()
            self._selections[key] = Selection(self, chosen, plain)
        return self._selections[key]

    @staticmethod
    def _is_written(mask: fx.Node, ids: fx.Node) -> bool:
        return is_written(mask) or is_written(ids)

    def places(self, mask: Tensor, as_tuple: bool) -> Any:
        """`mask.nonzero()`; None for a mask of no expert."""
        chosen = self.masks.read(torch_compat.node_of(mask))
        if chosen is not None and chosen.kind == "some" and chosen.dims == ((EXPERTS,),) and not chosen.labels:
            self.asked.append(cast("fx.Node", torch_compat.node_of(mask)))
            bound = choice_of(chosen.ids)[0]  # a mask may have room for more experts than ids are chosen of
            last = chosen.first + mask.shape[0]
            experts = range(chosen.first, last if bound is None else min(last, bound))
            hits = ExpertHits([] if self.forced else list(experts), 1 if as_tuple else 2)
            return (hits,) if as_tuple else hits
        selection = self.select(mask)
        if selection is None or chosen is None:
            return None
        labels, every = selection.labels, selection.sizes(selection.labels)
        columns: list[ExpertRows] = []
        for dim in chosen.dims:
            sizes = selection.sizes(dim)
            spread = [selection.sizes([label])[0] if label in dim else 1 for label in labels]
            grid = torch.arange(math.prod(sizes)).reshape(sizes or [1])
            order = [dim.index(label) for label in labels if label in dim]
            grid = grid.permute(order) if order else grid
            column = grid.reshape(spread).expand(every).reshape(-1)
            column = column if as_tuple else column[:, None]
            columns.append(ExpertRows.at(selection, labels, column))
            columns[-1].dims = (dim,)
            self.recording.root(column, Root(column, labels, selection.chosen.ids))
        if as_tuple:
            return tuple(columns)
        return columns[0] if len(columns) == 1 else None

    def chosen_rows(self, t: Tensor, mask: Tensor, rest: tuple[Any, ...]) -> ExpertRows | None:
        """`t[mask, ...]`."""
        selection = self.select(mask)
        chosen = self.masks.read(torch_compat.node_of(mask))
        if selection is None or chosen is None:
            return None
        return self._gather(t, selection, chosen.dims, rest, (mask, *rest))

    def whether_any(self, node: fx.Node | None) -> bool | None:
        """Has an expert rows? None where nothing of the kind is asked."""
        of = self.masks.read(node)
        if of is None or node is None or of.labels or of.expert is None or not of.summed:
            return None
        self.asked.append(node)
        return (of.kind == "none") == self.forced

    def is_count(self, node: fx.Node | None) -> bool:
        """Whether this is how many rows an expert has."""
        of = self.masks.read(node)
        return of is not None and of.kind == "count" and of.expert is not None and not of.labels

    def refuse_counts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse (SC101) a split of rows by how many each expert has."""
        leaves = flatten((args, dict(kwargs)))[0]
        if any(isinstance(leaf, Tensor) and self.is_count(torch_compat.node_of(leaf)) for leaf in leaves):
            _refuse("a split of rows that are sorted by expert")

    def bincount(self, ids: Tensor, minlength: int) -> Tensor | None:
        """As comparisons, where ids are of no more experts."""
        node = torch_compat.node_of(ids)
        bound = None if node is None else choice_of(layout(node)[0])[0]
        if ids.dim() != 1 or bound is None or bound > minlength or minlength < 1:
            return None
        return (ids[:, None] == torch.arange(minlength)).sum(0)

    # ------------------------------------------------------------------ rows of a loop
    def before(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whatever else reads a tensor that waits for rows, reads it with them."""
        if not self._pending or _is_about(function):
            return
        leaves = flatten((args, dict(kwargs)))[0]
        if args and isinstance(args[0], SelectedRows) and writes_in_place(name_of(function)):
            written = torch_compat.storage_of(args[0].rows)
            for memory, pending in list(self._pending.items()):
                if any(torch_compat.storage_of(given.rows.rows) == written for given in pending.given):
                    self._flush(memory)  # with rows as they are now
        of_loop = function in _READS and any(isinstance(leaf, ExpertRows) for leaf in leaves)
        masks = function is Tensor.__getitem__ and len(args) > 1 and self._is_mask(args[1])
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or isinstance(leaf, SelectedRows):
                continue
            if leaf is args[0] and (of_loop or masks):
                continue
            if (memory := torch_compat.storage_of(leaf)) in self._pending:
                self._flush(memory)

    def _is_mask(self, key: Any) -> bool:
        first = key[0] if isinstance(key, tuple) and key else key
        return isinstance(first, Tensor) and first.dtype == torch.bool and self.select(first) is not None

    def flush(self) -> None:
        """Give all tensors their rows."""
        for memory in list(self._pending):
            self._flush(memory)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What reads and writes of a loop yield; `otherwise` for other calls."""
        first = args[0] if args else None
        if func is Tensor.__getitem__ and not isinstance(first, SelectedRows):
            return self._read_at(cast("Tensor", first), args[1])
        if func is Tensor.__setitem__ and not isinstance(first, SelectedRows):
            return self._written_at(cast("Tensor", first), args[1], args[2])
        if func in _ADDS and not isinstance(first, SelectedRows):
            return self._added(func, args, kwargs)
        if isinstance(first, ExpertRows):
            if func is _T.__len__:
                _refuse("len()")
            if func is Tensor.tolist and first.dims and first.rows.dim() == 1:
                return first  # to be used as an index
            if first.leading:
                return self._without_leading(func, first, args[1:], kwargs)
        if func in _PLUS and len(args) == 2 and not kwargs:
            return self._plus(func, *args)
        return self.otherwise

    @staticmethod
    def _without_leading(func: Any, rows: ExpertRows, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`x[None, token]` is `x[token]` once its first dim is gone."""
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)) else rest
        inner = tuple(rows.rows.shape[1:])
        gone = func in (Tensor.reshape, Tensor.view, torch.reshape) and tuple(sizes) == (-1, *inner)
        gone = gone or (func in (Tensor.squeeze, torch.squeeze) and rest == (0,) and not kwargs)
        gone = gone or (func is Tensor.__getitem__ and rest == (0,))
        if not gone:
            _refuse(f"{getattr(func, '__name__', func)} of rows behind another dim")
        return ExpertRows.at(rows.selection, rows.level, rows.rows, safe=rows.safe)

    def _read_at(self, t: Tensor, key: Any) -> Any:
        entries = key if isinstance(key, tuple) else (key,)
        leading = bool(entries) and entries[0] is None
        entries = entries[1:] if leading else entries
        places = [entry for entry in entries if isinstance(entry, ExpertRows)]
        count = len(places)
        if not count or any(entry is not place for entry, place in zip(entries, places, strict=False)):
            return self.otherwise
        dims = self._dims_of(places)
        if dims is None:
            return self.otherwise
        rows = self._gather(t, places[0].selection, dims, tuple(entries[count:]), key)
        if rows is None:
            return self.otherwise
        rows.leading = leading
        rows.read = None if leading or len(entries) > count else rows.read
        return rows

    @staticmethod
    def _dims_of(places: Sequence[ExpertRows]) -> tuple[tuple[int, ...], ...] | None:
        if any(len(place.dims) != 1 or place.rows.dim() != 1 for place in places):
            return None
        if len({_key(place.selection.chosen) for place in places}) != 1:
            return None
        return tuple(place.dims[0] for place in places)

    def _gather(
        self, t: Tensor, selection: Selection, dims: tuple[tuple[int, ...], ...], rest: tuple[Any, ...], key: Any
    ) -> ExpertRows | None:
        labels = [label for dim in dims for label in dim]
        fits = [math.prod(selection.sizes(dim)) for dim in dims] == list(t.shape[: len(dims)])
        if not fits or len(set(labels)) != len(labels) or any(isinstance(one, (Tensor, list)) for one in rest):
            return None
        level = tuple(sorted(labels))
        source = t.reshape(*selection.sizes(labels), *t.shape[len(dims) :])
        order = [labels.index(label) for label in level]
        source = source.permute(*order, *range(len(order), source.dim()))
        source = source.reshape(math.prod(selection.sizes(level)), *t.shape[len(dims) :])
        if rest:
            source = source[(slice(None), *rest)]
        waits = self._pending.get(torch_compat.storage_of(t))
        rows = ExpertRows.at(selection, level, harmless(source, selection.mask_at(level)), safe=True)
        self.recording.root(rows.rows, Root(source, level, selection.chosen.ids))
        rows.read, rows.stale = (t, key), waits is not None
        rows.waits = (waits, len(waits.given)) if waits is not None else None
        return rows

    def refresh(self, rows: ExpertRows) -> None:
        """Rows that were read while more were to be added to them."""
        if rows.stale and rows.read is not None:
            if rows.added is not None or rows.waits is None:
                _refuse("a sum that is not written back")
            t, key = rows.read
            pending, count = rows.waits
            memory = torch_compat.storage_of(t)
            if len(pending.given) == count and self._pending.get(memory) is pending:
                self._flush(memory)
            elif len(pending.given) != count or pending.is_written():
                _refuse("what a tensor held before more rows were added to it")
            anew: Any = t[key]
            rows.rows, rows.stale, rows.safe = anew.rows, False, anew.safe

    def _plus(self, func: Any, a: Any, b: Any) -> Any:
        """`out[token] + rows`, which may be written back."""
        read, other = (a, b) if isinstance(a, ExpertRows) and a.read is not None else (b, a)
        if not isinstance(read, ExpertRows) or read.read is None or read.added is not None:
            return self.otherwise
        if not isinstance(other, ExpertRows) or _key(read.selection.chosen) != _key(other.selection.chosen):
            return self.otherwise
        if other.stale or other.added is not None:
            return self.otherwise
        level = tuple(sorted({*read.level, *other.level}))
        one, two = read.lifted(level), other.lifted(level)
        with self.recording.call((one, two), {}):
            total = one.rows + two.rows
        in_place = func in (Tensor.__iadd__, Tensor.add_)
        if in_place:
            total = total.to(read.rows.dtype)
        made = ExpertRows.at(read.selection, level, total)
        made.read, made.added, made.stale, made.waits = read.read, other, read.stale, read.waits
        if not in_place:
            return made
        cast("ExpertRows", a).become(made)
        return a

    # ------------------------------------------------------------------ rows that are given
    def _added(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("self", "dim", "index", "source"), args, strict=False)) | kwargs
        out, index, source = named["self"], named.get("index"), named.get("source")
        if not isinstance(index, ExpertRows) or not isinstance(source, ExpertRows) or named.get("alpha", 1) != 1:
            return self.otherwise
        dims = self._dims_of([index])
        if named.get("dim") != 0 or dims is None or not self._fits(out, index, dims, source):
            return self.otherwise
        if func is not Tensor.index_add_:
            memory = torch_compat.storage_of(out)
            before = self._pending.get(memory)
            out = out.clone()  # which has what it waits for, too
            if before is not None:
                self._pending[torch_compat.storage_of(out)] = _Pending(out, list(before.given))
        self._give(out, _Given(source, dims, True, torch.is_grad_enabled()))
        return out

    def _fits(self, out: Tensor, index: ExpertRows, dims: tuple[tuple[int, ...], ...], source: ExpertRows) -> bool:
        if _key(index.selection.chosen) != _key(source.selection.chosen) or source.stale or source.leading:
            return False
        sizes = [math.prod(index.selection.sizes(dim)) for dim in dims]
        return list(out.shape) == [*sizes, *source.rows.shape[1:]]

    def _written_at(self, out: Tensor, key: Any, value: Any) -> Any:
        """`out[places] = rows`, or `out[mask] = rows`, or what both make of `+=`."""
        if not isinstance(value, ExpertRows) or value.leading:
            return self.otherwise
        entries = list(cast("Sequence[Any]", key)) if isinstance(key, tuple) else [key]
        while entries and (entries[-1] is Ellipsis or entries[-1] == slice(None)):
            entries.pop()
        places = [entry for entry in entries if isinstance(entry, ExpertRows)]
        if places and len(places) == len(entries):
            dims, chosen = self._dims_of(places), places[0].selection.chosen
        elif len(entries) == 1 and isinstance(entries[0], Tensor) and entries[0].dtype == torch.bool:
            selection = self.select(entries[0])
            whole = self.masks.read(torch_compat.node_of(entries[0]))
            if selection is None or whole is None:
                return self.otherwise
            dims, chosen = whole.dims, selection.chosen
        else:
            return self.otherwise
        if dims is None or _key(chosen) != _key(value.selection.chosen):
            return self.otherwise
        back = value.read is not None and value.added is not None and value.read[0] is out
        rows = cast("ExpertRows", value.added) if back else value
        if rows.stale or not self._fits_places(out, rows, dims):
            return self.otherwise
        labels = {label for dim in dims for label in dim}
        missing = set(chosen.labels) - labels
        if missing and not (choice_of(chosen.ids)[1] and missing == {len(shape_of(chosen.ids)) - 1}):
            what = "an expert may be chosen twice for a token, and `out[token] = rows` keeps one of the rows"
            raise error("SC101", what, hint="add rows by out.index_add_(0, token, rows), or choose experts by topk")
        dtype = out.dtype if back else None
        if dtype is not None and rows.rows.dtype.is_complex != out.dtype.is_complex:
            return self.otherwise
        self._give(out, _Given(rows, dims, back, torch.is_grad_enabled()))
        return None

    def _fits_places(self, out: Tensor, rows: ExpertRows, dims: tuple[tuple[int, ...], ...]) -> bool:
        sizes = [math.prod(rows.selection.sizes(dim)) for dim in dims]
        return list(out.shape) == [*sizes, *rows.rows.shape[1:]]

    def _give(self, out: Tensor, given: _Given) -> None:
        memory = torch_compat.storage_of(out)
        pending = self._pending.get(memory)
        if pending is not None and pending.out is not out:
            same = pending.out.shape == out.shape and pending.out.stride() == out.stride()
            if not same or pending.out.storage_offset() != out.storage_offset():
                self._flush(memory)
                pending = None
        if pending is None:
            pending = self._pending[memory] = _Pending(out)
        pending.given.append(given)

    def _flush(self, memory: int | None) -> None:
        pending = self._pending.pop(memory)
        before = torch_compat.node_of(pending.out)
        last = None if before is None else next(iter(reversed(before.graph.nodes)))
        remaining = pending.given
        while remaining:
            head = remaining[0]
            alike = list(takewhile(lambda given, kind=head.kind: given.kind == kind, remaining))
            if head.adds:  # in any order: the first of each expert
                batch = list({given.expert: given for given in reversed(alike)}.values())[::-1]
            else:
                count = next((i for i, g in enumerate(alike) if g.expert in [o.expert for o in alike[:i]]), len(alike))
                batch = alike[:count]
            remaining = [given for given in remaining if all(given is not one for one in batch)]
            with torch.set_grad_enabled(head.graded):
                self._hand_over(pending.out, batch)
        for node in () if last is None else dropwhile(lambda node: node is not last, last.graph.nodes):
            pending.last = node
            if node is not last and torch_compat.mutates(node):
                self.kept[node] = torch_compat.written_by(node)[0]

    def _hand_over(self, out: Tensor, batch: Sequence[_Given]) -> None:
        """To a tensor the rows of several experts: in the grouped form, or else one expert after another."""
        head = batch[0]
        by_expert = sorted(batch, key=lambda given: given.expert)
        chosen = head.rows.selection.chosen
        ids = self._integers.get(chosen.ids)
        try:
            if ids is None or [given.expert for given in by_expert] != list(range(len(batch))):
                raise NotAlikeError
            if len(batch) < 2 or tuple(sorted(head.labels)) != head.labels:
                raise NotAlikeError
            found = Batch(ids, chosen, len(batch), head.labels, head.adds)
            rows = [(given.rows.rows, given.rows.level) for given in by_expert]
            total, valid = replayed(found, rows, self.recording)
        except NotAlikeError:
            for given in batch:
                self._mask(out, given)
            node = torch_compat.node_of(head.rows.rows)
            if node is not None and len(batch) > 1:
                sizes = shape_of(chosen.ids)
                every = 1 if not head.adds and len(sizes) == 1 else sizes[-1] if len(sizes) > 1 else 1
                self.masked.append((node, len(batch), every))
            return
        total = total.reshape(out.shape).to(out.dtype)
        if head.adds:
            out.add_(total)
        elif valid is None:
            out.copy_(total)
        else:
            spread = valid.reshape(*out.shape[: len(head.dims)], *(1 for _ in out.shape[len(head.dims) :]))
            out.copy_(torch.where(spread, total, out))

    @staticmethod
    def _mask(out: Tensor, given: _Given) -> None:
        """Of all rows those that are the expert's."""
        selection = given.rows.selection
        rows = given.rows.lifted(selection.labels)
        spread = rows.mask.reshape(-1, *(1 for _ in rows.rows.shape[1:]))
        inner = rows.rows.shape[1:]
        dropped = torch.where(spread, rows.rows, 0).reshape(*selection.sizes(rows.level), *inner)
        gone = [place for place, label in enumerate(rows.level) if label not in given.labels]
        left = [label for label in rows.level if label in given.labels]
        dropped = dropped.sum(gone) if gone else dropped
        order = [left.index(label) for label in given.labels]
        dropped = dropped.permute(*order, *range(len(order), dropped.dim())).reshape(out.shape).to(out.dtype)
        if given.adds:
            out.add_(dropped)
            return
        mask = selection.mask_at(tuple(left)).reshape(selection.sizes(left)).permute(order)
        count = len(given.dims)
        out.copy_(torch.where(mask.reshape(*out.shape[:count], *(1 for _ in out.shape[count:])), dropped, out))


_INTEGERS = (torch.int64, torch.int32)


def _is_about(function: Any) -> bool:
    """Whether a call asks for what is known of a tensor without its elements."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", "") in _ABOUT
    return name in _ABOUT_CALLS
