"""What Python asks of a tensor's values while a step is traced, answered by the sample batch.

    if labels.max() >= self.vocab_size: raise ...      of the batch's integers
    for t, h, w in grid_thw.tolist(): ...
    if not torch.isfinite(hidden).all(): ...           assumed to be finite
    pixels[is_real]                                    a mask of the batch that leaves out nothing: a copy
    if torch.rand([]) < self.layerdrop: continue       of a layer drop of 0
    if self.mask_rate < 1: ...                         of a buffer that steps leave as it is

The answer becomes part of the program, as a shape does. So each is checked in every step (`assume`): a batch that
answers otherwise is refused. What depends on weights, on random numbers, on the batch's floating-point numbers or on
buffers that a step changes is asked in vain (SC101): it would be another in the next step.

Longer than 400 lines: who may ask, what is answered and what each step checks of it are one set of conditions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional

from shardc import torch_compat
from shardc.frontend.expert_masks import Masks
from shardc.frontend.expert_rows import ExpertLoops, ExpertRows
from shardc.frontend.layer_drop import LayerDrop
from shardc.frontend.memory_writes import is_written, writes_of, writes_to
from shardc.frontend.provenance import Origin
from shardc.frontend.row_selection import put
from shardc.frontend.selected_rows import SelectedRows, places_of, select
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.ops.assumed import after, assume
from shardc.ir.ops.ctc import ctc_loss
from shardc.ir.trees import flatten

_READS: tuple[Any, ...] = (
    *(Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist),
    torch.is_nonzero,
)
_FINITE: tuple[Any, ...] = (torch.isfinite, Tensor.isfinite)
_UNBOUNDED: tuple[Any, ...] = (torch.isinf, Tensor.isinf, torch.isnan, Tensor.isnan)
_EITHER: tuple[Any, ...] = (torch.logical_or, Tensor.logical_or, Tensor.__or__, torch.bitwise_or, Tensor.bitwise_or)
_ALL: tuple[Any, ...] = (torch.all, Tensor.all)
_ANY: tuple[Any, ...] = (torch.any, Tensor.any)
_LESS: tuple[Any, ...] = (torch.lt, Tensor.lt, Tensor.__lt__, torch.le, Tensor.le, Tensor.__le__)
_GREATER: tuple[Any, ...] = (torch.gt, Tensor.gt, Tensor.__gt__, torch.ge, Tensor.ge, Tensor.__ge__)
_SELECTIONS: tuple[Any, ...] = (torch.masked_select, Tensor.masked_select)
_PLACES: tuple[Any, ...] = (torch.nonzero, Tensor.nonzero, torch.where, torch.argwhere, Tensor.argwhere)
# Their results have as many elements as values say. `torch.unique` and others are wrappers of several functions.
_COUNTED = ("repeat_interleave", "unique", "unique_consecutive", "_unique2", "unique_dim", "bincount")
_CTC: tuple[Any, ...] = (torch.ctc_loss, functional.ctc_loss)
_SPLITS: tuple[Any, ...] = (torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default)
_FILLS = ("ones", "zeros", "full")
_Value = Tensor | None


class SampleValues:
    """Answers for one recording. `samples`: by the traced inputs of the batch, what the sample batch has there; `own`:
    by the traced buffers, what the model has there."""

    refused = object()  # the answer to what cannot be answered

    def __init__(
        self,
        samples: Sequence[tuple[Tensor, Tensor]],
        layers: LayerDrop,
        own: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        without_rows: bool = False,
    ) -> None:
        self.layers = layers
        self.loops = ExpertLoops(self, Masks(self._numbers), forced=without_rows)
        self.checked: list[Tensor] = []  # what `assume` returned
        self._samples = {
            node: real for traced, real in samples if _is_known(real) and (node := torch_compat.node_of(traced))
        }
        self._own = {node: real for traced, real in own if _is_known(real) and (node := torch_compat.node_of(traced))}
        self.asked: set[fx.Node] = set()  # the buffers of which answers depend
        self._assumed: set[tuple[fx.Node, str, int]] = set()
        self._expected: dict[fx.Node, bool] = {}  # truth values that say whether numbers are finite
        self._drawn: set[fx.Node] = set()  # in [0, 1)
        self._certain: dict[fx.Node, bool] = {}  # truth values of every step
        self._decisions: dict[fx.Node, bool] = {}  # whether a layer is dropped, or kept, if this is true

    # -------------------------------------------------------------- events
    def observe(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow a call that says which numbers are finite, through to one truth value."""
        self.loops.observe(args, result)
        if function in _FINITE:
            self._expect(result, True)
        elif function in _UNBOUNDED:
            self._expect(result, False)
        elif function is torch.rand and (node := _node(result)) is not None:
            self._drawn.add(node)
        elif function in _LESS or function in _GREATER:
            self._compare(function in _LESS, args, result)
        elif function in _EITHER or function in _ALL or function in _ANY:
            nodes = [_node(arg) for arg in args if isinstance(arg, Tensor)]
            asked = [None if n is None or n not in self._expected else self._expected[n] for n in nodes]
            same = bool(asked) and all(each is not None and each == asked[0] for each in asked)
            if (
                same
                and len(args) == len(asked)
                and not kwargs
                and asked[0] is not (function in _ANY or function in _EITHER)
                and not any(is_written(n) for n in nodes if n is not None)
            ):
                self._expect(result, asked[0] is True)

    def instead(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call becomes that no trace has as it is: `refused` for all others."""
        self.loops.before(function, args, kwargs)
        if getattr(function, "__name__", "") in ("split", "split_with_sizes"):
            self.loops.refuse_counts(args[1:], kwargs)
        if function is Tensor.__setitem__ and isinstance(args[2], ExpertRows):
            given = self.loops.answer(function, tuple(args), {})
            if given is not self.loops.otherwise:
                return given
            self.loops.refresh(args[2])
        if function is Tensor.__setitem__ and isinstance(args[2], Tensor) and not isinstance(args[0], SelectedRows):
            masked = _mask_of(args[0], args[1])
            if masked is not None and not masked[1] and not isinstance(masked[0], SelectedRows):
                return put(args[0], masked[0], args[2], self)
        if function is torch.tensor and args and _node(args[0]) is not None:
            copy = args[0].detach().clone()  # which is what torch makes of a tensor
            return copy if kwargs.get("dtype") is None else copy.to(kwargs["dtype"])
        if function is Tensor.__getitem__ and not isinstance(args[0], SelectedRows):
            sliced = self._neighbours(*args)
            return self.refused if sliced is None else sliced
        if function in _CTC and not any(isinstance(arg, SelectedRows) for arg in (*args, *kwargs.values())):
            return ctc_loss(*args, **kwargs)
        return self.refused

    def assume(self, holds: Tensor) -> bool:
        """Let each step check a truth value, if it holds for the sample; False if it does not, or is unknown."""
        node = _node(holds)
        value = None if node is None else self._value(node)
        with torch_compat.untraced():
            known = value is not None and bool(value)
        if known:
            self._assume_equal(cast("fx.Node", node), holds, cast("Tensor", value))
        return known

    def _compare(self, less: bool, args: Sequence[Any], result: Any) -> None:
        """A drawn number, compared with a rate."""
        drawn, node = _node(args[0]), _node(result)
        if drawn is None or node is None or drawn not in self._drawn or len(args) != 2 or is_written(drawn):
            return
        if not isinstance(args[1], int | float):
            return
        if 0 < args[1] < 1:
            self._decisions[node] = less
        elif less:
            self._certain[node] = args[1] >= 1

    @staticmethod
    def _neighbours(x: Tensor, key: Any) -> Tensor | None:
        """`x[..., [2, 3], :]` as the slice that it is: of an index, no more is known than that it may read anything."""
        keys: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
        lists = [i for i, k in enumerate(keys) if isinstance(k, list)]
        if len(lists) != 1 or any(k is not Ellipsis and not isinstance(k, slice | list) for k in keys):
            return None
        at, dots = lists[0], [i for i, k in enumerate(keys) if k is Ellipsis]
        dim = at if not dots or at < dots[0] else x.dim() - len(keys) + at
        rows = cast("list[object]", keys[at])
        if len(dots) > 1 or not 0 <= dim < x.dim() or not all(type(row) is int for row in rows) or not rows:
            return None
        size, first = x.shape[dim], cast(int, rows[0])
        if rows != list(range(first, first + len(rows))) or first < -size or first + len(rows) > size:
            return None
        if first < 0 <= first + len(rows) - 1:  # from the last row on to the first one
            return None
        start = first % size
        # A copy, as an index yields: what is written to it is not written to x.
        return x[(*keys[:at], slice(start, start + len(rows)), *keys[at + 1 :])].clone()

    def answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `function` would return on the sample batch, or `refused`. The step then checks that it still would."""
        answer = self._answer(function, args, kwargs)
        return self._by_numbers(function, args, kwargs) if answer is self.refused else answer

    def _answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is torch.tensor and len(args) == 1:
            return self._of_numbers(args[0], kwargs)
        if not args or not isinstance(args[0], Tensor) or isinstance(args[0], SelectedRows):
            return self.refused
        if function in _PLACES and len(args) == 1 and kwargs.keys() <= {"as_tuple"} and args[0].dim():
            mask = args[0] if args[0].dtype == torch.bool else args[0] != 0
            places = self.loops.places(mask, function is torch.where or kwargs.get("as_tuple", False))
            if places is not None:
                return places
            return places_of(mask, self, function is torch.where or kwargs.get("as_tuple", False))
        if function is torch.repeat_interleave and args[0].is_floating_point() and len(args) > 1:
            return self._repeated(*args, **kwargs)
        if getattr(function, "__name__", "") == "bincount" and len(args) == 1 and set(kwargs) == {"minlength"}:
            counts = self.loops.bincount(args[0], kwargs["minlength"])
            if counts is not None:
                return counts
        if getattr(function, "__name__", "") in _COUNTED:
            return self._counted(function, args, kwargs)
        if kwargs:
            return self.refused
        if function is Tensor.__getitem__ and (by_places := self._behind_whole_dims(args[0], args[1])) is not None:
            return by_places
        if function is Tensor.__getitem__ and (masked := _mask_of(args[0], args[1])) is not None:
            if (places := self._constant_places(masked[0])) is not None:
                return args[0][(*places, *masked[1])]
            if (rows := self.loops.chosen_rows(args[0], *masked)) is not None:
                return rows
            chosen = select(args[0], masked[0], self)
            return chosen[slice(None), *masked[1]] if masked[1] else chosen
        if function in _SELECTIONS and len(args) == 2 and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            rows, mask = torch.broadcast_tensors(args[0], args[1])
            return select(rows, mask, self)
        return self._read(args[0], function) if function in _READS else self.refused

    def behind_checks(self, result: Tensor) -> Tensor:
        """`result`, after everything that was assumed; of which nothing is held any more."""
        checked, self.checked = self.checked, []
        for one in checked:
            result = after(result.detach(), one)
        return result

    # -------------------------------------------------------------- answers
    def _read(self, t: Tensor, function: Any) -> Any:
        node = _node(t)
        if node is None:
            return self.refused
        if (node in self._certain or node in self._expected or node in self._decisions) and is_written(node):
            return self.refused
        if (drops := self._decisions.get(node)) is not None and t.numel() == 1:
            if function not in (Tensor.__bool__, Tensor.item):
                return self.refused
            one = t.reshape(())
            return self.layers.ask(node, one if drops else one.logical_not()) == drops
        if t.numel() == 1 and function in (Tensor.item, Tensor.__bool__):
            if function is Tensor.item and self.loops.is_count(node):
                return t  # as a tensor it goes on: `counts.tolist()[e] == 0`
            some = self.loops.whether_any(node)
            if some is not None:
                return some
        if (certain := self._certain.get(node)) is not None and function in (Tensor.__bool__, Tensor.item):
            return certain
        if (finite := self._expected.get(node)) is not None and function in (Tensor.__bool__, Tensor.item):
            self._assume(node, "", lambda: t if finite else t.logical_not())
            return finite
        value = self._value(node)
        if value is None or value.is_complex() or (value.is_floating_point() and not self._is_own(node)):
            return self.refused
        with torch_compat.untraced():
            answer = function(value)
        self._assume_equal(node, t, value)
        return answer

    def _constant_places(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        """Where a mask is true that is the same in every step; None for others."""
        node, wanted = _node(mask), dict[fx.Node, bool]()
        if node is None or not self._collect(node, wanted) or any(one.op == "placeholder" for one in wanted):
            return None
        value = cast("Tensor", self._value(node))
        with torch_compat.untraced():
            places: list[list[int]] = [dim.tolist() for dim in value.nonzero(as_tuple=True)]
        return tuple(torch.tensor(dim) for dim in places)

    def _behind_whole_dims(self, t: Tensor, key: Any) -> Tensor | None:
        """`x[:, mask]` where the sample batch knows the mask: the places that it chooses there."""
        keys: tuple[Any, ...] = key if isinstance(key, tuple) else ()
        masks = [
            i for i, one in enumerate(keys) if isinstance(one, Tensor) and one.dtype == torch.bool and one.dim() == 1
        ]
        if len(masks) != 1 or not masks[0] or any(one != slice(None) for i, one in enumerate(keys) if i != masks[0]):
            return None
        dim, mask = masks[0], keys[masks[0]]
        node = _node(mask)
        if node is None or t.shape[dim] != mask.shape[0] or (value := self._value(node)) is None:
            return None
        with torch_compat.untraced():
            places: list[int] = value.nonzero().flatten().tolist()
        self._assume_equal(node, mask, value)
        return t.index_select(dim, torch.tensor(places)) if places else t.narrow(dim, 0, 0)

    def _of_numbers(self, data: Any, kwargs: Mapping[str, Any]) -> Any:
        """A tensor made of a list, some of whose numbers are tensors."""
        leaves, structure = flatten(data)
        numbers = [self._read(leaf, Tensor.item) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(number is self.refused for number in numbers):
            return self._stacked(data, kwargs)
        with torch_compat.untraced():  # of tensors, torch takes the dtype; of Python's numbers, the default one
            typed = [
                torch.tensor(number, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for number, leaf in zip(numbers, leaves, strict=True)
            ]
            dtype = kwargs.get("dtype") or torch.tensor(torch_compat.unflatten(typed, structure)).dtype
        options: dict[str, Any] = {**kwargs, "dtype": dtype}
        return torch.tensor(torch_compat.unflatten(numbers, structure), **options)

    def _stacked(self, data: Any, kwargs: Mapping[str, Any]) -> Any:
        """A tensor of one dim made of scalars, which are what they are in each step."""
        scalars = data if isinstance(data, (list, tuple)) else []
        tensors = [one for one in scalars if isinstance(one, Tensor) and not isinstance(one, SelectedRows)]
        dtypes = {one.dtype for one in tensors}
        others = len(tensors) < len(scalars) or any(one.dim() for one in tensors)
        if not kwargs.keys() <= {"dtype", "device"} or len(dtypes) != 1 or others:
            return self.refused
        dtype = kwargs.get("dtype") or dtypes.pop()
        return torch.stack([one.detach().to(dtype) for one in tensors])

    def _counted(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Elements by counts, values without repeats: constants, where all that they are made of is of the batch."""
        given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        nodes = [_node(arg) for arg in given]
        values = [None if node is None else self._value(node) for node in nodes]
        if any(value is None or value.is_floating_point() or value.is_complex() for value in values):
            return self.refused
        real = {id(arg): value for arg, value in zip(given, values, strict=True)}
        with torch_compat.untraced():
            result = function(
                *(real.get(id(arg), arg) for arg in args),
                **{key: real.get(id(arg), arg) for key, arg in kwargs.items()},
            )
            results: list[Tensor] = [result] if isinstance(result, Tensor) else list(result)
            numbers = [(one.tolist(), one.dtype) for one in results]
        for arg, node, value in zip(given, nodes, values, strict=True):
            self._assume_equal(cast("fx.Node", node), arg, cast("Tensor", value))
        made = [torch.tensor(number, dtype=dtype) for number, dtype in numbers]
        return made[0] if isinstance(result, Tensor) else tuple(made)

    def _repeated(self, t: Tensor, repeats: Any, dim: int | None = None, **others: Any) -> Any:
        """Rows of any tensor, by counts of the batch: they are taken from where they are."""
        if others or not isinstance(repeats, Tensor):
            return self.refused
        rows = torch.arange(t.numel() if dim is None else t.shape[dim])
        places = self._counted(torch.repeat_interleave, (rows, repeats), {})
        return places if places is self.refused else (t.flatten() if dim is None else t).index_select(dim or 0, places)

    def _by_numbers(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that takes sizes, with the numbers that it would have read: `arange(counts.sum())`, `x[:, :n]`."""
        asked: list[Any] = []

        def number(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(number(item) for item in value)
            if isinstance(value, slice):
                return slice(number(value.start), number(value.stop), number(value.step))
            if not isinstance(value, Tensor) or value.dim() or value.is_floating_point() or _node(value) is None:
                return value
            asked.append(self._read(value, Tensor.item))
            return asked[-1]

        numbers, options = [number(arg) for arg in args], {key: number(value) for key, value in kwargs.items()}
        if not asked or any(answer is self.refused for answer in asked):
            return self.refused
        if args and numbers[0] is not args[0] and hasattr(function, "__objclass__"):
            return self.refused  # a method of a tensor, which a number has not
        try:
            return function(*numbers, **options)
        except Exception as problem:
            if not torch_compat.is_data_dependent(problem):
                raise
            return self.refused

    def _assume_equal(self, node: fx.Node, t: Tensor, value: Tensor) -> None:
        wanted: dict[fx.Node, bool] = {}
        self._collect(node, wanted)
        self.asked |= self._own.keys() & wanted.keys()
        if all(one.op != "placeholder" for one in wanted):
            return  # computed from constants, and the same in every step
        with torch_compat.untraced():
            expected: Any = value.tolist() if value.numel() != 1 else value.item()
        one = value.numel() == 1
        self._assume(node, "", lambda: t.reshape(()) == expected if one else (t == torch.tensor(expected)).all())

    def _assume(self, node: fx.Node, how: str, holds: Callable[[], Tensor]) -> None:
        asked = node, how, len(writes_of(node.graph))  # a write through a view leaves a tensor's node as it is
        if asked not in self._assumed:
            self._assumed.add(asked)
            with torch.no_grad():
                self.checked.append(assume(holds()))

    def _numbers(self, node: fx.Node) -> list[int] | None:
        """Those of a constant, in order; None for what an input leads to, or floating-point numbers."""
        wanted = dict[fx.Node, bool]()
        if not self._collect(node, wanted) or any(one.op == "placeholder" for one in wanted):
            return None
        value = self._value(node)
        if value is None or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            return None
        with torch_compat.untraced():
            return value.flatten().tolist()

    # -------------------------------------------------------------- values
    def _value(self, node: fx.Node) -> _Value:
        """The value of a node on the sample batch; None if it depends on more. On floating-point inputs it may depend
        by equality alone, `pixels == 0`: so padding is found, and what is greater is another in each batch."""
        wanted: dict[fx.Node, bool] = {}  # and whether it is asked by equality alone
        if not self._collect(node, wanted):
            return None
        real = self._samples | self._own
        values: dict[fx.Node, Any] = {n: real[n].cpu() for n in wanted if n.op == "placeholder"}
        values |= {n: torch_compat.recorded_constant(str(n.target)) for n in wanted if n.op == "get_attr"}
        with torch_compat.untraced():
            if any(torch_compat.mutates(n) for n in wanted):
                values = {n: value.clone() for n, value in values.items()}
            for one in node.graph.nodes:
                if one in wanted and one not in values:
                    if (packed := _packed(one)) is not None:
                        values[one] = values[packed]
                        continue
                    known = values if not _reads_shapes(one) else values | _shaped(one.all_input_nodes)
                    args, kwargs = fx.map_arg((one.args, one.kwargs), known.__getitem__)
                    values[one] = one.target(*args, **kwargs)
        result = values[node]
        return result if isinstance(result, Tensor) else None

    def _collect(self, node: fx.Node, wanted: dict[fx.Node, bool]) -> bool:
        """Add the calls that lead to a node, and those that write to the memory of these; False if one is unknown."""
        writes = writes_of(node.graph)
        todo = [(node, False)]
        while todo or (todo := writes_to(wanted, writes)):
            one, compared = todo.pop()
            if one in wanted and wanted[one] <= compared:
                continue
            wanted[one] = compared
            if one.op == "placeholder" and one not in self._own:
                sample = self._samples.get(one)
                if sample is None or (sample.is_floating_point() and not compared):
                    return False
            if _is_random(one):
                return False
            equality = getattr(one.target, "overloadpacket", None) in (torch.ops.aten.eq, torch.ops.aten.ne)
            if (packed := _packed(one)) is not None:
                todo.append((packed, compared))
            elif not _reads_shapes(one):
                todo += [(operand, compared or equality) for operand in one.all_input_nodes]
        return True

    def _is_own(self, node: fx.Node) -> bool:
        """Is a value computed from buffers alone?"""
        wanted: dict[fx.Node, bool] = {}
        self._collect(node, wanted)
        return all(one in self._own for one in wanted if one.op == "placeholder")

    def _expect(self, t: Any, finite: bool) -> None:
        if isinstance(t, Tensor) and (node := _node(t)) is not None:
            self._expected[node] = finite


def assumed(graph: fx.Graph, origin_of: Callable[[fx.Node], Origin]) -> list[Diagnostic]:
    """A note for each line of forward whose answer is part of the program."""
    asked = dict.fromkeys(origin_of(node) for node in graph.nodes if node.target is assume)
    origins = [one for one in asked if one.phase == "fwd"] or [*asked]  # a checkpoint asks in backward again
    lines = {origin.source: origin for origin in origins}
    return [
        Diagnostic(
            "SC128",
            "forward asks for values of the batch, or of a buffer; the program holds while they are as they are now",
            "note",
            location=origin.source or None,
            source_text=origin.source_text or None,
            fqn=origin.fqn or None,
            hint="a step whose batch answers otherwise is refused (SC512); torch.where would hold for all",
        )
        for origin in lines.values()
    ]


def _packed(node: fx.Node) -> fx.Node | None:
    """What was joined to other tensors, and is split from them here: `cat([k, valid], -1).split([8, 1], -1)[1]`."""
    split = node.args[0] if node.target is operator.getitem else None
    joined = split.args[0] if isinstance(split, fx.Node) and split.target in _SPLITS else None
    if not isinstance(split, fx.Node) or not isinstance(joined, fx.Node):
        return None
    if joined.target is not torch.ops.aten.cat.default or is_written(joined):
        return None
    operands, dims = cast("list[fx.Node]", joined.args[0]), joined.meta["val"].dim()
    dim, along = ((cast(int, one.args[i]) if len(one.args) > i else 0) % dims for one, i in ((joined, 1), (split, 2)))
    sizes = [one.shape[dim] for one in split.meta["val"]]
    if dim != along or sizes != [one.meta["val"].shape[dim] for one in operands]:
        return None
    operand = operands[cast(int, node.args[1])]
    return operand if operand.meta["val"].dtype == node.meta["val"].dtype else None


def _reads_shapes(node: fx.Node) -> bool:
    """Whether a call reads of its tensors their shapes and dtypes alone."""
    name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
    return name.removesuffix("_like") in _FILLS or name.removeprefix("new_") in _FILLS


def _mask_of(t: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]] | None:
    """A mask over the leading dims of a tensor that is indexed by it, and by what the dims behind are; these are empty
    if all of them are taken."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(first, Tensor) or first.dtype != torch.bool or not first.dim():
        return None
    if t.shape[: first.dim()] != first.shape or any(isinstance(one, (Tensor, list)) for one in rest):
        return None
    whole = all(one is Ellipsis or one == slice(None) for one in rest)
    return first, () if whole else tuple(rest)


def _shaped(nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    return {n: torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in nodes}


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _node(t: Any) -> fx.Node | None:
    return torch_compat.node_of(t) if isinstance(t, Tensor) and torch_compat.is_fake(t) else None


def _is_known(t: Tensor) -> bool:
    return not t.is_meta and not torch_compat.is_fake(t)
