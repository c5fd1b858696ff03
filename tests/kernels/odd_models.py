"""Small models that nobody tuned the fusion pass for, and what is easily forgotten in each: see `MODELS`.

A function of a model's `w`, its parameters, and of its batch `x` is a model here; it returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(2)
        self.w = nn.ParameterDict({k: nn.Parameter(torch.randn(s, generator=drawn) * 0.3) for k, s in shapes.items()})
        self.loss = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.w, x)


@dataclass(frozen=True)
class Odd:
    model: Callable[[], nn.Module]
    x: Tensor
    mesh: str = "dp=1"
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])


MODELS: dict[str, Odd] = {}


def odd(
    *sizes: tuple[int, ...], x: Tensor = X, mesh: str = "dp=1", **plan: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Parameters are called a, b, c..."""
    shapes = dict(zip("abcdefgh", sizes, strict=False))

    def add(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        MODELS[forward.__name__] = Odd(lambda: Model(forward, shapes), x, mesh, plan)
        return forward

    return add


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


@odd((11, 8), (8,), (8, 24), (8, 8), x=torch.arange(30).view(6, 5) % 11)
def transformer_with_tied_weights(w: Weights, x: Tensor) -> Tensor:
    """Causal by hand, softcapped, its embedding its head."""
    h = F.embedding(x, w["a"])
    q, k, v = (rms(h, w["b"]) @ w["c"]).chunk(3, -1)
    i = torch.arange(5)
    scores = (q @ k.transpose(1, 2) / 8**0.5 - (i[:, None] - i).abs() * 0.5).masked_fill(i[:, None] < i, float("-inf"))
    h = h + scores.softmax(-1) @ v @ w["d"]
    logits = 30 * torch.tanh(h @ w["a"].T / 30)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten(), label_smoothing=0.1, ignore_index=3)


@odd((8, 3, 3, 3), (8,), (8,), x=torch.randn(2, 3, 7, 5))
def convolution_with_group_norm(w: Weights, x: Tensor) -> Tensor:
    h = F.silu(F.group_norm(F.conv2d(x, w["a"], padding=1), 4, w["b"], w["c"]))
    return h.mean((2, 3)).exp().mean() + F.avg_pool2d(h, 2).square().mean()


@odd((8, 3, 3, 3), (8,), (8,), x=torch.randn(4, 3, 6, 5))
def batch_norm(w: Weights, x: Tensor) -> Tensor:
    h = F.batch_norm(F.conv2d(x, w["a"]), None, None, w["b"], w["c"], training=True)
    return F.relu(h).amax((2, 3)).square().sum() + F.gelu(h).mean()


@odd((8, 6), (3, 8))
def variational(w: Weights, x: Tensor) -> Tensor:
    """Two losses, one of sums over the last dim and a mean over the others."""
    mean, logvar = (x @ w["a"]).chunk(2, -1)
    z = mean + (0.5 * logvar).exp() * x[..., :3].sin()
    kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1).mean()
    return F.binary_cross_entropy_with_logits(z @ w["b"], x.sigmoid()) + 0.1 * kl


