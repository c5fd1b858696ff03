"""AdamW as one call on a GPU, in programs without kernels: three steps as PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.ops.adamw import ADAMW
from tests.ports import free_port

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_are_those_of_eager_pytorch(decay: float, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
        monkeypatch.setenv(key, value)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    plan = {"mesh": "dp=1", "fuse": False}
    program = shardc.compile(model, x, plan=plan, loss=lambda y, _: y.square().mean(), optimizer=optimizer)
    assert len(program.body.calls_of(ADAMW)) == 4
    with program.launch(device="cuda", timeout=60, graphs=graphs) as trainer:
        losses = [float(trainer.step(x.cuda()).loss) for _ in range(6)]
        ours = {name: value.cpu() for name, value in trainer.state_dict(("param",)).items()}
    for loss in losses:
        expected = model(x).square().mean()
        assert loss == pytest.approx(float(expected), rel=1e-4)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-3, atol=1e-5)
