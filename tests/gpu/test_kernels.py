"""The templates on a GPU: against float64 references, twice bitwise the same, and past 2^31 elements."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import launch, ops
from kernels_triton.registry import TEMPLATES

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
SHAPES = ((1, 1), (70, 513), (300, 4096), (64, 12288), (5, 131072))
WHOLE = {"batch": 2, "heads": 5, "dim": 64, "half": 24, "channels": 64, "groups": 32, "space": 77}


def sane(name: str, arguments: list[Any], like: torch.dtype) -> list[Any]:
    """Operands that belong together, where a signature alone does not say so."""
    if name in ("softmax_backward",):
        arguments[1] = torch.softmax(arguments[1].float(), -1).to(like)
    return arguments


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    template = TEMPLATES[name]
    for rows, cols in SHAPES:
        torch.manual_seed(rows)
        for variant in template.variants:
            arguments = sane(name, template.arguments({**WHOLE, "rows": rows, "cols": cols}, dtype, "cuda"), dtype)
            if variant.get("causal") and cols > 16384:
                continue
            wide = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
            again = [a.clone() if torch.is_tensor(a) else a for a in arguments]
            assert launch.on_triton(arguments[0])
            found, second = template.op(*arguments, **variant), template.op(*again, **variant)
            expected = template.reference(*wide, **variant)
            if name == "adamw":
                found, second, expected = arguments[:4], again[:4], wide[:4]
            for mine, repeated, theirs in zip(tensors(found), tensors(second), tensors(expected), strict=True):
                assert torch.equal(mine, repeated), f"{name} {variant} {rows}x{cols} is not deterministic"
                error = (mine.double() - theirs).norm() / theirs.double().norm().clamp(min=1e-30)
                assert error < TOLERANCE[dtype], f"{name} {variant} {rows}x{cols}: relative error {error:.1e}"


def tensors(value: Any) -> list[Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if torch.is_tensor(v)]


def test_offsets_beyond_32_bits() -> None:
    """2.3e9 elements: the last rows lie past 2^31."""
    cols, rows = 8192, 280_000
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    w, b = torch.ones(cols, dtype=torch.bfloat16, device="cuda"), torch.zeros(cols, dtype=torch.bfloat16, device="cuda")
    y, mean, rstd = ops.layer_norm(x, w, b)
    last, _, _ = ops.layer_norm(x[-3:].clone(), w, b)
    assert torch.equal(y[-3:], last)
    dx, _, db = ops.layer_norm_backward(y, x, w, mean, rstd)
    part, _, _ = ops.layer_norm_backward(y[-3:].clone(), x[-3:].clone(), w, mean[-3:].clone(), rstd[-3:].clone())
    assert torch.equal(dx[-3:], part)
    assert db is not None
    assert torch.isfinite(db).all()
