"""Pooling and transposed convolutions over a sharded spatial dim: exact, by the bytes of neighbours' rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import shardc
from shardc.ir.ops.halo import HALO, HALO_SUM
from shardc.ir.ops.windows import MEAN_ANEW, SHIFT_POSITIONS, WIDEN
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from tests.rules.test_halo import ROWS, Convs, gathers, rows_sent

TRANSPOSED = nn.ConvTranspose2d
SPACE = {1: "-, -, sp", 2: ROWS, 3: "-, -, sp, -, -"}


def pointwise(space: int = 2) -> nn.Module:
    """What makes the pooled value depend on a parameter."""
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1](3, 4, 1)


def compiled(layer: nn.Module, shape: tuple[int, ...], mesh: str, x: str = "", **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Convs(pointwise(len(shape) - 2), layer).double()
    batch = {"x": torch.randn(shape, dtype=torch.float64)}
    return shardc.compile(model, batch, mesh=mesh, plan={"inputs": {"x": x or SPACE[len(shape) - 2]}, **plan})


# ------------------------------------------------------------------------------------------------ exact
IMAGE, UNEVEN = (2, 3, 8, 6), (2, 3, 7, 6)
Case = tuple[Callable[[], nn.Module], tuple[int, ...], str, str]
EXACT: dict[str, Case] = {
    "maxima side by side": (lambda: nn.MaxPool2d(2), IMAGE, "sp=2", ROWS),
    "maxima": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE, "sp=4", ROWS),
    "maxima of columns": (lambda: nn.MaxPool2d(3, 1, 1), (2, 3, 5, 8), "sp=2", "-, -, -, sp"),
    "maxima of rows and columns": (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 8, 8), "a=2, b=2", "-, -, a, b"),
    "dilated": (lambda: nn.MaxPool2d(3, 1, 1, dilation=(1, 2)), (2, 3, 8, 6), "sp=2", ROWS),
    "beyond the end": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), IMAGE, "sp=2", ROWS),
    "uneven": (lambda: nn.MaxPool2d(3, 1, 1), UNEVEN, "sp=2", ROWS),
    "uneven, side by side": (lambda: nn.MaxPool2d(2), (2, 3, 10, 6), "sp=2", ROWS),
    "a rank of padding alone": (lambda: nn.MaxPool2d(3, 1, 1), (2, 3, 5, 6), "sp=4", ROWS),
    "means": (lambda: nn.AvgPool2d(3, 2, 1), IMAGE, "sp=4", ROWS),
    "means without padding": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE, "sp=2", ROWS),
    "means of five without padding": (lambda: nn.AvgPool2d(5, 2, 2, count_include_pad=False), IMAGE, "sp=2", ROWS),
    "of rows and columns": (
        lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False), (2, 3, 8, 8), "a=2, b=2", "-, -, a, b",
    ),
    "means beyond the end": (lambda: nn.AvgPool2d(3, 2, ceil_mode=True), IMAGE, "sp=2", ROWS),
    "another divisor": (lambda: nn.AvgPool2d(3, 2, 1, divisor_override=4), IMAGE, "sp=2", ROWS),
    "uneven means": (lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False), UNEVEN, "sp=2", ROWS),
    "maxima of a sequence": (lambda: nn.MaxPool1d(3, 2, 1), (2, 3, 8), "sp=2", "-, -, sp"),
    "means of a sequence": (lambda: nn.AvgPool1d(3, 2, 1), (2, 3, 8), "sp=2", "-, -, sp"),
    "maxima of depth": (lambda: nn.MaxPool3d(3, 2, 1), (2, 3, 4, 4, 4), "sp=2", "-, -, sp, -, -"),
    "maxima of rows in depth": (lambda: nn.MaxPool3d(3, 1, 1), (2, 3, 3, 4, 3), "sp=2", "-, -, -, sp, -"),
    "means of depth": (lambda: nn.AvgPool3d(3, 1, 1), (2, 3, 4, 3, 3), "sp=2", "-, -, sp, -, -"),
    "transposed, side by side": (lambda: TRANSPOSED(4, 3, 2, 2), (2, 3, 4, 6), "sp=2", ROWS),
    "transposed": (lambda: TRANSPOSED(4, 3, 4, 2, 1), (2, 3, 4, 6), "sp=2", ROWS),
    "with output padding": (lambda: TRANSPOSED(4, 3, 3, 2, 1, output_padding=1), (2, 3, 4, 6), "sp=2", ROWS),
    "in groups": (lambda: TRANSPOSED(4, 6, 3, 1, 1, groups=2), (2, 3, 4, 6), "sp=4", ROWS),
    "transposed, dilated": (lambda: nn.ConvTranspose1d(4, 3, 3, 1, 2, dilation=2), (2, 3, 8), "sp=2", "-, -, sp"),
    "transposed, uneven": (lambda: TRANSPOSED(4, 3, 4, 2, 1), (2, 3, 5, 6), "sp=4", ROWS),
    "means of equal parts": (lambda: nn.AdaptiveAvgPool2d((4, 3)), IMAGE, "sp=2", ROWS),
    "twice as many": (lambda: nn.Upsample(scale_factor=2), IMAGE, "sp=2", ROWS),
    "twice as many, uneven": (lambda: nn.Upsample(scale_factor=2, mode="nearest-exact"), UNEVEN, "sp=2", ROWS),
    "thrice as many columns": (lambda: nn.Upsample(scale_factor=(1, 3)), IMAGE, "sp=2", "-, -, -, sp"),
    "of all": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, 1, 1), nn.MaxPool2d(3, 2, 1), TRANSPOSED(4, 3, 4, 2, 1), nn.AvgPool2d(3, 1, 1)
        ),
        IMAGE, "sp=2", ROWS,
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXACT)
def test_equals_eager(name: str) -> None:
    make, shape, mesh, placed = EXACT[name]
    program = compiled(make(), shape, mesh, placed)
    assert not gathers(program)
    assert program.verify().ok
    assert not type_faults(program.body)


def layer_of(data: st.DataObject) -> tuple[nn.Module, int]:
    """A layer, and the sizes that it is tried on are multiples of."""
    kind = data.draw(st.sampled_from(("max", "avg", "transposed")), label="kind")
    taps, stride = data.draw(st.integers(1, 5), label="taps"), data.draw(st.integers(1, 3), label="stride")
    dilation = data.draw(st.integers(1, 2), label="dilation")
    ceil = data.draw(st.booleans(), label="ceil")
    if kind == "transposed":
        padding = data.draw(st.integers(0, (taps - 1) * dilation), label="padding")
        more = data.draw(st.integers(0, max(stride, dilation) - 1), label="output padding")
        return nn.ConvTranspose1d(4, 4, taps, stride, padding, more, dilation=dilation), 1
    padding = data.draw(st.integers(0, taps // 2), label="padding")
    if kind == "max":
        return nn.MaxPool1d(taps, stride, padding, dilation, ceil_mode=ceil), stride
    return nn.AvgPool1d(taps, stride, padding, ceil, data.draw(st.booleans(), label="counts padding")), stride


@settings(max_examples=15)
@given(data=st.data())
def test_any(data: st.DataObject) -> None:
    layer, unit = layer_of(data)
    ranks, rows = data.draw(st.sampled_from((2, 4)), label="ranks"), data.draw(st.integers(1, 12), label="rows")
    try:
        layer(torch.randn(2, 4, rows * unit))
    except RuntimeError:
        return  # a kernel that does not fit
    if rows * unit > 1:
        assert compiled(layer, (2, 3, rows * unit), f"sp={ranks}").verify().ok


class Least(nn.Module):
    """Some windows hold nothing but the least number: their gradient goes to their first element."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv1d(3, 4, 1), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).masked_fill(x[:, :1] > -0.5, -torch.inf)
        y = nn.functional.max_pool1d(h, 3, 1, 1)
        return (torch.where(y.isinf(), 0.0, y) * self.scale).sum()


