"""Floating-point operations of one rank's body, counted from the local shapes of each product's operands.

A product of m x k by k x n is 2 m k n. Convolutions and attention are products too; everything else is a few operations
an element, bound by memory, and not counted. What counts is what a rank computes: padding and replicated work included.

    sdpa        2 products:  q k^T, p v
    sdpa_bwd    5 products:  q k^T again, as scores are not kept; those of dv, dp, dq and dk
    causal      half of either: what lies above the diagonal is not computed; of a window, the keys that rows see
    sdpa_rows   the same of the tiles that a rank computes: of the rank that has most, or of the one at a coordinate
    sdpa_part   the same of tiles between a rank's rows and its keys
    sdpa_ring   a part of the rows, and all keys, as if no rank had more to do than others
    scan        every statement of its body, for each step: elements once, `dot` twice; a third of scan_backward, which
                runs forward again
    scan_turn   a rank has one turn at most, the first in the list counts for it: what the states need, and no results
    scan_summary  the same, and as much for factors
    expert_mm   routing is taken to be balanced: of its tokens' rows, a rank's experts have an even part

A transformer of N weights in its products spends 6 N a token, a third of it in forward, and its attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.ir.graph import Graph, Phase, info, op_name, operands, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops.attention_keys import part_tiles
from shardc.ir.ops.attention_rows import tiles_at, tiles_of_ranks
from shardc.ir.ops.attention_tiles import Tile, square
from shardc.ir.ops.attention_tiles import pairs as pairs_of
from shardc.ir.ops.attention_window import window_of
from shardc.ir.ops.scan import sizes_of
from shardc.ir.ops.scan_body import TIME, parse_body
from shardc.ir.schema import given
from shardc.ir.types import Axes

Shape = tuple[int, ...]
Arguments = Mapping[str, Any]  # by schema name; tensors are their local shapes


def _attention(a: Arguments, of_keys: int, of_values: int) -> int:
    """So many products over the dim of q and k, and so many over that of v."""
    q, k, v = a["q"], a["k"], a["v"]
    width = of_keys * q[-1] + of_values * v[-1]
    if window := window_of(a.get("window", ())):
        keys = k[-2]
        return 2 * math.prod(q[:-2]) * (window.pairs(keys, keys, 0) * q[-2] // keys) * width
    full = 2 * math.prod(q[:-1]) * k[-2] * width
    return full // 2 if a["causal"] else full


def _ring(a: Arguments, of_keys: int, of_values: int, mesh: Mesh, axes: Axes) -> int:
    """Before it is localized: a rank's rows with the keys of all."""
    keys = (*a["k"][:-2], a["k"][-2] * mesh.size(axes), a["k"][-1])
    return _attention({**a, "k": keys}, of_keys, of_values)


def _rows(a: Arguments, of_keys: int, of_values: int, mesh: Mesh, coordinate: Mapping[str, int] | None) -> int:
    """Of the tiles of a call, where one on the diagonal is what lies below it. Without a coordinate, of the rank that
    has most."""
    pairs = _pairs(_tiles_of_rows(a, mesh, coordinate), a.get("window", ()))
    return math.prod(a["q"][:-2]) * pairs * (of_keys * a["q"][-1] + of_values * a["v"][-1])


def _part(a: Arguments, of_keys: int, of_values: int, mesh: Mesh, coordinate: Mapping[str, int] | None) -> int:
    """The same of the tiles between a rank's rows and its keys."""
    pairs = _pairs(_tiles_of_part(a, mesh, coordinate), a.get("window", ()))
    return math.prod(a["q"][:-2]) * pairs * (of_keys * a["q"][-1] + of_values * a["v"][-1])


def _tiles_of_rows(a: Arguments, mesh: Mesh, coordinate: Mapping[str, int] | None) -> Sequence[Tile]:
    axes, window, keys = tuple(mesh.resolve(a["axes"])), tuple(a.get("window", ())), a.get("keys", "")
    told = (a["rows"], axes, a["step"], a["causal"], mesh)
    if coordinate is not None:
        return tiles_at(*told, coordinate, window, keys)[0]
    return max(tiles_of_ranks(*told, window, keys), key=lambda tiles: _pairs(tiles, window))


def _tiles_of_part(a: Arguments, mesh: Mesh, coordinate: Mapping[str, int] | None) -> Sequence[Tile]:
    lies, window = (a["rows"], mesh.resolve(a["row_axes"]), a["keys"], mesh.resolve(a["axes"])), a.get("window", ())
    if coordinate is not None:
        return part_tiles(*lies, a["causal"], mesh, coordinate, window)
    places = [mesh.coordinate(rank) for rank in mesh.group_of(0, (*lies[1], *lies[3]))]
    met = [part_tiles(*lies, a["causal"], mesh, place, window) for place in places]
    return max(met, key=lambda tiles: _pairs(tiles, window))


