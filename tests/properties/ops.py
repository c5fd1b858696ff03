"""The table that random models are grown from: an op takes its choices from three numbers, modulo what shapes allow.

`a` mostly picks the operand, `b` a dim or a size, `c` one of several forms. A choice that cannot be is `Impossible`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.properties.grower import Grower, Impossible, Shape

SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 1)
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
        "1.0 - {x}", "{x} / 3.0", "F.softplus({x})", "torch.erf({x})", "{x}.detach() * {x}", "F.logsigmoid({x})",
        "torch.mvlgamma({x}.abs() + 2.0, 2)",
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
def prelu(g: Grower, a: int, b: int, c: int) -> None:
    """With one weight, or one a channel."""
    x = g.pick(a)
    shape = g.shape(x)
    g.value(f"F.prelu({x}, {g.param(shape[1] if len(shape) > 1 and b % 2 else 1)})", x)


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
    forms = ("{x}.cumsum({d})", "{x}.flip({d})", "{x}.roll(1, {d})", "{x}.sort({d})[0]", "{x}.topk(1, {d})[0]",
             "{x}.tanh().cumprod({d})", "{x}.cummax({d})[0]", "{x}.cummin({d})[0]", "{x}.logcumsumexp({d})",
             "{x}.max({d}, keepdim=True)[0]", "{x}.flip({d}).cumsum({d}).flip({d})")  # fmt: skip
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
    taken = (f"{c % n}", f"{c % n}:", f":{max(1, n - 1 - c % n)}", "::2")
    forms = [f"{x}[{index}{part}]" for part in taken]
    if half:
        parts = ", ".join(f"{x}.chunk({half[0]}, {d})[{i}]" for i in reversed(range(half[0])))
        forms += [f"torch.cat([{parts}], {d})", f"{x}.chunk({half[-1]}, {d})[{c % half[-1]}]"]
        forms += [f"{x}.chunk({half[0]}, {d})[0] * F.silu({x}.chunk({half[0]}, {d})[1])"] * 2
        forms += [f"F.glu({x}, {d})"] * (half[0] == 2)
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
        return len(other) == len(shape) and (*other[:d], *other[d + 1 :]) == (*shape[:d], *shape[d + 1 :])

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
def scatter(g: Grower, a: int, b: int, c: int) -> None:
    """Rows added to others, by an input that says to which."""
    x = g.pick(a)
    shape = g.shape(x)
    d = _dim(shape, b)
    count = SIZES[c % len(SIZES)]
    zeros = f"torch.zeros({[*shape[:d], count, *shape[d + 1 :]]})"
    forms = (
        f"{zeros}.index_add({d}, {g.input((shape[d],), count)}, {x})",
        f"{zeros}.scatter_add({d}, {g.input(shape, count)}, {x})",
    )
    g.value(forms[c % 2], x)


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
            f"{qkv}.split({heads * size}, 2)[{i}].reshape({batch}, {seq}, {heads}, {size}).transpose(1, 2)"
            for i in range(3)
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
    steps = f"torch.arange({seq})"
    masks = [f"torch.ones({seq}, {seq}).tril() == 0", f"{steps}[:, None] < {steps}[None, :]"]
    if c % 3 == 2:  # given with the batch, and never of a whole row
        masks = [f"({g.input((seq,), 2)} > 0) & ({steps}[:, None] != {steps}[None, :])"]
    mask = masks[c % len(masks)]
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
    weight = g.param(out, shape[1] // groups, *[k] * d)
    forms = [
        f"F.conv{d}d({x}, {weight}, {bias}, padding={k // 2}, groups={groups})",
        f"F.conv{d}d({x}, {weight}, {bias}, stride=2, padding={k // 2}, groups={groups})",
    ]
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
    forms = ("F.mse_loss({x}, {y})", "F.smooth_l1_loss({x}, {y})", "F.mse_loss({x}, {y}, reduction='sum')")
    g.value(forms[c % 3].format(x=x, y=y), x, y)
