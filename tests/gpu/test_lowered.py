"""Every pointwise op in kernels on a GPU, special values included, against eager torch; reductions over any dims."""

import pytest
import torch

from kernels_triton.generated.launcher import launcher
from tests.kernels.pointwise_cases import GIVEN, kernels_of, wrong
from tests.kernels.test_reductions import CASES
from tests.kernels.traced import kernel_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", GIVEN)
def test_as_eager_torch(kind: str) -> None:
    make, cases = GIVEN[kind]
    given = make()
    problems: list[str] = []
    for kernel, reads, which in kernels_of(cases, given):
        results = launcher(kernel)([given[name].cuda() for name in reads])
        problems += [wrong(cases[at], found.cpu(), given) for at, found in zip(which, results, strict=True)]
    assert not list(filter(None, problems))


@pytest.mark.parametrize("name", CASES)
def test_reductions(name: str) -> None:
    function, inputs, _ = CASES[name]
    torch.manual_seed(0)
    given = [make() for make in inputs]
    kernel, reads = kernel_of(function, given)
    exact = function(*[x.double() for x in given])
    found = launcher(kernel)([x.cuda() for x in reads])
    for mine, theirs in zip(found, exact if isinstance(exact, tuple) else (exact,), strict=True):
        close = 1e-2 if mine.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(mine.cpu().double(), theirs.double(), rtol=close, atol=close, equal_nan=True)