def attention_tiles(body: Graph, node: fx.Node) -> list[tuple[float, int]]:
    """The kernels of a call of attention over divided rows or keys, a tile each, on the rank that has most: each one's
    share of the call's operations, and its keys."""
    args = given(node)
    find = _tiles_of_rows if op_name(node.target) in ROWS else _tiles_of_part
    tiles = square(find(args, body.mesh, None))
    met = [pairs_of(tile, bool(args.get("window", ()))) for tile in tiles]
    return [(pairs / sum(met), tile.keys) for tile, pairs in zip(tiles, met, strict=True) if pairs]


def _pairs(tiles: Sequence[Tile], window: Sequence[int]) -> int:
    """Twice the rows and keys that meet."""
    return round(sum(2 * pairs_of(tile, bool(window)) for tile in tiles))


# op -> products over the dim of q and k, and over that of v
RINGS: dict[str, tuple[int, int]] = {"shardc.sdpa_ring": (1, 1), "shardc.sdpa_ring_bwd": (3, 2)}
ROWS: dict[str, tuple[int, int]] = {"shardc.sdpa_rows": (1, 1), "shardc.sdpa_rows_bwd": (3, 2)}
PARTS: dict[str, tuple[int, int]] = {"shardc.sdpa_part": (1, 1), "shardc.sdpa_part_bwd": (3, 2)}


def _convolution(a: Arguments, small: Shape) -> int:
    """A filter is applied once for each element of the small side: the output, or the input of a transposed one."""
    return 2 * math.prod(small) * math.prod(a["weight"][1:])


def _convolution_backward(a: Arguments) -> int:
    once = _convolution(a, a["input"] if a["transposed"] else a["grad_output"])
    return once * sum(map(bool, a["output_mask"][:2]))


def _scan(text: str, states: Sequence[Shape], inputs: Sequence[Shape], results: bool = True) -> int:
    body = parse_body(text)
    sizes = sizes_of(body, states, inputs)
    total = 0
    for st in body.statements if results else (*body.before, *body.inside):
        dims = {TIME} if st.name in body.timed else set[str]()
        for operand in st.operands:
            dims.update(body.letters[operand])
        total += math.prod(sizes[x] for x in dims) * (2 if st.op == "dot" else st.op != "rename")
    return total


# op -> operations of a call, given its arguments and the shape of its first result
COUNTS: dict[str, Callable[[Arguments, Shape], int]] = {
    "mm": lambda a, y: 2 * math.prod(y) * a["self"][-1],
    "bmm": lambda a, y: 2 * math.prod(y) * a["self"][-1],
    "addmm": lambda a, y: 2 * math.prod(y) * a["mat1"][-1],
    "baddbmm": lambda a, y: 2 * math.prod(y) * a["batch1"][-1],
    "mv": lambda a, y: 2 * math.prod(a["self"]),
    "dot": lambda a, y: 2 * math.prod(a["self"]),
    "vdot": lambda a, y: 2 * math.prod(a["self"]),
    "shardc.linear": lambda a, y: 2 * math.prod(y) * a["x"][-1],
    "shardc.linear_bias": lambda a, y: 2 * math.prod(y) * a["x"][-1],
    "shardc.linear_dgrad": lambda a, y: 2 * math.prod(y) * a["g"][-1],
    "shardc.gather_linear": lambda a, y: sum(2 * math.prod(a["shape"][:-1]) * math.prod(w) for w in a["ws"]),
    "shardc.linear_scatter": lambda a, y: 2 * math.prod(a["x"][:-1]) * math.prod(a["w"]),
    "shardc.linear_wgrad": lambda a, y: 2 * math.prod(a["x"]) * a["g"][-1],
    "shardc.scaled_linear": lambda a, y: 2 * math.prod(y) * a["x"][-1],
    "shardc.scaled_linear_dgrad": lambda a, y: 2 * math.prod(y) * a["g"][-1],
    "shardc.scaled_linear_wgrad": lambda a, y: 2 * math.prod(a["x"]) * a["g"][-1],
    "shardc.scaled_mm": lambda a, y: 2 * math.prod(y) * a["a"][-1],
    "shardc.accumulate_wgrad": lambda a, y: 2 * math.prod(a["x"]) * a["g"][-1],
    "shardc.grouped_mm": lambda a, y: 2 * math.prod(y) * a["a"][-1],
    "shardc.grouped_mm_wgrad": lambda a, y: 2 * math.prod(a["a"]) * a["g"][-1],
    "shardc.expert_mm": lambda a, y: 2 * math.prod(y) * a["a"][-1],
    "shardc.expert_wgrad": lambda a, y: 2 * math.prod(a["a"]) * a["g"][-1],
    "shardc.sdpa": lambda a, y: _attention(a, 1, 1),
    "shardc.sdpa_bwd": lambda a, y: _attention(a, 3, 2),
    "shardc.sdpa_heads": lambda a, y: _attention(a, 1, 1),
    "shardc.sdpa_heads_bwd": lambda a, y: _attention(a, 3, 2),
    "shardc.sdpa_keys": lambda a, y: _attention(a, 1, 1),
    "shardc.sdpa_keys_bwd": lambda a, y: _attention(a, 3, 2),
    "shardc.scan": lambda a, y: _scan(a["body"], a["carried"], a["inputs"]),
    "shardc.scan_part": lambda a, y: _scan(a["body"], a["carried"], a["inputs"]),
    "shardc.scan_turn": lambda a, y: 0 if a["turn"] else _scan(a["body"], a["carried"], a["inputs"], False),
    "shardc.scan_summary": lambda a, y: 2 * _scan(a["body"], a["carried"], a["inputs"], False),
    "shardc.scan_part_backward": lambda a, y: 3 * _scan(a["body"], [x[1:] for x in a["starts"]], a["inputs"]),
    "shardc.scan_turn_backward": lambda a, y: (
        0 if a["before"] else 3 * _scan(a["body"], [x[1:] for x in a["starts"]], a["inputs"])
    ),
    "shardc.scan_summary_backward": lambda a, y: 4 * _scan(a["body"], [x[1:] for x in a["starts"]], a["inputs"]),
    "shardc.scan_backward": lambda a, y: 3 * _scan(a["body"], [state[1:] for state in a["starts"]], a["inputs"]),
    "convolution": lambda a, y: _convolution(a, a["input"] if a["transposed"] else y),
    "convolution_backward": lambda a, y: _convolution_backward(a),
}

