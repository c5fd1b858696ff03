"""What graphs launch of the templates' kernels beyond plain calls: with more operands, fewer results, other dtypes.

A kernel is compiled for each combination of operands that are there or not, so each combination is another kernel, and
another chance for the compiler to spill. Here are all that `run.py` can ask for: of a norm, a bias and a residual
before it and the sum as a result or not, the sum of squares in the statistics' place, a second gradient, sums over rows
each wanted or not; of a loss, a bias, and one over its scale; of a softmax, torch's masks. `shown` are those of the
example programs and those that have everything at once: what CI compiles.

Parameters are float32 masters, as a plan's `precision` has them, or of the dtype that is computed in, as of a model
that is 16-bit throughout. `dtypes` lists both: every combination in bfloat16, and of float16, whose kernels differ from
those by one conversion, what is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations

import torch
from torch import Tensor

from kernels_triton.ops import activation, dropout, norm
from kernels_triton.ops.cross_entropy import cross_entropy_into
from kernels_triton.ops.softmax import softmax_into

ROWS = 8192
HEADS = (8, 32, 32)  # of which a softmax's rows are
EPS = 1e-5


@dataclass(frozen=True)
class Variant:
    """`launch(cols, dtype, parameters)`, two dtypes, runs it on `meta` tensors. `shown`: CI compiles it. `widths`:
    columns that it is for. `parametric`: it reads or writes something of the parameters' dtype."""

    template: str
    told: str
    launch: Callable[[int, torch.dtype, torch.dtype], None]
    shown: bool = False
    widths: tuple[int, ...] = (1024,)
    parametric: bool = True
    odd: tuple[int, ...] = ()  # numbers of columns that are moved one by one

    def dtypes(self) -> Iterator[tuple[torch.dtype, torch.dtype]]:
        """What it computes in, and what its parameters are; CI compiles the first."""
        half, float16 = torch.bfloat16, torch.float16
        yield half, FLOAT
        if self.shown:
            yield from ((FLOAT, FLOAT), (float16, FLOAT))
        if self.parametric:
            yield from ((one, one) for one in (half, float16)[: 2 if self.shown else 1])


def variants() -> Iterator[Variant]:
    yield from _norms()
    yield from _norm_gradients()
    yield from _losses()
    yield from _softmaxes()
    yield from _others()


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)))


FLOAT = torch.float32
HELD = (1024, 4096, 8192)  # with more operands rows are no longer than this: `match.WIDEST`
ODD = (5001, 8191)
VOCABULARIES = (50304, 32000, 128256)
UNEVEN = (50257, 128255)

OWN = ("before", "weight", "bias", "dweight", "dbias", "dbefore")  # of a parameter, or its gradient

# Programs' norms: GPT-2's, BERT's and ViT's; Llama's and T5's.
LAYER_NORMS = ({"before", "weight", "bias", "sum"},)
RMS_NORMS = ({"weight", "squares"}, {"weight", "squares", "sum"})
LAYER_NORM_GRADS = (
    {"weight", "dweight", "dbias", "dbefore"},
    {"weight", "dweight", "dbias", "dbefore", "residual"},
    {"weight", "dweight", "dbias", "residual"},
    {"weight", "dweight", "dbias", "dbefore", "more"},
)
RMS_NORM_GRADS = (
    {"weight", "dweight", "squares"},
    {"weight", "dweight", "squares", "residual"},
    {"weight", "dweight", "squares", "residual", "more"},
)


def _norms() -> Iterator[Variant]:
    for op in ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"):
        layer = "layer" in op
        names = ("before", "weight", "sum", *(("bias",) if layer else ("squares",)))
        for has in _subsets(names):
            if "sum" in has and "add" not in op and "before" not in has:
                continue  # the sum is x
            most = len(has) == len(names)
            shown = most or has in (LAYER_NORMS if layer else RMS_NORMS)
            owned = not has.isdisjoint(OWN)
            yield Variant(op, _told(has), partial(_norm, op, has), shown, HELD if most else (1024,), owned, ODD * shown)


def _norm(op: str, has: frozenset[str], cols: int, dtype: torch.dtype, own: torch.dtype) -> None:
    """Moments and sums of squares in float32; an `rstd` alone, in what the graph computes in."""

    def given(name: str, there: torch.dtype, *shape: int) -> Tensor | None:
        return _empty(there, *shape) if name in has else None

    full = (ROWS, cols)
    squares, mean = "squares" in has, _empty(FLOAT, ROWS) if "layer" in op else None
    rstd = _empty(dtype if mean is None and not squares else FLOAT, ROWS)
    norm.forward_into(
        *(op, _empty(dtype, *full), _empty(dtype, *full) if "add" in op else None),
        *(given("weight", own, cols), given("bias", own, cols), EPS, _empty(dtype, *full)),
        *(given("sum", dtype, *full), mean, rstd),
        *(given("before", own, cols), squares),
    )


def _norm_gradients() -> Iterator[Variant]:
    for op, own, programs in (
        ("layer_norm_backward", "dbias", LAYER_NORM_GRADS),
        ("rms_norm_backward", "squares", RMS_NORM_GRADS),
    ):
        names = ("weight", "dweight", "residual", "more", "dbefore", own)
        for has in _subsets(names):
            most = len(has) == len(names)
            shown, owned = most or has in programs, not has.isdisjoint(OWN)
            yield Variant(
                op,
                _told(has),
                partial(_norm_backward, op, has),
                shown,
                HELD if most else (1024,),
                owned,
                ODD * shown,
            )


