"""Layers that are dropped at random, by a number that Python compares: the decision becomes data.

    if torch.rand([]) < self.layerdrop:        drop = rand < layerdrop, another in each step
        continue
    x = layer(x)                               x = where(drop, x, layer(x))

The layer is the module that the asking forward calls next; what it is given first, and what it returns first, have one
shape. That nothing else depends on the decision is tried: forward is traced again with all these layers dropped, and
again with every second one, and its loss has to be that of the first trace with the same decisions put in.

A layer is computed also when it is dropped, and its gradient is zero then, where eager PyTorch has none: an optimizer
with momentum or weight decay goes on with such parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc import torch_compat
from shardc.frontend.memory_writes import memory_of, writes_of
from shardc.frontend.provenance import Origin, first_tensor
from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.ops.assumed import after

aten = torch.ops.aten
HINT = "drop what one module computes, x = layer(x); or choose by x = torch.where(torch.rand([]) < p, x, layer(x))"


@dataclass
class _Call:
    """A module that is being called; `drop` is the decision that it is subject to."""

    module: nn.Module
    drop: fx.Node | None = None
    decision: Tensor | None = None
    buffers: tuple[tuple[Tensor, int, Tensor], ...] = ()  # of a layer: its buffers, their versions, what they hold


class LayerDrop:
    """The decisions of one trace, in order. `forced`: those that are taken, of a trace that tries them."""

    def __init__(self, origin_of: Callable[[fx.Node], Origin], forced: Callable[[int], bool] | None = None) -> None:
        self.asked: list[fx.Node] = []
        self._drops: dict[fx.Node, int] = {}  # where each decision, as data, stands among them
        self.forced = forced
        self._origin_of = origin_of
        self._calls: list[_Call] = []
        self._subject: dict[nn.Module, list[tuple[fx.Node, Tensor]]] = {}  # to which decisions a module is subject
        self._recomputes = False  # a module that is called now is called again, by a checkpoint in backward
        self._pending: tuple[fx.Node, Tensor, int] | None = None  # and how many calls are around its question

    def ask(self, node: fx.Node, drop: Tensor) -> bool:
        """Is the layer dropped? Once it is said that it is not, the next call is that of the layer."""
        if node in self.asked:
            return self.forced is not None and self.forced(self.asked.index(node))
        self._refuse_pending()
        self.asked.append(node)
        if self.forced is not None:
            return self.forced(len(self.asked) - 1)
        self._drops[cast("fx.Node", torch_compat.node_of(drop))] = len(self.asked) - 1
        self._pending = node, drop, len(self._calls)
        return False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Follow the calls of modules, and choose what a layer returns."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True),
        )
        try:
            yield
        finally:
            self._calls, self._subject, self._pending = [], {}, None  # no tensor of a trace outlives it
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        call = _Call(module)
        if self._pending is not None and len(self._calls) == self._pending[2]:
            call.drop, call.decision, _depth = self._pending
            self._pending = None
            self._subject.setdefault(module, []).append((call.drop, call.decision))
        elif self._recomputes and (subject := self._subject.get(module)) is not None:
            if len(subject) > 1:
                raise self._refused(subject[0][0], "a module that is called again in backward has several of them")
            call.drop, call.decision = subject[0]
        if call.drop is not None:
            call.buffers = tuple((b, b._version, b.detach().clone()) for b in module.buffers())
        self._calls.append(call)

    def _leave(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        while self._calls and self._calls[-1].module is not module:  # left by an exception
            self._calls.pop()
        if not self._calls:
            return None
        call = self._calls.pop()
        if self._pending is not None and len(self._calls) < self._pending[2]:
            self._refuse_pending()
        if call.drop is None or call.decision is None:
            return None
        given, result = first_tensor(args), first_tensor(output)
        given = first_tensor(dict(kwargs)) if given is None else given
        if given is None or result is None or (given.shape, given.dtype) != (result.shape, result.dtype):
            raise self._refused(call.drop, "the module that is called next does not return what it is given, changed")
        with torch.no_grad():
            for buffer, version, before in call.buffers:  # a layer that is dropped leaves its statistics as they are
                if buffer._version != version:
                    buffer.copy_(torch.where(call.decision, before, buffer))
        chosen = torch.where(call.decision, given, result)
        if isinstance(output, Tensor):
            return chosen
        if type(output) in (tuple, list) and output[0] is result:
            return type(output)([chosen, *output[1:]])
        raise self._refused(call.drop, "the module that is called next returns neither a tensor nor a tuple of some")

    def finish(self) -> None:
        """Raise ShardcError (SC101) for a decision that no layer is subject to."""
        self._refuse_pending()
        self._recomputes = True

    def notes(self) -> list[Diagnostic]:
        """SC131 for each line that drops a layer."""
        origins = {origin.source: origin for origin in map(self._origin_of, self.asked)}
        return [
            Diagnostic(
                "SC131",
                "a layer that a step drops gets gradients of zero, where eager PyTorch has none",
                "note",
                location=origin.source or None,
                source_text=origin.source_text or None,
                fqn=origin.fqn or None,
                hint="an optimizer with momentum or weight decay goes on with its parameters; plain SGD leaves them",
            )
            for origin in origins.values()
        ]

    def _refuse_pending(self) -> None:
        if self._pending is not None:
            raise self._refused(self._pending[0], "no module is called next, which that number could drop")

    def _refused(self, node: fx.Node, why: str) -> ShardcError:
        origin = self._origin_of(node)
        return error(
            "SC101",
            f"a number that is drawn in each step decides what forward does, and {why}",
            location=origin.source or None,
            source_text=origin.source_text or None,
            fqn=origin.fqn or None,
            hint=HINT,
        )

    def refuse_other(
        self, graph: fx.Graph, loss: fx.Node, tried: fx.Graph, tried_loss: fx.Node, forced: Callable[[int], bool]
    ) -> None:
        """Raise ShardcError (SC101) unless a trace with these decisions has the loss that this one has under them."""
        decisions: dict[fx.Node, bool | fx.Node] = {node: forced(place) for node, place in self._drops.items()}
        keys: dict[Any, int] = {}
        if key_of(graph, loss, decisions, keys) != key_of(tried, tried_loss, {}, keys):
            raise self._refused(self.asked[0], "not only what the next module returns depends on it")


def patterns() -> Iterable[Callable[[int], bool]]:
    """The decisions that are tried."""
    return (lambda place: True, lambda place: place % 2 == 0)


Decisions = Mapping[fx.Node, "bool | fx.Node"]  # which value of a `where` is taken; or what a node stands for


def key_of(graph: fx.Graph, result: fx.Node, decisions: Decisions, keys: dict[Any, int]) -> int:
    """A number for what a node computes: one and the same for the same ops of the same inputs, whatever is drawn, and
    for the same writes to their memory, through whatever view."""
    root = graph.owning_module
    number: dict[fx.Node, int] = {}
    written: dict[fx.Node, int] = {}  # by the call that made it: what memory has been written to, so far
    needed = _needed(graph, result, decisions)
    inputs = 0

    def read(node: fx.Node) -> str:
        return f"%{number[node]}.{written.get(memory_of(node), '')}"

    for node in graph.nodes:
        if node.op == "placeholder":
            inputs += 1
        if node not in needed:
            continue
        kept = _kept(node, decisions)
        if kept is not node:
            number[node] = number[kept]
            continue
        if node.op == "placeholder":
            key: Any = ("input", inputs)
        elif node.op == "get_attr":
            constant = getattr(root, str(node.target))
            key = ("constant", constant.dtype, tuple(constant.shape), str(constant.tolist()))
        else:
            args = list(node.args)
            if node.target is RANDOM_UNIFORM:
                args[1] = 0  # a layer that is dropped draws nothing, which moves the numbers of later draws
            operands = fx.map_arg((tuple(args), node.kwargs), read)  # pyright: ignore[reportArgumentType]
            key = (node.op, str(node.target), repr(operands))
        number[node] = keys.setdefault(key, len(keys))
        for memory in map(memory_of, torch_compat.written_by(node)):
            written[memory] = keys.setdefault((written.get(memory), number[node]), len(keys))
    return keys.setdefault(("result", read(result)), len(keys))


def _needed(graph: fx.Graph, result: fx.Node, decisions: Decisions) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    writes = [node for node in writes_of(graph) if _kept(node, decisions) is node]
    todo = [result]
    while todo:
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                kept = _kept(node, decisions)
                todo += node.all_input_nodes if kept is node else [kept]
        memory = {memory_of(node) for node in needed} if writes else set[fx.Node]()
        todo = [
            node
            for node in writes
            if node not in needed and not memory.isdisjoint(map(memory_of, torch_compat.written_by(node)))
        ]
    return needed


def _kept(node: fx.Node, decisions: Decisions) -> fx.Node:
    """What a node is under some decisions."""
    if isinstance(stands_for := decisions.get(node), fx.Node):
        return stands_for
    if node.target is after or node.target in torch_compat.IDENTITIES:
        return node.all_input_nodes[0]
    if node.target is aten.where.self and node.args[0] in decisions:
        _, given, result = node.args
        return cast("fx.Node", given if decisions[cast("fx.Node", node.args[0])] else result)
    return node
