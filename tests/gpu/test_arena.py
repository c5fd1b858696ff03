"""Steps on a GPU with kernel results in an arena: the same numbers as with allocated results."""

import pytest
import torch
from torch import Tensor

import shardc
from examples.gpt2 import gpt2
from kernels_triton.generated.prepared_call import PreparedKernelCall
from shardc.ir.arena import planned
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_code import BodyCode
from shardc.runtime.execute.instructions import rank_context

pytestmark = pytest.mark.gpu


def test_a_step_in_an_arena_is_one_without() -> None:
    """Three steps, on two streams; but for attention's backward and embeddings, which add in any order."""
    torch.manual_seed(0)
    model, batch = gpt2(batch=8, seq=128, layers=2, vocab=512, heads=4, width=256)
    model = model.to(torch.bfloat16)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = shardc.compile(model, batch, mesh="dp=1", plan={"fuse": True}, optimizer=mine)
    device = torch.device("cuda", torch.cuda.current_device())
    plan = planned(program.body, 1 << 40)
    assert len(plan.slots) > 80
    found: list[list[float]] = []
    for arena in (None, Arena({program.body: plan}, device)):
        context = rank_context(program.mesh, 0, None)  # type: ignore[arg-type]
        executor = BodyCode(program.body, context, 0, device, arena)
        held: dict[str, Tensor] = {name: x.to(device) for name, x in program.inputs().items()}
        losses: list[float] = []
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                made = executor.run(held, [held])
                held |= {port.name: y for port, y in made.items() if port.role in ("param", "state")}
                losses.append(float(next(y for port, y in made.items() if port.role == "loss")))
            torch.cuda.current_stream().wait_stream(stream)
        calls = [call for _, call, *_ in executor._first_microbatch if isinstance(call, PreparedKernelCall)]
        assert sum(call.ready is not None for call in calls) > 20
        found.append(losses)
    plain, placed = found
    assert placed[0] == plain[0]
    assert placed == pytest.approx(plain, rel=2e-3)
