"""`verify` accepts what is right; of what is not it names the first instruction, its line and its ranks."""

from dataclasses import replace

import pytest
import torch

import shardc
from shardc.ir.graph import Graph, info
from shardc.ir.mesh import Mesh
from shardc.runtime.oracle.compare import relative_error
from shardc.runtime.oracle.report import Report, Row
from shardc.runtime.oracle.verify import verify
from tests.handmade import MESH, Builder, aten, mlp, mlp_inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("batch", "width"), [(4, 12), (3, 13)])
def test_a_right_program(batch: int, width: int, dtype: torch.dtype) -> None:
    inputs = mlp_inputs(batch, width)
    report = verify(mlp(batch=batch, width=width), mlp(False, batch=batch, width=width), inputs, dtype)
    assert report.ok
    assert report.first_mismatch is None
    assert [(row.role, row.name) for row in report.rows] == [
        ("loss", "loss"),
        ("grad", "w1"),
        ("grad", "w2"),
        ("buffer", "steps"),
    ]
    assert "equal to the single device" in str(report)


def test_an_error_beyond_the_tolerance_that_is_equal_says_why() -> None:
    rows = Row("loss", "loss", 2e-13, ()), Row("grad", "w", 3e-12, (2,), explained=5e-12)
    report = Report(rows, 1e-12, torch.float64, 2)
    assert report.ok
    assert "error 3.0e-12, tolerance 1e-12, or up to 5.0e-12 where rounding explains it" in str(report)
    assert "rounding" not in str(replace(report, rows=rows[:1]))
    assert "rounding" not in str(replace(report, rows=(*rows, Row("grad", "u", 1.0, (2,)))))


def edit(graph: Graph, name: str) -> torch.fx.Node:
    return graph.by_name(name)


def test_a_forgotten_all_reduce_is_named() -> None:
    body = mlp()
    wrong = edit(body, "proj.all_reduce")
    for user in list(wrong.users):
        user.replace_input_with(wrong, edit(body, "proj.mm"))
    report = verify(body, mlp(False), mlp_inputs())
    assert not report.ok
    assert report.first_mismatch is not None
    # %proj.mm itself is right, as a pending sum; what consumes it as if it were whole is not.
    assert report.first_mismatch.name == "square"
    assert report.first_mismatch.ranks == (0, 1, 2, 3)
    assert "SC505" in str(report)
    assert info(edit(body, "square")).source in str(report)


def test_ranks_that_are_wrong_are_listed() -> None:
    def graph(sharded: bool) -> Graph:
        b = Builder(MESH if sharded else Mesh(), sharded)
        x = b.input("x", "f64[4@dp]", "input")
        y = b.call("y", "f64[4@dp]", aten.mul.Tensor, x, 2.0)
        if sharded:
            offset = b.call("offset", "i64[]", torch.ops.shardc.axis_offset.default, ["dp"], [1])
            y = b.call("z", "f64[4@dp]", aten.add.Tensor, y, offset)
        else:
            y = b.call("z", "f64[4@dp]", aten.add.Tensor, y, 0.0)
        b.output("output", "z", y)
        return b.graph()

    report = verify(graph(True), graph(False), {"x": torch.ones(4, dtype=torch.float64)})
    assert report.first_mismatch is not None
    assert report.first_mismatch.name == "z"
    assert report.first_mismatch.ranks == (2, 3)


def test_replicas_that_differ_are_an_error() -> None:
    """Rank 0 holds the right value, rank 1 another one: assembling alone would not notice."""

    def graph(sharded: bool) -> Graph:
        b = Builder(Mesh(tp=2) if sharded else Mesh(), sharded)
        x = b.input("x", "f64[4]", "input")
        offset = b.call("offset", "i64[]", torch.ops.shardc.axis_offset.default, ["tp"], [1]) if sharded else 0
        b.output("output", "z", b.call("z", "f64[4]", aten.add.Tensor, x, offset))
        return b.graph()

    report = verify(graph(True), graph(False), {"x": torch.ones(4, dtype=torch.float64)})
    assert not report.ok
    assert report.first_mismatch is not None
    assert report.first_mismatch.ranks == (1,)


def test_the_reference_against_eager() -> None:
    inputs = mlp_inputs(dtype=torch.float64)
    report = verify(mlp(), mlp(False), inputs, eager={("loss", "loss"): torch.tensor(1.0)})
    assert not report.ok, "ranks that agree with a reference which is not the model prove nothing"
    assert report.max_rel_error <= report.tolerance
    assert report.first_mismatch is None
    assert report.rows[0].eager_error is not None
    assert report.rows[0].eager_error > 0.1
    assert "eager" in str(report)


def test_relative_error() -> None:
    inf, nan = float("inf"), float("nan")
    assert relative_error(torch.tensor([1.0, inf, nan]), torch.tensor([2.0, inf, nan])) == 0.5
    assert relative_error(torch.tensor([1.0]), torch.tensor([inf])) == inf
    assert relative_error(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert relative_error(torch.tensor([1e-20]), torch.tensor([0.0]), floor=1e-6) == pytest.approx(1e-14)
    assert relative_error(torch.tensor([True]), torch.tensor([False])) > 1


def test_an_update_in_halves_is_an_update() -> None:
    """1 - 0.999 ** step is a number of double precision: in bfloat16 it would be 0, and what it divides infinite."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(8, 4)  # whose rows mostly have no gradient
    program = shardc.compile(
        model,
        {"input": torch.tensor([[1, 2], [2, 3]])},
        mesh="dp=2",
        plan={"inputs": {"input": "dp"}},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda y, _: y.square().mean(),
    )
    report = program.verify(dtype=torch.bfloat16)
    assert report.ok, str(report)
    assert max(row.error for row in report.rows) < 1e-1
    assert report.eager_error is not None
    assert report.eager_error < 1e-1
