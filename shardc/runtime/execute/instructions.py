"""A graph flattened for execution: one `CallInstruction` a call, values in numbered slots, freed after their last use.

Interpreting an fx graph costs more than many of its ops, so the graph is traversed once. A `getitem` is folded into its
producing call. Arguments become a template with the positions of the tensors. The graph is device-neutral; this module
fills in the device, and another float dtype where the run asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import fx
from torch._ops import OpOverload

from kernels_triton.generated.op import FUSED
from kernels_triton.ir import reference
from kernels_triton.ir.text import parse
from shardc.ir.call_slots import CallSlots, slotted_calls
from shardc.ir.graph import Graph, cited, info, op_name, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import MADE, in_microbatch
from shardc.ir.ops.accumulate import ACCUMULATE, ADDS
from shardc.ir.ops.context import Communicator, RankContext
from shardc.ir.ops.kernels import IN_ORDER, KERNELS, is_plain
from shardc.ir.sums import whole_sum
from shardc.runtime.execute.call_arguments import CallArguments, Slot, Viewed


class SlotValues(Protocol):
    """The value of each slot; None outside its lifetime."""

    def __getitem__(self, slot: int, /) -> Any: ...


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Numerics:
    """The device of the tensors, and the dtype that replaces every floating one. None keeps dtypes as compiled.

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
        """A tensor in the run's dtype. None, which some ops yield in the place of a tensor, stays.

        An optimizer computes with numbers of double precision, which halves have no room for: 1 - 0.999 would be 0.
        """
        if value is None:
            return None
        is_number = value.dtype == torch.float64 and not value.dim() and self.dtype in (torch.bfloat16, torch.float16)
        return value.to(device=self.device, dtype=value.dtype if is_number else self.lift(value.dtype))


@dataclass(frozen=True)
class CallInstruction(CallSlots):
    """A call with what runs it. `arguments(env)` gives its args and kwargs. What all microbatches but the first add to
    a sum is added to what slot `total` holds, from the one before."""

    target: Callable[..., Any]
    arguments: CallArguments
    total: int | None = None

    @property
    def name(self) -> str:
        return info(self.node).name

    @property
    def where(self) -> str:
        """The instruction in an error's text: its name, and the user's line if it has one."""
        return cited(self.node)


@dataclass(frozen=True)
class Listing:
    """The instructions of a graph in order, and the slots of its inputs and outputs.

    Those of `repeated` run once a microbatch, but those of `first` (by index) in the first one alone; those before and
    behind them once a step. `buffer_slots` pairs the slot of a new buffer with the input slot that gets it for the next
    microbatch. `stacked` lists the outputs (by index) that each microbatch has of its own.
    """

    graph: Graph
    size: int
    inputs: tuple[int, ...]
    instructions: tuple[CallInstruction, ...]
    outputs: tuple[int, ...]
    repeated: range
    first: frozenset[int]
    buffer_slots: tuple[tuple[int, int], ...]
    stacked: tuple[int, ...]


def list_calls(graph: Graph, numerics: Numerics) -> Listing:
    """List a graph's calls. Outputs live to the end, and so do inputs where there are several microbatches."""
    slotted = slotted_calls(graph)
    slots, repeated, placeholders = slotted.slots, slotted.repeated, graph.placeholders
    instructions = tuple(
        CallInstruction(
            call.node,
            call.reads,
            call.yields,
            call.free,
            _target(call.node, numerics),
            _arguments(call.node, slots, numerics),
            slots[whole_sum(call.node)] if call.node.target in (ACCUMULATE, *ADDS) else None,
        )
        for call in slotted.calls
    )
    outputs = tuple(slots[node] for node in graph.output_values)
    inputs = tuple(slots[node] for node in placeholders)
    input_of, microbatch_nodes = graph.input_nodes(), in_microbatch(graph)
    microbatch_outputs = [
        (i, port, slot)
        for i, (port, node, slot) in enumerate(zip(graph.outputs, graph.output_values, outputs, strict=True))
        if graph.microbatches > 1 and port.role in MADE and node in microbatch_nodes
    ]
    buffer_slots = tuple(
        (slot, slots[input_of[port.name]]) for _, port, slot in microbatch_outputs if port.role == "buffer"
    )
    stacked = tuple(i for i, port, _ in microbatch_outputs if port.role == "output")
    return Listing(graph, len(slots), inputs, instructions, outputs, repeated, slotted.first, buffer_slots, stacked)


def rank_context(mesh: Mesh, rank: int, comm: Communicator) -> RankContext:
    """The context of a rank; an axis that was split into sub-axes keeps its coordinate under its own name."""
    coordinate = mesh.coordinate(rank)
    for name in mesh.names:
        parent = mesh.parent(name)
        while parent not in coordinate:
            coordinate[parent] = mesh.index(rank, parent)
            parent = mesh.parent(parent)
    return RankContext(mesh, coordinate, comm)


def _arguments(node: fx.Node, slots: dict[fx.Node, int], numerics: Numerics) -> CallArguments:
    args = [_constant(arg, numerics) for arg in node.args]
    kwargs = {name: _constant(arg, numerics) for name, arg in node.kwargs.items()}
    _fill_in(node, args, kwargs, numerics)
    if node.target in IN_ORDER and _is_plain(node, numerics):

        def in_order(arg: Any) -> Any:
            return Viewed(Slot(slots[arg]), "contiguous") if isinstance(arg, fx.Node) else arg

        return CallArguments(tuple(map(in_order, args)), {name: in_order(arg) for name, arg in kwargs.items()})

    def template(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            items = [template(item) for item in cast("Sequence[Any]", arg)]
            return tuple(items) if isinstance(arg, tuple) else items
        return Slot(slots[arg]) if isinstance(arg, fx.Node) else arg

    return CallArguments(tuple(map(template, args)), {name: template(arg) for name, arg in kwargs.items()})


def _target(node: fx.Node, numerics: Numerics) -> Callable[..., Any]:
    """The function that runs a call. In a lifted graph, ATen must compute floats from integers alone (`ids / 7`) in the
    lifted dtype, as kernels do, and not in torch's default, float32."""
    run = cast("Callable[..., Any]", node.target)
    if not _is_plain(node, numerics):
        run = KERNELS.get(node.target, run)
    type, dtype = info(node).type, numerics.dtype
    operand_dtypes = [type_of(value).dtype for value in operands(node)]
    if (
        node.target is FUSED
        and dtype is not None
        and not any(operand_dtype.is_floating_point for operand_dtype in operand_dtypes)
    ):
        return lambda inputs, line: reference.run(parse(line), inputs, stand_in=dtype)
    is_aten = isinstance(node.target, OpOverload) and node.target.namespace == "aten" and bool(operand_dtypes)
    if dtype is None or not is_aten or type is None or not type.dtype.is_floating_point:
        return run
    if any(operand_dtype.is_floating_point or operand_dtype.is_complex for operand_dtype in operand_dtypes):
        return run
    is_where = op_name(node.target).partition(".")[0] == "where"  # by bools

    def widened(arg: Any) -> Any:
        return arg.to(dtype) if isinstance(arg, torch.Tensor) and not (is_where and arg.dtype == torch.bool) else arg

    return lambda *args, **kwargs: run(*map(widened, args), **kwargs)


def _is_plain(node: fx.Node, numerics: Numerics) -> bool:
    return node.target in KERNELS and is_plain(
        node.target, numerics.lift(type_of(operands(node)[0]).dtype), numerics.device
    )


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
