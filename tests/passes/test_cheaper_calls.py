"""Calls that go through less memory give the same numbers, bit by bit, and what they could change stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.text import print_graph
from shardc.passes.cheaper_calls import CheaperCalls

aten = torch.ops.aten
DP = {"inputs": {"x": "dp, -, -"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1", {}),
    "accumulate": ("dp=1", {"accumulate": 2}),
    "dp": ("dp=2", DP),
    "uneven": ("dp=3", DP),
    "zero-3": ("dp=2", {**DP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "recompute": ("dp=1", {"recompute": "full"}),
    "tp": ("tp=2", {"params": {"up.weight": "tp, -"}}),
}


class Model(nn.Module):
    """A norm by the mean of squares, and positions that are rotated by halves: what Llama's layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(6, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        angle = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * torch.ones(8, dtype=h.dtype)
        turned = h * angle.cos() + torch.cat((-h[..., 4:], h[..., :4]), -1) * angle.sin()
        return turned.tanh().square().mean()


def compiled(layout: str, dtype: torch.dtype = torch.float32, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Model().to(dtype)
    mesh, plan = LAYOUTS[layout]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(4, 5, 6, dtype=dtype)}
    return shardc.compile(model, batch, mesh=mesh, plan={**plan, **more}, optimizer=optimizer)


def trained(program: shardc.Program) -> dict[str, Tensor]:
    trainer = program.launch()
    losses = {f"loss {step}": torch.as_tensor(trainer.step(program.sample).loss) for step in range(3)}
    return losses | {name: value.clone() for name, value in trainer.state_dict(("param", "state")).items()}


def powers(program: shardc.Program) -> list[Any]:
    return [call.args[1] for call in program.body.calls_of(aten.pow.Tensor_Scalar)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_are_the_same(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CheaperCalls, "run", lambda _, graph: graph)
        before = compiled(layout, dtype)
    program = compiled(layout, dtype)
    assert 1.0 in powers(before)
    assert 1.0 not in powers(program)
    assert len(before.body.calls_of(aten.slice_backward.default)) >= 2
    if layout != "tp":
        assert not program.body.calls_of(aten.slice_backward.default)
    expected, found = trained(before), trained(program)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_program_is_verified_and_its_text_is_read_back(layout: str) -> None:
    program = compiled(layout)
    report = program.verify()
    assert report, str(report)
    text = print_graph(program.body, comments=False)
    assert print_graph(shardc.parse(text), comments=False) == text


def graph_of(lines: str) -> str:
    return f"""graph @step mesh(tp=2) {{
  %x = input "x" : f32[4, 6]
  %s = input "s" : f32[4, 1]
  %g = input "g" : f32[4, 2]
  %h = input "h" : f32[4, 3]
  %k = input "k" : f32[4, 4]
  %w = input "w" : f32[6, 6@tp]
{lines}
}}"""


def slice_backward(name: str, of: str, start: int, end: int, step: int = 1) -> str:
    arguments = f"%{of}, input_sizes=[4, 6], dim=1, start={start}, end={end}, step={step}"
    return f"  %{name} = slice_backward({arguments}) : f32[4, 6]\n"


JOINED = (
    slice_backward("a", "g", 0, 2)
    + slice_backward("b", "k", 2, 6)
    + """  %y = add.Tensor(%b, %a) : f32[4, 6]
  return output "y" = %y"""
)
RETURNED = '  return output "y" = %y'
KEPT = {
    "a gap": slice_backward("a", "g", 0, 2)
    + slice_backward("b", "h", 3, 6)
    + "  %y = add.Tensor(%a, %b) : f32[4, 6]\n",
    "an overlap": slice_backward("a", "h", 0, 3)
    + slice_backward("b", "k", 2, 6)
    + "  %y = add.Tensor(%a, %b) : f32[4, 6]\n",
    "steps": slice_backward("a", "h", 0, 6, 2)
    + slice_backward("b", "h", 1, 6, 2)
    + "  %y = add.Tensor(%a, %b) : f32[4, 6]\n",
    "a factor": slice_backward("a", "g", 0, 2)
    + slice_backward("b", "k", 2, 6)
    + "  %y = add.Tensor(%a, %b, alpha=2) : f32[4, 6]\n",
    "another reader": slice_backward("a", "g", 0, 2)
    + slice_backward("b", "k", 2, 6)
    + "  %c = add.Tensor(%a, %b) : f32[4, 6]\n  %y = mul.Tensor(%c, %a) : f32[4, 6]\n",
    "the same slice": slice_backward("a", "h", 0, 3) + "  %y = add.Tensor(%a, %a) : f32[4, 6]\n",
    "three slices": slice_backward("a", "g", 0, 2)
    + slice_backward("b", "g", 2, 4)
    + slice_backward("c", "g", 4, 6)
    + "  %d = add.Tensor(%a, %b) : f32[4, 6]\n  %y = add.Tensor(%d, %c) : f32[4, 6]\n",
    "a product reads it": "  %e = expand(%s, [4, 6]) : f32[4, 6]\n  %d = div.Scalar(%e, 6) : f32[4, 6]\n"
    "  %v = view(%d, [24]) : f32[24]\n  %y = mul.Tensor(%v, %v) : f32[24]\n",
    "it is returned": "  %e = expand(%s, [4, 6]) : f32[4, 6]\n  %y = div.Scalar(%e, 6) : f32[4, 6]\n",
    "split columns": "  %e = expand(%s, [4, 3]) {~0: tp} : f32[4, 6@tp]\n"
    "  %d = div.Scalar(%e, 6) {~0: tp} : f32[4, 6@tp]\n"
    "  %y = neg(%d) {~0: tp} : f32[4, 6@tp]\n",
    "nothing grows": "  %e = expand(%x, [4, 6]) : f32[4, 6]\n  %d = div.Scalar(%e, 6) : f32[4, 6]\n"
    "  %y = mul.Tensor(%d, %x) : f32[4, 6]\n",
    "squares": "  %y = pow.Tensor_Scalar(%x, 2.0) : f32[4, 6]\n",
    "a power that is returned": "  %y = pow.Tensor_Scalar(%x, 1.0) : f32[4, 6]\n",
}


@pytest.mark.parametrize("case", KEPT)
def test_other_calls_stay(case: str) -> None:
    graph = shardc.parse(graph_of(KEPT[case] + RETURNED))
    assert print_graph(CheaperCalls().run(graph), comments=False) == print_graph(graph, comments=False)


def test_programs_with_kernels_keep_their_calls() -> None:
    assert CheaperCalls(enabled=False).run(graph := shardc.parse(graph_of(JOINED))) is graph
