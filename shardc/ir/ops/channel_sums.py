"""A channel's sums over a batch, from the moments of each sample's part (`group_moments`), which read x once.

    totals = channel_totals(means, size, dims)                 sum(x), where each part has `size` positions
    about  = channel_squares(means, squares, centre, size)     sum((x - centre)^2)

`means` and `squares` are [batch, channels], the results and `centre` [1, channels, 1, ...]. The second is the sum of
`squares + size * (means - centre)^2` (Chan), exact for any centre: on a shard of the batch it is the mean of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define


def _kept(x: Tensor, dims: int) -> Tensor:
    return x.reshape(1, -1, *[1] * (dims - 2))


def _totals(means: Tensor, size: int, dims: int) -> Tensor:
    return _kept(means.sum(0) * size, dims)


def _squares(means: Tensor, squares: Tensor, centre: Tensor, size: int) -> Tensor:
    deviations = (means - centre.reshape(1, -1)).square()
    return (squares + deviations * size).sum(0).reshape(centre.shape)


def _fake_totals(means: Tensor, size: int, dims: int) -> Tensor:
    return means.new_empty((1, means.shape[1], *[1] * (dims - 2)))


def _fake_squares(means: Tensor, squares: Tensor, centre: Tensor, size: int) -> Tensor:
    return torch.empty_like(centre)


CHANNEL_TOTALS = define("channel_totals(Tensor means, int size, int dims) -> Tensor", _totals, _fake_totals)
CHANNEL_SQUARES = define(
    "channel_squares(Tensor means, Tensor squares, Tensor centre, int size) -> Tensor", _squares, _fake_squares
)
