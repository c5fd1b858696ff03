"""What a boolean mask chooses, `x[mask]`, in masked form: all rows, and which of them are chosen.

How many a mask chooses is known in a step alone, and no shape of a program. But most models reduce what they choose, or
write it back:

    cross_entropy(logits[mask], labels[mask])       cross_entropy(logits, where(mask, labels, ignored))
    head(x[mask]).square().mean()                   where(mask, head(x).square(), 0).sum() / mask.sum() / width
    x[mask] = f(y[mask])                            x = where(mask, f(y), x)
    ctc_loss(..., labels.masked_select(mask), ...)  the labels of each row, the chosen ones first

Rows that are not chosen hold a harmless number, which what is computed of them cannot make infinite in a usual model,
and what comes of them is dropped where rows are reduced. In between every call has to go row by row, by the rules of
its ops. Where it does not, all rows are taken if the sample's mask chooses all, which each step then checks (SC512);
else the model is refused (SC101). A size that depends on the mask is a tensor: the number of chosen rows.
What a selection is made of, and how it is written back, is in `row_selection`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc import torch_compat
from shardc.frontend.row_selection import (
    Questions,
    Selection,
    alike,
    beside,
    count_of,
    dropped,
    first_selection,
    flattened,
    harmless,
    is_mask,
    mask_of_places,
    name_of,
    put,
    put_rows,
    refused,
    sizes_of,
    whole_rows,
)
from shardc.frontend.row_wise import are_row_sums, follow
from shardc.ir.diagnostic import ShardcError
from shardc.ir.ops.ctc import ctc_loss, left_aligned
from shardc.ir.trees import flatten

aten = torch.ops.aten
_T: Any = Tensor
_SHAPES = (_T.shape.__get__, Tensor.size)
_COUNTS = (Tensor.numel, torch.numel, Tensor.nelement)
_SUMS = (torch.sum, Tensor.sum)
_MEANS = (torch.mean, Tensor.mean)
_BOOLS = (torch.any, Tensor.any, torch.all, Tensor.all)
_EXTREMES = (torch.max, Tensor.max, torch.amax, Tensor.amax, torch.min, Tensor.min, torch.amin, Tensor.amin)
_CLASSES = (F.cross_entropy, F.nll_loss)
_CTC = (F.ctc_loss, torch.ctc_loss)
_SCATTERS = (Tensor.masked_scatter, torch.masked_scatter, Tensor.masked_scatter_)
_SELECTS = (torch.masked_select, Tensor.masked_select)
_ELEMENTWISE = {
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv"),
    *("where", "lerp", "maximum", "minimum", "addcmul", "cat", "concat", "stack"),
}
_SHAPED = ("view", "reshape", "view_as")
_UNBOUNDED = ("log", "sqrt", "div", "pow", "exp", "norm", "reciprocal", "acos", "asin", "atanh", "erfinv", "logit",
              "cosine", "tan", "lgamma")  # parts of the names of calls whose slopes may be infinite  # fmt: skip


class SelectedRows(Selection):
    """A selection that answers calls by their masked form."""

    def make_safe(self) -> None:
        """Let rows that are not chosen hold a harmless number."""
        self.rows, self.safe = harmless(self.rows, self.mask), True

    def derived(self, rows: Tensor, mask: Tensor) -> SelectedRows:
        """What a call that goes row by row makes of these."""
        return SelectedRows.of(rows, mask, self.questions)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refused(str(func))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        try:
            result = _answer(func, args, named)
        except Exception as problem:
            if isinstance(problem, ShardcError) or not torch_compat.is_data_dependent(problem):
                raise
            result = _OTHERWISE
        if result is not _OTHERWISE:
            return result
        selections = [leaf for leaf in flatten((args, named))[0] if isinstance(leaf, SelectedRows)]
        questions = selections[0].questions
        for selection in selections:
            if not questions.assume(selection.mask.all()):
                raise refused(name_of(func))
        args, named = whole_rows(args), whole_rows(named)
        try:
            return func(*args, **named)
        except Exception as problem:
            answer = questions.answer(func, args, named) if torch_compat.is_data_dependent(problem) else None
            if answer is None or answer is questions.refused:
                raise
            return answer


_OTHERWISE = object()  # no masked form


def select(t: Tensor, mask: Tensor, questions: Questions) -> SelectedRows:
    """`t[mask]`."""
    rows, chosen = t.flatten(0, mask.dim() - 1), mask.reshape(-1).clone()
    return SelectedRows.of(harmless(rows, chosen), chosen, questions, safe=True)


def places_of(mask: Tensor, questions: Questions, as_tuple: bool) -> Any:
    """`mask.nonzero()`."""
    chosen = mask.reshape(-1).clone()
    count = chosen.shape[0]
    columns: list[Tensor] = []
    for dim, size in enumerate(mask.shape):
        behind = math.prod(mask.shape[dim + 1 :])
        column = torch.arange(count)
        columns.append(column if mask.dim() == 1 else (column // behind) % size)
    if not as_tuple:
        return SelectedRows.of(torch.stack(columns, 1), chosen, questions)
    selections = [SelectedRows.of(column, chosen, questions) for column in columns]
    for dim, selection in enumerate(selections):
        selection.places = mask, dim
    return tuple(selections)


# ------------------------------------------------------------------------------------------------ calls
def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call that is given chosen rows yields; `_OTHERWISE` if it has no masked form."""
    first = args[0] if args else None
    if isinstance(first, SelectedRows):
        if func in _SHAPES:
            sizes = sizes_of(first)
            return sizes[args[1]] if len(args) == 2 else sizes[kwargs["dim"]] if kwargs else sizes
        if func in _COUNTS:
            count, each = count_of(first), math.prod(first.rows.shape[1:])
            return count * each if each != 1 else count
        if func is _T.__len__:
            return func(first.rows) if first.questions.assume(first.mask.all()) else _OTHERWISE
        if func in (*_SUMS, *_MEANS, *_BOOLS, *_EXTREMES):
            return _reduced(func, first, args[1:], kwargs)
        if func is _T.__getitem__ and is_mask(args[1]):
            return _again(first, args[1])
        if func is _T.__getitem__ and isinstance(args[1], SelectedRows) and not alike(first, args[1]):
            if not first.questions.assume(first.mask.all()):
                return _OTHERWISE
            return _looked_up(first.rows, args[1])
        if func in _SELECTS:
            return _again(flattened(first), args[1].reshape(-1) if args[1].shape == first.rows.shape else args[1])
    if func in _CLASSES:
        return _classes(func, args, kwargs)
    if func in _CTC:
        return _ctc(args, kwargs)
    if func in _SCATTERS and len(args) == 3 and not kwargs and isinstance(args[2], SelectedRows):
        scattered = put_rows(args[0], args[1], args[2])
        return args[0].copy_(scattered) if func is Tensor.masked_scatter_ else scattered
    if func is _T.__getitem__ and (mask := mask_of_places(first, args[1])) is not None:
        return select(cast("Tensor", first), mask, first_selection(args[1]).questions)
    if func is _T.__getitem__ and isinstance(first, Tensor) and _is_position(args[1]):
        return _looked_up(first, args[1])
    if func is _T.__setitem__ and not isinstance(first, SelectedRows) and is_mask(args[1]):
        mask = cast("Tensor", args[1])
        put(cast("Tensor", first), mask, args[2], first_selection(args[2]).questions)
        return None
    if func is _T.__setitem__ and (mask := mask_of_places(first, args[1])) is not None:
        put(cast("Tensor", first), mask, args[2], first_selection(args[1]).questions)
        return None
    if (options := _loss_options(func, args, kwargs)) is not None:
        return _loss(func, options)
    return _row_by_row(func, args, kwargs)