PRODUCTS = frozenset((*COUNTS, *RINGS, *ROWS, *PARTS))  # the ops that are counted
OF_EXPERTS = ("shardc.expert_mm", "shardc.expert_wgrad")  # whose first operand is rows, of tokens and of experts


@dataclass(frozen=True)
class Flops:
    """What one rank computes in a step: operations by phase and op, in program order."""

    counts: tuple[tuple[Phase, str, int], ...]

    @property
    def total(self) -> int:
        return sum(count for _, _, count in self.counts)

    def of_phase(self, phase: Phase) -> int:
        return sum(count for counted_phase, _, count in self.counts if counted_phase == phase)

    def of_op(self, op: str) -> int:
        return sum(count for _, name, count in self.counts if name == op)


def flops(body: Graph, coordinate: Mapping[str, int] | None = None) -> Flops:
    """Count a localized body: what the rank at a coordinate computes; without, of each call the most that one does."""
    counts: dict[tuple[Phase, str], int] = {}
    microbatch_nodes = in_microbatch(body)
    for node in body.calls():
        count = node_flops(body, node, coordinate) * (body.microbatches if node in microbatch_nodes else 1)
        if count:
            key = (info(node).phase, op_name(node.target))
            counts[key] = counts.get(key, 0) + count
    return Flops(tuple((phase, op, count) for (phase, op), count in counts.items()))


def node_flops(body: Graph, node: fx.Node, coordinate: Mapping[str, int] | None = None) -> int:
    """Operations of one call on one rank; 0 for what is no product."""
    op = op_name(node.target)
    if op not in PRODUCTS:
        return 0

    def shape(value: fx.Node) -> Shape:
        return type_of(value).local_shape(body.mesh)

    def argument(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [argument(v) for v in value]
        return shape(value) if isinstance(value, fx.Node) else value

    arguments = {name: argument(value) for name, value in given(node).items()}
    if op in ROWS:
        return _rows(arguments, *ROWS[op], body.mesh, coordinate)
    if op in PARTS:
        return _part(arguments, *PARTS[op], body.mesh, coordinate)
    if op in RINGS:
        axes = tuple(axis for atom in type_of(given(node)["k"]).dims[-2] for axis in atom.axes)
        return _ring(arguments, *RINGS[op], body.mesh, axes)
    return COUNTS[op](arguments, shape(node) if info(node).type is not None else ()) // _divided(body, node)


def _divided(body: Graph, node: fx.Node) -> int:
    """Among how many ranks rows of the same tokens are divided by their experts: each has its part, if it is even."""
    rows = [type_of(value) for value in operands(node) if op_name(node.target) in OF_EXPERTS]
    return body.mesh.size([axis for dim in rows[0].dims[rows[0].ndim :] for a in dim for axis in a.axes]) if rows else 1


def human_flops(count: int) -> str:
    """`1.5 GFLOP`, `12 FLOP`."""
    size, unit = float(count), ""
    for unit in ("", "K", "M", "G", "T", "P"):
        if size < 1000 or unit == "P":
            break
        size /= 1000
    return f"{size:.3g} {unit}FLOP"
