"""Faults planted in traces, updates and passes: `verify` alone finds every one, and nothing else looks.

A fault in the trace or in the update is in the reference too, so that all ranks agree with it: only eager PyTorch knows
better. A fault in a pass is in the body that ranks run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc import Program
from shardc.compiler import driver
from shardc.ir.graph import Graph, info, op_name, operands
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.runtime.oracle import verify as verifier

aten = torch.ops.aten
PLAN = {
    "params": {"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"},
    "inputs": {"x": "dp, -"},
    "clip_grad_norm": 0.5,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor
        self.up.weight.register_hook(lambda g: g * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = torch.tanh(self.up(x)) - torch.sigmoid(x) * (1 + 0.1 * self.count)
        y = self.norm(self.down(h) + x)
        return (y * h).square().mean() + 0.3 * self.up.weight.square().sum()


def compiled(storage: dict[str, Any] | None = None) -> Program:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    plan = PLAN if storage is None else {**PLAN, "storage": storage}
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    return shardc.compile(model, x, mesh="dp=2, tp=2", plan=plan, optimizer=optimizer)


@cache
def sound(zero: int = 0) -> Program:
    program = compiled({"zero": zero, "axes": ["dp"]} if zero else None)
    assert program.verify().ok
    return program


def calls(graph: Graph, op: str, phase: str | None = None) -> list[fx.Node]:
    every = [n for n in graph.calls() if op_name(n.target) == op and (phase is None or info(n).phase == phase)]
    assert every, f"no {op} in {phase or 'the graph'}"
    return every


Fault = Callable[[Graph], None]


def becomes(op: str, other: object, phase: str | None = None, at: int = 0) -> Fault:
    """A call of one op is one of another, of the same operands."""

    def plant(graph: Graph) -> None:
        calls(graph, op, phase)[at].target = other  # type: ignore[assignment]

    return plant


def is_operand(op: str, phase: str | None = None, at: int = 0, which: int = 0) -> Fault:
    """A call is left out: who reads its result reads one of its operands."""

    def plant(graph: Graph) -> None:
        call = calls(graph, op, phase)[at]
        call.replace_all_uses_with(operands(call)[which])

    return plant


def swapped(op: str, phase: str | None = None, at: int = 0) -> Fault:
    def plant(graph: Graph) -> None:
        call = calls(graph, op, phase)[at]
        call.args = (call.args[1], call.args[0], *call.args[2:])

    return plant


def constant(op: str, change: Callable[[float], float], phase: str | None = None, at: int = 0) -> Fault:
    """A number among a call's arguments is another."""

    def plant(graph: Graph) -> None:
        numbers = [n for n in calls(graph, op, phase) if any(isinstance(a, float) for a in n.args)]
        call = numbers[at]
        call.args = tuple(change(a) if isinstance(a, float) else a for a in call.args)

    return plant


def returned(role: str, name: str, instead: tuple[str, str]) -> Fault:
    """An output is another output's value, or an input's."""

    def plant(graph: Graph) -> None:
        values = {(p.role, p.name): v for p, v in zip(graph.outputs, graph.output_values, strict=True)}
        inputs = {("in " + p.role, p.name): v for p, v in zip(graph.inputs, graph.placeholders, strict=True)}
        values[role, name] = (values | inputs)[instead]
        graph.output_node.args = (tuple(values[p.role, p.name] for p in graph.outputs),)

    return plant


