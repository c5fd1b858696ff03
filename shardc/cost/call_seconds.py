"""The seconds of each call of a localized graph on one rank, by kind, with the kernels that it launches.

    product      its shapes, by `Hardware.product_seconds`; a convolution as the product that it comes to
    attention    the FLOPs of keys that rows see (`cost.flops`)
    host copy    its bytes at the rate of the host, on a stream of its direction; where it is waited for, 0
    collective   its bytes (`ir.collectives`) on the stream of its process group, and what is copied before and after
    scan         its steps, one after another
    view         0: no kernel; on a CPU what calling takes, but for views of parameters and state, which are kept
    others       the bytes that the kernel reads and writes: elementwise, reduction, copy, fused

On a CPU a kernel takes less than its table says after calls that have left the caches as they were (`Calls`).

Ranks of one program take the same time, but for attention, of which
the rank that has most counts; routing of experts is taken to be balanced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from torch import fx

from kernels_triton.codegen.schedules import column_sums
from kernels_triton.generated.op import FUSED
from kernels_triton.ir.kernel import Kernel
from kernels_triton.match.op import kernel_of
from shardc.cost.aten_kernels import COPIES, LAUNCHES, READS, REDUCTIONS, ROW_HELD, SELECTED, SHARES, WIDENING
from shardc.cost.cache import Cache
from shardc.cost.decomposed import decomposed_cost
from shardc.cost.flops import OF_EXPERTS, PARTS, RINGS, ROWS, attention_tiles, node_flops
from shardc.cost.product_shapes import PRODUCT_SHAPES
from shardc.ir.arena import views
from shardc.ir.attention_rings import SO_FAR
from shardc.ir.buckets import Piece, is_summed, pieces
from shardc.ir.collectives import KINDS as COLLECTIVE_KINDS
from shardc.ir.collectives import Collective, collective
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.ir.group_axes import axes_used_twice
from shardc.ir.hardware import Hardware
from shardc.ir.in_flight import copied_bytes
from shardc.ir.mesh import Mesh
from shardc.ir.ops.accumulate import ACCUMULATE, ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.host_copies import ENDS, HOST_COPIES, OFFLOADS
from shardc.ir.ops.local import axis_offset
from shardc.ir.ops.scaled import turned
from shardc.ir.overlap_schedule import sums_gradients
from shardc.ir.schema import given
from shardc.ir.storages import Layouts, Operand, frozen, layouts, unread_bytes, yields
from shardc.ir.sums import row_bytes
from shardc.torch_compat import args_of, kwargs_of

Kind = Literal[
    "product", "attention", "scan", "elementwise", "reduction", "copy", "fused", "collective", "host copy", "view"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
REGISTER_COLS = 16384  # a generated kernel reads longer rows once for each reduction
COMPUTE = ""  # the name of the stream of all that is no collective


@dataclass(frozen=True, slots=True)
class CallCost:
    """What one run of a call takes. A collective's `seconds` are on the `stream` of its group; `before` and `after`
    are copies on the compute stream, before it begins and after it has been waited for. `launches` are the kernels,
    `beside` is how many times as long a product takes beside a collective."""

    kind: Kind
    seconds: float
    launches: int = 1
    stream: str = COMPUTE
    before: float = 0.0
    after: float = 0.0
    moved: Collective | None = None
    issuing: float = 0.0  # how long the host takes to begin a collective
    beside: float = 1.0

    @property
    def total(self) -> float:
        """On all streams."""
        return self.seconds + self.before + self.after


NOTHING = CallCost("view", 0.0, 0)


def call_costs(
    graph: Graph, hardware: Hardware, mesh: Mesh | None = None, known: Layouts | None = None
) -> dict[fx.Node, CallCost]:
    """The cost of every call of a localized graph. `mesh` is that of the whole job, which has the graph's axes: groups
    lie in the network as its ranks do. By default it is the graph's own. `known` are the graph's layouts, where the
    caller knows them."""
    return _Costs(graph, hardware, mesh or graph.mesh, known or layouts(graph)).all()


class _Costs:
    def __init__(self, graph: Graph, hardware: Hardware, mesh: Mesh, known: Layouts) -> None:
        self.graph, self.mesh, self.layouts = graph, mesh, known
        self.hardware = hardware.on(mesh)
        self.unread = unread_bytes(graph, known.operands)
        rate = self.hardware.tables.cache
        self.cache = None if rate is None else Cache(rate.bytes)
        self.elements = dict(self.hardware.tables.elements)
        self.cached = 0  # bytes of the call at hand that the cache has
        self._twice = {frozenset(axes) for axes in axes_used_twice(graph)}
        self.calls = self.hardware.tables.calls
        self.held = held_views(graph) if self.calls.first else set[fx.Node]()
        # What the last kernel before the call at hand moved, and whether no other call came between.
        self.moved, self.first = math.inf, True

    def all(self) -> dict[fx.Node, CallCost]:
        costs: dict[fx.Node, CallCost] = {}
        equal: dict[Any, CallCost] = {}  # the cost of the first of equal calls, of which a graph has many
        for node in self.graph.calls():
            if self.cache is not None:
                self.cached = self._use(node, self.cache)
            if op_name(node.target) in NOT_SHARED:
                cost = self.of(node)
            else:
                key = self._cost_key(node)
                cost = equal.get(key) or equal.setdefault(key, self.of(node))
            costs[node] = self._called(node, cost) if self.calls.first else cost
        return costs

    def _cost_key(self, node: fx.Node) -> Any:
        """All that the cost of a call depends on whose cost follows from the call alone."""
        arguments = (*args_of(node), *kwargs_of(node).items())
        lies = frozen(arguments, self.layouts.operands)
        places = dict[fx.Node, int]()  # an operand that is read twice is another than two
        read = tuple([(places.setdefault(v, len(places)), id(type_of(v))) for v in operands(node)])
        memory = tuple([(id(type_of(v)), at, self.layouts.storages[v].value is v) for v, at in yields(node)])
        return id(node.target), lies, read, memory, self.cached

    def _called(self, node: fx.Node, cost: CallCost) -> CallCost:
        """A call's cost with what calling takes on a CPU, by what the calls before it have left in the caches."""
        if node in self.held:
            return cost
        calling = self.calls.seconds(self.moved, first=self.first)
        if cost.kind == "view":
            self.first = False
            return replace(cost, seconds=calling)
        saved = self.calls.saved(self.moved, first=self.first)
        self.moved = sum(self._bytes(v) for v in dict.fromkeys((*operands(node), *(v for v, _ in yields(node)))))
        self.first = True
        if cost.stream != COMPUTE:
            return cost
        return replace(cost, seconds=max(cost.seconds - saved, min(cost.seconds, calling)))

    def _use(self, node: fx.Node, cache: Cache) -> int:
        """The bytes of a call's operands that the cache has. It has them and the results afterwards; those have to be
        written to memory, too."""
        storage_of, cached = self.layouts.storages, 0
        for value in dict.fromkeys(operands(node)):
            key, size = storage_of[value].value, self._bytes(value)
            cached += size if cache.holds(key) else 0
            cache.use(key, size)
        for value, _ in yields(node):
            if storage_of[value].value is value and (size := self._bytes(value)):
                cache.use(value, size)
        return cached

    def _moving(self, size: float) -> float:
        return self.hardware.memory_seconds(size, cached=self.cached)

    def of(self, node: fx.Node) -> CallCost:
        if (moved := collective(self.graph, node)) is not None:
            decomposed = decomposed_cost(self.graph, node, moved, self.hardware, self.mesh)
            return CallCost("product", *decomposed, moved=moved) if decomposed else self._collective(node, moved)
        if node.target in HOST_COPIES:
            return self._host_copy(node)
        name = op_name(node.target)
        if node.target in (PACK, UNPACK) and (copied := self._joined(node)) is not None:
            return CallCost("copy", self._moving(2 * copied)) if copied else NOTHING
        if name in PRODUCT_SHAPES:
            return self._product(node, name)
        if name in ATTENTION:
            return self._attention(node, name)
        if name.startswith("shardc.scan"):
            return self._scan(node)
        made = self._made(node)
        if node.target in (ACCUMULATE_ROWS, ACCUMULATE_MORE_ROWS):  # all but the first add to rows of their tokens
            made = row_bytes(self.graph, node) * (2 if node.target is ACCUMULATE_ROWS else 1)
        if node.target is axis_offset or (not made and node not in self.unread):
            return NOTHING
        size = made + self.unread.get(node, 0)
        if (kernel := kernel_of(node.target, node.args)) is not None:
            return self._fused(kernel, looped=node.target is FUSED and kernel.cols > REGISTER_COLS)
        packet = name if name.startswith("shardc.") else name.partition(".")[0]
        kind: Kind = "copy" if packet in COPIES else "reduction" if packet in REDUCTIONS else "elementwise"
        size += self._read(node, name, packet, made)
        share = WIDENING if self._widens(node, packet) else SHARES.get(packet, 1.0)
        moving = self._moving(size)
        fixed = min(moving, self.hardware.memory_seconds(0)) if self.calls.first else 0.0  # what calling takes
        seconds = fixed + (moving - fixed) / share
        if each := self.elements.get(_variant(node, packet), self.elements.get(packet)):
            computing = each * max(self._elements(v) for v, _ in yields(node))
            seconds = max(seconds, self.calls.seconds(math.inf) + computing)
        return CallCost(kind, seconds, LAUNCHES.get(packet, 1))

    def _fused(self, kernel: Kernel, *, looped: bool) -> CallCost:
        """What it reads and writes; `looped` rows once more for each of their reductions but the first. Sums over rows
        are written by every program, and added up by a second kernel."""
        size = kernel.bytes_moved
        if looped and (again := max(kernel.level) - 1) > 0:
            size += again * (size - sum(math.prod(out.shape) * out.dtype.itemsize for out in kernel.outputs))
        seconds, products = self._moving(size), self.hardware.tables.products
        sums = len(column_sums(kernel))
        if not (sums and products) or kernel.rows <= (programs := 2 * products[0].units):
            return CallCost("fused", seconds)
        lines = self.hardware.memory_seconds(2 * programs * kernel.cols * sums * 4)  # written, and read
        return CallCost("fused", seconds + lines, 2)

    def _widens(self, node: fx.Node, packet: str) -> bool:
        """A cast to a wider dtype."""
        read = operands(node)
        return packet == "_to_copy" and bool(read) and type_of(read[0]).dtype.itemsize < type_of(node).dtype.itemsize

    # ------------------------------------------------------------------ bytes
    def _operand(self, value: fx.Node) -> Operand:
        return self.layouts.operands[value]

    @cached_property
    def _pieces(self) -> dict[fx.Node, Piece]:
        return pieces(self.graph)

    def _joined(self, node: fx.Node) -> int | None:
        """The bytes that are copied into a flat tensor that is summed over microbatches, or from it into buckets; None
        of other flat tensors."""
        packs = node.target is PACK
        if not (is_summed(node) if packs else operands(node)[0].target is ACCUMULATE):
            return None
        values = operands(node) if packs else [value for value, _ in yields(node)]
        return sum(self._bytes(value) for value in values if (value in self._pieces) != packs)

    def _elements(self, value: fx.Node) -> int:
        return math.prod(self._operand(value).shape)

    def _bytes(self, value: fx.Node) -> int:
        """Of a value's distinct elements: one that is expanded is read from where it lies."""
        operand = self._operand(value)
        distinct = (n for n, stride in zip(operand.shape, operand.strides, strict=True) if stride)
        return math.prod(distinct) * operand.dtype.itemsize

    def _made(self, node: fx.Node) -> int:
        """Bytes of the results that have memory of their own."""
        storage_of = self.layouts.storages
        return sum(self._bytes(value) for value, _ in yields(node) if storage_of[value].value is value)

    def _read(self, node: fx.Node, name: str, packet: str, made: int) -> int:
        arguments = given(node)
        times = READS.get(packet, {})
        selected = SELECTED.get(packet)
        size = 0
        for key, argument in arguments.items():
            for value in dict.fromkeys(_values(argument)):
                read = self._bytes(value)
                if key == selected:
                    read = min(read, made)
                elif key in times:
                    row = self._operand(value).shape[-1:] or (1,)
                    read *= times[key] if packet not in ROW_HELD or row[0] > ROW_HELD[packet] else 1
                size += read
        return size

    # ------------------------------------------------------------------ products and attention
    def _product(self, node: fx.Node, name: str) -> CallCost:
        arguments = {key: self._shapes(value) for key, value in given(node).items()}
        total = node_flops(self.graph, node)
        batch, rows, columns, depth = PRODUCT_SHAPES[name](arguments, self._result_shape(node))
        whole = 2 * batch * rows * columns * depth
        dtypes = [type_of(value).dtype for value in operands(node)]
        dtype = next((d for d in dtypes if d.is_floating_point or d.is_complex), dtypes[0])
        if name in OF_EXPERTS and whole:  # of its tokens' rows, a rank has an even part
            if "wgrad" in name:
                depth = max(1, depth * total // whole)
            else:
                rows = max(1, rows * total // whole)
        launches = 1
        if name == "convolution_backward":
            launches = max(1, sum(arguments["output_mask"]))
        seconds = self.hardware.product_seconds(batch, rows, columns, depth, dtype)
        contended = self.hardware.product_seconds(batch, rows, columns, depth, dtype, contended=True)
        beside = contended / seconds if seconds else 1.0
        seconds *= launches
        for value in turned(node):  # a copy of its own
            seconds, launches = seconds + self._moving(2 * self._bytes(value)), launches + 1
        return CallCost("product", seconds, launches, beside=beside)

    def _attention(self, node: fx.Node, name: str) -> CallCost:
        backward = "bwd" in name
        dtype = type_of(given(node)["q"]).dtype
        total = node_flops(self.graph, node)
        keys, width = self._operand(given(node)["k"]).shape[-2], self._operand(given(node)["q"]).shape[-1]
        if not total:
            return CallCost("attention", 0.0, 0)
        tiles = attention_tiles(self.graph, node) if name in (*ROWS, *PARTS) else [(1.0, keys)]
        seconds = sum(
            self.hardware.attention_seconds(round(share * total), dtype, backward=backward, sequence=seen, width=width)
            for share, seen in tiles
        )
        launches = (3 if backward else 1) * len(tiles)
        if name in PUT_TOGETHER:  # tiles' results are read, with those of the steps before, and written
            known = [v for key in SO_FAR.get(node.target, ()) for v in _values(given(node).get(key))]
            seconds += self._moving(2 * self._made(node) + sum(map(self._bytes, known)))
            launches += 3 if backward else 1
        return CallCost("attention", seconds, launches)

    def _scan(self, node: fx.Node) -> CallCost:
        """Its elements are read and written once, and its statements computed one step after another."""
        size = self._made(node) + sum(self._bytes(value) for value in dict.fromkeys(operands(node)))
        computed = node_flops(self.graph, node) / self.hardware.fp32_flops_per_second
        return CallCost("scan", self.hardware.memory_seconds(size) + computed)

    def _shapes(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._shapes(v) for v in value]
        return self._operand(value).shape if isinstance(value, fx.Node) else value

    def _result_shape(self, node: fx.Node) -> tuple[int, ...]:
        return self._operand(node).shape if info(node).type is not None else ()

    def _host_copy(self, node: fx.Node) -> CallCost:
        stream = "to host" if node.target in OFFLOADS else "from host"
        if node.target in ENDS:
            return CallCost("host copy", 0.0, 0, stream)
        return CallCost("host copy", self._bytes(node) / self.hardware.host_bytes_per_second, 1, stream)

    # ------------------------------------------------------------------ collectives
    def _collective(self, node: fx.Node, moved: Collective) -> CallCost:
        axes = self.graph.mesh.resolve(given(node)["axes"])
        group, graph = self.hardware.group_of(self.mesh, axes), True
        seconds = self.hardware.collective_seconds(moved.kind, moved.payload_bytes, group, graph=graph)
        issuing = self.hardware.collective_seconds(moved.kind, 1, group)
        if issuing == self.hardware.collective_seconds(moved.kind, 1, group, graph=graph):
            issuing = 0.0  # no more is known than how long it takes
        before = after = 0
        if node.target in COLLECTIVES:
            before, after = copied_bytes(self.graph, node, self.layouts.operands)
        copies = (before > 0) + (after > 0)
        return CallCost(
            "collective",
            seconds,
            1 + copies,
            stream_of(self.graph.mesh.merged(axes), late=frozenset(axes) in self._twice and sums_gradients(node)),
            self.hardware.memory_seconds(2 * before) if before else 0.0,
            self.hardware.memory_seconds(2 * after) if after else 0.0,
            moved,
            max(issuing, self.hardware.kernel_launch_seconds),
        )


def held_views(graph: Graph) -> set[fx.Node]:
    """The calls that view parameters, state, and buffers that stay, which executors keep from step to step; and offsets
    of ranks, which they make once."""
    replaced = {port.name for port in graph.outputs if port.role == "buffer"}
    roles = zip(graph.inputs, graph.placeholders, strict=True)
    held = {n for p, n in roles if p.role in ("param", "state") or (p.role == "buffer" and p.name not in replaced)}
    calls = set(graph.calls_of(axis_offset))
    for node in graph.calls():
        read = operands(node)
        if read and views(node) and held.issuperset(read):
            calls.add(node)
            held |= {value for value, _ in yields(node)}
    return calls


def _variant(node: fx.Node, packet: str) -> str:
    """An op's name in the table of elements: approximated by tanh, gelu takes several times as long on CPUs."""
    return f"{packet}_tanh" if given(node).get("approximate") == "tanh" else packet


def stream_of(axes: Sequence[str], *, late: bool = False) -> str:
    """The stream of the process group of some axes, whatever their order; `late` of their second group."""
    return ".".join(sorted(axes)) + (", gradients" if late else "")


def _values(argument: Any) -> list[fx.Node]:
    if isinstance(argument, fx.Node):
        return [argument]
    return [v for item in argument for v in _values(item)] if isinstance(argument, (list, tuple)) else []


# Costed one by one: a collective's cost names its value, and its stream depends on who reads that.
# What flat tensors copy depends on who makes their members.
NOT_SHARED = frozenset((*COLLECTIVE_KINDS, *map(op_name, (*HOST_COPIES, PACK, UNPACK)), *RINGS, *ROWS, *PARTS))
PUT_TOGETHER = frozenset((*RINGS, *ROWS, *PARTS))  # attention that is computed in tiles (`ir.ops.attention_tiles`)
ATTENTION = frozenset(
    (
        *("shardc.sdpa", "shardc.sdpa_bwd", "shardc.sdpa_heads", "shardc.sdpa_heads_bwd", "shardc.sdpa_keys"),
        *("shardc.sdpa_keys_bwd", *PUT_TOGETHER),
    )
)
