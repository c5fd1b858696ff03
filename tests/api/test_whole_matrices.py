"""Muon and Adafactor under a mesh: eager PyTorch's steps, state stored as ZeRO says, and what they send."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from shardc.ir.graph import info, type_of
from shardc.ir.types import TensorType

PLAN: dict[str, Any] = {
    "inputs": {"input_ids": "dp, -", "labels": "dp, -"},
    "params": {
        "**.c_attn.weight": "-, 3*tp",
        "**.attn.c_proj.weight": "tp, -",
        "**.c_fc.weight": "-, tp",
        "**.mlp.c_proj.weight": "tp, -",
    },
    "storage": {"zero": 1, "axes": ["dp"]},
}
LAYERS, WIDTH = 4, 64  # narrower, a gather sends little more, in fewer starts
MATRICES = WIDTH * (3 + 1 + 4 + 4) * WIDTH * LAYERS  # elements


class Layers(nn.Module):
    """Four matrices of one shape, and a tall and a wide one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.down(self.up(x).tanh()).square().mean()


def muon(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "wte" not in n and "wpe" not in n}
    rest = [p for n, p in model.named_parameters() if n not in matrices]
    return [torch.optim.Muon(list(matrices.values()), lr=0.05, **options), torch.optim.AdamW(rest, lr=0.01)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=0.1, weight_decay=0.1)]


@lru_cache
def of_gpt2() -> shardc.Program:
    torch.manual_seed(0)
    model, batch = gpt2(batch=4, seq=8, layers=LAYERS, vocab=32, heads=4, width=WIDTH)
    optimizer: Any = muon(model)
    return shardc.compile(model, batch, mesh="dp=2, tp=2", plan=PLAN, optimizer=optimizer)


def sent(program: shardc.Program, phase: str) -> Counter[tuple[str, tuple[str, ...]]]:
    sizes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for moved in program.collectives():
        if moved.phase == phase:
            sizes[moved.kind, moved.axes] += moved.bytes_per_step
    return sizes


