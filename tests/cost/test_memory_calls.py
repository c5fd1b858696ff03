"""The memory report against what a rank's own code holds at every call: buckets, ZeRO-2, fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.memory import memory
from shardc.ir.arena import planned
from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.buckets import PACK
from shardc.runtime.execute import prepared_code
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import CallInstruction, rank_context
from shardc.runtime.execute.overlap import Action, _overlaps
from tests.runtime.poison import Late

ZERO_2 = {"storage": {"zero": 2, "axes": ["dp"]}}
CASES: dict[str, dict[str, Any]] = {
    "zero-2": {**ZERO_2, "bucket": True},
    "zero-2 fuse": {**ZERO_2, "bucket": True, "fuse": True},
    "accumulate fuse": {"bucket": True, "fuse": True, "accumulate": 2},
}


def at_once(instructions: Sequence[CallInstruction], first: int, last: int) -> list[Action]:
    """The order of the program: each collective is waited for where it begins."""
    actions: list[Action] = []
    for at in range(first, last):
        one = instructions[at]
        if _overlaps(one):
            actions += [Action("begin", at), Action("wait", at, one.free)]
        else:
            actions.append(Action("run", at, one.free))
    return actions


def held_by_a_rank(body: Graph, monkeypatch: pytest.MonkeyPatch, *, placed: bool) -> list[int]:
    """Bytes of the distinct storages that a rank's code holds beside its inputs, while each call runs.

    Of several microbatches, in the last. With results `placed` in an arena, that is there all along. -1 where a call
    is no code of its own: a pack whose members are made in it, a view that is there before.
    """
    monkeypatch.setattr(prepared_code, "schedule_overlap", at_once)
    device = torch.device("cpu")
    arena = Arena({body: planned(body)}, device) if placed else None
    executor = BodyCode(body, rank_context(body.mesh, 0, Late(body.mesh)), 0, device, arena)  # type: ignore[arg-type]
    routine = executor.routine
    inputs = {
        port.name: torch.ones(type_of(n).local_shape(body.mesh), dtype=type_of(n).dtype)
        for port, n in zip(body.inputs, body.placeholders, strict=True)
    }
    feeds = [{n: x.clone() for n, x in inputs.items()} for _ in range(body.microbatches)]
    stored = {x.untyped_storage().data_ptr() for x in (*inputs.values(), *(x for f in feeds for x in f.values()))}
    peaks: dict[int, int] = {}

    def run(lines: Sequence[prepared_code.Code], env: list[Any], *_: Any) -> None:
        for at, call, arguments, into, free in lines:
            args, kwargs = arguments(env)
            result = call(*args, **kwargs)
            del args, kwargs
            if type(into) is int:
                env[into] = result
            else:
                for position, slot in into:  # type: ignore[union-attr]
                    env[slot] = result[position]
            tensors = [*env, *([] if arena is None else [arena.buffer])]
            homes = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
            size = sum({h.data_ptr(): h.nbytes() for h in homes if h.data_ptr() not in stored}.values())
            if not callable(result) or isinstance(result, Tensor):
                peaks[at] = max(size, peaks.get(at, 0)) if lines is not executor._later_microbatches else size
            del result, homes, tensors
            for slot in free:
                env[slot] = None

    monkeypatch.setattr(routine, "run", run)
    executor.run(inputs, feeds)
    return [peaks.get(at, -1) for at in range(len(routine.listing.instructions))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))).square().mean()


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_at_every_call_what_the_report_says(
    case: str, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Model()
    plan = {"mesh": "dp=2", "inputs": {"x": "dp, -"}, **CASES[case]}
    mine = torch.optim.AdamW(model.parameters())
    body = shardc.compile(model, {"x": torch.randn(8, 8)}, plan=plan, optimizer=mine).body
    assert any(call.target is PACK for call in body.calls())
    real = held_by_a_rank(body, monkeypatch, placed=placed)
    said = memory(body, arena=placed).timeline
    differ = [(at, said[at] - size) for at, size in enumerate(real) if size not in (-1, said[at])]
    assert not differ, f"{len(differ)} of {len(real)}: {differ}"
