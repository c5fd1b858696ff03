"""Every model of the zoo, unmodified, over dp x tp: equal to one device, and communicating as Megatron-LM does.

That a plan is honoured is asserted, and not assumed: parameters are sharded where they should be and nowhere else,
heads are local to their rank, activations are all-reduced exactly where the pattern says, and nothing is gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx, nn

from shardc import Mesh, Plan
from shardc.api import Program
from shardc.compiler import driver, pass_pipeline
from shardc.compiler.binding import bind
from shardc.frontend.trace import Traced, trace
from shardc.ir.annotation import Annotation
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.placement import Placement
from shardc.rules.registry import find_rule
from shardc.runtime.oracle.compare import floor_of, magnitude, relative_error
from shardc.runtime.oracle.eager_witness import EagerTraining
from shardc.runtime.oracle.simulate import run_reference
from tests.in_double import InDouble
from tests.models.zoo import MODELS, Model

MESHES = ["dp=1, tp=2", "dp=2, tp=2", "dp=2, tp=4"]
OPTIONS = pass_pipeline.Options()


@dataclass(frozen=True)
class Compiled:
    """A model traced once, with its program for each mesh that a test asks for."""

    model: Model
    module: nn.Module
    batch: Any
    loss: Any
    traced: Traced
    reference: Graph  # of one device: it does not depend on the mesh
    programs: dict[str, Program] = field(default_factory=dict[str, Program])

    def program(self, mesh: str) -> Program:
        if mesh not in self.programs:
            parsed = Mesh.parse(mesh)
            bound = bind(Plan.load(self.model.plan), self.traced, parsed)
            graph = self.reference.copy()
            graph.mesh = parsed
            body = driver.finish_body(driver.distribute(graph, bound, OPTIONS), OPTIONS)
            self.programs[mesh] = Program(
                body,
                self.reference,
                body.mesh,
                tuple(body.diagnostics),
                constants=self.traced.constants,
                model=self.module,
                sample=self.batch,
                loss=self.loss,
            )
        return self.programs[mesh]


LONG = ("qwen3", "bert", "vit", "whisper", "cnn")  # `test_zoo.py` and other rooms compile BERT, ViT and Qwen3 too
PARAMS = [pytest.param(m, id=m.name, marks=[pytest.mark.long] if m.name in LONG else []) for m in MODELS]


@pytest.fixture(scope="module", params=PARAMS)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    model: Model = request.param
    module, batch, loss = model.make()
    traced = trace(module, batch, loss)
    bind(Plan.load(model.plan), traced, Mesh.parse(MESHES[0]))
    return Compiled(model, module, batch, loss, traced, driver.single_device(traced, Mesh(), OPTIONS))


def meshes(test: Callable[..., None]) -> Callable[..., None]:
    """Of each model `make test` compiles one mesh's program, which all these tests look at."""
    return pytest.mark.sampled(6)(pytest.mark.parametrize("mesh", MESHES)(test))


@meshes
def test_equal_to_one_device_and_to_eager(compiled: Compiled, mesh: str) -> None:
    report = compiled.program(mesh).verify()
    assert report.ok, str(report)
    assert all(row.eager_error is not None for row in report.rows)
    assert report.eager_error is not None
    assert report.eager_error <= compiled.model.eager, str(report)
    unused = set(compiled.traced.unused)
    wanted = {name for name, p in compiled.module.named_parameters() if p.requires_grad} - unused
    assert {row.name for row in report.rows if row.role == "grad"} == wanted
    assert not unused


def test_only_hard_coded_float32_tells_eager_apart(compiled: Compiled) -> None:
    program = next(iter(compiled.programs.values()), None) or compiled.program(MESHES[0])  # all have one reference
    found = run_reference(program.reference, program.inputs(), dtype=torch.float64)
    with InDouble(), EagerTraining(compiled.module, program.loss).active() as training:
        eager = training.step(program.sample)
    largest = max(magnitude(value) for port, value in found.items() if port.role == "grad")
    for port, value in found.items():
        floor = floor_of(value, largest, torch.float64)
        assert relative_error(value, eager[port.role, port.name].to(value.dtype), floor) <= 1e-12, port.name


@meshes
def test_parameters_are_sharded(compiled: Compiled, mesh: str) -> None:
    program = compiled.program(mesh)
    globs = [Annotation(text, Placement()) for text in compiled.model.sharded]
    over_tp: set[str] = set()
    for port, value in zip(program.body.inputs, program.body.placeholders, strict=True):
        if port.role == "param":
            assert type_of(value).axes <= {"tp"}, "dp shards no parameter"
            over_tp |= {port.name} if type_of(value).axes else set()
    names = {port.name for port in program.body.inputs if port.role == "param"}
    assert over_tp == {name for name in names if any(glob.matches(name) for glob in globs)}
    assert all(any(glob.matches(name) for name in names) for glob in globs)


def is_gradient(value: fx.Node) -> bool:
    """A value that is returned as a gradient, perhaps in another shape."""
    while len(value.users) == 1:
        (user,) = value.users
        if user.op == "output":
            return info(value).phase == "bwd"
        rule = find_rule(user.target)
        if rule is None or rule.kind != "view":
            return False
        value = user
    return False


@meshes
def test_communication_is_megatrons(compiled: Compiled, mesh: str) -> None:
    program = compiled.program(mesh)
    activations: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for one in program.collectives():
        statistics = one.value.endswith("amax.all_gather")  # of the softmax of the logits
        assert one.kind == "all_reduce" or statistics, f"{one.kind} of {one.value} over {one.axes}"
        assert one.group_size > 1
        if is_gradient(program.body.by_name(one.value)):
            gradients[one.value] += 1
        elif "tp" in one.axes:
            assert one.axes == ("tp",), one.value
            activations[one.phase] += 1
    assert activations == Counter({"fwd": compiled.model.forward, "bwd": compiled.model.backward})
    # Each gradient is reduced once, over all its axes at a time.
    assert sum(gradients.values()) <= sum(port.role == "grad" for port in program.body.outputs)
    assert [d.render() for d in program.diagnostics if d.severity == "warning"] == []


@meshes
def test_heads_are_local(compiled: Compiled, mesh: str) -> None:
    body = compiled.program(mesh).body
    calls = [n for n in body.calls() if op_name(n.target) in ("shardc.sdpa", "shardc.sdpa_bwd")]
    assert len(calls) == 2 * compiled.model.attention
    for call in calls:
        for value in operands(call):
            type = type_of(value)
            if len(type.dims) == 4 and type.shape[1] > 1:
                assert any("tp" in atom.axes for atom in type.dims[1]), f"{info(value).name} : {type}"
            assert not type.partial
