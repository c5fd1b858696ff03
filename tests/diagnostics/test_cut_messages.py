"""What is said of steps that cannot be cut into stages, word for word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc import ShardcError
from shardc.partition.cut import cut
from tests.partition.whole import step


class Layered(nn.Module):
    """Its last layer starts from a buffer that its first one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.seen.clone()
        for layer in self.encoder:
            x = layer(x)
            self.seen.mul_(0.9).add_(x.detach().mean(0))
        for layer in self.decoder:
            x = layer(x)
        return x * before


class Shared(nn.Module):
    """One batch norm, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.h[1](self.norm(self.h[0](x)).tanh())
        return self.h[3](self.norm(self.h[2](x)))


# By golden file: the stages, and where they are to begin.
CASES: dict[str, tuple[int | None, list[str]]] = {
    "too_many_stages": (99, []),
    "stages_and_split": (2, ["encoder.1", "decoder.0"]),
    "unknown_module": (None, ["decodr.1"]),
    "several_modules": (None, ["1"]),
    "wrong_order": (None, ["decoder.1", "decoder.0"]),
    "first_module": (None, ["encoder.0"]),
    "buffer_of_two_stages": (None, ["decoder.0"]),
    "batch_norm_of_two_stages": (None, ["h.2"]),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, golden: Callable[[str, str], None]) -> None:
    stages, split = CASES[name]
    torch.manual_seed(0)
    model = Shared() if name == "batch_norm_of_two_stages" else Layered()
    program: Any = step(model, torch.randn(4, 4), 2, loss=lambda y, _: (y * y).mean())
    with pytest.raises(ShardcError) as refused:
        cut(program.body, stages, split)
    golden(f"pipeline/{name}.txt", str(refused.value))


@pytest.mark.parametrize("model", [Layered, Shared])
def test_where_it_may_be_cut_it_is(model: type[nn.Module]) -> None:
    """The hint of a buffer of two stages names places to cut that do."""
    program: Any = step(model(), torch.randn(4, 4), 2, loss=lambda y, _: (y * y).mean())
    with pytest.raises(ShardcError) as refused:
        cut(program.body, 2 if model is Layered else None, [] if model is Layered else ["h.2"])
    hint = refused.value.diagnostics[0].hint or ""
    places = hint.partition("split at ")[2].split(" or ")
    assert places
    for place in places:
        cut(program.body, None, [place])
