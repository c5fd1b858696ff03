"""Weight norm, complex values and Fourier transforms: sharded, no call runs whole, and all equals the single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import shardc
from shardc import Mesh

aten = torch.ops.aten
V, G = "layer.parametrizations.weight.original1", "layer.parametrizations.weight.original0"


class Linear(nn.Module):
    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.layer = weight_norm(nn.Linear(8, 6), dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = weight_norm(nn.Conv1d(4, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Fourier(nn.Module):
    """Filtering along the sequence, as FNet and long convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(4, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(self.layer(x), dim=1)
        y = torch.fft.irfft(y * torch.view_as_complex(self.filter), n=6, dim=1)
        return torch.fft.fft2(y).real.square().mean()


class Conjugate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.layer(x).unflatten(1, (4, 2)))
        return (z * z.conj().roll(1, 1)).imag.square().sum() + z.conj().imag.sum()


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
CASES: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
    (Linear(), X, {"params": {V: "tp, -", G: "tp, -"}}),
    (Linear(), X, {"params": {V: "-, tp"}}),
    (Linear(dim=1), X, {"params": {V: "-, tp", G: "-, tp"}}),
    (Linear(dim=1), X, {"params": {V: "tp, -"}}),
    (Conv(), torch.randn(4, 4, 9), {"params": {V: "-, tp, -"}}),
    (Fourier(), torch.randn(4, 6, 8), {"params": {"layer.weight": "tp, -"}}),
    (Conjugate(), X, {"params": {"layer.weight": "tp, -"}}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "x", "plan"), CASES, ids=lambda one: type(one).__name__)
def test_sharded_equals_the_single_device(model: nn.Module, x: Tensor, plan: dict[str, Any]) -> None:
    plan = {"inputs": {"x": "dp"}, **plan}
    program = shardc.compile(model, (x,), mesh=Mesh(dp=2, tp=2), plan=plan)
    assert not [d for d in program.diagnostics if d.code == "SC301"]
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype) -> None:
    report = shardc.compile(Linear().to(dtype), (X.to(dtype),), mesh=Mesh(dp=2), plan={"inputs": {"x": "dp"}}).verify()
    assert report.ok, str(report)


def test_a_part_of_the_norm_is_a_pending_sum() -> None:
    """Of a weight that is split within its rows only the squares' sums are sent, and never the weight."""
    program = shardc.compile(Linear(), (X,), mesh=Mesh(tp=2), plan={"params": {V: "-, tp"}, "inputs": {"x": "-, tp"}})
    assert {c.kind for c in program.collectives()} <= {"all_reduce"}
    rows, batch = 6 * 4, 8 * 6 * 4
    assert {c.payload_bytes for c in program.collectives()} <= {rows, batch}


def test_conjugates_are_made_at_once() -> None:
    """What a collective sends is memory: a lazy conjugate's is not conjugated."""
    program = shardc.compile(Conjugate(), (X,), mesh=Mesh(dp=2), plan={"inputs": {"x": "dp"}})
    targets = {node.target for node in program.reference.calls()}
    assert aten.conj_physical.default in targets
    assert targets.isdisjoint({aten._conj.default, aten._neg_view.default, aten.resolve_conj.default})


def test_complex_numbers_stay_exact(tmp_path: Path) -> None:
    """Numbers of the model's code, which no tensor holds: in the graph, in its backward, and in a file."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ self.w) * (0.1 + 0.7j) + 1j / 3).abs().sum()

    x = torch.randn(4, 8, dtype=torch.complex128)
    program = shardc.compile(Turned(), (x,), mesh=Mesh(dp=2), plan={"inputs": {"x": "dp"}})
    program.save(tmp_path / "turned.json")
    for one in (program, shardc.Program.load(tmp_path / "turned.json")):
        report = one.verify()
        assert report.ok, str(report)
