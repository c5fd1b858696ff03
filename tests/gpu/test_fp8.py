"""8-bit products of tensor cores beside those of a CPU, and a small GPT-2's losses with them beside bfloat16's.

Scales are powers of two and 8-bit numbers have at most 4 bits, so that each product is exact in float32: the two differ
by how sums are rounded. Hopper adds with fewer bits than float32 has, hence tolerances of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from examples import train_gpt2
from shardc.ir.ops.scaled import QUANTIZE, SCALE, SCALED_DGRAD, SCALED_LINEAR, SCALED_MM, SCALED_WGRAD
from shardc.plan.schema import Plan
from shardc.torch_compat import multiplies_fp8
from tests.ports import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not multiplies_fp8(torch.device("cuda")), reason="no products of 8-bit floats"
    ),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SUMMED = {SCALED_LINEAR: (-1, -1), SCALED_DGRAD: (-1, 0), SCALED_WGRAD: (0, 0), SCALED_MM: (1, 0)}
SIZES = [(64, 128, 32), (512, 256, 4096), (17, 48, 80), (5, 16, 16), (1, 3, 7)]  # rows, columns, depth


def shapes(op: Any, rows: int, columns: int, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return {
        SCALED_LINEAR: ((rows, depth), (columns, depth)),
        SCALED_DGRAD: ((rows, depth), (depth, columns)),
        SCALED_WGRAD: ((depth, rows), (depth, columns)),
        SCALED_MM: ((rows, depth), (depth, columns)),
    }[op]


def rounded(x: Tensor, summed: int, scaling: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax() if scaling == "tensor" else x.abs().amax(summed, keepdim=True)
    scale = SCALE(amax, dtype)
    return QUANTIZE(x, scale, dtype), scale


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "row", "mixed"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", SUMMED, ids=str)
def test_products_are_those_of_a_cpu(op: Any, out: torch.dtype, scaling: str, sizes: tuple[int, int, int]) -> None:
    """Also where extents are no multiples of 16, and where rows are far apart in size."""
    torch.manual_seed(0)
    first, second = shapes(op, *sizes)
    a, b = torch.randn(first, dtype=torch.bfloat16), torch.randn(second, dtype=torch.bfloat16)
    a = a * 2.0 ** (torch.arange(a.shape[0]) % 7)[:, None].to(a.dtype)
    of = ("tensor", "row") if scaling == "mixed" else (scaling, scaling)
    dtypes = (E4M3 if op in (SCALED_LINEAR, SCALED_MM) else E5M2), E4M3
    pairs = [rounded(x, d, how, t) for x, d, how, t in zip((a, b), SUMMED[op], of, dtypes, strict=True)]
    on_gpu = [rounded(x.cuda(), d, how, t) for x, d, how, t in zip((a, b), SUMMED[op], of, dtypes, strict=True)]
    for (q, scale), (q_gpu, scale_gpu) in zip(pairs, on_gpu, strict=True):
        assert torch.equal(scale_gpu.cpu(), scale)
        assert torch.equal(q_gpu.cpu().view(torch.uint8), q.view(torch.uint8))
    wanted = op(*(q for q, _ in pairs), *(s for _, s in pairs), torch.float32)
    found = op(*(q for q, _ in on_gpu), *(s for _, s in on_gpu), out)
    assert (found.dtype, found.shape, found.is_contiguous()) == (out, wanted.shape, True)
    exact = op(*(q.float().double() for q, _ in pairs), *(s.double() for _, s in pairs), torch.float64)
    size = op(*(q.float().double().abs() for q, _ in pairs), *(s.double() for _, s in pairs), torch.float64)
    assert ((wanted - exact).abs() <= 1e-5 * size).all()
    bound = 2 * torch.finfo(out).eps * exact.abs() + 2e-3 * size
    off = (found.cpu().double() - exact).abs()
    assert (off <= bound).all(), f"off by {float((off / size.clamp(min=1e-30)).max()):.2e} of the sum of sizes"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_number_that_is_none_is_seen(scaling: str, value: float) -> None:
    x, w = torch.randn(32, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    x[3, 5] = value
    (q, s), (p, t) = (rounded(v.bfloat16(), -1, scaling, E4M3) for v in (x, w))
    y = SCALED_LINEAR(q, p, s, t, torch.bfloat16)
    assert y[3].isnan().all()


def test_zeros_stay_zeros() -> None:
    x, w = torch.zeros(32, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    (q, s), (p, t) = (rounded(v.bfloat16(), -1, "tensor", E4M3) for v in (x, w))
    assert not SCALED_LINEAR(q, p, s, t, torch.bfloat16).any()


def test_a_batch_of_rows_keeps_its_shape() -> None:
    x, w = torch.randn(3, 5, 64, device="cuda"), torch.randn(48, 64, device="cuda")
    (q, s), (p, t) = (rounded(v.bfloat16(), -1, "row", E4M3) for v in (x, w))
    y = SCALED_LINEAR(q, p, s, t, torch.bfloat16)
    flat = SCALED_LINEAR(q.flatten(0, 1), p, s.flatten(0, 1), t, torch.bfloat16)
    assert torch.equal(y.flatten(0, 1), flat)


@pytest.mark.parametrize(
    ("linear", "fuse"), [({}, False), ({}, True), ({"scale": "row"}, False), ({"history": 16}, True)], ids=str
)
def test_a_small_gpt2_learns_as_in_bfloat16(
    linear: dict[str, Any], fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
        monkeypatch.setenv(key, value)
    arguments = ["--width", "128", "--heads", "4", "--layers", "2", "--batch", "16", "--seq", "64", "--steps", "60"]
    options = train_gpt2.options(arguments)
    batches = list(train_gpt2.batches(options))

    def losses(precision: object) -> list[float]:
        torch.manual_seed(0)
        model = train_gpt2.gpt2(options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        asked = Plan.of(mesh="dp=1, tp=1", precision=precision, clip_grad_norm=1.0, fuse=fuse)
        program = shardc.compile(model, batches[0], plan=Plan.load(options.plan).merge(asked), optimizer=optimizer)
        with program.launch(device="cuda") as trainer:
            assert trainer.device.type == "cuda"
            return [float(trainer.step(batch).loss) for batch in batches]

    half, eight = losses("bf16"), losses({"linear": linear})
    assert half[-1] < 0.7 * half[0]
    assert eight != half
    means = [torch.tensor(each).unfold(0, 5, 1).mean(1) for each in (half, eight)]  # a step alone differs by up to 3 %
    assert float(((means[0] - means[1]).abs() / means[0]).max()) < 0.02
