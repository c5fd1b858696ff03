"""The squares of a global norm on a GPU: exact in float64, of few kernels, and without a copy of what they read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardc.ir.ops.squares import SUM_OF_SQUARES, TOTAL_OF_SQUARES

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = [(), (1,), (7, 3), (1 << 16,), ((1 << 20) + 3,), (257, 4099)]


def made(dtypes: Sequence[torch.dtype], scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(0)
    return [scale * torch.randn(size, device=CUDA, generator=generator).to(dtype) for dtype in dtypes for size in SIZES]


def exact(xs: Sequence[Tensor]) -> float:
    return sum(float(x.double().square().sum()) for x in xs)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float16,), (torch.float32,), (torch.float64,)])
def test_exact(dtypes: tuple[torch.dtype, ...]) -> None:
    xs = made(dtypes)
    xs.append(torch.randn(64, 96, device=CUDA, dtype=dtypes[0]).t())
    total = TOTAL_OF_SQUARES(xs, [""] * len(xs))
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(exact(xs), rel=1e-12)
    assert [float(SUM_OF_SQUARES(x)) for x in xs] == pytest.approx([exact([x]) for x in xs], rel=1e-12)


def test_several_dtypes_and_many() -> None:
    xs = made((torch.bfloat16, torch.float32, torch.float64)) * 60
    assert float(TOTAL_OF_SQUARES(xs, [""] * len(xs))) == pytest.approx(exact(xs), rel=1e-12)


def test_large_ones_do_not_overflow_and_others_are_seen() -> None:
    xs = made((torch.float32,), 1e30)
    assert float(TOTAL_OF_SQUARES(xs, [""] * len(xs))) == pytest.approx(exact(xs), rel=1e-12)
    for value in (float("inf"), float("-inf"), float("nan")):
        xs[3][5] = value
        total = float(TOTAL_OF_SQUARES(xs, [""] * len(xs)))
        assert total == float("inf") if value in (float("inf"), float("-inf")) else total != total


def test_nothing_is_copied_and_bits_are_the_same() -> None:
    xs = [torch.randn(1 << 22, device=CUDA, dtype=torch.bfloat16) for _ in range(8)]
    first = TOTAL_OF_SQUARES(xs, [""] * 8)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = TOTAL_OF_SQUARES(xs, [""] * 8)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert torch.equal(first, again)
