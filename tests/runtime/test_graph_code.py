"""Stages of one form share their code, and nothing else: each computes with its own, and errors name its own."""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError
from shardc.ir.graph import Graph
from shardc.partition.cut import cut
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.execute.peer_groups import PeerGroups
from shardc.runtime.execute.stage_code import GraphCode, StepState, graph_form
from shardc.runtime.oracle.simulate_stages import simulate_stages
from tests.models.zoo import make
from tests.partition.whole import SIZES, step

CPU = torch.device("cpu")


class Alike(nn.Module):
    """Four equal layers, and then one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return self.last(x)


@cache
def alike() -> tuple[shardc.Program, StagedProgram]:
    """Five stages of one rank."""
    torch.manual_seed(0)
    program = step(Alike(), (torch.randn(6, 6),), 3, "", lambda out, _: out.square().mean())
    return program, scheduled(cut(program.body, split=["h.1", "h.2", "h.3", "last"]), "bfs", 5)


def codes(graphs: list[Graph]) -> list[GraphCode]:
    context = rank_context(graphs[0].mesh, 0, None)  # type: ignore[arg-type]
    return [GraphCode(graph, context, 0, CPU) for graph in graphs]


def test_equal_stages_of_gpt2_are_prepared_once() -> None:
    model, batch, loss = make("gpt2", **{**SIZES["gpt2"], "batch": 8, "layers": 8})
    plan = {"pipeline": {"microbatches": 4, "schedule": "interleaved", "virtual": 2}}
    program = shardc.compile(model, batch, mesh="pp=4", plan=plan, loss=loss).pipelined
    assert program is not None
    assert len(program.stages) == 8
    for made in (
        codes([stage.forward for stage in program.stages]),
        codes([stage.backward for stage in program.stages]),
    ):
        several = {id(one.prepared) for one in made}
        assert len(several) < 8
        assert len({id(one.prepared) for one in made[1:7]}) == 1, "the layers between the first and the last"
        assert len({one.routine.names[0] for one in made}) == 8, "under names of their own"


def test_each_computes_with_its_own() -> None:
    program, lists = alike()
    links = PeerGroups((0,), lambda _: None, CPU, timedelta(seconds=1))
    context = rank_context(lists.body.mesh, 0, None)  # type: ignore[arg-type]
    executor = Executor(lists, 0, context, 0, links)
    assert len({graph_form(stage.forward) for stage in lists.stages}) < len(lists.stages)
    inputs = program.inputs()
    held, fed = {name: x.clone() for name, x in inputs.items()}, feeds(program.body, inputs)
    expected = simulate_stages(lists, held, fed=fed)
    found = executor.run(held, fed)
    assert found.keys() == expected.keys()
    for port, value in expected.items():
        torch.testing.assert_close(found[port], value, rtol=1e-6, atol=1e-7)
    grads = [found[port] for port in found if port.role == "grad" and port.name.endswith("0.weight")]
    assert len(grads) == 4
    assert not torch.equal(grads[0], grads[1])


def test_errors_name_the_stage_that_fails() -> None:
    _, lists = alike()
    made = codes([stage.forward for stage in lists.stages[1:4]])
    assert len({id(one.prepared) for one in made}) == 1
    for at, one in enumerate(made, 1):
        held = {f"h.{at}.0.{name}": torch.ones(3) for name in ("weight", "bias")}
        env = one.environment(StepState(held, [{}], None), 0)
        for slot, _ in one.values:
            env[slot] = torch.ones(2, 6)
        with pytest.raises(ShardcError) as failed:
            one.run(env, StepState(held, [{}], None), 0, "")
        assert failed.value.code == "SC511"
        assert f"%h.{at}.0." in str(failed.value)


def test_what_differs_in_more_than_names_is_not_shared() -> None:
    """A constant, a shape, an op, an input's role: each makes another form."""

    def form(text: str) -> str | None:
        return graph_form(shardc.parse("graph @g mesh(dp=2) {\n" + text + "\n}"))

    graph = (
        '  %{x} = value "{x}" : f32[4, 6]\n  %{y} = mul.Scalar(%{x}, 2.0) : f32[4, 6]\n  return\n    value "{y}" = %{y}'
    )
    first = graph.format(x="a", y="b")
    assert form(first) == form(graph.format(x="c", y="d")) is not None
    for old, new in (("2.0", "3.0"), ("[4, 6]", "[4, 5]"), ("mul.Scalar", "add.Scalar"), ("= value", "= buffer")):
        assert form(first.replace(old, new)) != form(first), new


def test_what_writes_to_what_is_held_is_not_shared() -> None:
    model = Alike()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = step(model, (torch.randn(6, 6),), 3, "", lambda out, _: out.square().mean(), optimizer)
    (finish,) = scheduled(cut(program.body, split=["h.2"]), "bfs", 2).epilogues
    assert graph_form(finish.update) is None
