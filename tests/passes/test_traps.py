"""Cases that a widely used implementation gets wrong without a word; each with the control that it gets right.

An uneven dim over two axes comes back with an element lost and another twice; a convolution whose width is sharded
ignores its neighbours and returns too few columns. Here both are right, or refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, Port, ValueInfo, set_info
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives
from shardc.ir.types import TensorType
from shardc.passes.communication.combine import Combine
from shardc.passes.sharding.lower_reshards import LowerReshards
from shardc.runtime.oracle.simulate import simulate


@pytest.mark.parametrize("rows", [5, 7, 3, 1, 8])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_an_uneven_dim_over_two_axes_is_gathered_whole(rows: int, sizes: tuple[int, int]) -> None:
    mesh = Mesh(zip("ab", sizes, strict=True))
    made = fx.Graph()
    x = made.placeholder("x")
    dim = f"{rows}@a.b" if rows > 1 else "1"
    set_info(x, ValueInfo("x", TensorType.parse(f"f32[{dim}, 3]")))
    whole = made.call_function(collectives.reshard, (x,))
    set_info(whole, ValueInfo("x.whole", TensorType.parse(f"f32[{rows}, 3]")))
    made.output((whole,))
    graph = Combine().run(LowerReshards().run(Graph(made, mesh, [Port("input", "x")], [Port("output", "y")])))
    tensor = torch.arange(rows * 3.0).reshape(rows, 3)
    (found,) = simulate(graph, {"x": tensor}).values()
    assert torch.equal(found, tensor)


class Tall(nn.Module):
    """Five outputs, over four ranks; the loss mixes them, so that all of them must come together again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.fc(x), -1).square().sum()


@pytest.mark.parametrize("placement", ["a.b, -", "b.a, -", "a, b", "-, a.b"])
def test_a_weight_of_five_rows_over_two_axes_trains_as_on_one_device(placement: str) -> None:
    plan: dict[str, Any] = {"params": {"fc.weight": placement}}
    program = shardc.compile(Tall(), torch.randn(5, 3), mesh=Mesh(a=2, b=2), plan=plan)
    assert program.verify().ok


class Conv(nn.Module):
    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, kernel, stride=stride, padding=padding)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).square().mean()


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (1, 1, 0)])
@pytest.mark.parametrize("placement", ["-, -, -, tp", "-, -, tp, -"])
def test_a_convolution_on_a_sharded_width_is_refused_or_right(
    kernel: int, stride: int, padding: int, placement: str
) -> None:
    model, images = Conv(kernel, stride, padding), torch.randn(4, 4, 4, 8)
    try:
        program = shardc.compile(model, images, mesh=Mesh(tp=2), plan={"inputs": {"images": placement}})
    except ShardcError as refused:
        said = refused
    else:
        assert program.verify().ok
        return
    assert said.code == "SC207"
    assert "images" in str(said)


class Late(nn.Module):
    """The width is sharded where an elementwise op can have it so; the convolution comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.conv = nn.Conv2d(4, 4, 3, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(self.act(images)).square().mean()


def test_a_width_that_was_sharded_before_is_gathered_for_the_convolution() -> None:
    model, images = Late(), torch.randn(4, 4, 4, 8)
    program = shardc.compile(model, images, mesh=Mesh(tp=2), plan={"inputs": {"images": "-, -, -, tp"}})
    assert "all_gather" in {one.kind for one in program.collectives()}
    assert program.verify().ok


@pytest.mark.parametrize("placement", ["tp, -, -, -", "-, tp, -, -"])
def test_a_convolution_on_its_batch_or_channels_needs_no_gather(placement: str) -> None:
    model, images = Conv(2, 2, 0), torch.randn(4, 4, 4, 8)
    program = shardc.compile(model, images, mesh=Mesh(tp=2), plan={"inputs": {"images": placement}})
    assert program.verify().ok
    assert "all_gather" not in {one.kind for one in program.collectives() if one.phase == "fwd"}
