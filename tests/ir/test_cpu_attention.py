"""Attention on CPUs: the kernel against the definition in float64, and what is left to the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_triton.base.library import kernel_for
from shardc import torch_compat
from shardc.ir.ops import cpu_attention
from shardc.ir.ops.attention import REFERENCE, SDPA, SDPA_BWD, reference, reference_backward
from shardc.ir.ops.attention_keys import SDPA_PART
from shardc.ir.ops.attention_rows import SDPA_ROWS
from shardc.ir.ops.attention_tiles import Kernels, attend, attend_backward, tiles
from shardc.ir.ops.local import Run

SCALE = 0.3


def operands(heads: int, rows: int, keys: int, layout: str) -> list[Tensor]:
    """g, q, k and v of 4 heads or of `heads`."""
    torch.manual_seed(0)
    shapes = [(2, 4, rows, 8), (2, 4, rows, 8), (2, heads, keys, 8), (2, heads, keys, 8)]
    match layout:
        case "heads last":
            return [torch.randn(b, s, h, d).transpose(1, 2) for b, h, s, d in shapes]
        case "dims first":
            return [torch.randn(b, h, d, s).transpose(2, 3) for b, h, s, d in shapes]
        case "one row":
            return [torch.randn(b, h, 1, d).expand(b, h, s, d) for b, h, s, d in shapes]
        case _:
            return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "dims first", "one row"])
@pytest.mark.parametrize(("heads", "rows", "keys"), [(4, 13, 13), (2, 13, 13), (1, 7, 21), (4, 21, 7), (4, 1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_is_the_definition(
    layout: str, heads: int, rows: int, keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    g, q, k, v = operands(heads, rows, keys, layout)
    gqa = heads < 4
    o, lse = reference(q.double(), k.double(), v.double(), None, causal, SCALE, gqa)
    expected = reference_backward(
        g.double(), q.double(), k.double(), v.double(), None, o, lse, causal, SCALE, gqa, False
    )
    monkeypatch.setattr(cpu_attention.attention, "reference", never)
    monkeypatch.setattr(cpu_attention.attention, "reference_backward", never)
    made = SDPA(q, k, v, None, causal, SCALE, gqa)
    gradients = SDPA_BWD(g, q, k, v, None, *made, causal, SCALE, gqa, False)
    for value, right in zip((*made, *gradients), (o, lse, *expected), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
    meta = [t.to("meta") for t in (g, q, k, v, *made)]
    fakes = (
        *SDPA(*meta[1:4], None, causal, SCALE, gqa),
        *SDPA_BWD(*meta[:4], None, *meta[4:], causal, SCALE, gqa, False),
    )
    for value, fake in zip((*made, *gradients), fakes, strict=True):
        assert (value.shape, value.stride(), value.dtype) == (fake.shape, fake.stride(), fake.dtype), "as graphs say"


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(outputs) if isinstance(t, Tensor)}
        return outputs


@pytest.mark.parametrize("native", [True, False])
def test_keys_and_values_of_groups(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads them as they are, where it can; else they are repeated. Both ways give the same."""
    g, q, k, v = operands(2, 13, 21, "heads last")
    g2, q2, k2, v2 = (t.double() for t in (g, q, k, v))
    o, lse = reference(q2, k2, v2, None, True, SCALE, True)
    expected = reference_backward(g2, q2, k2, v2, None, o, lse, True, SCALE, True, False)
    if native and not torch_compat.flash_attention_on_cpu_takes_groups():
        pytest.skip("this torch's kernel takes none")
    monkeypatch.setattr(torch_compat, "flash_attention_on_cpu_takes_groups", lambda: native)
    with Shapes() as shapes:
        made = cpu_attention.FLASH.forward(q, k, v, None, True, SCALE, True)
        gradients = cpu_attention.FLASH.backward(g, q, k, v, None, *made, True, SCALE, True, False)
    for value, right in zip((*made, *gradients), (o, lse, *expected), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
    assert ((2, 4, 21, 8) in shapes.seen) is not native, "keys of all heads"


def test_the_kernel_is_said_to_take_groups_where_torch_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch_compat.flash_attention_on_cpu_takes_groups
    for chosen, takes in ((SDPBackend.FLASH_ATTENTION, True), (SDPBackend.MATH, False)):
        known.cache_clear()
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, chosen=chosen, **__: chosen.value)
        assert known() is takes
    known.cache_clear()


def test_what_the_kernel_does_not_take_is_left_to_the_definition() -> None:
    _, q, k, v = operands(4, 6, 9, "contiguous")
    assert cpu_attention.takes(q, k, v, None, True, False)
    assert not cpu_attention.takes(q, k, v, None, True, True)  # the last row sees the last key
    assert cpu_attention.takes(q, k, v, None, False, True)
    assert not cpu_attention.takes(q, k, v, torch.ones(6, 9, dtype=torch.bool), False, False)
    assert not cpu_attention.takes(q.double(), k.double(), v.double(), None, True, False)
    assert not cpu_attention.takes(q, k, v[..., :4], None, True, False)
    assert not cpu_attention.takes(q[:, :, :0], k, v, None, True, False)
    lower = reference(q, k, v, None, True, SCALE, False, True)
    for value, right in zip(cpu_attention.FLASH.forward(q, k, v, None, True, SCALE, False, True), lower, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("window", [(-2, 0), (-3, 3)])
def test_windows(window: tuple[int, int]) -> None:
    _, q, k, v = operands(4, 150, 150, "contiguous")
    narrow = SDPA(q, k, v, None, False, SCALE, False, window)
    exact = SDPA(q.double(), k.double(), v.double(), None, False, SCALE, False, window)
    for value, right in zip(narrow, exact, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(Run(0, 24, 0),), (Run(24, 24, 0),), (Run(0, 12, 0), Run(36, 12, 12))], ids=str)
def test_tiles_of_a_ranks_rows(rows: tuple[Run, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is computed by the kernel; one with twice as many keys as rows on its diagonal as two."""
    g, q, k, v = operands(2, 24, 48, "contiguous")
    (kernels,) = kernel_for(SDPA_ROWS, q.device).args  # type: ignore[union-attr]
    assert (kernels,) == kernel_for(SDPA_PART, q.device).args  # type: ignore[union-attr]
    todo = tiles(rows, (Run(0, 48, 0),), True)
    taken: list[bool] = []
    takes = cpu_attention.takes
    monkeypatch.setattr(cpu_attention, "takes", lambda *of: taken.append(takes(*of)) or taken[-1])

    def both(kernels: Kernels, *of: Tensor) -> list[Tensor]:
        g, q, k, v = of
        o, lse = attend(kernels, todo, q, k, v, None, None, SCALE, True, q.dtype)
        gradients = [torch.empty_like(t) for t in (q, k, v)]
        attend_backward(kernels, todo, g, q, k, v, None, o, lse, gradients, (None,) * 3, None, SCALE, True)
        return [o, lse, *gradients]

    made, exact = both(kernels, g, q, k, v), both(REFERENCE, *(t.double() for t in (g, q, k, v)))
    for value, right in zip(made, exact, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
    assert taken
    assert all(taken)
