"""Each node of a recording is described as its value was when it was made, whoever shares the description."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx

from shardc import torch_compat

GEOMETRY = (
    ("shape", lambda t: tuple(t.shape)),
    ("strides", lambda t: t.stride()),
    ("offset", lambda t: t.storage_offset()),
    ("dtype", lambda t: t.dtype),
    ("conjugate", lambda t: t.is_conj()),
    ("negative", lambda t: t.is_neg()),
)


def recorded(forward: Callable[..., object], inputs: Sequence[Tensor]) -> tuple[list[tuple[fx.Node, Tensor]], object]:
    """The tensors that a forward computes in a recording, as `forward` hands them over, with their nodes."""
    mode = torch_compat.fake_mode()
    made: list[tuple[fx.Node, Tensor]] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        values = forward(*tensors)
        assert isinstance(values, list)
        for value in values:
            node = torch_compat.node_of(value)
            assert node is not None
            made.append((node, value))
        return values

    fakes = [torch_compat.fake_like(mode, x) for x in inputs]
    graph = torch_compat.record(run, fakes, mode, {}, lambda _: None)
    return made, graph


def views(x: Tensor) -> list[Tensor]:
    return [x + 1, x * 2, (x + 1).t(), (x + 1)[1:], (x + 1)[:-1], (x + 1).double(), x.new_ones(3, 4), x.sum(1)]


def of_complex(x: Tensor) -> list[Tensor]:
    z = torch.complex(x, x)
    return [z, z.conj(), z.conj() * 1, z.imag, z.conj().imag, z.conj().real]


@pytest.mark.parametrize("forward", [views, of_complex])
def test_nodes_say_of_their_values_what_eager_tensors_are(forward: Callable[[Tensor], list[Tensor]]) -> None:
    x = torch.randn(3, 4)
    made, _ = recorded(forward, [x])
    for (node, _), real in zip(made, forward(x), strict=True):
        for what, of in GEOMETRY:
            assert of(node.meta["val"]) == of(real), (node, what)  # type: ignore[no-untyped-call]


def test_values_of_one_geometry_share_a_description() -> None:
    made, _ = recorded(lambda x: [x + 1, x * 2, x - 3, x.t() + 1], [torch.randn(3, 4)])
    first, *others, turned = [node.meta["val"] for node, _ in made]
    assert all(other is first for other in others)
    assert turned is not first


def test_a_value_that_is_reshaped_in_place_leaves_the_others_as_they_are() -> None:
    def forward(x: Tensor) -> list[Tensor]:
        y, z = x + 1, x * 2
        y.unsqueeze_(0)
        z.t_()
        return [x - 1, x.t() - 1]

    made, graph = recorded(forward, [torch.randn(3, 4)])
    assert [tuple(node.meta["val"].shape) for node, _ in made] == [(3, 4), (4, 3)]
    assert isinstance(graph, fx.GraphModule)
    shapes = {str(node.target): tuple(node.meta["val"].shape) for node in graph.graph.nodes if "val" in node.meta}
    assert shapes["aten.add.Tensor"] == (3, 4)
    assert shapes["aten.unsqueeze_.default"] == (1, 3, 4)
    assert shapes["aten.t_.default"] == (4, 3)
