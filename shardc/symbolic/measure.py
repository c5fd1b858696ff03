"""The numbers of a compiled body that formulas are for, apart from what they are numbers of.

    collectives    payloads; what a rank sends follows from them (`ir.collectives.sent`)
    products       FLOPs of each call
    storages       bytes, with the actions between which each is there: what the memory report walks over
    shards         the sizes of atoms, with the axes that divide them

Two compiles that differ in numbers alone have one `Frame`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardc.cost.flops import node_flops
from shardc.cost.memory import STORED
from shardc.ir.account import account_of
from shardc.ir.arena import planned
from shardc.ir.blocks import Blocks
from shardc.ir.collectives import CollectiveKind, collectives
from shardc.ir.graph import Graph, Phase, info, op_name
from shardc.ir.layers import layer_of
from shardc.ir.microbatch import in_microbatch
from shardc.ir.types import Axes


class Sender(NamedTuple):
    """What is said of a collective beside its payload."""

    phase: Phase
    axes: Axes
    kind: CollectiveKind
    op: str
    times: int
    layer: str
    value: str
    source: str


class Product(NamedTuple):
    phase: Phase
    op: str
    times: int
    layer: str
    value: str
    source: str


class Held(NamedTuple):
    """A storage; `born` and `dies` are actions, -1 of what is stored all step long."""

    what: str  # the category of what is stored
    born: int
    dies: int
    counted: bool  # not in the arena, which counts as a whole
    layer: str
    value: str
    source: str


class Shard(NamedTuple):
    axes: Axes
    in_blocks: str  # an atom of blocks, as text
    value: str
    source: str


@dataclass(frozen=True)
class Frame:
    senders: tuple[Sender, ...]
    products: tuple[Product, ...]
    held: tuple[Held, ...]
    shards: tuple[Shard, ...]
    moments: tuple[str, ...]  # the layer of the call that runs at each action; "" of none


@dataclass(frozen=True)
class Numbers:
    """In the order of a frame."""

    payloads: tuple[int, ...]
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    atoms: tuple[int, ...]
    arena: int


def measured(body: Graph) -> tuple[Frame, Numbers]:
    senders, payloads = _collectives(body)
    products, flops = _products(body)
    shards, atoms = shards_of(body)
    account, arena = account_of(body, overlap=True), planned(body)
    held: list[Held] = []
    sizes: list[int] = []
    for port, storage in account.inputs:
        about = info(storage.value)
        layer = layer_of(port.parameter or port.name)
        held.append(Held(STORED.get(port.role, "inputs"), -1, -1, True, layer, port.name, about.source))
        sizes.append(storage.bytes)
    for life in account.lives:
        about = info(life.storage.value)
        counted = life.storage.value not in arena.values
        held.append(Held("", life.born, life.dies, counted, about.layer, about.name, about.source))
        sizes.append(life.storage.bytes)
    runs = (info(account.calls[a.at]).layer if a.kind == "run" else "" for a in account.times.actions)
    moments = tuple(runs)
    frame = Frame(senders, products, tuple(held), shards, moments)
    return frame, Numbers(payloads, flops, tuple(sizes), atoms, arena.bytes)


def _collectives(body: Graph) -> tuple[tuple[Sender, ...], tuple[int, ...]]:
    every = collectives(body)
    layers = {about.name: about.layer for about in map(info, body.calls())}
    senders = tuple(
        Sender(c.phase, c.axes, c.kind, c.op, c.times, layers.get(c.value, ""), c.value, c.source) for c in every
    )
    return senders, tuple(c.payload_bytes for c in every)


def _products(body: Graph) -> tuple[tuple[Product, ...], tuple[int, ...]]:
    microbatch = in_microbatch(body)
    products: list[Product] = []
    counts: list[int] = []
    for node in body.calls():
        if count := node_flops(body, node):
            about, times = info(node), body.microbatches if node in microbatch else 1
            products.append(Product(about.phase, op_name(node.target), times, about.layer, about.name, about.source))
            counts.append(count)
    return tuple(products), tuple(counts)


def shards_of(body: Graph) -> tuple[tuple[Shard, ...], tuple[int, ...]]:
    """Every atom that axes divide, in program order."""
    shards: list[Shard] = []
    atoms: list[int] = []
    for value in body.values():
        about = info(value)
        assert about.type is not None
        for atom in about.type.atoms:
            if atom.axes:
                blocks = str(atom.size) if isinstance(atom.size, Blocks) else ""
                shards.append(Shard(atom.axes, blocks, about.name, about.source))
                atoms.append(int(atom.size))
    return tuple(shards), tuple(atoms)
