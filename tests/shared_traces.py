"""What two tests trace alike is traced once in a process: of the time of tests, a third was tracing small models anew.

    llama(8, 16), dp=2, tp=2, zero-3       traced
    llama(8, 16), tp=4, fused, AdamW       a copy of that trace: the plan and the mesh come after it

A trace is shared only where all that it may depend on is known: the classes of the model's modules are found under
their names, and each has plain attributes and no hooks; buffers and the batch are the same to the bit. Whoever takes
one gets a copy, since compiling edits it. A test traces for itself from where it changes code by `monkeypatch` on; so
do those of the tracer, and long tests.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc.compiler.preparation as preparation
import shardc.frontend.cached_model as cached_model
from shardc.frontend.trace import Traced, trace

OWN_TRACES = ("frontend", "hostile", "gpu")  # rooms whose tests are of tracing itself, or of another device
PACKAGES = ("torch", "transformers", "shardc", "examples", "tests", "collections")
PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice)
PLAIN += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)  # type: ignore[assignment]
HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]
KEPT = 128  # traces; the oldest go

_traces: dict[str, Traced] = {}
_active = False


class UnknownStateError(Exception):
    """Something that a trace may depend on, and that has no text."""


def install() -> None:
    """From now on `shardc.compile` takes its traces from here, in tests for which that is switched on."""
    preparation.trace = cached_model.trace = shared  # type: ignore[attr-defined]
    for name in ("setattr", "delattr", "setitem", "delitem"):
        setattr(pytest.MonkeyPatch, name, _switching_off(getattr(pytest.MonkeyPatch, name)))


def switch(item: pytest.Item) -> None:
    global _active
    _active = item.path.parent.name not in OWN_TRACES and item.get_closest_marker("long") is None


def _switching_off(change: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(change)
    def changed(*arguments: Any, **keywords: Any) -> None:
        global _active
        _active = False
        change(*arguments, **keywords)

    return changed


@functools.wraps(trace)
def shared(model: nn.Module, batch: Any, loss: Any = None, **options: Any) -> Traced:
    key = _key(model, batch, loss, options) if _active else None
    if key is None:
        return trace(model, batch, loss, **options)
    if key in _traces:
        return copied(_traces[key])
    traced = trace(model, batch, loss, **options)
    if not traced.diagnostics and not traced.changed_attributes:
        if len(_traces) == KEPT:
            _traces.pop(next(iter(_traces)))
        _traces[key] = copied(traced)
    return traced


def copied(traced: Traced) -> Traced:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(value: Any) -> Any:
        return copies.get(value, value) if isinstance(value, fx.Node) else value

    for node in traced.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node, copy in copies.items():
        copy.meta = {name: copy_of(value) for name, value in node.meta.items()}
    return replace(
        traced,
        before=None,  # of another model
        graph=graph,
        inputs=tuple(replace(i, node=copies[i.node]) for i in traced.inputs),
        outputs=tuple(replace(o, node=copies[o.node]) for o in traced.outputs),
        modules={name: copy_of(node) for name, node in traced.modules.items()},
        constants={name: value.clone() for name, value in traced.constants.items()},
    )


# ---------------------------------------------------------------------- what a trace depends on
def _key(model: nn.Module, batch: Any, loss: Any, options: Mapping[str, Any]) -> str | None:
    """A digest of all that a trace may depend on, or None."""
    surroundings = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
    )
    state = _State()
    try:
        parts = (surroundings, state.of(model), state.of(batch, values=True), state.of(loss), state.of(options))
    except UnknownStateError:
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class _State:
    """Texts of values. What is met twice is said to be the same: a tied parameter is not two that are alike."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.modules: dict[int, int] = {}

    def of(self, value: Any, *, values: bool = False) -> Any:
        """What stands for a value; of tensors their form, and with `values` what they hold."""
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            return self.of_tensor(value, values)
        if isinstance(value, nn.Module):
            return self.of_module(value)
        if isinstance(value, Mapping):
            items = [(self.of(k), self.of(v, values=values)) for k, v in value.items()]
            return (_name(type(value)), items)
        if isinstance(value, list | tuple):
            return (type(value).__name__, [self.of(v, values=values) for v in value])
        if isinstance(value, set | frozenset):
            return sorted(repr(self.of(v)) for v in value)
        if isinstance(value, functools.partial):
            return ("partial", self.of(value.func), self.of(value.args), self.of(value.keywords))
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return _name(value)
        if not hasattr(value, "__dict__") or isinstance(value, types.MethodType | types.ModuleType):
            raise UnknownStateError
        return (_name(type(value)), self.of(vars(value), values=values))

    def of_module(self, module: nn.Module) -> Any:
        if id(module) in self.modules:
            return ("module", self.modules[id(module)])
        self.modules[id(module)] = len(self.modules)
        state = dict(vars(module))
        if any(state.pop(name) for name in HOOKS if name in state):
            raise UnknownStateError
        buffers = self.of(state.pop("_buffers"), values=True)
        shared = {name: v for name, v in vars(type(module)).items() if not (name.startswith("__") or callable(v))}
        is_tests = type(module).__module__.startswith("tests.")
        return (_name(type(module)), buffers, self.of(state), self.of(shared) if is_tests else None)

    def of_tensor(self, value: Tensor, values: bool) -> Any:
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
        plain = plain and value.grad_fn is None
        hooked = value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
        if not plain or hooked or value.device.type not in ("cpu", "meta"):
            raise UnknownStateError
        place = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
        held = None
        if values and value.device.type == "cpu":
            data = value.detach().contiguous().reshape(-1).view(torch.uint8)
            held = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        form = (type(value).__name__, value.dtype, value.device.type, value.shape, value.stride(), value.requires_grad)
        return (*form, place, value.storage_offset(), held)


def _name(value: Callable[..., Any]) -> str:
    """Of a class or function that is found under its name, and has no variables of a function around it."""
    module, name = getattr(value, "__module__", None) or "", value.__qualname__
    if module != "builtins" and module.partition(".")[0] not in PACKAGES:
        raise UnknownStateError
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        raise UnknownStateError from None
    if found is not value and getattr(found, "__func__", found) is not value:
        raise UnknownStateError
    return f"{module}.{name}"
