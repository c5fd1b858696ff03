"""Strength reduction: the same numbers in fewer instructions, without the ops that it replaces."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_kernel import arguments, kernels
from torch import Tensor

from kernels_triton.gate.corpus import CORPUS, Draft
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel, Ref
from kernels_triton.transform.strength_reduce import strength_reduce

F32, BF16 = torch.float32, torch.bfloat16


def ops(kernel: Kernel) -> list[str]:
    return [step.op for step in kernel.steps]


def in_double(kernel: Kernel, inputs: list[Tensor]) -> list[Tensor]:
    return reference.run(kernel, [x.double() if x.is_floating_point() else x for x in inputs])


@settings(max_examples=max(60, 2 * settings().max_examples), deadline=None, suppress_health_check=list(HealthCheck))
@given(kernel=kernels())
def test_any_kernel_computes_the_same(kernel: Kernel) -> None:
    found, inputs = strength_reduce(kernel), arguments(kernel, 3)
    assert len(found.steps) <= len(kernel.steps)
    # Of integers alone nothing is lifted to float64.
    limit = 1e-9 if any(x.is_floating_point() for x in inputs) else 1e-5
    for mine, before in zip(in_double(found, inputs), in_double(kernel, inputs), strict=True):
        torch.testing.assert_close(mine, before, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_computes_the_same(name: str) -> None:
    kernel = CORPUS[name](24, 64, BF16)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.rand(one.shape, generator=generator, dtype=torch.float64) + 0.1
        if one.dtype.is_floating_point
        else torch.ones(one.shape, dtype=one.dtype)
        for one in kernel.inputs
    ]
    for mine, before in zip(in_double(strength_reduce(kernel), inputs), in_double(kernel, inputs), strict=True):
        torch.testing.assert_close(mine, before, rtol=1e-9, atol=1e-9)


def test_a_gelu_is_a_product_with_a_sigmoid() -> None:
    forward, backward = (strength_reduce(CORPUS[name](8, 64, BF16)) for name in ("bias_gelu", "bias_gelu_backward"))
    assert ops(forward) == ["add", "square", "mul", "fma", "mul", "sigmoid", "mul"]
    assert "tanh" not in ops(backward)
    assert ops(backward).count("sigmoid") == 1


def test_a_gelu_keeps_its_left_tail() -> None:
    """`1 + tanh(u)` in float32 has lost everything at -6; `2 * sigmoid(2u)` has not."""
    k = Draft((64,))
    x = k.full(F32)
    k.out(k("add", k("tanh", x), 1.0), F32)
    kernel = k.kernel("fused_tail")
    x = torch.linspace(-12, 4, 64)
    exact = 2 / (1 + torch.exp(-2 * x.double()))
    (mine,) = reference.run(strength_reduce(kernel), [x])
    torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=0)


def _with(*users: str) -> Kernel:
    k = Draft((8, 16))
    x = k.full(BF16)
    t = k("tanh", x)
    for user in users:
        k.out(k("add", t, 1.0) if user == "add" else k("sub", 1.0, k("mul", t, t)) if user == "sub" else t, BF16)
    return k.kernel("fused_tanh")


def test_a_tanh_that_is_needed_itself_stays() -> None:
    assert "tanh" not in ops(strength_reduce(_with("add", "sub")))
    assert "tanh" in ops(strength_reduce(_with("add", "stored")))
    k = Draft((8, 16))
    x = k.full(BF16)
    t = k("tanh", x)
    k.out(k("add", t, 2.0), BF16)
    assert ops(strength_reduce(k.kernel("fused_two"))) == ["tanh", "add"]


@pytest.mark.parametrize(("dtype", "op"), [(BF16, "normal"), (F32, "erf")])
def test_an_erf_is_approximated_where_16_bits_are_enough(dtype: torch.dtype, op: str) -> None:
    k = Draft((8, 16))
    x = k.full(dtype)
    k.out(k("mul", k("mul", x, 0.5), k("add", 1.0, k("erf", k("mul", x, math.sqrt(0.5))))), dtype)
    found = strength_reduce(k.kernel("fused_gelu"))
    assert op in ops(found)
    assert len({"normal", "erf"} & set(ops(found))) == 1


@pytest.mark.parametrize(
    ("space", "dtype", "op"), [((64,), F32, "erf"), ((64,), BF16, "normal"), ((8, 16), F32, "erf")]
)
def test_an_erf_has_all_its_bits_where_a_flat_or_a_smaller_value_has(
    space: tuple[int, ...], dtype: torch.dtype, op: str
) -> None:
    """Of two dims it is one of a column, in float32 beside a whole tensor in 16 bits."""
    k = Draft(space)
    whole = k.full(BF16 if len(space) > 1 else dtype)
    x = k.col(dtype) if len(space) > 1 else whole
    k.out(k("mul", k("mul", x, 0.5), k("add", 1.0, k("erf", k("mul", x, math.sqrt(0.5))))), dtype, space[-1:])
    k.out(k("neg", whole), BF16 if len(space) > 1 else dtype)
    assert {"normal", "erf"} & set(ops(strength_reduce(k.kernel("fused_gelu")))) == {op}


def test_products_of_powers_of_two_meet_and_others_are_rounded_as_they_were() -> None:
    k = Draft((8, 16))
    x, y = k.full(F32), k.full(F32)
    k.out(k("mul", k("mul", x, 0.5), k("mul", y, 2.0)), F32)
    k.out(k("mul", k("mul", x, 0.3), 0.7), F32)
    kernel = k.kernel("fused_products")
    found, inputs = strength_reduce(kernel), [torch.randn(8, 16), torch.randn(8, 16)]
    assert ops(found) == ["mul", "mul", "mul"]
    for mine, before in zip(reference.run(found, inputs), reference.run(kernel, inputs), strict=True):
        assert torch.equal(mine, before)


def two_from(t: Ref, k: Draft) -> Ref:
    return k("sub", 2.0, k("square", t))


def squared_less_one(t: Ref, k: Draft) -> Ref:
    return k("sub", k("square", t), 1.0)


def one_less(t: Ref, k: Draft) -> Ref:
    return k("sub", 1.0, t)


@pytest.mark.parametrize("of", [two_from, squared_less_one, one_less])
def test_what_only_looks_like_a_tanhs_slope_is_computed_as_it_is(of: Callable[[Ref, Draft], Ref]) -> None:
    k = Draft((8, 16))
    x = k.full(F32)
    t = k("tanh", x)
    k.out(k("add", of(t, k), k("sub", 1.0, k("mul", t, t))), F32)
    kernel, inputs = k.kernel("fused_tanh"), [torch.randn(8, 16)]
    for mine, before in zip(in_double(strength_reduce(kernel), inputs), in_double(kernel, inputs), strict=True):
        torch.testing.assert_close(mine, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by", [0.5, 1.0, -math.sqrt(0.5)])
def test_another_erf_is_no_normal_distribution(by: float) -> None:
    """Of 16 bits as well: it is that of x / sqrt 2 alone."""
    k = Draft((8, 16))
    x = k.full(BF16)
    k.out(k("add", k("erf", k("mul", x, by)), 1.0), BF16)
    kernel, inputs = k.kernel("fused_erf"), [torch.randn(8, 16).to(BF16)]
    for mine, before in zip(in_double(strength_reduce(kernel), inputs), in_double(kernel, inputs), strict=True):
        torch.testing.assert_close(mine, before, rtol=1e-12, atol=1e-12)


def test_halves_of_integers_are_multiplied_as_floats() -> None:
    """Their product may be more than an int64 holds."""
    k = Draft((8, 16))
    i, j = k.full(torch.int64), k.full(torch.int64)
    k.out(k("mul", k("mul", i, 0.5), k("mul", j, 0.5)), F32)
    kernel, inputs = k.kernel("fused_halves"), [torch.full((8, 16), 2**40 + at) for at in range(2)]
    for mine, before in zip(reference.run(strength_reduce(kernel), inputs), reference.run(kernel, inputs), strict=True):
        assert torch.equal(mine, before)


def test_factors_that_together_overflow_are_multiplied_one_by_one() -> None:
    k = Draft((8, 16))
    k.out(k("mul", k("mul", k.full(F32), 3e38), 16.0), F32)
    kernel, inputs = k.kernel("fused_large"), [torch.full((8, 16), 1e-30)]
    for mine, before in zip(reference.run(strength_reduce(kernel), inputs), reference.run(kernel, inputs), strict=True):
        torch.testing.assert_close(mine, before, rtol=1e-6, atol=0)
