"""A model that grows line by line: its source text, its parameters and inputs, and the shape of every value.

A program is its source text, so that what fails can be read, pasted into a test and cut down by hand:

    v0 = self.at0(F.linear(x0, self.w0, self.w1))
    v1 = self.at1(v0[:, 1:4])
    loss = loss + F.mse_loss(v1, torch.arange(12).reshape([4, 3]).cos())

Each line is run on the meta device as it is added. Every value passes through an Identity of its own, so that plans can
place activations.
"""

from __future__ import annotations

import copy
import linecache
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]

LIMIT = 4096  # elements of one value


@dataclass(frozen=True)
class Program:
    """A model's source, and what the source speaks of."""

    lines: tuple[str, ...]
    params: tuple[tuple[str, Shape], ...]
    inputs: tuple[tuple[str, Shape, int], ...]  # name, shape, exclusive upper bound of integers; 0: floats
    values: tuple[tuple[str, Shape], ...]  # the modules `at0`, `at1`, ... with the shapes of what they return
    modules: tuple[tuple[str, str], ...] = ()  # other submodules: name -> constructor

    @property
    def source(self) -> str:
        names = ", ".join(name for name, _, _ in self.inputs)
        lines = [f"def forward(self, {names}):", *(f"    {line}" for line in self.lines), "    return loss", ""]
        return "\n".join(lines)

    def model(self) -> nn.Module:
        made = nn.Module()
        generator = torch.Generator().manual_seed(1)
        for name, shape in self.params:
            made.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) * 0.5))
        for name, _ in self.values:
            made.add_module(name, nn.Identity())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            for name, constructor in self.modules:
                made.add_module(name, eval(constructor, {"nn": nn}))
        # A class of its own: forward must be found on the type, and its lines where tracing looks for them.
        filename = f"<program {zlib.crc32(self.source.encode()):x}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, filename, "exec"), scope)
        made.__class__ = type("Grown", (nn.Module,), {"forward": scope["forward"]})
        return made

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(bound, shape, generator=generator) if bound else torch.randn(shape, generator=generator)
            for name, shape, bound in self.inputs
        }

    def shapes(self) -> dict[str, dict[str, Shape]]:
        """What a plan may place: kind -> name -> shape."""
        return {
            "params": dict(self.params),
            "inputs": {name: shape for name, shape, _ in self.inputs},
            "activations": dict(self.values),
        }

    def __str__(self) -> str:
        head = [f"# {name}: {list(shape)}" + (f" < {bound}" if bound else "") for name, shape, bound in self.inputs]
        head += [f"# self.{name}: {list(shape)}" for name, shape in self.params]
        return "\n".join([*head, self.source])


class Impossible(Exception):
    """A step that the shapes at hand do not allow."""


@dataclass
class Grower:
    """The state of growth: lines, and every value with its shape."""

    lines: list[str] = field(default_factory=list[str])
    params: dict[str, Shape] = field(default_factory=dict[str, Shape])
    inputs: dict[str, tuple[Shape, int]] = field(default_factory=dict[str, tuple[Shape, int]])
    values: dict[str, Shape] = field(default_factory=dict[str, Shape])
    modules: dict[str, str] = field(default_factory=dict[str, str])
    used: set[str] = field(default_factory=set[str])
    tensors: dict[str, Any] = field(default_factory=dict[str, Any])  # on the meta device

    def copy(self) -> Grower:
        """A step is tried on a copy: one that turns out to be impossible halfway leaves nothing behind."""
        return Grower(**{f.name: copy.copy(getattr(self, f.name)) for f in fields(self)})

    def input(self, shape: Shape, bound: int = 0) -> str:
        name = f"{'i' if bound else 'x'}{len(self.inputs)}"
        self.inputs[name] = (shape, bound)
        dtype = torch.int64 if bound else torch.float32
        self.tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        return name

    def param(self, *shape: int, tie: bool = False) -> str:
        """A parameter; with `tie` one that there is already, if it has this shape."""
        found = next((name for name, has in self.params.items() if has == shape), None) if tie else None
        name = found or f"w{len(self.params)}"
        self.params[name] = shape
        return f"self.{name}"

    def shape(self, value: str) -> Shape:
        return tuple(self.tensors[value].shape)

    def value(self, expression: str, *read: str) -> str:
        """One more value: the line is run on meta tensors, and dropped where it does not fit."""
        scope = {"torch": torch, "F": F, "self": _Meta(self), **self.tensors}
        try:
            made = eval(expression, scope)
        except (RuntimeError, ValueError, IndexError, TypeError) as wrong:
            raise Impossible(expression) from wrong
        if not 0 < made.numel() <= LIMIT or not made.is_floating_point() or made.ndim > 5:
            raise Impossible(expression)
        name, at = f"v{len(self.values)}", f"at{len(self.values)}"
        self.lines.append(f"{name} = self.{at}({expression})")
        self.tensors[name] = made
        self.values[at] = tuple(made.shape)
        self.used.update(read)
        return name

    def floats(self) -> list[str]:
        return [name for name, t in self.tensors.items() if t.is_floating_point()]

    def pick(self, choice: int) -> str:
        """The latest value for 0, and so back."""
        names = self.floats()
        return names[-1 - choice % min(len(names), 4)]

    def other(self, choice: int, fits: Callable[[Shape], bool]) -> str:
        names = [name for name in self.floats() if fits(self.shape(name))]
        if not names:
            raise Impossible
        return names[choice % len(names)]

    def finish(self) -> Program:
        leaves = [name for name in self.tensors if name.startswith("v") and name not in self.used]
        leaves = leaves or [self.floats()[-1]]
        lines = [*self.lines, "loss = 0.0"]
        lines += [f"loss = loss + {_loss(name, self.shape(name), i)}" for i, name in enumerate(leaves)]
        text = "\n".join(lines)
        self.params = {name: shape for name, shape in self.params.items() if re.search(rf"self\.{name}\b", text)}
        self.modules = {name: made for name, made in self.modules.items() if f"self.{name}(" in text}
        if not self.params:
            # Something must be trained.
            lines.append(f"loss = loss * {self.param(1)}.sum()")
        return Program(
            tuple(lines),
            tuple(self.params.items()),
            tuple((name, *rest) for name, rest in self.inputs.items()),
            tuple(self.values.items()),
            tuple(self.modules.items()),
        )


def _loss(name: str, shape: Shape, number: int) -> str:
    """A loss to which every element matters differently: the plain sum of a softmax, say, has no gradient at all."""
    weights = f"torch.arange({math.prod(shape)}).reshape({list(shape)}).cos()"
    forms = (f"({name} * {weights}).sum()", f"F.mse_loss({name}, {weights})", f"({name} * {name} * {weights}).mean()")
    return forms[number % 3]


class _Meta:
    """`self` while a line is tried."""

    def __init__(self, grower: Grower) -> None:
        self.grower = grower

    def __getattr__(self, name: str) -> Any:
        if name in self.grower.params:
            return torch.empty(self.grower.params[name], device="meta")
        with torch.device("meta"):
            return eval(self.grower.modules[name], {"nn": nn})
