"""The optimizer's step at the end of the joint graph: gradients in, new parameters and optimizer state out.

    loss, grad w          ->      loss, param w, state w:exp_avg, ...      (and grad_norm, when gradients are clipped)

What gradients go through first is in shardc/frontend/gradients.py. Each parameter gets an instance of its traced
`Update`. Per parameter and state tensor there is an input of role "state" named `<parameter>:<key>`, as in torch a step
count each; per group of an optimizer one of role "hyper" named `lr.<group>`, so that a learning-rate scheduler changes
a tensor and nothing else. All that is on the global graph: where parameters and state are stored, and so where the
update runs, is said by placements later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from shardc.frontend.amax_history import push_histories
from shardc.frontend.append import Append, module_of
from shardc.frontend.gradients import Final, finish
from shardc.frontend.optimizer_trace import Update, check, hyperparameters, trace_update
from shardc.frontend.precision import Precision
from shardc.frontend.program_optimizers import Group, Optimizers, group_indices, groups_of, stored_state
from shardc.frontend.traced import Traced
from shardc.frontend.update_cache import CHECKED, UPDATES, remember, shared_options
from shardc.frontend.whole_matrices import Core, append_together, batched, core_of
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.types import TensorType
from shardc.passes.base import Pass
from shardc.passes.normalize.limit_experts import LOAD

aten = torch.ops.aten


@dataclass(frozen=True)
class AppendUpdates(Pass):
    """append_updates: clip the gradients of a step, and make its optimizer's update part of it.

    Needs: a normalised graph of a whole step, which sums its microbatches. Ensures: without an optimizer the gradients
    stay outputs; with one or several, the new parameters and state take their place. `fills` is then what each new
    state input is filled with before the first step. Matrices that an update needs whole are updated `together`, so
    many at most; 0 is as many as the mesh has ranks.
    """

    model: nn.Module
    optimizer: Optimizers = None
    clip_grad_norm: float | None = None
    precision: Precision | None = None
    check_finite: bool = False
    refuses_drops: bool = False
    together: int = 0
    fills: dict[str, float] = field(default_factory=dict[str, float])

    def run(self, graph: Graph) -> Graph:
        self.fills.update(
            append_updates(
                graph,
                self.optimizer,
                self.model,
                clip_grad_norm=self.clip_grad_norm,
                precision=self.precision,
                check_finite=self.check_finite,
                refuses_drops=self.refuses_drops,
                together=self.together,
                updates=self._updates,
            )
        )
        return graph

    @cached_property
    def _updates(self) -> _Updates:
        """Each is traced once, whoever asks first."""
        return _Updates(groups_of(self.optimizer), self.together)

    def of(self, traced: Traced) -> Iterator[tuple[str, int, str, Update]]:
        """Of each trained parameter of a trace its group's index, the name of the optimizer's class, and its update.
        Raises ShardcError (SC107)."""
        if self.optimizer is None:
            return
        params = {i.name: i for i in traced.inputs if i.role == "param"}
        names = {alias: i.name for i in params.values() for alias in (i.name, *i.aliases)}
        groups = {names.get(name, name): index for name, index in group_indices(self.optimizer, self.model)}
        for output in traced.outputs:
            if output.role == "grad" and output.name in groups:
                stored = TensorType.of(params[output.name].node.meta["val"])
                index = groups[output.name]
                yield output.name, index, self._updates.kind(index), self._updates.of(index, stored)


def append_updates(
    graph: Graph,
    optimizer: Optimizers,
    model: nn.Module,
    *,
    clip_grad_norm: float | None = None,
    precision: Precision | None = None,
    check_finite: bool = False,
    refuses_drops: bool = False,
    together: int = 0,
    updates: _Updates | None = None,
) -> dict[str, float]:
    """Replace the graph's gradients by the parameters and the state after the optimizer's step.

    Returns what each new state input is filled with before the first step. Parameters in no group stay as they are,
    and so do those without a gradient; with `check_finite` all do, in a step with a gradient that is not, and where it
    `refuses_drops`, in one that drops rows of experts. Without an optimizer the gradients are returned, of the loss as
    it is. `graph.gradients` names the gradients that the graph still computes, as backward makes them.
    """
    groups = _groups(graph, optimizer, model)
    outputs = list(zip(graph.outputs, graph.output_values, strict=True))
    gradients = {port.name: node for port, node in outputs if port.role == "grad"}
    append = Append(graph)
    load = next((node for port, node in outputs if port.name == LOAD), None) if refuses_drops else None
    final = finish(append, gradients, limit=clip_grad_norm, check=check_finite, precision=precision, load=load)
    fills: dict[str, float] = dict(final.fills or {})
    updated: list[tuple[Port, fx.Node]] = []
    if optimizer is None:
        updated = [(port, final.gradients[port.name]) for port, _ in outputs if port.role == "grad"]
    else:
        updates = updates or _Updates(groups_of(optimizer), together)
        updated = _updated(append, updates, groups, final, fills)
    results = [(port, node) for port, node in outputs if port.role != "grad"]
    results = push_histories(append, results, final.allowed, precision, fills)
    outputs = [*results[:1], *updated, *final.state, *results[1:], *final.outputs]
    graph.outputs = tuple(port for port, _ in outputs)
    graph.output_node.args = (tuple(node for _, node in outputs),)
    graph.erase_dead()
    alive = set(graph.fx.nodes)
    graph.gradients = {name: node for name, node in gradients.items() if node in alive}
    return fills


def _updated(
    append: Append, updates: _Updates, groups: Mapping[str, int], final: Final, fills: dict[str, float]
) -> list[tuple[Port, fx.Node]]:
    """The new parameters and state; adds to `fills`."""
    rates: dict[int, fx.Node] = {}
    members: list[_Member] = []
    params = append.graph.input_nodes()
    for name, gradient in final.gradients.items():
        if name not in groups:
            continue
        index, param = groups[name], params[name]
        update = updates.of(index, type_of(param))
        if index not in rates:
            rates[index] = append.input(Port("hyper", f"lr.{index}"), TensorType.plain(torch.float64, ()))
        ports = [Port("state", f"{name}:{s.key}", parameter=name) for s in update.states]
        state = [
            append.input(port, TensorType.plain(s.dtype, s.shape), module_of(name))
            for port, s in zip(ports, update.states, strict=True)
        ]
        fills |= {port.name: s.fill for port, s in zip(ports, update.states, strict=True)}
        # Where parameters are stored in fewer digits than gradients are reduced in, those are rounded at last.
        fitting = append.cast(f"opt.{name}", module_of(name), gradient, type_of(param).dtype)
        members.append(_Member(name, index, update, (param, fitting, rates[index], *state), ports))
    results = _results(append, updates, members)
    updated: list[tuple[Port, fx.Node]] = []
    for member in members:
        values, (param, _, _, *state) = results[member.name], member.inputs
        if final.allowed is not None:
            prefix, fqn = f"opt.{member.name}", module_of(member.name)
            pairs = zip(values, (param, *state), strict=True)
            values = [append.call(prefix, fqn, aten.where.self, final.allowed, new, old) for new, old in pairs]
        updated += zip((Port("param", member.name), *member.ports), values, strict=True)
    return updated


@dataclass(frozen=True)
class _Member:
    """A parameter that is updated: its group's index, its update, what that reads, and the ports of its state."""

    name: str
    index: int
    update: Update
    inputs: tuple[fx.Node, ...]
    ports: Sequence[Port]


