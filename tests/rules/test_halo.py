"""Convolutions over a sharded spatial dim: exact, by the bytes of neighbours' rows; what does not fit is gathered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from kernels_triton.generated.op import FUSED
from shardc.ir.graph import Graph, op_name, operands, producer
from shardc.ir.mesh import Mesh
from shardc.ir.ops.context import RankContext, running
from shardc.ir.ops.halo import HALO, HALO_SUM, NEIGHBOUR_ROWS
from shardc.ir.ops.local import axis_offset
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.passes.type_check import type_faults
from shardc.rules.window import Window

C1, C2, C3 = nn.Conv1d, nn.Conv2d, nn.Conv3d
ROWS = "-, -, sp, -"


class Convs(nn.Module):
    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return x.square().mean()


def same(channels: int = 3, out: int = 4, **options: Any) -> nn.Conv2d:
    return C2(channels, out, 3, padding=1, **options)


def compiled(model: nn.Module, shape: tuple[int, ...], mesh: str, x: str = ROWS, **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    batch = {"x": torch.randn(shape, dtype=torch.float64)}
    return shardc.compile(model.double(), batch, mesh=mesh, plan={"inputs": {"x": x}, **plan})


def rows_sent(program: shardc.Program, phase: str) -> int:
    moved = [c for c in program.collectives() if c.kind == "permute" and c.phase == phase]
    return sum(c.bytes_per_step for c in moved)


def gathers(program: shardc.Program) -> list[str]:
    return [c.kind for c in program.collectives() if c.kind in ("all_gather", "all_to_all")]


# ------------------------------------------------------------------------------------------------ exact
Case = tuple[Callable[[], nn.Module], tuple[int, ...], str, str]
EXACT: dict[str, Case] = {
    "two ranks": (lambda: Convs(same(), same(4)), (2, 3, 8, 6), "sp=2", ROWS),
    "four ranks": (lambda: Convs(same(), same(4)), (2, 3, 8, 6), "sp=4", ROWS),
    "three ranks": (lambda: Convs(same(), same(4)), (2, 3, 9, 6), "sp=3", ROWS),
    "columns": (lambda: Convs(same(), same(4)), (2, 3, 5, 8), "sp=2", "-, -, -, sp"),
    "rows and columns": (lambda: Convs(same(), same(4)), (2, 3, 8, 8), "a=2, b=2", "-, -, a, b"),
    "two axes on rows": (lambda: Convs(same(), same(4)), (2, 3, 8, 6), "a=2, b=2", "-, -, a.b, -"),
    "the other way": (lambda: Convs(same(), same(4)), (2, 3, 8, 6), "a=2, b=2", "-, -, b.a, -"),
    "batch and rows": (lambda: Convs(same(), same(4, groups=2)), (3, 3, 8, 6), "dp=2, sp=2", "dp, -, sp, -"),
    "a wide kernel": (lambda: Convs(C2(3, 4, (5, 3), padding=(2, 0))), (2, 3, 4, 6), "sp=2", ROWS),
    "dilated": (lambda: Convs(C1(3, 4, 3, padding=2, dilation=2), C1(4, 4, 1)), (2, 3, 8), "sp=2", "-, -, sp"),
    "one stride of two": (lambda: Convs(same(stride=2), same(4)), (2, 3, 8, 6), "sp=2", ROWS),
    "two strides of two": (lambda: Convs(same(stride=2), same(4, stride=2)), (2, 3, 16, 8), "sp=4", ROWS),
    "an even kernel": (lambda: Convs(C1(3, 4, 4, stride=2, padding=1)), (2, 3, 8), "sp=2", "-, -, sp"),
    "patches": (lambda: Convs(C2(3, 4, 2, stride=2), same(4)), (2, 3, 8, 4), "sp=2", ROWS),
    "a stride beyond the kernel": (lambda: Convs(C1(3, 4, 2, stride=4), C1(4, 4, 1)), (2, 3, 16), "sp=2", "-, -, sp"),
    "uneven patches": (lambda: Convs(C2(3, 4, 2, stride=2), C2(4, 4, 1)), (2, 3, 6, 4), "sp=2", ROWS),
    "depth": (lambda: Convs(C3(3, 4, 3, padding=1)), (2, 3, 4, 4, 3), "sp=2", "-, -, sp, -, -"),
    "uneven rows": (lambda: Convs(same(), same(4)), (2, 3, 7, 6), "sp=2", ROWS),
    "a rank of padding alone": (lambda: Convs(same(), same(4)), (2, 3, 5, 6), "sp=4", ROWS),
    "uneven over two axes": (lambda: Convs(same(), same(4)), (2, 3, 7, 6), "a=2, b=2", "-, -, a.b, -"),
    "uneven strides of two": (lambda: Convs(same(stride=2), same(4)), (2, 3, 10, 6), "sp=2", ROWS),
    "depthwise": (lambda: Convs(C2(4, 4, 3, padding=1, groups=4)), (2, 4, 6, 4), "sp=2", ROWS),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EXACT)
def test_equals_eager(name: str) -> None:
    make, shape, mesh, placed = EXACT[name]
    program = compiled(make(), shape, mesh, placed)
    assert not gathers(program)
    assert not [d for d in program.diagnostics if d.severity != "note"]
    assert program.verify().ok
    assert not type_faults(program.body)


PLANS: dict[str, dict[str, Any]] = {
    "channels": {"params": {"convs.0.weight": "tp, -", "convs.0.bias": "tp", "convs.1.weight": "-, tp"}},
    "zero 3": {"storage": {"zero": 3, "axes": ["tp"]}},
    "accumulate": {"accumulate": 2, "bucket": True, "fuse": True},
    "recompute": {"recompute": "full"},
    "mixed": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", PLANS)
def test_with_other_plans(name: str) -> None:
    program = compiled(Convs(same(), same(4, stride=2)), (4, 3, 8, 6), "tp=2, sp=2", **PLANS[name])
    assert all("sp" not in c.axes for c in program.collectives() if c.kind == "all_gather")
    assert Counter(op_name(node.target) for node in program.body.calls())["shardc.halo"] >= 4
    assert program.verify().ok
    assert not type_faults(program.body)


class Residual(nn.Module):
    """What stands between convolutions: norms over the batch and rows, pooling of all of it, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = same(bias=False), nn.BatchNorm2d(4), same(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        return self.head((h + self.second(h)).mean((2, 3))).square().mean()


def test_a_residual_block_gathers_nothing() -> None:
    program = compiled(Residual(), (4, 3, 8, 6), "dp=2, sp=2", "dp, -, sp, -")
    assert not gathers(program)
    assert program.verify().ok


@settings(max_examples=12)
@given(data=st.data())
def test_any_that_tiles(data: st.DataObject) -> None:
    taps, stride, dilation = (
        data.draw(st.integers(1, n), label=name) for name, n in zip("tsd", (5, 3, 2), strict=True)
    )
    padding, ranks = data.draw(st.integers(0, 4), label="padding"), data.draw(st.sampled_from((2, 4)), label="ranks")
    each, groups = data.draw(st.integers(1, 4), label="rows a rank"), data.draw(st.sampled_from((1, 2)), label="groups")
    short = data.draw(st.integers(0, ranks - 1), label="rows less")
    size, extent = (each * ranks - short) * stride, (taps - 1) * dilation + 1
    if not size:
        return
    if size + 2 * padding < extent:
        return
    model = Convs(C1(2, 4, 1), C1(4, 4, taps, stride, padding, dilation, groups))
    program = compiled(model, (2, 2, size), f"sp={ranks}", "-, -, sp")
    window = Window(size, extent, stride, padding)
    fits = window.tiles and max(window.before, window.behind) <= each * stride
    if fits:
        assert not gathers(program)
    assert program.verify().ok


# ------------------------------------------------------------------------------------------------ bytes
def test_sends_the_rows_that_kernels_reach() -> None:
    """A row of x is 2 x 3 x 6 numbers, of what the first makes 2 x 4 x 6; x has no gradient."""
    program = compiled(Convs(same(), C2(4, 4, 5, padding=2)), (2, 3, 8, 6), "sp=2")
    x, h = 2 * 3 * 6 * 8, 2 * 4 * 6 * 8
    assert rows_sent(program, "fwd") == 2 * x + 4 * h
    assert rows_sent(program, "bwd") == 2 * x + 4 * h + 4 * h  # once more, and the gradient back
    permutes = [c for c in program.collectives() if c.kind == "permute"]
    assert {c.cause.split("   ")[0] for c in permutes} == {f'x = "{ROWS}"'}
    assert sorted({c.payload_bytes for c in permutes}) == [x, 2 * h]


def test_a_stride_reads_rows_on_one_side() -> None:
    program = compiled(Convs(same(stride=2)), (2, 3, 8, 6), "sp=4")
    assert rows_sent(program, "fwd") == 2 * 3 * 6 * 8


def test_memory_is_that_of_own_rows() -> None:
    """Among four ranks, a quarter, and the rows that are read beside."""
    alone, spread = (
        compiled(Convs(same(), same(4), same(4)), (2, 3, 64, 6), f"sp={ranks}").memory().peak for ranks in (1, 4)
    )
    assert spread < alone * (0.25 + 0.15)


def test_work_is_divided() -> None:
    alone, spread = (compiled(Convs(same(4), same(4)), (2, 4, 8, 6), f"sp={n}").flops().total for n in (1, 2))
    assert spread == alone / 2


# ------------------------------------------------------------------------------------------------ what does not fit
UNFIT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "fewer rows than a neighbour needs": (lambda: Convs(C2(3, 4, 7, padding=3)), (2, 3, 4, 8), "sp=2", "SC209"),
    "rows with gaps": (lambda: Convs(same()), (2, 3, 5, 8), "a=2, b=2", "SC209"),
    "fewer of the result": (lambda: Convs(same(), C2(4, 4, 3)), (2, 3, 8, 8), "sp=2", "SC203"),
    "transposed": (lambda: Convs(same(), nn.ConvTranspose2d(4, 3, 4, stride=2)), (2, 3, 8, 8), "sp=2", "SC203"),
    "a deeper one": (lambda: Convs(same(), C2(4, 4, 7, padding=3)), (2, 3, 4, 8), "sp=2", "SC203"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_gathered(name: str) -> None:
    make, shape, mesh, code = UNFIT[name]
    program = compiled(make(), shape, mesh, ROWS if mesh.startswith("sp") else "-, -, a.b, -")
    assert "all_gather" in gathers(program)
    warned = [d for d in program.diagnostics if d.code == code]
    assert any("convolution" in d.message and "whole" in d.message for d in warned)
    assert program.verify().ok


def test_rows_within_a_factor_are_gathered() -> None:
    """The minor of two factors is interleaved: a rank's elements are no run."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = C1(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.flatten(2)).square().mean()

    program = compiled(Folded(), (2, 3, 4, 4), "sp=2", "-, -, -, sp")
    assert "all_gather" in gathers(program)
    assert program.verify().ok
    runs = compiled(Folded(), (2, 3, 4, 4), "sp=2", "-, -, sp, -")
    assert not gathers(runs)
    assert runs.verify().ok


# ------------------------------------------------------------------------------------------------ programs
def test_text_and_files() -> None:
    program = compiled(Convs(same(), same(4, stride=2)), (2, 3, 8, 6), "sp=2")
    first = print_graph(program.body)
    second = print_graph(parse(first))
    for line, again in zip(first.splitlines(), second.splitlines(), strict=True):
        assert line.partition("    #")[0] == again.partition("    #")[0]
    read = shardc.Program.from_json(program.to_json())
    assert [str(c) for c in read.collectives()] == [str(c) for c in program.collectives()]
    assert read.verify().ok


def test_explained() -> None:
    program = compiled(Convs(same(), same(4)), (2, 3, 8, 6), "sp=2")
    texts = [str(program.explain(c.value)) for c in program.collectives() if c.kind == "permute"]
    assert all(f'x = "{ROWS}"' in text for text in texts)
    assert "kernels reach 1 element before a rank's own" in texts[0]
    assert "kernels reach 1 element behind a rank's own" in texts[1]
    assert any("leaves their gradient to the rank that has them" in text for text in texts)


def _changed(position: int, to: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.args = (*node.args[:position], to, *node.args[position + 1 :])

    return change


def _left_out(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])


def _swapped(node: fx.Node) -> None:
    x, before, behind, *rest = node.args
    node.args = (x, behind, before, *rest)


CONVOLUTION = torch.ops.aten.convolution.default
MUTANTS: dict[str, tuple[Any, Callable[[fx.Node], None]]] = {
    "other rows": (NEIGHBOUR_ROWS, _changed(3, 1)),
    "of the other neighbour": (NEIGHBOUR_ROWS, _changed(5, -1)),
    "of nobody": (NEIGHBOUR_ROWS, _changed(5, 2)),
    "along another dim": (NEIGHBOUR_ROWS, _changed(2, 3)),
    "before and behind": (HALO, _swapped),
    "no rows before": (HALO, _changed(1, None)),
    "no exchange": (HALO, _left_out),
    "padded as well": (CONVOLUTION, _changed(4, [1, 1])),
    "another dilation": (CONVOLUTION, _changed(5, [2, 1])),
    "gradients of others left out": (HALO_SUM, _changed(1, None)),
    "gradients to the other neighbour": (HALO_SUM, _swapped),
    "other rows of a gradient": (HALO_SUM, _changed(3, 0)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_exchange_is_refused(name: str) -> None:
    program = compiled(Convs(same(), same(4)), (2, 3, 8, 6), "sp=2")
    target, change = MUTANTS[name]
    body: Graph = program.body
    assert not type_faults(body)
    change(next(node for node in body.calls() if node.target is target))
    assert type_faults(body)


def test_padding_may_be_masked_by_a_kernel_that_knows_its_rank() -> None:
    program = compiled(
        Convs(C1(3, 4, 3, padding=1), C1(4, 4, 3, padding=1)), (2, 3, 4097), "sp=2", "-, -, sp", fuse=True
    )
    halos = [node for node in program.body.calls() if node.target is HALO]
    masked = [node for node in halos if producer(node.args[0])[0].target is FUSED]  # type: ignore[arg-type]
    assert masked
    assert program.verify().ok
    assert not type_faults(program.body)
    kernel = producer(masked[0].args[0])[0]  # type: ignore[arg-type]
    text = str(kernel.args[1])
    assert ", 0.0)" in text
    kernel.args = (kernel.args[0], text.replace(", 0.0)", ", 7.0)"), *kernel.args[2:])
    assert any("puts what pads" in fault.message for fault in type_faults(program.body))
    kernel.args = (kernel.args[0], text, *kernel.args[2:])
    assert not type_faults(program.body)
    (offset,) = (value for value in operands(kernel) if value.target is axis_offset)
    offset.args = ([], [])  # of no axis: on every rank the same
    assert any("puts what pads" in fault.message for fault in type_faults(program.body))


# ------------------------------------------------------------------------------------------------ ops
def test_halo_sum_is_the_transpose_of_halo() -> None:
    """<halo(x), y> = <x, halo_sum(y)> over all ranks."""
    mesh, axes, before, behind, rows = Mesh(sp=3), ["sp"], 2, 1, 4
    x = [torch.randn(2, rows, dtype=torch.float64) for _ in range(3)]
    y = [torch.randn(2, before + rows + behind, dtype=torch.float64) for _ in range(3)]
    forward = backward = 0.0
    for rank in range(3):
        previous, following = (rank - 1) % 3, (rank + 1) % 3
        with running(RankContext(mesh, mesh.coordinate(rank), None)):  # type: ignore[arg-type]
            wide = HALO(x[rank], x[previous][:, rows - before :], x[following][:, :behind], 1, axes)
            edges = y[previous][:, rows + before :], y[following][:, :before]
            total = HALO_SUM(y[rank], *edges, before, behind, 1, axes)
        want = F.pad(torch.cat(x, 1), [before, behind])[:, rank * rows : rank * rows + before + rows + behind]
        torch.testing.assert_close(wide, want, rtol=0, atol=0)
        forward += float((wide * y[rank]).sum())
        backward += float((total * x[rank]).sum())
    assert math.isclose(forward, backward, rel_tol=1e-12)
