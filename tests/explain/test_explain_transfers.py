"""Transfers of a pipeline are listed and explained; a cut that is advised is made, and sends what was promised."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, Program, ShardcError
from shardc.explain.collective import hardware_of
from shardc.explain.transfer import TransferExplanation, _fuse_of, _Search, _starts
from shardc.partition.balance import named_starts, unit_costs
from shardc.partition.fused_costs import weighed_layers
from shardc.partition.step_analysis import StepAnalysis
from shardc.schedule.instructions import Send
from tests.models.zoo import make
from tests.partition.test_balance import piped
from tests.partition.whole import SIZES


class Uneven(nn.Module):
    """Layers of several widths: by default, a cut after the second sends most."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 48, 16, 16, 8)) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


def uneven(
    mesh: str = "pp=2", model: nn.Module | None = None, inputs: dict[str, object] | None = None, **pipeline: Any
) -> Program:
    plan = shardc.Plan.of(inputs=inputs, pipeline={"microbatches": 4, **pipeline})
    return shardc.compile(model or Uneven(), (torch.ones(8, 8),), mesh=Mesh.parse(mesh), plan=plan)


@cache
def wide() -> Program:
    return uneven(split="h.2")


def explained(program: Program, value: str | int) -> TransferExplanation:
    found = program.explain(value)
    assert isinstance(found, TransferExplanation)
    return found


def test_all_that_is_sent_is_listed() -> None:
    """Also what skips stages, and whatever schedule says which stages live together."""
    for schedule, mesh in (("1f1b", "pp=4"), ("zb-v", "pp=2"), ("interleaved", "pp=2")):
        program = uneven(mesh, schedule=schedule)
        assert program.pipelined is not None
        listed = sum(i.bytes for ranks in program.pipelined.lists.ranks for i in ranks if isinstance(i, Send))
        assert sum(one.bytes_per_step for one in program.transfers()) == listed > 0
        names = [one.name for one in program.transfers()]
        assert len(set(names)) == len(names)


def test_a_program_without_a_pipeline_sends_nothing() -> None:
    assert shardc.compile(Uneven(), (torch.ones(8, 8),), mesh=Mesh()).transfers() == []


def test_a_transfer_knows_where_it_is_from() -> None:
    forward, back = wide().transfers()
    assert (forward.origin, forward.target, forward.phase) == (0, 1, "fwd")
    assert (back.origin, back.target, back.phase) == (1, 0, "bwd")
    assert forward.bytes_per_rank == 2 * 48 * 4
    assert forward.bytes_per_step == 4 * forward.bytes_per_rank
    assert "test_explain_transfers.py" in forward.source
    assert forward.cause.startswith("split: h.2   (test_explain_transfers.py:")


def test_a_cut_that_is_advised_sends_what_is_promised() -> None:
    program = wide()
    for at in range(2):
        found = explained(program, len(program.collectives()) + at)
        best = min(found.recuts, key=lambda one: one.sent)
        assert f"split: [{', '.join(best.split)}]" in str(found)
        again = uneven(split=best.split)
        before, after = (sum(one.bytes_per_rank for one in p.transfers()) for p in (program, again))
        assert after - before == best.sent < 0
        assert again.verify().ok


def test_a_cut_that_leaves_stages_unbalanced_is_no_advice() -> None:
    """Where it is least, one stage does nearly everything; that is said, and what it would save."""
    found = explained(wide(), "tanh_1.send1")
    assert found.cheapest is None
    assert found.inherent.endswith("leaves the stages as balanced")
    assert all(one.cost > 0.4 for one in found.recuts)
    assert "give up:  under pipeline, write split: [h.3]" in str(found)


@pytest.mark.parametrize("fuse", [True, False])
def test_stages_are_weighed_as_the_cut_was_chosen(fuse: bool) -> None:
    """Of fused stages by their kernels: with its calls' seconds another block in the last stage looked cheaper."""
    program = piped({}, "h200", fuse=fuse)
    search = _Search.of(program, program.staged)
    begins = [at for at, unit in enumerate(search.analysis.units) if re.fullmatch(r"blocks\.\d\.0", unit.name)]
    assert len(begins) == 5
    dearest = {at: search._dearest((0, at)) for at in begins}
    assert search._dearest(search.starts) <= min(dearest.values()) * 1.001
    assert max(dearest.values()) > 1.4 * min(dearest.values()), "the cut matters"


