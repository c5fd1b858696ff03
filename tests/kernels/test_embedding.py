"""The gradient of an embedding under the interpreter: runs of one index of every length, and what is out of range."""

from __future__ import annotations

import pytest
import torch
from interpreter import Interpreter

from kernels_triton.base.diagnostic import ShardcError
from kernels_triton.library import reference
from kernels_triton.ops.embedding import LONG, embedding_backward


def runs(*lengths: int) -> torch.Tensor:
    """Index i so many times, in no order."""
    index = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    return index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]


CASES = {
    "short": runs(1, 0, 3, LONG, 2),
    "a long run from the start": runs(LONG + 1, 3),
    "one behind a chunk's start": runs(5, 2 * LONG + 1, 4, LONG + 7),
    "whole chunks": runs(LONG, 3 * LONG, LONG),
    "two that meet in a chunk": runs(LONG + 30, LONG + 50, 1),
    "one index": runs(4 * LONG - 1),
    "out of range": torch.cat((runs(3, LONG + 9), torch.full((LONG + 5,), -1), torch.full((LONG + 2,), 1 << 33))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padding", [-1, 1])
def test_runs(interpreted: Interpreter, case: str, padding: int) -> None:
    index = CASES[case]
    classes = int(index[index < 1 << 20].max()) + 2
    grad = torch.randn(len(index), 20, generator=torch.Generator().manual_seed(1))
    exact = reference.embedding_backward(grad.double(), index, classes, padding)
    found = interpreted("embedding_backward", grad, index, classes, padding)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)
    assert found.equal(interpreted("embedding_backward", grad, index, classes, padding))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_that_are_added(interpreted: Interpreter, case: str, dtype: torch.dtype) -> None:
    """To a sum in float32; what has no tokens is not touched, nor is the row of `padding`."""
    index, padding = CASES[case], 1
    classes = int(index[index < 1 << 20].max()) + 2
    grad = torch.randn(len(index), 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = torch.randn(classes, 20, generator=torch.Generator().manual_seed(2))
    exact = before.double() + reference.embedding_backward(grad.double(), index, classes, padding)
    total, after = interpreted("embedding_backward", grad, index, classes, padding, total=before, changed=True)
    assert total.dtype == torch.float32
    assert total.equal(after[-1])
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=2e-5)
    untouched = torch.ones(classes, dtype=torch.bool)
    untouched[index[(index >= 0) & (index < classes) & (index != padding)]] = False
    assert untouched[padding]
    assert total[untouched].equal(before[untouched])
    again = interpreted("embedding_backward", grad, index, classes, padding, total=before)
    assert total.equal(again)
    theirs = before.clone()
    assert reference.embedding_backward(grad, index, classes, padding, theirs) is theirs
    torch.testing.assert_close(theirs, total, rtol=0, atol=2e-5)


@pytest.mark.parametrize("wrong", ["shape", "dtype", "strides"])
def test_sums_that_are_refused(wrong: str) -> None:
    total = {
        "shape": torch.zeros(9, 21),
        "dtype": torch.zeros(9, 20, dtype=torch.float64),
        "strides": torch.zeros(20, 9).t(),
    }[wrong]
    index = CASES["short"]
    with pytest.raises(ShardcError, match="SC530"):
        embedding_backward(torch.randn(len(index), 20), index, 9, 1, total)


def test_the_reference_is_torchs() -> None:
    index, grad = CASES["short"], torch.randn(len(CASES["short"]), 20)
    theirs = torch.ops.aten.embedding_dense_backward(grad, index, 9, 1, False)
    torch.testing.assert_close(reference.embedding_backward(grad, index, 9, 1), theirs)
