"""`trace_update`: what a real `torch.optim` optimizer does to one parameter in one step, as a small graph.

    update(param, grad, lr, *state) = param, *state afterwards

The optimizer's own `step` runs on fakes, with its learning rate and step count as `traced_number`s, so it is the
arithmetic of eager torch (not of `capturable=True`, which divides by the learning rate, and so by 0 in a warm-up's
first step). An optimizer that decides by the value of its step (RAdam) is traced as capturable instead, where torch
has that. Scalars among the state are kept in float64, as Python keeps them.

Taken are updates whose every call has a sharding rule; `whole_matrices.py` has those that need more than a shard.
`check` runs three real steps, on a small random parameter in float64 and with a changing learning rate, against three
of the graph: an update that is not the same in every step (SGD's with dampening) is refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc import torch_compat
from shardc.frontend.ingest import ingest
from shardc.frontend.lifted_casts import LiftedCasts
from shardc.frontend.trace import Traced, TracedInput, TracedOutput
from shardc.frontend.traced_scalar import Number, traced_extremes, traced_numbers
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.mesh import Mesh
from shardc.passes.normalize.decompositions.table import is_random
from shardc.passes.normalize.normalize import Normalize
from shardc.rules.registry import find_rule

aten = torch.ops.aten
HINT = (
    "what works is an update of each parameter by itself, the same in every step: AdamW, Adam, NAdam, RAdam, Adamax, "
    "SGD (dampening=0), RMSprop, Adagrad, Adadelta, Adafactor, Muon"
)
TOLERANCE = 1e-10
# How a step is computed, and what schedulers keep in a group: not part of what the update is.
FLAGS = frozenset(("foreach", "fused", "capturable", "differentiable"))
INCIDENTAL = frozenset(("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr")) | FLAGS


@dataclass(frozen=True)
class State:
    """One tensor that the optimizer keeps for a parameter; before the first step it is filled with `fill`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float
    number: bool = False  # a Python number to the optimizer, not a tensor


@dataclass(frozen=True)
class Update:
    """A normalised graph: param, grad, lr (0-dim, float64) and the state in, the new param and state out, in order."""

    graph: Graph
    states: tuple[State, ...]


