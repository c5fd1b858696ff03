"""Layers whose annotations, ties and views cut one dim in ways that do not nest, in several graphs of a step.

What is compiled is saved and loaded, which refuses a program whose graphs do not agree in their types, and verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from tests.partition.whole import SCHEDULES
from tests.properties.check import LEGITIMATE

EXAMPLES = max(2, settings().max_examples // 4)
NAMES = ("auto", *SCHEDULES)
UNFIT = {"SC221"}  # as many stages as there are no layers for


@dataclass(frozen=True)
class Shape:
    """Square layers: which of them have the weight of an earlier one, which multiply by it as it is, and in how many
    heads columns are between layers (0: in none)."""

    width: int
    tied: tuple[int | None, ...]
    turned: tuple[bool, ...]
    heads: int


class Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in shape.tied)
        for layer, earlier in zip(self.layers, shape.tied, strict=True):
            if earlier is not None:
                layer.weight = self.layers[earlier].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer, turned in zip(self.layers, self.shape.turned, strict=True):
            layer = cast(nn.Linear, layer)
            x = torch.tanh(x @ layer.weight + layer.bias if turned else layer(x))
            if self.shape.heads:
                x = x.unflatten(-1, (self.shape.heads, -1)).transpose(-1, -2).flatten(-2)
        return x.square().mean()


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    width, count = draw(st.sampled_from((5, 6, 7, 12))), draw(st.integers(2, 4))
    tied = tuple(draw(st.sampled_from((None, *range(i)))) for i in range(count))
    heads = draw(st.sampled_from([0, *(n for n in (2, 3) if width % n == 0)]))
    return Shape(width, tied, tuple(draw(st.booleans()) for _ in range(count)), heads)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, dict[str, Any]]:
    shape = draw(shapes())
    blocks = [n for n in (2, 3, 4) if shape.width % n == 0 and shape.width > n]

    def placed(dims: int) -> str:
        sharded_dim = draw(st.integers(0, dims - 1))
        axis = draw(st.sampled_from(("dp", *(f"{n}*dp" for n in blocks))))
        return ", ".join(axis if dim == sharded_dim else "-" for dim in range(dims))

    parameters = Layers(shape).named_parameters()
    plan: dict[str, Any] = {"params": {name: placed(p.ndim) for name, p in parameters if draw(st.booleans())}}
    if draw(st.booleans()):
        plan["inputs"] = {"x": draw(st.sampled_from(("dp, -", "-, dp")))}
    if zero := draw(st.integers(0, 3)):
        plan["storage"] = {"zero": zero, "axes": "dp"}
    if draw(st.integers(0, 2)):
        plan["pipeline"] = {
            "microbatches": draw(st.integers(1, 3)),
            "schedule": draw(st.sampled_from(("auto", *SCHEDULES))),
        }
    else:
        plan["accumulate"], plan["overlap"] = draw(st.integers(1, 3)), {"split": draw(st.sampled_from((1, 2)))}
    plan["mesh"] = f"dp={draw(st.integers(2, 4))}" + (", pp=2" if "pipeline" in plan else "")
    plan["offload"] = draw(st.sampled_from(("none", {"activations": "all", "least": 1})))
    plan["precision"] = draw(st.sampled_from(("fp32", "fp32", "bf16", {"compute": "bf16", "master": "fp32"})))
    plan["recompute"] = draw(st.sampled_from(("none", "full", "selective")))
    return shape, {**plan, "fuse": draw(st.booleans()), "bucket": draw(st.booleans())}


@pytest.mark.slow
@given(cases(), st.sampled_from((None, "sgd", "adamw")))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
def test_graphs_of_a_step_agree_in_their_types(case: tuple[Shape, dict[str, Any]], kind: str | None) -> None:
    shape, plan = case
    note(f"{shape}\n{plan}")
    torch.manual_seed(0)
    model = Layers(shape)
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-2),
    }
    try:
        program = shardc.compile(
            model,
            {"x": torch.randn(24 * 6, shape.width)},
            plan=plan,
            optimizer=None if kind is None else optimizers[kind](model.parameters()),
        )
    except ShardcError as refused:
        codes = {d.code for d in refused.diagnostics}
        if not codes <= LEGITIMATE | UNFIT:
            raise
        event(f"refused: {', '.join(sorted(codes))}")
        assume(False)
        return
    event(f"{plan.get('pipeline', {}).get('schedule', 'no pipeline')}, tied: {any(n is not None for n in shape.tied)}")
    loaded = shardc.Program.from_json(program.to_json())
    assert loaded.text() == program.text()
    report = program.verify()
    assert report.ok, str(report)
