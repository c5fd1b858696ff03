"""The machine code of random numbers: four neighbours share a Philox, and no word goes through memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels_triton import ops
from kernels_triton.gate import gate
from kernels_triton.gate.corpus import Draft
from kernels_triton.generated.launcher import launcher
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch.launch import H200, HAS_TRITON, assuming, recording
from kernels_triton.launch.machine_code import disassemble, machine_code

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: nothing can be compiled here")
ROWS, COLS = 8192, 4096
PRODUCTS = 20  # wide ones of a Philox4x32-10
A_THREAD = 8  # elements, of 16 bytes in bfloat16


def dropped(stride: int, first: int | None) -> Kernel:
    """`x * keep`, rows `stride` numbers apart; `first` a literal, or an operand."""
    k = Draft((ROWS, COLS))
    x, seed = k.full(torch.bfloat16), k.scalar(torch.int64)
    offset = k.scalar(torch.int64) if first is None else first
    keep = k("ge", k("uniform", seed, offset, attributes=(3, stride, 1)), 0.1)
    k.out(k("mul", x, keep), torch.bfloat16)
    return k.kernel("fused_dropped")


def compiled(run: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Wide products, and bytes of shared memory, of the one kernel that is launched."""
    found: list[gate.CompileJob] = []
    with assuming(H200), recording(lambda one: found.append(gate.job_of_launch("", COLS, one))):
        run(*args)
    (source,) = found
    kernel = gate.compile_job(source, 90)
    (code,) = disassemble([machine_code(kernel.asm["cubin"]).code], 90)
    wide = [line for line in code if line.split()[0 if line[0] != "@" else 1].startswith(("IMAD.WIDE", "IMAD.HI"))]
    return len(wide), kernel.metadata.shared


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stride", "first", "computed"),
    [
        (2 * COLS, 8, 2),  # seen to be aligned: a Philox for four elements
        (2 * COLS + 1, 8, 2),  # rows that begin anywhere: as many, in a loop of two turns
        (2 * COLS, None, 4),  # the offset decides
    ],
)
def test_neighbours_share_their_words(stride: int, first: int | None, computed: int) -> None:
    kernel = dropped(stride, first)
    inputs = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in kernel.inputs]
    products, shared = compiled(launcher(kernel), inputs)
    assert computed * (PRODUCTS - 5) <= products <= computed * PRODUCTS * 1.5 + 8
    assert products < A_THREAD * PRODUCTS
    assert shared == 0


def test_the_template_too() -> None:
    x, seed = torch.empty((ROWS, COLS), dtype=torch.bfloat16, device="meta"), torch.empty((), device="meta").long()
    products, shared = compiled(ops.bias_dropout_residual, x, None, x, 0.1, seed, 3, None, seed)
    assert products <= 4 * PRODUCTS * 1.5 + 8
    assert shared == 0
