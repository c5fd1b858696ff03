"""bucket: collectives that may wait for each other travel as one, in a flat tensor of up to so many bytes.

    %a.sum = all_reduce(%a, dp)            %flat = pack([%a, %b])
    ...                                    %sum = all_reduce(%flat, dp)
    %b.sum = all_reduce(%b, dp)      ->    ...
    ...                                    %a.sum, %b.sum = unpack(%sum)
    %w.new = sub(%w, %a.sum)               %w.new = sub(%w, %a.sum)

Needs a localized body, or a part of one. Ensures the same values under the same names, and the same bytes sent but for
what aligns each member. Members are of one kind, over the same axes, of one dtype and reduction and phase, and run as
often. What is gathered or scattered block by block goes alone. There are two sorts:

    late    what nothing reads before the optimizer, or is only returned: gradients, new parameters. A bucket takes them
            in order, is sent when its last member is there, and before anything reads one of them.
    early   parameters that are gathered for use: those of one layer (`h.3`), where the first was.

The activations' collectives stay as they are: the next op, another stage or the caller waits for them. Views and casts
of what comes back late are made when it is there. At the peak a body may hold a bucket more than before; if it holds
more, buckets are made smaller. That is counted in the order of the program, as all passes count: what is in flight
beside it on a rank depends on sizes alone, at most `IN_FLIGHT` collectives (`ir.overlap_schedule`), and
`program.memory()` counts it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from kernels_triton.base.buckets import starts, unit_of
from shardc.cost.memory import memory
from shardc.ir.collectives import KINDS, CollectiveKind
from shardc.ir.graph import Graph, Phase, info, op_name, set_info, type_of
from shardc.ir.hardware import DEFAULT
from shardc.ir.layers import layer_or_module
from shardc.ir.microbatch import sections
from shardc.ir.ops.attention_keys import MERGE_LSE, MERGE_PARTS
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed
from shardc.ir.ops.collectives import gather_blocks
from shardc.ir.ops.decomposed import DECOMPOSED
from shardc.ir.provenance import Cause, Derivation
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, Partial, TensorType
from shardc.ir.units import UnequalError
from shardc.passes.base import Pass
from shardc.passes.communication.prefetch import weights_of
from shardc.passes.fusion.analysis.view_analysis import VIEWS

TRIES = 6
LATER = {*VIEWS, torch.ops.aten._to_copy.default}  # of a result, made when its bucket is back


class Key(NamedTuple):
    """What the members of a bucket have in common."""

    kind: CollectiveKind
    axes: Axes
    op: str
    dtype: torch.dtype
    pending: Partial
    phase: Phase
    inside: bool  # does it run once a microbatch?
    layer: str = ""  # that gathers it for use, or the module outside of layers; "." is the model itself

    @property
    def when(self) -> tuple[Phase, bool]:
        return self.phase, self.inside


@dataclass(frozen=True)
class Bucket(Pass):
    """Make buckets of at most `size` bytes; of 0, none."""

    size: int = 0

    def run(self, graph: Graph) -> Graph:
        return bucket(graph, self.size) if self.size else graph


def bucket(graph: Graph, size: int = DEFAULT.bucket_bytes) -> Graph:
    """Returns a copy of the body with buckets; the given graph is not modified."""
    allowed: int | None = None
    for attempt in range(TRIES):
        bucketed = graph.copy()
        _Buckets(bucketed, size >> attempt).run()
        if not bucketed.calls_of(PACK):  # nothing travels together, so nothing is held longer
            return bucketed
        if allowed is None:
            allowed = memory(graph, listed=False).peak + size
        peak = memory(bucketed, listed=False).peak + _padding_of_more_layers(bucketed)
        if peak <= allowed:
            return bucketed
        if graph.units:
            raise UnequalError("buckets are too large for few layers")
    return graph


def _padding_of_more_layers(graph: Graph) -> int:
    """The bytes by which the flat tensors of layers that the graph is without are larger than their members."""
    padding = 0
    for units in graph.units:
        for pack in graph.calls_of(PACK):
            if units.within(info(pack).fqn)[0] == units.first:
                members = sum(type_of(value).local_bytes(graph.mesh) for value in pack.all_input_nodes)
                padding += len(units.removed) * (type_of(pack).local_bytes(graph.mesh) - members)
    return padding


@dataclass(frozen=True)
class _Member:
    """A collective, by the dim that it gathers or scatters: an operand of `lead x mid x tail`, `size` there after."""

    node: fx.Node
    x: fx.Node
    lead: int
    mid: int
    size: int
    bytes: int  # before or after, whichever is more


@dataclass
class _Open:
    """A bucket that may take more members; `due` is the first call that reads one of them."""

    members: list[_Member] = field(default_factory=list[_Member])
    bytes: int = 0
    due: float = math.inf

    def add(self, member: _Member, due: float) -> None:
        self.members.append(member)
        self.bytes += member.bytes
        self.due = min(self.due, due)


class _Buckets:
    def __init__(self, graph: Graph, size: int) -> None:
        self.graph, self.size = graph, size
        run = sections(graph)
        self.inside = run.microbatch
        after = {n for n in graph.fx.nodes if n.op == "call_function"} - self.inside - run.before
        for node in [n for n in graph.fx.nodes if n in after]:
            graph.output_node.prepend(node)  # in the order that they run in
        self.calls = list(graph.calls())
        self.position = {node: i for i, node in enumerate(self.calls)}
        self.weights = weights_of(graph)
        ports = zip(graph.outputs, graph.output_values, strict=True)
        self.activations = {v for p, v in ports if p.role == "value" or (p.role == "output" and info(v).phase == "fwd")}
        self.open: dict[Key, _Open] = {}
        self.returned: dict[Key, tuple[list[_Member], fx.Node]] = {}  # what is only returned, and not yet unpacked

    def run(self) -> None:
        for i, node in enumerate(self.calls):
            for key in [key for key, candidate in self.open.items() if candidate.due <= i]:
                self.close(key)
            member = self.member(node)
            if member is None:
                continue
            due, early = self.due(node), member.x in self.weights and op_name(node.target) == "shardc.all_gather"
            early = early and due < math.inf
            if not early and (member.bytes > self.size or not self.late(member, due)):
                continue
            key = self.key(node, due if early else math.inf)
            if early:
                for other in [k for k in self.open if k.layer not in ("", key.layer) and k.when == key.when]:
                    self.close(other)
                if member.bytes > self.size:
                    continue
            open_bucket = self.open.get(key)
            if open_bucket is not None and open_bucket.bytes + member.bytes > self.size:
                self.close(key)
            # What is gathered early is read after its bucket was sent, however soon.
            self.open.setdefault(key, _Open()).add(member, math.inf if early else due)
        for key in list(self.open):
            self.close(key)
        for members, moved in self.returned.values():
            self._back(members, moved, self.graph.output_node)

    # ------------------------------------------------------------------ what may go
    def member(self, node: fx.Node) -> _Member | None:
        kind = KINDS.get(op_name(node.target))
        if kind not in ("all_reduce", "all_gather", "reduce_scatter") or node.target in (gather_blocks, *DECOMPOSED):
            return None  # what is gathered block by block is no dim side by side; a product's is sent by the product
        args, mesh = given(node), self.graph.mesh
        if args.get("counts") or node.target in (MERGE_LSE, MERGE_PARTS):  # which merge what they gather
            return None
        x: fx.Node = args["x"]
        count = math.prod(type_of(x).local_shape(mesh))
        if not count or x.target is PACK:
            return None
        most = max(type_of(x).local_bytes(mesh), type_of(node).local_bytes(mesh))
        if kind == "all_reduce":
            return _Member(node, x, 1, count, count, most)
        lead, mid = math.prod(args["atoms"][: args["pos"]]), int(args["atoms"][args["pos"]])
        size = int(args["size"]) if kind == "all_gather" else -(-mid // mesh.size(args["axes"]))
        return _Member(node, x, lead, mid, size, most)

    def key(self, node: fx.Node, due: float) -> Key:
        args = given(node)
        layer = (layer_or_module(info(self.calls[int(due)]).fqn) or ".") if due < math.inf else ""
        kind, about = KINDS[op_name(node.target)], info(node)
        axes, pending = tuple(args["axes"]), type_of(args["x"]).partial
        dtype, inside = type_of(node).dtype, node in self.inside
        return Key(kind, axes, args.get("op", ""), dtype, pending, about.phase, inside, layer)

    def late(self, member: _Member, due: float) -> bool:
        """Is the first reader in the optimizer, or is the result only returned, and no activation?"""
        node = member.node
        if member.x not in self.weights and not self.activations.isdisjoint((node, *self._views(node))):
            return False
        return due == math.inf or info(node).phase == "opt" or info(self.calls[int(due)]).phase == "opt"

    def due(self, node: fx.Node) -> float:
        """The first call that reads a result, be it through views."""
        earliest = math.inf
        for user in node.users:
            if user.target is operator.getitem or user.target in LATER:
                earliest = min(earliest, self.due(user))
            elif user.op != "output":
                earliest = min(earliest, self.position[user])
        return earliest

    # ------------------------------------------------------------------ making one
    def close(self, key: Key) -> None:
        open_bucket = self.open.pop(key)
        early = bool(key.layer)
        if len(open_bucket.members) == 1:
            return
        self._early(key, open_bucket) if early else self._late(key, open_bucket)

    def _late(self, key: Key, open_bucket: _Open) -> None:
        sender = open_bucket.members[-1].node
        moved = self._sent(key, open_bucket.members, sender)
        if open_bucket.due < math.inf:
            self._back(open_bucket.members, moved, self.calls[int(open_bucket.due)])
            return
        if key in self.returned:  # unpacked while the next is under way, so that its memory goes
            self._back(*self.returned[key], moved.next)
        self.returned[key] = open_bucket.members, moved

    def _early(self, key: Key, open_bucket: _Open) -> None:
        sender = open_bucket.members[0].node
        for member in open_bucket.members:
            _hoist(member.x, sender)
        moved = self._sent(key, open_bucket.members, sender)
        due = min(self.due(member.node) for member in open_bucket.members)
        self._back(open_bucket.members, moved, self.calls[int(due)])

    def _sent(self, key: Key, members: list[_Member], sender: fx.Node) -> fx.Node:
        """Pack, and the collective, before `sender`."""
        graph, kind, axes = self.graph, key.kind, key.axes
        mesh, unit, group = graph.mesh, unit_of(key.dtype), graph.mesh.size(key.axes)
        rows = group if kind == "reduce_scatter" else 1
        leads, mids = [m.lead for m in members], [m.mid for m in members]
        numels = [math.prod(type_of(m.x).local_shape(mesh)) for m in members]
        width = starts(columns_packed(numels, mids, rows), unit)[-1]
        name, origin = f"{info(sender).name}.bucket", Derivation("bucket", info(sender).name)
        about: dict[str, Any] = {"cause": Cause.of_bucket(info(m.node).cause for m in members), "origin": origin}
        pending = type_of(members[0].x).partial
        along = dict.fromkeys(a for m in members for v in (m.x, m.node) for a in mesh.resolve(sorted(type_of(v).axes)))
        along = [a for a in along if a not in mesh.resolve(axes)]
        xs = [m.x for m in members]

        def typed(shared: bool, unsharded_size: int, partial: Iterable[tuple[str, str]] = ()) -> TensorType:
            """Ranks along the members' own axes have a flat tensor each; along `axes`, if so, a part of one."""
            atoms = [Atom(mesh.size(a), (a,)) for a in along]
            atoms += [Atom(group, axes) if shared else Atom(unsharded_size), Atom(width)]
            return TensorType(key.dtype, (tuple(a for a in atoms if a.size > 1),), tuple(partial))

        with graph.fx.inserting_before(sender):
            type = typed(kind == "all_gather", rows, pending)
            args: tuple[Any, ...] = (xs, leads, mids, rows, unit)
            flat = graph.call(PACK, args, like=sender, type=type, name=f"{name}.pack", **about)
        match kind:
            case "all_reduce":
                args = (flat, key.op, list(axes))
                type = typed(False, 1)
            case "reduce_scatter":
                args = (flat, key.op, list(axes), [rows * width], 0, [width])
                type = typed(True, 1)
            case _:
                args = (flat, list(axes), [width], 0, group * width, [group * width])
                type = typed(False, group)
        remaining = {p for p in pending if p[0] not in axes}
        type = type.place(type.placement, remaining)
        with graph.fx.inserting_before(sender):
            return graph.call(sender.target, args, like=sender, type=type, name=name, **about)

    def _back(self, members: list[_Member], moved: fx.Node, place: fx.Node) -> None:
        """Unpack before `place`; the members' own nodes become its results, and their views follow them."""
        graph, mesh, kind = self.graph, self.graph.mesh, KINDS[op_name(moved.target)]
        shapes = [type_of(m.node).local_shape(mesh) for m in members]
        rows = mesh.size(given(moved)["axes"]) if kind == "all_gather" else 1
        layout = (
            [m.lead for m in members],
            [m.size if kind == "reduce_scatter" else m.mid for m in members],
            rows,
            unit_of(type_of(moved).dtype),
            [m.size for m in members],
            [n for shape in shapes for n in shape],
            [len(shape) for shape in shapes],
        )
        types = tuple(type_of(m.node).replicated() for m in members)
        with graph.fx.inserting_before(place):
            name = f"{info(moved).name}.unpack"
            unpacked = graph.call(UNPACK, (moved, *layout), like=moved, type=None, name=name, results=types)
        followers: list[fx.Node] = []
        for i, member in enumerate(members):
            node = member.node
            about = info(node)
            followers += [node, *self._views(node)]
            node.target, node.args, node.kwargs = operator.getitem, (unpacked, i), {}
            set_info(node, about)
        for node in followers:
            place.prepend(node)

    def _views(self, node: fx.Node) -> list[fx.Node]:
        """The views of a result, and theirs."""
        views: list[fx.Node] = []
        for user in node.users:
            if user.target is operator.getitem or user.target in LATER:
                views += [user, *self._views(user)]
        return views


def _hoist(node: fx.Node, place: fx.Node) -> None:
    """What a value is made by runs before `place`."""
    if node.op == "placeholder" or node < place:
        return
    for source in node.all_input_nodes:
        _hoist(source, place)
    place.prepend(node)