def trace_update(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> Update:
    """The update of a parameter of this shape and dtype in one of the optimizer's groups. ShardcError (SC107) if it
    needs values, is not elementwise, or leaves tensors in its state that fit the parameter in no way."""
    if "lr" not in group:
        raise refused(optimizer, "its groups have no lr")
    group = explicit(group)
    try:
        return _trace(optimizer, group, tuple(shape), dtype, capturable=False)
    except ShardcError:
        if "capturable" not in group:
            raise
        try:
            return _trace(optimizer, group, tuple(shape), dtype, capturable=True)
        except ShardcError:
            pass
        raise


def check(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], ndim: int, *, tall: bool = False) -> None:
    """Compare three real steps with three of the traced update; ShardcError (SC107) where they differ.

    Of a matrix with more columns than rows, or with fewer: of some optimizers the two are not the same code.
    """
    shape = _probe(ndim)[::-1] if tall else _probe(ndim)
    group = explicit(group)
    update = trace_update(optimizer, group, shape, torch.float64)
    draw = torch.Generator().manual_seed(0)
    param = torch.randn(shape, dtype=torch.float64, generator=draw)
    eager, traced = param.clone(), param.clone()
    state = {s.key: torch.full(s.shape, s.fill, dtype=s.dtype) for s in update.states}
    starting_state: dict[str, Any] = _starting_state(optimizer, group, eager)
    bare_optimizer, step = _bare(
        optimizer, {**group, "params": [eager]}, {eager: starting_state} if starting_state else {}
    )
    runner = _Lifted(fx.GraphModule({}, update.graph.fx))
    for lr in (0.1, 0.05, 0.0):
        eager.grad = torch.randn(shape, dtype=torch.float64, generator=draw)
        eager.grad.reshape(-1)[1:2] = 0  # as an embedding's rows that no token asked for
        bare_optimizer.param_groups[0]["lr"] = lr
        with _default_dtype(torch.float64), LiftedCasts(torch.float64), torch.no_grad():
            step()
            lr_now = torch.tensor(lr, dtype=torch.float64)
            traced, *after = runner.run(traced, eager.grad, lr_now, *state.values())
        state = dict(zip(state, after, strict=True))
        real = {"parameter": eager, **bare_optimizer.state[eager]}
        for key, value in {"parameter": traced, **state}.items():
            expected = torch.as_tensor(real[key], dtype=torch.float64)
            if not torch.allclose(value.double(), expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                raise refused(optimizer, f"traced, its steps are not those that it makes itself: the {key} differs")


class _Lifted(fx.Interpreter):
    """Runs a graph with every cast to a float made to float64."""

    def call_function(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs = {**kwargs, "dtype": torch.float64}
        return super().call_function(target, args, kwargs)


def explicit(group: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A group as its steps are made on a CPU, in another dtype: not capturable, and with the eps that Adafactor takes
    for None, which is that of the dtype of its first parameter."""
    group = {**group, "capturable": False} if "capturable" in group else group
    eps: Any = group.get("eps")
    if not isinstance(eps, tuple) or not group["params"] or eps[0] is not None:  # type: ignore[redundant-expr]
        return dict(group)
    return {**group, "eps": (torch.finfo(dtype or group["params"][0].dtype).eps, *eps[1:])}


def refused(optimizer: torch.optim.Optimizer, why: str, hint: str = HINT) -> ShardcError:
    return error("SC107", f"{type(optimizer).__name__} cannot be part of the program: {why}", hint=hint)


def hyperparameters(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a group's update is traced with, and cannot change afterwards: all but the learning rate."""
    return tuple(sorted((key, repr(value)) for key, value in group.items() if key not in INCIDENTAL))


def _trace(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    capturable: bool,
) -> Update:
    states = _states(optimizer, group, shape, dtype)
    mode = torch_compat.fake_mode()
    kinds = [(shape, dtype), (shape, dtype), ((), torch.float64), *((s.shape, s.dtype) for s in states)]
    fakes = [torch_compat.fake_like(mode, torch.empty(s, dtype=d, device="meta")) for s, d in kinds]

    def update(param: Tensor, grad: Tensor, lr: Tensor, *values: Tensor) -> list[Tensor]:
        traced_state = {s.key: Number(v) if s.number else v for s, v in zip(states, values, strict=True)}
        param.grad = grad
        options = {"params": [param], "lr": Number(lr), "capturable": capturable}
        options = {k: v for k, v in options.items() if k in group}
        bare_optimizer, step = _bare(optimizer, {**group, **options}, {param: traced_state})
        with traced_numbers(), traced_extremes(type(optimizer)):
            step()
        new_state: dict[str, Any] = bare_optimizer.state[param]
        if new_state.keys() != traced_state.keys():
            raise refused(optimizer, f"its state changes from {sorted(traced_state)} to {sorted(new_state)}")
        return [param, *(v.tensor if isinstance(v, Number) else v for v in new_state.values())]

    try:
        with torch_compat.compiling() if capturable else nullcontext():
            gm = torch_compat.record_in_place(update, fakes, mode)
    except ShardcError:
        raise
    except Exception as problem:
        raise refused(optimizer, _line(problem)) from problem
    names = ("param", "grad", "lr", *(s.key for s in states))
    if any(node.op == "get_attr" for node in gm.graph.nodes):
        raise refused(optimizer, "its step computes with a tensor that is not in its state")
    graph = graph_of(gm, names, (names[0], *names[3:]))
    _splittable(optimizer, graph)
    for node, s in zip(graph.output_values[1:], states, strict=True):
        if (type_of(node).shape, type_of(node).dtype) != (s.shape, s.dtype):
            raise refused(optimizer, f"its state {s.key} does not keep its shape and dtype")
    return Update(graph, states)


def graph_of(gm: fx.GraphModule, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """The recorded graph in core ops."""
    for node in gm.graph.nodes:
        node.meta = {"val": node.meta.get("val"), "phase": "opt"}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    read = tuple(TracedInput("input", n, (), False, node) for n, node in zip(inputs, placeholders, strict=True))
    made = tuple(TracedOutput("output", n, node) for n, node in zip(outputs, output.args[0], strict=True))
    traced = Traced(gm.graph, read, made, {}, {}, ())
    return Normalize().run(ingest(traced, Mesh()))


def _splittable(optimizer: torch.optim.Optimizer, graph: Graph) -> None:
    """Raise ShardcError (SC107) for a call that ranks cannot make of their shards: one without a rule, one with several
    results, or one of random numbers, of which eager PyTorch draws others."""
    for node in graph.calls():
        why = "" if find_rule(node.target) is not None else "has no sharding rule"
        why = why or ("" if info(node).type is not None else "has several results")
        why = why or ("draws random numbers" if is_random(node.target) else "")
        if why:
            raise refused(optimizer, f"its update computes {op_name(node.target)}, which {why}")


# ---------------------------------------------------------------------- the state and the optimizer of a probe
def _bare(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]]) -> Any:
    flags = {key: False for key in ("foreach", "fused", "differentiable") if key in group}
    return torch_compat.bare_optimizer(optimizer, {**group, **flags}, state)


class _First(dict[str, Any]):
    """An optimizer's state for one parameter, which records the first value of each key."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        super().__init__(start)
        self.first: dict[str, Any] = {k: _copied(v) for k, v in start.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, _copied(value))
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[State, ...]:
    """The state before the first step, observed in a real step of a small parameter that is 0, with no gradient."""
    param = torch.zeros(_probe(len(shape)) or (3,), dtype=dtype)
    states: list[State] = []
    for key, value in _first_step(optimizer, group, param, _starting_state(optimizer, group, param)).items():
        t = torch.as_tensor(value)
        fits = t.dim() in (0, param.dim()) and all(n in (1, m) for n, m in zip(t.shape, param.shape, strict=False))
        if not fits:
            raise refused(optimizer, f"its state {key} has not the parameter's shape, nor that of its rows or columns")
        fill = float(t.flatten()[0])
        if bool((t != fill).any()):
            raise refused(optimizer, f"its state {key} does not start as one number")
        scalar = t.dtype if t.dtype == torch.bool else torch.float64
        number = not isinstance(value, Tensor)
        like = tuple(n if t.shape[d] == param.shape[d] else 1 for d, n in enumerate(shape)) if t.dim() else ()
        states.append(State(key, like, t.dtype, fill) if t.dim() else State(key, (), scalar, fill, number))
    return tuple(states)


def _probe(ndim: int) -> tuple[int, ...]:
    """A small shape, whose dims tell which are which."""
    return tuple(range(3, 3 + ndim))


def _first_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Tensor, start: Mapping[str, Any]
) -> dict[str, Any]:
    """The state that a step starts from, or makes."""
    recorder = _First(start)
    param.grad = torch.zeros_like(param)
    options = {"params": [param], "lr": float(group["lr"]), "capturable": False}
    _, step = _bare(optimizer, {**group, **{k: v for k, v in options.items() if k in group}}, {param: recorder})
    try:
        with torch.no_grad():
            step()
    except Exception as problem:
        raise refused(optimizer, _line(problem)) from problem
    return {key: value for key, value in recorder.first.items() if value is not None}


def _starting_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """What must be there before a first step: nothing for most, which make it then; Adagrad makes it beforehand."""
    try:
        _first_step(optimizer, group, torch.zeros_like(like), {})
    except ShardcError:
        optimizer_state: Mapping[Tensor, dict[str, Any]] = optimizer.state
        # Of a parameter with the most dims: of a scalar's own state nothing tells what has the parameter's shape.
        params = sorted((p for p in group["params"] if optimizer_state.get(p)), key=Tensor.dim, reverse=True)
        if not params:
            raise
        return {key: _resized(optimizer, value, like) for key, value in optimizer_state[params[0]].items()}
    return {}


def _resized(optimizer: torch.optim.Optimizer, value: Any, like: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        raise refused(
            optimizer, "its state lies on the meta device", "make the optimizer when the model is on a real one"
        )
    first = float(value.flatten()[0])
    return torch.full_like(like, first) if value.dim() else torch.tensor(first, dtype=value.dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Set the dtype in which optimizers keep the scalars of their state."""
    original = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(original)


def _line(problem: Exception) -> str:
    if torch_compat.is_data_dependent(problem):
        return "its step needs the values of tensors, in Python"
    return str(problem).strip().partition("\n")[0] or type(problem).__name__
