"""The optimizer's step at the end of the joint graph: gradients in, new parameters and optimizer state out.

    loss, grad w          ->      loss, param w, state w:exp_avg, ...      (and grad_norm, when gradients are clipped)

Each parameter gets an instance of its traced `Update`. Per parameter and state tensor there is an input of role
"state" named `<parameter>:<key>`, as in torch a step count each; per group of the optimizer one of role "hyper"
named `lr.<group>`, so that a learning-rate scheduler changes a tensor and nothing else. All that is on the global
graph: where parameters and state are stored, and so where the update runs, is said by placements later.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, set_info, type_of
from shardc.ir.types import TensorType
from shardc.optimizer_trace import Update, check, hyperparameters, refused, trace_update
from shardc.passes.decompositions.table import HALF, canonical_dims, infer

aten = torch.ops.aten
CYCLED = ("base_momentum", "max_momentum")  # what a scheduler leaves in the groups whose momentum it changes
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def append_updates(
    graph: Graph, optimizer: torch.optim.Optimizer, model: nn.Module, *, clip_grad_norm: float | None
) -> dict[str, float]:
    """Replace the graph's gradients by the parameters and the state after the optimizer's step.

    Returns what each new state input is filled with before the first step. Parameters in no group stay as they are,
    and so do those without a gradient. `graph.gradients` names the gradients that the graph still computes.
    """
    groups = _groups(graph, optimizer, model)
    outputs = list(zip(graph.outputs, graph.output_values, strict=True))
    gradients = {port.name: node for port, node in outputs if port.role == "grad"}
    emit = _Emit(graph)
    clipped, norm = dict(gradients), None
    if clip_grad_norm is not None and gradients:
        clipped, norm = _clip(emit, gradients, clip_grad_norm)
    updates = _Updates(optimizer)
    rates: dict[int, fx.Node] = {}
    fills: dict[str, float] = {}
    made: list[tuple[Port, fx.Node]] = []
    params = {port.name: node for port, node in zip(graph.inputs, graph.placeholders, strict=True)}
    for name, gradient in clipped.items():
        if name not in groups:
            continue
        index, param = groups[name], params[name]
        update = updates.of(index, type_of(param))
        if index not in rates:
            rates[index] = emit.input(Port("hyper", f"lr.{index}"), TensorType.plain(torch.float64, ()))
        state = [
            emit.input(Port("state", f"{name}:{s.key}"), TensorType.plain(s.dtype, s.shape), _module(name))
            for s in update.states
        ]
        values = emit.instance(update.graph, (param, gradient, rates[index], *state), name)
        made.append((Port("param", name), values[0]))
        for s, value in zip(update.states, values[1:], strict=True):
            made.append((Port("state", f"{name}:{s.key}"), value))
            fills[f"{name}:{s.key}"] = s.fill
    kept = [(port, node) for port, node in outputs if port.role != "grad"]
    outputs = [*kept[:1], *made, *kept[1:], *([(Port("output", "grad_norm"), norm)] if norm is not None else [])]
    graph.outputs = tuple(port for port, _ in outputs)
    graph.output_node.args = (tuple(node for _, node in outputs),)
    graph.erase_dead()
    alive = set(graph.fx.nodes)
    graph.gradients = {name: node for name, node in gradients.items() if node in alive}
    return fills


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The "hyper" inputs: each group's present learning rate, in float64 as Python's."""
    return {
        f"lr.{i}": torch.as_tensor(group["lr"]).detach().to("cpu", torch.float64).reshape(())
        for i, group in enumerate(optimizer.param_groups)
    }


def fingerprint(optimizer: torch.optim.Optimizer) -> tuple[Hashable, ...]:
    """All that a program's update was traced with: when it changes, the program is no longer the optimizer's."""
    return tuple((hyperparameters(group), len(group["params"])) for group in optimizer.param_groups)


