"""The reference runs a kernel block by block on CPUs: the same bits as all at once, also over its own operands."""

import pytest
import torch
from torch import Tensor

from kernels_triton.gate.corpus import CORPUS, Draft
from kernels_triton.generated import inplace_call
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import text

BLOCKED = ("adamw", "bias_gelu", "transposed_add")
SIZES = [(6, 40), (9, 14), (3, 5)]


def inputs_of(kernel: Kernel) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.rand(i.shape).to(i.dtype) if i.dtype.is_floating_point else torch.randint(0, 2, i.shape).to(i.dtype)
        for i in kernel.inputs
    ]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CORPUS)
def test_blocks_are_the_whole_bit_by_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, cols in SIZES:
        kernel = CORPUS[name](rows, cols, dtype)
        inputs = inputs_of(kernel)
        monkeypatch.setattr(reference, "BLOCK", 2**40)
        whole = reference.run(kernel, inputs)
        for block in (1, 77, 128):
            monkeypatch.setattr(reference, "BLOCK", block)
            assert equal(reference.run(kernel, inputs), whole)


@pytest.mark.parametrize("block", [1, 77, 2**40])
@pytest.mark.parametrize("name", CORPUS)
def test_operands_are_overwritten_block_by_block(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, cols in SIZES:
        kernel = CORPUS[name](rows, cols, torch.float32)
        inputs = inputs_of(kernel)
        expected = reference.run(kernel, inputs)
        monkeypatch.setattr(reference, "BLOCK", block)
        copies = [x.clone() for x in inputs]
        over: dict[int, Tensor] = {}
        for result, operand in sorted(inplace_call.inplace_operand_pairs(inputs, text(kernel))):
            output, taken = (
                kernel.outputs[result],
                any(to.data_ptr() == copies[operand].data_ptr() for to in over.values()),
            )
            if result not in over and not taken and output.dtype == inputs[operand].dtype:
                over[result] = copies[operand].view(output.shape)
        found = inplace_call.run(copies, text(kernel), over)
        assert equal(found, expected)
        assert all(found[number].data_ptr() == to.data_ptr() for number, to in over.items())


def test_what_holds_no_sum_over_rows_is_blocked() -> None:
    """Else nothing above would test anything; and sums over rows, and random numbers, are computed whole."""
    cpu = torch.device("cpu")

    def block(name: str) -> tuple[int, int]:
        kernel = CORPUS[name](4096, 256, torch.float32)
        return reference._block(kernel, cpu), kernel.space[0]  # pyright: ignore[reportPrivateUsage]

    for name in BLOCKED:
        assert block(name)[0] < block(name)[1], name
    for name in ("square_sum", "dropout_add"):
        assert block(name)[0] == block(name)[1], name


@pytest.mark.parametrize("block", [16, 2**40])
def test_a_result_that_is_an_operand_as_it_was(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first result overwrites the operand that the second is a copy of."""
    monkeypatch.setattr(reference, "BLOCK", block)
    draft = Draft((100,))
    x = draft.full(torch.float32)
    draft.out(draft("mul", x, 2.0), torch.float32)
    draft.out(x, torch.float32)
    kernel, given = draft.kernel("copied"), torch.arange(100.0)
    doubled, copied = reference.run(kernel, [given], over={0: given})
    assert doubled.data_ptr() == given.data_ptr()
    assert torch.equal(copied, torch.arange(100.0))
    assert torch.equal(given, 2 * torch.arange(100.0))