def _is_position(index: Any) -> bool:
    return isinstance(index, SelectedRows) and not index.rows.is_floating_point() and index.rows.dtype != torch.bool


def _looked_up(table: Tensor, index: SelectedRows) -> SelectedRows:
    """`table[index]`, where rows that are not chosen may hold no position of the table."""
    positions = torch.where(beside(index), index.rows, 0)
    return SelectedRows.of(table[positions], index.mask, index.questions)


def _row_by_row(func: Any, args: Any, kwargs: Any) -> Any:
    head = next(leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, SelectedRows))
    name = name_of(func)
    writes = writes_in_place(name)
    if writes and not isinstance(args[0], SelectedRows):
        return _OTHERWISE  # rows that were not chosen would be written, too
    if name.strip("_") in _ELEMENTWISE:
        args, kwargs = _in_places(args, head), _in_places(kwargs, head)
    elif name in _SHAPED and args[1:] and type(first := _first_size(args[1:])) is int and first != -1:
        return _OTHERWISE  # as many rows as it says, whatever the number of the chosen
    leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, SelectedRows)]
    if any(not alike(head, other) for other in leaves[1:]):
        return _OTHERWISE
    count = count_of(head)
    plain = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    weighted = any(not isinstance(leaf, SelectedRows) and leaf.requires_grad for leaf in plain)
    if not writes and (weighted or any(part in name for part in _UNBOUNDED)):
        for leaf in leaves:  # what is summed over rows for the other's gradient has to be finite, and so has its slope
            if not leaf.safe and leaf.places is None:
                leaf.make_safe()
    nodes = {node: 1 for leaf in leaves if (node := torch_compat.node_of(leaf.rows)) is not None}
    last = next(iter(reversed(next(iter(nodes)).graph.nodes)))
    size = head.rows.shape[0]

    def unwrapped(value: Any) -> Any:
        if isinstance(value, SelectedRows):
            return value.rows
        if value is count:
            return size
        if type(value) in (list, tuple):
            return type(value)(unwrapped(item) for item in value)
        return value

    try:
        result = func(*unwrapped(args), **{key: unwrapped(value) for key, value in kwargs.items()})
    except RuntimeError as problem:
        if torch_compat.is_data_dependent(problem) or torch_compat.stops_recomputation(problem):
            raise
        return _OTHERWISE  # it meets tensors of as many rows as are chosen
    made = list(dropwhile(lambda node: node is not last, last.graph.nodes))[1:]
    known = follow(made, nodes)
    if known is None and writes:
        raise refused(name)  # it has been done, and is not to be done again
    if known is None:
        return _OTHERWISE

    def wrapped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            items = [wrapped(item) for item in cast("Sequence[Any]", value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if not isinstance(value, Tensor):
            return value
        if (same := next((leaf for leaf in leaves if leaf.rows is value), None)) is not None:
            return same
        node = torch_compat.node_of(value)
        if node not in known:
            raise refused(name)
        times = known[node]
        mask = head.mask if times == 1 else head.mask[:, None].expand(size, times).reshape(-1)
        return head.derived(value, mask)

    return wrapped(result)


def writes_in_place(name: str) -> bool:
    """Whether a call of this name changes its first argument."""
    return name == "__setitem__" or (name[-1] == "_" != name[-2]) or (name.startswith("__i") and name != "__invert__")


def _first_size(sizes: Sequence[Any]) -> Any:
    first = sizes[0]
    return first[0] if isinstance(first, (tuple, list)) and first else first


def _in_places(value: Any, head: SelectedRows) -> Any:
    """Tensors of as many rows as the mask chooses, with these in the places of the chosen.

    What an elementwise call adds to chosen rows, or multiplies them by, can have no other number of rows.
    """
    if type(value) in (list, tuple):
        return type(value)(_in_places(item, head) for item in value)
    if isinstance(value, dict):
        return {key: _in_places(item, head) for key, item in cast("dict[str, Any]", value).items()}
    every, rank = head.rows.shape[0], head.rows.dim()
    if not isinstance(value, Tensor) or isinstance(value, SelectedRows) or value.dim() != rank:
        return value
    if value.shape[0] in (1, every) or not head.questions.assume(head.mask.sum() == value.shape[0]):
        return value
    places = head.mask.reshape(-1, *(1 for _ in range(rank - 1))).expand(every, *value.shape[1:])
    rows = value.new_zeros(every, *value.shape[1:]).masked_scatter(places, value)
    return SelectedRows.of(rows, head.mask, head.questions)


def _reduced(func: Any, selection: SelectedRows, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum, a mean, an extreme, or whether any or all are true, over rows or all dims."""
    options = dict(zip(("dim", "keepdim"), rest, strict=False)) | kwargs
    dim = options.pop("dim", options.pop("axis", None))
    if func in (torch.max, Tensor.max, torch.min, Tensor.min) and (dim is not None or options):
        return _row_by_row(func, (selection, *rest), kwargs)  # of two tensors, or values and where they are
    rows, ndim = selection.rows, selection.rows.dim()
    dims = [] if dim is None else [d % ndim for d in ([dim] if isinstance(dim, int) else dim)]
    if dims and 0 not in dims:
        return _row_by_row(func, (selection, *rest), kwargs)
    dtype, keepdim = options.pop("dtype", None), options.pop("keepdim", False)
    if options:
        return _OTHERWISE
    every = dims or list(range(ndim))
    if func in _BOOLS:
        among = func in (torch.any, Tensor.any)
        chosen = rows.bool() & beside(selection) if among else rows.bool() | ~beside(selection)
        return chosen.amax(every, keepdim) if among else chosen.amin(every, keepdim)
    if func in _EXTREMES:
        least = "min" in name_of(func)
        limits = torch.finfo(rows.dtype) if rows.is_floating_point() else torch.iinfo(rows.dtype)
        beyond = (math.inf if least else -math.inf) if rows.is_floating_point() else limits.max if least else limits.min
        filled = torch.where(beside(selection), rows, beyond)
        return filled.amin(every, keepdim) if least else filled.amax(every, keepdim)
    if func in _MEANS and not (dtype or rows.dtype).is_floating_point:
        return _OTHERWISE
    total = dropped(selection).sum(every, keepdim=keepdim, dtype=dtype)
    if func in _SUMS:
        return total
    return total / (count_of(selection) * math.prod(rows.shape[d] for d in every if d)).to(total.dtype)


def _loss_options(func: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of one of torch's losses, by name."""
    if getattr(func, "__module__", "") != F.__name__:
        return None
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    return dict(bound.arguments) if "reduction" in bound.arguments else None


def _loss(func: Any, options: dict[str, Any]) -> Any:
    reduction = options["reduction"]
    if any(options.pop(name, None) is not None for name in ("size_average", "reduce")):
        return _OTHERWISE
    head = next(value for value in options.values() if isinstance(value, SelectedRows))
    rows = _row_by_row(func, (), _in_places(options, head) | {"reduction": "none"})
    if rows is _OTHERWISE or reduction == "none":
        return rows
    if reduction == "batchmean":
        return dropped(rows).sum() / count_of(rows).to(rows.rows.dtype)
    return _reduced(torch.sum if reduction == "sum" else torch.mean, rows, (), {})


def _classes(func: Any, args: Any, kwargs: Any) -> Any:
    """Cross entropy by the numbers of classes: a row that is not chosen is one to ignore."""
    options = _loss_options(func, args, kwargs)
    if options is None:
        return _OTHERWISE
    logits, target = options.pop("input"), options.pop("target")
    if not isinstance(logits, SelectedRows) or not isinstance(target, SelectedRows):
        return _OTHERWISE
    if not alike(logits, target) or logits.rows.dim() < 2:
        return _OTHERWISE
    if target.rows.is_floating_point():
        return _loss(func, {"input": logits, "target": target, **options})
    ignored = torch.where(beside(target), target.rows, options["ignore_index"])
    loss = func(harmless(logits.rows, logits.mask), ignored, **options)
    if options["reduction"] == "none":
        return SelectedRows.of(loss, logits.mask, logits.questions)
    return loss


def _ctc(args: Any, kwargs: Any) -> Any:
    """Labels that a mask of [N, S] chooses, row by row, are as many in each row as the loss is told."""
    bound = inspect.signature(F.ctc_loss).bind(*args, **kwargs)
    bound.apply_defaults()
    options: dict[str, Any] = dict(bound.arguments)
    targets, lengths, log_probs = options["targets"], options["target_lengths"], options["log_probs"]
    if isinstance(log_probs, SelectedRows) or not isinstance(targets, SelectedRows) or targets.rows.dim() != 1:
        return _OTHERWISE
    count = log_probs.shape[1] if log_probs.dim() == 3 else 1
    size = targets.rows.shape[0]
    if size % count:
        return _OTHERWISE
    mask = targets.mask.reshape(count, size // count)
    chosen = mask.sum(1)
    lengths = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
    told, own = torch_compat.node_of(lengths), torch_compat.node_of(mask)
    known = told is not None and own is not None and are_row_sums(told, own)
    if not known and not targets.questions.assume((lengths.reshape(count) == chosen).all()):
        return _OTHERWISE
    options["targets"] = left_aligned(targets.rows.reshape(count, -1), mask)
    return ctc_loss(**options)


def _again(selection: SelectedRows, mask: Tensor) -> Any:
    """What a mask chooses of chosen rows."""
    if not isinstance(mask, SelectedRows) or mask.rows.dim() != 1 or not alike(selection, mask):
        return _OTHERWISE
    both = selection.mask & mask.rows
    return SelectedRows.of(harmless(selection.rows, both), both, selection.questions, safe=True)
