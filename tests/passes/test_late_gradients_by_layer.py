"""Late gradients are decided layer by layer: equal layers have the same order, however many layers there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import fx

from shardc.ir.graph import Graph, info
from shardc.ir.hardware import DEFAULT
from shardc.ir.layers import in_every_layer, layer_of, list_and_index
from shardc.passes.communication.late_gradients import LateGradients
from shardc.passes.communication.late_products import Movable
from tests.passes.test_late_gradients import OFF, large
from tests.replanned import replanned

Pattern = list[tuple[str, list[tuple[int | None, str]]]]
LAYERS = (12, 16)
ENDS = 4  # layers at either end of backward that may differ


def layer(node: fx.Node) -> int | None:
    name = layer_of(info(node).fqn)
    return list_and_index(name)[1] if name else None


def patterns(graph: Graph) -> dict[int | None, Pattern]:
    """By layer, each collective that backward waits for and the products that run until then: how many layers further
    on in the model they are, and their names without the layer's."""
    calls = list(graph.calls())
    movable = Movable.of(calls)
    found: dict[int | None, Pattern] = {}
    for awaited in movable.awaited:
        own, behind = layer(awaited), list[tuple[int | None, str]]()
        for node in calls[calls.index(awaited) + 1 :]:
            if node in awaited.users:
                break
            if node in movable.products:
                other = layer(node)
                offset = None if own is None or other is None else other - own
                behind.append((offset, in_every_layer(info(node).name)))
        found.setdefault(own, []).append((in_every_layer(info(awaited).name), behind))
    return found


def steady(graph: Graph, layers: int) -> Pattern:
    """The pattern of the layers in the middle, which is one. No product waits for a layer but the next."""
    by_layer = patterns(graph)
    for own, pattern in by_layer.items():
        offsets = {offset for _, products in pattern for offset, _ in products}
        assert offsets <= ({0, 1} if own is not None and own < layers - 1 else {0, None}), (own, pattern)
    middle = [by_layer[index] for index in range(ENDS, layers - ENDS)]
    assert all(pattern == middle[0] for pattern in middle), middle
    return middle[0]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt-1.3b", "gpt-6.7b-slice", "llama3-8b-slice"])
def test_equal_layers_have_the_same_products_behind_their_collectives(name: str, sequence: bool) -> None:
    found = [steady(large(name, layers, sequence=sequence).body, layers) for layers in LAYERS]
    assert found[0] == found[1]
    assert all(products for _, products in found[0])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt-1.3b", "llama3-8b-slice"])
def test_equal_layers_are_equal_whether_products_take_longer_than_they_cover_or_shorter(
    name: str, sequence: bool
) -> None:
    bodies = [replanned(large(name, layers, sequence=sequence), overlap=OFF).body for layers in LAYERS]
    seen: list[Pattern] = []
    for rate in (4e10, 1e11, 1.5e11, 2e11, 3e11, 4e11, 6e11, 1e12):
        late = LateGradients(hardware=replace(DEFAULT, link_bytes_per_second=rate, collective_start_seconds=1e-6))
        found = [steady(late.run(body), layers) for body, layers in zip(bodies, LAYERS, strict=True)]
        assert found[0] == found[1], rate
        if found[0] not in seen:
            seen.append(found[0])
    assert len(seen) > 2
