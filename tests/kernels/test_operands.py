"""What is wrong with an operand of any template is said before anything runs: a code, the operand's name and a hint."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import ops
from kernels_triton.registry import TEMPLATES
from shardc import ShardcError

SIZES = {"rows": 6, "cols": 24, "batch": 2, "heads": 3, "dim": 16, "half": 4, "channels": 64, "groups": 32, "space": 5}
PLACES = [(name, operand.name) for name, template in TEMPLATES.items() for operand in template.operands]


def changed(name: str, operand: str, change: Any) -> tuple[ShardcError, list[str]]:
    """What an op says when one of its operands is changed, and the names of all of them."""
    template = TEMPLATES[name]
    arguments = template.arguments(SIZES, torch.float32, "cpu")
    names = [one.name for one in template.operands]
    places = [at for at, value in enumerate(arguments) if isinstance(value, Tensor)]
    at = places[names.index(operand)]
    arguments[at] = change(arguments[at])
    with pytest.raises(ShardcError) as caught:
        template.op(*arguments, **template.variants[0])
    return caught.value, names


@pytest.mark.parametrize(("name", "operand"), [place for place in PLACES if place[1] != "step"])
def test_another_dtype(name: str, operand: str) -> None:
    """A step alone is a number of any dtype."""
    told, _ = changed(name, operand, lambda x: x.int())
    assert told.code == "SC530"
    assert f"{name}: {operand} is torch.int32, expected" in str(told)
    assert told.diagnostics[0].hint


@pytest.mark.parametrize(("name", "operand"), [place for place in PLACES if len(TEMPLATES[place[0]].operands) > 1])
def test_another_shape(name: str, operand: str) -> None:
    """Of the operand that the others are held against, one of those is named."""
    given = TEMPLATES[name].operands
    dims = next(one.dims for one in given if one.name == operand)
    shared = {dim for one in given if one.name != operand for dim in one.dims}
    at = next((at for at, dim in enumerate(dims) if dim in shared), 0)
    told, names = changed(name, operand, lambda x: torch.cat((x, x), at) if x.dim() else x.repeat(3))
    assert told.code == "SC530"
    assert any(f"{one} is [" in str(told) or f"{one} [" in str(told) for one in names)
    assert told.diagnostics[0].hint


@pytest.mark.parametrize(("name", "operand"), [place for place in PLACES if len(TEMPLATES[place[0]].operands) > 1])
def test_another_device(name: str, operand: str) -> None:
    told, names = changed(name, operand, lambda x: x.to("meta"))
    assert told.code == "SC530"
    assert any(f"{one} is on " in str(told) for one in names)
    assert told.diagnostics[0].hint


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.ones(3, 5, dtype=torch.bool), "mask is [3, 5], x [2, 4, 6]"),
        (torch.ones(1, 2, 4, 6), "mask is [1, 2, 4, 6], x [2, 4, 6]"),
        (torch.ones(6, dtype=torch.int64), "mask is torch.int64, expected floating-point numbers"),
        (torch.ones(6, device="meta"), "mask is on meta, the other tensors on cpu"),
    ],
)
def test_a_mask_that_does_not_fit(mask: Tensor, told: str) -> None:
    with pytest.raises(ShardcError, match="SC530") as caught:
        ops.softmax(torch.zeros(2, 4, 6), 1.0, mask)
    assert told in str(caught.value)
    assert caught.value.diagnostics[0].hint
