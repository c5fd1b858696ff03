"""Dropout masks on a GPU are bitwise those of the CPU reference, for any first element of a shard, also past 2^34."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_triton import ops
from kernels_triton.base.random import RANDOM_UNIFORM
from kernels_triton.gate.corpus import Draft
from kernels_triton.generated.launcher import launcher
from kernels_triton.library import reference

pytestmark = pytest.mark.gpu
SOME = settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(-(2**62), 2**62)
SHAPES = st.tuples(st.integers(1, 3000), st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096, 12288, 50304])))
# The first element: from 0 on, or such that the shard reaches past element 2^34, where the low words of counters end.
FIRST = st.tuples(st.booleans(), st.integers(0, 5))


def placed(shape: tuple[int, int], first: tuple[bool, int], more: int) -> tuple[int, int, int, int]:
    """(rows, columns, columns of the whole tensor, the first element): `more` columns belong to other shards."""
    rows, cols = min(shape[0], (1 << 20) // shape[1] + 1), shape[1]
    high, at = first
    return rows, cols, cols + more, at + ((1 << 34) - (cols + more) * rows // 8 * 4 if high else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@SOME
@given(shape=SHAPES, first=FIRST, more=st.integers(0, 5), p=st.floats(0.0, 1.0), seed=SEEDS)
def test_the_template(
    dtype: torch.dtype, shape: tuple[int, int], first: tuple[bool, int], more: int, p: float, seed: int
) -> None:
    rows, cols, wide, at = placed(shape, first, more)
    x = torch.ones(rows, cols, dtype=dtype)
    words = (p, torch.tensor(seed), seed % 1000, (wide, 1), torch.tensor(at))
    expected, mask = reference.bias_dropout_residual(x, None, None, *words)
    words = (p, torch.tensor(seed, device="cuda"), seed % 1000, (wide, 1), torch.tensor(at, device="cuda"))
    y, keep = ops.bias_dropout_residual(x.cuda(), None, None, *words)
    assert torch.equal(keep.cpu(), mask)
    assert torch.equal(y.cpu() != 0, expected != 0)


@SOME
@given(shape=SHAPES, first=FIRST, more=st.integers(0, 5), seed=SEEDS)
def test_generated_kernels(shape: tuple[int, int], first: tuple[bool, int], more: int, seed: int) -> None:
    """As they are and compared, beside a sum over each row."""
    rows, cols, wide, at = placed(shape, first, more)
    k = Draft((rows, cols))
    x, key, offset = k.full(torch.bfloat16), k.scalar(torch.int64), k.scalar(torch.int64)
    uniform = k("uniform", key, offset, attributes=(3, wide, 1))
    k.out(uniform, torch.float32)
    k.out(k("mul", x, k("ge", uniform, 0.3)), torch.bfloat16)
    k.out_row(k("rsum", k("mul", x, k("lt", uniform, 0.3))))
    ones = torch.ones(rows, cols, dtype=torch.bfloat16)
    given_ = [ones, torch.tensor(seed), torch.tensor(at)]
    found = [y.cpu() for y in launcher(k.kernel("fused_drawn"))([one.cuda() for one in given_])]
    numbers = RANDOM_UNIFORM(given_[1], 3, [rows, cols], [wide, 1], given_[2])
    assert torch.equal(found[0], numbers)
    assert torch.equal(found[1] != 0, numbers >= 0.3)
    assert torch.equal(found[2], (numbers < 0.3).sum(1).float())
