"""Where a node comes from: the module, the user's source line, and the forward op that a backward op belongs to.

While the model runs, hooks keep the stack of modules; when a node is made, the Python frames above it are walked to
the nearest that is not torch's or ours. Backward has neither modules nor the user's frames, but each autograd node
has the sequence number that its forward op had, and its module and line with it. Sums of gradients that meet belong
to no op; they take the module and line of the op executed last.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardc import torch_compat
from shardc.frontend.precision import KEEP_HINT
from shardc.ir.diagnostic import ShardcError, error

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_OURS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), name)
    for name in ("torch_compat.py", "frontend" + os.sep, "ir" + os.sep)  # what runs while a model is traced
)
_MADE_PYTHON = re.compile(r"\.(item|tolist|numpy)\(|\b(float|int|bool)\(")
# Where torch's own modules look at values, and how to keep them from it: by a word of their line.
_LEAVE_OUT = "torch's own module asks for them: another of its options, or a module of your own, may not"
_OF_TORCH = {
    "causal_comparison": "say is_causal=True or False (of a decoder tgt_is_causal): else torch looks into the mask",
    "num_batches_tracked": "give it a momentum, such as 0.1: under None torch divides by a count that is a tensor",
}

_EXPERTS = "a model of Hugging Face's: model.set_experts_implementation('grouped_mm')"

# What torch says of what cannot be traced, and what to do instead.
_FORWARD_MODE = (
    "forward-mode derivatives do not pass through here; take torch.autograd.functional.jvp, or "
    "torch.autograd.grad with create_graph=True"
)
_ON_META = (
    "a tensor of the model that is neither parameter nor buffer lies on the meta device: self.register_buffer(...) it, "
    "or build the model under shardc.meta_parameters()"
)
_INSTEAD = {
    " and meta!": _ON_META,
    "meta and ": _ON_META,
    "different devices cpu, meta": _ON_META,  # as torch 2.11 says it
    "different devices meta, cpu": _ON_META,
    "context_fn": "leave _composable.checkpoint out: the plan's recompute, or torch.utils.checkpoint.checkpoint("
    "module, x, use_reentrant=False) in forward",
    "jvp function for custom autograd.Function": _FORWARD_MODE,
    "forward AD": _FORWARD_MODE,
    "forward mode AD": _FORWARD_MODE,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The provenance of one node. `number` links a backward node to its forward node."""

    fqn: str = ""
    source: str = ""
    source_text: str = ""
    phase: Literal["fwd", "bwd"] = "fwd"
    number: int | None = None


