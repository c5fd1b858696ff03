"""Every pointwise op in kernels against eager torch, with special values: the reference, and the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels_triton.ir import reference, text
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS
from tests.kernels import pointwise_cases as cases
from tests.kernels.interpreter import Interpreter
from tests.kernels.pointwise_cases import GIVEN, Case, aten, kernels_of, wrong
from tests.kernels.traced import kernel_of


def problems(cases: list[Case], given: dict[str, Tensor], interpreted: Interpreter | None) -> list[str]:
    found: list[str] = []
    for kernel, reads, which in kernels_of(cases, given):
        inputs = [given[name] for name in reads]
        ways = {"reference": reference.run(kernel, inputs)}
        if interpreted is not None:
            ways["interpreter"] = interpreted("fused", text.text(kernel), None, None, *inputs)
        for way, results in ways.items():
            lines = (wrong(cases[at], result, given) for at, result in zip(which, results, strict=True))
            found += [f"{way}: {line}" for line in lines if line]
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", GIVEN)
def test_as_eager_torch(kind: str, interpreted: Interpreter) -> None:
    given, some = GIVEN[kind]
    assert not problems(some, given(), interpreted)


def test_every_pointwise_lowering_has_a_case() -> None:
    tried = {op for _, some in GIVEN.values() for op, _, _ in some} | cases.ELSEWHERE
    left = [str(op) for op in LOWERINGS if torch.Tag.pointwise in op.tags and op not in tried]
    assert not left


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.round(a * b),
        lambda a, b: torch.frac(a * b),
        lambda a, b: torch.remainder(a * b, 2.0),
    ],
)
def test_16_bit_values_are_rounded_as_eager_torch_sees_them(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    a, b = (torch.linspace(0.1, 9.0, 400).to(torch.bfloat16) for _ in range(2))
    b = b.flip(0)
    kernel, reads = kernel_of(function, (a, b))
    assert torch.equal(reference.run(kernel, reads)[0], function(a, b))


def test_log_sigmoid_backward() -> None:
    some = cases.floats(torch.float32)
    g, x = some["m"], some["n"]
    _, buffer = aten.log_sigmoid_forward(x)
    kernel, reads = kernel_of(aten.log_sigmoid_backward.default, (g, x, buffer))
    assert len(reads) == 2, "what forward left is made again"
    torch.testing.assert_close(reference.run(kernel, reads)[0], aten.log_sigmoid_backward(g, x, buffer))


def test_quotients_of_16_bits_are_rounded_before_they_are_cut_off() -> None:
    """A value of the graph that no memory has: 0.1 * 30 is 3 in bfloat16, and a little more in float32."""
    a, b = torch.tensor([0.1, 7.0]).bfloat16(), torch.tensor([30.0, 3.0]).bfloat16()

    def rest(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        h = a * b
        return torch.fmod(h, 1.5), torch.fmod(h, 0.3), torch.remainder(h, 0.3), torch.floor_divide(h, 0.75)

    kernel, reads = kernel_of(rest, (a, b))
    for mine, theirs in zip(reference.run(kernel, reads), rest(a, b), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_quotients_of_two_tensors_of_16_bits_stay_calls(mode: str) -> None:
    """Eager torch rounds the quotient to 16 bits before it is cut off: 1571.2 is 1571 or 1572."""
    a, b = (torch.linspace(0.5, 2000.0, 64).half() for _ in range(2))
    with pytest.raises(ValueError, match="got 0"):  # kernels
        kernel_of(lambda a, b: torch.div(a, b, rounding_mode=mode), (a, b.flip(0)))


def test_thresholds_and_signs_of_zero_are_eager_torchs() -> None:
    """A threshold is taken to the dtype of 16 bits; what is left of -2 divided by 1 is -0."""
    x, h = torch.tensor([-2.0, -0.0, -4.0, 3.0, 2.5]), torch.tensor([0.3, -0.3, 0.2, 0.4]).half()

    def both(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return torch.nn.functional.hardshrink(h, 0.3), torch.where(h == torch.full((), 0.3), 1.0, 2.0)

    kernel, reads = kernel_of(both, (x, h))
    for mine, theirs in zip(reference.run(kernel, reads), both(x, h), strict=True):
        assert torch.equal(mine, theirs)
    kernel, reads = kernel_of(lambda x: torch.remainder(x, 1.0), (x,))
    (rest,) = reference.run(kernel, reads)
    assert torch.equal(1 / rest, 1 / torch.remainder(x, 1.0))


def test_prelu_backward(interpreted: Interpreter) -> None:
    x = cases.floats(torch.float32)
    given = (x["a"], x["b"], x["a"].flip(0))
    kernel, reads = kernel_of(aten._prelu_kernel_backward.default, given)
    want = aten._prelu_kernel_backward(*given)
    for found in (reference.run(kernel, reads), interpreted("fused", text.text(kernel), None, None, *reads)):
        for mine, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
