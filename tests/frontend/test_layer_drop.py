"""Layers dropped at random: a decision in each step, the same under every layout, and eager PyTorch's with it fixed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError

TOKENS = torch.arange(32).reshape(4, 8) % 16
LAYOUTS = {
    "dp2": ("dp=2", {"inputs": {"*": "dp"}}),
    "tp2": ("tp=2", {"params": {"layers.*.weight": "tp, -"}}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 1}}),
}


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


class Pair(Layer):
    def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(input), None


class Drops(nn.Module):
    kind: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(self.kind(8, 8) for _ in range(4))
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        for layer in self.layers:
            h = self.dropped(layer, h)
        return self.last(h + self.bias).square().mean()

    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        if torch.rand([]) < 0.5:
            return h
        return layer(h)


class Continues(Drops):
    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        for layer in self.layers:
            number = torch.rand([])
            if number < 0.5:
                continue
            h = layer(h)
        return self.last(h + self.bias).square().mean()


class Keeps(Drops):
    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        return layer(h) if torch.rand([]) >= 0.5 else h


class Flags(Drops):
    kind = Pair

    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        drop = torch.rand([]) < 0.5
        if not drop:
            outputs = layer(h)
        if drop:
            outputs = (h, None)
        return outputs[0]  # pyright: ignore[reportPossiblyUnboundVariable]


class Checkpoints(Drops):
    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        if torch.rand([]) < 0.5:
            return h
        return torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False)


def eager(model: nn.Module, drops: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    numbers: Iterator[float] = iter([0.0 if drop else 0.9 for drop in drops])
    with monkeypatch.context() as patched:
        patched.setattr(torch, "rand", lambda *_: torch.tensor(next(numbers)))
        return model(TOKENS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Drops, Continues, Keeps, Flags, Checkpoints])
def test_a_step_is_eagers_with_some_layers_dropped(
    kind: type[Drops], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = kind().double()
    mesh, plan = LAYOUTS[layout]
    program = shardc.compile(model, TOKENS, mesh=mesh, plan=plan)
    assert program.verify().ok
    trainer = program.launch()
    losses = {drops: eager(model, drops, monkeypatch).item() for drops in product((False, True), repeat=4)}
    taken: set[tuple[bool, ...]] = set()
    for _ in range(4):
        result = trainer.step(TOKENS)
        drops = min(losses, key=lambda one: abs(losses[one] - float(result.loss)))
        model.zero_grad()
        loss = eager(model, drops, monkeypatch)
        loss.backward()
        torch.testing.assert_close(result.loss.cpu(), loss.detach(), rtol=0, atol=1e-13)
        for name, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(result.grads[name], expected, rtol=0, atol=1e-13)
        taken.add(drops)
    assert len(taken) > 1, "each step decides anew"


def test_every_layout_decides_alike() -> None:
    torch.manual_seed(0)
    model = Drops().double()
    losses = []
    for layout in ("dp2", "tp2"):
        mesh, plan = LAYOUTS[layout]
        trainer = shardc.compile(model, TOKENS, mesh=mesh, plan=plan).launch()
        losses.append([float(trainer.step(TOKENS).loss) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class More(Drops):
    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        if torch.rand([]) < 0.5:
            return h
        return layer(h) + self.bias


class None_(Drops):
    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        return h * 2 if torch.rand([]) < 0.5 else h


class Narrower(Drops):
    def dropped(self, layer: nn.Module, h: Tensor) -> Tensor:
        return h if torch.rand([]) < 0.5 else layer(h[:, :4]).repeat(1, 2, 1)


class Counts(Drops):
    def forward(self, tokens: Tensor) -> Tensor:
        h, kept = self.table(tokens), 0
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                continue
            h, kept = layer(h), kept + 1
        return self.last(h * (1 + kept)).square().mean()


@pytest.mark.parametrize("kind", [More, None_, Narrower, Counts])
def test_what_is_not_one_layer_is_refused(kind: type[Drops]) -> None:
    with pytest.raises(ShardcError) as caught:
        shardc.compile(kind(), TOKENS, mesh="dp=2")
    (found,) = caught.value.diagnostics
    assert found.code == "SC101"
    assert "test_layer_drop.py:" in (found.location or "")
    assert "rand" in (found.source_text or "")
    assert "layer(x)" in (found.hint or "")


class Normed(nn.Module):
    """A layer with statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.norm(x))


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Normed(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in [self.layer]:
            if torch.rand([]) < 0.5:
                continue
            x = layer(x)
        return self.head(x).square().mean()


def test_a_layer_that_is_dropped_counts_no_batch() -> None:
    torch.manual_seed(0)
    model, x = WithStatistics().double(), torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        dropped = model.head(x).square().mean()
    trainer = shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"*": "dp"}}).launch()
    losses = torch.stack([torch.as_tensor(trainer.step(x).loss) for _ in range(12)])
    run = int((losses - dropped).abs().gt(1e-12).sum())
    assert 0 < run < 12
    assert trainer.state_dict()["layer.norm.num_batches_tracked"] == run