def _results(append: Append, updates: _Updates, members: Sequence[_Member]) -> dict[str, list[fx.Node]]:
    """The new parameter and state of each. Where an update needs whole matrices, those of as many parameters as the
    mesh has ranks are made together."""
    results: dict[str, list[fx.Node]] = {}
    alike: dict[tuple[int, int], list[_Member]] = {}  # of one group, and of one update
    for member in members:
        if updates.core(member.update) is not None:
            alike.setdefault((member.index, id(member.update)), []).append(member)
        else:
            results[member.name] = append.instance(member.update.graph, member.inputs, member.name)
    most = updates.together or append.graph.mesh.world_size
    for (index, _), every in alike.items():
        for some in (every[i : i + most] for i in range(0, len(every), most)):
            update, given = some[0].update, [(member.name, member.inputs) for member in some]
            core, body = updates.core(update), updates.batched(update, len(some))
            assert core is not None
            made = append_together(append, update, core, body, given, updates.kind(index))
            results |= {member.name: values for member, values in zip(some, made, strict=True)}
    return results


def initial_state(
    graph: Graph, fills: Mapping[str, float], optimizer: Optimizers, model: nn.Module | None
) -> dict[str, Tensor]:
    """The "state" inputs: an optimizer's own, if it made steps or was loaded, else what a first step starts from."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) if model is not None else {}
    stored = stored_state(optimizer)
    state: dict[str, Tensor] = {}
    for port, node in zip(graph.inputs, graph.placeholders, strict=True):
        if port.role != "state" or port.name not in fills:
            continue
        name, key = port.parameter, port.name.removeprefix(f"{port.parameter}:")
        type = type_of(node)
        value = stored.get(tensors[name], {}).get(key) if stored and name in tensors else None
        if value is None or (isinstance(value, Tensor) and value.is_meta):
            # One number seen as a tensor: a rank that cuts its shard out never holds the whole.
            state[port.name] = torch.tensor(fills[port.name], dtype=type.dtype).expand(type.shape)
        else:
            state[port.name] = torch.as_tensor(value).detach().to(type.dtype).reshape(type.shape)
    return state


def _groups(graph: Graph, optimizers: Optimizers, model: nn.Module) -> dict[str, int]:
    """Parameter of the graph -> index of its group."""
    ports = {name: port.name for port in graph.inputs if port.role == "param" for name in (port.name, *port.aliases)}
    return {ports.get(name, name): index for name, index in group_indices(optimizers, model)}


@dataclass
class _Updates:
    """Updates by hyperparameters, shape and dtype: few, however many parameters there are."""

    groups: Sequence[Group]
    together: int  # matrices at most, 0 for as many as there are ranks
    known: dict[Hashable, Update] = field(default_factory=dict[Hashable, Update])
    checked: dict[Hashable, None] = field(default_factory=dict[Hashable, None])
    shared: dict[int, Hashable | None] = field(default_factory=dict[int, Hashable | None])  # options of each group
    cores: dict[int, Core | None] = field(default_factory=dict[int, "Core | None"])  # by the id of an update of `known`
    bodies: dict[tuple[int, int], Graph] = field(default_factory=dict[tuple[int, int], Graph])

    def kind(self, index: int) -> str:
        """The class of a group's optimizer."""
        return type(self.groups[index].optimizer).__name__

    def core(self, update: Update) -> Core | None:
        if id(update) not in self.cores:
            self.cores[id(update)] = core_of(update)
        return self.cores[id(update)]

    def batched(self, update: Update, count: int) -> Graph:
        core, key = self.core(update), (id(update), count)
        assert core is not None
        if key not in self.bodies:
            self.bodies[key] = batched(core, count)
        return self.bodies[key]

    def of(self, index: int, type: TensorType) -> Update:
        optimizer, group = self.groups[index]
        if index not in self.shared:
            self.shared[index] = shared_options(optimizer, group)
        options = self.shared[index] or (id(optimizer), hyperparameters(group))
        checked, known = (CHECKED, UPDATES) if self.shared[index] else (self.checked, self.known)
        key = (options, type.shape, type.dtype)
        if key in self.known:
            return self.known[key]
        tall = type.ndim > 1 and type.shape[0] > type.shape[-1]
        if (options, type.ndim, tall) not in checked:
            check(optimizer, group, type.ndim, tall=tall)
            remember(checked, (options, type.ndim, tall), None)
        if key not in known:
            remember(known, key, trace_update(optimizer, group, type.shape, type.dtype))
        self.known[key] = known[key]
        return known[key]
