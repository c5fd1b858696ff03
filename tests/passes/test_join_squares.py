"""A global norm is made by one call of all gradients, and changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import info, op_name, operands, type_of
from shardc.ir.ops.squares import SUM_OF_SQUARES, TOTAL_OF_SQUARES
from shardc.ir.parse import parse
from shardc.ir.text import print_graph
from shardc.passes.infer_placement import placement_faults
from shardc.passes.join_squares import JoinSquares
from shardc.runtime.train.nonfinite import probe
from tests.api.test_weight_casts import piped
from tests.models import test_unequal_blocks as unequal_blocks

ROWS = {"inputs": {"*": "dp, -"}}
TP = {"params": {"0.weight": "tp, -", "2.weight": "-, tp"}, **ROWS}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "dp": ("dp=2", ROWS),
    "tp": ("dp=2, tp=2", TP),
    "zero1": ("dp=2", ROWS | {"storage": {"zero": 1, "axes": ["dp"]}}),
    "zero3": ("dp=2, tp=2", TP | {"storage": {"zero": 3, "axes": ["dp"]}, "bucket": False}),
    "microbatches": ("dp=2", ROWS | {"accumulate": 2}),
    "fuse": ("dp=2, tp=2", TP | {"fuse": True}),
    "bf16": ("dp=2", ROWS | {"precision": "bf16"}),
    "fp16": ("dp=2", ROWS | {"precision": "fp16"}),
    "skip": ("dp=2, tp=2", TP | {"nonfinite": "skip"}),
}


def compiled(layout: str, dtype: torch.dtype = torch.float32, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    mesh, plan = LAYOUTS[layout]
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(8, 6, dtype=dtype)
    plan = {"clip_grad_norm": 0.1, **plan, **more}
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer, loss=_loss)


def _loss(y: Tensor, batch: object) -> Tensor:
    return y.square().mean()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_call_of_gradients_and_the_same_bits(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(layout)
    body = program.body
    joined = body.calls_of(TOTAL_OF_SQUARES)
    assert len(joined) <= 2  # what lies over tp, and what does not
    assert not body.calls_of(SUM_OF_SQUARES)
    assert not [call for call in body.calls() if op_name(call.target) == "abs"]
    assert sorted(name for call in joined for name in call.args[1]) == [  # type: ignore[union-attr]
        *("0.bias", "0.weight", "2.bias", "2.weight")
    ]
    assert program.verify().ok
    text = print_graph(body, comments=False)
    assert print_graph(parse(text), comments=False) == text
    monkeypatch.setattr(JoinSquares, "run", lambda _, graph: graph)
    before = compiled(layout)
    assert len(before.body.calls_of(SUM_OF_SQUARES)) == 4
    for one, other in zip(*(trained(each) for each in (program, before)), strict=True):
        assert torch.equal(one, other)


def trained(program: shardc.Program) -> list[Tensor]:
    trainer = program.launch()
    norms = [trainer.step(program.sample).grad_norm for _ in range(2)]
    return [torch.as_tensor(norms), *(value.clone() for value in trainer.state_dict(("param", "state")).values())]


@pytest.mark.parametrize("layout", ["dp", "tp", "fuse"])
def test_gradients_are_read_where_they_lie(layout: str) -> None:
    """Only halves are widened before, by what sums them over ranks; nothing is copied for the norm."""
    body = compiled(layout).body
    for call in body.calls_of(TOTAL_OF_SQUARES):
        for value in operands(call):
            assert info(value).phase != "opt"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_stage_of_a_pipeline_has_a_call_of_its_own_parameters(schedule: str) -> None:
    program = piped(schedule, clip_grad_norm=0.1)
    joined = [call for graph in program.staged.graphs() for call in graph.calls_of(TOTAL_OF_SQUARES)]
    named = [name for call in joined for name in call.args[1]]  # type: ignore[union-attr]
    assert len(joined) == 2
    assert len(named) == len({*named}) == len([port for port in program.reference.inputs if port.role == "param"])
    assert program.verify().ok


def test_the_probe_tells_parameters_apart() -> None:
    body = compiled("tp").body
    asked = probe(body)
    assert {port.name for port in asked.outputs} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(len(operands(call)) == 1 for call in asked.calls_of(TOTAL_OF_SQUARES))


def test_a_false_placement_is_found() -> None:
    """Squares of what lies over an axis are not those of all."""
    body = compiled("tp").body
    mesh = body.mesh
    split, whole = sorted(body.calls_of(TOTAL_OF_SQUARES), key=lambda call: not type_of(call).partial)
    assert placement_faults(split, [type_of(split)], mesh) == []
    assert placement_faults(split, [type_of(whole)], mesh)
    assert placement_faults(whole, [type_of(split)], mesh)


FALSE = """
graph @step mesh(tp=2) {
  %a = param "a" : f64[8]
  %b = param "b" : f64[4*8|-8|-8@tp, 16]
  %c = param "c" : f64[8@tp]
opt:
  %pending = mul.Scalar(%a, 2.0) : f64[8] |sum tp
  %of.pending = shardc.total_of_squares([%c, %pending], of=["c", "a"]) : f64[] |sum tp
  %of.copies = shardc.total_of_squares([%c, %b], of=["c", "b"]) : f64[] |sum tp
  %of.both = shardc.total_of_squares([%c, %a], of=["c", "a"]) : f64[] |sum tp
  return output "x" = %of.pending, output "y" = %of.copies, output "z" = %of.both
}
"""


def test_what_has_no_such_sum_is_found() -> None:
    """A square of what is still to be summed, one of each copy of a block, and tensors that lie otherwise."""
    graph = parse(FALSE)
    faults = [placement_faults(call, [type_of(call)], graph.mesh) for call in graph.calls_of(TOTAL_OF_SQUARES)]
    found = [fault for each in faults for fault in each]
    assert [text.split(" ")[0] for text in found] == ["squares", "counts", "adds"]


class Read(nn.Module):
    """One parameter alone, and complex ones."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3, dtype=dtype) for dtype in dtypes])

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x * w).abs().square().sum() for w in self.weights), torch.zeros(()))


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.complex64, torch.float32), (torch.float64, torch.float32)])
def test_other_parameters(dtypes: tuple[torch.dtype, ...]) -> None:
    model = Read(*dtypes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = shardc.compile(model, torch.randn(3), mesh="dp=1", plan={"clip_grad_norm": 0.1}, optimizer=optimizer)
    (call,) = program.body.calls_of(TOTAL_OF_SQUARES)
    assert [type_of(value).dtype.is_complex for value in operands(call)] == [False] * len(dtypes)
    assert program.verify().ok


@pytest.mark.parametrize("fuse", [False, True])
def test_a_block_that_all_ranks_have_counts_once(fuse: bool, tmp_path: Path) -> None:
    """Queries are cut, the key and value of one head are on every rank: all but one rank's are masked."""
    plan = {"params": unequal_blocks.FUSED, "clip_grad_norm": 0.1, "fuse": fuse}
    program = unequal_blocks.compiled(unequal_blocks.Attention(kv=1).double(), plan)
    assert "|-" in str(type_of(operands(program.body.calls_of(TOTAL_OF_SQUARES)[0])[0]))
    assert program.verify().ok
    program.save(tmp_path / "program.json")
    assert shardc.Program.load(tmp_path / "program.json").text() == program.text()