def _norm_backward(op: str, has: frozenset[str], cols: int, dtype: torch.dtype, own: torch.dtype) -> None:
    def given(name: str, there: torch.dtype, *shape: int) -> Tensor | None:
        return _empty(there, *shape) if name in has else None

    full = (ROWS, cols)
    squares, mean = "squares" in has, _empty(FLOAT, ROWS) if "layer" in op else None
    rstd = _empty(dtype if mean is None and not squares else FLOAT, ROWS)
    norm.backward_into(
        *(op, _empty(dtype, *full), _empty(dtype, *full), given("weight", own, cols), mean),
        *(rstd, given("residual", dtype, *full), _empty(dtype, *full)),
        *(given("dweight", own, cols), given("dbias", own, cols), given("dbefore", own, cols)),
        *(given("more", dtype, *full), EPS if squares else None),
    )


def _losses() -> Iterator[Variant]:
    for has in _subsets(("bias", "inverse", "padded")):
        widths = UNEVEN if "padded" in has else VOCABULARIES
        odd = () if "padded" in has else (32001, 128257)
        yield Variant("cross_entropy", _told(has | {"parts"}), partial(_loss, has), True, widths, odd=odd)


def _loss(has: frozenset[str], cols: int, dtype: torch.dtype, own: torch.dtype) -> None:
    """`padded`: rows that `align` has made longer, of logits and of the gradient."""
    wide = -(-cols // 8) * 8 if "padded" in has else cols
    logits, grad = (_empty(dtype, ROWS, wide)[:, :cols] for _ in range(2))
    cross_entropy_into(
        *(logits, _empty(torch.int64, ROWS), _empty(own), -100, _empty(FLOAT, ROWS), _empty(FLOAT, ROWS), grad),
        parts=True,
        inverse="inverse" in has,
        bias=_empty(own, cols) if "bias" in has else None,
        padded="padded" in has,
    )


def _softmaxes() -> Iterator[Variant]:
    for kind in ("none", "added", "kept", "hidden"):
        launch = partial(_softmax, kind)
        yield Variant("softmax", f"torch's, mask: {kind}", launch, True, (1024, 64, 4096, 12288, 50304), False)


def _softmax(kind: str, cols: int, dtype: torch.dtype, own: torch.dtype) -> None:
    batch, heads, queries = HEADS
    x, y = (_empty(dtype, batch * heads * queries, cols) for _ in range(2))
    masks = {"none": None, "added": _empty(dtype, batch, 1, queries, cols).expand(batch, heads, queries, cols)}
    mask = masks.get(kind, _empty(torch.bool, batch, 1, 1, cols).expand(batch, heads, queries, cols))
    softmax_into(x, mask, y, 0.125, -math.inf, kind == "hidden")


def _others() -> Iterator[Variant]:
    for has in _subsets(("bias", "dbias")):
        for act in ("gelu_tanh", "gelu", "relu2"):
            op = "squared_relu_backward" if act == "relu2" else "bias_gelu_backward"
            told = f"{act}, {_told(has)}"
            launch, shown = partial(_activation_backward, op, act, has), act != "gelu_tanh" or len(has) == 2
            yield Variant(op, told, launch, shown, parametric=bool(has))
    for act in ("gelu_tanh", "gelu", "relu2"):
        op = "squared_relu" if act == "relu2" else "bias_gelu"
        yield Variant(op, f"{act}, bias", partial(_activation, op, act), True)
    for has in _subsets(("bias", "residual", "first")):
        told, launch = f"no mask, {_told(has)}", partial(_dropout, has)
        yield Variant("bias_dropout_residual", told, launch, len(has) in (0, 3), parametric="bias" in has)


def _activation(op: str, act: str, cols: int, dtype: torch.dtype, own: torch.dtype) -> None:
    activation.forward_into(op, _empty(dtype, ROWS, cols), _empty(own, cols), _empty(dtype, ROWS, cols), act)


def _activation_backward(
    op: str, act: str, has: frozenset[str], cols: int, dtype: torch.dtype, own: torch.dtype
) -> None:
    bias, dbias = (_empty(own, cols) if name in has else None for name in ("bias", "dbias"))
    dy, x, dx = (_empty(dtype, ROWS, cols) for _ in range(3))
    activation.backward_into(op, dy, x, bias, dx, dbias, act)


def _dropout(has: frozenset[str], cols: int, dtype: torch.dtype, own: torch.dtype) -> None:
    x, y = (_empty(dtype, ROWS, cols) for _ in range(2))
    bias = _empty(own, cols) if "bias" in has else None
    residual = _empty(dtype, ROWS, cols) if "residual" in has else None
    first = _empty(torch.int64) if "first" in has else None
    whole = (1, cols, 0, 1)  # rows lie one after the other
    dropout.forward_into(x, bias, residual, _empty(torch.int64), 7, first, whole, 0.1, 1 / 0.9, y, None)


def _told(has: frozenset[str]) -> str:
    return ", ".join(sorted(has)) or "nothing"
