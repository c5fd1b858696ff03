"""What Python asks of a tensor's values while a step is traced, answered by the sample batch.

    if labels.max() >= self.vocab_size: raise ...      of the batch's integers
    for t, h, w in grid_thw.tolist(): ...
    if not torch.isfinite(hidden).all(): ...           assumed to be finite
    pixels[is_real]                                    a mask of the batch that leaves out nothing: a copy
    if torch.rand([]) < self.layerdrop: continue       of a layer drop of 0

The answer becomes part of the program, as a shape does. So each is checked in every step (`assume`): a batch that
answers otherwise is refused. What depends on weights, on random numbers or on the batch's floating-point numbers is
asked in vain (SC101): it would be another in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from shardc import torch_compat
from shardc.frontend.provenance import Origin
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.ops.assumed import after, assume
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
_LESS: tuple[Any, ...] = (torch.lt, Tensor.lt, Tensor.__lt__)
_SELECTIONS: tuple[Any, ...] = (Tensor.__getitem__, torch.masked_select, Tensor.masked_select)
_FILLS = ("ones", "zeros", "full")
_Value = Tensor | None


class SampleValues:
    """Answers for one recording. `samples`: by the traced inputs of the batch, what the sample batch has there."""

    refused = object()  # the answer to what cannot be answered

    def __init__(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.checked: list[Tensor] = []  # what `assume` returned
        self._samples = {
            node: real for traced, real in samples if _is_known(real) and (node := torch_compat.node_of(traced))
        }
        self._assumed: set[tuple[fx.Node, str, int]] = set()
        self._expected: dict[fx.Node, bool] = {}  # truth values that say whether numbers are finite
        self._drawn: set[fx.Node] = set()  # in [0, 1)
        self._certain: dict[fx.Node, bool] = {}  # truth values of every step

    # -------------------------------------------------------------- events
    def observe(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow a call that says which numbers are finite, through to one truth value."""
        if function in _FINITE:
            self._expect(result, True)
        elif function in _UNBOUNDED:
            self._expect(result, False)
        elif function is torch.rand and (node := _node(result)) is not None:
            self._drawn.add(node)
        elif function in _LESS and len(args) == 2 and (node := _node(result)) is not None:
            drawn, limit = _node(args[0]), args[1]
            if drawn in self._drawn and isinstance(limit, int | float) and not 0 < limit < 1 and not _is_written(drawn):
                self._certain[node] = limit >= 1
        elif function in _EITHER or function in _ALL or function in _ANY:
            asked = [self._expected.get(n) if (n := _node(arg)) else None for arg in args if isinstance(arg, Tensor)]
            same = bool(asked) and all(each is not None and each == asked[0] for each in asked)
            if (
                same
                and len(args) == len(asked)
                and not kwargs
                and asked[0] is not (function in _ANY or function in _EITHER)
            ):
                self._expect(result, asked[0] is True)

    @staticmethod
    def neighbours(x: Tensor, key: Any) -> Tensor | None:
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
        if function is torch.tensor and len(args) == 1:
            return self._of_numbers(args[0], kwargs)
        if kwargs or not args or not isinstance(args[0], Tensor):
            return self.refused
        if function in _SELECTIONS and len(args) == 2 and isinstance(args[1], Tensor):
            whole = function is Tensor.__getitem__ or args[0].dim() == args[1].dim()
            return self._all_of(args[0], args[1]) if whole else self.refused
        if function is torch.repeat_interleave and len(args) == 2 and isinstance(args[1], Tensor):
            return self._repeated(args)
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
        if (node in self._certain or node in self._expected) and _is_written(node):
            return self.refused
        if (certain := self._certain.get(node)) is not None and function in (Tensor.__bool__, Tensor.item):
            return certain
        if (finite := self._expected.get(node)) is not None and function in (Tensor.__bool__, Tensor.item):
            self._assume(node, "", lambda: t if finite else t.logical_not())
            return finite
        value = self._value(node)
        if value is None or value.is_floating_point() or value.is_complex():
            return self.refused
        with torch_compat.untraced():
            answer = function(value)
        self._assume_equal(node, t, value)
        return answer

    def _all_of(self, t: Tensor, mask: Tensor) -> Any:
        """What a mask chooses that chooses everything."""
        node, dims = _node(mask), mask.dim()
        if node is None or mask.dtype != torch.bool or not dims or t.shape[:dims] != mask.shape:
            return self.refused
        value = self._value(node)
        with torch_compat.untraced():
            if value is None or not value.all():
                return self.refused
        self._assume(node, "all", mask.all)
        return t.flatten(0, dims - 1).clone()  # as eager PyTorch's: a write to it leaves `t` as it is

    def _of_numbers(self, data: Any, kwargs: Mapping[str, Any]) -> Any:
        """A tensor made of a list, some of whose numbers are tensors."""
        leaves, structure = flatten(data)
        numbers = [self._read(leaf, Tensor.item) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(number is self.refused for number in numbers):
            return self.refused
        with torch_compat.untraced():  # of tensors, torch takes the dtype; of Python's numbers, the default one
            typed = [
                torch.tensor(number, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for number, leaf in zip(numbers, leaves, strict=True)
            ]
            dtype = kwargs.get("dtype") or torch.tensor(torch_compat.unflatten(typed, structure)).dtype
        options: dict[str, Any] = {**kwargs, "dtype": dtype}
        return torch.tensor(torch_compat.unflatten(numbers, structure), **options)

    def _repeated(self, args: Sequence[Any]) -> Any:
        """Elements by counts, where all of them are of the batch: a constant."""
        values = [self._value(node) if (node := _node(arg)) is not None else None for arg in args]
        if any(value is None or value.is_floating_point() for value in values):
            return self.refused
        with torch_compat.untraced():
            result: list[int] = torch.repeat_interleave(*cast("list[Tensor]", values)).tolist()
        for arg, value in zip(args, values, strict=True):
            self._assume_equal(cast("fx.Node", _node(arg)), arg, cast("Tensor", value))
        return torch.tensor(result, dtype=args[0].dtype)

    def _assume_equal(self, node: fx.Node, t: Tensor, value: Tensor) -> None:
        wanted: dict[fx.Node, bool] = {}
        self._collect(node, wanted)
        if all(one.op != "placeholder" for one in wanted):
            return  # computed from constants, and the same in every step
        with torch_compat.untraced():
            expected: Any = value.tolist() if value.numel() != 1 else value.item()
        one = value.numel() == 1
        self._assume(node, "", lambda: t.reshape(()) == expected if one else (t == torch.tensor(expected)).all())

    def _assume(self, node: fx.Node, how: str, holds: Callable[[], Tensor]) -> None:
        asked = node, how, len(_writes(node.graph))  # a write through a view leaves a tensor's node as it is
        if asked not in self._assumed:
            self._assumed.add(asked)
            with torch.no_grad():
                self.checked.append(assume(holds()))

    # -------------------------------------------------------------- values
    def _value(self, node: fx.Node) -> _Value:
        """The value of a node on the sample batch; None if it depends on more. On floating-point inputs it may depend
        by equality alone, `pixels == 0`: so padding is found, and what is greater is another in each batch."""
        wanted: dict[fx.Node, bool] = {}  # and whether it is asked by equality alone
        if not self._collect(node, wanted):
            return None
        values: dict[fx.Node, Any] = {n: self._samples[n].cpu() for n in wanted if n.op == "placeholder"}
        values |= {n: torch_compat.recorded_constant(str(n.target)) for n in wanted if n.op == "get_attr"}
        with torch_compat.untraced():
            if any(torch_compat.mutates(n) for n in wanted):
                values = {n: value.clone() for n, value in values.items()}
            for one in node.graph.nodes:
                if one in wanted and one not in values:
                    known = values if not _reads_shapes(one) else values | _shaped(one.all_input_nodes)
                    args, kwargs = fx.map_arg((one.args, one.kwargs), known.__getitem__)
                    values[one] = one.target(*args, **kwargs)
        result = values[node]
        return result if isinstance(result, Tensor) else None

    def _collect(self, node: fx.Node, wanted: dict[fx.Node, bool]) -> bool:
        """Add the calls that lead to a node, and those that write to the memory of these; False if one is unknown."""
        writes = _writes(node.graph)
        todo = [(node, False)]
        while todo or (todo := _to_memory(wanted, writes)):
            one, compared = todo.pop()
            if one in wanted and wanted[one] <= compared:
                continue
            wanted[one] = compared
            if one.op == "placeholder":
                sample = self._samples.get(one)
                if sample is None or (sample.is_floating_point() and not compared):
                    return False
            if _is_random(one):
                return False
            equality = getattr(one.target, "overloadpacket", None) in (torch.ops.aten.eq, torch.ops.aten.ne)
            if not _reads_shapes(one):
                todo += [(operand, compared or equality) for operand in one.all_input_nodes]
        return True

    def _expect(self, t: Any, finite: bool) -> None:
        if isinstance(t, Tensor) and (node := _node(t)) is not None:
            self._expected[node] = finite


def assumed(graph: fx.Graph, origin_of: Callable[[fx.Node], Origin]) -> list[Diagnostic]:
    """A note for each line of forward whose answer is part of the program."""
    origins = dict.fromkeys(origin_of(node) for node in graph.nodes if node.target is assume)
    lines = {origin.source: origin for origin in origins}
    return [
        Diagnostic(
            "SC128",
            "forward asks for values of the batch; the program holds for batches that answer as this one does",
            "note",
            location=origin.source or None,
            source_text=origin.source_text or None,
            fqn=origin.fqn or None,
            hint="a step whose batch answers otherwise is refused (SC512); torch.where would hold for all",
        )
        for origin in lines.values()
    ]


def _reads_shapes(node: fx.Node) -> bool:
    """Whether a call reads of its tensors their shapes and dtypes alone."""
    name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.")
    return name.removesuffix("_like") in _FILLS or name.removeprefix("new_") in _FILLS


def _writes(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if torch_compat.mutates(n)]


def _to_memory(wanted: Mapping[fx.Node, bool], writes: Sequence[fx.Node]) -> list[tuple[fx.Node, bool]]:
    """The calls that write to the memory of some values, and are not among them."""
    memory = {_memory(n) for n in wanted} if writes else set[fx.Node]()
    return [
        (n, False)
        for n in writes
        if wanted.get(n, True) and not memory.isdisjoint(map(_memory, torch_compat.written_by(n)))
    ]


def _memory(node: fx.Node) -> fx.Node:
    """The call whose memory a view lies in, and what is written in place."""
    while True:
        if torch_compat.shares_memory(node):
            node = node.all_input_nodes[0]
        elif written := torch_compat.written_by(node):  # out=
            node = written[0]
        else:
            return node


def _is_written(node: fx.Node) -> bool:
    return bool(_to_memory({node: False}, _writes(node.graph)))


def _shaped(nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    return {n: torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in nodes}


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _node(t: Any) -> fx.Node | None:
    return torch_compat.node_of(t) if isinstance(t, Tensor) and torch_compat.is_fake(t) else None


def _is_known(t: Tensor) -> bool:
    return not t.is_meta and not torch_compat.is_fake(t)
