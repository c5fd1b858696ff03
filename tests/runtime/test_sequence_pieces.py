"""Sequence parallelism copies nothing around its collectives: the sequences of a batch are sent one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import shardc
from benchmarks.gpt import GPT
from shardc.ir import in_flight
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, op_name
from shardc.ir.mesh import Mesh
from shardc.ir.ops import collectives
from shardc.ir.ops.collectives import Exchange, landing
from shardc.ir.schema import given
from shardc.passes.fusion.analysis.traffic import bytes_by_call, traffic
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context
from tests.handmade import Builder

SP = {
    "params": {"wte.weight": "tp, -", "**.qkv.weight": "3*tp, -", "**.up.weight": "tp, -"},
    "activations": {"blocks.0": "-, tp, -"},
}
PLANS: dict[str, dict[str, Any]] = {
    "sp": {},
    "accumulate": {"accumulate": 2},
    "bf16": {"precision": "bf16"},
    "recompute": {"recompute": {"mode": "full", "collectives": True}},
    "fuse": {"fuse": True},
}


class Landed:
    """A communicator of one rank, whose exchanges arrive where a process group's do."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def begin(self, exchange: Exchange) -> Any:
        x, arrived = exchange.x, landing(exchange, self.mesh.size(exchange.axes))
        if exchange.kind != "all_reduce":
            arrived.copy_(x[0] if exchange.kind == "reduce_scatter" else x)
        return lambda: arrived


@pytest.fixture
def any_piece(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pieces are sent on their own, however small they are."""
    monkeypatch.setattr(collectives, "LEAST_PIECE", 1)
    in_flight._buffers.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield monkeypatch
    in_flight._buffers.cache_clear()  # pyright: ignore[reportPrivateUsage]


def compiled(batch: int = 4, **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    model = GPT(vocab=64, width=32, heads=4, layers=2, seq=8)
    sample = {name: torch.randint(64, (batch, 8)) for name in ("input_ids", "labels")}
    return shardc.compile(model, sample, mesh="tp=2", plan={**SP, **plan})


def copies(body: Graph) -> dict[fx.Node, int]:
    """The bytes that moves of activations read and write to copy; sums of gradients are none of these."""
    return {
        call: size
        for call, size in bytes_by_call(body).items()
        if op_name(call.target) in KINDS and call.target is not collectives.all_reduce
    }


def moves(body: Graph) -> list[fx.Node]:
    """Those along another dim than the first."""
    found = [*body.calls_of(collectives.all_gather), *body.calls_of(collectives.reduce_scatter)]
    return [call for call in found if given(call)["pos"]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_copied(plan: str, any_piece: pytest.MonkeyPatch) -> None:
    program = compiled(**PLANS[plan])
    assert len(moves(program.body)) >= 12
    assert copies(program.body) == {}
    in_pieces = traffic(program.body).bytes
    any_piece.undo()
    in_flight._buffers.cache_clear()  # pyright: ignore[reportPrivateUsage]
    copied = copies(program.body)
    assert len(copied) == len(moves(program.body))
    assert traffic(program.body).bytes == in_pieces + sum(copied.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS)
def test_equals_eager(plan: str, any_piece: pytest.MonkeyPatch) -> None:
    report = compiled(**PLANS[plan]).verify()
    assert report, str(report)
    assert (report.eager_error or 0.0) < 1e-12


def test_one_sequence_is_one_piece() -> None:
    assert copies(compiled(batch=1).body) == {}


@pytest.mark.parametrize(("batch", "width", "copied"), [(4, 64, False), (4, 63, True), (32, 64, False), (33, 64, True)])
def test_small_pieces_and_many_are_copied(batch: int, width: int, copied: bool) -> None:
    """A sequence of 1,024 rows of 64 elements is just large enough."""
    b = Builder(Mesh(tp=2))
    x = b.input("x", f"f32[{batch}, 2048@tp, {width}]", "input")
    whole = b.call("whole", f"f32[{batch}, 2048, {width}]", collectives.all_gather, x, *gathered(batch, width))
    b.output("output", "y", whole)
    size = 4 * batch * 2048 * width
    assert list(copies(b.graph()).values()) == ([2 * size] if copied else [])


def gathered(batch: int, width: int) -> list[Any]:
    return [["tp"], [batch, 1024, width], 1, 2048, [batch, 2048, width]]


def test_a_rank_copies_nothing(any_piece: pytest.MonkeyPatch) -> None:
    """As it runs: neither on the way to a gather or scatter, nor behind it."""
    body = compiled().body
    copied: list[torch.Size] = []

    def copy(x: Tensor, into: Tensor) -> None:
        copied.append(x.shape)
        into.copy_(x)

    any_piece.setattr(collectives, "_copy", copy)
    state, fed = {}, {}
    for port, node in zip(body.inputs, body.placeholders, strict=True):
        type = node.meta["shardc"].type
        value = torch.zeros(type.local_shape(body.mesh), dtype=type.dtype)
        (fed if port.role in ("input", "seed", "share") else state)[port.name] = value
    rank = rank_context(body.mesh, 0, Landed(body.mesh))  # type: ignore[arg-type]
    BodyCode(body, rank, 0, torch.device("cpu")).run(state, [fed])
    assert copied == []
    any_piece.setattr(collectives, "LEAST_PIECE", 2**18)
    BodyCode(body, rank, 0, torch.device("cpu")).run(state, [fed])
    assert len(copied) == len(moves(body))
