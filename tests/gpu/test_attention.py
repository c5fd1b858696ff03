"""The GPU's attention kernels against the float64 reference: each kernel that a shape may select, and the selection."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardc.ir.ops import fused_attention
from shardc.ir.ops.attention import SDPA, SDPA_BWD, reference, reference_backward
from shardc.ir.ops.fused_attention import kernel_for

pytestmark = pytest.mark.gpu

# q heads, kv heads, queries, keys, head dim, value head dim, mask, causal; a mask is rows x keys of these kinds
CASES = {
    "plain": (4, 4, 40, 72, 64, 64, None, False),
    "causal": (4, 4, 65, 65, 64, 64, None, True),
    "causal, oblong": (4, 4, 33, 65, 64, 64, None, True),
    "grouped": (8, 2, 65, 65, 128, 128, None, True),
    "bool": (4, 4, 33, 47, 32, 32, "bool", False),
    "dead row": (4, 4, 33, 47, 32, 32, "dead", False),
    "float": (4, 4, 33, 47, 32, 32, "float", False),
    "bool and causal, grouped": (4, 2, 48, 48, 64, 64, "bool", True),
    "wide values": (4, 4, 40, 72, 32, 64, None, False),
    "odd head dim": (4, 4, 40, 72, 20, 20, None, False),
}
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def mask_of(kind: str | None, rows: int, keys: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "float":
        return torch.randn(1, 4, rows, keys, dtype=torch.float64)
    mask = torch.rand(2, 1, rows, keys) > 0.4
    mask[..., 0] = True
    if kind == "dead":
        mask[:, :, 3] = False
    return mask


def error(found: Tensor, want: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("only", [None, *KERNELS])
def test_every_kernel_equals_the_reference(only: str | None, case: str, dtype: torch.dtype) -> None:
    heads, groups, rows, keys, dim, value_dim, kind, causal = CASES[case]
    torch.manual_seed(0)
    mask = mask_of(kind, rows, keys)
    # Transposed: how heads lie after a projection.
    q, k, v, g = (
        torch.randn(2, s, h, d).to(dtype).transpose(1, 2)
        for h, s, d in ((heads, rows, dim), (groups, keys, dim), (groups, keys, value_dim), (heads, rows, value_dim))
    )
    wide = [t.double() for t in (q, k, v, g)]
    bias = mask.to(dtype).double() if mask is not None and mask.dtype.is_floating_point else mask
    gqa = heads != groups
    o, lse = reference(*wide[:3], bias, causal, None, gqa)
    grads = reference_backward(wide[3], *wide[:3], bias, o, lse, causal, None, gqa, False)[:3]
    device = [t.cuda() for t in (q, k, v, g)]
    on_device = None if mask is None else mask.cuda() if mask.dtype == torch.bool else mask.to(dtype).cuda()

    def run() -> tuple[Tensor, ...]:
        found, sums = SDPA(*device[:3], on_device, causal, None, gqa)
        back = SDPA_BWD(device[3], *device[:3], on_device, found, sums, causal, None, gqa, False)
        return found, sums, *back[:3]

    if only is None:
        results = run()
    else:
        with sdpa_kernel([KERNELS[only]]):
            results = run()
    found, sums, *back = results
    assert found.transpose(1, 2).is_contiguous()
    assert sums.shape == lse.shape
    assert error(found, o) < 1e-2
    live = lse.isfinite()
    torch.testing.assert_close(sums.cpu()[live].double(), lse[live], rtol=1e-2, atol=1e-2)
    assert (sums.cpu()[~live] == float("-inf")).all()
    assert not found.cpu().masked_select(~live.unsqueeze(-1)).any()
    for mine, want in zip(back, grads, strict=True):
        assert mine.shape == want.shape
        assert mine.dtype == dtype
        assert mine.transpose(1, 2).is_contiguous()
        assert error(mine, want) < 2e-2


def test_halves_are_fused_and_floats_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reference would make, the S x S scores, is never made in a half."""
    q = torch.randn(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
    assert kernel_for(q, q, q, None, True) in ("cudnn", "flash")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = SDPA(q, q, q, None, True, None, False)
    SDPA_BWD(o, q, q, q, None, o, lse, True, None, False, False)
    assert torch.cuda.max_memory_allocated() - before < 64 * q.numel()
    monkeypatch.setattr(fused_attention, "kernel_for", lambda *_: pytest.fail("a float32 call looked for a kernel"))
    small = torch.randn(1, 2, 8, 16, device="cuda")
    SDPA(small, small, small, None, True, None, False)


def test_the_gradient_of_a_mask() -> None:
    q = torch.randn(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16)
    mask = torch.randn(1, 4, 8, 8, device="cuda", dtype=torch.bfloat16)
    o, lse = SDPA(q, q, q, mask, False, None, False)
    dmask = SDPA_BWD(o, q, q, q, mask, o, lse, False, None, False, True)[3]
    assert dmask.shape == mask.shape
    assert dmask.isfinite().all()
    assert dmask.any()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("window", "rows"), [(1, 40), (16, 200), (100, 250), (300, 250)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_window_means_what_its_mask_does(dtype: torch.dtype, window: int, rows: int, padded: bool) -> None:
    """By blocks of rows, most of which are a kernel's with a mask; rows of padding see nothing."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, rows, h, 64).to(dtype).transpose(1, 2) for h in (4, 2, 2, 4))
    i, j = torch.arange(rows)[:, None], torch.arange(rows)
    seen = (j <= i) & (i - j < window)
    keep = torch.ones(2, 1, 1, rows, dtype=torch.bool)
    keep[0, ..., : rows // 3] = False
    wide = [t.double() for t in (q, k, v, g)]
    mask = seen & keep if padded else seen
    o, lse = reference(*wide[:3], mask, False, None, True)
    wants = reference_backward(wide[3], *wide[:3], mask, o, lse, False, None, True, False)[:3]
    device = [t.cuda() for t in (q, k, v, g)]
    told = keep.cuda() if padded else None
    found, sums = SDPA(*device[:3], told, True, None, True, [1 - window, 0])
    back = SDPA_BWD(device[3], *device[:3], told, found, sums, True, None, True, False, [1 - window, 0])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert error(found, o) < tolerance
    for mine, want in zip(back[:3], wants, strict=True):
        if window == 1 and want is not wants[2]:  # a softmax of one key has no gradient
            assert float(mine.abs().max()) < 1e-5
        else:
            assert error(mine, want) < tolerance
