"""The reference kernels of the `shardc::` composites: against torch, against published vectors, shard against whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_triton.base.random import RANDOM_UNIFORM, least_word, philox
from shardc.ir.ops.attention import SDPA, SDPA_BWD, attention
from shardc.ir.ops.grouped import GROUPED_MM, GROUPED_MM_WGRAD, grouped_mm
from shardc.ir.ops.linear import LINEAR, LINEAR_DGRAD, LINEAR_WGRAD, linear


def reference_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_op_equals_torch(kind: str, heads: int) -> None:
    shapes = (4, 5), (heads, 7), (heads, 7)
    q, k, v = (torch.randn(2, h, s, 8, dtype=torch.float64, requires_grad=True) for h, s in shapes)
    mask = {"bool": torch.rand(2, 1, 5, 7) > 0.4, "float": torch.randn(1, 4, 5, 7, dtype=torch.float64)}.get(kind)
    operands = [q, k, v]
    if kind == "bool":
        assert mask is not None
        mask[..., 0] = True
    if kind == "float":
        assert mask is not None
        operands.append(mask.requires_grad_())
    expected = reference_attention(q, k, v, mask, kind == "causal")
    g = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, operands, g)
    with torch.no_grad():
        o, lse = SDPA(q, k, v, mask, kind == "causal", None, True)
        got = SDPA_BWD(g, q, k, v, mask, o, lse, kind == "causal", None, True, kind == "float")
    torch.testing.assert_close(o, expected)
    for mine, theirs in zip(got, grads, strict=False):
        torch.testing.assert_close(mine, theirs)
    assert got[3].numel() == (mask.numel() if kind == "float" and mask is not None else 0)


def test_attention_row_without_keys_is_zero() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    o, lse = SDPA(q, k, v, mask, False, None, False)
    assert torch.equal(o[:, :, 1], torch.zeros(1, 2, 4))
    assert (lse[:, :, 1] == float("-inf")).all()
    assert all(t.isfinite().all() for t in SDPA_BWD(o, q, k, v, mask, o, lse, False, None, False, False))


@pytest.mark.parametrize("op", ["linear", "attention", "grouped"])
def test_fake_strides_are_those_of_the_kernel(op: str) -> None:
    q = torch.randn(2, 3, 4, 8)
    bool_mask = torch.ones(4, 4)
    calls: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
        "linear": [
            (LINEAR, (q.transpose(0, 1), torch.randn(5, 8))),
            (LINEAR_DGRAD, (q, torch.randn(8, 5))),
            (LINEAR_WGRAD, (q, q)),
        ],
        "attention": [
            (SDPA, (q, q, q, None, True, None, False)),
            (SDPA_BWD, (q, q, q, q, bool_mask, q, q[..., 0], True, None, False, True)),
        ],
        "grouped": [
            (GROUPED_MM, (torch.randn(6, 3), torch.randn(2, 3, 5), torch.tensor([2, 6]))),
            (GROUPED_MM_WGRAD, (torch.randn(6, 3), torch.randn(6, 5), torch.tensor([2, 6]))),
        ],
    }
    for target, args in calls[op]:
        real = target(*args)
        meta = target(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        for r, m in zip(*((t,) if isinstance(t, Tensor) else t for t in (real, meta)), strict=True):
            assert (r.shape, r.stride(), r.dtype) == (m.shape, m.stride(), m.dtype)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_differentiable_forms() -> None:
    x, w, b = leaf(2, 3, 4), leaf(5, 4), leaf(5)
    assert torch.autograd.gradcheck(linear, (x, w, b))
    assert torch.autograd.gradcheck(linear, (x, leaf(4)))
    assert torch.autograd.gradcheck(lambda x, w: linear(x, w, None), (x[0, 0], w))
    q, k = leaf(1, 4, 3, 2), leaf(1, 2, 5, 2)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, k))
    assert torch.autograd.gradcheck(lambda q, m: attention(q, q, q, m), (q, leaf(3, 3)))
    offs = torch.tensor([2, 2, 6])  # the second group is empty
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b, offs), (leaf(7, 3), leaf(3, 3, 2)))


def philox_by_the_paper(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's own integers, from the paper's figure and not from ours."""
    (l0, r0, l1, r1), (k0, k1) = counter, key
    for turn in range(10):
        high0, low0 = divmod(0xD2511F53 * l0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * l1, 1 << 32)
        bump0, bump1 = (k0 + turn * 0x9E3779B9) % (1 << 32), (k1 + turn * 0xBB67AE85) % (1 << 32)
        l0, r0, l1, r1 = high1 ^ r0 ^ bump0, low1, high0 ^ r1 ^ bump1, low0
    return l0, r0, l1, r1


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The vectors published with Random123, all four words."""
    assert philox_by_the_paper(counter, key) == words
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    got = philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(int(word) for word in got) == words


def number(seed: int, op_id: int, index: int) -> float:
    """What `random_uniform` says that element `index` is."""
    counter = (index >> 2) % (1 << 32), op_id, index >> 34, 0
    word = philox_by_the_paper(counter, (seed % (1 << 32), (seed >> 32) % (1 << 32)))[index & 3]
    return float(torch.tensor(word if word < 1 << 31 else (1 << 32) - 1 - word).float() * 4.6566127342e-10)


@pytest.mark.parametrize("first", [0, 1, 2, 3, (1 << 34) - 5, (1 << 50) + 2])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 8), (8, 1)),  # contiguous: one run
        ((3, 7), (7, 1)),  # an odd one
        ((3, 8), (16, 1)),  # columns of a wider tensor, runs that begin at multiples of 4
        ((3, 5), (9, 1)),  # and wherever they like
        ((2, 3, 4), (40, 4, 1)),  # dims that are one run, and one that is not
        ((4, 3), (1, 4)),  # transposed
        ((5, 1), (3, 1)),
        ((2, 4), (0, 1)),  # the same row twice
        ((), ()),
        ((0, 4), (4, 1)),
    ],
)
def test_numbers_by_their_definition(shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> None:
    seed, op_id = -(5 << 40) + 3, 17
    got = uniform(list(shape), list(strides), first, op_id, seed)
    assert got.shape == shape
    for at in itertools.product(*map(range, shape)):
        index = first + sum(i * stride for i, stride in zip(at, strides, strict=True))
        assert float(got[at]) == number(seed, op_id, index)


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.25, 0.5, 0.9, 1.0 - 2**-24, 1.0])
def test_the_least_word_of_a_probability(p: float) -> None:
    """Comparing words is comparing numbers."""
    least = least_word(p)
    around = torch.tensor([word for word in (0, least - 1, least, least + 1, (1 << 31) - 1) if 0 <= word < 1 << 31])
    assert torch.equal(around >= least, around.float() * 4.6566127342e-10 >= p)
    assert (least == 0) == (p == 0.0)
    assert (least == 1 << 31) == (p == 1.0)


def uniform(shape: list[int], strides: list[int], offset: int = 0, op_id: int = 1, seed: int = 7) -> Tensor:
    return RANDOM_UNIFORM(torch.tensor(seed), op_id, shape, strides, torch.tensor(offset))


def test_a_shard_draws_its_part_of_the_whole() -> None:
    whole = uniform([6, 16], [16, 1])
    assert torch.equal(uniform([6, 8], [16, 1], offset=8), whole[:, 8:])
    assert torch.equal(uniform([2, 16], [16, 1], offset=32), whole[2:4])
    assert torch.equal(uniform([3, 7], [32, 1], offset=19), whole[1::2, 3:10])
    assert torch.equal(uniform([6, 5], [16, 3], offset=2), whole[:, 2::3])
    assert not torch.equal(uniform([6, 16], [16, 1], op_id=2), whole)
    assert not torch.equal(uniform([6, 16], [16, 1], seed=8), whole)


def test_uniforms_are_uniform() -> None:
    u = uniform([300, 1000], [1000, 1])
    assert u.dtype == torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    histogram = torch.histc(u, 50, 0, 1)
    assert ((histogram - 6000) ** 2 / 6000).sum() < 100  # chi squared with 49 degrees of freedom
    assert abs(float(torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1])) < 0.01