@dataclass
class Origins:
    """The origins of all nodes of a trace that is being recorded."""

    names: dict[nn.Module, str]  # modules by identity -> FQN
    root: CodeType  # code of the function being traced: the walk up the frames ends there
    of: dict[fx.Node, Origin] = field(default_factory=dict[fx.Node, Origin])
    module_outputs: list[tuple[str, fx.Node]] = field(default_factory=list[tuple[str, fx.Node]])
    phase: Literal["fwd", "bwd"] = "fwd"
    on_return: Callable[[str, Tensor], None] | None = None  # is told what modules return: the first tensor of it
    _stack: list[tuple[nn.Module, str]] = field(default_factory=list[tuple[nn.Module, str]])
    _first: dict[int, Origin] = field(default_factory=dict[int, Origin])  # of the forward, by sequence number
    _last: Origin = Origin()
    _number: int | None = None
    _foreign: dict[str, bool] = field(default_factory=dict[str, bool])
    _places: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict[tuple[str, int], tuple[str, str]])

    @property
    def fqn(self) -> str:
        return self._stack[-1][1] if self._stack else ""

    # -------------------------------------------------------------- events
    def on_node(self, node: fx.Node) -> None:
        if self.phase == "bwd" and not self._stack:
            first = self._first.get(self._number) if self._number is not None else None
            self._last = first or self._last
            last = self._last
            origin = Origin(last.fqn, last.source, last.source_text, "bwd", self._number)
        else:
            number = torch_compat.sequence_number() if self.phase == "fwd" else None  # bwd: a recomputed forward
            origin = Origin(self.fqn, *self.where(sys._getframe(1)), self.phase, number)  # pyright: ignore[reportPrivateUsage]
            if number is not None and node.op == "call_function":
                self._first.setdefault(number, origin)
        self.of[node] = origin

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """A node has become another."""
        self.of[new] = self.of[old] if old in self.of else Origin()
        self.module_outputs = [(name, new if node is old else node) for name, node in self.module_outputs]

    def before_backward(self, number: int) -> None:
        self._number = number

    def after_backward(self) -> None:
        self._number = None

    @contextmanager
    def watching(self) -> Generator[None]:
        """Follow module calls."""

        def enter(module: nn.Module, _args: Any) -> None:
            self._stack.append((module, self.names.get(module, self.fqn)))

        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            # An exception that the model caught may have left deeper modules behind.
            while self._stack and self._stack[-1][0] is not module:
                self._stack.pop()
            if self._stack:
                self._stack.pop()
            if self.phase == "fwd" and module in self.names:
                tensor = first_tensor(output)
                if tensor is not None and self.on_return is not None:
                    self.on_return(self.names[module], tensor)
                node = None if tensor is None else torch_compat.node_of(tensor)
                if node is not None:
                    self.module_outputs.append((self.names[module], node))

        hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def within(self, fqn: str) -> Generator[None]:
        """Nodes made now belong to this module, though it is not being called."""
        self._stack.append((nn.Identity(), fqn))
        try:
            yield
        finally:
            self._stack.pop()

    # -------------------------------------------------------------- frames
    def where(self, frame: FrameType | None) -> tuple[str, str]:
        """("model.py:11", its text) of the nearest frame that is the user's or a library's.

        A model made of torch's modules alone has none; then the nearest module of torch's.
        """
        fallback: tuple[str, int] | None = None
        foreign = self._foreign
        while frame is not None and (code := frame.f_code) is not self.root:
            path = code.co_filename
            known = foreign.get(path)
            if known is None:
                known = self._is_foreign(path)
            if known:
                return self._place(path, frame.f_lineno)
            if fallback is None and path.startswith(_MODULES) and not path.endswith("module.py"):
                fallback = path, frame.f_lineno
            frame = frame.f_back
        return self._place(*fallback) if fallback else ("", "")

    def _place(self, path: str, line: int) -> tuple[str, str]:
        known = self._places.get((path, line))
        if known is None:
            known = self._places[path, line] = place(path, line)
        return known

    def where_raised(self, traceback: TracebackType | None) -> tuple[str, str]:
        """The same for an exception."""
        location = ("", "")
        inside_root = False
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if inside_root and self._is_foreign(code.co_filename):
                location = place(code.co_filename, traceback.tb_lineno)
            inside_root = inside_root or code is self.root
            traceback = traceback.tb_next
        return location

    def _line_of_torch(self, traceback: TracebackType | None) -> tuple[str, str] | None:
        """The line of one of torch's own modules that the user's called and that raised; None if it was no module."""
        location: tuple[str, str] | None = None
        while traceback is not None:
            path = traceback.tb_frame.f_code.co_filename
            if self._is_foreign(path):
                location = None
            elif path.startswith(_MODULES) and not path.endswith("module.py"):
                location = place(path, traceback.tb_lineno)
            traceback = traceback.tb_next
        return location

    def placed(self, refusal: ShardcError) -> ShardcError:
        """A refusal at the line of forward that asked for what is refused, unless it names one, or a module, itself."""
        first, *rest = refusal.diagnostics
        source, text = self.where_raised(refusal.__traceback__)
        if first.location or first.fqn or not source:
            return refusal
        diagnostic = replace(first, location=source, source_text=text or None, fqn=self.fqn or None)
        if first.code == "SC101" and "expert" in f"{self.fqn} {text}".lower():
            diagnostic = replace(diagnostic, hint=f"{first.hint}; {_EXPERTS}")
        return ShardcError(diagnostic, *rest)

    def diagnosed(self, problem: BaseException, cast: bool) -> ShardcError:
        """The model's error, at the line and in the module where it was raised; were the model's tensors `cast`?"""
        source, text = self.where_raised(problem.__traceback__)
        fields = {"location": source or None, "source_text": text or None, "fqn": self.fqn or None}
        if torch_compat.is_data_dependent(problem):
            hint = "choose with torch.where, or by Python values"
            if "expert" in f"{self.fqn} {text}".lower():
                hint += f"; {_EXPERTS}"
            looking = self._line_of_torch(problem.__traceback__)
            if looking:
                text_of_torch = looking[1]
                hint = next((text_hint for word, text_hint in _OF_TORCH.items() if word in text_of_torch), _LEAVE_OUT)
            elif _MADE_PYTHON.search(text):
                hint = "leave it a tensor here; .item(), float() and the like are for what trainer.step returns"
            message = "this needs the values of a tensor, which are unknown while compiling"
            cause = str(problem).strip().partition("\n")[0]
            if looking:
                cause += f", in {looking[0]}: {looking[1]}"
            return error("SC101", message, **fields, cause=cause, hint=hint)
        if torch_compat.is_control_flow(problem):
            message = (
                "forward calls an op of torch's for control flow (cond, while_loop, map), which no program can hold"
            )
            hint = "compute both branches and choose with torch.where; loop in Python so many times as shapes say"
            return error("SC101", message, **fields, hint=hint)
        message = f"{type(problem).__name__}: {str(problem).strip() or 'no message'}"
        hint = "does the model run on this batch without shardc?"
        hint = next((instead for phrase, instead in _INSTEAD.items() if phrase in message), hint)
        if cast and any(words in message for words in ("dtype", "scalar type", "should be the same")):
            hint = KEEP_HINT
        return error("SC104", message, **fields, hint=hint)

    def _is_foreign(self, path: str) -> bool:
        known = self._foreign.get(path)
        if known is None:
            known = not (path.startswith((_TORCH, "<")) or path.startswith(_OURS))
            self._foreign[path] = known
        return known