TRACE: dict[str, Fault] = {
    "another activation": becomes("tanh", aten.sin.default, "fwd"),
    "a difference becomes a sum": becomes("sub.Tensor", aten.add.Tensor, "fwd"),
    "a term of forward is dropped": is_operand("sub.Tensor", "fwd"),
    "a factor is dropped": is_operand("mul.Tensor", "fwd", 0, 0),
    "operands of a difference change places": swapped("sub.Tensor", "fwd"),
    "a hook is dropped": constant("mul.Tensor", lambda a: 1.0 if a == 1.5 else a, "bwd", -1),
    "the first term of a gradient is dropped": is_operand("add.Tensor", "bwd", 0, 1),
    "the second term of a gradient is dropped": is_operand("add.Tensor", "bwd", 0, 0),
    "a later term of a gradient is dropped": is_operand("add.Tensor", "bwd", -1, 0),
    "backward of another activation": becomes("tanh_backward", aten.sigmoid_backward.default, "bwd"),
    "gradients change places": returned("grad", "up.bias", ("grad", "down.bias")),
    "a gradient is another's": returned("grad", "norm.weight", ("grad", "norm.bias")),
    "a gradient is its parameter": returned("grad", "up.weight", ("in param", "up.weight")),
    "a buffer is not updated": returned("buffer", "count", ("in buffer", "count")),
    "a running mean is not updated": returned("buffer", "norm.running_mean", ("in buffer", "norm.running_mean")),
    "statistics change places": returned("buffer", "norm.running_mean", ("buffer", "norm.running_var")),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", TRACE)
def test_in_the_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sound()
    single = driver.single_device

    def planted(*args: Any) -> Graph:
        graph = single(*args)
        TRACE[name](graph)
        return graph

    monkeypatch.setattr(driver, "single_device", planted)
    program = compiled()
    report = program.verify()
    assert report.equal, "the ranks agree with the wrong reference"
    assert not report.ok


def is_never_less_than_one(graph: Graph) -> None:
    (call,) = calls(graph, "clamp", "opt")
    call.args = (call.args[0], 1.0, 1.0)


UPDATE: dict[str, Fault] = {
    "a parameter is not updated": returned("param", "up.weight", ("in param", "up.weight")),
    "parameters change places": returned("param", "up.weight", ("param", "down.weight")),
    "a moment is not carried": returned("state", "up.weight:exp_avg", ("in state", "up.weight:exp_avg")),
    "a second moment is not carried": returned("state", "up.bias:exp_avg_sq", ("in state", "up.bias:exp_avg_sq")),
    "moments change places": returned("state", "up.weight:exp_avg", ("state", "up.weight:exp_avg_sq")),
    "a step is not counted": returned("state", "down.bias:step", ("in state", "down.bias:step")),
    "gradients are not clipped": is_never_less_than_one,
    "another beta": constant("lerp.Scalar", lambda a: a * 1.5, "opt"),
    "the norm is another output": returned("output", "grad_norm", ("loss", "loss")),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", UPDATE)
def test_in_the_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sound()
    distribute = driver.distribute

    def planted(reference: Graph, *args: Any) -> Graph:
        UPDATE[name](reference)
        return distribute(reference, *args)

    monkeypatch.setattr(driver, "distribute", planted)
    program = compiled()
    report = program.verify()
    assert report.equal, "the ranks agree with the wrong reference"
    assert not report.ok


def collectives(body: Graph, kind: str) -> list[fx.Node]:
    every = [n for n in body.calls() if n.target in COLLECTIVES and op_name(n.target).endswith(kind)]
    assert every, f"no {kind}"
    return every


def dropped(kind: str, at: int = 0) -> Fault:
    def plant(body: Graph) -> None:
        call = collectives(body, kind)[at]
        call.replace_all_uses_with(operands(call)[0])

    return plant


def along_the_other_axis(body: Graph) -> None:
    """What is summed over dp is summed over tp."""
    call = next(n for n in collectives(body, "all_reduce") if "dp" in repr(n.args) and "tp" not in repr(n.args))
    call.args = tuple(["tp"] if isinstance(a, (list, tuple)) and list(a) == ["dp"] else a for a in call.args)
    assert "tp" in repr(call.args)


BODY: dict[str, tuple[int, Fault]] = {
    "no all-reduce of the first value": (0, dropped("all_reduce", 0)),
    "no all-reduce of the second value": (0, dropped("all_reduce", 1)),
    "no all-reduce of the last value": (0, dropped("all_reduce", -1)),
    "an all-reduce along the other axis": (0, along_the_other_axis),
    "another op on the ranks": (0, becomes("tanh", aten.sin.default)),
    "a difference becomes a sum on the ranks": (0, becomes("sub.Tensor", aten.add.Tensor)),
    "a moment that the ranks do not carry": (
        0, returned("state", "up.weight:exp_avg", ("in state", "up.weight:exp_avg"))
    ),
    "a parameter that the ranks do not update": (0, returned("param", "down.bias", ("in param", "down.bias"))),
    "a buffer that the ranks do not update": (
        0, returned("buffer", "norm.running_var", ("in buffer", "norm.running_var"))
    ),
    "a gradient's term that the ranks drop": (0, is_operand("add.Tensor", "bwd", 0, 0)),
    "another beta on the ranks": (0, constant("shardc.adamw", lambda a: 0.85 if a == 0.9 else a, "opt")),
    "another second beta on the ranks": (0, constant("shardc.adamw", lambda a: 0.99 if a == 0.999 else a, "opt", -1)),
    "another decay on the ranks": (0, constant("shardc.adamw", lambda a: 0.2 if a == 0.1 else a, "opt")),
    "an update of stored shards that the ranks leave out": (
        2, returned("state", "up.weight:exp_avg_sq", ("in state", "up.weight:exp_avg_sq"))
    ),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", BODY)
def test_in_the_body(name: str) -> None:
    zero, fault = BODY[name]
    program = sound(zero)
    body = program.body.copy()
    fault(body)
    body.fx.lint()
    assert not replace(program, body=body).verify().ok


def test_inputs_that_a_run_writes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier's own inputs are compared before and after."""
    program = sound()
    run = verifier._Ranks.run  # pyright: ignore[reportPrivateUsage]

    def writes(self: Any, inputs: dict[str, Tensor], *args: Any) -> Any:
        outputs = run(self, inputs, *args)
        inputs["x"].add_(1)
        return outputs

    monkeypatch.setattr(verifier._Ranks, "run", writes)  # pyright: ignore[reportPrivateUsage]
    report = replace(program, sample=program.sample.clone()).verify()
    assert not report.ok
    assert {row.name for row in report.rows if row.role == "input"} == {"x"}
