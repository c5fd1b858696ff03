"""A graph flattened for running: one `Instruction` a call, values in numbered slots, each freed after its last use.

Interpreting an fx graph costs more than many of its ops, so the graph is walked once. A `getitem` is folded into the
call that it takes from; arguments become a template with the places of its tensors. The graph is device-neutral, and
so is a template: devices are filled in here, and so is another float dtype where one is asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import fx
from torch._ops import OpOverload

from kernels_triton.fused import reference
from kernels_triton.fused.op import FUSED
from kernels_triton.fused.text import parse
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import MADE, in_microbatch
from shardc.ir.ops.context import Communicator, RankContext
from shardc.ir.ops.kernels import KERNELS


class Env(Protocol):
    """The value of each slot; None before and after its life."""

    def __getitem__(self, slot: int, /) -> Any: ...


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Numerics:
    """Where tensors live, and the dtype that stands for every floating one: None leaves dtypes as compiled.

    Widening the whole graph is what makes an exact comparison possible where a library hard-codes float32.
    """

    device: torch.device = CPU
    dtype: torch.dtype | None = None

    def lift(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None:
            return dtype
        if dtype.is_complex:
            return torch.complex128 if self.dtype == torch.float64 else torch.complex64
        return self.dtype if dtype.is_floating_point else dtype

    def cast(self, value: Any) -> Any:
        """A tensor in the run's dtype. None, which some ops yield in the place of a tensor, stays."""
        return None if value is None else value.to(device=self.device, dtype=self.lift(value.dtype))


@dataclass(frozen=True)
class Instruction:
    """One call. `arguments(env)` gives its args and kwargs.

    `yields` lists, for each result in use, its value, its position (None for a call's only one) and its slot.
    """

    node: fx.Node
    target: Callable[..., Any]
    arguments: Callable[[Env], tuple[Sequence[Any], dict[str, Any]]]
    reads: tuple[int, ...]
    yields: tuple[tuple[fx.Node, int | None, int], ...]
    free: tuple[int, ...]

    @property
    def name(self) -> str:
        return info(self.node).name

    @property
    def where(self) -> str:
        """How an error cites the instruction: its name, and the user's line if it has one."""
        return cited(self.node)


@dataclass(frozen=True)
class Listing:
    """The instructions of a graph in order, and the slots of its inputs and outputs.

    The first `repeated` of them run once a microbatch, the rest once a step. `carried` says which input slots the next
    microbatch finds filled from which others, and `stacked` which outputs (by index) each microbatch has of its own.
    """

    graph: Graph
    size: int
    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    repeated: int
    carried: tuple[tuple[int, int], ...]
    stacked: tuple[int, ...]


def flatten(graph: Graph, numerics: Numerics) -> Listing:
    """List a graph's calls. Outputs live to the end, and so do inputs where there are several microbatches."""
    slots: dict[fx.Node, int] = {}
    placeholders = graph.placeholders
    for node in placeholders:
        slots[node] = len(slots)
    inside, several = in_microbatch(graph), graph.microbatches > 1
    calls = sorted(graph.calls(), key=lambda node: node not in inside)
    repeated = sum(1 for node in calls if node in inside)
    yields = [_yields(node) for node in calls]
    for found in yields:
        for value, _ in found:
            slots[value] = len(slots)
    outputs = tuple(slots[node] for node in graph.output_values)
    last = dict.fromkeys((*outputs, *(range(len(placeholders)) if several else ())), len(calls))
    for at, node in enumerate(calls):
        for slot in [*(slots[v] for v in operands(node)), *(slots[v] for v, _ in yields[at])]:
            last[slot] = max(last.get(slot, 0), at)
    dying: dict[int, list[int]] = {}
    for slot, at in last.items():
        dying.setdefault(at, []).append(slot)
    instructions = tuple(
        Instruction(
            node,
            _target(node, numerics),
            _arguments(node, slots, numerics),
            tuple(slots[v] for v in operands(node)),
            tuple((value, position, slots[value]) for value, position in found),
            tuple(dying.get(at, ())),
        )
        for at, (node, found) in enumerate(zip(calls, yields, strict=True))
    )
    inputs = tuple(slots[node] for node in placeholders)
    twins = graph.input_nodes()
    own = [
        (i, port, slot)
        for i, (port, node, slot) in enumerate(zip(graph.outputs, graph.output_values, outputs, strict=True))
        if several and port.role in MADE and node in inside
    ]
    carried = tuple((slot, slots[twins[port.name]]) for _, port, slot in own if port.role == "buffer")
    stacked = tuple(i for i, port, _ in own if port.role == "output")
    return Listing(graph, len(slots), inputs, instructions, outputs, repeated, carried, stacked)