def test_a_rank_computes_its_share_of_the_matrices() -> None:
    """A stack of four matrices of each of four shapes, there in bfloat16 and back: over each axis half of a rank's
    quarter. Parameters are gathered over dp as ZeRO-1 gathers AdamW's, in float32."""
    program = of_gpt2()
    assert not program.diagnostics
    there_and_back = 2 * (MATRICES // 4 // 2) * 2
    calls = Counter(c.kind for c in program.collectives() if c.phase == "opt" and "muon" in c.value)
    assert calls == {"all_to_all": 4 * 2 * 2}
    opt = sent(program, "opt")
    assert opt["all_to_all", ("dp",)] == opt["all_to_all", ("tp",)] == there_and_back
    assert program.model is not None
    others = sum(p.numel() for n, p in program.model.named_parameters() if p.ndim == 1 or "wte" in n or "wpe" in n)
    biases = (3 + 4) * WIDTH * LAYERS  # those of c_attn and c_fc lie over tp
    assert opt["all_gather", ("dp",)] == (MATRICES // 2 + others - biases // 2) // 2 * 4
    assert len(opt) == 3
    products = [n for n in program.body.calls() if info(n).optimizer and "bmm" in str(n.target)]
    assert len(products) == 4 * 5 * 3
    assert {type_of(n).local_shape(program.body.mesh)[0] for n in products} == {1}
    shapes = [(WIDTH, multiple * WIDTH) for multiple in (3, 1, 4, 4)]
    newton_schulz = [5 * 2 * short**2 * (long + short + long) for short, long in shapes]
    assert program.flops().of_phase("opt") == sum(newton_schulz)  # one of each shape, of four


def test_state_is_stored_as_zero_says() -> None:
    program = of_gpt2()
    inputs = {port.name: type_of(n) for port, n in zip(program.body.inputs, program.body.placeholders, strict=True)}
    momenta = [type for name, type in inputs.items() if name.endswith("momentum_buffer")]
    assert len(momenta) == 4 * LAYERS
    assert all(type.axes == {"dp", "tp"} for type in momenta)


def test_a_collective_names_the_optimizer() -> None:
    program = of_gpt2()
    text = str(program.explain(next(c.value for c in program.collectives() if "muon" in c.value)))
    assert "Muon updates by whole matrices, shared out over dp" in text


BATCH: dict[str, Any] = {"inputs": {"x": "dp, -"}}
TP: dict[str, Any] = {"params": {"layers.*.weight": "-, tp", "up.weight": "tp, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", BATCH),
    "tp2": ("tp=2", TP),
    "zero1": ("dp=2, tp=2", BATCH | TP | {"storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 0.1}),
    "zero3": ("dp=2", BATCH | {"storage": {"zero": 3, "axes": ["dp"]}, "nonfinite": "skip"}),
    "dp3": ("dp=3", BATCH | {"storage": {"zero": 2, "axes": ["dp"]}}),
    "pp2": ("pp=2, dp=2", BATCH | {"storage": {"zero": 1, "axes": ["dp"]}, "pipeline": {"microbatches": 2}}),
    "bf16": ("dp=2", BATCH | {"storage": {"zero": 1, "axes": ["dp"]}, "precision": "bf16"}),
}
MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon": muon,
    "momentum": lambda model: muon(model, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "adafactor": adafactor,
}


def eager(make: Callable[[nn.Module], Any], x: Tensor, clip: float | None) -> tuple[Layers, Layers]:
    torch.manual_seed(0)
    before, model = Layers(), Layers()
    model.load_state_dict(before.state_dict())
    optimizers = make(model)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return before, model


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_eagers(layout: str, name: str) -> None:
    """In float32, with casts to bfloat16: of a matrix that is whole the products are eager's, bit for bit, so what is
    left is the rounding of its gradient. Relative to how far each parameter moved."""
    mesh, plan = LAYOUTS[layout]
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    before, expected = eager(MAKERS[name], x, plan.get("clip_grad_norm"))
    torch.manual_seed(0)
    model = Layers()
    program = shardc.compile(model, x, mesh=mesh, plan=plan, optimizer=MAKERS[name](model))
    report = program.verify()
    assert report.ok, report
    assert report.eager_error is not None
    if layout == "bf16":  # its gradients are others than eager's
        return
    assert report.eager_error < 1e-11
    trainer = program.launch()
    for _ in range(3):
        trainer.step(x)
    start, final = dict(before.named_parameters()), trainer.state_dict()
    for key, value in expected.named_parameters():
        moved = (value - start[key]).norm()
        assert (final[key] - value).norm() < 2e-2 * moved, key


def test_verify_sees_a_small_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is smaller than the rounding to bfloat16: the tolerance is none of that."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 8)
    optimizer: Any = muon(model)
    program = shardc.compile(model, x, mesh="dp=2", plan=BATCH, optimizer=optimizer)
    assert program.verify().ok
    module: Any = __import__("torch.optim._muon", fromlist=["_"])
    plain = module._zeropower_via_newtonschulz
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", lambda *args: 1.0005 * plain(*args))
    report = program.verify()
    assert report.equal
    assert not report.ok


def test_factored_moments_lie_with_their_rows() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 8)
    plan = BATCH | {"storage": {"zero": 1, "axes": ["dp"]}}
    program = shardc.compile(model, x, mesh="dp=2", plan=plan, optimizer=torch.optim.Adafactor(model.parameters()))
    types = {port.name: type_of(n) for port, n in zip(program.body.inputs, program.body.placeholders, strict=True)}
    shown: dict[str, TensorType] = {name: types[f"up.weight:{name}"] for name in ("row_var", "col_var", "step")}
    assert {name: str(type) for name, type in shown.items()} == {
        "row_var": "f32[16@dp, 1]",
        "col_var": "f32[1, 8]",
        "step": "f64[]",
    }
    # Rows and numbers are added up; of the matrices nothing is sent but what ZeRO-1 gathers.
    kinds = sent(program, "opt")
    assert set(kinds) == {("all_reduce", ("dp",)), ("all_gather", ("dp",))}
    assert max(c.payload_bytes for c in program.collectives() if c.phase == "opt" and c.kind == "all_reduce") == 16 * 4
