"""The gradient of logits lies where the logits lay, if nothing reads them any more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardc
from kernels_triton.match.op import OPS
from shardc.ir.arena import planned
from shardc.ir.graph import Graph, Port, info, operands, producer
from shardc.ir.ops.host_copies import BEGIN_OFFLOAD
from shardc.ir.storages import layouts
from shardc.ir.types import TensorType
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context

CPU = torch.device("cpu")


class Words(nn.Module):
    """Logits, and their loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), y)


def compiled(vocabulary: int = 64) -> shardc.Program:
    torch.manual_seed(0)
    batch = torch.randn(8, 16).bfloat16(), torch.randint(vocabulary, (8,))
    return shardc.compile(Words(vocabulary).bfloat16(), batch, mesh="dp=1", plan={"fuse": True})


def losses(body: Graph) -> list[fx.Node]:
    return body.calls_of(OPS["cross_entropy"])


@pytest.mark.parametrize("vocabulary", [64, 61])
def test_a_gradient_of_logits(vocabulary: int) -> None:
    program = compiled(vocabulary=vocabulary)
    body = program.body
    (call,) = losses(body)
    known = layouts(body)
    ((value, logits),) = known.over.items()
    assert producer(value)[0] is call
    assert logits is operands(call)[0]
    assert known.storages[value] is known.storages[logits]
    assert [each.name for each in program.memory().live].count(info(value).name) == 0


@pytest.mark.parametrize("view", [False, True])
def test_logits_that_are_returned(view: bool) -> None:
    body = compiled().body.copy()
    (call,) = losses(body)
    logits = operands(call)[0]
    assert layouts(body).over
    if view:
        with body.fx.inserting_after(logits):
            logits = body.call(
                torch.ops.aten.view.default,
                (logits, [64, 8]),
                like=logits,
                type=TensorType.plain(torch.bfloat16, (64, 8)),
            )
    body.outputs = (*body.outputs, Port("output", "logits"))
    body.output_node.args = ((*body.output_values, logits),)
    assert body.output_values[-1] is logits
    assert layouts(body).over == {}


def test_a_reader_that_a_pass_adds() -> None:
    body = compiled().body.copy()
    (call,) = losses(body)
    logits = operands(call)[0]
    assert layouts(body).over
    with body.fx.inserting_before(body.output_node):
        body.call(torch.ops.aten.neg.default, (logits,), like=producer(logits)[0], type=info(logits).type)
    assert layouts(body).over == {}


def test_logits_that_are_on_their_way_to_the_host() -> None:
    """The copy, on a stream of its own, may not have ended when the kernel writes."""
    body = compiled().body.copy()
    (call,) = losses(body)
    logits = operands(call)[0]
    assert layouts(body).over
    with body.fx.inserting_before(call):
        body.call(BEGIN_OFFLOAD, (logits,), like=producer(logits)[0], type=info(logits).type)
    assert layouts(body).over == {}


@pytest.mark.parametrize("placed", [True, False])
def test_what_runs_a_program_writes_there(placed: bool) -> None:
    program = compiled()
    trainer = program.launch()
    body = program.body
    arena = Arena({body: planned(body)}, CPU) if placed else None
    executor = BodyCode(body, rank_context(program.mesh, 0, None), 0, CPU, arena)  # type: ignore[arg-type]
    routine = executor.routine
    assert len(routine._dead) == 1  # pyright: ignore[reportPrivateUsage]
    held = {name: value.clone() for name, value in trainer.state.items()}
    feeds = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # type: ignore[union-attr]
    result = trainer.step(program.sample)
    found = executor.run(held, feeds)
    (loss,) = (value for port, value in found.items() if port.role == "loss")
    assert loss.equal(torch.as_tensor(result.loss))
    for port, value in found.items():
        if port.role == "grad":
            assert value.equal(trainer.gather_grads()[port.name])