def test_windows_of_the_least_number() -> None:
    torch.manual_seed(0)
    program = shardc.compile(
        Least().double(),
        {"x": torch.randn(2, 3, 8, dtype=torch.float64)},
        mesh="sp=4",
        plan={"inputs": {"x": SPACE[1]}},
    )
    assert not gathers(program)
    assert program.verify().ok


class Positions(nn.Module):
    """Positions that the model reads itself, which count in the whole plane."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pointwise()

    def forward(self, x: Tensor) -> Tensor:
        y, positions = nn.functional.max_pool2d(self.conv(x), 3, 2, 1, return_indices=True)
        return (y * positions.cos()).sum()


@pytest.mark.parametrize("placed", [ROWS, "-, -, -, sp"])
def test_positions_count_in_the_whole_plane(placed: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    program = shardc.compile(Positions().double(), batch, mesh="sp=2", plan={"inputs": {"x": placed}})
    assert not gathers(program)
    assert program.verify().ok


PLANS: dict[str, dict[str, Any]] = {
    "zero 3": {"storage": {"zero": 3, "axes": ["tp"]}},
    "accumulate": {"accumulate": 2, "bucket": True, "fuse": True},
    "recompute": {"recompute": "full"},
    "mixed": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", PLANS)
def test_with_other_plans(name: str) -> None:
    layer = nn.Sequential(nn.MaxPool2d(3, 2, 1), TRANSPOSED(4, 4, 4, 2, 1), nn.AvgPool2d(3, 1, 1, False, False))
    program = compiled(layer, (4, 3, 8, 6), "tp=2, sp=2", **PLANS[name])
    assert all("sp" not in c.axes for c in program.collectives() if c.kind == "all_gather")
    assert program.verify().ok
    assert not type_faults(program.body)


# ------------------------------------------------------------------------------------------------ bytes, programs
def test_sends_the_rows_that_kernels_reach() -> None:
    row = 2 * 4 * 6 * 8
    program = compiled(nn.MaxPool2d(3, 2, 1), IMAGE, "sp=2")
    assert (rows_sent(program, "fwd"), rows_sent(program, "bwd")) == (row, row)
    program = compiled(nn.AvgPool2d(5, 1, 2), IMAGE, "sp=2")
    assert (rows_sent(program, "fwd"), rows_sent(program, "bwd")) == (4 * row, 4 * row)
    program = compiled(TRANSPOSED(4, 3, 4, 2, 1), IMAGE, "sp=2")
    row = 2 * 3 * 12 * 8  # of the result
    assert (rows_sent(program, "fwd"), rows_sent(program, "bwd")) == (2 * row, 2 * row)


def test_text_and_files() -> None:
    layer = nn.Sequential(nn.MaxPool2d(3, 2, 1), TRANSPOSED(4, 4, 4, 2, 1), nn.AvgPool2d(3, 1, 1, False, False))
    program = compiled(layer, UNEVEN[:2] + (6, 6), "sp=2")
    first = print_graph(program.body)
    second = print_graph(parse(first))
    for line, again in zip(first.splitlines(), second.splitlines(), strict=True):
        assert line.partition("    #")[0] == again.partition("    #")[0]
    assert shardc.Program.from_json(program.to_json()).verify().ok


def test_explained() -> None:
    program = compiled(TRANSPOSED(4, 3, 4, 2, 1), IMAGE, "sp=2")
    texts = [str(program.explain(c.value)) for c in program.collectives() if c.kind == "permute"]
    assert all(f'x = "{ROWS}"' in text for text in texts)
    assert any("makes a part of them" in text for text in texts)
    assert any("reads them" in text for text in texts)


def _changed(position: int, to: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.args = (*node.args[:position], to, *node.args[position + 1 :])

    return change


def _left_out(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])


POOL = torch.ops.aten.max_pool2d_with_indices.default
MUTANTS: dict[str, tuple[Any, Callable[[fx.Node], None]]] = {
    "zeros beyond the ends": (HALO, lambda node: setattr(node, "args", node.args[:5])),
    "no exchange": (HALO, _left_out),
    "padded as well": (POOL, _changed(3, [1, 1])),
    "gradients of others left out": (HALO_SUM, _changed(1, None)),
    "no sum": (HALO_SUM, _left_out),
    "another shape": (WIDEN, _changed(1, 2)),
    "positions by another axis": (SHIFT_POSITIONS, _changed(8, ["tp"])),
    "means along another dim": (MEAN_ANEW, _changed(1, 3)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_exchange_is_refused(name: str) -> None:
    layer = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, False, False))
    body = compiled(layer, IMAGE, "sp=2, tp=2").body
    target, change = MUTANTS[name]
    assert not type_faults(body)
    change(next(node for node in body.calls() if node.target is target))
    assert type_faults(body)


def test_padding_must_be_filled_before_it_is_sent() -> None:
    body = compiled(nn.MaxPool2d(3, 1, 1), UNEVEN, "sp=2").body
    halo = next(node for node in body.calls() if node.target is HALO)
    masked = halo.args[0]
    assert isinstance(masked, fx.Node)
    masked.replace_all_uses_with(masked.args[0])
    assert type_faults(body)
