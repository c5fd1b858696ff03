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
from shardc.ir.ops.attention_tiles import pairs as count
from shardc.ir.ops.attention_tiles import tiles
from shardc.ir.ops.attention_window import Window
from shardc.ir.ops.local import Run
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
        mask = self.mask(i, j, keep)
        if mask.is_floating_point():  # float32 that is added to float64, torch reads wrong on some processors
            mask = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask).square().sum()


def windowed(i: Tensor, j: Tensor, keep: Tensor) -> Tensor:
    return (i - j < 3) & (j <= i)


def _within(chunk: Tensor) -> Tensor:
    return chunk[:, None] == chunk[None, :]


def _padding(keep: Tensor) -> Tensor:
    return (~keep).sum(-1)[:, None, None, None]


READ: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Any, bool]] = {
    "causal": (lambda i, j, keep: j <= i, [], False),
    "not ahead": (lambda i, j, keep: ~(j > i), [], False),
    "a window": (windowed, [-2, 0], False),
    "turned about": (lambda i, j, keep: (j > i - 3) & (i >= j), [-2, 0], False),
    "scaled and shifted": (lambda i, j, keep: ((2 + j) - 2 >= i + 1 - 3) & ((-j) + i >= 0), [-2, 0], False),
    "hidden": (lambda i, j, keep: ~((j > i) | (i - j >= 3)), [-2, 0], False),
    "of one": (lambda i, j, keep: (i - j < 1) & (j <= i), [0, 0], False),
    "longer than the sequence": (lambda i, j, keep: (i - j < 99) & (j <= i), [], False),
    "as long as it": (lambda i, j, keep: (i - j < LENGTH) & (j <= i), [], False),
    "one shorter": (lambda i, j, keep: (i - j < LENGTH - 1) & (j <= i), [2 - LENGTH, 0], False),
    "with padding": (lambda i, j, keep: windowed(i, j, keep) & keep[:, None, None, :], [-2, 0], True),
    "padding within": (lambda i, j, keep: (windowed(i, j, keep) & keep[:, None, :])[:, None], [-2, 0], True),
    "expanded": (lambda i, j, keep: windowed(i, j, keep)[None, None].expand(2, 4, -1, -1), [-2, 0], False),
    "triangles": (lambda i, j, keep: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2), [-2, 0], False),
    "two triangles": (
        lambda i, j, keep: torch.ones(LENGTH, LENGTH).bool().tril() & torch.ones(LENGTH, LENGTH).bool().triu(-2),
        [-2, 0], False,
    ),
    "added": (
        lambda i, j, keep: torch.zeros(LENGTH, LENGTH).masked_fill(~windowed(i, j, keep), float("-inf")),
        [-2, 0], False,
    ),
    "chosen": (lambda i, j, keep: torch.where(windowed(i, j, keep), 0.0, float("-inf")), [-2, 0], False),
    "lowest": (
        lambda i, j, keep: torch.where(windowed(i, j, keep), 0.0, torch.finfo(torch.float32).min), [-2, 0], False,
    ),
    "torch's own": (
        lambda i, j, keep: nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float32), [], False,
    ),
    "added twice": (
        lambda i, j, keep: torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        + torch.full((LENGTH, LENGTH), float("-inf")).tril(-3), [-2, 0], False,
    ),
    "both ways": (lambda i, j, keep: (i - j).abs() < 3, [-2, 2], False),
    "both ways, compared": (lambda i, j, keep: (i - j < 3) & (j - i < 2), [-2, 1], False),
    "both ways, turned": (lambda i, j, keep: ~((i - j).abs() > 2) & keep[:, None, None, :], [-2, 2], True),
    "both ways, added": (
        lambda i, j, keep: torch.zeros(LENGTH, LENGTH).masked_fill((i - j).abs() > 2, float("-inf")), [-2, 2], False,
    ),
    "both ways, lowest": (
        lambda i, j, keep: torch.where((i - j).abs() <= 2, 0.0, torch.finfo(torch.float32).min), [-2, 2], False,
    ),
    "one or the other": (lambda i, j, keep: windowed(i, j, keep) | ((i - j).abs() < 2), [-2, 1], False),
    "one beside the other": (lambda i, j, keep: (i - j == 1) | (i == j) | (j == i + 1), [-1, 1], False),
    "none, or a window": (
        lambda i, j, keep: torch.zeros(LENGTH, LENGTH).bool() | ((i - j).abs() < 3), [-2, 2], False,
    ),
    "ahead": (lambda i, j, keep: j >= i, [0, LENGTH - 1], False),
    "one ahead": (lambda i, j, keep: j <= i + 1, [1 - LENGTH, 1], False),
    "not its own": (lambda i, j, keep: j < i, [1 - LENGTH, -1], False),
    "some ahead": (lambda i, j, keep: (j - i >= 2) & (j <= i + 4), [2, 4], False),
    "twice as far": (lambda i, j, keep: (2 * i - 2 * j <= 5) & (2 * j <= 2 * i + 3), [-2, 1], False),
    "itself": (lambda i, j, keep: i == j, [0, 0], False),
    "behind, and more": (lambda i, j, keep: (i - j < 3) & ((i - j > 0) | (i == 0)), [-2, LENGTH - 1], True),
    "a triangle of a window": (lambda i, j, keep: ((i - j).abs() < 3).tril(1), [-2, 1], False),
    "its chunk": (lambda i, j, keep: i // 4 == j // 4, [-3, 3, 4], False),
    "its chunk, not otherwise": (lambda i, j, keep: ~(i // 4 != j // 4), [-3, 3, 4], False),
    "its chunk, by none between": (lambda i, j, keep: (i // 4 - j // 4).abs() < 1, [-3, 3, 4], False),
    "its chunk, causal": (lambda i, j, keep: (i // 4 == j // 4) & (j <= i), [-3, 0, 4], False),
    "its chunk, counted once": (lambda i, j, keep: _within(torch.arange(LENGTH) // 4), [-3, 3, 4], False),
    "its chunk, by remainders": (lambda i, j, keep: (i - i % 4 == j - j % 4) & (j <= i), [-3, 0, 4], False),
    "its chunk, by bits": (lambda i, j, keep: i >> 2 == j >> 2, [-3, 3, 4], False),
    "its chunk, truncated": (
        lambda i, j, keep: i.div(4, rounding_mode="trunc") == j.div(4, rounding_mode="trunc"), [-3, 3, 4], False,
    ),
    "from where its chunk begins": (lambda i, j, keep: (j >= i // 4 * 4) & (j <= i), [-3, 0, 4], False),
    "to where its chunk ends": (lambda i, j, keep: (j < i // 4 * 4 + 4) & (j >= i), [0, 3, 4], False),
    "its chunk, moved": (lambda i, j, keep: (i + 1) // 4 == (j + 1) // 4, [-3, 3, 4, 1], False),
    "its chunk, moved back": (lambda i, j, keep: (i - 1) // 4 == (j - 1) // 4, [-3, 3, 4, 3], False),
    "chunks up to its own": (lambda i, j, keep: j // 4 <= i // 4, [1 - LENGTH, 3, 4, 0, 2], False),
    "its chunk and the one before": (
        lambda i, j, keep: (i // 4 - j // 4 <= 1) & (i // 4 >= j // 4), [-7, 3, 4, 0, 1], False,
    ),
    "the chunk before": (lambda i, j, keep: i // 4 == j // 4 + 1, [-7, -1, 4, 0, 1, -1], False),
    "a window in chunks": (lambda i, j, keep: (i // 4 == j // 4) & windowed(i, j, keep), [-2, 0, 4], False),
    "chunks with padding": (lambda i, j, keep: (i // 4 == j // 4) & keep[:, None, None, :], [-3, 3, 4], True),
    "chunks of two sizes": (lambda i, j, keep: (i // 4 == j // 4) & (i // 6 == j // 6), [-3, 3, 4], True),
    "chunks that begin elsewhere": (lambda i, j, keep: i // 4 == (j + 1) // 4, [-4, 2], True),
    "chunks behind padding": (
        lambda i, j, keep: ((i - _padding(keep)) // 4 == (j - _padding(keep)) // 4) & (j <= i), [-3, 0], True,
    ),
    "one chunk": (lambda i, j, keep: (i // 9 == j // 9) & (j <= i), [], False),
    "chunks, added": (lambda i, j, keep: torch.where(i // 4 == j // 4, 0.0, float("-inf")), [-3, 3, 4], False),
    "chunks, lowest": (
        lambda i, j, keep: torch.where((i // 4 == j // 4) & (j <= i), 0.0, torch.finfo(torch.float32).min),
        [-3, 0, 4], False,
    ),
    "chunks, expanded": (lambda i, j, keep: (i // 4 == j // 4)[None, None].expand(2, 4, -1, -1), [-3, 3, 4], False),
}  # fmt: skip
WHOLE = ("behind, and more", "chunks of two sizes", "chunks that begin elsewhere", "chunks behind padding")
LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "either": lambda i, j, keep: (j <= i) | (j < 3),
    "one or the other, with a hole": lambda i, j, keep: (i == j) | (i - j == 2),
    "one, or what the batch says": lambda i, j, keep: (i == j) | keep[:, None, None, :],
    "a window or a chunk": lambda i, j, keep: (i // 4 == j // 4) | ((i - j).abs() < 2),
    "none at all": lambda i, j, keep: torch.zeros(LENGTH, LENGTH).bool() & (i >= j),
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
    "chunks of each row": lambda i, j, keep: (i // (i + 1) == j // 4) & (i >= 0),
    "chunks that are truncated below 0": lambda i, j, keep: (
        (i - 3).div(4, rounding_mode="trunc") == (j - 3).div(4, rounding_mode="trunc")
    ),
    "other chunks": lambda i, j, keep: i // 4 != j // 4,
    "far away": lambda i, j, keep: (i - j).abs() > 2,
    "chunks of columns": lambda i, j, keep: (i // 4 == 0) | (j // 4 == 0),
    "chunks of other sizes": lambda i, j, keep: i // 4 == j // 3,
    "lowest for its own key": lambda i, j, keep: torch.where(j > i, 0.0, torch.finfo(torch.float32).min),
    "quotients that wrap around": lambda i, j, keep: (i.int() + (2**31 - 4)) // 4 == (j.int() + (2**31 - 4)) // 4,
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_masks_of_positions_are_read(name: str, heads: tuple[int, int]) -> None:
    mask, window, left = READ[name]
    program, model, batch = compiled(mask, heads=heads[0], keys=heads[1])
    for said in calls(program):
        assert said["causal"] == (not window or window[1] <= 0)
        assert list(said.get("window", [])) == window
        assert (said["mask"] is not None) == left
        assert said["gqa"] == (heads[1] < heads[0])
        assert type_of(said["k"]).shape[1] == heads[1]
        if left:
            assert type_of(said["mask"]).shape[-2:] == (LENGTH if name in WHOLE else 1, LENGTH)
    as_eager(program, model, batch)


@pytest.mark.parametrize("name", LEFT)
def test_other_masks_are_left(name: str) -> None:
    program, model, batch = compiled(LEFT[name])
    for said in calls(program):
        assert said["mask"] is not None
        assert not said["causal"]
        assert not said.get("window", 0)
    as_eager(program, model, batch)


@st.composite
def windows(draw: st.DrawFn) -> list[int]:
    """Back and ahead, with their own key or without; in chunks, some with those beside their own."""
    first = draw(st.integers(-170, 5))
    window = [first, draw(st.integers(max(first, -5), 170))]
    if draw(st.booleans()):
        size = draw(st.sampled_from((1, 2, 7, 32, 64, 65, 100, 149)))
        window += [size, draw(st.integers(0, size - 1)), draw(st.integers(0, 2)), draw(st.integers(0, 2))]
    return window


def seen_in(window: list[int], length: int) -> Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)
    first, last, chunk, shift, earlier, later = (*window, 0, 0, 0, 0)[:6]
    seen = (j - i >= first) & (j - i <= last)
    if chunk:
        apart = (j + shift) // chunk - (i + shift) // chunk
        seen &= (apart >= -earlier) & (apart <= later)
    return seen


@given(
    length=st.integers(1, 150),
    window=windows(),
    causal=st.booleans(),
    heads=st.sampled_from(((4, 2), (2, 2))),
    mask=st.sampled_from(("", "rows", "one row", "added")),
)
def test_a_window_means_what_its_mask_does(
    length: int, window: list[int], causal: bool, heads: tuple[int, int], mask: str
) -> None:
    """Of one device, with rows that see nothing; blocks of rows are shorter than the sequence, or not."""
    many, few = heads
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, many, length, 5), (2, many, length, 3), (2, few, length, 3), (2, few, length, 5)]
    g, q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    whole = seen_in(window, length)
    if causal:
        whole = whole.tril()
    pairs = int(whole.sum())
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
    found = SDPA(q, k, v, other, causal, None, many != few, window)
    grads = SDPA_BWD(g, q, k, v, other, *found, causal, None, many != few, need, window)
    for mine, want in zip((*found, *grads), (o, lse, *wanted), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)
    run = [Run(0, length, 0)]
    assert sum(count(tile, True) for tile in tiles(run, run, causal, window)) == pairs
    assert causal or Window(*window).pairs(length, length, 0) == pairs