def test_stages_are_weighed_on_the_mesh_of_all_ranks() -> None:
    """Where stages lie inside of tp, its groups span nodes: sums over tp cost more than on a body's own mesh."""
    rows = {"params": {"blocks.*.0.weight": "tp, -", "blocks.*.1.weight": "-, tp"}}
    program = piped({}, {"like": "h200", "accelerators_per_node": 2}, mesh="tp=2, pp=2", more=rows)
    search = _Search.of(program, program.staged)
    fuse, hardware = _fuse_of(program), hardware_of(program)

    def weighed(mesh: Mesh | None) -> list[float]:
        _, costs = weighed_layers(program.body, 2, fuse, hardware, mesh)
        return unit_costs(search.analysis, hardware, mesh, costs)

    assert search.costs == weighed(program.mesh)
    assert sum(search.costs) > 1.01 * sum(weighed(None))


def test_a_better_cut_is_advised() -> None:
    """Cut where the layers are widest, and not in the middle."""
    program = uneven(model=Uneven((8, 64, 8, 8, 64, 8)), split="h.1")
    found = explained(program, "tanh.send1")
    assert not found.inherent
    assert found.cheapest is not None
    assert found.cheapest.split in (("h.2",), ("h.3",))
    assert found.cheapest.cost < 0
    assert f"change:   {found.cheapest}".partition("\n")[0] in str(found)


def test_equal_layers_send_the_same_wherever_they_are_cut() -> None:
    model, batch, loss = make("gpt2", **{**SIZES["gpt2"], "batch": 8, "layers": 4})
    plan = shardc.Plan.of(pipeline={"microbatches": 4})
    program = shardc.compile(model, batch, mesh="pp=2", plan=plan, loss=loss)
    for one in program.transfers():
        found = explained(program, one.name)
        assert found.transfer.cause.startswith("no split: the cut is the most balanced one   (test_explain")
        assert found.inherent
        assert "reads it, on ranks with pp=" in found.needed


@pytest.mark.parametrize("fuse", [False, True])
def test_the_present_cut_is_no_other_place(fuse: bool) -> None:
    """It is read off the stages, also where their calls have become kernels."""
    plan = {"pipeline": {"microbatches": 4, "split": ["h.1", "h.3", "h.4"]}, "fuse": fuse}
    program = shardc.compile(Uneven(), (torch.ones(8, 8),), mesh="pp=4", plan=plan)
    assert program.pipelined is not None
    analysis = StepAnalysis(program.body)
    assert _starts(analysis, program.pipelined) == named_starts(analysis, ["h.1", "h.3", "h.4"])


def test_names_and_numbers_agree() -> None:
    program = uneven("pp=2, dp=2")
    count = len(program.collectives())
    for at, one in enumerate(program.transfers(), count):
        for value in (at, str(at), one.name, f"%{one.name}"):
            assert explained(program, value).transfer == one
    for at, one in enumerate(program.collectives()):
        found = program.explain(at)
        assert not isinstance(found, TransferExplanation)
        assert found.collective == one


def test_a_collective_of_a_pipeline_is_of_some_stage_or_of_the_end() -> None:
    program = uneven("pp=2, dp=2", inputs={"x": "dp, -"})
    said = {c.value: str(program.explain(c.value)) for c in program.collectives()}
    assert "stage:    1; what" in said["d.h.4.linear_wgrad.sum.all_reduce"]
    loss = next(text for name, text in said.items() if not name.startswith("d."))
    assert "stage:    the end of the step; what" in loss


@pytest.mark.parametrize(("value", "says"), [("tanh_1.sent1", "did you mean"), (99, "there is no communication 99")])
def test_what_is_not_sent_is_refused(value: str | int, says: str) -> None:
    with pytest.raises(ShardcError, match=f"SC106(.|\n)*{says}"):
        wide().explain(value)


def test_a_program_from_a_file_explains_itself_the_same(tmp_path: Path) -> None:
    wide().save(tmp_path / "p.json")
    read = Program.load(tmp_path / "p.json")
    assert isinstance(read, Program)
    assert read.transfers() == wide().transfers()
    assert str(read.explain(0)) == str(wide().explain(0))


def test_text(golden: Callable[[str, str], None]) -> None:
    root = Path(__file__).parent.parent.parent
    said = str(wide().explain(wide().transfers()[0].name)).replace(f"{root}/", "")
    golden("transfer.txt", re.sub(r"transfers\.py:\d+", "transfers.py:N", said))
