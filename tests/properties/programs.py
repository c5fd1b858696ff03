"""Random models: a few lines of Python grown from a table of ops, executed on the meta device as they grow.

A program is its source text, so that what fails can be read, pasted into a test and cut down by hand:

    x1 = self.at1(F.linear(x0, self.w0, self.w1))
    x2 = self.at2(x1[:, 1:4])
    loss = loss + x2.square().mean()

Each step is an op's name and a few numbers from which the op takes its choices, modulo what the shapes allow; a step
that cannot be is left out. So any list of steps is a program, and hypothesis shrinks to few and plain ones. Every value
passes through an Identity of its own, so that plans can place activations. Sizes are small, many of them odd or prime:
most shards are uneven.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]
Step = tuple[str, int, int, int]

SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 1)
LIMIT = 4096  # elements of one value


@dataclass(frozen=True)
class Program:
    """A model's source, the shapes of its parameters, its inputs (floats, or integers below a bound), and its values."""

    lines: tuple[str, ...]
    params: tuple[tuple[str, Shape], ...]
    inputs: tuple[tuple[str, Shape, int], ...]  # name, shape, exclusive upper bound of integers; 0: floats
    values: tuple[tuple[str, Shape], ...]  # the modules `at0`, `at1`, ... with the shapes of what they return
    modules: tuple[tuple[str, str], ...] = ()  # other submodules: name -> constructor

    @property
    def source(self) -> str:
        names = ", ".join(name for name, _, _ in self.inputs)
        return "\n".join([f"def forward(self, {names}):", *(f"    {line}" for line in self.lines), "    return loss", ""])

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
        filename = f"<program {abs(hash(self.source))}>"
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
        leaves = [name for name in self.tensors if name.startswith("v") and name not in self.used] or [self.floats()[-1]]
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
    return (f"({name} * {weights}).sum()", f"F.mse_loss({name}, {weights})", f"({name} * {name} * {weights}).mean()")[number % 3]


class _Meta:
    """`self` while a line is tried."""

    def __init__(self, grower: Grower) -> None:
        self.grower = grower

    def __getattr__(self, name: str) -> Any:
        if name in self.grower.params:
            return torch.empty(self.grower.params[name], device="meta")
        with torch.device("meta"):
            return eval(self.grower.modules[name], {"nn": nn})


# ------------------------------------------------------------------------------------------------- the table of ops
OPS: dict[str, Callable[[Grower, int, int, int], None]] = {}


def op(function: Callable[[Grower, int, int, int], None]) -> Callable[[Grower, int, int, int], None]:
    OPS[function.__name__] = function
    return function


def _dim(shape: Shape, choice: int) -> int:
    if not shape:
        raise Impossible
    return choice % len(shape)


def _choose(options: Sequence[Any], choice: int) -> Any:
    if not options:
        raise Impossible
    return options[choice % len(options)]


