"""Errors of operands, for every op, before anything runs: code, operand, the caller's line, a hint."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels_triton import ops
from kernels_triton.launch import launch
from kernels_triton.library import reference
from kernels_triton.ops.registry import TEMPLATES
from shardc import ShardcError

SIZES = {"rows": 6, "cols": 24, "batch": 2, "heads": 3, "dim": 16, "half": 4, "channels": 64, "groups": 32, "space": 5}
TENSORS = ("Tensor", "Tensor | None")
# What the registry does not list: operands that are None unless given.
MORE: dict[str, dict[str, Any]] = {
    "softmax": {"mask": torch.ones(24)},
    "bias_dropout_residual": {"offset": torch.tensor(0)},
    "embedding_backward": {"total": torch.zeros(1000, 24)},
    "cross_entropy_finish": {"grad_scale": torch.tensor(0.5)},
    "adamw": {"grad_scale": torch.tensor(1.0), "skip": torch.tensor(False), "copy": torch.zeros(6 * 24)},
}


class Wrapped(Tensor):
    """As a DTensor: a tensor that is no memory."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        raise AssertionError("it is refused before anything runs")


def given(name: str) -> dict[str, Any]:
    """Every argument of an op, by name: all of its tensors too."""
    template = TEMPLATES[name]
    arguments = template.arguments(SIZES, torch.float32, "cpu")
    named = dict(zip(inspect.signature(template.op).parameters, arguments, strict=False))
    return {**named, **template.variants[0], **MORE.get(name, {})}


def tensors(name: str) -> list[str]:
    return [p.name for p in inspect.signature(TEMPLATES[name].op).parameters.values() if p.annotation in TENSORS]


class Bad(NamedTuple):
    """What is made of an operand, what is then said of it, and of which it is not bad: any dtype is good of a step.

    `{any}`: of those whose shape or device the others are held to, another may be named.
    """

    of: Callable[[Tensor], Any]
    told: str
    but: tuple[str, ...] = ()


def negated(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros(x.shape), -x.float()).conj().imag


SCALARS = ("lr", "step", "grad_scale", "skip", "seed", "offset")
BAD = {
    "a bare number": Bad(lambda x: 2.0, "{name} is of <class 'float'>, expected a tensor"),
    "a list": Bad(lambda x: [], "{name} is of <class 'list'>, expected a tensor"),
    "an array": Bad(lambda x: x.numpy(), "{name} is of <class 'numpy.ndarray'>, expected a tensor"),
    "a class": Bad(lambda x: Tensor, "{name} is of "),
    "wrapped": Bad(Wrapped, "{name} is of "),
    "sparse": Bad(lambda x: x.to_sparse(), "{name} is of layout torch.sparse_coo"),
    "negated": Bad(negated, "{name} is a view whose memory holds the negated numbers"),
    "integers": Bad(lambda x: x.to(torch.int32), "{name} is torch.int32, expected", ("step", "skip")),
    "complex": Bad(lambda x: x.to(torch.complex64), "{name} is torch.complex64, expected"),
    "8 bits": Bad(lambda x: x.to(torch.float8_e5m2), "{name} is torch.float8_e5m2, expected"),
    "meta": Bad(lambda x: x.to("meta"), "{any} is on "),
    "a dim more": Bad(lambda x: x.expand(3, *x.shape), "{any} is ["),
    "one number": Bad(lambda x: x.flatten()[0], "{any} is [", (*SCALARS, "mask")),
    "longer": Bad(lambda x: x.repeat(2), "{any} is ["),  # along a dim that another operand has
}


def refused(name: str, arguments: dict[str, Any]) -> str:
    with pytest.raises(ShardcError) as caught:
        TEMPLATES[name].op(**arguments)
    assert caught.value.code == "SC530"
    (told,) = caught.value.diagnostics
    assert told.location
    assert told.location.startswith("test_operands.py:")
    assert told.source_text == "TEMPLATES[name].op(**arguments)"
    assert told.hint
    assert told.message.startswith(f"{name}: ")
    return told.message


def shared(name: str, operand: str) -> list[bool]:
    """Of each dim of an operand: has another operand one of that size? Those that none has may be of any."""
    listed = {one.name: one.dims for one in TEMPLATES[name].operands}
    others = {dim for one, dims in listed.items() if one != operand for dim in dims}
    return [dim in others for dim in listed[operand]] if operand in listed else [True]


