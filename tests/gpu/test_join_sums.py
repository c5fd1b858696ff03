"""Small sums that are joined, or added by one call, on a GPU: the bits of sums that have calls of their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import shardc
from shardc.partition.cut import cut
from shardc.partition.staged_program import StagedProgram, scheduled
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.peer_groups import PeerGroups
from tests.api.test_join_sums import flats
from tests.api.test_weight_casts import assert_same, compiled
from tests.partition.test_small_sums import Stack, one_rank
from tests.runtime.test_executor import given
from tests.sums import sums_apart

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def on_gpu(program: shardc.Program) -> tuple[dict[str, torch.Tensor], list[Any]]:
    held, fed = given(program)
    return {n: x.to(CUDA) for n, x in held.items()}, [{n: x.to(CUDA) for n, x in feed.items()} for feed in fed]


def stepped(program: shardc.Program) -> dict[str, torch.Tensor]:
    """What two steps of one rank give: the second launches compiled kernels."""
    body = program.body
    code = BodyCode(body, rank_context(body.mesh, 0, None), 0, CUDA)  # type: ignore[arg-type]
    held, fed = on_gpu(program)
    found: dict[str, torch.Tensor] = {}
    for _ in range(2):
        outputs = code.run(held, fed)
        held |= {port.name: value for port, value in outputs.items() if port.role in ("param", "state", "buffer")}
        found = {f"{port.role} {port.name}": value.clone() for port, value in outputs.items()}
    return found


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_the_same_bits(precision: str | None, fuse: bool) -> None:
    with sums_apart():
        before = compiled("alone", precision=precision, fuse=fuse)
    program = compiled("alone", precision=precision, fuse=fuse)
    assert flats(program.body)
    assert_same(stepped(program), stepped(before))


@pytest.mark.parametrize("more", [{}, {"precision": "bf16"}], ids=str)
def test_parts_of_stages(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    program, lists = one_rank(Stack(), (torch.randn(8, 8),), ["layers.2"], "bfs", **more)
    with sums_apart():
        before = ran(program, scheduled(cut(program.body, split=["layers.2"]), "bfs", 2))
    assert_same(ran(program, lists), before)


def ran(program: shardc.Program, lists: StagedProgram) -> dict[str, torch.Tensor]:
    links = PeerGroups((0,), lambda _: None, CUDA, timedelta(seconds=1))
    context = rank_context(lists.body.mesh, 0, None)  # type: ignore[arg-type]
    held, fed = on_gpu(program)
    outputs = Executor(lists, 0, context, 0, links).run(held, fed)
    return {f"{port.role} {port.name}": value.clone() for port, value in outputs.items()}
