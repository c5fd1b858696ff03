"""GroupNorm in passes that a kernel each can do, so that what comes before and after it is done there too.

    means, squares = group_moments(x)                              of each sample's channel: mean, and squared distances
    mean, rstd = group_stats(means, squares, groups, size, eps)    of a group, whose channels have `size` positions
    y  = group_apply(x, mean, rstd, w, b, groups)                  (x - mean) * rstd * w + b, element by element
    hats, sums = group_sums(dy, x, mean, rstd, groups)             of dy * xhat and of dy, for each sample and channel
    mean_hat, mean_dy = group_means(hats, sums, w, groups, count)  of w * both over a group's `count` numbers
    dx = group_slope(dy, x, mean, rstd, w, mean_hat, mean_dy, groups)

x is [batch, channels, ...]; statistics are in float32. The gradients of w and b are `hats` and `sums`, added over the
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define

Pair = tuple[Tensor, Tensor]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[batch, groups, channels of a group, positions]."""
    return _wide(x).reshape(x.shape[0], groups, x.shape[1] // groups, -1)


def _per_group(x: Tensor, groups: int) -> Tensor:
    return _wide(x).reshape(-1, groups, 1, 1)


def _per_channel(x: Tensor, groups: int) -> Tensor:
    return _wide(x).reshape(1, groups, -1, 1)


def _hat(x: Tensor, mean: Tensor, rstd: Tensor, groups: int) -> Tensor:
    return (_grouped(x, groups) - _per_group(mean, groups)) * _per_group(rstd, groups)


def _moments(x: Tensor) -> Pair:
    mean = _wide(x).flatten(2).mean(-1)
    return mean, (_wide(x).flatten(2) - mean[..., None]).square().sum(-1)


def _stats(means: Tensor, squares: Tensor, groups: int, size: int, eps: float) -> Pair:
    """Of channels of one size, without cancellation (Chan)."""
    channel_means = means.reshape(len(means), groups, -1)
    mean = channel_means.mean(-1)
    spread = (channel_means - mean[..., None]).square().sum(-1) * size
    variance = (squares.reshape(channel_means.shape).sum(-1) + spread) / (channel_means.shape[-1] * size)
    return mean, torch.rsqrt(variance + eps)


def _apply(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> Tensor:
    y = _hat(x, mean, rstd, groups)
    y = y if weight is None else y * _per_channel(weight, groups)
    y = y if bias is None else y + _per_channel(bias, groups)
    return y.reshape(x.shape).to(x.dtype)


def _sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, groups: int) -> Pair:
    grad = _grouped(dy, groups)
    hats = (grad * _hat(x, mean, rstd, groups)).sum(-1)
    return hats.reshape(x.shape[:2]), grad.sum(-1).reshape(x.shape[:2])


def _means(hats: Tensor, sums: Tensor, weight: Tensor | None, groups: int, count: int) -> Pair:
    def mean(of: Tensor) -> Tensor:
        weighted = of if weight is None else of * _wide(weight)
        return weighted.reshape(len(of), groups, -1).sum(-1) / count

    return mean(hats), mean(sums)


def _slope(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, hat: Tensor, grad: Tensor, groups: int
) -> Tensor:
    dy_grouped = _grouped(dy, groups)
    dy_grouped = dy_grouped if weight is None else dy_grouped * _per_channel(weight, groups)
    dx = dy_grouped - _per_group(grad, groups) - _hat(x, mean, rstd, groups) * _per_group(hat, groups)
    return (dx * _per_group(rstd, groups)).reshape(x.shape).to(x.dtype)


def _new(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)


def _fake_moments(x: Tensor) -> Pair:
    return _new(x, *x.shape[:2]), _new(x, *x.shape[:2])


def _fake_stats(means: Tensor, squares: Tensor, groups: int, size: int, eps: float) -> Pair:
    return _new(means, len(means), groups), _new(means, len(means), groups)


def _fake_apply(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int
) -> Tensor:
    return x.new_empty(x.shape)


def _fake_sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, groups: int) -> Pair:
    return _new(x, *x.shape[:2]), _new(x, *x.shape[:2])


def _fake_means(hats: Tensor, sums: Tensor, weight: Tensor | None, groups: int, count: int) -> Pair:
    return _new(hats, len(hats), groups), _new(hats, len(hats), groups)


def _fake_slope(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, hat: Tensor, grad: Tensor, groups: int
) -> Tensor:
    return x.new_empty(x.shape)


GROUP_MOMENTS = define("group_moments(Tensor x) -> (Tensor, Tensor)", _moments, _fake_moments)
GROUP_STATS = define(
    "group_stats(Tensor means, Tensor squares, int groups, int size, float eps) -> (Tensor, Tensor)",
    _stats,
    _fake_stats,
)
GROUP_APPLY = define(
    "group_apply(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, int groups) -> Tensor",
    _apply,
    _fake_apply,
)
GROUP_SUMS = define(
    "group_sums(Tensor dy, Tensor x, Tensor mean, Tensor rstd, int groups) -> (Tensor, Tensor)", _sums, _fake_sums
)
GROUP_MEANS = define(
    "group_means(Tensor hats, Tensor sums, Tensor? weight, int groups, int count) -> (Tensor, Tensor)",
    _means,
    _fake_means,
)
GROUP_SLOPE = define(
    "group_slope(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor mean_hat, Tensor mean_dy, "
    "int groups) -> Tensor",
    _slope,
    _fake_slope,
)
