"""Attention of a rank's rows by the GPU's kernels, against float64: aligned lower right, merged, in a ring."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from shardc.ir.blocks import Blocks, zigzag
from shardc.ir.mesh import Mesh
from shardc.ir.ops import attention, fused_attention
from shardc.ir.ops.attention_rows import ALL_KEYS, SDPA_ROWS, SDPA_ROWS_BWD, layout
from shardc.ir.ops.context import Communicator, RankContext, running

pytestmark = pytest.mark.gpu

MESH = Mesh(cp=4)
HEADS = {"equal": (4, 4), "grouped": (8, 2)}


def part(x: Tensor, rows: str, rank: int) -> Tensor:
    shape = list(x.shape)
    shape[-2] = int(Blocks.parse(rows).local(["cp"], MESH))
    shard = x.new_zeros(shape)
    for run in layout(rows, ["cp"], MESH, MESH.coordinate(rank)):
        shard.narrow(-2, run.local, run.extent).copy_(x.narrow(-2, run.start, run.extent))
    return shard


def whole(parts: list[Tensor], rows: str) -> Tensor:
    n = int(Blocks.parse(rows))
    total = parts[0].new_zeros([*parts[0].shape[:-2], n, parts[0].shape[-1]])
    for rank, shard in enumerate(parts):
        for run in layout(rows, ["cp"], MESH, MESH.coordinate(rank)):
            total.narrow(-2, run.start, run.extent).copy_(shard.narrow(-2, run.local, run.extent))
    return total


def at(rank: int) -> RankContext:
    return RankContext(MESH, MESH.coordinate(rank), cast(Communicator, None))


def off(found: Tensor, want: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [512, 250])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_by_all_keys_and_by_a_ring(
    dtype: torch.dtype, balanced: bool, length: int, heads: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, few = HEADS[heads]
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, length, h, 64).to(dtype).transpose(1, 2) for h in (many, few, few, many))
    gqa = many != few
    o, lse = attention.reference(*(t.double() for t in (q, k, v)), None, causal, None, gqa)
    wants = attention.reference_backward(*(t.double() for t in (g, q, k, v)), None, o, lse, causal, None, gqa, False)
    rows = str(zigzag(length, "cp", 4) if balanced else length)
    slow: list[str] = []
    reference = attention.reference

    def noted(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        slow.append("reference")
        return reference(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_attention.attention, "reference", noted)
    q, k, v, g = (t.cuda() for t in (q, k, v, g))
    parts = [[part(t, rows, rank) for t in (q, k, v, g)] for rank in range(4)]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5

    results: list[Tensor] = []
    grads: list[tuple[Tensor, ...]] = []
    for rank in range(4):
        told = (causal, None, gqa, rows, ["cp"], ALL_KEYS, True)
        with running(at(rank)):
            own, sums = SDPA_ROWS(parts[rank][0], k, v, None, None, None, *told)
            found = SDPA_ROWS_BWD(
                parts[rank][3], parts[rank][0], k, v, None, own, sums, None, None, None, None,
                causal, None, gqa, False, rows, ["cp"], ALL_KEYS, True,
            )  # fmt: skip
        results.append(own)
        grads.append(found)
    assert off(whole(results, rows), o) < tolerance
    assert off(whole([found[0] for found in grads], rows), wants[0]) < tolerance
    for i in (1, 2):
        assert off(sum((found[i].double() for found in grads[1:]), grads[0][i].double()), wants[i]) < tolerance

    steps: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 4
    for step in range(4):
        for rank in range(4):
            keys = parts[(rank - step) % 4][1:3]
            with running(at(rank)):
                steps[rank] = SDPA_ROWS(
                    parts[rank][0], *keys, None, *steps[rank], causal, None, gqa, rows, ["cp"], step, step == 3
                )
    assert off(whole([cast(Tensor, found[0]) for found in steps], rows), o) < tolerance
    back: list[tuple[Tensor | None, ...]] = [(None, None, None)] * 4
    for step in (1, 2, 3, 0):
        came = back if step == 1 else [(back[r][0], *back[(r - 1) % 4][1:3]) for r in range(4)]
        back = list(back)
        for rank in range(4):
            keys = parts[(rank - step) % 4][1:3]
            with running(at(rank)):
                back[rank] = SDPA_ROWS_BWD(
                    parts[rank][3], parts[rank][0], *keys, None, *steps[rank], *came[rank], None,
                    causal, None, gqa, False, rows, ["cp"], step, step == 0,
                )  # fmt: skip
    for i in range(3):
        assert off(whole([cast(Tensor, found[i]) for found in back], rows), wants[i]) < tolerance
    if dtype == torch.bfloat16:
        assert not slow, "a kernel of torch's takes tiles in halves"
