"""What changes of shape and indexing are on the stand-ins of `loop_values`.

On a `Same` and on a `Step`, they are done at once on the whole tensor, before the loop; a `Value` keeps its elements in
their order. An index by the number of the step makes a `Step` of a `Same`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.frontend.loop_values import Dim, Index, Recorder, Same, Step, Value, operation, refuse


# ------------------------------------------------------------------ shapes
def _outer(x: Step, dim: int) -> int:
    """A dim of one step's part, as a dim of the whole tensor."""
    dim %= max(1, x.ndim)
    return dim if dim < x.time else dim + 1


@operation("transpose", "swapaxes")
def transpose(x: Any, a: int, b: int) -> Any:
    if isinstance(x, Same):
        return Same(x.recorder, x.tensor.transpose(a, b))
    if isinstance(x, Step):
        return Step(x.recorder, x.base.transpose(_outer(x, a), _outer(x, b)), x.time)
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return Value(x.recorder, x.dtype, tuple(x.dims[d] for d in order), x.name)


@operation("t")
def t(x: Any) -> Any:
    return transpose(x, 0, 1) if x.ndim == 2 else refuse()


@operation("permute")
def permute(x: Any, *dims: Any) -> Any:
    order = [d % x.ndim for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
    if isinstance(x, Same):
        return Same(x.recorder, x.tensor.permute(order))
    if isinstance(x, Step):
        return Step(x.recorder, x.base.permute(x.time, *(_outer(x, d) for d in order)), 0)
    return Value(x.recorder, x.dtype, tuple(x.dims[d] for d in order), x.name)


@operation("unsqueeze")
def unsqueeze(x: Any, dim: int) -> Any:
    dim %= x.ndim + 1
    return get(x, (*(slice(None),) * dim, None))


@operation("squeeze")
def squeeze(x: Any, dim: int) -> Any:
    return get(x, (*(slice(None),) * (dim % x.ndim), 0)) if x.shape[dim] == 1 else x


@operation("select")
def select(x: Any, dim: int, index: Any) -> Any:
    return get(x, (*(slice(None),) * (dim % x.ndim), index))


@operation("view", "reshape")
def reshape(x: Any, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if any(type(n) is not int for n in sizes):
        refuse()
    if isinstance(x, Same):
        return Same(x.recorder, x.tensor.reshape(*sizes))
    if isinstance(x, Step):
        sizes = torch.empty(x.shape, device="meta").reshape(*sizes).shape
        return Step(x.recorder, x.base.movedim(x.time, 0).reshape(x.base.shape[x.time], *sizes), 0)
    sizes = torch.empty(x.shape, device="meta").reshape(*sizes).shape
    if [n for n in sizes if n != 1] != [n for n in x.shape if n != 1]:
        refuse()
    labels = iter([d for d in x.dims if d is not None])
    return Value(x.recorder, x.dtype, tuple(None if n == 1 else next(labels) for n in sizes), x.name)


@operation("chunk")
def chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    if isinstance(x, Same):
        return tuple(Same(x.recorder, part) for part in x.tensor.chunk(chunks, dim))
    if isinstance(x, Step):
        return tuple(Step(x.recorder, part, x.time) for part in x.base.chunk(chunks, _outer(x, dim)))
    return refuse()


@operation("split")
def split(x: Any, sizes: Any, dim: int = 0) -> Any:
    if isinstance(x, Same):
        return tuple(Same(x.recorder, part) for part in x.tensor.split(sizes, dim))
    if isinstance(x, Step):
        return tuple(Step(x.recorder, part, x.time) for part in x.base.split(sizes, _outer(x, dim)))
    return refuse()


# ------------------------------------------------------------------ indexing
def full_key(key: Any, ndim: int) -> list[Any]:
    """A key with an entry for each dim."""
    entries = list(key) if isinstance(key, tuple) else [key]
    if not all(e is None or e is Ellipsis or type(e) in (int, slice, Index) for e in entries):
        refuse()
    free = ndim - sum(1 for e in entries if e is not None and e is not Ellipsis)
    if Ellipsis in [e for e in entries if type(e) is not Index]:
        place = next(i for i, e in enumerate(entries) if e is Ellipsis)
        entries[place : place + 1] = [slice(None)] * free
    else:
        entries += [slice(None)] * free
    return entries


def window(of: Recorder, entry: Any, size: int) -> tuple[int, int] | None:
    """Where the steps' parts of a dim begin, and how wide each is, of a slice by the number of the step."""
    if type(entry) is not slice or not any(type(e) is Index for e in (entry.start, entry.stop)):
        return None
    of.over_time = True
    start, stop = entry.start, entry.stop
    if entry.step is not None or type(stop) is not Index:
        refuse()
    start = Index(0, 0) if start is None else start
    if type(start) is not Index or start.factor != stop.factor or stop.offset - start.offset != stop.factor:
        refuse()
    if start.offset < 0 or start.factor < 1 or start.offset + of.steps * start.factor > size:
        refuse()
    return start.offset, start.factor


def position(of: Recorder, entry: Any, size: int) -> int:
    """Where the first step's place is, of an index by the number of the step."""
    of.over_time = True
    if entry.factor != 1 or entry.offset < 0 or entry.offset + of.steps > size:
        refuse()
    return entry.offset


@operation("getitem", "__getitem__")
def get(x: Any, key: Any) -> Any:
    entries = full_key(key, x.ndim)
    if isinstance(x, Value):
        return _part_of_value(x, entries)
    tensor, time = (x.tensor, None) if isinstance(x, Same) else (x.base, x.time)
    place = 0
    for entry in entries:
        if entry is None:
            tensor = tensor.unsqueeze(place)
            time = time + 1 if time is not None and place <= time else time
            place += 1
            continue
        place += place == time
        wide = window(x.recorder, entry, tensor.shape[place])
        if type(entry) is int:
            tensor = tensor.select(place, entry)
            time = time - 1 if time is not None and place < time else time
        elif type(entry) is slice and wide is None:
            tensor = tensor if entry == slice(None) else tensor[(*(slice(None),) * place, entry)]
            place += 1
        elif time is not None:
            refuse()
        elif wide is not None:
            start, width = wide
            part = tensor.narrow(place, start, x.recorder.steps * width)
            tensor, time, place = part.unflatten(place, (x.recorder.steps, width)), place, place + 2
        else:
            start = position(x.recorder, entry, tensor.shape[place])
            tensor, time, place = tensor.narrow(place, start, x.recorder.steps), place, place + 1
    return Same(x.recorder, tensor) if time is None else Step(x.recorder, tensor, time)


def _part_of_value(x: Value, entries: Sequence[Any]) -> Value:
    dims: list[Dim] = []
    rest = list(x.dims)
    for entry in entries:
        if entry is None:
            dims.append(None)
            continue
        label = rest.pop(0)
        if entry == slice(None) and type(entry) is slice:
            dims.append(label)
        elif type(entry) is not int or label is not None or entry not in (0, -1):
            refuse()
    return Value(x.recorder, x.dtype, tuple(dims), x.name)
