"""The launches of templates from graphs, beyond plain calls: more operands, fewer results, other dtypes.

A kernel is compiled for each combination of present and absent operands. Each combination is a kernel of its own, which
the compiler might spill. This file lists all combinations that `run.py` can launch. Norms: a bias and a residual before
the norm, the sum as an optional result, a second gradient, and each sum over rows wanted or not. Losses: a bias, and a
scale that is a divisor. CI compiles those that are `in_ci`: the combinations of the example programs, and those with
everything at once.

Parameters are float32 masters, as in a plan's `precision`, or have the compute dtype, as in a model that is 16-bit
throughout. `dtypes` lists both: every combination in bfloat16; in float16, whose kernels differ by one conversion, only
those in CI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations

import torch
from torch import Tensor

from kernels_triton.ops import norm
from kernels_triton.ops.cross_entropy import cross_entropy_into

ROWS = 8192
EPS = 1e-5


@dataclass(frozen=True)
class LaunchVariant:
    """`launch(cols, dtype, parameters)`, with two dtypes, runs the variant on `meta` tensors. `in_ci`: CI compiles it.
    `widths`: the numbers of columns to compile. `parametric`: it reads or writes a tensor of the parameters' dtype."""

    template: str
    description: str
    launch: Callable[[int, torch.dtype, torch.dtype], None]
    in_ci: bool = False
    widths: tuple[int, ...] = (1024,)
    parametric: bool = True
    odd_widths: tuple[int, ...] = ()  # numbers of columns that are moved element by element

    def dtypes(self) -> Iterator[tuple[torch.dtype, torch.dtype]]:
        """(compute dtype, parameter dtype); CI compiles the first."""
        half, float16 = torch.bfloat16, torch.float16
        yield half, FLOAT
        if self.in_ci:
            yield from ((FLOAT, FLOAT), (float16, FLOAT))
        if self.parametric:
            yield from ((dtype, dtype) for dtype in (half, float16)[: 2 if self.in_ci else 1])


def variants() -> Iterator[LaunchVariant]:
    yield from _norms()
    yield from _norm_gradients()
    yield from _losses()


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)))


FLOAT = torch.float32
HELD = (1024, 4096, 8192)  # rows with more operands are no longer than this: `match.WIDEST`
ODD = (5001, 8191)
VOCABULARIES = (50304, 32000, 128256)
UNEVEN = (50257, 128255)

PARAMETRIC = (
    "before",
    "weight",
    "bias",
    "dweight",
    "dbias",
    "dbefore",
)  # operands and results of the parameters' dtype

# The norms of GPT-2, BERT and ViT.
LAYER_NORMS: tuple[frozenset[str] | set[str], ...] = ({"before", "weight", "bias", "sum"},)
LAYER_NORM_GRADS: tuple[frozenset[str] | set[str], ...] = (
    {"weight", "dweight", "dbias", "dbefore"},
    {"weight", "dweight", "dbias", "dbefore", "residual"},
    {"weight", "dweight", "dbias", "residual"},
    {"weight", "dweight", "dbias", "dbefore", "more"},
)


def _norms() -> Iterator[LaunchVariant]:
    names = ("before", "weight", "sum", "bias")
    for op in ("layer_norm", "add_layer_norm"):
        for has in _subsets(names):
            if "sum" in has and "add" not in op and "before" not in has:
                continue  # the sum is x
            most = len(has) == len(names)
            shown, owned = most or has in LAYER_NORMS, not has.isdisjoint(PARAMETRIC)
            yield LaunchVariant(
                op, _describe(has), partial(_norm, op, has), shown, HELD if most else (1024,), owned, ODD * shown
            )


def _norm(op: str, has: frozenset[str], cols: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    def given(name: str, there: torch.dtype, *shape: int) -> Tensor | None:
        return _empty(there, *shape) if name in has else None

    full = (ROWS, cols)
    norm.forward_into(
        *(op, _empty(dtype, *full), _empty(dtype, *full) if "add" in op else None),
        *(given("weight", weights, cols), given("bias", weights, cols), EPS, _empty(dtype, *full)),
        *(given("sum", dtype, *full), _empty(FLOAT, ROWS), _empty(FLOAT, ROWS), given("before", weights, cols)),
    )


def _norm_gradients() -> Iterator[LaunchVariant]:
    names = ("weight", "dweight", "residual", "more", "dbefore", "dbias")
    for has in _subsets(names):
        most = len(has) == len(names)
        shown, owned = most or has in LAYER_NORM_GRADS, not has.isdisjoint(PARAMETRIC)
        launch, widths = partial(_norm_backward, has), HELD if most else (1024,)
        yield LaunchVariant("layer_norm_backward", _describe(has), launch, shown, widths, owned, ODD * shown)


def _norm_backward(has: frozenset[str], cols: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    def given(name: str, there: torch.dtype, *shape: int) -> Tensor | None:
        return _empty(there, *shape) if name in has else None

    full = (ROWS, cols)
    norm.backward_into(
        *("layer_norm_backward", _empty(dtype, *full), _empty(dtype, *full), given("weight", weights, cols)),
        *(_empty(FLOAT, ROWS), _empty(FLOAT, ROWS), given("residual", dtype, *full), _empty(dtype, *full)),
        *(given("dweight", weights, cols), given("dbias", weights, cols), given("dbefore", weights, cols)),
        given("more", dtype, *full),
    )


def _losses() -> Iterator[LaunchVariant]:
    for has in _subsets(("bias", "inverse", "padded")):
        widths = UNEVEN if "padded" in has else VOCABULARIES
        odd = () if "padded" in has else (32001, 128257)
        yield LaunchVariant(
            "cross_entropy", _describe(has | {"parts"}), partial(_loss, has), True, widths, odd_widths=odd
        )


def _loss(has: frozenset[str], cols: int, dtype: torch.dtype, weights: torch.dtype) -> None:
    """`padded`: the rows of the logits and of the gradient have padding from `align`."""
    wide = -(-cols // 8) * 8 if "padded" in has else cols
    logits, grad = (_empty(dtype, ROWS, wide)[:, :cols] for _ in range(2))
    cross_entropy_into(
        *(logits, _empty(torch.int64, ROWS), _empty(weights), -100, _empty(FLOAT, ROWS), _empty(FLOAT, ROWS), grad),
        parts=True,
        inverse="inverse" in has,
        bias=_empty(weights, cols) if "bias" in has else None,
        padded="padded" in has,
    )


def _describe(has: frozenset[str]) -> str:
    return ", ".join(sorted(has)) or "nothing"
