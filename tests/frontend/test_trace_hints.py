"""Where a module of torch looks at values, the error names the option that keeps it from it; and that works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardc import ShardcError
from shardc.frontend.trace import trace


class Normed(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().mean()


SEQUENCE = torch.randn(2, 5, 8)
Make = Callable[..., nn.Module]
CASES: dict[str, tuple[Make, dict[str, object], list[dict[str, object]], tuple[Tensor, ...], str]] = {
    "batch_norm": (Normed, {"momentum": None}, [{"momentum": 0.1}], (torch.randn(4, 8),), "momentum, such as 0.1"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_option_is_named_and_helps(case: str) -> None:
    make, wrong, right, batch, said = CASES[case]
    with pytest.raises(ShardcError) as caught:
        trace(make(**wrong), batch)
    (found,) = caught.value.diagnostics
    assert found.code == "SC101"
    assert said in (found.hint or "")
    assert "torch/nn/modules/" in (found.cause or "")
    assert "test_trace_hints.py:" in (found.location or "")
    for options in right:
        trace(make(**options), batch)


class Branch(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.sum() > 0 else -input)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[..., 0] > 0
        return torch.cat([expert(x[chosen if n else ~chosen]) for n, expert in enumerate(self.experts)])


def test_experts_are_spoken_of_where_there_are_some() -> None:
    for model, said in ((Routed(), True), (Branch(), False)):
        with pytest.raises(ShardcError) as caught:
            trace(model, SEQUENCE, lambda y, _: y.sum())
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.code == "SC101"
        assert ("set_experts_implementation('grouped_mm')" in (diagnostic.hint or "")) == said


def test_a_function_of_ones_own_is_not_blamed_on_torch() -> None:
    """A module of torch's calls it, and it is what looks at values."""

    def activation(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True)
    with pytest.raises(ShardcError) as caught:
        trace(layer, SEQUENCE, lambda y, _: y.sum())
    (found,) = caught.value.diagnostics
    assert found.source_text == "return x if x.sum() > 0 else -x"
    assert "torch/nn/modules/" not in (found.cause or "")
    assert (found.hint or "").startswith("choose with torch.where")
