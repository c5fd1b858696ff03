"""No placement of a small model, of all that there are, compiles to less than the first candidate; plans verify."""

import itertools
from collections.abc import Iterable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.compiler.binding import bind_passes
from shardc.compiler.driver import single_device
from shardc.compiler.pass_pipeline import Options
from shardc.frontend.trace import trace
from shardc.frontend.traced import Traced
from shardc.ir.diagnostic import ShardcError
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.plan.schema import Plan
from shardc.planner.annotations import Annotations
from shardc.planner.candidates import NEAR, Step, candidate_plans


class MLP(nn.Module):
    def __init__(self, width: int = 1024, inner: int = 4096) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(z.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).square().mean()


PLACES = ("-, -", "tp, -", "-, tp")
RETURNED = ("", "-, tp, -")


def enumerated(names: Iterable[Iterable[str]]) -> Iterable[Annotations]:
    """Every placement of groups of weights over tp, and what the layer returns left alone or over positions."""
    groups = [list(group) for group in names]
    for texts in itertools.product(PLACES, repeat=len(groups)):
        params = {f"layers.0.{n}.weight": text for group, text in zip(groups, texts, strict=True) for n in group}
        for returned in RETURNED:
            yield Annotations(params, {}, {"layers.0": returned} if returned else {})


def traced_layer(layer: type[nn.Module]) -> Traced:
    with torch.device("meta"):
        model = Model(layer())
    return trace(model, (torch.empty(8, 1024, 1024, device="meta", requires_grad=False),), None)


SPACES: Mapping[type[nn.Module], Iterable[Iterable[str]]] = {
    MLP: (("up",), ("down",)),
    Attention: (("q", "k"), ("v",), ("o",)),
}


@pytest.mark.parametrize("layer", SPACES)
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.long), 8])
def test_no_placement_compiles_to_less(layer: type[nn.Module], tp: int) -> None:
    mesh, traced = Mesh(tp=tp), traced_layer(layer)
    hardware = Hardware(fp32_flops_per_second=4e14)
    best = candidate_plans(traced, mesh, hardware)[0]
    options = bind_passes(Plan(), hardware.on(mesh), Options(verify=False))
    step = Step(traced, single_device(traced, mesh, options), Plan(), mesh, hardware.on(mesh))
    costs: dict[str, float] = {}
    for annotations in enumerated(SPACES[layer]):
        try:
            costs[str(annotations.as_plan())] = step.compiled(annotations).seconds
        except ShardcError:
            continue
    assert len(costs) == len(PLACES) ** len(list(SPACES[layer])) * len(RETURNED)
    least = min(costs, key=costs.__getitem__)
    assert best.seconds <= (1 + NEAR) * costs[least], f"{best.plan} takes {best.seconds}, {least} {costs[least]}"
    assert max(costs.values()) > 1.3 * costs[least], "the space has something to lose"


@pytest.mark.parametrize("layer", SPACES)
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2, tp=4"])
def test_every_candidate_compiles_as_the_user_would_and_verifies(layer: type[nn.Module], mesh: str) -> None:
    """A small copy, in float64, against eager PyTorch."""
    model = Model(layer(32, 64) if layer is MLP else layer(32, 4))
    x = torch.randn(4, 8, 32)
    for candidate in candidate_plans(trace(model, (x,), None), Mesh.parse(mesh), Hardware(), top=9):
        program = shardc.compile(model, (x,), mesh=mesh, plan=Plan.from_dict(candidate.plan))
        assert program.verify().ok, candidate.plan


class Stack(nn.Module):
    """Equal layers, of which the first reads the input and the others what a layer returns."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_equal_layers_are_placed_alike_where_the_first_reads_the_input() -> None:
    """No state is offered to one of their weights alone: one choice is made for all."""
    model, x = Stack(64), torch.randn(8, 64)
    candidates = candidate_plans(trace(model, (x,), None), Mesh(tp=4), Hardware(), top=9)
    assert candidates
    for candidate in candidates:
        assert all("*" in name for name in candidate.plan.get("params", {})), candidate.plan
        assert shardc.compile(model, (x,), mesh="tp=4", plan=Plan.from_dict(candidate.plan)).verify().ok


def test_the_estimate_is_near_what_compiles() -> None:
    """Of the plans that come out, without which the program would look in the wrong place."""
    for layer in SPACES:
        for candidate in candidate_plans(traced_layer(layer), Mesh(tp=4), Hardware(), top=9)[:1]:
            assert candidate.estimate == pytest.approx(candidate.seconds, rel=0.25)