@op
def unary(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    forms = (
        "F.gelu({x})", "F.relu({x})", "torch.tanh({x})", "F.silu({x})", "torch.sigmoid({x})", "{x} * 0.5", "-{x}",
        "{x} + 1.0", "{x}.square()", "torch.exp(-{x}.abs())", "{x}.clone()", "F.gelu({x}, approximate='tanh')",
        "F.leaky_relu({x})", "{x}.clamp(-1.0, 1.0)", "torch.where({x} > 0, {x}, 0.1)", "{x}.double().float()",
        "1.0 - {x}", "{x} / 3.0", "F.softplus({x})", "torch.erf({x})", "{x}.detach() * {x}",
    )  # fmt: skip
    g.value(forms[b % len(forms)].format(x=x), x)


@op
def linear(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    k = g.shape(x)[_dim(g.shape(x), -1)]
    n = SIZES[b % len(SIZES)] if c % 4 else k
    bias = f", {g.param(n)}" if c % 2 else ""
    g.value(f"F.linear({x}, {g.param(n, k, tie=c % 5 == 0)}{bias})", x)


@op
def matmul(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    k, n = shape[_dim(shape, -1)], SIZES[b % len(SIZES)]
    forms = [f"{x} @ {g.param(k, n, tie=c % 2 == 0)}"]
    if len(shape) >= 2:
        forms.append(f"{x} @ {x}.transpose(-1, -2)")
        forms.append(f"{x}.transpose(-1, -2) @ {x}")
        forms.append(f"{g.param(n, shape[-2])} @ {x}")
    if len(shape) == 3:
        forms.append(f"torch.bmm({x}, {g.param(shape[0], k, n)})")
    if len(shape) == 2:
        forms.append(f"torch.addmm({g.param(n)}, {x}, {g.param(k, n)})")
    if len(shape) == 1:
        forms.append(f"torch.outer({x}, {x})")
    g.value(forms[c % len(forms)], x)


@op
def weighted(g: Grower, a: int, b: int, c: int) -> None:
    """Add, subtract or multiply by a parameter that broadcasts: some of its dims are 1 or absent."""
    x = g.pick(a)
    shape = g.shape(x)
    kept = shape[c % (len(shape) + 1) :]
    size = tuple(1 if b >> i & 1 else n for i, n in enumerate(kept))
    g.value(f"{x} {('+', '*', '-')[a % 3]} {g.param(*size)}", x)


@op
def combine(g: Grower, a: int, b: int, c: int) -> None:
    """Two values, one of which may broadcast: residual connections and gates."""
    x = g.pick(a)
    shape = g.shape(x)

    def fits(other: Shape) -> bool:
        return all(n in (1, m) or m == 1 for n, m in zip(other[::-1], shape[::-1], strict=False))

    y = g.other(b, fits)
    form = ("{x} + {y}", "{x} * {y}", "{x} - {y}", "torch.maximum({x}, {y})", "torch.where({x} > {y}, {x}, {y})")
    g.value(form[c % len(form)].format(x=x, y=y), x, y)


@op
def softmax(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    d = _dim(g.shape(x), b)
    g.value((f"torch.softmax({x}, {d})", f"torch.log_softmax({x}, {d})", f"torch.logsumexp({x}, {d})")[c % 3], x)


@op
def norm(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    last = shape[_dim(shape, -1) :]
    weights = f", {g.param(*last)}, {g.param(*last)}" if b % 2 else ""
    forms = [f"F.layer_norm({x}, {list(last)}{weights})", f"F.rms_norm({x}, {list(last)})"]
    if len(shape) == 4:
        name = f"bn{len(g.modules)}"
        g.modules[name] = f"nn.BatchNorm2d({shape[1]})"
        forms.append(f"self.{name}({x})")
    if len(shape) >= 3 and shape[1] % 2 == 0:
        forms.append(f"F.group_norm({x}, 2, {g.param(shape[1])}, {g.param(shape[1])})")
    g.value(forms[-1 - c % len(forms)], x)


@op
def reduce(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    d = _dim(shape, b)
    dims = [d] if c % 3 or len(shape) < 2 else sorted({d, (d + 1) % len(shape)})
    name = ("sum", "mean", "amax", "amin", "var", "std", "max", "prod", "norm")[c // 3 % 9]
    keep = ", keepdim=True" if a % 2 else ""
    if name in ("max", "prod"):
        g.value(f"{x}.{name}({d}{keep})" + ("[0]" if name == "max" else ""), x)
    elif name == "norm":
        g.value(f"({x}.square() + 1.0).sum({dims}{keep}).sqrt()", x)
    elif name in ("var", "std"):
        g.value(f"({x}.{name}({dims}, correction={b % 2}{keep}) + 0.1)", x)
    else:
        g.value(f"{x}.{name}({dims}{keep})", x)


@op
def scan(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    d = _dim(g.shape(x), b)
    forms = ("{x}.cumsum({d})", "{x}.flip({d})", "{x}.roll(1, {d})", "{x}.sort({d})[0]", "{x}.topk(1, {d})[0]")
    g.value(forms[c % len(forms)].format(x=x, d=d), x)


@op
def order(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    n = len(g.shape(x))
    if n < 2:
        raise Impossible
    d, e = b % n, c % n
    rolled = [(i + 1) % n for i in range(n)]
    g.value(f"{x}.transpose({d}, {e})" if d != e else f"{x}.permute({rolled})", x)


@op
def view(g: Grower, a: int, b: int, c: int) -> None:
    """Merge two dims, or split one, or both at once."""
    x = g.pick(a)
    shape = list(g.shape(x))
    d = _dim(tuple(shape), b)
    divisors = [k for k in range(2, shape[d]) if shape[d] % k == 0]
    options = [shape[:d] + [k, shape[d] // k] + shape[d + 1 :] for k in divisors]
    if d + 1 < len(shape):
        options.append([*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]])
        total = shape[d] * shape[d + 1]
        options += [[*shape[:d], k, total // k, *shape[d + 2 :]] for k in range(2, total) if total % k == 0]
    options += [[math.prod(shape)], [*shape[:d], 1, *shape[d:]]]
    g.value(f"{x}.reshape({_choose(options, c)})", x)


@op
def section(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    d = _dim(shape, b)
    n = shape[d]
    index = ":, " * d
    half = [k for k in (2, 3) if n % k == 0]
    forms = [f"{x}[{index}{c % n}]", f"{x}[{index}{c % n}:]", f"{x}[{index}: {max(1, n - 1 - c % n)}]", f"{x}[{index}::2]"]
    if half:
        parts = ", ".join(f"{x}.chunk({half[0]}, {d})[{i}]" for i in reversed(range(half[0])))
        forms += [f"torch.cat([{parts}], {d})", f"{x}.chunk({half[-1]}, {d})[{c % half[-1]}]"]
        forms += [f"{x}.chunk({half[0]}, {d})[0] * F.silu({x}.chunk({half[0]}, {d})[1])"] * 2
    if n > 2:
        forms.append(f"{x}.split([1, {n - 1}], {d})[1]")
        forms.append(f"{x}.split([1, {n - 1}], {d})[0] + {x}.split([1, {n - 1}], {d})[1]")
        forms.append(f"{x}.narrow({d}, 1, {n - 2})")
    g.value(forms[c % len(forms)], x)


@op
def join(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    d = _dim(shape, b)

    def fits(other: Shape) -> bool:
        return len(other) == len(shape) and all(i == d or n == m for i, (n, m) in enumerate(zip(other, shape, strict=True)))

    y = g.other(c, fits)
    forms = [f"torch.cat([{x}, {y}], {d})", f"torch.cat([{x}, {y}, {x}], {d})"]
    if g.shape(y) == shape:
        forms.append(f"torch.stack([{x}, {y}], {d})")
    g.value(forms[c % len(forms)], x, y)


@op
def repeat(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    d = _dim(shape, b)
    wide = [*shape[:d], 2 + c % 2, *shape[d:]]
    copies = [1] * len(shape)
    copies[d] = 2
    forms = (
        f"{x}.unsqueeze({d}).expand({wide})",
        f"{x}.unsqueeze({d}).expand({wide}).reshape({[*shape[:d], wide[d] * shape[d], *shape[d + 1 :]]})",
        f"{x}.repeat({copies})",
        f"{x}.repeat_interleave(2, {d})",
    )
    g.value(forms[c % len(forms)], x)


@op
def pad(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    d = _dim(g.shape(x), b)
    widths = [0, 0] * (len(g.shape(x)) - 1 - d) + [c % 2, 1]
    g.value(f"F.pad({x}, {widths}, value={float(c % 3)})", x)


@op
def embedding(g: Grower, a: int, b: int, c: int) -> None:
    rows, width = SIZES[a % len(SIZES)] + 3, SIZES[b % len(SIZES)]
    shape = tuple(SIZES[(c + 3 * i) % len(SIZES)] for i in range(1 + c % 2))
    known = [name for name, (_, bound) in g.inputs.items() if bound == rows]
    tokens = known[0] if known else g.input(shape, rows)
    g.value(f"F.embedding({tokens}, {g.param(rows, width, tie=c % 3 == 0)})")


@op
def select(g: Grower, a: int, b: int, c: int) -> None:
    """Rows chosen by an input: index_select, gather, or indexing with a tensor."""
    x = g.pick(a)
    shape = g.shape(x)
    d = _dim(shape, b)
    count = SIZES[c % len(SIZES)]
    if c % 3 == 0:
        g.value(f"{x}.index_select({d}, {g.input((count,), shape[d])})", x)
    elif c % 3 == 1:
        g.value(f"{x}.gather({d}, {g.input((*shape[:d], count, *shape[d + 1 :]), shape[d])})", x)
    else:
        g.value(f"{x}[{':, ' * d}{g.input((count,), shape[d])}]", x)


@op
def attention(g: Grower, a: int, b: int, c: int) -> None:
    """A block of attention on [batch, seq, width]: grouped queries, causal or not, fused or separate projections."""
    x = g.pick(a)
    shape = g.shape(x)
    if len(shape) != 3:
        raise Impossible
    batch, seq, width = shape
    kv = (1, 2, 3, 4)[b % 4]
    heads, size = kv * (1, 2)[c % 2], (2, 3, 4)[b // 4 % 3]
    causal = f"is_causal={c // 2 % 2 == 0}"

    def project(n: int) -> str:
        return f"F.linear({x}, {g.param(n * size, width)}).view({batch}, {seq}, {n}, {size}).transpose(1, 2)"

    if heads == kv and b % 2:
        fused = f"F.linear({x}, {g.param(3 * heads * size, width)}, {g.param(3 * heads * size)})"
        g.value(f"{fused}", x)
        qkv = g.floats()[-1]
        parts = [
            f"{qkv}.split({heads * size}, 2)[{i}].reshape({batch}, {seq}, {heads}, {size}).transpose(1, 2)" for i in range(3)
        ]
        out = g.value(f"F.scaled_dot_product_attention({', '.join(parts)}, {causal})", qkv)
    else:
        gqa = ", enable_gqa=True" if heads != kv else ""
        q, k, v = (g.value(project(n), x) for n in (heads, kv, kv))
        out = g.value(f"F.scaled_dot_product_attention({q}, {k}, {v}, {causal}{gqa})", q, k, v)
    merged = f"{out}.transpose(1, 2).reshape({batch}, {seq}, {heads * size})"
    g.value(f"F.linear({merged}, {g.param(width, heads * size)})", out)


@op
def branches(g: Grower, a: int, b: int, c: int) -> None:
    """Two products of one value and their sum, or an MLP and its residual: pending sums that meet."""
    x = g.pick(a)
    k = g.shape(x)[_dim(g.shape(x), -1)]
    n = SIZES[b % len(SIZES)]
    if c % 2:
        left = g.value(f"F.linear({x}, {g.param(n, k)})", x)
        right = g.value(f"{x} @ {g.param(k, n)}", x)
    else:
        hidden = g.value(f"F.gelu(F.linear({x}, {g.param(n, k)}))", x)
        left, right = x, g.value(f"F.linear({hidden}, {g.param(k, n)})", hidden)
    g.value(f"{left} {'+-'[c // 2 % 2]} {right}", left, right)


@op
def scores(g: Grower, a: int, b: int, c: int) -> None:
    """Attention by hand, with a mask made of positions."""
    x = g.pick(a)
    shape = g.shape(x)
    if len(shape) < 2:
        raise Impossible
    seq = shape[-2]
    mask = ("torch.ones({n}, {n}).tril() == 0", "torch.arange({n})[:, None] < torch.arange({n})[None, :]")[c % 2].format(n=seq)
    w = g.param(shape[-1], shape[-1])
    s = g.value(f"({x} @ {w} @ {x}.transpose(-1, -2)).masked_fill({mask}, float('-inf'))", x)
    g.value(f"torch.softmax({s}, -1) @ {x}", s, x)


@op
def convolution(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    if len(shape) not in (3, 4):
        raise Impossible
    d = len(shape) - 2
    out, k = SIZES[b % 7], 1 + c % 3
    grouped = c % 4 == 3
    groups = 2 if grouped and shape[1] % 2 == 0 and out % 2 == 0 else 1
    bias = g.param(out) if c % 2 else "None"
    forms = [f"F.conv{d}d({x}, {g.param(out, shape[1] // groups, *[k] * d)}, {bias}, padding={k // 2}, groups={groups})"]
    if d == 2:
        forms += [f"F.max_pool2d({x}, 2)", f"F.avg_pool2d({x}, 2)", f"F.adaptive_avg_pool2d({x}, 1)"]
    g.value(forms[0 if c < 128 else c % len(forms)], x)


@op
def dropout(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    g.value(f"F.dropout({x}, {(0.1, 0.5)[c % 2]})", x)


@op
def cross_entropy(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    shape = g.shape(x)
    classes = shape[_dim(shape, -1)]
    if classes < 2:
        raise Impossible
    rows = math.prod(shape[:-1])
    labels = g.input(shape[:-1] if c % 2 else (rows,), classes)
    target = f"{labels}.reshape({rows})"
    extra = ("", ", label_smoothing=0.1", ", ignore_index=0", ", reduction='sum'")[c // 2 % 4]
    g.value(f"F.cross_entropy({x}.reshape({rows}, {classes}), {target}{extra})", x)


@op
def loss(g: Grower, a: int, b: int, c: int) -> None:
    x = g.pick(a)
    y = g.other(b, lambda other: other == g.shape(x))
    g.value((f"F.mse_loss({x}, {y})", f"F.smooth_l1_loss({x}, {y})", f"F.mse_loss({x}, {y}, reduction='sum')")[c % 3], x, y)


# Ops that compositions turn on come up more often.
COMMON = ("linear", "linear", "matmul", "combine", "combine", "weighted", "view", "reduce", "unary", "attention", "branches", "branches")


def grow(start: Shape, steps: Sequence[Step]) -> Program:
    g = Grower()
    g.input(start)
    for name, a, b, c in steps:
        before = dict(g.params), dict(g.inputs), dict(g.modules), dict(g.tensors), dict(g.values), list(g.lines), set(g.used)
        try:
            OPS[name](g, a, b, c)
        except Impossible:
            g.params, g.inputs, g.modules, g.tensors, g.values, g.lines, g.used = before
    return g.finish()


numbers = st.integers(0, 255)
steps = st.tuples(st.sampled_from([*OPS, *COMMON]), st.integers(0, 7), numbers, numbers)
starts = st.lists(st.sampled_from(SIZES[:-1]), min_size=1, max_size=4).map(tuple)


@st.composite
def programs(draw: st.DrawFn, max_steps: int = 7) -> Program:
    """A model of at least one parameter and one value."""
    return grow(draw(starts), draw(st.lists(steps, min_size=1, max_size=max_steps)))
