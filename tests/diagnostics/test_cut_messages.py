"""What is said of steps that cannot be cut into stages, word for word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc import ShardcError
from shardc.stages.cut import cut
from tests.stages.whole import step


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


# By golden file: the stages, and where they are to begin.
CASES: dict[str, tuple[int | None, list[str]]] = {
    "too_many_stages": (99, []),
    "stages_and_split": (2, ["encoder.1", "decoder.0"]),
    "unknown_module": (None, ["decodr.1"]),
    "several_modules": (None, ["1"]),
    "wrong_order": (None, ["decoder.1", "decoder.0"]),
    "first_module": (None, ["encoder.0"]),
    "buffer_of_two_stages": (None, ["decoder.0"]),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, golden: Callable[[str, str], None]) -> None:
    stages, split = CASES[name]
    torch.manual_seed(0)
    program: Any = step(Layered(), torch.randn(4, 4), 2, loss=lambda y, _: (y * y).mean())
    with pytest.raises(ShardcError) as refused:
        cut(program.body, stages, split)
    golden(f"pipeline/{name}.txt", str(refused.value))