def initial_state(
    graph: Graph, fills: Mapping[str, float], optimizer: torch.optim.Optimizer | None, model: nn.Module | None
) -> dict[str, Tensor]:
    """The "state" inputs: the optimizer's own, if it made steps or was loaded, else what a first step starts from."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) if model is not None else {}
    held: Mapping[Tensor, dict[str, Any]] = optimizer.state if optimizer is not None else {}
    found: dict[str, Tensor] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        if port.role != "state" or port.name not in fills:
            continue
        name, _, key = port.name.rpartition(":")
        type = type_of(node)
        value = held.get(tensors[name], {}).get(key) if held and name in tensors else None
        if value is None or (isinstance(value, Tensor) and value.is_meta):
            # One number seen as a tensor: a rank that cuts its shard out never holds the whole.
            found[port.name] = torch.tensor(fills[port.name], dtype=type.dtype).expand(type.shape)
        else:
            found[port.name] = torch.as_tensor(value).detach().to(type.dtype).reshape(type.shape)
    return found


def _groups(graph: Graph, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """Parameter of the graph -> index of its group."""
    names = {p: name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    ports = {name: port.name for port in graph.inputs if port.role == "param" for name in (port.name, *port.aliases)}
    found: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        if any(key in group for key in CYCLED):
            hint = "pass cycle_momentum=False to the scheduler"
            raise refused(optimizer, "its scheduler changes the momentum, and only learning rates may change", hint)
        for position, p in enumerate(group["params"]):
            if p not in names:
                raise error(
                    "SC107",
                    f"parameter {position} of the optimizer's group {index}, {list(p.shape)}, is not the model's",
                    hint="make the optimizer from the parameters of the very model that is compiled, not of a copy",
                )
            found[ports.get(names[p], names[p])] = index
    return found


@dataclass
class _Updates:
    """Updates by hyperparameters, shape and dtype: few, however many parameters there are."""

    optimizer: torch.optim.Optimizer
    known: dict[Hashable, Update] = field(default_factory=dict[Hashable, Update])
    checked: set[Hashable] = field(default_factory=set[Hashable])

    def of(self, index: int, type: TensorType) -> Update:
        group = self.optimizer.param_groups[index]
        options = hyperparameters(group)
        if (options, type.ndim) not in self.checked:
            check(self.optimizer, group, type.ndim)
            self.checked.add((options, type.ndim))
        key = (options, type.shape, type.dtype)
        if key not in self.known:
            self.known[key] = trace_update(self.optimizer, group, type.shape, type.dtype)
        return self.known[key]


@dataclass
class _Emit:
    """Appends to a graph: inputs behind its inputs, calls of phase "opt" before its output."""

    graph: Graph
    last: fx.Node = field(init=False)  # placeholder
    constants: dict[Hashable, fx.Node] = field(default_factory=dict[Hashable, fx.Node])

    def __post_init__(self) -> None:
        self.last = self.graph.placeholders[-1]
        self.end = self.graph.output_node

    def input(self, port: Port, type: TensorType, fqn: str = "") -> fx.Node:
        with self.graph.fx.inserting_after(self.last):
            self.last = node = self.graph.fx.placeholder(f"{port.role}_{len(self.graph.inputs)}")
        set_info(node, ValueInfo(self.graph.unique(port.name), type, fqn=fqn))
        self.graph.inputs = (*self.graph.inputs, port)
        return node

    def call(
        self, name: str, fqn: str, target: Any, *args: Any, type: TensorType | None = None, constant: bool = False,
        **kwargs: Any,
    ) -> fx.Node:  # fmt: skip
        if type is None:
            found = infer(target, args, kwargs)
            assert isinstance(found, TensorType), f"{target} has several results"
            type = found
        with self.graph.fx.inserting_before(self.end):
            node = self.graph.fx.call_function(target, args, kwargs)
        named = self.graph.unique(f"{name}.{op_name(target).partition('.')[0]}")
        set_info(node, ValueInfo(named, type, fqn=fqn, phase="opt", constant=constant))
        return node

    def instance(self, body: Graph, values: tuple[fx.Node, ...], name: str) -> list[fx.Node]:
        """A copy of a small graph applied to `values`; what it returns."""
        of = dict(zip(body.placeholders, values, strict=True))
        for node in body.calls():
            args = fx.map_arg(node.args, of.__getitem__)
            kwargs = fx.map_arg(node.kwargs, of.__getitem__)
            about = info(node)
            key = (node.target, repr((args, kwargs)))
            if about.constant and key in self.constants:
                of[node] = self.constants[key]
                continue
            made = self.call(
                f"opt.{name}", _module(name), node.target, *args, type=about.type, constant=about.constant, **kwargs
            )
            of[node] = made
            if about.constant:
                self.constants[key] = made
        return [of[node] for node in body.output_values]


def _clip(emit: _Emit, gradients: Mapping[str, fx.Node], limit: float) -> tuple[dict[str, fx.Node], fx.Node]:
    """torch.nn.utils.clip_grad_norm_ of all gradients, and the norm before; one that is not finite passes through."""
    total: fx.Node | None = None
    for name, g in gradients.items():
        at, fqn = f"opt.{name}.norm", _module(name)
        wide = emit.call(at, fqn, aten._to_copy.default, g, dtype=torch.float32) if type_of(g).dtype in HALF else g
        square = emit.call(at, fqn, aten.mul.Tensor, wide, wide)
        dims = canonical_dims(None, type_of(g).ndim)
        one = emit.call(at, fqn, aten.sum.dim_IntList, square, dims, False) if dims else square
        total = one if total is None else emit.call("opt.clip", "", aten.add.Tensor, total, one)
    assert total is not None
    norm = emit.call("opt.clip", "", aten.sqrt.default, total)
    inverse = emit.call(
        "opt.clip", "", aten.reciprocal.default, emit.call("opt.clip", "", aten.add.Tensor, norm, EPSILON)
    )
    ratio = emit.call("opt.clip", "", aten.mul.Tensor, inverse, limit)
    factor = emit.call("opt.clip", "", aten.clamp.default, ratio, None, 1.0)

    def scaled(name: str, g: fx.Node) -> fx.Node:
        return emit.call(f"opt.{name}.clip", _module(name), aten.mul.Tensor, g, _as(emit, factor, type_of(g)))

    return {name: scaled(name, g) for name, g in gradients.items()}, norm


def _as(emit: _Emit, factor: fx.Node, type: TensorType) -> fx.Node:
    """The factor in a 0-dim gradient's dtype, which a wider one would change."""
    if type.ndim or type.dtype == type_of(factor).dtype:
        return factor
    return emit.call("opt.clip", "", aten._to_copy.default, factor, dtype=type.dtype)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
