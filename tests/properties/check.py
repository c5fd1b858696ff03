"""What must hold of a compiled program, whatever the model, the plan and the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardc.compiler import driver
from shardc.compiler.pass_pipeline import Options
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, Port
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.placement import Placement
from shardc.ir.program import Program
from shardc.ir.text import print_graph
from shardc.passes.sharding.seed import Bound
from shardc.runtime.oracle.report import Report
from shardc.runtime.oracle.simulate import run_reference, simulate
from shardc.runtime.oracle.verify import verify

# What a random plan may be refused for: dims that no axis can shard, blocks that do not fit. Other codes are bugs here.
LEGITIMATE = {"SC206", "SC203", "SC207"}


@dataclass(frozen=True)
class Refused:
    codes: tuple[str, ...]


def compiled(reference: Graph, plan: Mapping[str, Mapping[str, str]], mesh: Mesh) -> Graph | Refused:
    """The body for a plan in full names, statically verified after each pass; the codes if the plan is refused.

    A few tensors of a plan that are refused are left out of it: most plans then have something left to execute.
    """
    bound = [
        Bound(kind.removesuffix("s"), name, Placement.parse(text))
        for kind, named in plan.items()
        for name, text in named.items()
    ]
    codes: list[str] = []
    while bound or not codes:
        fresh = reference.copy()
        fresh.mesh = mesh
        try:
            options = Options(verify=True)
            return driver.finish_body(driver.distribute(fresh, bound, options), options)
        except ShardcError as refused:
            codes += [d.code for d in refused.diagnostics]
            blamed = {d.tensor for d in refused.diagnostics}
            if not LEGITIMATE.issuperset(codes) or not blamed & {one.name for one in bound}:
                raise
            bound = [one for one in bound if one.name not in blamed]
    return Refused(tuple(codes))


def check(body: Graph, reference: Graph, inputs: Mapping[str, torch.Tensor]) -> None:
    """The program is right, and survives its text and its file."""
    report, wrong = judge(body, reference, inputs)
    assert not wrong, "\n".join([*wrong, "", str(report), "", print_graph(body)])
    text = print_graph(body)
    again = parse(text)
    assert print_graph(again, comments=False) == print_graph(body, comments=False)
    loaded = Program.from_json(Program(body, reference, body.mesh).to_json())
    assert print_graph(loaded.body) == text
    wanted = simulate(body, inputs, dtype=torch.float64)
    same(simulate(again, inputs, dtype=torch.float64), wanted)
    same(simulate(loaded.body, inputs, dtype=torch.float64), wanted)
    same(*(run_reference(graph, inputs, dtype=torch.float64) for graph in (loaded.reference, reference)))


def judge(body: Graph, reference: Graph, inputs: Mapping[str, torch.Tensor]) -> tuple[Report, list[str]]:
    """What `verify` finds, and each output that is wrong: by more than 1e-12 and by more than rounding explains."""
    report = verify(body, reference, inputs)
    wrong = [
        f"{row.role} {row.name} is wrong by {row.error:.1e}; rounding explains {row.explained:.1e}"
        for row in report.rows
        if not report.within(row)
    ]
    return report, wrong


def same(found: Mapping[Port, torch.Tensor], wanted: Mapping[Port, torch.Tensor]) -> None:
    """Both runs yielded the very same bits."""
    assert list(found) == list(wanted)
    for port, value in wanted.items():
        assert torch.equal(found[port].nan_to_num(), value.nan_to_num()), f"{port.role} {port.name}"


def kinds(body: Graph) -> Sequence[str]:
    """The kinds of collectives that a program has: hypothesis counts them, to show what was covered."""
    return sorted({one.kind for one in collectives(body)})
