"""Every collective names the annotations that it comes from: of its own axes, and the same that `explain` finds."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh
from shardc.explain.collective import bound_of, options_of
from shardc.explain.provenance import trails
from shardc.explain.what_if import compiled as compiled_again
from shardc.ir.graph import Graph, info
from shardc.ir.placement import Placement
from tests.api.test_communication import compiled

ANNOTATION = re.compile(r'(\S+) = "([^"]*)"')


def replaced(program: shardc.Program, name: str) -> str:
    """The collective that this one replaces, or this one."""
    origin = info(program.body.by_name(name)).origin
    return origin.of if origin is not None and origin.kind == "replacement" else name


def explained(program: shardc.Program) -> dict[str, str]:
    """What `explain` says of every collective, at the cost of one compilation."""
    names = {name for c in program.collectives() for name in (c.value, replaced(program, c.value))}

    def look(graph: Graph) -> dict[str, str]:
        found = {info(node).name: trails(graph, node) for node in graph.calls() if info(node).name in names}
        return {name: "; ".join(dict.fromkeys(t.cause for t in those)) for name, those in found.items()}

    return compiled_again(program.reference, bound_of(program), options_of(program), look)


def axes_of(cause: str) -> set[str]:
    """The axes that the cited annotations use."""
    return {axis for _, text in ANNOTATION.findall(cause) for dim in Placement.parse(text).dims for axis in dim.axes}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", ["gpt2", "gpt2_sp", "llama", "llama_sp"])
def test_the_cause_is_of_the_collectives_own_axes(plan: str) -> None:
    program = compiled(plan.removesuffix("_sp"), plan, 2)
    said = explained(program)
    assert any(len(c.axes) > 1 for c in program.collectives()) == plan.endswith("_sp")
    for one in program.collectives():
        assert one.cause, f"%{one.value} has no cause"
        assert one.cause == said[one.value if one.value in said else replaced(program, one.value)]
        assert set(one.axes) <= axes_of(one.cause), f"%{one.value} over {one.axes} is said to come from {one.cause}"
        for name, text in ANNOTATION.findall(one.cause):
            uses = {axis for dim in Placement.parse(text).dims for axis in dim.axes}
            assert uses & set(one.axes), f"%{one.value} over {one.axes} has nothing to do with {name}"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).sum()


def causes(plan: dict[str, object], mesh: Mesh) -> dict[str, str]:
    program = shardc.compile(Two(), torch.ones(4, 8), mesh=mesh, plan=plan)
    return {c.value: re.sub(r"\s+\([^)]*\)", "", c.cause) for c in program.collectives()}


def test_a_merged_collective_names_both() -> None:
    """Batch over dp, sequence over tp: a gradient's terms are split by two annotations."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x[:, None] + y[None] + self.bias).pow(2).sum()

    plan = {"inputs": {"x": "dp, -", "y": "tp, -"}}
    program = shardc.compile(Wide(), (torch.ones(4, 8), torch.ones(6, 8)), mesh="dp=2, tp=2", plan=plan)
    gradient = next(c for c in program.collectives() if c.phase == "bwd")
    assert gradient.axes == ("dp", "tp")
    assert [name for name, _ in ANNOTATION.findall(gradient.cause)] == ["x", "y"]


def test_sub_axes_are_cited_as_the_user_wrote_them() -> None:
    plan: dict[str, object] = {"params": {"up.weight": "dp.tp, -"}}
    found = causes(plan, Mesh(dp=2, tp=2))
    assert set(found.values()) == {'up.weight = "dp.tp, -"'}


def test_a_loaded_program_still_knows(tmp_path: Path) -> None:
    program = compiled("gpt2", "gpt2_sp", 1)
    program.save(tmp_path / "p.json")
    assert shardc.Program.load(tmp_path / "p.json").collectives() == program.collectives()
