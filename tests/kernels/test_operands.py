"""What is wrong with an operand of any template is said before anything runs: a code, the operand's name and a hint."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton import launch, ops
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


WRONG: dict[str, tuple[Any, ...]] = {
    "Tensor": (None, 2.0, [1.0]),
    "Tensor | None": (2.0, [1.0]),
    "float": ("1", None),
    "int": (1.5, None),
    "tuple[float, float]": (0.9, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_another_kind(name: str) -> None:
    """No tensor where one is expected, no number, a negative epsilon: of every argument of every op."""
    template = TEMPLATES[name]
    parameters = inspect.signature(template.op).parameters
    given = dict(zip(parameters, template.arguments(SIZES, torch.float32, "cpu"), strict=False))
    given = {**given, **template.variants[0]}
    for parameter in parameters.values():
        wrong = WRONG.get(parameter.annotation, ())
        for value in (*wrong, *((-1e-5, float("nan")) if parameter.name == "eps" else ())):
            with pytest.raises(ShardcError, match="SC530") as caught:
                template.op(**{**given, parameter.name: value})
            assert f"{name}: {parameter.name} is" in str(caught.value)
            assert caught.value.diagnostics[0].hint


@pytest.mark.parametrize(("name", "operand"), PLACES)
def test_a_number_in_the_place_of_a_tensor(name: str, operand: str) -> None:
    """With no dims at all."""
    dims = next(one.dims for one in TEMPLATES[name].operands if one.name == operand)
    if dims:
        told, _ = changed(name, operand, lambda x: x.flatten()[0])
        assert told.code == "SC530"
        assert told.diagnostics[0].hint


NAMED = [
    (name, size)
    for name, template in TEMPLATES.items()
    for dims in [[part for one in template.operands for dim in one.dims for part in dim.split("*")]]
    for size in sorted({*dims} & {*SIZES} - {"groups"})
]
REFUSED = {("rope", "dim"), ("rope", "half"), *((name, "cols") for name in TEMPLATES if "cross_entropy" in name)}


@pytest.mark.parametrize(("name", "size"), NAMED)
def test_nothing_of_a_size(name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU and where Triton would compute: results of the shapes that are listed, or the same refusal."""
    template, sizes = TEMPLATES[name], {**SIZES, size: 0}
    described = template.arguments(sizes, torch.float32, "meta")
    real = [torch.ones(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for x in described]
    if (name, size) in REFUSED:
        for arguments in (described, real):
            with pytest.raises(ShardcError, match="SC530"):
                template.op(*arguments, **template.variants[0])
        return
    shapes = [one.shape(sizes) for one in template.results]
    found = results(template.op(*real, **template.variants[0]))
    assert [tuple(x.shape) for x in found] == shapes
    for one, x in zip(template.results, found, strict=True):
        if one.name in ("dweight", "dbias"):
            assert not x.any(), "a sum of nothing"
    monkeypatch.setattr(launch, "HAS_TRITON", True)
    launches: list[launch.Launch] = []
    with launch.recording(launches.append):
        assert [tuple(x.shape) for x in results(template.op(*described, **template.variants[0]))] == shapes
    assert not launches


def results(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Tensor)]


@pytest.mark.parametrize("groups", [0, -2, 7])
def test_groups_that_are_none(groups: int) -> None:
    with pytest.raises(ShardcError, match=rf"SC530.*64 channels in {groups} groups"):
        ops.group_norm(torch.zeros(2, 64, 3), groups, None, None)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)])
def test_betas_that_are_none(betas: Any) -> None:
    arguments = TEMPLATES["adamw"].arguments(SIZES, torch.float32, "cpu")
    with pytest.raises(ShardcError, match=r"SC530.*betas are"):
        ops.adamw(*arguments, betas=betas)


def test_an_offset_of_another_dtype() -> None:
    arguments = TEMPLATES["bias_dropout_residual"].arguments(SIZES, torch.float32, "cpu")
    with pytest.raises(ShardcError, match=r"SC530.*offset is torch.float32"):
        ops.bias_dropout_residual(*arguments, offset=torch.tensor(1.0))


WHOLE = torch.arange(2.0 * 5 * 6 * 8)
OVERLAPPING = {
    "over heads": WHOLE[:80].view(2, 5, 1, 8).expand(2, 5, 6, 8),
    "windows": WHOLE.as_strided((2, 5, 3, 8), (120, 8, 8, 1)),
    "one before another": WHOLE.as_strided((2, 5, 3, 8), (120, 24, 7, 1)),
}


@pytest.mark.parametrize("x", OVERLAPPING.values(), ids=list(OVERLAPPING))
def test_what_overlaps_itself_is_not_written_in_place(x: Tensor) -> None:
    """Elements of several indices would be turned several times."""
    cos = torch.ones(5, 4)
    with pytest.raises(ShardcError, match=r"SC530.*x may overlap itself") as caught:
        ops.rope(x, cos, cos, in_place=True)
    assert caught.value.diagnostics[0].hint


@pytest.mark.parametrize("rows", [WHOLE[:8].expand(5, 8), WHOLE.as_strided((5, 8), (7, 1))], ids=["one", "windows"])
def test_rows_that_overlap_are_not_written_in_place(rows: Tensor) -> None:
    target, stats = torch.zeros(5, dtype=torch.int64), torch.ones(1, 5, 3)
    with pytest.raises(ShardcError, match=r"SC530.*logits may overlap itself"):
        ops.cross_entropy(rows, target, in_place=True)
    with pytest.raises(ShardcError, match=r"SC530.*logits may overlap itself"):
        ops.cross_entropy_finish(rows, target, stats, 8, in_place=True)


def test_views_that_do_not_overlap_are_written_in_place() -> None:
    """Heads of a packed tensor, in either order of positions and heads."""
    packed = torch.randn(2, 5, 9, 8)
    cos, sin = torch.rand(5, 4).cos(), torch.rand(5, 4).sin()
    for x in (packed[:, :, 3:6], packed.transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2], packed[:1].flip(0)):
        expected = ops.rope(x, cos, sin)
        assert ops.rope(x, cos, sin, in_place=True) is x
        assert torch.equal(x, expected)
