"""The public ops on Triton: more samples than a grid allows, and in-place writes that autograd is told of."""

import pytest
import torch

from kernels_triton import ops
from kernels_triton.library import reference
from shardc import ShardcError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("each", [False, True], ids=["shared angles", "angles of each sample"])
def test_more_samples_than_a_grid_has(each: bool) -> None:
    x = torch.randn(65537, 1, 2, 8, device="cuda")
    angles = torch.rand(*([len(x)] if each else []), 1, 4, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    expected = reference.rope(x, cos, sin)
    torch.testing.assert_close(ops.rope(x, cos, sin), expected)
    torch.testing.assert_close(ops.rope(x, cos, sin, in_place=True), expected)


def test_autograd_is_told_of_what_is_written_in_place() -> None:
    """The gradient of a square that is read after it was turned would be [-10, 10], and is [2, 2]."""
    x = torch.ones(1, 1, 1, 2, device="cuda", requires_grad=True)
    cos, sin = torch.zeros(1, 1, device="cuda"), torch.full((1, 1), 5.0, device="cuda")
    h = x * 1
    z = (h * h).sum()
    with pytest.raises(ShardcError, match=r"SC530.*x requires a gradient"):
        ops.rope(h, cos, sin, in_place=True)
    with torch.no_grad():
        ops.rope(h.detach(), cos, sin, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
