"""New parameters and state are written over the old ones: the same numbers, in the same memory, step after step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import info
from shardc.ir.in_place import writes
from shardc.ir.storages import Storage
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.w).tanh() @ self.w.t() + self.b).square().mean()


def compiled(optimizer: str, **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = Tied()
    mine = OPTIMIZERS[optimizer](model.parameters())
    return shardc.compile(model, torch.randn(8, 8), mesh="dp=1", plan=plan, optimizer=mine)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", [{}, {"clip_grad_norm": 0.1}, {"accumulate": 2}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rank_trains_as_the_simulation_does(optimizer: str, plan: dict[str, Any]) -> None:
    program = compiled(optimizer, **plan)
    trainer = program.launch()
    body, mesh = program.body, program.mesh
    executor = BodyCode(body, rank_context(mesh, 0, None), 0, torch.device("cpu"))  # type: ignore[arg-type]
    held = {name: value.clone().contiguous() for name, value in trainer.state.items()}
    homes = {name: value.data_ptr() for name, value in held.items()}
    over = {info(write.value).name: write for write in writes(body)}
    kept = [port for port in body.outputs if port.role in ("param", "state")]
    assert len(over) >= len([p for p in kept if p.role == "param"])
    for step in range(3):
        fed = trainer._programs.first.feeding.feeds(program.sample, trainer.seed, trainer.steps)  # pyright: ignore[reportPrivateUsage]
        rates = trainer.rates()
        result = trainer.step(program.sample)
        found = executor.run(held | rates, fed)
        assert torch.equal(next(v for p, v in found.items() if p.role == "loss"), result.loss), step
        for port, value in found.items():
            if port.role in ("param", "state"):
                held[port.name] = value
                assert torch.equal(value, trainer.state[port.name]), (step, port.name)
    moved = [name for name, value in held.items() if value.data_ptr() != homes[name]]
    inplace = {info(write.over).name for write in over.values()}
    assert not {name for name in moved if name in inplace}


def test_storages_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are three for each parameter: what is found of each must not take a look at all."""
    layers = [nn.Linear(4, 4) for _ in range(20)]
    model = nn.Sequential(*layers)
    program = shardc.compile(
        model,
        torch.randn(4, 4),
        mesh="dp=1",
        loss=lambda y, _: y.sum(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
    )
    compared: list[bool] = []

    def same(one: object, other: object) -> bool:
        compared.append(one is other)
        return one is other

    monkeypatch.setattr(Storage, "__eq__", same)
    assert len(writes(program.body)) >= 3 * len(layers) * 2
    assert len(compared) < len(program.body.outputs)


def test_what_is_read_later_is_not_written_over() -> None:
    body = compiled("adamw").body
    before = {write.over for write in writes(body)}
    weight = body.input_nodes()["w"]
    assert weight in before
    last = body.output_values[0]
    with body.fx.inserting_before(body.output_node):
        late = body.call(torch.ops.aten.neg.default, (weight,), like=last, type=info(weight).type)
    body.output_node.args = ((*body.output_values, late),)
    body.outputs = (*body.outputs, shardc.ir.graph.Port("output", "late"))
    assert {write.over for write in writes(body)} == before - {weight}


def test_memory_counts_them_once() -> None:
    """Beyond what is stored, a step of Adam holds no second copy of parameters and state."""
    report = compiled("adamw").memory()
    whole = report.row("parameters").stored + report.row("optimizer state").stored
    assert report.row("parameters").most + report.row("optimizer state").most < whole / 2