@odd((8, 4), (4, 8, 8), x=torch.randn(30, 8))
def mixture(w: Weights, x: Tensor) -> Tensor:
    """Experts are dense, gates of all but the best two zero; their loads are balanced."""
    logits = x @ w["a"]
    gates = logits.softmax(-1)
    best = gates.topk(2, -1).values[:, -1:]
    kept = torch.where(gates >= best, gates, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    y = torch.einsum("nd,edf,ne->nf", x, w["b"], kept)
    load = (gates > best).float().mean(0)
    return y.tanh().square().mean() + 4 * (load * gates.mean(0)).sum() + logits.logsumexp(-1).square().mean()


@odd((8, 24), (8, 24), (24,), x=torch.randn(64, 5, 8))
def recurrent(w: Weights, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(1, 4):
        r, z, n = (x[:, t] @ w["a"] + w["c"]).chunk(3, -1)
        hr, hz, hn = (h @ w["b"]).chunk(3, -1)
        gate = (z + hz).sigmoid()
        h = (1 - gate) * torch.tanh(n + (r + hr).sigmoid() * hn) + gate * h
    return h.square().mean()


@odd((8, 70), (70, 50), x=torch.randn(40, 8), precision="fp16")
def mean_of_a_product_in_float16(w: Weights, x: Tensor) -> Tensor:
    """The gradient of the mean is a number, stored over the whole product's."""
    return (torch.relu(x @ w["a"]) @ w["b"]).mean()


@odd((8, 70), (70, 30), x=torch.randn(40, 8), mesh="dp=2", inputs={"x": "dp, -"}, precision="bf16")
def mean_of_a_product_on_two(w: Weights, x: Tensor) -> Tensor:
    y = torch.relu(x @ w["a"]) @ w["b"]
    return y.mean() + y.square().mean() * 0.1 - y.mean(0).sum()


@odd((8,), (6, 1, 1), (), (5, 1), (8, 3))
def smaller_than_what_is_stored(w: Weights, x: Tensor) -> Tensor:
    """Views that repeat a number, a row, a column or something between, then arithmetic, then a product."""
    every = [-w["a"], (-w["b"]).tanh(), w["c"] / 30, w["d"] * 2]
    repeated = sum(((p.expand(6, 5, 8) * 2).exp() @ w["e"]).square().mean() for p in every)
    alike = (x.sum((0, 1)).neg() * w["a"]).expand(6, 5, 8).sin() @ w["e"]
    return repeated + alike.mean()


@odd((2048,), (2048, 2), x=torch.randn(6, 2048))
def long_rows_with_a_number(w: Weights, x: Tensor) -> Tensor:
    y = (w["a"] * x).softmax(-1)
    return ((y * y.amax(-1, keepdim=True)) @ w["b"]).exp().mean() + y.max(-1, keepdim=True)[0].expand(6, 2048).sum()


@odd((8,), x=X * 300, precision="fp16")
def float16_that_overflows(w: Weights, x: Tensor) -> Tensor:
    h = (x * w["a"]).half() * 300
    seen = torch.isfinite(h) & (h < 6e4) | torch.isnan(h) | torch.isinf(h * h)
    return (torch.where(seen, x, 0.0) * w["a"]).sum() + (h.clamp(-100, 100).float() * w["a"]).mean()


@odd((8,))
def integers_that_wrap(w: Weights, x: Tensor) -> Tensor:
    i = torch.arange(8, dtype=torch.int32)
    mixed = (i * 1103515245 + 12345) * i
    byte = torch.arange(40).to(torch.uint8).view(5, 8) * 7
    small = (x > 0).to(torch.int8) * 100
    keep = (mixed > 0) | (byte - 201 < byte) | (small + small < 0)
    return (x * w["a"] * keep).sum() + (x * (byte + byte) * w["a"]).mean() + ((small * 3).float() * w["a"]).sum()


@odd((8,), (8,))
def masks(w: Weights, x: Tensor) -> Tensor:
    """Of lengths, of pairs of bools, of what is no number."""
    y = x * w["a"]
    a, b = y > 0, x > 0.5
    length = torch.arange(5) < torch.tensor([1, 5, 3, 2, 4, 5])[:, None]
    nan = torch.isnan(torch.where(a, y.sqrt(), y)) & torch.isnan(w["b"].sum() * 0)
    kept = torch.where(nan, 0.0, y) * (a + b) * torch.maximum(a, ~b)
    return ((kept * length[..., None]).sum(1) / length.sum(1, keepdim=True)).square().sum()


@odd((8,), (8,))
def running_sums(w: Weights, x: Tensor) -> Tensor:
    y = x * w["a"]
    return y.cumsum(1).exp().mean() + (y.cumsum(-1) / torch.arange(1, 9)).square().sum() + (2**y * w["b"]).sum()


@odd((8,))
def odd_means(w: Weights, x: Tensor) -> Tensor:
    y = x * w["a"]
    return (
        y.mean(1).exp().sum()
        + y.mean((0, 2)).tanh().sum()
        + y.var((0, 1)).sum()
        + y.std()
        + y.mean(0, keepdim=True).mul(x).mean()
    )


@odd((8,))
def rotations(w: Weights, x: Tensor) -> Tensor:
    y = x * w["a"]
    angle = torch.arange(5.0)[:, None] / 100 ** (torch.arange(4) / 4)
    left, right = y.chunk(2, -1)
    turned = torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)
    return turned.exp().mean() + torch.cat([y, y.exp(), y[:, :2]], 1).square().sum()


@odd((8,), (8,))
def two_norms_and_a_similarity(w: Weights, x: Tensor) -> Tensor:
    y = F.layer_norm(x * w["a"], (8,), w["b"], None)
    return F.cosine_similarity(y, x, dim=-1).sum() + (F.normalize(y, dim=-1) * w["a"]).exp().mean()


@odd((8,), (8, 8), precision="bf16", x=torch.randn(12, 8))
def dropped_in_bfloat16(w: Weights, x: Tensor) -> Tensor:
    h = F.dropout(F.gelu(x @ w["b"] + w["a"]), 0.25)
    return F.mse_loss(F.layer_norm(x + h, (8,)), x) + (h > 0.1).float().mean()


@odd((8, 7), x=torch.randn(30, 8), mesh="dp=2", inputs={"x": "dp, -"})
def two_losses(w: Weights, x: Tensor) -> Tensor:
    y, target = x @ w["a"], (x[:, 0] > 0).long() * 3
    z = y.logsumexp(-1).square().mean()
    return F.cross_entropy(y, target) + 1e-2 * z + F.cross_entropy(y, y.detach().softmax(-1))


@odd((8,))
def pairs(w: Weights, x: Tensor) -> Tensor:
    y = x * w["a"]
    apart = (y[:, :, None] - y[:, None]).square().sum(-1)
    i, j = torch.meshgrid(torch.arange(5), torch.arange(8), indexing="ij")
    return apart.neg().exp().sum() + (y * ((i + j) % 2 == 0)).sum() + (y * (j.float() / (i + 1)).neg().exp()).mean()
