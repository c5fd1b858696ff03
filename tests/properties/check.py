"""What must hold of a compiled program, whatever the model, the plan and the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardc import compiler
from shardc.compiler import Options
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.placement import Placement
from shardc.ir.program import Program
from shardc.ir.text import print_graph
from shardc.passes.seed import Bound
from shardc.runtime.simulate import simulate
from shardc.runtime.verify import verify

# What a random plan may be refused for: dims that no axis can shard, blocks that do not fit. Other codes are bugs here.
LEGITIMATE = {"SC206", "SC203", "SC207", "SC302"}


@dataclass(frozen=True)
class Refused:
    codes: tuple[str, ...]


def compiled(reference: Graph, plan: Mapping[str, Mapping[str, str]], mesh: Mesh) -> Graph | Refused:
    """The body for a plan in full names, statically verified after each pass; the codes if the plan is refused.

    A few tensors of a plan that are refused are left out of it: most plans then have something left to execute.
    """
    bound = [
        Bound(kind.removesuffix("s"), name, Placement.parse(text), f'{name} = "{text}"')
        for kind, named in plan.items()
        for name, text in named.items()
    ]
    codes: list[str] = []
    while bound or not codes:
        fresh = reference.copy()
        fresh.mesh = mesh
        try:
            return compiler.distribute(fresh, bound, Options(verify=True))
        except ShardcError as refused:
            codes += [d.code for d in refused.diagnostics]
            blamed = {d.tensor for d in refused.diagnostics}
            if not LEGITIMATE.issuperset(codes) or not blamed & {one.name for one in bound}:
                raise
            bound = [one for one in bound if one.name not in blamed]
    return Refused(tuple(codes))


def check(body: Graph, reference: Graph, inputs: Mapping[str, torch.Tensor]) -> None:
    """The program is right, and survives its text and its file."""
    report = verify(body, reference, inputs)
    # A random program may subtract what is nearly equal, as the gradient of a scale that a norm takes out again does:
    # its rounding is more than the tolerance, a wrong program's error is not within ten times that.
    assert report.max_rel_error <= 10 * report.tolerance, f"{report}\n\n{print_graph(body)}"
    text = print_graph(body)
    again = parse(text)
    assert print_graph(again, comments=False) == print_graph(body, comments=False)
    loaded = Program.from_json(Program(body, reference, body.mesh).to_json())
    assert print_graph(loaded.body) == text
    same(again, body, inputs)
    assert verify(loaded.body, loaded.reference, inputs).ok


def same(a: Graph, b: Graph, inputs: Mapping[str, torch.Tensor]) -> None:
    """Both graphs yield the very same bits."""
    found, wanted = (simulate(graph, inputs, dtype=torch.float64) for graph in (a, b))
    assert list(found) == list(wanted)
    for port, value in wanted.items():
        assert torch.equal(found[port].nan_to_num(), value.nan_to_num()), f"{port.role} {port.name}"


def kinds(body: Graph) -> Sequence[str]:
    """The kinds of collectives that a program has: hypothesis counts them, to show what was covered."""
    return sorted({one.kind for one in collectives(body)})