@pytest.mark.parametrize("name", TEMPLATES)
def test_bad_operands(name: str) -> None:
    """Each operand in each way."""
    good = given(name)
    TEMPLATES[name].op(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in good.items()})
    for operand in tensors(name):
        dims = shared(name, operand)
        for way, bad in BAD.items():
            free = (way, True) in (("longer", not any(dims or [True])), ("a dim more", dims[:1] == [False]))
            if operand in bad.but or free or (way == "meta" and len(tensors(name)) == 1):
                continue
            x = good[operand]
            made = torch.cat((x, x), dims.index(True)) if way == "longer" and x.dim() else bad.of(x)
            told = refused(name, {**good, operand: made})
            names = tensors(name) if "{any}" in bad.told else [operand]
            expected = [f"{name}: {bad.told.format(name=one, any=one)}" for one in names]
            assert any(plain(told).startswith(plain(one)) for one in expected), (operand, way, told)


def plain(text: str) -> str:
    """Logits are, x is."""
    return text.replace(" are ", " is ")


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_needs_a_gradient_is_refused_where_autograd_is_on(name: str) -> None:
    """Else it would get none, and no one would say so. Without autograd a user's parameters are tensors as others."""
    good = given(name)
    for operand in tensors(name):
        if good[operand].is_floating_point():
            parameter = torch.nn.Parameter(good[operand].clone())
            arguments = {**good, operand: parameter}
            assert refused(name, arguments).startswith(f"{name}: {operand} requires a gradient, which would be lost")
            with torch.no_grad():
                TEMPLATES[name].op(**arguments)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(good[operand], torch.ones_like(good[operand]))
                told = refused(name, {**good, operand: dual})
            assert told.startswith(f"{name}: {operand} carries a tangent")


