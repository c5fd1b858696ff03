"""Folding: layers that are equal but for their number, and those that only look so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.fold import Folded, Line, described, fold, folded_text
from shardc.ir.layers import layer_of


def lines(*texts: str) -> list[Line]:
    """Of the layer that the first name of each says."""
    return [Line(text, layer_of(text.split()[0].lstrip("%").removeprefix("d."))) for text in texts]


def test_equal_layers_fold() -> None:
    text = lines(
        "%x = input", *(f"%h.{i}.y = relu(%h.{i - 1}.y, %h.{i}.w) : f32[4]" for i in range(1, 5)), "%z = sum(%h.4.y)"
    )
    assert fold(text) == [Folded(0, 1), Folded(1, 2, ("h.1", "h.2", "h.3", "h.4")), Folded(5, 6)]
    assert folded_text(text) == [
        "%x = input",
        "  # x 4 layers: h.1 to 4, all as h.1",
        "%h.1.y = relu(%h.0.y, %h.1.w) : f32[4]",
        "  # end of h.1 to 4",
        "%z = sum(%h.4.y)",
    ]


def test_the_first_layer_is_given_what_the_others_get_from_the_one_before() -> None:
    text = lines("%h.0.y = relu(%embed)", "%h.1.y = relu(%h.0.y)", "%h.2.y = relu(%h.1.y)")
    assert fold(text) == [Folded(0, 1, ("h.0", "h.1", "h.2"))]


def test_backward_goes_from_the_last_layer_to_the_first() -> None:
    text = lines("%d.h.2.y = relu(%d.norm)", "%d.h.1.y = relu(%d.h.2.y)", "%d.h.0.y = relu(%d.h.1.y)")
    assert fold(text) == [Folded(2, 3, ("h.2", "h.1", "h.0"))], "shown is the lowest, as in forward"


def test_what_all_layers_share_is_equal() -> None:
    text = lines("%h.1.y = add(%h.1.x, %mask)", "%h.2.y = add(%h.2.x, %mask)", "%h.3.y = add(%h.3.x, %mask)")
    assert fold(text) == [Folded(0, 1, ("h.1", "h.2", "h.3"))]
    text = lines(
        "%h.1.y = add(%h.1.x, %h.0.mask)", "%h.2.y = add(%h.2.x, %h.0.mask)", "%h.3.y = add(%h.3.x, %h.0.mask)"
    )
    assert fold(text) == [Folded(0, 1, ("h.1", "h.2", "h.3"))]


UNEQUAL = {
    "another op": ("%h.1.y = relu(%h.1.x)", "%h.2.y = gelu(%h.2.x)"),
    "another type": ("%h.1.y = relu(%h.1.x) : f32[4@tp]", "%h.2.y = relu(%h.2.x) : f32[4]"),
    "another number": ("%h.1.y = mul(%h.1.x, 0.5)", "%h.2.y = mul(%h.2.x, 0.25)"),
    "another mask": ("%h.1.y = add(%h.1.x, %full)", "%h.2.y = add(%h.2.x, %sliding)"),
    "another weight of its own": ("%h.1.y = mm(%h.1.x, %h.1.a)", "%h.2.y = mm(%h.2.x, %h.2.b)"),
    "a layer further back": (
        "%h.3.y = add(%h.2.x, %h.3.x)",
        "%h.4.y = add(%h.2.x, %h.4.x)",
        "%h.5.y = add(%h.3.x, %h.5.x)",
    ),
    "another list": ("%h.1.y = relu(%h.1.x)", "%g.2.y = relu(%g.2.x)"),
    "its own value, where another reads what it is given": ("%h.0.y = add(%e, %e)", "%h.1.y = add(%h.0.y, %h.1.x)"),
    "two values, where another reads one": ("%h.0.y = add(%e, %e)", "%h.1.y = add(%h.0.y, %h.0.x)"),
    "a result of another number": ("%h.1.y = relu(%h.1.s.0)", "%h.2.y = relu(%h.2.s.1)"),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_what_differs_is_printed_by_itself(case: str) -> None:
    text = lines(*UNEQUAL[case])
    folded = fold(text)
    # Of three, two may be equal; never all.
    assert max(len(part.layers) for part in folded) < len(text)
    if len(text) == 2:
        assert folded_text(text) == [line.text for line in text]


def test_what_lies_between_layers_goes_with_the_one_before() -> None:
    text = lines(
        *(t for i in range(4) for t in (f"%h.{i}.y = relu(%add_{i})", f"%add_{i + 1} = add(%add_{i}, %h.{i}.y)"))
    )
    folded = fold(text)
    assert folded == [Folded(0, 2, ("h.0", "h.1", "h.2")), Folded(6, 7, ("h.3",)), Folded(7, 8)]
    text[3] = Line("%add_2 = add(%add_0, %h.1.y)")  # past the layer before
    assert [part.layers for part in fold(text)] == [("h.0",), ("h.1",), ("h.2",), ("h.3",), ()]


def test_layers_that_alternate_fold_apart() -> None:
    text = lines(*(f"%h.{i}.y = {'relu' if i % 2 else 'gelu'}(%h.{i}.x)" for i in range(8)))
    assert [part.layers for part in fold(text)] == [("h.0", "h.2", "h.4", "h.6"), ("h.1", "h.3", "h.5", "h.7")]
    assert described(("h.0", "h.2", "h.4", "h.6")) == "h.0, h.2, h.4 and 1 more"


class Net(nn.Module):
    def __init__(self, layers: int, wide: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(layers)]
        blocks[wide] = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.h, self.out = nn.ModuleList(blocks), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = x + block(x)
        return self.out(x).square().mean()


def test_the_text_of_a_program_folds_and_remains_whole_without() -> None:
    plan = {"params": {"h.*.1.weight": "tp, -"}, "inputs": {"x": "dp"}}
    program = shardc.compile(Net(12, wide=5), torch.ones(4, 8), mesh="dp=2, tp=2", plan=plan)
    whole, folded = program.text(), program.text(fold=True)
    shardc.parse(whole)
    assert len(folded.splitlines()) < len(whole.splitlines()) / 2
    kept = [line for line in folded.splitlines() if not line.startswith("  # ")]
    assert set(kept) <= set(whole.splitlines()), "what is printed is of the program"
    assert "%h.5.1.add = shardc.linear_bias" in folded, "the layer that differs is printed"
    assert "  # x 11 layers: h.0, h.1, h.2 and 8 more, all as h.0" in folded.splitlines()


def test_no_line_that_differs_is_dropped() -> None:
    """Every line that is left out is one that is printed, but for the numbers of layers."""
    program = shardc.compile(Net(6, wide=2), torch.ones(4, 8), mesh="dp=2", plan={"inputs": {"x": "dp"}})
    numbered = shardc.ir.fold.NAME.sub("%", program.text())
    printed = set(shardc.ir.fold.NAME.sub("%", program.text(fold=True)).splitlines())
    bare = {line.partition("    # ")[0] for line in printed}
    assert {line.partition("    # ")[0] for line in numbered.splitlines()} <= bare
