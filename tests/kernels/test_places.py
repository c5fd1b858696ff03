"""Where elements are: parts, other orders of memory, places that are counted, sums that leave some dims.

Each function is fused, its kernels run in the reference, and its results are eager torch's. Of what is read in parts an
offset counts, of what lies in another order the strides, of a sum over some dims which of them a kernel has as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.passes.fusion.analysis import iteration_space
from tests.kernels.traced import fused_results

aten = torch.ops.aten
Function = Callable[..., Any]
F16, BF16, F32, I32, I64, U8 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8


def counted(like: Tensor, *span: int, dtype: torch.dtype = I64) -> Tensor:
    return torch.arange(*span, dtype=dtype, device=like.device)


def two_lengths(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2).view(4, 6).sum(1), (x * 2).view(2, 12).sum(1)


def a_smaller_sum_beside(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What is summed has a few of the dims; along the others it is the same, and is not there so many times."""
    v = w * 2
    return x * v, v.sum((0, 2))


def sums_of_both_kinds(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y.sum((1, 3)), y.sum((0, 2)), y.sum((0, 3))


def sums_and_rows(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(0) + x.sum(1)[:1], (x - x.sum(1, True)).sum(0), (x.sum(1) * 2).sum(), x.sum(0).sum()


def where_it_is_largest(x: Tensor) -> tuple[Tensor, ...]:
    return torch.argmax(x, 0), torch.argmax(x.T, 1), torch.argmax(x.T), torch.argmin(x, 1), torch.argmax(x * 2 + 1, 1)


def one_in_two_orders(x: Tensor) -> Tensor:
    y = x * 2 + 1
    return (y + y.T) * 3


def a_value_and_its_end(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y[2:] + 1, y[:, 3:] * y[:, :3]


def normed(x: Tensor, w: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
    return aten.native_layer_norm(x, [6], w, b, 1e-5)


def norms_gradients(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    _, mean, rstd = normed(x, w, b)
    return aten.native_layer_norm_backward(g, x, [6], mean, rstd, w, b, [True, True, True])


A, B, SQUARE, CUBE = (4, 6), (4, 6), (5, 5), (2, 3, 4)
IMAGE = (2, 3, 4, 5)
CASES: dict[str, tuple[Function, Sequence[tuple[int, ...]]]] = {
    # Parts of what is read.
    "halves of a part": (lambda x: torch.cat([x[1:3], x[0:2]], 1) * 2, [A]),
    "gated parts": (lambda x: torch.nn.functional.glu(x[1:], 1) * 2, [A]),
    "gated columns": (lambda x: torch.nn.functional.glu(x.T[2:], 0) * 2, [A]),
    "the gradient of gated columns": (lambda g, x: aten.glu_backward(g, x.T[2:], 0) * 2, [(2, 4), A]),
    "a part, repeated": (lambda x: x[1:].repeat(2, 3) * 2, [A]),
    "columns, repeated": (lambda x: x.T[1:].repeat(2, 1, 3) * 2, [A]),
    "rows of a part": (lambda x: torch.sum(x[1:, 2:], 1) * 2, [A]),
    "columns of a part": (lambda x: torch.sum(x[1:, 2:], 0) * 2, [A]),
    "the largest of a part": (lambda x: torch.max(x[1:, 2:], 1), [A]),
    "softmax of a part, along an inner dim": (lambda x: torch.softmax(x[1:], 1) * 2, [(3, 4, 5)]),
    "a value and its end": (a_value_and_its_end, [A]),
    # Other orders of memory.
    "columns side by side": (lambda x: torch.cat([x.T, x.T * 2], 1) * 2, [A]),
    "three side by side": (lambda x, y: torch.cat([x + 1, y, x * 2], 1), [A, B]),
    "three on top of another": (lambda x, y: torch.cat([x + 1, y, x * 2], 0), [A, B]),
    "one in two orders": (one_in_two_orders, [SQUARE]),
    "softmax of columns": (lambda x: (torch.softmax(x.T, 0) * 2, torch.softmax(x.T, 1) * 2), [A]),
    "a norm of columns": (lambda x: torch.native_layer_norm(x.T, [4], None, None, 1e-5)[0] * 2, [A]),
    "where it is largest": (where_it_is_largest, [A]),
    # Sums over some dims, kept in another order than they lie.
    "first of a permuted": (lambda x: torch.sum(x.permute(2, 0, 1) * 2, 0), [CUBE]),
    "last of a permuted": (lambda x: torch.sum(x.permute(1, 0, 2), 2) * 3, [CUBE]),
    "columns of a permuted": (lambda x: torch.sum(x.permute(0, 2, 1), 0) * 3, [CUBE]),
    "largest of a permuted": (lambda x: torch.amax(x.permute(2, 1, 0), 1) * 3, [CUBE]),
    "least of a permuted": (lambda x: torch.amin(x.permute(2, 1, 0), 0) * 3, [CUBE]),
    "every other dim of a permuted": (lambda x: torch.sum(x.permute(3, 0, 2, 1), (0, 2)) * 3, [IMAGE]),
    "of a repeated row": (lambda w: torch.sum(w.expand(4, 6), 0) * 2, [(6,)]),
    "of a repeated column": (lambda w: torch.sum(w[:, None].expand(6, 4), 1) * 2, [(6,)]),
    "of no dims": (lambda x: torch.sum(x * 2, []) * 1.5, [A]),
    "of one that is 1": (lambda x: torch.sum(x, (1,)) * 1.5 + 1, [(4, 1, 6)]),
    # Which of them one kernel may have.
    "rows of two lengths": (two_lengths, [(24,)]),
    "a smaller sum beside": (a_smaller_sum_beside, [IMAGE, IMAGE[1:]]),
    "sums that leave other dims": (sums_of_both_kinds, [IMAGE]),
    "sums over rows, and of rows": (sums_and_rows, [SQUARE]),
    "a number of all, for all": (lambda x: x * x.sum(), [SQUARE]),
    # Places that are counted.
    "down by twos": (lambda x: x + counted(x, 12, 0, -2), [A]),
    "from 3": (lambda x: x * counted(x, 3, 9, dtype=I32), [A]),
    "numbers that wrap": (lambda x: x + counted(x, 250, 262, 2).to(U8), [A]),
    "a fraction a step": (lambda x: (x + torch.arange(0.5, 3.5, 0.5, device=x.device)) * 2, [A]),
    "above, in one row": (lambda x: torch.triu(x * 2, 2), [(3, 1, 6)]),
    "below, in one column": (lambda x: torch.tril(x * 2, -1), [(3, 4, 1)]),
    "above, of several": (lambda x: torch.triu(x * 2, -1), [(3, 2, 4, 5)]),
    "the gradient of a part": (lambda g: aten.slice_backward(g, [4, 12], 1, 6, 12, 1) * 2, [A]),
    "of a part from the end": (lambda g: aten.slice_backward(g, [4, 18], 1, -12, -6, 1) * 2, [A]),
    "multiples of what has no exact reciprocal": (lambda x: torch.remainder(x * 0 + 82, 41.0) + x, [A]),
    # Norms, and who has no weight.
    "a norm": (lambda x, w, b: normed(x * 2, w, b), [A, (6,), (6,)]),
    "a norm without a bias": (lambda x, w: normed(x * 2, w, None), [A, (6,)]),
    "a norm without a weight": (lambda x, b: normed(x * 2, None, b), [A, (6,)]),
    "a norm's gradients": (norms_gradients, [A, B, (6,), (6,)]),
}  # fmt: skip


@pytest.mark.parametrize("widest", [iteration_space.MAX_SPLIT_COLUMNS, 4])
@pytest.mark.parametrize("name", CASES)
def test_as_eager_torch(name: str, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So small sums are cut into rows only where rows are."""
    monkeypatch.setattr(iteration_space, "MAX_SPLIT_COLUMNS", widest)
    function, shapes = CASES[name]
    drawn = torch.Generator().manual_seed(0)
    compare(function, [torch.randn(shape, generator=drawn) for shape in shapes])


def compare(function: Function, given: Sequence[Tensor], kernel: bool | None = True) -> None:
    """`kernel`: must there be one of the generator's, may there be none, or does it not matter?"""
    found, kernels = fused_results(function, given)
    expected = function(*given)
    assert kernel is None or bool(kernels) == kernel
    for mine, theirs in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_a_sum_of_all_is_cut_where_a_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 divides 24 elements, and no row of 6."""
    monkeypatch.setattr(iteration_space, "MAX_SPLIT_COLUMNS", 4)
    x, w = torch.randn(4, 6), torch.randn(6)
    compare(lambda x, w: ((x * w).sum() * 2, x * w), [x, w])


@pytest.mark.parametrize(
    ("before", "after"), [(F32, F16), (F32, BF16), (BF16, F16), (F16, BF16), (F16, F32), (BF16, F32)]
)
def test_a_conversion_to_16_bits_rounds_and_overflows(before: torch.dtype, after: torch.dtype) -> None:
    """A kernel's floats are float32 between calls, but this call asks for others."""
    x = torch.linspace(-1.3, 60000.0, 24).to(before)
    given = x * 3 if before != F16 else x  # past float16
    compare(lambda x: (x * 1.0).to(after).float() - x.float(), [given])


@pytest.mark.parametrize("strides", [(6, 1), (12, 1), (1, 4), (0, 2)])
def test_a_shards_random_numbers_are_those_of_its_places(strides: tuple[int, int]) -> None:
    """In a mask that is drawn for a part, a transposed tensor, or alike for all rows."""

    def dropped(x: Tensor, seed: Tensor, first: Tensor) -> Tensor:
        return x * (RANDOM_UNIFORM(seed, 3, [4, 6], list(strides), first) >= 0.4) * 2

    compare(dropped, [torch.randn(4, 6), torch.tensor(11), torch.tensor(5)], kernel=None)  # a template's, mostly


Stays = tuple[Function, Callable[[Tensor], Tensor]]
STAYS: dict[str, Stays] = {
    "the second derivative of digamma": (lambda x: torch.polygamma(2, x), lambda x: x.abs() + 1),
    "a logarithm of 0": (lambda x: torch.xlogy(x, 0.0), lambda x: x.relu()),
    "0 times logarithms": (lambda x: torch.xlogy(0.0, x), lambda x: x.relu()),
    "a logarithm of 1 - 1": (lambda x: torch.special.xlog1py(x, -1.0), lambda x: x.relu()),
    "0 times logarithms of 1 + x": (lambda x: torch.special.xlog1py(0.0, x), lambda x: x.relu() - 1),
    "decimals of 16 bits": (lambda x: torch.round(x, decimals=2), lambda x: (x * 30).half()),
    "shifts of all bits": (lambda x: x << 31, lambda x: (x * 30).to(I32)),
    "shifts of more bits": (lambda x: x >> 33, lambda x: (x * 30).to(I32)),
    "numbers of floats": (lambda x: x.to(I64), lambda x: x * 30),
    "a part that begins anywhere": (lambda x: aten.slice_backward(x, [4, 12], 1, 3, 9, 1), lambda x: x),
    "every other one": (lambda x: aten.slice_backward(x, [4, 12], 1, 0, 12, 2), lambda x: x),
    "parts of other sizes": (lambda x: torch.cat([x, x[:2]], 0), lambda x: x),
    "rows that go on with ones": (lambda x: aten.constant_pad_nd(x, [0, 7], 1.0), lambda x: x.repeat(1, 3)[:, :9]),
    "rows that begin with zeros": (lambda x: aten.constant_pad_nd(x, [7, 0], 0.0), lambda x: x.repeat(1, 3)[:, :9]),
    "rows of zeros behind": (lambda x: aten.constant_pad_nd(x, [0, 7, 0, 1], 0.0), lambda x: x.repeat(1, 3)[:, :9]),
    "rows that go on too far": (lambda x: aten.constant_pad_nd(x, [0, 15], 0.0), lambda x: x.repeat(1, 3)[:, :9]),
    "sums of float64": (lambda x: x.sum(1), lambda x: x.double()),
    "softmax of float64": (lambda x: torch.softmax(x, 1), lambda x: x.double()),
    "float64 through float32's functions": (lambda x: torch.tanh(x), lambda x: x.double()),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_kernels_do_not_compute_stays_a_call(name: str) -> None:
    function, prepared = STAYS[name]
    x = prepared(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    compare(function, [x], kernel=False)


@pytest.mark.parametrize("reduced", [torch.amax, torch.amin, torch.sum, torch.prod])
def test_integers_are_reduced_to_the_last_bit(reduced: Function) -> None:
    """Whoever reduces them: no float64 has these, no float32 their neighbours."""
    drawn = torch.randint(-9, 9, (4, 6), generator=torch.Generator().manual_seed(0))
    for x in (drawn + 2**53, drawn * 2**25 + 1):
        compare(lambda x: reduced(x, 1) + 1, [x], kernel=None)


def test_float64_is_not_computed_by_what_is_exact_to_float32() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    compare(lambda x: (torch.tanh(x * 2) + 1, (x * 2).sum(1) + 1, torch.softmax(x * 2, 1) + 1), [x])