COS, SIN = torch.zeros(1, 1), torch.full((1, 1), 5.0)
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "rope": lambda x: ops.rope(x[None, None], COS.to(x.device), SIN.to(x.device), in_place=True),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.zeros(1, dtype=torch.int64, device=x.device), in_place=True),
    "cross_entropy_finish": lambda x: ops.cross_entropy_finish(
        *(x, torch.zeros(1, dtype=torch.int64, device=x.device), torch.ones(1, 1, 3, device=x.device), 2),
        in_place=True,
    ),
    **{
        f"adamw {name}": lambda x, name=name: ops.adamw(
            *[
                x[0] if k == name else torch.ones(2, device=x.device)
                for k in ("param", "grad", "exp_avg", "exp_avg_sq")
            ],
            *[torch.ones((), device=x.device)] * 2,
        )
        for name in ("param", "exp_avg", "exp_avg_sq")
    },
    "adamw copy": lambda x: ops.adamw(
        *(torch.ones(2, device=x.device) for _ in range(4)), *[torch.ones((), device=x.device)] * 2, copy=x[0]
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_autograd_is_told_of_what_is_written_in_place(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of [1, 1], squared, then turned, the gradient would be [-10, 10], and is [2, 2]. `meta`: as where Triton runs."""
    monkeypatch.setattr(launch, "HAS_TRITON", device == "meta")
    x = torch.ones(1, 2, device=device, requires_grad=True)
    h = x * 1
    z = (h * h).sum()
    launches: list[launch.Launch] = []
    with launch.recording(launches.append), torch.no_grad():
        IN_PLACE[name](h.detach())
    assert bool(launches) == (device == "meta")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_what_was_made_in_inference_mode_is_written_there_alone() -> None:
    with torch.inference_mode():
        x = torch.ones(1, 2)
        IN_PLACE["rope"](x)
    with pytest.raises(ShardcError, match=r"SC530.*x was made in inference mode"):
        IN_PLACE["rope"](x)


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
    "Tensor": (None,),
    "float": ("1", None, torch.tensor(1.0), float("nan"), float("inf"), 1e300),
    "int": (1.5, None, 1 << 70, "x"),
    "bool": (1, None),
    "str": (["silu"], None),
    "tuple[float, float]": (0.9, None),
    "Sequence[int] | None": (1.0, "ab"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_another_kind(name: str) -> None:
    """No number, no finite one, one of more than 64 bits, a negative epsilon: of every argument of every op."""
    good = given(name)
    for parameter in inspect.signature(TEMPLATES[name].op).parameters.values():
        wrong = WRONG.get(parameter.annotation, ())
        for value in (*wrong, *((-1e-5,) if parameter.name == "eps" else ())):
            assert refused(name, {**good, parameter.name: value}).startswith(f"{name}: {parameter.name} is ")


@pytest.mark.parametrize(
    ("name", "argument", "values", "told"),
    [
        ("adamw", "betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9), ("a", 0.9), ()], "betas are"),
        ("group_norm", "groups", [0, -2, 7], "x is [2, 64, 5]: 64 channels in"),
        ("group_norm_backward", "groups", [0, 7], "x is [2, 64, 5]: 64 channels in"),
        ("bias_dropout_residual", "p", [-0.1, 1.1], "p is"),
        ("bias_dropout_residual_backward", "p", [-1.0, 2.0], "p is"),
        ("bias_dropout_residual", "op_id", [-5, 1 << 32], "op_id is"),
        ("bias_dropout_residual", "strides", [("a", "b"), (24, -1), (24, 0.5), (1 << 64, 1)], "strides["),
        ("bias_dropout_residual", "strides", [(), (24,), (1, 2, 3), (1 << 62, 1)], "strides are"),
        ("cross_entropy_stats", "start", [-3], "start is -3"),
        ("cross_entropy_finish", "start", [-3], "start is -3"),
        # Columns past the last class would count in the sum.
        ("cross_entropy_finish", "classes", [0, 23], "logits are [6, 24], classes 0 to 23, of"),
        ("bias_gelu", "act", ["gelu_new"], "act is 'gelu_new'"),
        ("gated_backward", "act", ["gelu_new"], "act is 'gelu_new'"),
        ("gated", "up", [None], "gate is [6, 23], gate and up in one: its columns are odd"),
    ],
)
def test_arguments_out_of_range(name: str, argument: str, values: list[Any], told: str) -> None:
    good = given(name)
    if (name, argument) == ("gated", "up"):
        good["gate"] = good["gate"][:, 1:]
    for value in values:
        assert refused(name, {**good, argument: value}).startswith(f"{name}: {told}")


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


def test_more_heads_than_are_counted_are_not_turned() -> None:
    cos = torch.empty(1 << 20, 1, device="meta")
    with pytest.raises(ShardcError, match=r"SC530.*2\*\*31 heads") as caught:
        ops.rope(torch.empty(1, 1 << 20, 1 << 11, 2, device="meta"), cos, cos)
    assert caught.value.diagnostics[0].hint


@pytest.mark.parametrize("rows", [WHOLE[:8].expand(5, 8), WHOLE.as_strided((5, 8), (7, 1))], ids=["one", "windows"])
def test_rows_that_overlap_are_not_written_in_place(rows: Tensor) -> None:
    target, stats = torch.zeros(5, dtype=torch.int64), torch.ones(1, 5, 3)
    with pytest.raises(ShardcError, match=r"SC530.*logits may overlap itself"):
        ops.cross_entropy(rows, target, in_place=True)
    with pytest.raises(ShardcError, match=r"SC530.*logits may overlap itself"):
        ops.cross_entropy_finish(rows, target, stats, 8, in_place=True)


@pytest.mark.parametrize("angles", [(5, 4), (1, 5, 4), (7, 5, 4)], ids=str)
def test_more_samples_than_a_grid_has(angles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are turned a grid's at a time, each by its angles. Here a grid has 3, and the reference is the kernel."""
    monkeypatch.setattr(sys.modules["kernels_triton.ops.rope"], "SAMPLES", 3)
    x, cos, sin = torch.randn(7, 5, 2, 8), torch.rand(angles), torch.rand(angles)
    expected = ops.rope(x, cos, sin)
    grids: list[int] = []

    def turn(one: launch.Launch) -> None:
        part, c, s, y = one.args[:4]
        grids.append(one.grid[1])
        y.copy_(reference.rope(part, c, s))

    monkeypatch.setattr(launch, "runs_on_triton", lambda x: True)
    with launch.recording(turn):
        assert torch.equal(ops.rope(x, cos, sin), expected)
        assert ops.rope(x, cos, sin, in_place=True) is x
    assert torch.equal(x, expected)
    assert grids == [3, 3, 1] * 2


def test_views_that_do_not_overlap_are_written_in_place() -> None:
    """Heads of a packed tensor, in either order of positions and heads."""
    packed = torch.randn(2, 5, 9, 8)
    cos, sin = torch.rand(5, 4).cos(), torch.rand(5, 4).sin()
    for x in (packed[:, :, 3:6], packed.transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2], packed[:1].flip(0)):
        expected = ops.rope(x, cos, sin)
        assert ops.rope(x, cos, sin, in_place=True) is x
        assert torch.equal(x, expected)
