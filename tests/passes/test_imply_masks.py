"""What masks say of positions, against eager PyTorch: read as windows and causal, or left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.graph import type_of
from shardc.ir.ops.attention import SDPA, SDPA_BWD, reference, reference_backward
from shardc.ir.schema import given as arguments
from shardc.runtime.oracle.simulate import simulate

LENGTH = 9


class Masked(nn.Module):
    """Attention with a mask that is made of positions, and of what the batch says of keys."""

    def __init__(self, mask: Callable[[Tensor, Tensor, Tensor], Tensor], heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.heads, self.keys = mask, heads, keys
        self.q, self.k, self.v = nn.Linear(8, 4 * heads), nn.Linear(8, 4 * keys), nn.Linear(8, 4 * keys)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.keys < self.heads:  # as libraries repeat keys
            times = self.heads // self.keys
            k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).reshape(*q.shape) for t in (k, v))
        n = x.shape[1]
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        return F.scaled_dot_product_attention(q, k, v, self.mask(i, j, keep)).square().sum()


def windowed(i: Tensor, j: Tensor, keep: Tensor) -> Tensor:
    return (i - j < 3) & (j <= i)


READ: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int, bool]] = {
    "causal": (lambda i, j, keep: j <= i, 0, False),
    "not ahead": (lambda i, j, keep: ~(j > i), 0, False),
    "a window": (windowed, 3, False),
    "turned about": (lambda i, j, keep: (j > i - 3) & (i >= j), 3, False),
    "scaled and shifted": (lambda i, j, keep: ((2 + j) - 2 >= i + 1 - 3) & ((-j) + i >= 0), 3, False),
    "hidden": (lambda i, j, keep: ~((j > i) | (i - j >= 3)), 3, False),
    "of one": (lambda i, j, keep: (i - j < 1) & (j <= i), 1, False),
    "longer than the sequence": (lambda i, j, keep: (i - j < 99) & (j <= i), 0, False),
    "as long as it": (lambda i, j, keep: (i - j < LENGTH) & (j <= i), 0, False),
    "one shorter": (lambda i, j, keep: (i - j < LENGTH - 1) & (j <= i), LENGTH - 1, False),
    "with padding": (lambda i, j, keep: windowed(i, j, keep) & keep[:, None, None, :], 3, True),
    "padding within": (lambda i, j, keep: (windowed(i, j, keep) & keep[:, None, :])[:, None], 3, True),
    "expanded": (lambda i, j, keep: windowed(i, j, keep)[None, None].expand(2, 4, -1, -1), 3, False),
    "triangles": (lambda i, j, keep: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2), 0, False),
    "two triangles": (
        lambda i, j, keep: torch.ones(LENGTH, LENGTH).bool().tril() & torch.ones(LENGTH, LENGTH).bool().triu(-2),
        3, False,
    ),
    "added": (
        lambda i, j, keep: torch.zeros(LENGTH, LENGTH).masked_fill(~windowed(i, j, keep), float("-inf")), 3, False,
    ),
    "chosen": (lambda i, j, keep: torch.where(windowed(i, j, keep), 0.0, float("-inf")), 3, False),
    "lowest": (
        lambda i, j, keep: torch.where(windowed(i, j, keep), 0.0, torch.finfo(torch.float32).min), 3, False,
    ),
    "torch's own": (
        lambda i, j, keep: nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float32), 0, False,
    ),
    "added twice": (
        lambda i, j, keep: torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        + torch.full((LENGTH, LENGTH), float("-inf")).tril(-3), 3, False,
    ),
}  # fmt: skip
LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "both ways": lambda i, j, keep: (i - j).abs() < 3,
    "both ways, compared": lambda i, j, keep: (i - j < 3) & (j - i < 3),
    "ahead": lambda i, j, keep: j >= i,
    "one ahead": lambda i, j, keep: j <= i + 1,
    "behind alone": lambda i, j, keep: (i - j < 3) & ((i - j > 0) | (i == 0)),
    "either": lambda i, j, keep: (j <= i) | (j < 3),
    "every other": lambda i, j, keep: 2 * j <= i,
    "of the batch": lambda i, j, keep: keep[:, None, None, :] & (i >= 0),
    "lowest with padding": lambda i, j, keep: torch.where(
        (j <= i) & (keep[:, None, None, :] | (j == 0)), 0.0, torch.finfo(torch.float32).min
    ),
    "lowest for all keys": lambda i, j, keep: torch.where(j < i, 0.0, torch.finfo(torch.float32).min),
    "turned": lambda i, j, keep: (i <= j).T & keep[:, None, None, :],
    "a bias": lambda i, j, keep: torch.where(j <= i, -(i - j) * 0.5, float("-inf")),
    "with a weight": lambda i, j, keep: torch.add(
        torch.where(j <= i, 0.0, float("-inf")),
        torch.where(i - j < 3, 0.0, torch.finfo(torch.float32).min),
        alpha=-1,
    ),
    "of positions that wrap around": lambda i, j, keep: (
        (torch.arange(LENGTH) + (2**31 - 4)).int()[None, :] <= (torch.arange(LENGTH) + (2**31 - 4)).int()[:, None]
    ),
    "of sums that wrap around": lambda i, j, keep: j.int() + (2**31 - 4) <= i.int() + (2**31 - 4),
    "one row": lambda i, j, keep: (torch.zeros(1, dtype=torch.int64)[:, None] <= j) & keep[:, None, None, :],
}


def compiled(mask: Callable[[Tensor, Tensor, Tensor], Tensor], **kwargs: Any) -> tuple[shardc.Program, Masked, Any]:
    model = Masked(mask, **kwargs)
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[1, :2] = False
    batch = {"x": torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(1)), "keep": keep}
    return shardc.compile(model, batch, mesh="dp=1"), model, batch


def as_eager(program: shardc.Program, model: Masked, batch: Any) -> None:
    """The loss, and all gradients, in float64."""
    double = Masked(model.mask, model.heads, model.keys).double()
    loss = double(batch["x"].double(), batch["keep"])
    loss.backward()
    found = simulate(program.body, program.inputs(), dtype=torch.float64)
    values = {port.name: value for port, value in found.items()}
    wanted = {name: parameter.grad for name, parameter in double.named_parameters()}
    grads = [(port, value) for port, value in found.items() if port.role == "grad"]
    assert len(grads) == len(wanted), values.keys()
    for port, value in grads:
        name = next(n for n in wanted if n in port.name)
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
    (total,) = [value for port, value in found.items() if port.role == "loss"]
    torch.testing.assert_close(total, loss.detach(), rtol=1e-12, atol=1e-12)


def calls(program: shardc.Program) -> list[dict[str, Any]]:
    return [arguments(node) for node in program.reference.calls() if node.target in (SDPA, SDPA_BWD)]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_masks_of_positions_are_read(name: str, heads: tuple[int, int]) -> None:
    mask, window, left = READ[name]
    program, model, batch = compiled(mask, heads=heads[0], keys=heads[1])
    for said in calls(program):
        if name != "triangles":  # one of the other is no triangle of ones
            assert said["causal"]
            assert said.get("window", 0) == window
            assert (said["mask"] is not None) == left
        assert said["gqa"] == (heads[1] < heads[0])
        assert type_of(said["k"]).shape[1] == heads[1]
        if left:
            assert type_of(said["mask"]).shape[-2:] == (1, LENGTH)
    as_eager(program, model, batch)


@pytest.mark.parametrize("name", LEFT)
def test_other_masks_are_left(name: str) -> None:
    program, model, batch = compiled(LEFT[name])
    for said in calls(program):
        assert said["mask"] is not None
        assert not said["causal"]
        assert not said.get("window", 0)
    as_eager(program, model, batch)


@given(
    length=st.integers(1, 150),
    window=st.integers(1, 170),
    heads=st.sampled_from(((4, 2), (2, 2))),
    mask=st.sampled_from(("", "rows", "one row", "added")),
)
def test_a_window_means_what_its_mask_does(length: int, window: int, heads: tuple[int, int], mask: str) -> None:
    """Of one device, with rows that see nothing; blocks of rows are shorter than the sequence, or not."""
    many, few = heads
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, many, length, 5), (2, many, length, 3), (2, few, length, 3), (2, few, length, 5)]
    g, q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    whole = (j <= i) & (i - j < window)
    other: Tensor | None = None
    if mask:
        other = torch.rand((2, 1, 1 if mask == "one row" else length, length), generator=generator) < 0.5
        if mask == "added":
            other = torch.randn(other.shape, generator=generator, dtype=torch.float64).masked_fill(~other, -torch.inf)
            whole = other.masked_fill(~whole, -torch.inf)
        else:
            whole = whole & other
    need = mask == "added"
    o, lse = reference(q, k, v, whole, False, None, many != few)
    wanted = reference_backward(g, q, k, v, whole, o, lse, False, None, many != few, need)
    found = SDPA(q, k, v, other, True, None, many != few, window)
    grads = SDPA_BWD(g, q, k, v, other, *found, True, None, many != few, need, window)
    for mine, want in zip((*found, *grads), (o, lse, *wanted), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)