def cited(call: fx.Node) -> str:
    """`%act (mlp.py:6)`."""
    found = info(call)
    return f"%{found.name}" + (f" ({found.source})" if found.source else "")


def rank_context(mesh: Mesh, rank: int, comm: Communicator) -> RankContext:
    """The context of a rank; an axis that was split into sub-axes keeps its coordinate under its own name."""
    coordinate = mesh.coordinate(rank)
    for name in mesh.names:
        parent = mesh.parent(name)
        while parent not in coordinate:
            coordinate[parent] = mesh.index(rank, parent)
            parent = mesh.parent(parent)
    return RankContext(mesh, coordinate, comm)


def _yields(node: fx.Node) -> list[tuple[fx.Node, int | None]]:
    if info(node).type is not None:
        return [(node, None)]
    return [(user, cast(int, user.args[1])) for user in node.users if user.target is operator.getitem]


def _arguments(
    node: fx.Node, slots: dict[fx.Node, int], numerics: Numerics
) -> Callable[[Env], tuple[Sequence[Any], dict[str, Any]]]:
    args = [_constant(arg, numerics) for arg in node.args]
    kwargs = {name: _constant(arg, numerics) for name, arg in node.kwargs.items()}
    _fill_in(node, args, kwargs, numerics)
    places = [(i, slots[arg]) for i, arg in enumerate(args) if isinstance(arg, fx.Node)]
    nested = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, (list, tuple)) and _has_node(arg)]
    named = [(name, arg) for name, arg in kwargs.items() if isinstance(arg, fx.Node) or _has_node(arg)]

    def plain(env: Env) -> tuple[Sequence[Any], dict[str, Any]]:
        filled = args.copy()
        for i, slot in places:
            filled[i] = env[slot]
        return filled, kwargs

    def general(env: Env) -> tuple[Sequence[Any], dict[str, Any]]:
        filled, _ = plain(env)
        for i, arg in nested:
            filled[i] = fx.map_arg(arg, lambda n: env[slots[n]])  # type: ignore[index]
        return filled, {**kwargs, **{name: fx.map_arg(arg, lambda n: env[slots[n]]) for name, arg in named}}  # type: ignore[index]

    return general if nested or named else plain


def _target(node: fx.Node, numerics: Numerics) -> Callable[..., Any]:
    """What runs. Where the graph is lifted, ATen computes floats of integers alone in the dtype that it is lifted to,
    as kernels do, and not in torch's default, float32: `ids / 7`."""
    run = KERNELS.get(node.target, cast("Callable[..., Any]", node.target))
    type, dtype = info(node).type, numerics.dtype
    found = [type_of(value).dtype for value in operands(node)]
    if node.target is FUSED and dtype is not None and not any(one.is_floating_point for one in found):
        return lambda inputs, line: reference.run(parse(line), inputs, stand_in=dtype)
    made = isinstance(node.target, OpOverload) and node.target.namespace == "aten" and bool(found)
    if dtype is None or not made or type is None or not type.dtype.is_floating_point:
        return run
    if any(one.is_floating_point or one.is_complex for one in found):
        return run
    chooses = op_name(node.target).partition(".")[0] == "where"  # by bools

    def widened(arg: Any) -> Any:
        return arg.to(dtype) if isinstance(arg, torch.Tensor) and not (chooses and arg.dtype == torch.bool) else arg

    return lambda *args, **kwargs: run(*map(widened, args), **kwargs)


def _has_node(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(_has_node(item) for item in cast("Sequence[Any]", arg))
    return isinstance(arg, fx.Node)


def _constant(arg: Any, numerics: Numerics) -> Any:
    return numerics.lift(arg) if isinstance(arg, torch.dtype) else arg


def _fill_in(node: fx.Node, args: list[Any], kwargs: dict[str, Any], numerics: Numerics) -> None:
    """Name the device and the dtype that an op would otherwise take from torch's defaults."""
    schema = getattr(node.target, "_schema", None)
    names = {a.name for a in schema.arguments} if schema is not None else set[str]()
    if "device" in names and ("device" in kwargs or not operands(node)):
        kwargs["device"] = numerics.device
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    type = info(node).type
    if "dtype" in names and not operands(node) and kwargs.get("dtype") is None and type is not None:
        kwargs["dtype"] = numerics.lift(type.dtype)
