"""All rows, and a mask that says which of them are chosen: what selections are made of, and how they are written back.

    rows     [a, b, c, d]            of `x[mask]`: those that are not chosen hold a harmless number
    mask     [1, 0, 0, 1]
    count    mask.sum()              of one mask, one tensor: the size that dim 0 is said to have
    dropped  [a, 0, 0, d]            what a sum over rows adds

`y[other] = x[mask]` puts a row in its own place where the masks are the same, else the n-th chosen in the n-th place.
What calls make of selections is in `selected_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from shardc import torch_compat
from shardc.frontend.row_wise import same_choice
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.trees import flatten

S = TypeVar("S", bound="Selection")
HINT = (
    "reduce the chosen rows (sum, mean, a loss), or write them back by the same mask; else keep all rows, and choose "
    "with torch.where"
)
HARMLESS = 0.5  # logarithm, root and inverse of it and of one minus it are finite


class Questions(Protocol):
    """What may be asked of the sample batch."""

    refused: object

    def answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...
    def assume(self, holds: Tensor) -> bool:
        """Let each step check a truth value, if it holds for the sample; False if it does not, or is unknown."""
        ...


class Selection(Tensor):
    """`rows`, of which a `mask` over dim 0 chooses some; a tensor to whoever looks at it, of unknown length."""

    rows: Tensor
    mask: Tensor
    questions: Questions
    safe: bool  # rows that are not chosen hold a harmless number
    places: tuple[Tensor, int] | None  # these are the coordinates, along a dim, of where a mask is true

    @classmethod
    def of(cls, rows: Tensor, mask: Tensor, questions: Questions, *, safe: bool = False) -> Self:
        self = torch_compat.wrapper(cls, rows)
        self.rows, self.mask, self.questions, self.safe, self.places = rows, mask, questions, safe, None
        return self


def put(t: Tensor, mask: Tensor, value: Any, questions: Questions) -> None:
    """`t[mask] = value`: of one value for all places, of one for each chosen place, or of chosen rows."""
    if isinstance(value, Selection):
        t.copy_(put_rows(t, mask, value))
        return
    inner = t.dim() - mask.dim()
    spread = mask.reshape(*mask.shape, *(1 for _ in range(inner)))
    value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=t.dtype)
    if value.dim() > inner and value.shape[0] != 1:  # a row for each place
        if not questions.assume(mask.sum() == value.shape[0]):
            raise refused("an assignment of as many rows as the mask chooses")
        t.copy_(t.masked_scatter(spread.expand_as(t), value.to(t.dtype).expand(value.shape[0], *t.shape[mask.dim() :])))
        return
    value = value.reshape(value.shape[1:]) if value.dim() > inner else value
    t.copy_(torch.where(spread, value.to(t.dtype), t))


def refused(what: str) -> ShardcError:
    message = f"how many rows a mask chooses is known in a step alone, and {what} does not go row by row"
    return error("SC101", message, hint=HINT)


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def first_selection(value: Any) -> Selection:
    return next(leaf for leaf in flatten(value)[0] if isinstance(leaf, Selection))


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def alike(a: Selection, b: Selection) -> bool:
    if a.mask is b.mask:
        return True
    one, other = torch_compat.node_of(a.mask), torch_compat.node_of(b.mask)
    return one is not None and other is not None and a.mask.shape == b.mask.shape and same_choice(one, other)


def beside(selection: Selection) -> Tensor:
    """The mask, with as many dims as the rows have."""
    return selection.mask.reshape(-1, *(1 for _ in selection.rows.shape[1:]))


def harmless(rows: Tensor, mask: Tensor) -> Tensor:
    """Rows with a number in those that are not chosen; of it no gradient comes."""
    number = HARMLESS if rows.is_floating_point() or rows.is_complex() else False if rows.dtype == torch.bool else 0
    return torch.where(mask.reshape(-1, *(1 for _ in rows.shape[1:])), rows, number)


def dropped(selection: Selection) -> Tensor:
    zero = False if selection.rows.dtype == torch.bool else 0
    return torch.where(beside(selection), selection.rows, zero)


def count_of(selection: Selection) -> Tensor:
    """The number of chosen rows: of one mask, one tensor."""
    mask: Any = selection.mask
    if getattr(mask, "shardc_count", None) is None:
        mask.shardc_count = mask.sum()
    return mask.shardc_count


def sizes_of(selection: Selection) -> Any:
    if selection.questions.assume(selection.mask.all()):
        return selection.rows.shape
    return (count_of(selection), *selection.rows.shape[1:])


def whole_rows(value: Any) -> Any:
    if isinstance(value, Selection):
        return value.rows
    if type(value) in (list, tuple):
        return type(value)(whole_rows(item) for item in value)
    if type(value) is dict:
        return {key: whole_rows(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def flattened(selection: S) -> S:
    rows = selection.rows
    each = math.prod(rows.shape[1:])
    mask = selection.mask if each == 1 else selection.mask[:, None].expand(-1, each).reshape(-1)
    return selection.of(rows.reshape(-1), mask, selection.questions)


def mask_of_places(t: Any, index: Any) -> Tensor | None:
    """The mask by whose coordinates a tensor is indexed, where it is over the leading dims of the tensor."""
    if isinstance(t, Selection):
        return None
    indices = index if isinstance(index, tuple) else (index,)
    held = [one.places if isinstance(one, Selection) else None for one in cast("Sequence[Any]", indices)]
    places = [one for one in held if one is not None]
    if len(places) != len(held) or not places:
        return None
    mask = places[0][0]
    whole = [dim for _, dim in places] == list(range(mask.dim())) and all(one is mask for one, _ in places)
    return mask if whole and t.shape[: mask.dim()] == mask.shape else None


def put_rows(t: Tensor, mask: Tensor, value: Selection) -> Tensor:
    """`t` with chosen rows in the places of a mask: of the same mask each in its own place, of another in order."""
    inner = math.prod(t.shape[mask.dim() :])
    own, rest = value.rows, math.prod(value.rows.shape[1:])
    chosen = mask.reshape(-1).clone()
    one, other = torch_compat.node_of(chosen), torch_compat.node_of(value.mask)
    spread = mask.reshape(*mask.shape, *(1 for _ in range(t.dim() - mask.dim())))
    same = one is not None and other is not None and own.numel() == t.numel()
    if same and same_choice(one, other):  # pyright: ignore[reportArgumentType]
        return torch.where(spread, own.reshape(t.shape).to(t.dtype), t)
    if rest != inner or not value.questions.assume(chosen.sum() == value.mask.sum()):
        raise refused("an assignment by another mask")
    order = value.mask.logical_not().to(torch.int8).argsort(stable=True)
    place = (chosen.to(torch.int64).cumsum(0) - 1).clamp(0, own.shape[0] - 1)
    taken = own[order[place]]
    return torch.where(spread, taken.reshape(t.shape).to(t.dtype), t)