def place(path: str, line: int) -> tuple[str, str]:
    """A frame's location in words, the same on every machine where possible, and the text of its line."""
    return _place(path, line, os.getcwd())


@lru_cache(maxsize=4096)
def _place(path: str, line: int, here: str) -> tuple[str, str]:
    text = linecache.getline(path, line).strip()
    _, packaged, tail = path.rpartition(f"site-packages{os.sep}")
    if packaged:
        path = tail
    elif path.startswith(here + os.sep):
        path = os.path.relpath(path, here)
    return f"{path}:{line}", text


def named_at(model: nn.Module, name: str) -> tuple[str, dict[str, str | None]]:
    """The module that has an attribute, and where it is spoken of first: `location` and `source_text`.

    That is in the forward, or the class, of this module or, if that is of torch, of the nearest one around it that is
    not; there the line has a module's name on the way to the attribute, and if possible the attribute's too.
    """
    modules = dict(model.named_modules())
    fqn, _, attribute = name.rpartition(".")
    while fqn and fqn not in modules:  # of a plain object that the module holds
        fqn, _, attribute = fqn.rpartition(".")
    around, child = fqn, attribute
    while True:
        mention = _first_mention(modules[around], child, attribute)
        if mention or not around:
            return fqn, mention
        around, _, child = around.rpartition(".")


def _first_mention(module: nn.Module, word: str, better: str) -> dict[str, str | None]:
    for source in (type(module).forward, type(module)):
        try:
            lines, start = inspect.getsourcelines(source)
            path = inspect.getsourcefile(source)
        except (OSError, TypeError):
            continue
        if path is None or path.startswith(_TORCH):
            continue
        matching = [i for i, line in enumerate(lines) if re.search(rf"\w\.{re.escape(word)}\b", line)]
        best = [i for i in matching if better in lines[i]] or matching
        if best:
            location, text = place(path, start + best[0])
            return {"location": location, "source_text": text or None}
    return {}


def about_tensor(model: nn.Module, code: str, name: str, message: str, hint: str) -> ShardcError:
    """An error about one of the model's parameters or buffers, at the line where forward first speaks of it."""
    fqn, fields = named_at(model, name)
    return error(code, message, tensor=name, fqn=fqn or None, hint=hint, **fields)


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of a module's output, whatever it is wrapped in."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((t for item in output if (t := first_tensor(item)) is not None), None)
    return None
