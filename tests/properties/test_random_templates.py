"""Random models of what templates are for, and of what is near it: the single device, and every template is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import shardc
from kernels_triton.ir.text import parse
from kernels_triton.match.op import OPS
from shardc.ir.graph import op_name
from shardc.passes.fusion.analysis.traffic import traffic
from tests.passes.test_fuse_templates import agree

EXAMPLES = max(2, settings().max_examples // 10)
WIDTH, INNER = 12, 20


class Part(nn.Module):
    """One step on the residual stream."""

    def __init__(self, kind: str, bias: bool, affine: bool) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=affine, bias=bias)
        self.rms = nn.RMSNorm(WIDTH, elementwise_affine=affine)
        self.up, self.gate = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(WIDTH, INNER, bias=bias)
        self.down, self.drop = nn.Linear(INNER, WIDTH, bias=bias), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return PARTS[self.kind](self, x)


def _written(h: Tensor) -> Tensor:
    return 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h.pow(3))))


def _read_twice(part: Part, x: Tensor) -> Tensor:
    y = functional.gelu(part.up(x))
    return x + part.down(y) + part.down(y.square())


def _rms_written(part: Part, x: Tensor) -> Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x + part.down(part.up(y.to(x.dtype)))


PARTS: dict[str, Callable[[Part, Tensor], Tensor]] = {
    "post-norm": lambda p, x: p.norm(x + p.down(p.up(x))),
    "pre-norm": lambda p, x: x + p.down(p.up(p.norm(x))),
    "rms": lambda p, x: x + p.down(p.up(p.rms(x))),
    "rms written": _rms_written,
    "gelu": lambda p, x: x + p.down(functional.gelu(p.up(p.norm(x)))),
    "gelu tanh": lambda p, x: x + p.down(functional.gelu(p.up(x), approximate="tanh")),
    "gelu written": lambda p, x: x + p.down(_written(p.up(x))),
    "swiglu": lambda p, x: x + p.down(functional.silu(p.gate(p.rms(x))) * p.up(x)),
    "geglu": lambda p, x: x + p.down(functional.gelu(p.gate(x)) * p.up(x)),
    "squared relu": lambda p, x: x + p.down(functional.relu(p.up(p.norm(x))).square()),
    "squared relu, multiplied": lambda p, x: x + p.down(functional.relu(p.up(x)) * functional.relu(p.up(x))),
    "gate of itself": lambda p, x: x + p.down(functional.silu(p.up(x)) * p.up(x)),
    "dropout": lambda p, x: x + p.drop(p.down(functional.gelu(p.up(p.norm(x))))),
    "another reader": _read_twice,
    "scaled norm": lambda p, x: 0.5 * p.norm(x) + x,
    "norm of two": lambda p, x: p.norm(x) + p.rms(x),
    "norm of a middle dim": lambda p, x: x + p.norm(x.transpose(-1, -2).contiguous().reshape(x.shape)),
}


class Stack(nn.Module):
    def __init__(self, parts: list[tuple[str, bool, bool]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(*one) for one in parts)
        self.head = nn.Linear(WIDTH, 6, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": "dp=1"},
    {"mesh": "dp=2", "inputs": {"x": "dp, -, -", "y": "dp, -"}},
    {"mesh": "tp=2", "params": {"parts.*.up.weight": "tp, -", "parts.*.gate.weight": "tp, -"}},
    {"mesh": "tp=2", "activations": {"parts.*": "-, tp, -"}},
)


@pytest.mark.slow
@given(
    parts=st.lists(st.tuples(st.sampled_from(sorted(PARTS)), st.booleans(), st.booleans()), min_size=1, max_size=3),
    plan=st.sampled_from(PLANS),
    precision=st.sampled_from([None, "bf16"]),
)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
def test_graphs_around_templates(
    parts: list[tuple[str, bool, bool]], plan: dict[str, Any], precision: str | None
) -> None:
    note(f"{parts}\n{plan}\n{precision}")
    torch.manual_seed(0)
    model, batch = Stack(parts), {"x": torch.randn(4, 2, WIDTH), "y": torch.randint(0, 6, (4, 2))}
    asked = {**plan, **({} if precision is None else {"precision": precision})}
    program = shardc.compile(model, batch, plan={**asked, "fuse": True})
    plain = shardc.compile(model, batch, plan={**asked, "fuse": {"templates": []}})
    assert traffic(program.body) == traffic(plain.body)
    assert program.verify().ok, str(program.verify())
    for node in program.body.calls():
        if node.target in OPS.values():
            event(op_name(node.target))
            agree(parse(str(node.args[1])))
