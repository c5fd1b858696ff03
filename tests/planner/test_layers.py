"""Equal layers are found by what they compute, whatever their modules are called."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.compiler.driver import single_device
from shardc.compiler.pass_pipeline import Options
from shardc.frontend.trace import trace
from shardc.ir.graph import Graph, info
from shardc.ir.mesh import Mesh
from shardc.planner.layers import equal_layers


class Block(nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0, inner: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Named(nn.Module):
    """Blocks under names that tell nothing."""

    def __init__(self, **blocks: nn.Module) -> None:
        super().__init__()
        for name, module in blocks.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x.square().mean()


def graph_of(model: nn.Module) -> Graph:
    return single_device(trace(model, (torch.randn(4, 6, 8),), None), Mesh(tp=2), Options())


def classes_of(model: nn.Module) -> set[frozenset[str]]:
    return {frozenset(names) for names in equal_layers(graph_of(model)).names}


def test_names_do_not_matter() -> None:
    assert frozenset({"encode", "z", "last_one"}) in classes_of(Named(encode=Block(), z=Block(), last_one=Block()))


@pytest.mark.parametrize("other", [{"scale": 0.5}, {"inner": 32}])
def test_a_constant_or_a_size_that_differs_makes_another_layer(other: dict[str, float]) -> None:
    """The whole differs; parts of it, such as its norm, are equal still."""
    classes = classes_of(Named(a=Block(), b=Block(), c=Block(**other)))  # type: ignore[arg-type]
    assert frozenset({"a", "b"}) in classes
    assert not any("c" in names for names in classes)


def test_parameters_and_calls_are_mapped_to_the_first_of_their_class() -> None:
    graph = graph_of(Named(a=Block(), b=Block()))
    equal = equal_layers(graph)
    inputs = graph.input_nodes()
    for name in ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias"):
        assert equal.of(inputs[f"b.{name}"]) is inputs[f"a.{name}"]
        assert equal.of(inputs[f"a.{name}"]) is inputs[f"a.{name}"]
    for node in graph.calls():
        if info(node).phase == "fwd" and info(node).fqn.startswith("b"):
            assert info(equal.of(node)).fqn == "a" + info(node).fqn[1:]
            assert equal.of(node).target == node.target


class Functional(nn.Module):
    """Layers that are no modules: weights by number, used in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = torch.tanh(x @ w) * 0.5
        return x.square().mean()


def test_runs_of_calls_repeat_where_no_module_does() -> None:
    graph = graph_of(Functional())
    equal = equal_layers(graph)
    assert max(len(parts) for parts in equal.layers) >= 3
    inputs = graph.input_nodes()
    assert len({equal.of(inputs[f"w.{i}"]) for i in range(4)}) <= 2


class SharesMask(nn.Module):
    """What the first layer makes and others read is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(), Masked(), Masked()])

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = None
        for layer in self.layers:
            x, mask = layer(x, mask)
        return x.square().mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is None:
            mask = torch.arange(6).unsqueeze(-1) < 4
        return torch.tanh(self.up(x)) * mask + x, mask


def test_a_mask_of_the_first_layer_makes_no_difference() -> None:
    assert frozenset({"layers.0", "layers.1", "layers.2"}) in classes_of(SharesMask())


def test_a_layer_that_draws_numbers_equals_another() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop(self.up(x))

    assert frozenset({"a", "b"}) in classes_of(Named(a=Dropped(), b=Dropped()))
